//! Our daemon against NRI's own runtime side and its own plugins, every version with every other:
//! event masks, both ways in which RunPodSandbox arrives, refusal and admission, and the fence,
//! which rests on every version accepting one plugin at a time.

use std::process::ExitCode;
use std::time::Duration;

use nri_lease_harness::adaptation::{Adaptation, AdaptationOptions, container_id, pod_id};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::plugin::{Nri, Plugin, PluginOptions};
use nri_lease_harness::runner::{self, Test};
use nri_lease_harness::scratch::Scratch;
use nri_lease_harness::wait::{PATIENCE, wait_until};
use nri_lease_harness::{Context, Result, ensure};
use serde_json::Value;

const PLUGIN: &str = "demo";

fn main() -> ExitCode {
    let mut tests = vec![];
    for runtime in Nri::ALL {
        let mut add = |name: &str, run: Box<dyn Fn() -> Result<()> + Send + Sync>| {
            let name = format!("{}::{name}", runtime.folder());
            tests.push(Test::new(name, move |_| run()));
        };
        for plugin in Nri::ALL {
            add(
                &format!("{}_plugin_is_required", plugin.folder()),
                Box::new(move || is_required(runtime, plugin)),
            );
        }
        add(
            "plugin_counts_only_once_it_is_in_the_list",
            Box::new(move || fence_waits_for_the_list(runtime)),
        );
        add(
            "whoever_reconnects_is_refused_or_processed",
            Box::new(move || reconnects(runtime)),
        );
        add(
            "runtime_of_unknown_version_is_enforced_and_status_says_what_is_not_known",
            Box::new(move || unknown_version(runtime)),
        );
    }
    runner::main(2, tests)
}

struct Node {
    adaptation: Adaptation,
    daemon: Daemon,
    // Last: processes end before their directory goes.
    scratch: Scratch,
}

impl Node {
    fn start(options: &AdaptationOptions) -> Result<Self> {
        let scratch = Scratch::new()?;
        let socket = scratch.join("nri.sock");
        let adaptation = Adaptation::start(options, &socket)?;
        let daemon = Daemon::start(&scratch.join("d"), &socket, "")?;
        Ok(Self {
            adaptation,
            daemon,
            scratch,
        })
    }

    fn plugin(&self, nri: Nri) -> Result<Plugin> {
        let options = PluginOptions {
            nri,
            reconnect: false,
            ..PluginOptions::named(PLUGIN)
        };
        Plugin::start_synchronized(&options, self.adaptation.socket(), self.scratch.path())
    }

    fn register(&self, plugin: &Plugin) -> Result<()> {
        let pid = plugin.pid().to_string();
        let args = ["register", PLUGIN, "--ttl", "10m", "--pid", &pid, "--once"];
        self.daemon
            .cli(&[&args[..], &["--index", "10"]].concat())?
            .ok()?;
        Ok(())
    }

    fn state(&self) -> Result<String> {
        let list = self.daemon.cli(&["-o", "json", "list"])?.ok()?.json()?;
        let state = list["leases"][0]["state"].as_str().context("no lease")?;
        Ok(state.to_owned())
    }

    fn wait_state(&self, wanted: &str) -> Result<()> {
        wait_until(&format!("the plugin to be {wanted}"), PATIENCE, || {
            self.state().is_ok_and(|state| state == wanted)
        })
    }

    fn runtime_status(&self) -> Result<Value> {
        let status = self.daemon.cli(&["-o", "json", "status"])?.ok()?.json()?;
        Ok(status["runtimes"][0].clone())
    }

    /// Sandboxes are refused, or started and marked, as the runtime's version wants it.
    fn sandbox_does_not_pass(&self, name: &str) -> Result<()> {
        let outcome = self.adaptation.run_pod(name);
        if self.runtime_status()?["sandbox_enforcement"] == "reject" {
            return refused(outcome.map(drop));
        }
        outcome?;
        self.wait_audited(name)
    }

    fn wait_audited(&self, name: &str) -> Result<()> {
        wait_until("the sandbox to be in the audit", PATIENCE, || {
            self.audited()
                .is_ok_and(|all| all.contains(&name.to_owned()))
        })
    }

    /// The names of the pods that `audit` lists.
    fn audited(&self) -> Result<Vec<String>> {
        let audit = self.daemon.cli(&["-o", "json", "audit"])?.ok()?.json()?;
        let sandboxes = audit["sandboxes"].as_array().context("sandboxes")?;
        let names = sandboxes.iter().filter_map(|s| s["pod"]["name"].as_str());
        Ok(names.map(str::to_owned).collect())
    }
}

