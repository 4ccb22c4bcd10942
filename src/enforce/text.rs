//! The words of a refusal. They end up in `kubectl describe pod`, so they name the plugin, say why
//! it counts as missing and how long that can last, and give a command that gets the pod past it.

use std::time::Duration;

use nri_lease_state::rules::Lease;
use nri_lease_state::time::Now;
use nri_lease_state::{PluginName, PodView};

use super::decision::Cause;
use super::evidence::{LostWhen, Missing};
use crate::presence::Presence;

/// Longest refusal, in bytes: the runtime's side closes a connection that sends much unread.
pub const MAX_BYTES: usize = 512;
const ELLIPSIS: &str = "...";

/// What works against every refusal, whatever its cause.
const PAUSE: &str = "nri-lease pause --for 10m --reason TEXT";
/// Longest names for which `unpin` and `kubectl delete pod` fit beside the rest.
const MAX_NAMES_BYTES: usize = 160;

/// The refusal for one missing plugin; `others` are missing too.
pub fn missing(
    plugin: &PluginName,
    lease: Option<&Lease>,
    cause: &Cause,
    missing: &Missing,
    others: &[&PluginName],
    now: &Now,
) -> String {
    let mut details = Vec::new();
    match lease {
        Some(lease) => match lease.ends_at() {
            Some(end) => details.push(format!(
                "lease expires in {}",
                whole_seconds(now.until(end))
            )),
            None => details.push("lease waits for the runtime after a reboot".to_owned()),
        },
        None => details.push("it has no lease".to_owned()),
    }
    details.extend(detail(missing, lease, now));
    details.extend(cause.describe());
    if !others.is_empty() {
        let names: Vec<_> = others.iter().map(ToString::to_string).collect();
        details.push(format!("also missing: {}", names.join(", ")));
    }
    let way_out = match cause {
        Cause::Scope => format!("nri-lease revoke {plugin}"),
        Cause::Pin { pod_uid, .. } if plugin.as_str().len() + pod_uid.len() <= MAX_NAMES_BYTES => {
            format!("nri-lease unpin {plugin} {pod_uid}")
        }
        Cause::Pin { .. } | Cause::Annotation { .. } => PAUSE.to_owned(),
    };
    fitted(
        &format!("required NRI plugin \"{plugin}\" {} (", headline(missing)),
        &details.join("; "),
        &format!("). The pod is retried. Override: {way_out}"),
    )
}

fn headline(missing: &Missing) -> &'static str {
    match missing {
        Missing::Holder {
            presence: Presence::NotSynchronised | Presence::Pending,
            ..
        } => "is not synchronised with the runtime yet",
        Missing::Holder {
            presence: Presence::Broken,
            ..
        } => "is not connected to the runtime any more",
        Missing::CalledAfterUs { .. } => "cannot be checked for this sandbox",
        Missing::OtherIndex { .. } | Missing::NotListed => "was not called by the runtime",
        Missing::InDoubt { .. } => "may have lost its connection to the runtime",
        Missing::NoLease | Missing::NoHolder | Missing::Holder { .. } => {
            "is not connected to the runtime"
        }
    }
}

fn detail(missing: &Missing, lease: Option<&Lease>, now: &Now) -> Option<String> {
    match missing {
        Missing::NoLease => None,
        Missing::NoHolder => Some(match lease.and_then(|lease| lease.last_holder.as_ref()) {
            Some(last) => format!(
                "holder pid {} gone since {}",
                last.pid,
                elapsed_seconds(now.wall.since(last.gone_at))
            ),
            None => "no holder".to_owned(),
        }),
        Missing::Holder {
            pid,
            lost: Some(lost),
            ..
        } => Some(format!(
            "holder pid {pid} lost its connection {}",
            when(lost)
        )),
        Missing::Holder { pid, presence, .. } => {
            Some(format!("holder pid {pid} {}", self::presence(presence)))
        }
        Missing::InDoubt { pid } => Some(format!(
            "holder pid {pid} hosts several plugins and has lost a connection of one of them: \
             the first container will show which"
        )),
        Missing::NotListed => Some("it is not in the runtime's list for this request".to_owned()),
        Missing::OtherIndex { listed, registered } => Some(format!(
            "the runtime lists it with index {listed}, it is registered with {registered}"
        )),
        Missing::CalledAfterUs { index, ours } => Some(format!(
            "its index {index} is not below nri-lease's {ours}, so it is not called before it: \
             give the plugin a lower index"
        )),
    }
}

