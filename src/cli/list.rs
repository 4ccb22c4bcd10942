//! `list`: the live leases.

use nri_lease_proto::lease::admin::ListLeasesRequest;
use serde::Serialize;

use super::Session;
use super::client::Daemon;
use super::error::CliError;
use super::render::Output;
use super::view::lease::{LeaseView, PodView};
use super::view::values;

#[derive(Serialize)]
struct Leases {
    leases: Vec<LeaseView>,
}

pub async fn run(session: &Session) -> Result<(), CliError> {
    let leases = Leases {
        leases: leases(&session.daemon).await?,
    };
    session.out.show(
        &leases,
        |out| text(out, &leases.leases),
        || leases.leases.iter().map(|l| l.plugin.clone()).collect(),
    )
}

/// The live leases, as the daemon tells them.
pub async fn leases(daemon: &Daemon) -> Result<Vec<LeaseView>, CliError> {
    let admin = daemon.admin().await?;
    let request = ListLeasesRequest::new();
    let answer = admin.list_leases(daemon.limit(), &request);
    let answer = daemon.call("list the leases", answer).await?;
    Ok(answer.leases.iter().map(LeaseView::from).collect())
}

/// The table for people.
pub fn text(out: &Output, leases: &[LeaseView]) -> String {
    if leases.is_empty() {
        return "No leases: no plugin is required on this node.\n".to_string();
    }
    let mut titles = vec![
        "PLUGIN",
        "STATE",
        "HOLDERS",
        "SCOPE",
        "MODE",
        "TTL",
        "EXPIRES IN",
    ];
    if out.wide() {
        titles.extend(["GENERATION", "INDEX", "PIDS", "PODS", "REASON"]);
    }
    let mut table = out.table(&titles);
    for lease in leases {
        table.row(cells(lease, out.wide()));
    }
    table.text()
}

fn cells(lease: &LeaseView, wide: bool) -> Vec<String> {
    let mut cells = vec![
        lease.plugin.clone(),
        lease.state.clone(),
        lease.holders.len().to_string(),
        lease.scope.short(),
        lease.mode.clone(),
        values::short(&lease.ttl_seconds),
        values::short(&lease.expires_in_seconds),
    ];
    if wide {
        let pids = lease.holders.iter().map(|holder| holder.pid.to_string());
        let pods = lease
            .holders
            .iter()
            .filter_map(|holder| holder.pod.as_ref());
        cells.extend([
            lease.generation.to_string(),
            lease.index.clone().unwrap_or_default(),
            pids.collect::<Vec<_>>().join(","),
            pods.map(PodView::label).collect::<Vec<_>>().join(","),
            lease.state_reason.clone(),
        ]);
    }
    cells
}
