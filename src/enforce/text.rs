//! The words of a refusal. They end up in `kubectl describe pod`, so they name the plugin, say why
//! it counts as missing and how long that can last, and give the next command.

use std::time::Duration;

use nri_lease_state::PluginName;
use nri_lease_state::rules::Lease;
use nri_lease_state::time::Now;

use super::decision::Cause;
use super::evidence::{LostWhen, Missing};
use crate::presence::Presence;

/// Longest refusal, in bytes: the runtime's side closes a connection that sends much unread.
pub const MAX_BYTES: usize = 512;

/// The refusal for one missing plugin; `others` are missing too.
pub fn missing(
    plugin: &PluginName,
    lease: Option<&Lease>,
    cause: &Cause,
    missing: &Missing,
    others: usize,
    now: &Now,
) -> String {
    let mut text = format!("required NRI plugin \"{plugin}\" {}", headline(missing));
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
    if let Some(detail) = detail(missing, lease, now) {
        details.push(detail);
    }
    if let Some(cause) = cause.describe() {
        details.push(cause);
    }
    if others > 0 {
        details.push(format!("{others} more required plugins are missing"));
    }
    text.push_str(&format!(" ({}). The pod is retried. ", details.join("; ")));
    match cause {
        Cause::Scope => text.push_str(&format!("Override: nri-lease revoke {plugin}")),
        Cause::Pin { pod_uid, .. } => {
            text.push_str(&format!("Override: nri-lease unpin {plugin} {pod_uid}"));
        }
        Cause::Annotation { .. } => text.push_str("Start the plugin or change the annotation"),
    }
    bounded(text)
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
pub fn unvetted(plugin: &PluginName, reason: &str) -> String {
    bounded(format!(
        "required NRI plugin \"{plugin}\" has missed the start of this pod's sandbox ({reason}). \
         The container is retried in the same sandbox, which does not help: delete the pod. \
         Override: nri-lease revoke {plugin}"
    ))
}

/// The refusal while plugins get time to register again.
pub fn store_lost(left: Duration) -> String {
    bounded(format!(
        "nri-lease has lost its lease store and waits {} for plugins to register again. The pod is \
         retried. Override: nri-lease pause --for 1m --reason \"store lost\"",
        whole_seconds(left)
    ))
}

/// The refusal of a request whose annotation cannot be read.
pub fn malformed_annotation(problem: &str) -> String {
    bounded(format!("{problem}. Correct the annotation of the pod"))
}

fn bounded(mut text: String) -> String {
    if text.len() > MAX_BYTES {
        let mut end = MAX_BYTES - 3;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str("...");
    }
    text
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
