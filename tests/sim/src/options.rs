//! What kind of runtime is played: its name, its NRI version, its time limits.

use std::time::Duration;

/// The NRI library a runtime is built with, as far as a plugin can tell the difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NriVersion {
    /// containerd 1.7 to 2.1: events up to 11, no validation, most events as `StateChange`.
    V0_8,
    /// containerd 2.2, CRI-O 1.34: validation, pod updates; most events still as `StateChange`.
    V0_11,
    /// containerd 2.3: an RPC per event, `StateChange` only for plugins that answer UNIMPLEMENTED.
    V0_12,
}

impl NriVersion {
    /// Bits of all events that this version knows; Configure fails for any other bit.
    pub fn valid_events(self) -> i32 {
        match self {
            NriVersion::V0_8 => (1 << 11) - 1,
            NriVersion::V0_11 | NriVersion::V0_12 => (1 << 14) - 1,
        }
    }

    /// What the runtime says of itself in Configure; empty before 0.12.
    pub fn announced(self) -> &'static str {
        match self {
            NriVersion::V0_8 | NriVersion::V0_11 => "",
            NriVersion::V0_12 => "v0.12.0",
        }
    }

    pub(crate) fn has_validation(self) -> bool {
        self != NriVersion::V0_8
    }

    pub(crate) fn has_event_rpcs(self) -> bool {
        self == NriVersion::V0_12
    }

    /// 0.8 and 0.11 only refuse an empty name.
    pub(crate) fn checks_name_characters(self) -> bool {
        self == NriVersion::V0_12
    }
}

/// Whether requests in progress hold up the synchronisation of a plugin that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncBlock {
    /// containerd ≥ 2.0.3 and ≥ 1.7.26: a request blocks it from begin to end, a StopContainer
    /// through its whole grace period; and new requests wait behind a plugin that waits.
    Requests,
    /// CRI-O: only the hooks themselves do. A request can pass between the end of Synchronize and
    /// the plugin's entry in the list.
    HooksOnly,
}

/// How the simulated runtime presents itself and behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// `runtime_name` in Configure.
    pub name: String,
    /// `runtime_version` in Configure.
    pub version: String,
    pub nri: NriVersion,
    /// Time a plugin has for one call; 2 s in containerd by default.
    pub request_timeout: Duration,
    /// Time a connection has to register; 5 s in containerd by default.
    pub registration_timeout: Duration,
    pub sync_block: SyncBlock,
}

impl Options {
    /// containerd with the version that carries this NRI version.
    pub fn containerd(nri: NriVersion) -> Self {
        let version = match nri {
            NriVersion::V0_8 => "v2.1.5",
            NriVersion::V0_11 => "v2.2.7",
            NriVersion::V0_12 => "v2.3.4",
        };
        Options {
            name: "containerd".into(),
            version: version.into(),
            nri,
            request_timeout: Duration::from_secs(2),
            registration_timeout: Duration::from_secs(5),
            sync_block: SyncBlock::Requests,
        }
    }

    /// CRI-O 1.34.
    pub fn crio() -> Self {
        Options {
            name: "cri-o".into(),
            version: "1.34.1".into(),
            sync_block: SyncBlock::HooksOnly,
            ..Options::containerd(NriVersion::V0_11)
        }
    }
}

impl Default for Options {
    /// containerd 2.3.4.
    fn default() -> Self {
        Options::containerd(NriVersion::V0_12)
    }
}
