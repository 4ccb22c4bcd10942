//! Why a command is refused: text that names the field, the limit and the remedy.

use std::time::Duration;

use crate::name::PluginName;
use crate::scope::ScopeError;

/// The gRPC status code it becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    InvalidArgument,
    ResourceExhausted,
    PermissionDenied,
    FailedPrecondition,
    NotFound,
}

/// A command that is not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{field} of {given} is out of range: {min} to {max} are allowed on this node",
        given = seconds(*.given), min = seconds(*.min), max = seconds(*.max))]
    Range {
        field: &'static str,
        given: Duration,
        min: Duration,
        max: Duration,
    },
    #[error("{0}")]
    Scope(#[from] ScopeError),
    #[error("reason is empty: say why, it is shown to whoever is affected")]
    NoReason,
    #[error("reason has {given} bytes, at most {limit} are allowed: shorten it")]
    LongReason { given: usize, limit: usize },
    #[error("{what}: the limit of {limit} is reached; {remedy}")]
    Limit {
        what: &'static str,
        limit: usize,
        remedy: &'static str,
    },
    #[error(
        "events mask {mask:#x} has neither RunPodSandbox nor CreateContainer: plugin \"{plugin}\" could never process what it is required for; subscribe to one of them, or give mask 0 for all"
    )]
    Deaf { plugin: PluginName, mask: i32 },
    #[error(
        "plugin \"{plugin}\" is banned for another {left} ({reason}); lift it with: nri-lease unban {plugin}",
        left = seconds(*.left)
    )]
    Banned {
        plugin: PluginName,
        left: Duration,
        reason: String,
    },
    #[error(
        "plugin \"{plugin}\" is held by pid {pid} with {theirs}, and this process has {ours}: a second holder needs the same uid and Kubernetes namespace; stop the other one, or revoke its lease with: nri-lease revoke {plugin}"
    )]
    OtherHolder {
        plugin: PluginName,
        pid: u32,
        theirs: String,
        ours: String,
    },
    #[error(
        "the lease of plugin \"{plugin}\" has no live holder and ends in {left}: register again",
        left = seconds(*.left)
    )]
    NoHolder { plugin: PluginName, left: Duration },
    #[error(
        "the caller may not speak for any holder of plugin \"{plugin}\" (pids {pids}): call as a holder, as who registered it, or as uid 0"
    )]
    NotYours { plugin: PluginName, pids: String },
    #[error(
        "no lease of plugin \"{plugin}\": it was never registered, or has ended; to be required, the plugin has to register again"
    )]
    NoLease { plugin: PluginName },
}

impl Refusal {
    /// The gRPC status code it becomes.
    pub fn kind(&self) -> RefusalKind {
        match self {
            Refusal::Scope(ScopeError::TooManyRules { .. } | ScopeError::TooLarge { .. })
            | Refusal::Limit { .. } => RefusalKind::ResourceExhausted,
            Refusal::Range { .. }
            | Refusal::Scope(_)
            | Refusal::NoReason
            | Refusal::LongReason { .. } => RefusalKind::InvalidArgument,
            Refusal::Deaf { .. }
            | Refusal::Banned { .. }
            | Refusal::OtherHolder { .. }
            | Refusal::NoHolder { .. } => RefusalKind::FailedPrecondition,
            Refusal::NotYours { .. } => RefusalKind::PermissionDenied,
            Refusal::NoLease { .. } => RefusalKind::NotFound,
        }
    }
}

/// Seconds as people read them: rounded up from 10 s on, so that nothing "ends in 0s" early.
pub(crate) fn seconds(duration: Duration) -> String {
    let ms = duration.as_millis();
    if ms.is_multiple_of(1000) {
        format!("{}s", ms / 1000)
    } else if ms < 10_000 {
        format!("{}.{:03}s", ms / 1000, ms % 1000)
    } else {
        format!("{}s", ms.div_ceil(1000))
    }
}
