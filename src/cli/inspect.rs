//! `inspect`: everything about one lease.

use nri_lease_proto::lease::admin::GetLeaseRequest;
use serde::Serialize;

use super::Session;
use super::arguments;
use super::error::{CliError, Complaint};
use super::render::{Fields, Output};
use super::view::decision::DecisionView;
use super::view::lease::{HolderView, LeaseView, PodView, ScopeView};
use super::view::values;

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
}

#[derive(Serialize)]
struct Inspected {
    #[serde(flatten)]
    lease: LeaseView,
    decisions: Vec<DecisionView>,
}

pub async fn run(args: Args, session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let request = GetLeaseRequest {
        plugin: args.plugin.clone(),
        ..Default::default()
    };
    let attempt = format!("inspect the lease of {}", args.plugin);
    let answer = admin.get_lease(daemon.limit(), &request);
    let answer = daemon.call(&attempt, answer).await?;
    let Some(lease) = answer.lease.as_ref() else {
        return Err(CliError::NotFound(Complaint::new(
            attempt,
            "there is no such lease",
            "See what there is: nri-lease list",
        )));
    };
    let inspected = Inspected {
        lease: LeaseView::from(lease),
        decisions: answer.decisions.iter().map(DecisionView::from).collect(),
    };
    session.out.show(
        &inspected,
        |out| text(out, &inspected),
        || vec![inspected.lease.plugin.clone()],
    )
}

fn text(out: &Output, inspected: &Inspected) -> String {
    let lease = &inspected.lease;
    let mut text = summary(lease);
    text.push_str("\nHolders\n");
    for holder in &lease.holders {
        text.push_str(&indented(&holder_text(holder)));
    }
    if lease.holders.is_empty() {
        let gone = lease.last_holder.as_ref().map(|gone| {
            let since = gone.gone_at.clone().unwrap_or_default();
            format!("; pid {} is gone since {since}", gone.pid)
        });
        text.push_str(&format!("  none{}\n", gone.unwrap_or_default()));
    }
    if !lease.pins.is_empty() {
        let mut table = out.table(&["POD UID", "EXPIRES IN", "EXPIRES AT"]);
        for pin in &lease.pins {
            table.row([
                pin.pod_uid.clone(),
                values::short(&pin.expires_in_seconds),
                pin.expires_at.clone().unwrap_or_default(),
            ]);
        }
        text.push_str(&format!("\nPins\n{}", indented(&table.text())));
    }
    if !inspected.decisions.is_empty() {
        let table = decisions_table(out, &inspected.decisions);
        text.push_str(&format!("\nLast decisions\n{}", indented(&table)));
    }
    text
}

fn summary(lease: &LeaseView) -> String {
    let mut fields = Fields::default();
    fields
        .add("Plugin", &lease.plugin)
        .add("State", &lease.state)
        .add("Reason", &lease.state_reason)
        .add("Mode", &lease.mode)
        .add("Generation", lease.generation.to_string())
        .add("TTL", values::short(&lease.ttl_seconds))
        .add("Expires in", values::short(&lease.expires_in_seconds))
        .add("Expires at", lease.expires_at.as_deref().unwrap_or(""))
        .add(
            "Registered at",
            lease.registered_at.as_deref().unwrap_or(""),
        )
        .add("Renewed at", lease.renewed_at.as_deref().unwrap_or(""))
        .add("NRI index", lease.index.as_deref().unwrap_or(""));
    match &lease.scope {
        ScopeView::All(all) => {
            fields.add("Scope", all);
        }
        ScopeView::Rules(rules) => {
            for (number, rule) in rules.iter().enumerate() {
                fields.add(&format!("Scope rule {}", number + 1), rule.line());
            }
        }
    }
    fields.text()
}

fn holder_text(holder: &HolderView) -> String {
    let mut fields = Fields::default();
    let connected = match holder.connected {
        true => "yes".to_string(),
        false if holder.detail.is_empty() => "no".to_string(),
        false => format!("no: {}", holder.detail),
    };
    fields
        .add("Pid", format!("{} (uid {})", holder.pid, holder.uid))
        .add("Connected", connected)
        .add(
            "Pod",
            holder.pod.as_ref().map(PodView::label).unwrap_or_default(),
        )
        .add(
            "Registered at",
            holder.registered_at.as_deref().unwrap_or(""),
        );
    if let Some(pid) = holder.registered_by_pid {
        fields.add("Registered by", format!("pid {pid}"));
    }
    for connection in &holder.connections {
        fields.add(
            "Connection",
            format!(
                "{} (inode {}) to {}",
                connection.state, connection.inode, connection.socket
            ),
        );
    }
    fields.text()
}

/// Decisions as a table, newest first as the daemon sends them.
pub fn decisions_table(out: &Output, decisions: &[DecisionView]) -> String {
    let mut table = out.table(&["TIME", "VERDICT", "REQUEST", "PLUGIN", "REASON"]);
    for decision in decisions {
        table.row([
            decision.time.clone().unwrap_or_default(),
            decision.verdict.clone(),
            decision.subject(),
            decision.plugin.clone().unwrap_or_default(),
            decision.reason.clone(),
        ]);
    }
    table.text()
}

/// The same lines, two columns to the right.
pub fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}
