//! Waits for a file descriptor that is not read or written: a pidfd, or stdout losing its reader.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::oneshot;

/// Returns when poll(2) reports one of `events`, or an error or hang-up, on the descriptor.
///
/// A thread waits, because registering a foreign descriptor with the reactor takes unsafe code.
/// There is at most one of them in a command, and it ends with the process.
pub async fn ready(fd: OwnedFd, events: PollFlags) {
    let (done, reported) = oneshot::channel();
    let thread = std::thread::Builder::new().name("poll".to_string());
    let started = thread.spawn(move || {
        let mut polled = [PollFd::new(fd.as_fd(), events)];
        while let Err(Errno::EINTR) = poll(&mut polled, PollTimeout::NONE) {}
        // Nobody may be waiting any more.
        let _ = done.send(());
    });
    match started {
        Ok(_) => {
            let _ = reported.await;
        }
        // Without a thread there is nothing that could be noticed.
        Err(_) => std::future::pending().await,
    }
}
