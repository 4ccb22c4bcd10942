//! Between the protocol and the rules' types. Parsing happens here, once; what comes out is valid.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nri_lease_proto::lease::types as pb;
use nri_lease_state::name::{PluginIndex, PluginName, PodUid};
use nri_lease_state::record::{BanRecord, Mode, PauseRecord, PinRecord};
use nri_lease_state::rules::RefusalKind;
use nri_lease_state::scope::{Operation, Scope, ScopeRule};
use nri_lease_state::time::{Now, Ttl, WallTime};
use protobuf::well_known_types::duration::Duration as PbDuration;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{EnumOrUnknown, MessageField};
use ttrpc::error::get_rpc_status;
use ttrpc::{Code, Error};

use crate::enforce::decision::Verdict;
use crate::enforce::record::{Decided, PodRef};
use crate::engine::EngineError;
use crate::events::Event;

/// An INVALID_ARGUMENT with its message.
pub fn invalid(message: impl ToString) -> Error {
    get_rpc_status(Code::INVALID_ARGUMENT, message)
}

/// A PERMISSION_DENIED with its message.
pub fn denied(message: impl ToString) -> Error {
    get_rpc_status(Code::PERMISSION_DENIED, message)
}

/// A NOT_FOUND with its message.
pub fn not_found(message: impl ToString) -> Error {
    get_rpc_status(Code::NOT_FOUND, message)
}

/// The status that an engine's error becomes.
pub fn status(error: EngineError) -> Error {
    let code = match &error {
        EngineError::Refused(refusal) => match refusal.kind() {
            RefusalKind::InvalidArgument => Code::INVALID_ARGUMENT,
            RefusalKind::ResourceExhausted => Code::RESOURCE_EXHAUSTED,
            RefusalKind::PermissionDenied => Code::PERMISSION_DENIED,
            RefusalKind::FailedPrecondition => Code::FAILED_PRECONDITION,
            RefusalKind::NotFound => Code::NOT_FOUND,
        },
        EngineError::Store(_) | EngineError::Stopped => Code::UNAVAILABLE,
    };
    get_rpc_status(code, error)
}

pub fn plugin_name(text: &str) -> Result<PluginName, Error> {
    PluginName::try_from(text).map_err(invalid)
}

pub fn pod_uid(text: &str) -> Result<PodUid, Error> {
    PodUid::try_from(text).map_err(invalid)
}

/// Empty: not said.
pub fn index(text: &str) -> Result<Option<PluginIndex>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    PluginIndex::try_from(text).map(Some).map_err(invalid)
}

/// Unset: None. Negative or malformed is an error that names `field`.
pub fn duration(field: &str, value: &MessageField<PbDuration>) -> Result<Option<Duration>, Error> {
    let Some(value) = value.as_ref() else {
        return Ok(None);
    };
    if value.seconds < 0 || value.nanos < 0 || value.nanos >= 1_000_000_000 {
        return Err(invalid(format!(
            "{field} is negative or malformed ({}s {}ns): give a positive duration",
            value.seconds, value.nanos
        )));
    }
    Ok(Some(Duration::new(
        value.seconds as u64,
        value.nanos as u32,
    )))
}

/// Unset: the default; 0 is an error.
pub fn ttl(value: &MessageField<PbDuration>) -> Result<Option<Ttl>, Error> {
    duration("ttl", value)?
        .map(|ttl| Ttl::new(ttl).map_err(invalid))
        .transpose()
}

pub fn mode(value: EnumOrUnknown<pb::Mode>) -> Result<Mode, Error> {
    match value.enum_value() {
        Ok(pb::Mode::MODE_UNSPECIFIED | pb::Mode::MODE_ENFORCE) => Ok(Mode::Enforce),
        Ok(pb::Mode::MODE_AUDIT) => Ok(Mode::Audit),
        Err(number) => Err(invalid(format!(
            "mode {number} is unknown: use MODE_ENFORCE (1) or MODE_AUDIT (2)"
        ))),
    }
}

