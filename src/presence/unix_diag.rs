//! Asks the kernel about one unix socket: NETLINK_SOCK_DIAG, exact query by inode and cookie.
//!
//! A query never dumps, so its answer fits a small fixed buffer, and the kernel has queued it by
//! the time send(2) returns: nothing here waits. Layouts are from linux/netlink.h,
//! linux/sock_diag.h and linux/unix_diag.h. A diag socket sees the unix sockets of the network
//! namespace it was opened in, and no others.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};
use serde::{Deserialize, Serialize};

/// A socket file as unix_diag encodes it: the kernel's own dev_t and the low 32 bits of the
/// inode. Only to be compared with another answer of unix_diag, never with stat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VfsId {
    pub dev: u32,
    pub ino: u32,
}

/// What the kernel says about one unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnixSocket {
    /// SOCK_STREAM (1), SOCK_DGRAM (2) or SOCK_SEQPACKET (5).
    pub kind: u8,
    /// As TCP's states: 1 connected, 7 not connected, 10 listening.
    pub state: u8,
    pub inode: u64,
    /// Unique over the life of the kernel, unlike the inode.
    pub cookie: u64,
    /// `None`: no peer at all. `Some(0)`: the peer has no inode, because it is not accepted yet
    /// (`shutdown` 0) or is closed (`shutdown` 3).
    pub peer: Option<u64>,
    /// Bit 0: the peer will send no more; bit 1: it will not read any more.
    pub shutdown: u8,
    /// The file this end is bound to. An accepted end has that of its listening socket.
    pub vfs: Option<VfsId>,
    /// The address this end is bound to, as the binder wrote it; at most 108 bytes.
    pub name: Option<Vec<u8>>,
}

impl UnixSocket {
    pub fn is_stream(&self) -> bool {
        self.kind == libc::SOCK_STREAM as u8
    }

    /// Connected, accepted by the other side, and closed by neither.
    pub fn is_open(&self) -> bool {
        self.state == ESTABLISHED && self.shutdown == 0 && self.peer.is_some_and(|peer| peer != 0)
    }

    /// Connected, and still in the accept queue of the listening side.
    pub fn is_pending(&self) -> bool {
        self.state == ESTABLISHED && self.shutdown == 0 && self.peer == Some(0)
    }
}

const ESTABLISHED: u8 = 1;

/// How much to ask for. The peer and the shutdown bits always come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    Peer,
    PeerAndName,
}

/// Why a query failed. A socket that is gone is no failure.
#[derive(Debug, thiserror::Error)]
pub enum DiagError {
    #[error("opening a sock_diag socket: {0}")]
    Open(Errno),
    #[error("asking sock_diag: {0}")]
    Query(Errno),
    #[error("the kernel has no unix_diag ({0})")]
    Unsupported(Errno),
    #[error("the kernel's sock_diag answer is malformed: {0}")]
    Malformed(&'static str),
}

/// A netlink socket for unix_diag queries. One query at a time.
#[derive(Debug)]
pub struct DiagSocket {
    fd: OwnedFd,
    sequence: u32,
}

const HEADER: usize = 16;
const REQUEST: usize = HEADER + 24;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const UDIAG_SHOW_NAME: u32 = 0x1;
const UDIAG_SHOW_VFS: u32 = 0x2;
const UDIAG_SHOW_PEER: u32 = 0x4;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_VFS: u16 = 1;
const UNIX_DIAG_PEER: u16 = 2;
const UNIX_DIAG_SHUTDOWN: u16 = 6;
const ANY_COOKIE: u64 = u64::MAX;

impl DiagSocket {
    /// Opens it in the calling thread's network namespace.
    pub fn open() -> Result<Self, DiagError> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkSockDiag,
        )
        .map_err(DiagError::Open)?;
        Ok(Self { fd, sequence: 0 })
    }

    /// The socket with this inode, and this cookie if one is given; `None` when this namespace
    /// has no such socket (any more). Inodes over 32 bits do not exist in sockfs and are `None`.
    pub fn query(
        &mut self,
        inode: u64,
        cookie: Option<u64>,
        detail: Detail,
    ) -> Result<Option<UnixSocket>, DiagError> {
        let Ok(inode) = u32::try_from(inode) else {
            return Ok(None);
        };
        self.sequence = self.sequence.wrapping_add(1);
        let show = match detail {
            Detail::Peer => UDIAG_SHOW_PEER,
            Detail::PeerAndName => UDIAG_SHOW_PEER | UDIAG_SHOW_NAME | UDIAG_SHOW_VFS,
        };
        let request = pack(self.sequence, inode, cookie.unwrap_or(ANY_COOKIE), show);
        send(self.fd.as_raw_fd(), &request, MsgFlags::MSG_DONTWAIT).map_err(DiagError::Query)?;

        // Largest answer: header 16, message 16, name 4 + 108, four short attributes.
        let mut buffer = [0u8; 512];
        // An answer to an earlier query that was not read is skipped; more than a few is a fault.
        for _ in 0..8 {
            let length = recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT)
                .map_err(DiagError::Query)?;
            if let Some(answer) = parse(&buffer[..length.min(buffer.len())], self.sequence)? {
                return match answer {
                    Answer::Socket(socket) => Ok(Some(socket)),
                    Answer::Error(Errno::ENOENT | Errno::ESTALE) => Ok(None),
                    Answer::Error(e @ (Errno::EOPNOTSUPP | Errno::EINVAL)) => {
                        Err(DiagError::Unsupported(e))
                    }
                    Answer::Error(e) => Err(DiagError::Query(e)),
                };
            }
        }
        Err(DiagError::Malformed("no answer to this query"))
    }
}

