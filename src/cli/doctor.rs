//! `doctor`: checks the node, one line a check, and says what to do about what is wrong.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use nri_lease_proto::lease::admin::{GetStatusResponse, ListLeasesRequest};
use nri_lease_proto::lease::registry::DescribeRequest;
use serde::Serialize;

use super::Session;
use super::error::CliError;
use super::render::{Output, escape};
use super::status;
use super::view::lease::LeaseView;
use super::view::status::{RuntimeView, StatusView};
use super::view::values;

/// One finding.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    result: Outcome,
    message: String,
    /// What to do next; empty when nothing is.
    next: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Ok,
    /// Worth knowing; nothing is wrong.
    Note,
    /// Protection is weaker than it should be.
    Warn,
    /// Protection is off, or pods are being refused.
    Fail,
}

#[derive(Serialize)]
struct Report {
    ok: bool,
    checks: Vec<Check>,
}

#[derive(Default)]
struct Checks(Vec<Check>);

impl Checks {
    fn ok(&mut self, name: &'static str, message: impl Into<String>) {
        self.add(name, Outcome::Ok, message.into(), "");
    }

    fn add(&mut self, name: &'static str, result: Outcome, message: String, next: &str) {
        self.0.push(Check {
            name,
            result,
            message,
            next: next.to_string(),
        });
    }
}

pub async fn run(session: &Session) -> Result<(), CliError> {
    let mut checks = Checks::default();
    sockets(session, &mut checks);
    registry_answers(session, &mut checks).await;
    match status::fetch(session).await {
        Ok(status) => {
            daemon(&status, &mut checks);
            leases(session, &mut checks).await;
        }
        Err(error) => {
            unanswered("admin", &error, &mut checks);
        }
    }
    let wrong = |check: &Check| matches!(check.result, Outcome::Warn | Outcome::Fail);
    let report = Report {
        ok: !checks.0.iter().any(wrong),
        checks: checks.0,
    };
    session.out.show(
        &report,
        |out| text(out, &report),
        || {
            let wrong = report.checks.iter().filter(|check| wrong(check));
            wrong.map(|check| check.name.to_string()).collect()
        },
    )?;
    match report.ok {
        true => Ok(()),
        false => Err(CliError::ProblemsFound),
    }
}

fn sockets(session: &Session, checks: &mut Checks) {
    for (name, path) in [
        ("registry socket", session.daemon.registry_socket()),
        ("admin socket", session.daemon.admin_socket()),
    ] {
        let shown = path.display();
        match socket_at(&path) {
            Ok(true) => checks.ok(name, format!("{shown} is there")),
            Ok(false) => checks.add(
                name,
                Outcome::Fail,
                format!("{shown} is not a socket"),
                "Remove it and restart the daemon: systemctl restart nri-leased",
            ),
            Err(error) => checks.add(
                name,
                Outcome::Fail,
                format!("{shown}: {error}"),
                "Start the daemon (systemctl restart nri-leased), or name its directory: --run-dir DIR",
            ),
        }
    }
}

fn socket_at(path: &Path) -> std::io::Result<bool> {
    Ok(std::fs::metadata(path)?.file_type().is_socket())
}

async fn registry_answers(session: &Session, checks: &mut Checks) {
    let ask = async {
        let registry = session.daemon.registry().await?;
        let request = DescribeRequest::new();
        let answer = registry.describe(session.daemon.limit(), &request);
        session.daemon.call("ask for my leases", answer).await
    };
    match ask.await {
        // To hold no lease may be answered as "not found"; it is an answer.
        Ok(_) | Err(CliError::NotFound(_)) => checks.ok("registry", "the daemon answers plugins"),
        Err(error) => unanswered("registry", &error, checks),
    }
}

/// The error's own next step becomes the check's.
fn unanswered(name: &'static str, error: &CliError, checks: &mut Checks) {
    let text = error.to_string();
    let (message, next) = text.split_once("\n  ").unwrap_or((text.as_str(), ""));
    let next = match next.is_empty() {
        true => "Look at the daemon: systemctl status nri-leased; journalctl -u nri-leased",
        false => next,
    };
    checks.add(name, Outcome::Fail, message.to_string(), next);
}

fn daemon(status: &GetStatusResponse, checks: &mut Checks) {
    let view = StatusView::from(status);
    checks.ok(
        "admin",
        format!("nri-leased {} answers, pid {}", view.version, view.pid),
    );
    enforcement(&view, checks);
    store(&view, checks);
    if view.runtimes.is_empty() {
        checks.add(
            "runtime",
            Outcome::Fail,
            "no runtime is configured: nothing is enforced".to_string(),
            "Name the runtime's NRI socket: [runtime] nri_sockets in /etc/nri-lease/config.toml",
        );
    }
    for runtime in &view.runtimes {
        runtime_checks(runtime, checks);
    }
    checks.add(
        "fallback",
        Outcome::Note,
        "while the daemon itself is away, only the runtime can refuse containers".to_string(),
        "containerd: default_validator.required_plugins = [\"nri-lease\"], together with \
         tolerate_missing_plugins_annotation and annotated static and plugin pods; CRI-O: \
         nri_validator_required_plugins",
    );
    if view.unvetted_sandboxes > 0 {
        checks.add(
            "unvetted",
            Outcome::Warn,
            format!(
                "{} sandboxes may have started without a required plugin",
                view.unvetted_sandboxes
            ),
            "See which: nri-lease audit; delete those pods to have them processed again",
        );
    }
    if view.over_budget_total > 0 {
        checks.add(
            "latency",
            Outcome::Warn,
            format!(
                "{} requests were rejected because the answer was not ready in time",
                view.over_budget_total
            ),
            "The node is short of CPU, or the runtime's plugin_request_timeout is too short.",
        );
    }
}

