//! Pause and resume: break-glass, always with an end.

use std::sync::Arc;
use std::time::Duration;

use super::ban::check_reason;
use super::event::EventKind;
use super::refusal::{Refusal, seconds};
use super::transition::Transition;
use super::{Durability, Reply};
use crate::record::{PauseRecord, Record, RecordKey};
use crate::time::{Deadline, Ttl};

pub(super) fn pause(
    t: &mut Transition<'_>,
    duration: Duration,
    reason: String,
    by_uid: u32,
) -> Result<Reply, Refusal> {
    let (min, max) = (t.limits.min_pause, t.limits.max_pause);
    if duration < min || duration > max {
        return Err(Refusal::Range {
            field: "pause duration",
            given: duration,
            min,
            max,
        });
    }
    check_reason(t, &reason)?;
    if reason.trim().is_empty() {
        return Err(Refusal::NoReason);
    }
    let was_paused = is_paused(t);
    let pause = Arc::new(PauseRecord {
        duration: Ttl::clamped(duration),
        deadline: Deadline::after(t.now, duration),
        reason,
        set_by_uid: by_uid,
        paused_at: t.now.wall,
    });
    t.put(Record::Pause(pause.clone()), Durability::Barrier);
    t.need(Durability::Barrier);
    let message = format!(
        "enforcement paused for {} by uid {by_uid}: {}",
        seconds(duration),
        pause.reason
    );
    t.event(EventKind::Paused, message);
    Ok(Reply::Pause {
        pause: Some(pause),
        was_paused,
    })
}

pub(super) fn resume(t: &mut Transition<'_>) -> Reply {
    let was_paused = is_paused(t);
    if was_paused {
        t.remove(RecordKey::pause(), Durability::Barrier);
        t.event(EventKind::Resumed, "enforcement resumed");
    }
    Reply::Pause {
        pause: None,
        was_paused,
    }
}

fn is_paused(t: &Transition<'_>) -> bool {
    let pause = t.state.pause();
    pause.is_some_and(|pause| pause.counts_at(t.now.boottime))
}
