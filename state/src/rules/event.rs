//! What people and watchers are told.

use crate::name::{PluginName, PodUid};

/// As the protocol's EventKind, those that the rules cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    Registered,
    Renewed,
    HolderLost,
    Released,
    Expired,
    Revoked,
    Pinned,
    Unpinned,
    Banned,
    Unbanned,
    Paused,
    Resumed,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub kind: EventKind,
    pub plugin: Option<PluginName>,
    pub pid: Option<u32>,
    pub pod_uid: Option<PodUid>,
    /// One line for people.
    pub message: String,
}
