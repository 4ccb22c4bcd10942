//! `status`: the daemon, its runtimes, and what the evidence is worth here.

use nri_lease_proto::lease::admin::{GetStatusRequest, GetStatusResponse};

use super::Session;
use super::error::CliError;
use super::inspect::indented;
use super::render::Fields;
use super::view::status::{RuntimeView, StatusView};
use super::view::values;

pub async fn run(session: &Session) -> Result<(), CliError> {
    let status = fetch(session).await?;
    let view = StatusView::from(&status);
    session.out.show(
        &view,
        |_| text(&status, &view),
        || view.runtimes.iter().map(|r| r.socket.clone()).collect(),
    )
}

/// Asks for the status; `doctor` starts from it too.
pub async fn fetch(session: &Session) -> Result<GetStatusResponse, CliError> {
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let request = GetStatusRequest::new();
    let answer = admin.get_status(daemon.limit(), &request);
    daemon.call("get the status", answer).await
}

fn text(status: &GetStatusResponse, view: &StatusView) -> String {
    let mut fields = Fields::default();
    fields
        .add(
            "Daemon",
            format!(
                "nri-leased {}, pid {}, started {}",
                view.version,
                view.pid,
                values::ago(&status.started_at)
            ),
        )
        .add("Enforcement", enforcement(view))
        .add("Store", store(view))
        .add(
            "Leases",
            format!("{} ({} missing)", view.leases, view.leases_missing),
        )
        .add("Pins", view.pins.to_string())
        .add("Bans", view.bans.to_string())
        .add(
            "Decisions",
            format!(
                "{} admitted, {} rejected, {} would have been rejected, {} exempt, {} over budget",
                view.admitted_total,
                view.rejected_total,
                view.would_reject_total,
                view.exempt_total,
                view.over_budget_total
            ),
        )
        .add("Unvetted", format!("{} sandboxes", view.unvetted_sandboxes));
    let mut text = fields.text();
    text.push_str("\nRuntimes\n");
    for runtime in &view.runtimes {
        text.push_str(&indented(&runtime_text(runtime)));
    }
    if view.runtimes.is_empty() {
        text.push_str("  none configured\n");
    }
    text
}

fn enforcement(view: &StatusView) -> String {
    match &view.pause {
        Some(pause) => format!(
            "PAUSED for {} more: {} (set by uid {})",
            values::short(&pause.expires_in_seconds),
            pause.reason,
            pause.set_by_uid
        ),
        None => view.mode.clone(),
    }
}

fn store(view: &StatusView) -> String {
    match &view.store {
        None => "unknown".to_string(),
        Some(store) if store.healthy => {
            format!("healthy, {}, loaded from {}", store.path, store.loaded_from)
        }
        Some(store) => format!("FAILED, {}: {}", store.path, store.error),
    }
}

fn runtime_text(runtime: &RuntimeView) -> String {
    let mut fields = Fields::default();
    let connected = match (runtime.connected, &runtime.connected_since) {
        (true, Some(since)) => format!("yes, since {since}"),
        (true, None) => "yes".to_string(),
        (false, _) => format!("no: {}", runtime.detail),
    };
    fields
        .add("Socket", &runtime.socket)
        .add("Connected", connected)
        .add(
            "Runtime",
            format!("{} {}", runtime.name, runtime.version).trim(),
        )
        .add("NRI", &runtime.nri_version)
        .add(
            "Request limit",
            values::short(&runtime.request_timeout_seconds),
        )
        .add(
            "Register limit",
            values::short(&runtime.registration_timeout_seconds),
        )
        .add("Evidence", runtime.evidence.join(", "))
        .add("Sandboxes", &runtime.sandbox_enforcement)
        .add("Pods", runtime.pods.to_string());
    for warning in &runtime.warnings {
        fields.add("Warning", warning);
    }
    fields.text()
}
