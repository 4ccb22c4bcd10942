//! Decisions, events, bans, pauses and audit entries, as JSON and YAML show them.

use nri_lease_proto::lease::{admin, types};
use serde::Serialize;

use super::lease::PodView;
use super::values::{self, Seconds};

/// What the daemon answered, or would answer, to one request.
#[derive(Debug, Serialize)]
pub struct DecisionView {
    pub time: Option<String>,
    pub verdict: String,
    pub operation: String,
    pub pod: Option<PodView>,
    pub container: Option<String>,
    pub plugin: Option<String>,
    pub reason: String,
    pub steps: Vec<String>,
    pub socket: Option<String>,
}

/// One event of `watch`.
#[derive(Debug, Serialize)]
pub struct EventView {
    pub time: Option<String>,
    pub kind: String,
    pub plugin: Option<String>,
    pub pid: Option<u32>,
    pub pod: Option<PodView>,
    pub container: Option<String>,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<u64>,
}

/// Registrations of a name are refused.
#[derive(Debug, Serialize)]
pub struct BanView {
    pub plugin: String,
    pub expires_at: Option<String>,
    pub expires_in_seconds: Option<Seconds>,
    pub reason: String,
    pub set_by_uid: u32,
}

/// Enforcement is suspended.
#[derive(Debug, Serialize)]
pub struct PauseView {
    pub paused_at: Option<String>,
    pub expires_at: Option<String>,
    pub expires_in_seconds: Option<Seconds>,
    pub reason: String,
    pub set_by_uid: u32,
}

/// A sandbox that started without a plugin that was required.
#[derive(Debug, Serialize)]
pub struct UnvettedView {
    pub pod: Option<PodView>,
    pub plugins: Vec<String>,
    pub since: Option<String>,
    pub reason: String,
}

fn given(text: &str) -> Option<String> {
    Some(text.to_string()).filter(|text| !text.is_empty())
}

impl From<&types::Decision> for DecisionView {
    fn from(decision: &types::Decision) -> Self {
        DecisionView {
            time: values::time(&decision.time),
            verdict: values::verdict(decision.verdict),
            operation: values::operation(decision.operation),
            pod: decision.pod.as_ref().map(PodView::from),
            container: given(&decision.container),
            plugin: given(&decision.plugin),
            reason: decision.reason.clone(),
            steps: decision.steps.clone(),
            socket: given(&decision.socket),
        }
    }
}

impl DecisionView {
    /// `sandbox NAMESPACE/NAME` or `container NAME of NAMESPACE/NAME`.
    pub fn subject(&self) -> String {
        let pod = self.pod.as_ref().map(PodView::label).unwrap_or_default();
        match &self.container {
            Some(container) => format!("container {container} of {pod}"),
            None => format!("{} {pod}", self.operation),
        }
    }
}

impl From<&types::Event> for EventView {
    fn from(event: &types::Event) -> Self {
        EventView {
            time: values::time(&event.time),
            kind: values::event_kind(event.kind),
            plugin: given(&event.plugin),
            pid: Some(event.pid).filter(|pid| *pid != 0),
            pod: event.pod.as_ref().map(PodView::from),
            container: given(&event.container),
            message: event.message.clone(),
            dropped: Some(event.dropped).filter(|dropped| *dropped != 0),
        }
    }
}

impl From<&types::Ban> for BanView {
    fn from(ban: &types::Ban) -> Self {
        BanView {
            plugin: ban.plugin.clone(),
            expires_at: values::time(&ban.expires_at),
            expires_in_seconds: values::seconds(&ban.expires_in),
            reason: ban.reason.clone(),
            set_by_uid: ban.set_by_uid,
        }
    }
}

impl From<&types::Pause> for PauseView {
    fn from(pause: &types::Pause) -> Self {
        PauseView {
            paused_at: values::time(&pause.paused_at),
            expires_at: values::time(&pause.expires_at),
            expires_in_seconds: values::seconds(&pause.expires_in),
            reason: pause.reason.clone(),
            set_by_uid: pause.set_by_uid,
        }
    }
}

impl From<&admin::UnvettedSandbox> for UnvettedView {
    fn from(sandbox: &admin::UnvettedSandbox) -> Self {
        UnvettedView {
            pod: sandbox.pod.as_ref().map(PodView::from),
            plugins: sandbox.plugins.clone(),
            since: values::time(&sandbox.since),
            reason: sandbox.reason.clone(),
        }
    }
}
