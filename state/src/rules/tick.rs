//! Expiry: rule 4. Hooks compare deadlines themselves; this removes what has ended.

use super::event::EventKind;
use super::runtime::record_grace;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::PluginName;
use crate::record::{Record, RecordKey};

pub(super) fn tick(t: &mut Transition<'_>) -> Reply {
    let passed = t
        .state
        .passed(t.now.boottime, t.limits.max_expired_per_tick.max(1));
    for key in passed {
        match t.state.record(&key) {
            Some(Record::Lease(lease)) => expire_lease(t, &lease.plugin),
            Some(Record::Pin(pin)) => {
                t.remove(key, Durability::Barrier);
                let message = format!("pod {}: the pin has ended", pin.pod_uid);
                t.event(EventKind::Unpinned, message)
                    .plugin(&pin.plugin)
                    .pod(&pin.pod_uid);
            }
            Some(Record::Ban(ban)) => {
                t.remove(key, Durability::Barrier);
                t.event(EventKind::Unbanned, "the ban has ended")
                    .plugin(&ban.plugin);
            }
            Some(Record::Pause(_)) => {
                t.remove(key, Durability::Barrier);
                t.event(
                    EventKind::Resumed,
                    "the pause has ended, enforcement is back",
                );
            }
            Some(Record::Sandbox(_) | Record::Meta(_)) | None => {}
        }
    }
    record_grace(t);
    Reply::Done
}

/// Removes a lease whose deadline has passed, and says so.
pub(super) fn expire_lease(t: &mut Transition<'_>, plugin: &PluginName) {
    let key = RecordKey::lease(plugin);
    let Some(Record::Lease(lease)) = t.state.record(&key) else {
        return;
    };
    t.remove(key, Durability::Barrier);
    let message = match (&lease.last_holder, lease.holders.first()) {
        (_, Some(holder)) => format!(
            "expired, not renewed although pid {} lives",
            holder.facts.process.pid
        ),
        (Some(gone), None) => format!("expired, its last holder was pid {}", gone.pid),
        (None, None) => "expired".to_owned(),
    };
    t.event(EventKind::Expired, message).plugin(plugin);
}
