//! The system calls no crate here wraps (or not without an allocation), and the clock. The only unsafe code of `presence`.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::time::{ClockId, clock_gettime};

/// A descriptor that becomes readable when the process has ended (all its threads).
pub(super) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    // SAFETY: pidfd_open(2) takes a pid and flags, no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    owned(fd)
}

/// A duplicate of descriptor `fd` of another process. Close it soon: it keeps the socket open.
pub(super) fn pidfd_getfd(pidfd: impl AsFd, fd: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_getfd(2) takes two descriptors and flags, no pointers.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_pidfd_getfd,
            pidfd.as_fd().as_raw_fd(),
            fd as libc::c_int,
            0,
        )
    };
    owned(fd)
}

/// The network namespace a socket lives in, which need not be that of any thread of its process.
pub(super) fn socket_netns(socket: impl AsFd) -> io::Result<OwnedFd> {
    /// linux/sockios.h; the libc crate has it for other systems only.
    const SIOCGSKNS: u32 = 0x894C;
    // SAFETY: SIOCGSKNS takes no argument and returns a new descriptor.
    let fd = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCGSKNS as _) };
    owned(libc::c_long::from(fd))
}

/// SO_DOMAIN of a socket (AF_UNIX, AF_INET, ...).
pub(super) fn socket_domain(socket: impl AsFd) -> io::Result<libc::c_int> {
    let mut domain: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: both pointers are to live locals, and `length` is the size of the first.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(domain)
}

/// readlinkat(2) into a small buffer: hooks do this for every connection. A longer target is cut.
pub(super) fn readlinkat<'a>(
    directory: impl AsFd,
    path: &CStr,
    buffer: &'a mut [u8],
) -> io::Result<&'a [u8]> {
    // SAFETY: the path ends with a NUL, and the kernel writes at most `buffer.len()` bytes.
    let length = unsafe {
        libc::readlinkat(
            directory.as_fd().as_raw_fd(),
            path.as_ptr(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
        )
    };
    match usize::try_from(length) {
        Ok(length) => Ok(&buffer[..length.min(buffer.len())]),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor to us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Whether a pidfd says that its process has ended.
pub(super) fn has_ended(pidfd: impl AsFd) -> bool {
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(n) if n > 0)
}

/// CLOCK_BOOTTIME in nanoseconds, for what is shown to people and to the lease rules.
pub fn boottime_ns() -> u64 {
    match clock_gettime(ClockId::CLOCK_BOOTTIME) {
        Ok(t) => (t.tv_sec() as u64).saturating_mul(1_000_000_000) + t.tv_nsec() as u64,
        Err(_) => 0,
    }
}