fn enforcement(view: &StatusView, checks: &mut Checks) {
    match &view.pause {
        Some(pause) => checks.add(
            "enforcement",
            Outcome::Fail,
            format!(
                "paused by uid {} for {} more: {}",
                pause.set_by_uid,
                values::short(&pause.expires_in_seconds),
                pause.reason
            ),
            "When the reason is gone: nri-lease resume",
        ),
        None if view.mode == "audit" => checks.add(
            "enforcement",
            Outcome::Note,
            "the node is in audit mode: nothing is refused".to_string(),
            "To enforce: [enforcement] mode = \"enforce\" in /etc/nri-lease/config.toml, then SIGHUP",
        ),
        None => checks.ok("enforcement", "on"),
    }
}

fn store(view: &StatusView, checks: &mut Checks) {
    match &view.store {
        None => checks.add(
            "store",
            Outcome::Warn,
            "the daemon does not say how its store is".to_string(),
            "Compare versions: nri-lease --version; nri-lease status",
        ),
        Some(store) if !store.healthy => checks.add(
            "store",
            Outcome::Fail,
            format!("{}: {}", store.path, store.error),
            "Leases that exist stay enforced, new ones are refused. Is the disk full or read-only? \
             df, dmesg; then: journalctl -u nri-leased",
        ),
        Some(store) if store.loaded_from == "mirror" => checks.add(
            "store",
            Outcome::Warn,
            format!(
                "{}: the database was damaged and rebuilt from leases.json",
                store.path
            ),
            "Keep the corrupt-* directory beside it for the report, and check the disk.",
        ),
        Some(store) => checks.ok("store", format!("{} is healthy", store.path)),
    }
}

fn runtime_checks(runtime: &RuntimeView, checks: &mut Checks) {
    if !runtime.connected {
        return checks.add(
            "runtime",
            Outcome::Fail,
            format!("{} is not connected: {}", runtime.socket, runtime.detail),
            "Is the runtime running with NRI enabled and this socket path? Nothing is enforced on \
             it until then.",
        );
    }
    checks.ok(
        "runtime",
        format!("{} {} at {}", runtime.name, runtime.version, runtime.socket),
    );
    for warning in &runtime.warnings {
        checks.add(
            "evidence",
            Outcome::Warn,
            format!("{}: {warning}", runtime.socket),
            "The guarantee is weaker here; see Evidence in: nri-lease status",
        );
    }
    if runtime.warnings.is_empty() {
        checks.ok("evidence", runtime.evidence.join(", "));
    }
}

async fn leases(session: &Session, checks: &mut Checks) {
    let ask = async {
        let admin = session.daemon.admin().await?;
        let request = ListLeasesRequest::new();
        let answer = admin.list_leases(session.daemon.limit(), &request);
        session.daemon.call("list the leases", answer).await
    };
    let leases: Vec<LeaseView> = match ask.await {
        Ok(answer) => answer.leases.iter().map(LeaseView::from).collect(),
        Err(error) => return unanswered("leases", &error, checks),
    };
    let missing: Vec<&LeaseView> = leases.iter().filter(|l| l.state != "present").collect();
    if missing.is_empty() {
        checks.ok("leases", format!("{}, all present", leases.len()));
    }
    for lease in missing {
        checks.add(
            "leases",
            Outcome::Fail,
            format!(
                "{} is required but missing ({}); the lease expires in {}",
                lease.plugin,
                lease.state_reason,
                values::short(&lease.expires_in_seconds)
            ),
            &format!(
                "Look at the plugin: nri-lease inspect {0}; to let pods start without it: \
                 nri-lease revoke {0}",
                lease.plugin
            ),
        );
    }
}

fn text(out: &Output, report: &Report) -> String {
    let mut text = String::new();
    for check in &report.checks {
        let result = match check.result {
            Outcome::Ok => "ok",
            Outcome::Note => "note",
            Outcome::Warn => "warn",
            Outcome::Fail => "FAIL",
        };
        text.push_str(&format!(
            "{}{}  {:<16}{}\n",
            out.painted(result),
            " ".repeat(4 - result.len()),
            check.name,
            escape(&check.message)
        ));
        if !check.next.is_empty() {
            text.push_str(&format!("      -> {}\n", escape(&check.next)));
        }
    }
    text.push_str(match report.ok {
        true => "\nNothing is wrong.\n",
        false => "\nSomething is wrong; see the lines with -> above.\n",
    });
    text
}
