//! A holder's process is gone: the lease lives on until its deadline. That is the protection.

use std::sync::Arc;

use super::event::EventKind;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::process::ProcessKey;
use crate::record::{GoneHolder, Record};

pub(super) fn holder_lost(t: &mut Transition<'_>, process: ProcessKey) -> Reply {
    let holds = |l: &&Arc<super::Lease>| l.holders.iter().any(|h| h.facts.process == process);
    let held: Vec<_> = t.state.leases().values().filter(holds).cloned().collect();
    for lease in held {
        if !lease.counts_at(t.now.boottime) {
            continue; // The next tick removes it.
        }
        let mut record = (*lease.record).clone();
        record.holders.retain(|h| h.facts.process != process);
        record.last_holder = Some(GoneHolder {
            pid: process.pid,
            gone_at: t.now.wall,
        });
        record.generation = record.generation.saturating_add(1);
        record.choose_settings();
        let plugin = record.plugin.clone();
        let left = record.holders.len();
        // Not durable at once: after a crash the process is found to be gone again.
        t.put(Record::Lease(Arc::new(record)), Durability::Soon);
        let message = format!("pid {} is gone, {left} holders are left", process.pid);
        t.event(EventKind::HolderLost, message)
            .plugin(&plugin)
            .pid(process.pid);
    }
    Reply::Done
}