/// Why a plugin is missing, for a listing.
pub fn missing_briefly(missing: &Missing, lease: Option<&Lease>, now: &Now) -> String {
    detail(missing, lease, now).unwrap_or_else(|| "it has no lease".to_owned())
}

/// Why a sandbox that starts now counts as missed: kept with it, and read later.
pub fn missed(missing: &Missing, lease: Option<&Lease>, now: &Now) -> String {
    let why = missing_briefly(missing, lease, now);
    format!("when it started, the plugin {} ({why})", headline(missing))
}

/// What the kernel says of a holder, continuing "holder pid 4711 …".
pub fn presence(presence: &Presence) -> String {
    match presence {
        Presence::ProcessGone => "gone since 0s".to_owned(),
        Presence::Broken => "has lost its connection".to_owned(),
        Presence::NeverConnected => "has no connection to it".to_owned(),
        Presence::Pending => "waits to be accepted".to_owned(),
        Presence::NotSynchronised => "has just connected".to_owned(),
        Presence::Bound => "is connected".to_owned(),
        Presence::Unknown { reason } => format!("cannot be checked: {reason}"),
    }
}

fn when(lost: &LostWhen) -> String {
    match lost {
        LostWhen::DuringCall => "during this call".to_owned(),
        LostWhen::Recently { at_most } => format!(
            "during this call or at most {} before it",
            whole_seconds(*at_most)
        ),
        LostWhen::Before { about } => format!("{} before this call", whole_seconds(*about)),
        LostWhen::Unknown => "while nri-lease was not running".to_owned(),
    }
}

/// The refusal of a container in a sandbox that a plugin has missed.
pub fn unvetted(plugin: &PluginName, reason: &str, pod: &PodView<'_>) -> String {
    let names = pod.namespace.len() + pod.name.len() + plugin.as_str().len();
    let delete = if names <= MAX_NAMES_BYTES {
        let (namespace, name) = (pod.namespace, pod.name);
        format!("delete the pod (kubectl delete pod -n {namespace} {name})")
    } else {
        "delete the pod".to_owned()
    };
    fitted(
        &format!("required NRI plugin \"{plugin}\" has missed the start of this pod's sandbox ("),
        reason,
        &format!(
            "). A retry is in the same sandbox and does not help: {delete}. Override: nri-lease \
             revoke {plugin}"
        ),
    )
}

/// The refusal while plugins get time to register again.
pub fn store_lost(left: Duration) -> String {
    format!(
        "nri-lease has lost its lease store and waits {} for plugins to register again. The pod is \
         retried. Override: nri-lease pause --for 1m --reason \"store lost\"",
        whole_seconds(left)
    )
}

/// The refusal of a request whose annotation cannot be read.
pub fn malformed_annotation(problem: &str) -> String {
    fitted(
        "",
        problem,
        &format!(". Correct it where the pod is made. The pod is retried. Override: {PAUSE}"),
    )
}

/// Shortens the middle, so that what is wrong and what to do are always there.
fn fitted(head: &str, middle: &str, tail: &str) -> String {
    let room = MAX_BYTES.saturating_sub(head.len() + tail.len());
    if middle.len() <= room {
        return format!("{head}{middle}{tail}");
    }
    let mut end = room.saturating_sub(ELLIPSIS.len());
    while !middle.is_char_boundary(end) {
        end -= 1;
    }
    format!("{head}{}{ELLIPSIS}{tail}", &middle[..end])
}

/// Rounded up, so that nothing "expires in 0s" while it still counts.
pub fn whole_seconds(duration: Duration) -> String {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

/// Rounded down: what has just happened was "0s" ago.
fn elapsed_seconds(duration: Duration) -> String {
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_never_told_too_short_and_time_gone_never_too_long() {
        let time = Duration::from_millis(1001);
        assert_eq!(whole_seconds(time), "2s");
        assert_eq!(elapsed_seconds(time), "1s");
        assert_eq!(elapsed_seconds(Duration::from_millis(3)), "0s");
    }
}
