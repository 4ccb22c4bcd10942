//! A handle on one process that no other process can take over: everything is read through a
//! descriptor of its /proc directory, which answers ESRCH once it has ended.

use std::ffi::CStr;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstatat};

use super::proc::{ProcError, ProcessKey, socket_inode, start_time_of};
use super::sys;

/// Descriptors looked at per process and scan.
const MAX_DESCRIPTORS: usize = 65_536;

/// A process that is watched.
#[derive(Debug)]
pub(super) struct WatchedProcess {
    pub key: ProcessKey,
    pidfd: OwnedFd,
    /// /proc/PID
    directory: OwnedFd,
}

impl WatchedProcess {
    /// `Gone` when the process has ended or its pid belongs to another one now.
    pub(super) fn open(key: ProcessKey) -> Result<Self, ProcError> {
        let gone = || ProcError::Gone { pid: key.pid };
        let path = format!("/proc/{}", key.pid);
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH) => gone(),
            _ => ProcError::Read {
                path: path.clone(),
                source,
            },
        };
        let pidfd = sys::pidfd_open(key.pid).map_err(failed)?;
        let directory = nix::fcntl::open(
            path.as_str(),
            OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| failed(e.into()))?;
        let process = Self {
            key,
            pidfd,
            directory,
        };
        // The pid may have been reused before, or between, the two opens: the start time is read
        // through the directory, and the pidfd must not have ended after that.
        let stat = process.read("stat").map_err(failed)?;
        if start_time_of(&stat) != Some(key.start_time) || process.has_ended() {
            return Err(gone());
        }
        Ok(process)
    }

    pub(super) fn has_ended(&self) -> bool {
        sys::has_ended(&self.pidfd)
    }

    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The inode of the socket at descriptor `fd`; `None` when there is none, or no process.
    ///
    /// By the link's text. stat(2) on the link would ask the file system of whatever is open
    /// there, and hang with it, if it is a network file system that hangs.
    pub(super) fn socket_at(&self, fd: u32) -> Option<u64> {
        let mut buffer = [0; 64];
        let link = sys::readlinkat(&self.directory, FdPath::new(fd).as_c_str(), &mut buffer);
        socket_inode(std::str::from_utf8(link.ok()?).ok()?)
    }

    /// All sockets in the descriptor table as (descriptor, inode), lowest descriptor first.
    pub(super) fn sockets(&self) -> Vec<(u32, u64)> {
        // By path: a reused pid only gives numbers that are then looked up through `directory`.
        let Ok(entries) = std::fs::read_dir(format!("/proc/{}/fd", self.key.pid)) else {
            return Vec::new();
        };
        let mut sockets: Vec<(u32, u64)> = entries
            .take(MAX_DESCRIPTORS)
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter_map(|fd| Some((fd, self.socket_at(fd)?)))
            .collect();
        sockets.sort_unstable();
        sockets
    }

    /// Whether the process still has this socket, normally at the descriptor it was seen at.
    pub(super) fn holds(&self, inode: u64, fd: u32) -> bool {
        self.socket_at(fd) == Some(inode) || self.sockets().iter().any(|(_, i)| *i == inode)
    }

    /// The network namespace of the process's first thread.
    pub(super) fn netns(&self) -> io::Result<OwnedFd> {
        Ok(openat(
            &self.directory,
            "ns/net",
            OFlag::O_RDONLY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?)
    }

    pub(super) fn netns_inode(&self) -> io::Result<u64> {
        Ok(fstatat(&self.directory, "ns/net", AtFlags::empty())?.st_ino)
    }

    /// The network namespace of the unix stream socket at `fd`; `None` if it is anything else.
    pub(super) fn netns_of_socket(&self, fd: u32, inode: u64) -> io::Result<Option<OwnedFd>> {
        let duplicate = sys::pidfd_getfd(&self.pidfd, fd)?;
        if nix::sys::stat::fstat(&duplicate)?.st_ino != inode {
            return Ok(None); // closed and reopened meanwhile
        }
        if sys::socket_domain(&duplicate)? != libc::AF_UNIX {
            return Ok(None);
        }
        sys::socket_netns(&duplicate).map(Some)
    }

    fn read(&self, file: &str) -> io::Result<String> {
        let fd = openat(
            &self.directory,
            file,
            OFlag::O_RDONLY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        let mut bytes = Vec::new();
        std::fs::File::from(fd)
            .take(64 * 1024)
            .read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// `fd/NUMBER` without an allocation: this is read in hooks.
struct FdPath {
    /// Filled from the end; the last byte stays 0.
    bytes: [u8; 16],
    start: usize,
}

impl FdPath {
    fn new(fd: u32) -> Self {
        let mut path = Self {
            bytes: [0; 16],
            start: 15,
        };
        let mut rest = fd;
        loop {
            path.push(b'0' + (rest % 10) as u8);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        for byte in *b"/df" {
            path.push(byte);
        }
        path
    }

    fn push(&mut self, byte: u8) {
        self.start -= 1; // 10 digits and 3 letters at most
        self.bytes[self.start] = byte;
    }

    fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes[self.start..]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptor_paths_are_spelled_right() {
        for fd in [0, 7, 10, 1024, u32::MAX] {
            assert_eq!(
                FdPath::new(fd).as_c_str().to_str().unwrap(),
                format!("fd/{fd}")
            );
        }
    }

    #[test]
    fn another_start_time_is_another_process() {
        let own = crate::presence::proc::key_of(std::process::id()).unwrap();
        assert!(!WatchedProcess::open(own).unwrap().has_ended());
        let reused = ProcessKey {
            start_time: own.start_time + 1,
            ..own
        };
        let opened = WatchedProcess::open(reused);
        assert!(matches!(opened, Err(ProcError::Gone { .. })));
    }

    #[test]
    fn a_closed_descriptor_is_not_held() {
        let process =
            WatchedProcess::open(crate::presence::proc::key_of(std::process::id()).unwrap())
                .unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let inode = nix::sys::stat::fstat(&socket).unwrap().st_ino;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&socket) as u32;
        assert_eq!(process.socket_at(fd), Some(inode));
        let moved = socket.try_clone().unwrap();
        drop(socket);
        assert!(process.holds(inode, fd), "found at its other descriptor");
        drop(moved);
        assert!(!process.holds(inode, fd));
    }
}
