//! Revoke: rule 5. Ends the lease now, optionally with a ban.

use std::time::Duration;

use super::ban::{check_reason, put_ban};
use super::event::EventKind;
use super::refusal::Refusal;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::PluginName;
use crate::record::RecordKey;

pub(super) fn revoke(
    t: &mut Transition<'_>,
    plugin: &PluginName,
    ban: Option<Duration>,
    reason: String,
    by_uid: u32,
) -> Result<Reply, Refusal> {
    check_reason(t, &reason)?;
    let Some(lease) = t.live_lease(plugin) else {
        return Err(Refusal::NoLease {
            plugin: plugin.clone(),
        });
    };
    t.remove(RecordKey::lease(plugin), Durability::Barrier);
    let message = match reason.as_str() {
        "" => format!("revoked by uid {by_uid}"),
        reason => format!("revoked by uid {by_uid}: {reason}"),
    };
    t.event(EventKind::Revoked, message).plugin(plugin);
    let ban = match ban {
        None => None,
        Some(duration) => Some(put_ban(t, plugin.clone(), duration, reason, by_uid)?),
    };
    Ok(Reply::Revoked { lease, ban })
}
