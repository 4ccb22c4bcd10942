//! Release: rule 3. Uninstalls, so the last holder that releases ends the lease.

use std::sync::Arc;

use super::event::EventKind;
use super::refusal::Refusal;
use super::renew::held_lease;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::PluginName;
use crate::process::ProcessKey;
use crate::record::{Record, RecordKey};

pub(super) fn release(
    t: &mut Transition<'_>,
    plugin: &PluginName,
    processes: &[ProcessKey],
) -> Result<Reply, Refusal> {
    let lease = held_lease(t, plugin, processes)?;
    let mut record = (*lease.record).clone();
    let released: Vec<u32> = record
        .holders
        .extract_if(.., |h| processes.contains(&h.facts.process))
        .map(|h| h.facts.process.pid)
        .collect();
    let holders_left = record.holders.len();
    let ended = holders_left == 0;
    if ended {
        t.remove(RecordKey::lease(plugin), Durability::Barrier);
    } else {
        record.generation = record.generation.saturating_add(1);
        record.choose_settings();
        t.put(Record::Lease(Arc::new(record)), Durability::Barrier);
    }
    for pid in released {
        let message = match holders_left {
            0 => format!("pid {pid} released the lease, which ends"),
            left => format!("pid {pid} released the lease, {left} holders are left"),
        };
        t.event(EventKind::Released, message)
            .plugin(plugin)
            .pid(pid);
    }
    Ok(Reply::Released {
        ended,
        holders_left,
    })
}
