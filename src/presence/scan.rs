//! One look at a process: which of its sockets are unix connections, and who is at the far end.
//! Decides nothing; the tracker and the in-hook search do.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::binding::SocketId;
use super::netns::{Asker, Netns, NetnsCache};
use super::process::WatchedProcess;
use super::sys;
use super::unix_diag::{Detail, UnixSocket, VfsId};

/// A connection of the process that may be one to a runtime.
pub(super) struct Found {
    pub id: SocketId,
    pub far: Far,
    pub handle: Handle,
}

/// What asking the kernel about a known connection takes.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub netns: Arc<Netns>,
    /// The descriptor it was seen at; it may have moved.
    pub fd: u32,
    /// The inode of the other end; 0 while it is not accepted.
    pub peer: u64,
    /// The other end in the runtime's own descriptor table, once it is known.
    pub runtime_end: Option<RuntimeEnd>,
    /// CLOCK_BOOTTIME nanoseconds when it was last seen open; shared by all copies of the handle.
    pub open_at_ns: Arc<AtomicU64>,
}

/// Where the runtime holds its end of a connection.
///
/// Go closes a descriptor with close(2), but a child between fork and exec (containerd starts
/// shims all the time) holds a copy until it execs, and so long the kernel sees the socket open
/// on both sides. The runtime's own table tells at once.
#[derive(Clone, Debug)]
pub(super) struct RuntimeEnd {
    pub process: Arc<WatchedProcess>,
    pub fd: u32,
}

/// Who is at the other end, by the kernel's word alone.
pub(super) enum Far {
    Unaccepted,
    /// Accepted from a listening socket with this file; the name is as its binder wrote it.
    Listener {
        file: VfsId,
        name: Vec<u8>,
    },
    /// Neither end has a name: a socketpair.
    Unnamed,
}

/// What one scan found.
#[derive(Default)]
pub(super) struct Scan {
    pub found: Vec<Found>,
    /// Inodes of sockets that can never become a connection to a runtime.
    pub foreign: Vec<u64>,
}

enum Look {
    Connection(Far),
    Foreign,
    /// Not now, perhaps later: not connected yet, or just closed.
    Nothing,
}

/// Looks at every socket of the process, except those that `skip` says are known.
pub(super) fn scan(
    process: &WatchedProcess,
    cache: &NetnsCache,
    asker: Asker,
    skip: impl Fn(u64) -> bool,
) -> Scan {
    let mut scan = Scan::default();
    let mut seen = HashSet::new();
    let home = home_netns(process, cache);
    for (fd, inode) in process.sockets() {
        if skip(inode) || !seen.insert(inode) {
            continue;
        }
        let Some((netns, socket)) = locate(process, cache, home.as_ref(), asker, fd, inode) else {
            continue;
        };
        let Some(socket) = socket else {
            scan.foreign.push(inode);
            continue;
        };
        match look(&netns, asker, &socket) {
            Look::Connection(far) => scan.found.push(Found {
                id: SocketId {
                    inode,
                    cookie: socket.cookie,
                },
                far,
                handle: Handle {
                    netns,
                    fd,
                    peer: socket.peer.unwrap_or(0),
                    runtime_end: None,
                    open_at_ns: Arc::new(AtomicU64::new(sys::boottime_ns())),
                },
            }),
            Look::Foreign => scan.foreign.push(inode),
            Look::Nothing => {}
        }
    }
    scan
}

/// The namespace of the process, where nearly all its sockets are.
fn home_netns(process: &WatchedProcess, cache: &NetnsCache) -> Option<Arc<Netns>> {
    let known = process.netns_inode().ok().and_then(|i| cache.get(i));
    if known.is_some() {
        return known;
    }
    match cache.open(process.netns().ok()?) {
        Ok(netns) => Some(netns),
        Err(error) => {
            tracing::debug!(pid = process.key.pid, %error, "cannot look into a network namespace");
            None
        }
    }
}

