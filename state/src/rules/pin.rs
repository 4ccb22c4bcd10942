//! Pins: rule 8. One pod requires a plugin, whatever the scope of the plugin's lease.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::event::EventKind;
use super::refusal::Refusal;
use super::register::ttl_within;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::{PluginName, PodUid};
use crate::record::{PinRecord, Record, RecordKey};
use crate::time::{Deadline, Ttl};

pub(super) fn pin(
    t: &mut Transition<'_>,
    plugin: PluginName,
    pod_uid: PodUid,
    ttl: Option<Ttl>,
) -> Result<Reply, Refusal> {
    let ttl = ttl_within(t, "ttl", ttl, t.limits.default_pin_ttl)?;
    let old = live_pin(t, &plugin, &pod_uid);
    if old.is_none()
        && t.state.pin_count() >= t.limits.max_pins
        && live_pins(t) >= t.limits.max_pins
    {
        return Err(Refusal::Limit {
            what: "pins",
            limit: t.limits.max_pins,
            remedy: "unpin pods that are gone",
        });
    }
    let pin = Arc::new(PinRecord {
        deadline: Deadline::after(t.now, ttl.get()),
        ttl,
        pinned_at: old.as_ref().map_or(t.now.wall, |old| old.pinned_at),
        seen_on: match old {
            Some(old) => old.seen_on.clone(),
            None => runtime_of(t, &pod_uid),
        },
        plugin: plugin.clone(),
        pod_uid: pod_uid.clone(),
    });
    t.put(Record::Pin(pin.clone()), Durability::Barrier);
    t.need(Durability::Barrier);
    t.event(EventKind::Pinned, format!("pod {pod_uid} requires it"))
        .plugin(&plugin)
        .pod(&pod_uid);
    Ok(Reply::Pinned { pin })
}

pub(super) fn unpin(t: &mut Transition<'_>, plugin: &PluginName, pod_uid: &PodUid) -> Reply {
    let existed = live_pin(t, plugin, pod_uid).is_some();
    if existed {
        drop_pin(t, plugin, pod_uid, Durability::Barrier, "unpinned");
    }
    Reply::Unpinned { existed }
}

pub(super) fn pod_gone(t: &mut Transition<'_>, pod_uid: &PodUid) -> Reply {
    let Some(pins) = t.state.pins().get(pod_uid) else {
        return Reply::Done;
    };
    let plugins: Vec<PluginName> = pins.keys().cloned().collect();
    for plugin in plugins {
        // Not durable at once: after a crash the comparison at Synchronize finds it again.
        drop_pin(t, &plugin, pod_uid, Durability::Soon, "the pod is gone");
    }
    Reply::Done
}

pub(super) fn pods_seen(
    t: &mut Transition<'_>,
    runtime: &str,
    present: &BTreeSet<PodUid>,
) -> Reply {
    let pins = t.state.pins().clone();
    for (pod_uid, pins) in pins.iter() {
        if present.contains(pod_uid) {
            pod_seen(t, runtime, pod_uid);
            continue;
        }
        let was_here = |pin: &&Arc<PinRecord>| pin.seen_on.as_deref() == Some(runtime);
        for pin in pins.values().filter(was_here) {
            drop_pin(t, &pin.plugin, pod_uid, Durability::Soon, "the pod is gone");
        }
    }
    Reply::Done
}

/// The pod exists, on this runtime: from now on it can be missed.
pub(super) fn pod_seen(t: &mut Transition<'_>, runtime: &str, pod_uid: &PodUid) {
    let Some(pins) = t.state.pins().get(pod_uid) else {
        return;
    };
    let unseen = |pin: &&Arc<PinRecord>| pin.seen_on.as_deref() != Some(runtime);
    let unseen: Vec<_> = pins.values().filter(unseen).cloned().collect();
    for pin in unseen {
        let mut pin = (*pin).clone();
        pin.seen_on = Some(runtime.to_owned());
        t.put(Record::Pin(Arc::new(pin)), Durability::Soon);
    }
}

fn drop_pin(
    t: &mut Transition<'_>,
    plugin: &PluginName,
    pod_uid: &PodUid,
    durability: Durability,
    why: &str,
) {
    t.remove(RecordKey::pin(pod_uid, plugin), durability);
    t.event(EventKind::Unpinned, format!("pod {pod_uid}: {why}"))
        .plugin(plugin)
        .pod(pod_uid);
}

fn live_pin(t: &Transition<'_>, plugin: &PluginName, pod_uid: &PodUid) -> Option<Arc<PinRecord>> {
    let pin = t.state.pins().get(pod_uid)?.get(plugin)?;
    pin.counts_at(t.now.boottime).then(|| pin.clone())
}

fn live_pins(t: &Transition<'_>) -> usize {
    let pins = t.state.pins().values().flat_map(|pod| pod.values());
    pins.filter(|pin| pin.counts_at(t.now.boottime)).count()
}

/// A pod can be pinned while its sandbox is there already.
fn runtime_of(t: &Transition<'_>, pod_uid: &PodUid) -> Option<String> {
    let mut sandboxes = t.state.sandboxes().values();
    let sandbox = sandboxes.find(|s| s.pod_uid.as_ref() == Some(pod_uid))?;
    Some(sandbox.runtime.clone())
}
