//! What a runtime's Synchronize tells: the node is up (rule 6), and who the holders' pods are.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::PodUid;
use crate::process::PodIdentity;
use crate::record::{Grace, LeaseRecord, Record};
use crate::time::Deadline;

/// The reboot grace begins, at the first Synchronize of this run.
///
/// From here on a lease that waits for its grace has an end, recorded or not: a store that cannot
/// write must not keep it alive. Ticks record it again when the write failed.
pub(super) fn runtime_synchronized(t: &mut Transition<'_>) -> Reply {
    if t.state.grace_until.is_none() {
        let until = t.now.boottime.plus(t.limits.reboot_grace);
        t.state.grace_until = Some(until);
    }
    record_grace(t);
    Reply::Done
}

/// Turns what is pending into deadlines, durably: a node that boots again and again gets the grace
/// once.
pub(super) fn record_grace(t: &mut Transition<'_>) {
    let Some(until) = t.state.grace_until else {
        return;
    };
    let leases = t.state.leases().values();
    let pending: Vec<_> = leases
        .filter(|l| l.grace == Grace::Pending)
        .cloned()
        .collect();
    for lease in pending {
        let mut record = (*lease.record).clone();
        if record.deadline.boottime < until {
            record.deadline = Deadline {
                boot_id: t.now.boot_id.clone(),
                boottime: until,
                wall: t.now.wall_at(until),
            };
            record.grace = Grace::Used;
        } else {
            // It lives longer by itself: the grace is still there for the next reboot.
            record.grace = Grace::Unused;
        }
        t.put(Record::Lease(Arc::new(record)), Durability::Barrier);
    }
}

/// Fills in what was not known about the pods of holders, by uid.
pub(super) fn learn_pods(t: &mut Transition<'_>, pods: &[PodIdentity]) -> Reply {
    let by_uid: BTreeMap<&PodUid, &PodIdentity> = pods.iter().map(|p| (&p.uid, p)).collect();
    let leases: Vec<_> = t.state.leases().values().cloned().collect();
    for lease in leases {
        let in_one = |h: &crate::record::Holder| {
            let pod = h.facts.pod.as_ref();
            pod.is_some_and(|pod| by_uid.contains_key(&pod.uid))
        };
        if !lease.holders.iter().any(in_one) {
            continue;
        }
        let mut record = (*lease.record).clone();
        record.learn_pods(&by_uid, t.limits.max_providers_per_lease);
        // No new generation: what the plugin asked for is the same.
        t.put(Record::Lease(Arc::new(record)), Durability::Soon);
    }
    Reply::Done
}

impl LeaseRecord {
    fn learn_pods(&mut self, pods: &BTreeMap<&PodUid, &PodIdentity>, max_providers: usize) {
        let mut learnt = Vec::new();
        for holder in &mut self.holders {
            let Some(pod) = &mut holder.facts.pod else {
                continue;
            };
            let Some(known) = pods.get(&pod.uid) else {
                continue;
            };
            if known.namespace.is_some() && known.name.is_some() {
                *pod = (*known).clone();
                learnt.push(pod.clone());
            }
        }
        for pod in learnt {
            self.learn_provider(&pod, max_providers);
        }
    }
}