fn refused(outcome: Result<()>) -> Result<()> {
    let text = match outcome {
        Ok(()) => nri_lease_harness::bail!("it was admitted"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(
        text.contains("required NRI plugin \"demo\""),
        "another refusal: {text}"
    );
    Ok(())
}

fn is_required(runtime: Nri, plugin: Nri) -> Result<()> {
    let node = Node::start(&AdaptationOptions::new(runtime))?;
    let status = node.runtime_status()?;
    let evidence = status["evidence"].to_string();
    ensure!(evidence.contains("fence"), "{status}");
    ensure!(evidence.contains("list") == runtime.validates(), "{status}");
    let mut first = node.plugin(plugin)?;
    node.register(&first)?;
    node.wait_state("present")?;
    node.adaptation.run_pod("one")?;
    node.adaptation.create_container("one", "main")?;
    ensure!(first.processed_pod(&pod_id("one"))?);
    ensure!(first.processed_container(&container_id("one", "main"))?);

    first.kill();
    refused(node.adaptation.create_container("one", "second").map(drop))?;
    node.sandbox_does_not_pass("two")?;
    // RemovePodSandbox arrives as well, in either way.
    node.adaptation.remove_pod("one")?;

    let second = node.plugin(plugin)?;
    node.adaptation.run_pod("not-ours").map(drop).ok();
    refused(
        node.adaptation
            .create_container("not-ours", "main")
            .map(drop),
    )?;
    node.register(&second)?;
    node.wait_state("present")?;
    node.adaptation.run_pod("three")?;
    node.adaptation.create_container("three", "main")?;
    ensure!(second.processed_container(&container_id("three", "main"))?);
    Ok(())
}

fn fence_waits_for_the_list(runtime: Nri) -> Result<()> {
    let node = Node::start(&AdaptationOptions::new(runtime))?;
    let plugin = node.plugin(Nri::V0_12)?;
    node.register(&plugin)?;
    node.wait_state("present")?;
    for round in 0..3 {
        // Accepted, registered, configured; and not synchronised as long as a request is running.
        node.adaptation.block_plugin_sync()?;
        plugin.disconnect(Some(Duration::ZERO))?;
        wait_until("the plugin to be configured again", PATIENCE, || {
            plugin.status().is_ok_and(|status| status.connected)
        })?;
        ensure!(!plugin.status()?.synchronized);
        node.wait_state("missing")?;
        // Renewing makes the daemon look at once; several scans pass meanwhile.
        for _ in 0..20 {
            let pid = plugin.pid().to_string();
            node.daemon.cli(&["renew", PLUGIN, "--pid", &pid])?;
            ensure!(node.state()? == "missing", "round {round}: bound too early");
            ensure!(!plugin.status()?.synchronized);
        }
        node.adaptation.unblock_plugin_sync()?;
        node.wait_state("present")?;
        ensure!(plugin.status()?.synchronized);
        let name = format!("round-{round}");
        node.adaptation.run_pod(&name)?;
        ensure!(plugin.processed_pod(&pod_id(&name))?);
    }
    Ok(())
}

fn reconnects(runtime: Nri) -> Result<()> {
    let node = Node::start(&AdaptationOptions::new(runtime))?;
    let plugin = node.plugin(Nri::V0_12)?;
    node.register(&plugin)?;
    node.wait_state("present")?;
    let (mut admitted, mut away) = (0, 0);
    for round in 0..60 {
        plugin.disconnect(Some(Duration::ZERO))?;
        // At different moments of its reconnecting.
        std::thread::sleep(Duration::from_micros(fastrand::u64(0..4000)));
        let name = format!("round-{round}");
        match node.adaptation.create_container("pod", &name) {
            Ok(_) => {
                admitted += 1;
                ensure!(
                    plugin.processed_container(&container_id("pod", &name))?,
                    "round {round} escaped"
                );
            }
            Err(error) => {
                refused(Err(error))?;
                away += 1;
            }
        }
        plugin.wait_synchronized()?;
    }
    println!("{admitted} admitted and processed, {away} refused");
    node.wait_state("present")?;
    node.adaptation.create_container("pod", "after")?;
    Ok(())
}

fn unknown_version(runtime: Nri) -> Result<()> {
    let options = AdaptationOptions {
        runtime_version: "unknown".to_owned(),
        // A plugin counts for sandboxes so long after it has connected.
        registration_timeout: Duration::from_secs(2),
        ..AdaptationOptions::new(runtime)
    };
    let node = Node::start(&options)?;
    let status = node.runtime_status()?;
    let told = runtime == Nri::V0_12; // NRI's own version, from 0.12 on
    let is_verified = !status["warnings"].to_string().contains("not verified");
    ensure!(
        is_verified == status["evidence"].to_string().contains("fence"),
        "{status}"
    );
    ensure!(is_verified == told, "{status}");
    let mut plugin = node.plugin(Nri::V0_12)?;
    node.register(&plugin)?;
    if !is_verified {
        node.adaptation.run_pod("early")?;
        node.wait_audited("early")?;
        // Where there is a list, it decides for containers, and there is nothing to wait for.
        if runtime.validates() {
            node.adaptation.create_container("early", "main")?;
        }
    }
    let mut number = 0;
    wait_until("a sandbox to pass unmarked", PATIENCE, || {
        number += 1;
        let name = format!("pod-{number}");
        let admitted = node.adaptation.run_pod(&name).is_ok()
            && node.adaptation.create_container(&name, "main").is_ok();
        let listed = node.audited().unwrap_or_default();
        admitted && !listed.contains(&name)
    })?;
    println!("unmarked from the {number}. sandbox on");
    ensure!(number > 1 || is_verified);
    plugin.kill();
    refused(node.adaptation.create_container("pod", "second").map(drop))?;
    node.sandbox_does_not_pass("two")
}
