//! When a connection counts: the rules of one connection and of one process, as pure code.
use super::tracker::RuntimeId;

/// The evidence for one holder and one runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The process lives and all its bound connections to the runtime are open.
    Bound,
    /// No connection to this runtime was ever seen.
    NeverConnected,
    /// A connection waits to be accepted (the kernel does not tell by whom).
    Pending,
    /// Accepted, but the runtime has not synchronised it yet, as far as is known.
    NotSynchronised,
    /// The runtime, or the process itself, has closed a bound connection.
    Broken,
    /// The process has ended.
    ProcessGone,
    /// The kernel could not be asked.
    Unknown { reason: String },
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    Pending,
    Accepted,
    Bound,
    Broken,
}

/// One connection of a process, for `inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// `None`: not yet known which runtime is at the other end.
    pub runtime: Option<RuntimeId>,
    pub inode: u64,
    pub netns_inode: u64,
    pub state: ConnectionState,
    /// CLOCK_BOOTTIME nanoseconds when it was first seen, and when it was bound.
    pub seen_boottime_ns: u64,
    pub bound_boottime_ns: Option<u64>,
    /// The runtime started the plugin itself (a socketpair, no listening socket).
    pub launched: bool,
}
