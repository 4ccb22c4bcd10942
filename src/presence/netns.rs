//! Diag sockets inside the network namespaces that holders' sockets live in.
//!
//! A unix connection belongs to the network namespace of the thread that made the connecting
//! socket, and unix_diag sees only its own namespace. So a short-lived thread enters the
//! namespace, opens the netlink sockets, which stay bound to it, and ends. A namespace lives as
//! long as our sockets in it, so they are shared, and dropped with the last connection that
//! needs them.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use nix::sched::{CloneFlags, setns};
use nix::sys::stat::fstat;

use super::unix_diag::{Detail, DiagError, DiagSocket, UnixSocket};

/// Namespaces that may be open at once. A lease has at most 16 holders and there are 256 leases.
const MAX_OPEN: usize = 4096;

/// Why a namespace cannot be looked into.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    #[error("reading network namespace: {0}")]
    Read(#[source] io::Error),
    #[error("entering network namespace {inode}: {source} (CAP_SYS_ADMIN is needed)")]
    Enter { inode: u64, source: io::Error },
    #[error(transparent)]
    Diag(#[from] DiagError),
    #[error("{MAX_OPEN} network namespaces are open already")]
    TooMany,
}

/// Two diag sockets in one network namespace: one for the tracker, one for hooks, so that a hook
/// does not wait for a tracker that was descheduled in the middle of a query.
#[derive(Debug)]
pub struct Netns {
    pub inode: u64,
    tracker: Mutex<DiagSocket>,
    hook: Mutex<DiagSocket>,
}

/// Which of the two sockets of a [`Netns`] to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    Tracker,
    Hook,
}

impl Netns {
    fn open_here(inode: u64) -> Result<Self, DiagError> {
        Ok(Self {
            inode,
            tracker: Mutex::new(DiagSocket::open()?),
            hook: Mutex::new(DiagSocket::open()?),
        })
    }

    /// See [`DiagSocket::query`].
    pub fn query(
        &self,
        asker: Asker,
        inode: u64,
        cookie: Option<u64>,
        detail: Detail,
    ) -> Result<Option<UnixSocket>, DiagError> {
        let (first, second) = match asker {
            Asker::Tracker => (&self.tracker, &self.hook),
            Asker::Hook => (&self.hook, &self.tracker),
        };
        // A query leaves nothing half done behind, so a poisoned lock is as good as any.
        let mut socket: MutexGuard<'_, DiagSocket> = match first.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => match asker {
                Asker::Hook => second.try_lock().unwrap_or_else(|_| relock(first)),
                Asker::Tracker => relock(first),
            },
        };
        socket.query(inode, cookie, detail)
    }
}

fn relock(mutex: &Mutex<DiagSocket>) -> MutexGuard<'_, DiagSocket> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The open namespaces, by inode.
#[derive(Debug)]
pub struct NetnsCache {
    own: Arc<Netns>,
    open: Mutex<HashMap<u64, Weak<Netns>>>,
}

impl NetnsCache {
    /// Starts with the caller's own namespace, which stays open.
    pub fn new() -> Result<Self, NetnsError> {
        let file = File::open("/proc/thread-self/ns/net").map_err(NetnsError::Read)?;
        let inode = inode_of(&file)?;
        Ok(Self {
            own: Arc::new(Netns::open_here(inode)?),
            open: Mutex::new(HashMap::new()),
        })
    }

    /// The daemon's own namespace, in which its fences live.
    pub fn own(&self) -> &Arc<Netns> {
        &self.own
    }

    /// The namespace with this inode, if it is open.
    pub fn get(&self, inode: u64) -> Option<Arc<Netns>> {
        if inode == self.own.inode {
            return Some(self.own.clone());
        }
        self.lock().get(&inode)?.upgrade()
    }

    /// Opens the namespace that `namespace` (a /proc/PID/ns/net or an SIOCGSKNS descriptor)
    /// refers to. Costs a thread when it is not open already, some 50 µs.
    pub fn open(&self, namespace: OwnedFd) -> Result<Arc<Netns>, NetnsError> {
        let inode = inode_of(&namespace)?;
        if let Some(netns) = self.get(inode) {
            return Ok(netns);
        }
        {
            let mut open = self.lock();
            open.retain(|_, netns| netns.strong_count() > 0);
            if open.len() >= MAX_OPEN {
                return Err(NetnsError::TooMany);
            }
        }
        // setns(2) moves one thread for good, so that thread does nothing else.
        let entered = std::thread::Builder::new()
            .name("netns".into())
            .stack_size(64 * 1024)
            .spawn(move || {
                setns(&namespace, CloneFlags::CLONE_NEWNET).map_err(|e| NetnsError::Enter {
                    inode,
                    source: e.into(),
                })?;
                Ok(Arc::new(Netns::open_here(inode)?))
            })
            .map_err(|source| NetnsError::Enter { inode, source })?
            .join();
        let netns = entered.unwrap_or_else(|_| {
            Err(NetnsError::Enter {
                inode,
                source: io::Error::other("the thread panicked"),
            })
        })?;
        self.lock().insert(inode, Arc::downgrade(&netns));
        Ok(netns)
    }

    /// Namespaces other than our own that something still uses.
    pub fn open_count(&self) -> usize {
        let open = self.lock();
        open.values().filter(|n| n.strong_count() > 0).count()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Weak<Netns>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn inode_of(namespace: impl AsFd) -> Result<u64, NetnsError> {
    let stat = fstat(namespace).map_err(|e| NetnsError::Read(e.into()))?;
    Ok(stat.st_ino)
}
