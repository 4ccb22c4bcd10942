//! The fence: a connection to a runtime's NRI socket that says nothing and is closed as soon as
//! it is accepted.
//!
//! The runtime accepts one connection at a time, and the next only after the one before is
//! synchronised and in its plugin list (NRI 0.6 to 0.12, `acceptPluginConnections`). So whatever
//! was accepted before the fence was opened is in the list once the fence is accepted. The kernel
//! tells when that is; nothing is read or written. The runtime logs one line and goes on within
//! 0.15 ms (measured, containerd 2.3.4).

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::sys::stat::fstat;

use super::netns::{Asker, Netns};
use super::unix_diag::{Detail, DiagError, VfsId};

/// The first pause between two looks, and the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Why a fence proves nothing.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    #[error("connecting: {0}")]
    Connect(Errno),
    #[error("the runtime closed its socket")]
    Closed,
    #[error("not accepted in time")]
    Deadline,
    #[error(transparent)]
    Diag(#[from] DiagError),
}

/// What a passed fence shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The file of the runtime's listening socket, as the kernel encodes it.
    pub listener: VfsId,
    /// The process that listens, if it is visible from here.
    pub runtime_pid: Option<u32>,
}

/// A fence on its way. Dropping it closes it.
#[derive(Debug)]
pub struct Fence {
    socket: OwnedFd,
    address: UnixAddr,
    inode: u64,
    /// The daemon's own namespace: the fence was made there.
    netns: Arc<Netns>,
    connected: bool,
    pause: Duration,
    deadline: Instant,
}

impl Fence {
    /// Opens it. `deadline` bounds the whole wait, from now.
    pub fn open(path: &Path, netns: Arc<Netns>, deadline: Duration) -> Result<Self, FenceError> {
        let address = UnixAddr::new(path).map_err(FenceError::Connect)?;
        let socket = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .map_err(FenceError::Connect)?;
        let inode = fstat(&socket).map_err(FenceError::Connect)?.st_ino;
        let mut fence = Self {
            socket,
            address,
            inode,
            netns,
            connected: false,
            pause: FIRST_PAUSE,
            deadline: Instant::now() + deadline,
        };
        fence.connect()?;
        Ok(fence)
    }

    fn connect(&mut self) -> Result<(), FenceError> {
        match connect(self.socket.as_raw_fd(), &self.address) {
            Ok(()) => self.connected = true,
            // The accept queue is full; try again with the next look.
            Err(Errno::EAGAIN) => {}
            Err(error) => return Err(FenceError::Connect(error)),
        }
        Ok(())
    }

    /// Looks once: `None` while it is not accepted.
    pub fn look(&mut self, asker: Asker) -> Result<Option<Passed>, FenceError> {
        if !self.connected {
            self.connect()?;
        }
        if self.connected
            && let Some(passed) = self.look_at_peer(asker)?
        {
            return Ok(Some(passed));
        }
        if Instant::now() >= self.deadline {
            return Err(FenceError::Deadline);
        }
        Ok(None)
    }

    fn look_at_peer(&mut self, asker: Asker) -> Result<Option<Passed>, FenceError> {
        let own = self
            .netns
            .query(asker, self.inode, None, Detail::Peer)?
            .ok_or(FenceError::Closed)?;
        if own.is_pending() {
            return Ok(None);
        }
        // Closed could mean accepted and closed at once, or never accepted: it proves nothing.
        let peer = own
            .peer
            .filter(|_| own.is_open())
            .ok_or(FenceError::Closed)?;
        let peer = self
            .netns
            .query(asker, peer, None, Detail::PeerAndName)?
            .ok_or(FenceError::Closed)?;
        let listener = peer.vfs.ok_or(FenceError::Closed)?;
        let credentials = getsockopt(&self.socket, sockopt::PeerCredentials);
        let runtime_pid = credentials
            .ok()
            .and_then(|c| u32::try_from(c.pid()).ok())
            .filter(|pid| *pid != 0);
        Ok(Some(Passed {
            listener,
            runtime_pid,
        }))
    }

    /// How long to pause before the next look: 0.2 ms at first, up to 5 ms.
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 3 / 2).min(LONGEST_PAUSE);
        pause.min(self.deadline.saturating_duration_since(Instant::now()))
    }

    /// Waits until it is accepted, or the deadline. Blocks the thread.
    pub fn wait(&mut self, asker: Asker) -> Result<Passed, FenceError> {
        loop {
            if let Some(passed) = self.look(asker)? {
                return Ok(passed);
            }
            // A look costs some 20 µs; in hooks every 0.2 ms counts.
            std::thread::sleep(self.next_pause().min(match asker {
                Asker::Hook => FIRST_PAUSE,
                Asker::Tracker => LONGEST_PAUSE,
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::netns::NetnsCache;
    use super::*;
    use std::os::unix::net::UnixListener;

    const LONG: Duration = Duration::from_secs(10);

    fn own_netns() -> Arc<Netns> {
        NetnsCache::new().unwrap().own().clone()
    }

    #[test]
    fn it_passes_when_accepted_and_says_who_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let mut fence = Fence::open(&path, own_netns(), LONG).unwrap();
        assert_eq!(fence.look(Asker::Tracker).unwrap(), None);
        let _accepted = listener.accept().unwrap();
        let passed = fence.wait(Asker::Hook).unwrap();
        assert_eq!(passed.runtime_pid, Some(std::process::id()));
    }

    #[test]
    fn it_fails_when_the_listener_goes_away_before_accepting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let mut fence = Fence::open(&path, own_netns(), LONG).unwrap();
        drop(listener);
        let failed = fence.wait(Asker::Tracker);
        assert!(matches!(failed, Err(FenceError::Closed)), "{failed:?}");
        let refused = Fence::open(&path, own_netns(), LONG);
        assert!(matches!(
            refused,
            Err(FenceError::Connect(Errno::ECONNREFUSED))
        ));
    }

    #[test]
    fn it_gives_up_at_its_deadline_even_when_the_queue_is_full() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let netns = own_netns();
        let mut queue = Vec::new();
        // The standard library's backlog is large; stop at the first that does not get in.
        for _ in 0..8192 {
            let fence = Fence::open(&path, netns.clone(), Duration::from_millis(20)).unwrap();
            let is_in = fence.connected;
            queue.push(fence);
            if !is_in || queue.len() > 500 {
                break;
            }
        }
        let last = queue.last_mut().unwrap();
        assert!(matches!(
            last.wait(Asker::Tracker),
            Err(FenceError::Deadline)
        ));
    }
}
