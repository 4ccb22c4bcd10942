//! Sandboxes that the daemon knows, and which plugins may have missed their start.
//!
//! All marks are written soon and not at once, a hook waits for none of them. A sandbox whose
//! record was lost in a crash is unknown at the next Synchronize, and so unvetted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::pin::{pod_gone, pod_seen};
use super::refusal::Refusal;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::{PluginName, PodUid};
use crate::record::{MetaRecord, Record, RecordKey, SandboxRecord};

/// A sandbox as the runtime names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxPod {
    pub sandbox_id: String,
    /// NRI socket of the runtime.
    pub runtime: String,
    pub pod_namespace: String,
    pub pod_name: String,
    pub pod_uid: Option<PodUid>,
}

/// A sandbox that was found at Synchronize.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentSandbox {
    pub sandbox: SandboxPod,
    /// Plugins whose live lease, or pin, covers it.
    pub covered_by: Vec<PluginName>,
}

const APPEARED_UNSEEN: &str = "it appeared while nri-lease was not connected to the runtime";

pub(super) fn appeared(
    t: &mut Transition<'_>,
    sandbox: SandboxPod,
    unvetted: Vec<(PluginName, String)>,
) -> Result<Reply, Refusal> {
    let known = t.state.sandboxes().contains_key(&sandbox.sandbox_id);
    if !known && t.state.sandboxes().len() >= t.limits.max_sandboxes {
        return Err(Refusal::Limit {
            what: "known sandboxes",
            limit: t.limits.max_sandboxes,
            remedy: "sandboxes beyond it are not tracked",
        });
    }
    remember(t, sandbox, unvetted.into_iter().collect());
    Ok(Reply::Done)
}

fn remember(t: &mut Transition<'_>, sandbox: SandboxPod, unvetted: BTreeMap<PluginName, String>) {
    if let Some(pod_uid) = &sandbox.pod_uid {
        pod_seen(t, &sandbox.runtime, pod_uid);
    }
    let record = SandboxRecord {
        sandbox_id: sandbox.sandbox_id,
        runtime: sandbox.runtime,
        pod_namespace: sandbox.pod_namespace,
        pod_name: sandbox.pod_name,
        pod_uid: sandbox.pod_uid,
        appeared_at: t.now.wall,
        unvetted,
    };
    t.put(Record::Sandbox(Arc::new(record)), Durability::Soon);
}

pub(super) fn gone(t: &mut Transition<'_>, sandbox_id: &str) -> Reply {
    let Some(sandbox) = t.state.sandboxes().get(sandbox_id).cloned() else {
        return Reply::Done;
    };
    t.remove(RecordKey::sandbox(sandbox_id), Durability::Soon);
    if let Some(pod_uid) = &sandbox.pod_uid {
        // A pod that lost its sandbox gets another one, and the old one is removed later.
        let mut others = t.state.sandboxes().values();
        if !others.any(|other| other.pod_uid.as_ref() == Some(pod_uid)) {
            pod_gone(t, pod_uid);
        }
    }
    Reply::Done
}

pub(super) fn vetting(
    t: &mut Transition<'_>,
    sandbox_id: &str,
    vetted: Vec<PluginName>,
    unvetted: Vec<(PluginName, String)>,
) -> Reply {
    let Some(sandbox) = t.state.sandboxes().get(sandbox_id) else {
        return Reply::Done;
    };
    let mut record = (**sandbox).clone();
    for plugin in vetted {
        record.unvetted.remove(&plugin);
    }
    record.unvetted.extend(unvetted);
    t.put(Record::Sandbox(Arc::new(record)), Durability::Soon);
    Reply::Done
}

pub(super) fn synchronized(
    t: &mut Transition<'_>,
    runtime: String,
    present: Vec<PresentSandbox>,
) -> Reply {
    let ids: BTreeSet<&str> = present
        .iter()
        .map(|p| p.sandbox.sandbox_id.as_str())
        .collect();
    let known = t.state.sandboxes().clone();
    let gone_from_here =
        |s: &&Arc<SandboxRecord>| s.runtime == runtime && !ids.contains(s.sandbox_id.as_str());
    for sandbox in known.values().filter(gone_from_here) {
        // Pins are compared on their own (PodsSeen): a reboot removes every sandbox and no pod.
        t.remove(RecordKey::sandbox(&sandbox.sandbox_id), Durability::Soon);
    }
    let first_contact = !t.state.meta().contacted_runtimes.contains(&runtime);
    for PresentSandbox {
        sandbox,
        covered_by,
    } in present
    {
        if t.state.sandboxes().contains_key(&sandbox.sandbox_id)
            || t.state.sandboxes().len() >= t.limits.max_sandboxes
        {
            continue;
        }
        let unvetted = if first_contact {
            BTreeMap::new()
        } else {
            let reason = || APPEARED_UNSEEN.to_owned();
            covered_by.into_iter().map(|p| (p, reason())).collect()
        };
        remember(t, sandbox, unvetted);
    }
    if first_contact {
        remember_runtime(t, runtime);
    }
    Reply::Done
}

fn remember_runtime(t: &mut Transition<'_>, runtime: String) {
    let mut meta: MetaRecord = (**t.state.meta()).clone();
    while meta.contacted_runtimes.len() >= t.limits.max_runtimes.max(1) {
        // Runtimes are configured and few; one too many gives up an arbitrary old one.
        meta.contacted_runtimes.pop_first();
    }
    meta.contacted_runtimes.insert(runtime);
    t.put(Record::Meta(Arc::new(meta)), Durability::Soon);
}
