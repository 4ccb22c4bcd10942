//! `audit`: sandboxes that started without a plugin that was required, and would-be rejections.

use nri_lease_proto::lease::admin::ListAuditRequest;
use serde::Serialize;

use super::Session;
use super::error::CliError;
use super::inspect::{decisions_table, indented};
use super::render::Output;
use super::view::decision::{DecisionView, UnvettedView};
use super::view::lease::PodView;

#[derive(Serialize)]
struct Audit {
    sandboxes: Vec<UnvettedView>,
    would_reject: Vec<DecisionView>,
}

pub async fn run(session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let request = ListAuditRequest::new();
    let answer = admin.list_audit(daemon.limit(), &request);
    let answer = daemon.call("list the audit", answer).await?;
    let audit = Audit {
        sandboxes: answer.sandboxes.iter().map(UnvettedView::from).collect(),
        would_reject: answer.would_reject.iter().map(DecisionView::from).collect(),
    };
    session.out.show(
        &audit,
        |out| text(out, &audit),
        || {
            let pods = audit.sandboxes.iter().filter_map(|s| s.pod.as_ref());
            pods.map(PodView::label).collect()
        },
    )
}

fn text(out: &Output, audit: &Audit) -> String {
    let mut text = String::from("Sandboxes that may have missed a required plugin\n");
    if audit.sandboxes.is_empty() {
        text.push_str("  none\n");
    } else {
        let mut table = out.table(&["POD", "UID", "PLUGINS", "SINCE", "REASON"]);
        for sandbox in &audit.sandboxes {
            let pod = sandbox.pod.as_ref();
            table.row([
                pod.map(PodView::label).unwrap_or_default(),
                pod.map(|pod| pod.uid.clone()).unwrap_or_default(),
                sandbox.plugins.join(","),
                sandbox.since.clone().unwrap_or_default(),
                sandbox.reason.clone(),
            ]);
        }
        text.push_str(&indented(&table.text()));
        text.push_str("  To have one processed again, delete the pod.\n");
    }
    text.push_str("\nRequests that would have been rejected\n");
    match audit.would_reject.is_empty() {
        true => text.push_str("  none\n"),
        false => text.push_str(&indented(&decisions_table(out, &audit.would_reject))),
    }
    text
}
