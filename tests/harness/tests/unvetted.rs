//! Sandboxes that started while the daemon was away, with `unvetted_sandboxes = "reject"`.

use std::process::ExitCode;
use std::time::Instant;

use nri_lease_harness::adaptation::{Adaptation, AdaptationOptions};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::plugin::{Nri, Plugin, PluginOptions};
use nri_lease_harness::runner::{self, Test};
use nri_lease_harness::scratch::Scratch;
use nri_lease_harness::wait::PATIENCE;
use nri_lease_harness::{Result, bail, ensure};
use serde_json::json;

fn main() -> ExitCode {
    runner::main(
        1,
        vec![Test::new(
            "first_container_after_synchronize_is_refused_in_a_sandbox_that_nobody_saw_start",
            |_| first_container(),
        )],
    )
}

/// As many as make taking note of them a matter of milliseconds.
const PODS: u32 = 500;

fn first_container() -> Result<()> {
    let scratch = Scratch::new()?;
    let socket = scratch.join("nri.sock");
    let options = AdaptationOptions {
        default_validator: vec!["nri-lease".to_owned()],
        ..AdaptationOptions::new(Nri::V0_12)
    };
    let runtime = Adaptation::start(&options, &socket)?;
    let reject = "[enforcement]\nunvetted_sandboxes = \"reject\"\n";
    let mut daemon = Daemon::start(&scratch.join("d"), &socket, reject)?;
    let plugin =
        Plugin::start_synchronized(&PluginOptions::named("demo"), &socket, scratch.path())?;
    let pid = plugin.pid().to_string();
    let register = ["register", "demo", "--ttl", "10m", "--pid", &pid, "--once"];
    daemon.cli(&register)?.ok()?;

    daemon.kill();
    drop(runtime);
    plugin.wait_disconnected()?;
    let options = AdaptationOptions {
        pods: PODS,
        ..options
    };
    let runtime = Adaptation::start(&options, &socket)?;
    plugin.wait_synchronized()?;
    daemon.spawn()?;
    let began = Instant::now();
    // Until the daemon is there the default validator refuses; what comes next is the first
    // request that the daemon decides.
    for number in 0.. {
        let pod = json!({"id": format!("{:064x}", PODS / 2)});
        let container = json!({"id": format!("c{number}"), "name": "main"});
        let refusal = match runtime.create_container_from(pod, container) {
            Ok(_) => bail!("admitted after {number} refusals"),
            Err(error) => error.to_string(),
        };
        if refusal.contains("has missed the start of this pod's sandbox") {
            break;
        }
        ensure!(began.elapsed() < PATIENCE, "last refusal: {refusal}");
    }
    Ok(())
}
