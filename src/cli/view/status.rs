//! The daemon and its runtimes, as JSON and YAML show them.

use nri_lease_proto::lease::admin::{self, GetStatusResponse};
use serde::Serialize;

use super::decision::PauseView;
use super::values::{self, Seconds};

/// The answer of `status`.
#[derive(Debug, Serialize)]
pub struct StatusView {
    pub version: String,
    pub pid: u32,
    pub started_at: Option<String>,
    pub mode: String,
    pub pause: Option<PauseView>,
    pub runtimes: Vec<RuntimeView>,
    pub store: Option<StoreView>,
    pub leases: u32,
    pub leases_missing: u32,
    pub pins: u32,
    pub bans: u32,
    pub admitted_total: u64,
    pub rejected_total: u64,
    pub would_reject_total: u64,
    pub exempt_total: u64,
    pub over_budget_total: u64,
    pub unvetted_sandboxes: u32,
}

#[derive(Debug, Serialize)]
pub struct RuntimeView {
    pub socket: String,
    pub connected: bool,
    pub detail: String,
    pub name: String,
    pub version: String,
    pub nri_version: String,
    pub request_timeout_seconds: Option<Seconds>,
    pub registration_timeout_seconds: Option<Seconds>,
    pub connected_since: Option<String>,
    pub evidence: Vec<String>,
    pub warnings: Vec<String>,
    pub sandbox_enforcement: String,
    pub pods: u32,
}

#[derive(Debug, Serialize)]
pub struct StoreView {
    pub path: String,
    pub healthy: bool,
    pub error: String,
    pub loaded_from: String,
}

impl From<&GetStatusResponse> for StatusView {
    fn from(status: &GetStatusResponse) -> Self {
        StatusView {
            version: status.version.clone(),
            pid: status.pid,
            started_at: values::time(&status.started_at),
            mode: status.mode.clone(),
            pause: status.pause.as_ref().map(PauseView::from),
            runtimes: status.runtimes.iter().map(RuntimeView::from).collect(),
            store: status.store.as_ref().map(|store| StoreView {
                path: store.path.clone(),
                healthy: store.healthy,
                error: store.error.clone(),
                loaded_from: store.loaded_from.clone(),
            }),
            leases: status.leases,
            leases_missing: status.leases_missing,
            pins: status.pins,
            bans: status.bans,
            admitted_total: status.admitted_total,
            rejected_total: status.rejected_total,
            would_reject_total: status.would_reject_total,
            exempt_total: status.exempt_total,
            over_budget_total: status.over_budget_total,
            unvetted_sandboxes: status.unvetted_sandboxes,
        }
    }
}

impl From<&admin::Runtime> for RuntimeView {
    fn from(runtime: &admin::Runtime) -> Self {
        RuntimeView {
            socket: runtime.socket.clone(),
            connected: runtime.connected,
            detail: runtime.detail.clone(),
            name: runtime.name.clone(),
            version: runtime.version.clone(),
            nri_version: runtime.nri_version.clone(),
            request_timeout_seconds: values::seconds(&runtime.request_timeout),
            registration_timeout_seconds: values::seconds(&runtime.registration_timeout),
            connected_since: values::time(&runtime.connected_since),
            evidence: runtime.evidence.clone(),
            warnings: runtime.warnings.clone(),
            sandbox_enforcement: runtime.sandbox_enforcement.clone(),
            pods: runtime.pods,
        }
    }
}
