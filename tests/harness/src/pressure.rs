//! What a test puts a daemon under: a small disk, a pipe that nobody reads; and the clock that
//! records use.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::mount::{MsFlags, mount};
use nix::time::{ClockId, clock_gettime};

/// A tmpfs at a directory, e.g. with `size=8m`. Gone with the scratch directory that it is in.
pub fn mount_tmpfs(dir: &Path, options: &str) -> Result<()> {
    crate::gobin::need_root()?;
    mount(
        Some("tmpfs"),
        dir,
        Some("tmpfs"),
        MsFlags::empty(),
        Some(options),
    )
    .with_context(|| format!("mounting a tmpfs at {}", dir.display()))
}

/// Writes into a pipe until it takes no more; then makes it blocking again.
pub fn fill_pipe(pipe: impl AsFd) -> Result<()> {
    let flags = OFlag::from_bits_truncate(fcntl(&pipe, FcntlArg::F_GETFL)?);
    fcntl(&pipe, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    let filler = [b'\n'; 4096];
    let filled = loop {
        match nix::unistd::write(&pipe, &filler) {
            Ok(_) => {}
            Err(Errno::EAGAIN) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    fcntl(&pipe, FcntlArg::F_SETFL(flags))?;
    Ok(filled?)
}

/// CLOCK_BOOTTIME.
pub fn boottime() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.into())
}