/// Whether unix_diag works here. The kernel answers ENOENT both for a socket that is gone and for
/// a family it has no module for, so this asks about a socket that certainly exists.
pub fn probe() -> Result<(), DiagError> {
    let (one, _other) = std::os::unix::net::UnixStream::pair()
        .map_err(|e| DiagError::Open(Errno::from_raw(e.raw_os_error().unwrap_or(0))))?;
    let inode = nix::sys::stat::fstat(&one).map_err(DiagError::Open)?.st_ino;
    match DiagSocket::open()?.query(inode, None, Detail::Peer)? {
        Some(socket) if socket.is_open() => Ok(()),
        Some(_) => Err(DiagError::Malformed("an open socket pair is not open")),
        None => Err(DiagError::Unsupported(Errno::ENOENT)),
    }
}

fn pack(sequence: u32, inode: u32, cookie: u64, show: u32) -> [u8; REQUEST] {
    let mut m = [0u8; REQUEST];
    // struct nlmsghdr
    m[0..4].copy_from_slice(&(REQUEST as u32).to_ne_bytes());
    m[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    m[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    m[8..12].copy_from_slice(&sequence.to_ne_bytes());
    // struct unix_diag_req
    m[16] = libc::AF_UNIX as u8;
    m[20..24].copy_from_slice(&u32::MAX.to_ne_bytes()); // all states
    m[24..28].copy_from_slice(&inode.to_ne_bytes());
    m[28..32].copy_from_slice(&show.to_ne_bytes());
    m[32..36].copy_from_slice(&(cookie as u32).to_ne_bytes());
    m[36..40].copy_from_slice(&((cookie >> 32) as u32).to_ne_bytes());
    m
}

#[derive(Debug, PartialEq)]
enum Answer {
    Socket(UnixSocket),
    Error(Errno),
}

/// One datagram of the kernel; `None` when it answers another query.
fn parse(message: &[u8], sequence: u32) -> Result<Option<Answer>, DiagError> {
    let length = u32_at(message, 0)? as usize;
    if length < HEADER || length > message.len() {
        return Err(DiagError::Malformed("length"));
    }
    if u32_at(message, 8)? != sequence {
        return Ok(None);
    }
    let body = &message[HEADER..length];
    match u16_at(message, 4)? {
        NLMSG_ERROR => {
            let code = u32_at(body, 0)? as i32;
            Ok(Some(Answer::Error(Errno::from_raw(code.saturating_neg()))))
        }
        SOCK_DIAG_BY_FAMILY => parse_socket(body).map(|s| Some(Answer::Socket(s))),
        _ => Err(DiagError::Malformed("message type")),
    }
}

/// struct unix_diag_msg and its attributes.
fn parse_socket(body: &[u8]) -> Result<UnixSocket, DiagError> {
    let head = body.get(..16).ok_or(DiagError::Malformed("too short"))?;
    let mut socket = UnixSocket {
        kind: head[1],
        state: head[2],
        inode: u64::from(u32_at(head, 4)?),
        cookie: u64::from(u32_at(head, 8)?) | u64::from(u32_at(head, 12)?) << 32,
        peer: None,
        shutdown: 0,
        vfs: None,
        name: None,
    };
    let mut rest = &body[16..];
    while rest.len() >= 4 {
        let length = u16_at(rest, 0)? as usize;
        let value = rest
            .get(4..length)
            .ok_or(DiagError::Malformed("attribute length"))?;
        match u16_at(rest, 2)? {
            UNIX_DIAG_NAME => socket.name = Some(value.to_vec()),
            UNIX_DIAG_VFS => {
                socket.vfs = Some(VfsId {
                    ino: u32_at(value, 0)?,
                    dev: u32_at(value, 4)?,
                });
            }
            UNIX_DIAG_PEER => socket.peer = Some(u64::from(u32_at(value, 0)?)),
            UNIX_DIAG_SHUTDOWN => {
                socket.shutdown = *value.first().ok_or(DiagError::Malformed("shutdown"))?;
            }
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(socket)
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, DiagError> {
    let field = bytes.get(at..at + 2).and_then(|b| b.try_into().ok());
    field
        .map(u16::from_ne_bytes)
        .ok_or(DiagError::Malformed("too short"))
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, DiagError> {
    let field = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    field
        .map(u32::from_ne_bytes)
        .ok_or(DiagError::Malformed("too short"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    fn inode(fd: impl AsFd) -> u64 {
        nix::sys::stat::fstat(fd).unwrap().st_ino
    }

    #[test]
    fn a_connection_is_pending_then_open_then_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let mut diag = DiagSocket::open().unwrap();
        let mut ask = |detail| diag.query(inode(&client), None, detail).unwrap().unwrap();

        assert!(ask(Detail::Peer).is_pending());
        let (server, _) = listener.accept().unwrap();
        let open = ask(Detail::PeerAndName);
        assert!(open.is_open() && !open.is_pending() && open.is_stream());
        assert_eq!(open.peer, Some(inode(&server)));
        assert_eq!(open.vfs, None);

        let mut far = DiagSocket::open().unwrap();
        let peer = far
            .query(inode(&server), None, Detail::PeerAndName)
            .unwrap()
            .unwrap();
        let listening = far
            .query(inode(&listener), None, Detail::PeerAndName)
            .unwrap()
            .unwrap();
        assert!(peer.vfs.is_some());
        assert_eq!(peer.vfs, listening.vfs);
        let name = peer.name.unwrap();
        assert_eq!(
            name.strip_suffix(&[0]).unwrap_or(&name),
            path.as_os_str().as_encoded_bytes()
        );

        drop(server);
        let closed = ask(Detail::Peer);
        assert_eq!((closed.peer, closed.shutdown), (Some(0), 3));
        assert!(!closed.is_open() && !closed.is_pending());
    }

    #[test]
    fn another_cookie_is_another_socket() {
        let (one, _two) = UnixStream::pair().unwrap();
        let mut diag = DiagSocket::open().unwrap();
        let seen = diag
            .query(inode(&one), None, Detail::Peer)
            .unwrap()
            .unwrap();
        let mut ask = |cookie| diag.query(inode(&one), Some(cookie), Detail::Peer).unwrap();
        assert!(ask(seen.cookie).is_some());
        assert!(ask(seen.cookie + 1).is_none());
    }

    #[test]
    fn a_socket_that_is_gone_is_no_error() {
        let (one, two) = UnixStream::pair().unwrap();
        let gone = inode(&one);
        drop((one, two));
        let mut diag = DiagSocket::open().unwrap();
        assert!(diag.query(gone, None, Detail::Peer).unwrap().is_none());
        assert!(diag.query(u64::MAX, None, Detail::Peer).unwrap().is_none());
    }

    #[test]
    fn this_kernel_has_unix_diag() {
        probe().unwrap();
    }

    #[test]
    fn damaged_answers_are_errors_and_never_panic() {
        let mut good = vec![0u8; 16 + 16];
        good[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        good[8] = 1;
        good[17] = 1;
        good.extend([8, 0, 2, 0, 9, 0, 0, 0]); // peer
        good.extend([5, 0, 6, 0, 3, 0, 0, 0]); // shutdown
        let length = good.len() as u32;
        good[0..4].copy_from_slice(&length.to_ne_bytes());
        let Some(Answer::Socket(socket)) = parse(&good, 1).unwrap() else {
            panic!("not a socket");
        };
        assert_eq!((socket.peer, socket.shutdown), (Some(9), 3));
        assert!(parse(&good, 2).unwrap().is_none());

        for cut in 0..good.len() {
            let _ = parse(&good[..cut], 1);
        }
        for at in 0..good.len() {
            for value in [0, 1, 3, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                let _ = parse(&bad, 1);
            }
        }
    }
}
