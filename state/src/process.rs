//! Who holds a lease, as the kernel and NRI's pod list tell: facts that are passed in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::name::PodUid;

/// A process on this node; the start time tells a reused pid apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessKey {
    /// In the host's pid namespace.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks since boot.
    pub start_time: u64,
}

/// The pod a process runs in. The uid comes from the cgroup at once; the rest is learnt from NRI's
/// pod list and can be unknown for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodIdentity {
    pub uid: PodUid,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// What the kernel attests about a process that registers, and what NRI's pod list adds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderFacts {
    pub process: ProcessKey,
    /// In the host's user namespace.
    pub uid: u32,
    #[serde(default)]
    pub cgroup: String,
    /// None: on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodIdentity>,
    /// The holder's own NRI connection, when it named it; None: all its connections count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_inode: Option<u64>,
    /// The process that registered it as its subject, when that was another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registered_by: Option<ProcessKey>,
    /// The process that the registration named as its subject: the holder itself, or an ancestor
    /// of it. While the holder has no NRI connection, a descendant of this one may take its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<ProcessKey>,
}
