//! Bans: registrations of a name are refused until a time. A ban does not end a lease that lives.

use std::sync::Arc;
use std::time::Duration;

use super::event::EventKind;
use super::refusal::{Refusal, seconds};
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::PluginName;
use crate::record::{BanRecord, Record, RecordKey};
use crate::time::{Deadline, Ttl};

pub(super) fn set_ban(
    t: &mut Transition<'_>,
    plugin: PluginName,
    duration: Duration,
    reason: String,
    by_uid: u32,
) -> Result<Reply, Refusal> {
    check_reason(t, &reason)?;
    let existed = in_force(t, &plugin);
    let ban = put_ban(t, plugin, duration, reason, by_uid)?;
    Ok(Reply::Ban {
        ban: Some(ban),
        existed,
    })
}

pub(super) fn lift_ban(t: &mut Transition<'_>, plugin: &PluginName) -> Reply {
    let existed = in_force(t, plugin);
    if existed {
        t.remove(RecordKey::ban(plugin), Durability::Barrier);
        t.event(EventKind::Unbanned, "ban lifted").plugin(plugin);
    }
    Reply::Ban { ban: None, existed }
}

pub(super) fn put_ban(
    t: &mut Transition<'_>,
    plugin: PluginName,
    duration: Duration,
    reason: String,
    by_uid: u32,
) -> Result<Arc<BanRecord>, Refusal> {
    let (min, max) = (t.limits.min_ban, t.limits.max_ban);
    if duration < min || duration > max {
        return Err(Refusal::Range {
            field: "ban duration",
            given: duration,
            min,
            max,
        });
    }
    let live = |t: &Transition<'_>| {
        let bans = t.state.bans().values();
        bans.filter(|b| b.counts_at(t.now.boottime)).count()
    };
    if !in_force(t, &plugin)
        && t.state.bans().len() >= t.limits.max_bans
        && live(t) >= t.limits.max_bans
    {
        return Err(Refusal::Limit {
            what: "bans",
            limit: t.limits.max_bans,
            remedy: "lift one that is no longer needed",
        });
    }
    let ban = Arc::new(BanRecord {
        plugin: plugin.clone(),
        duration: Ttl::clamped(duration),
        deadline: Deadline::after(t.now, duration),
        reason,
        set_by_uid: by_uid,
        set_at: t.now.wall,
    });
    t.put(Record::Ban(ban.clone()), Durability::Barrier);
    t.need(Durability::Barrier);
    let message = format!(
        "banned for {} by uid {by_uid}: {}",
        seconds(duration),
        ban.reason
    );
    t.event(EventKind::Banned, message).plugin(&plugin);
    Ok(ban)
}

pub(super) fn check_reason(t: &Transition<'_>, reason: &str) -> Result<(), Refusal> {
    if reason.len() > t.limits.max_reason_bytes {
        return Err(Refusal::LongReason {
            given: reason.len(),
            limit: t.limits.max_reason_bytes,
        });
    }
    Ok(())
}

fn in_force(t: &Transition<'_>, plugin: &PluginName) -> bool {
    let ban = t.state.bans().get(plugin);
    ban.is_some_and(|ban| ban.counts_at(t.now.boottime))
}