/// A scope as given; it is compiled, and so checked, by the rules.
pub fn scope(value: &MessageField<pb::Scope>) -> Result<Scope, Error> {
    let Some(value) = value.as_ref() else {
        return Ok(Scope::all());
    };
    let rules = value
        .rules
        .iter()
        .enumerate()
        .map(|(number, rule)| scope_rule(number + 1, rule))
        .collect::<Result<_, _>>()?;
    Ok(Scope { rules })
}

fn scope_rule(number: usize, rule: &pb::ScopeRule) -> Result<ScopeRule, Error> {
    let operations = rule
        .operations
        .iter()
        .map(|operation| match operation.enum_value() {
            Ok(pb::Operation::OPERATION_SANDBOX) => Ok(Operation::Sandbox),
            Ok(pb::Operation::OPERATION_CONTAINER) => Ok(Operation::Container),
            Ok(pb::Operation::OPERATION_UNSPECIFIED) | Err(_) => Err(invalid(format!(
                "scope.rules[{number}].operations: {} is unknown: use OPERATION_SANDBOX (1) or \
                 OPERATION_CONTAINER (2)",
                operation.value()
            ))),
        })
        .collect::<Result<_, _>>()?;
    Ok(ScopeRule {
        namespaces: rule.namespaces.clone(),
        pod_labels: rule.pod_labels.clone(),
        pod_annotations: rule.pod_annotations.clone(),
        runtime_handlers: rule.runtime_handlers.clone(),
        cdi_devices: rule.cdi_devices.clone(),
        containers: rule.containers.clone(),
        operations,
    })
}

/// The other way, for listings.
pub fn pb_scope(scope: &Scope) -> pb::Scope {
    let rules = scope
        .rules
        .iter()
        .map(|rule| pb::ScopeRule {
            namespaces: rule.namespaces.clone(),
            pod_labels: rule.pod_labels.clone(),
            pod_annotations: rule.pod_annotations.clone(),
            runtime_handlers: rule.runtime_handlers.clone(),
            cdi_devices: rule.cdi_devices.clone(),
            containers: rule.containers.clone(),
            operations: rule
                .operations
                .iter()
                .map(|operation| {
                    EnumOrUnknown::new(match operation {
                        Operation::Sandbox => pb::Operation::OPERATION_SANDBOX,
                        Operation::Container => pb::Operation::OPERATION_CONTAINER,
                    })
                })
                .collect(),
            ..Default::default()
        })
        .collect();
    pb::Scope {
        rules,
        ..Default::default()
    }
}

pub fn pb_mode(mode: Mode) -> EnumOrUnknown<pb::Mode> {
    EnumOrUnknown::new(match mode {
        Mode::Enforce => pb::Mode::MODE_ENFORCE,
        Mode::Audit => pb::Mode::MODE_AUDIT,
    })
}

pub fn pb_duration(duration: Duration) -> MessageField<PbDuration> {
    MessageField::some(PbDuration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: duration.subsec_nanos() as i32,
        ..Default::default()
    })
}

pub fn pb_wall(time: WallTime) -> MessageField<Timestamp> {
    MessageField::some(Timestamp {
        seconds: time.0.div_euclid(1_000_000_000),
        nanos: time.0.rem_euclid(1_000_000_000) as i32,
        ..Default::default()
    })
}

pub fn pb_time(time: SystemTime) -> MessageField<Timestamp> {
    let nanos = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |n| -n),
    };
    pb_wall(WallTime(nanos))
}

pub fn pb_pin(pin: &PinRecord, now: &Now) -> pb::Pin {
    pb::Pin {
        plugin: pin.plugin.to_string(),
        pod_uid: pin.pod_uid.to_string(),
        expires_at: pb_wall(now.wall_at(pin.deadline.boottime)),
        expires_in: pb_duration(now.until(pin.deadline.boottime)),
        pinned_at: pb_wall(pin.pinned_at),
        ..Default::default()
    }
}

