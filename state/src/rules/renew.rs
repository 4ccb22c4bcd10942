//! Renew: rule 2.

use std::sync::Arc;

use super::event::EventKind;
use super::lease::Lease;
use super::refusal::Refusal;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::PluginName;
use crate::process::ProcessKey;
use crate::record::Record;

pub(super) fn renew(
    t: &mut Transition<'_>,
    plugin: &PluginName,
    holders: &[ProcessKey],
) -> Result<Reply, Refusal> {
    let lease = held_lease(t, plugin, holders)?;
    let mut record = (*lease.record).clone();
    record.renewed(t.now);
    t.put(Record::Lease(Arc::new(record)), Durability::Soon);
    let lease = t
        .live_lease(plugin)
        .expect("its deadline is a positive TTL from now");
    t.event(EventKind::Renewed, "renewed").plugin(plugin);
    Ok(Reply::Renewed { lease })
}

/// The live lease, when the caller may speak for one of its holders.
pub(super) fn held_lease(
    t: &Transition<'_>,
    plugin: &PluginName,
    processes: &[ProcessKey],
) -> Result<Arc<Lease>, Refusal> {
    let Some(lease) = t.live_lease(plugin) else {
        return Err(Refusal::NoLease {
            plugin: plugin.clone(),
        });
    };
    if lease.holders.is_empty() {
        return Err(Refusal::NoHolder {
            plugin: plugin.clone(),
            left: lease.left(t.now),
        });
    }
    let mut held = lease.holders.iter().map(|h| h.facts.process);
    if !held.any(|process| processes.contains(&process)) {
        let pids = lease
            .holders
            .iter()
            .map(|h| h.facts.process.pid.to_string());
        return Err(Refusal::NotYours {
            plugin: plugin.clone(),
            pids: pids.collect::<Vec<_>>().join(", "),
        });
    }
    Ok(lease)
}
