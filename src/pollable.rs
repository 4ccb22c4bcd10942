//! Lets tokio wait for nix's descriptors, which implement `AsFd` only.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use tokio::io::unix::AsyncFd;

/// A descriptor that is owned for as long as tokio knows it.
#[derive(Debug)]
pub struct Pollable<T>(pub T);

impl<T: AsFd> AsRawFd for Pollable<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Registers `inner`, a timerfd or inotify descriptor of this process, with tokio.
#[allow(unsafe_code)]
pub fn watched<T: AsFd>(inner: T) -> io::Result<AsyncFd<Pollable<T>>> {
    // SAFETY: `inner` owns its descriptor and gives the same one for all its life; the AsyncFd
    // owns `inner` and deregisters before it drops it.
    Ok(unsafe { AsyncFd::register(Pollable(inner)) }?)
}