pub fn pb_ban(ban: &BanRecord, now: &Now) -> pb::Ban {
    pb::Ban {
        plugin: ban.plugin.to_string(),
        expires_at: pb_wall(now.wall_at(ban.deadline.boottime)),
        expires_in: pb_duration(now.until(ban.deadline.boottime)),
        reason: ban.reason.clone(),
        set_by_uid: ban.set_by_uid,
        ..Default::default()
    }
}

pub fn pb_pause(pause: &PauseRecord, now: &Now) -> pb::Pause {
    pb::Pause {
        expires_at: pb_wall(now.wall_at(pause.deadline.boottime)),
        expires_in: pb_duration(now.until(pause.deadline.boottime)),
        reason: pause.reason.clone(),
        set_by_uid: pause.set_by_uid,
        paused_at: pb_wall(pause.paused_at),
        ..Default::default()
    }
}

pub fn pb_pod(pod: &PodRef) -> pb::Pod {
    pb::Pod {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        sandbox_id: pod.sandbox_id.clone(),
        ..Default::default()
    }
}

pub fn pb_verdict(verdict: Verdict) -> EnumOrUnknown<pb::Verdict> {
    EnumOrUnknown::new(match verdict {
        Verdict::Admit => pb::Verdict::VERDICT_ADMIT,
        Verdict::Reject => pb::Verdict::VERDICT_REJECT,
        Verdict::WouldReject => pb::Verdict::VERDICT_WOULD_REJECT,
        Verdict::Exempt => pb::Verdict::VERDICT_EXEMPT,
        Verdict::Unvetted => pb::Verdict::VERDICT_UNVETTED,
    })
}

pub fn pb_operation(container: Option<&str>) -> EnumOrUnknown<pb::Operation> {
    EnumOrUnknown::new(match container {
        None => pb::Operation::OPERATION_SANDBOX,
        Some(_) => pb::Operation::OPERATION_CONTAINER,
    })
}

/// A decision that was given; `socket` is its runtime's.
pub fn pb_decision(decided: &Decided, socket: String) -> pb::Decision {
    pb::Decision {
        time: pb_time(decided.at),
        verdict: pb_verdict(decided.verdict),
        operation: pb_operation(decided.container.as_deref()),
        pod: MessageField::some(pb_pod(&decided.pod)),
        container: decided.container.clone().unwrap_or_default(),
        plugin: decided
            .plugin
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        reason: decided.text.clone(),
        socket,
        ..Default::default()
    }
}

pub fn pb_event(event: Event) -> pb::Event {
    pb::Event {
        time: pb_time(event.at),
        kind: EnumOrUnknown::new(event.kind),
        plugin: event.plugin.unwrap_or_default(),
        pid: event.pid.unwrap_or_default(),
        pod: event.pod.as_ref().map(pb_pod).into(),
        container: event.container.unwrap_or_default(),
        message: event.message,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_durations_are_refused_by_name() {
        for (seconds, nanos) in [(-1, 0), (0, -1), (1, 1_000_000_000)] {
            let value = MessageField::some(PbDuration {
                seconds,
                nanos,
                ..Default::default()
            });
            let error = duration("ttl", &value).unwrap_err().to_string();
            assert!(error.contains("ttl is negative or malformed"), "{error}");
        }
    }

    #[test]
    fn an_unknown_mode_names_the_known_ones() {
        let error = mode(EnumOrUnknown::from_i32(9)).unwrap_err().to_string();
        assert!(error.contains("mode 9 is unknown"), "{error}");
        assert!(error.contains("MODE_AUDIT (2)"), "{error}");
    }

    #[test]
    fn a_scope_survives_the_way_there_and_back() {
        let scope_in = Scope {
            rules: vec![ScopeRule {
                namespaces: vec!["a*".into()],
                cdi_devices: vec!["dra.net/*=*".into()],
                operations: vec![Operation::Container],
                ..Default::default()
            }],
        };
        let there = MessageField::some(pb_scope(&scope_in));
        assert_eq!(scope(&there).unwrap(), scope_in);
    }
}