/// Finds the socket in the namespace of its process, or else in its own. The outer `None` says
/// that it could not be looked at; the inner one that it is no unix socket.
fn locate(
    process: &WatchedProcess,
    cache: &NetnsCache,
    home: Option<&Arc<Netns>>,
    asker: Asker,
    fd: u32,
    inode: u64,
) -> Option<(Arc<Netns>, Option<UnixSocket>)> {
    if let Some(home) = home
        && let Some(socket) = home.query(asker, inode, None, Detail::PeerAndName).ok()?
    {
        return Some((home.clone(), Some(socket)));
    }
    // Inodes are unique over all namespaces, so this one is not unix or lives elsewhere. Only
    // then is it duplicated, for a moment, to ask it for its family and namespace.
    match process.netns_of_socket(fd, inode) {
        Ok(Some(namespace)) => {
            let netns = cache.open(namespace).ok()?;
            let socket = netns.query(asker, inode, None, Detail::PeerAndName).ok()?;
            Some((netns, Some(socket?)))
        }
        Ok(None) => Some((home?.clone(), None)),
        Err(error) => {
            tracing::debug!(pid = process.key.pid, fd, %error, "cannot look at a socket");
            None
        }
    }
}

fn look(netns: &Netns, asker: Asker, socket: &UnixSocket) -> Look {
    const LISTENING: u8 = 10;
    // An end with a name or file of its own is the accepting side of the process's own server.
    let is_server = socket.vfs.is_some() || socket.name.is_some();
    if !socket.is_stream() || is_server || socket.state == LISTENING {
        return Look::Foreign;
    }
    if socket.is_pending() {
        return Look::Connection(Far::Unaccepted);
    }
    let Some(peer) = socket.peer.filter(|_| socket.is_open()) else {
        return Look::Nothing;
    };
    // Both ends of a unix connection are in one namespace.
    match netns.query(asker, peer, None, Detail::PeerAndName) {
        Ok(Some(UnixSocket {
            vfs: Some(file),
            name,
            ..
        })) => Look::Connection(Far::Listener {
            file,
            name: name.unwrap_or_default(),
        }),
        Ok(Some(UnixSocket { name: None, .. })) => Look::Connection(Far::Unnamed),
        // An abstract name: NRI sockets are files.
        Ok(Some(_)) => Look::Foreign,
        Ok(None) | Err(_) => Look::Nothing,
    }
}

/// Whether a known connection is open still: the process has it, and the other side has it.
pub(super) fn is_open(
    process: &WatchedProcess,
    id: SocketId,
    handle: &Handle,
    asker: Asker,
) -> Result<bool, String> {
    let asked_at_ns = sys::boottime_ns();
    // Sharing the socket with a child or another process does not count as having it.
    if !process.holds(id.inode, handle.fd) {
        return Ok(false);
    }
    if let Some(end) = &handle.runtime_end
        && !end.process.holds(handle.peer, end.fd)
    {
        return Ok(false);
    }
    let answer = handle
        .netns
        .query(asker, id.inode, Some(id.cookie), Detail::Peer);
    match answer {
        Ok(socket) => {
            let open = socket.is_some_and(|s| s.is_open());
            if open {
                handle.open_at_ns.store(asked_at_ns, Ordering::Relaxed);
            }
            Ok(open)
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Whether the runtime has let go of its end, too: then it has marked the plugin as closed, and
/// drops it from its list at the end of the request under way or of the next one.
pub(super) fn is_released(handle: &Handle, asker: Asker) -> bool {
    if handle.peer == 0 {
        return true; // not known any more: from before a restart of the daemon
    }
    if let Some(end) = &handle.runtime_end
        && end.process.holds(handle.peer, end.fd)
    {
        return false;
    }
    let answer = handle.netns.query(asker, handle.peer, None, Detail::Peer);
    answer.is_ok_and(|socket| socket.is_none_or(|peer| !peer.is_open()))
}
