//! Times, durations and enums of the protocol as they are printed.

use nri_lease_proto::lease::types::{EventKind, Mode, Operation, PluginState, Verdict};
use nri_lease_proto::protobuf::well_known_types::duration::Duration as ProtoDuration;
use nri_lease_proto::protobuf::well_known_types::timestamp::Timestamp;
use nri_lease_proto::protobuf::{EnumOrUnknown, MessageField};
use serde::{Serialize, Serializer};
use std::time::{Duration, SystemTime};

/// 9999-12-31T23:59:59Z: what RFC 3339 can still write.
const LAST_SECOND: i64 = 253_402_300_799;

/// A number of seconds; whole numbers are printed without a fraction, others to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seconds(pub f64);

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rounded = (self.0 * 1000.0).round() / 1000.0;
        match rounded.fract() == 0.0 && rounded.abs() < 1e15 {
            true => serializer.serialize_i64(rounded as i64),
            false => serializer.serialize_f64(rounded),
        }
    }
}

impl Seconds {
    /// For tables: at most two units, such as `41s`, `3m20s`, `1d2h`.
    pub fn short(&self) -> String {
        let whole = self.0.max(0.0).round() as u64;
        let parts = [
            (whole / 86_400, "d"),
            (whole / 3_600 % 24, "h"),
            (whole / 60 % 60, "m"),
            (whole % 60, "s"),
        ];
        let first = parts.iter().position(|(n, _)| *n > 0).unwrap_or(3);
        parts[first..]
            .iter()
            .take(2)
            .filter(|(n, unit)| *n > 0 || (first == 3 && *unit == "s"))
            .map(|(n, unit)| format!("{n}{unit}"))
            .collect()
    }
}

/// A duration of the protocol; `None` when unset.
pub fn seconds(duration: &MessageField<ProtoDuration>) -> Option<Seconds> {
    duration
        .as_ref()
        .map(|duration| Seconds(duration.seconds as f64 + f64::from(duration.nanos) / 1e9))
}

/// [`Seconds::short`] of what may be unset.
pub fn short(seconds: &Option<Seconds>) -> String {
    seconds.map(|seconds| seconds.short()).unwrap_or_default()
}

/// A duration for the protocol.
pub fn to_proto(duration: Duration) -> MessageField<ProtoDuration> {
    MessageField::some(ProtoDuration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: duration.subsec_nanos() as i32,
        ..Default::default()
    })
}

/// A time of the protocol as RFC 3339 in UTC, to the millisecond; `None` when unset. Times that
/// RFC 3339 cannot write are moved to its ends.
pub fn time(timestamp: &MessageField<Timestamp>) -> Option<String> {
    let timestamp = timestamp.as_ref()?;
    let seconds = timestamp.seconds.clamp(0, LAST_SECOND) as u64;
    let nanos = timestamp.nanos.clamp(0, 999_999_999) as u32;
    let time = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
    Some(humantime::format_rfc3339_millis(time).to_string())
}

/// How long ago, by this machine's clock; empty when unset.
pub fn ago(timestamp: &MessageField<Timestamp>) -> String {
    let Some(timestamp) = timestamp.as_ref() else {
        return String::new();
    };
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64();
    format!("{} ago", Seconds(now - timestamp.seconds as f64).short())
}

/// `enforce` or `audit`.
pub fn mode(mode: EnumOrUnknown<Mode>) -> String {
    word(mode, |mode| match mode {
        Mode::MODE_UNSPECIFIED | Mode::MODE_ENFORCE => "enforce",
        Mode::MODE_AUDIT => "audit",
    })
}

/// `present` or `missing`.
pub fn plugin_state(state: EnumOrUnknown<PluginState>) -> String {
    word(state, |state| match state {
        PluginState::PLUGIN_STATE_UNSPECIFIED => "unknown",
        PluginState::PLUGIN_STATE_PRESENT => "present",
        PluginState::PLUGIN_STATE_MISSING => "missing",
    })
}

/// `sandbox` or `container`.
pub fn operation(operation: EnumOrUnknown<Operation>) -> String {
    word(operation, |operation| match operation {
        Operation::OPERATION_UNSPECIFIED => "unknown",
        Operation::OPERATION_SANDBOX => "sandbox",
        Operation::OPERATION_CONTAINER => "container",
    })
}

