//! A wrapper registers its child before the child connects: at first the wrapper is the holder, and
//! the process that owns the connection takes its place once there is one.

use std::sync::Arc;

use super::event::EventKind;
use super::refusal::Refusal;
use super::register::{refuse_other_holders, what_is_known};
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::PluginName;
use crate::process::{HolderFacts, ProcessKey};
use crate::record::{Holder, Record};

pub(super) fn holder_moved(
    t: &mut Transition<'_>,
    plugin: &PluginName,
    from: ProcessKey,
    mut to: HolderFacts,
) -> Result<Reply, Refusal> {
    let Some(lease) = t.live_lease(plugin) else {
        return Ok(Reply::Done);
    };
    let mut record = (*lease.record).clone();
    let is_from = |h: &Holder| h.facts.process == from;
    let Some(position) = record.holders.iter().position(is_from) else {
        return Ok(Reply::Done);
    };
    if to.process == from {
        return Ok(Reply::Done);
    }
    to.pod = to.pod.map(|pod| what_is_known(pod, &lease.record));
    let old = record.holders.remove(position);
    let pid = to.process.pid;
    if !record.holders.iter().any(|h| h.facts.process == to.process) {
        refuse_other_holders(&record, &to)?;
        if let Some(pod) = &to.pod {
            record.learn_provider(pod, t.limits.max_providers_per_lease);
        }
        record.holders.push(Holder { facts: to, ..old });
    }
    record.choose_settings();
    record.generation = record.generation.saturating_add(1);
    // Not durable at once: after a crash it is found out again, at the next renewal.
    t.put(Record::Lease(Arc::new(record)), Durability::Soon);
    let message = format!(
        "pid {pid} owns the connection and holds it in place of pid {}",
        from.pid
    );
    t.event(EventKind::Registered, message)
        .plugin(plugin)
        .pid(pid);
    Ok(Reply::Done)
}
