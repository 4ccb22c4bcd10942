//! What hooks hand on without waiting: decisions for the ring and the log, sandboxes for the store.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use nri_lease_proto::nri::nri::PodSandbox;
use nri_lease_state::PluginName;
use tokio::sync::oneshot;

use super::decision::{Decision, Verdict};
use crate::presence::RuntimeId;

/// Decisions kept for `inspect` and `audit`.
pub const RING: usize = 1024;

/// A pod as decisions name it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub sandbox_id: String,
}

impl From<&PodSandbox> for PodRef {
    fn from(pod: &PodSandbox) -> Self {
        Self {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            sandbox_id: pod.id.clone(),
        }
    }
}

/// A decision that was given to the runtime.
#[derive(Clone, Debug)]
pub struct Decided {
    pub at: SystemTime,
    pub runtime: RuntimeId,
    pub pod: PodRef,
    /// None: the sandbox.
    pub container: Option<String>,
    pub verdict: Verdict,
    pub plugin: Option<PluginName>,
    pub text: String,
}

impl Decided {
    pub fn new(
        runtime: RuntimeId,
        pod: &PodSandbox,
        container: Option<&str>,
        decision: &Decision,
    ) -> Self {
        Self {
            at: SystemTime::now(),
            runtime,
            pod: pod.into(),
            container: container.map(str::to_owned),
            verdict: decision.verdict,
            plugin: decision.plugin.clone(),
            text: decision.text.clone(),
        }
    }
}

/// What a hook leaves behind.
#[derive(Debug)]
pub enum Trace {
    /// A runtime has listed its pods; what it starts later comes after this.
    Synchronized {
        runtime: RuntimeId,
        pods: Vec<PodSandbox>,
        /// Told when hooks see which plugins have missed them.
        done: oneshot::Sender<()>,
    },
    Decided(Decided),
    /// A sandbox was let through; the plugins that have missed it, and why.
    SandboxStarted {
        runtime: RuntimeId,
        pod: Box<PodSandbox>,
        unvetted: Vec<(PluginName, String)>,
    },
    /// At its first container, a sandbox was looked at again.
    SandboxVetted {
        sandbox_id: String,
        /// These have not missed it after all.
        vetted: Vec<PluginName>,
        /// These have, and why.
        unvetted: Vec<(PluginName, String)>,
    },
    SandboxRemoved {
        sandbox_id: String,
    },
}

/// The last decisions that concerned a required plugin, newest last.
#[derive(Debug, Default)]
pub struct Ring {
    entries: Mutex<VecDeque<Decided>>,
}

impl Ring {
    pub fn push(&self, decided: Decided) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() == RING {
            entries.pop_front();
        }
        entries.push_back(decided);
    }

    /// Those that `wanted` picks, newest first.
    pub fn newest(&self, limit: usize, wanted: impl Fn(&Decided) -> bool) -> Vec<Decided> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries
            .iter()
            .rev()
            .filter(|decided| wanted(decided))
            .take(limit)
            .cloned()
            .collect()
    }
}

/// Totals since the daemon started.
#[derive(Debug, Default)]
pub struct Totals {
    pub admitted: AtomicU64,
    pub rejected: AtomicU64,
    pub would_reject: AtomicU64,
    pub exempt: AtomicU64,
    pub unvetted: AtomicU64,
    /// Rejected because the answer came too late to be a sound one.
    pub over_budget: AtomicU64,
    /// Traces that were dropped because nobody kept up with them.
    pub traces_dropped: AtomicU64,
}

impl Totals {
    pub fn count(&self, verdict: Verdict) {
        let total = match verdict {
            Verdict::Admit => &self.admitted,
            Verdict::Reject => &self.rejected,
            Verdict::WouldReject => &self.would_reject,
            Verdict::Exempt => &self.exempt,
            Verdict::Unvetted => &self.unvetted,
        };
        total.fetch_add(1, Ordering::Relaxed);
    }
}