/// `admit`, `reject`, `would-reject`, `exempt` or `unvetted`.
pub fn verdict(verdict: EnumOrUnknown<Verdict>) -> String {
    word(verdict, |verdict| match verdict {
        Verdict::VERDICT_UNSPECIFIED => "unknown",
        Verdict::VERDICT_ADMIT => "admit",
        Verdict::VERDICT_REJECT => "reject",
        Verdict::VERDICT_WOULD_REJECT => "would-reject",
        Verdict::VERDICT_EXEMPT => "exempt",
        Verdict::VERDICT_UNVETTED => "unvetted",
    })
}

/// `registered`, `holder-lost`, …
pub fn event_kind(kind: EnumOrUnknown<EventKind>) -> String {
    word(kind, |kind| match kind {
        EventKind::EVENT_KIND_UNSPECIFIED => "unknown",
        EventKind::EVENT_KIND_REGISTERED => "registered",
        EventKind::EVENT_KIND_RENEWED => "renewed",
        EventKind::EVENT_KIND_HOLDER_LOST => "holder-lost",
        EventKind::EVENT_KIND_RELEASED => "released",
        EventKind::EVENT_KIND_EXPIRED => "expired",
        EventKind::EVENT_KIND_REVOKED => "revoked",
        EventKind::EVENT_KIND_REJECTED => "rejected",
        EventKind::EVENT_KIND_WOULD_REJECT => "would-reject",
        EventKind::EVENT_KIND_CONNECTED => "connected",
        EventKind::EVENT_KIND_DISCONNECTED => "disconnected",
        EventKind::EVENT_KIND_PINNED => "pinned",
        EventKind::EVENT_KIND_UNPINNED => "unpinned",
        EventKind::EVENT_KIND_BANNED => "banned",
        EventKind::EVENT_KIND_UNBANNED => "unbanned",
        EventKind::EVENT_KIND_PAUSED => "paused",
        EventKind::EVENT_KIND_RESUMED => "resumed",
        EventKind::EVENT_KIND_RUNTIME_CONNECTED => "runtime-connected",
        EventKind::EVENT_KIND_RUNTIME_DISCONNECTED => "runtime-disconnected",
        EventKind::EVENT_KIND_DROPPED => "dropped",
    })
}

/// A value that a newer daemon sends is shown by its number.
fn word<E: nri_lease_proto::protobuf::Enum>(
    value: EnumOrUnknown<E>,
    known: impl FnOnce(E) -> &'static str,
) -> String {
    match value.enum_value() {
        Ok(value) => known(value).to_string(),
        Err(number) => format!("unknown-{number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_in_at_most_two_units() {
        let shown = |seconds| Seconds(seconds).short();
        assert_eq!(shown(0.2), "0s");
        assert_eq!(shown(-3.0), "0s");
        assert_eq!(shown(41.4), "41s");
        assert_eq!(shown(60.0), "1m");
        assert_eq!(shown(200.0), "3m20s");
        assert_eq!(shown(3_600.0), "1h");
        assert_eq!(shown(93_600.0), "1d2h");
        assert_eq!(shown(86_460.0), "1d");
    }

    #[test]
    fn whole_seconds_have_no_fraction_in_json() {
        assert_eq!(serde_json::to_string(&Seconds(60.0)).unwrap(), "60");
        assert_eq!(serde_json::to_string(&Seconds(41.2344)).unwrap(), "41.234");
    }

    #[test]
    fn times_that_rfc_3339_cannot_write_do_not_panic() {
        let shown = |seconds, nanos| {
            time(&MessageField::some(Timestamp {
                seconds,
                nanos,
                ..Default::default()
            }))
        };
        assert_eq!(shown(0, 0).unwrap(), "1970-01-01T00:00:00.000Z");
        assert_eq!(shown(i64::MIN, -1).unwrap(), "1970-01-01T00:00:00.000Z");
        assert_eq!(
            shown(i64::MAX, i32::MAX).unwrap(),
            "9999-12-31T23:59:59.999Z"
        );
        assert_eq!(time(&MessageField::none()), None);
    }
}
