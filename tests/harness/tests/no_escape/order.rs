//! The order in which the runtime calls: plugins that are not called before nri-lease.

use nri_lease_harness::containerd::Version;
use nri_lease_harness::plugin::{Fault, PluginOptions};
use nri_lease_harness::{Result, ensure};

use super::Run;
use super::node::{Node, PLUGIN, once};

pub const TESTS: &[(&str, Run)] = &[
    ("plugin_at_our_index_that_connects_before_us", |v| {
        at_our_index(v, true)
    }),
    ("plugin_at_our_index_that_connects_after_us", |v| {
        at_our_index(v, false)
    }),
    (
        "index_that_the_lease_does_not_say_is_learnt_from_the_runtimes_list",
        learnt_index,
    ),
    (
        "plugin_called_after_us_that_dies_in_run_pod_sandbox_has_missed_it",
        dies_after_us,
    ),
];

fn last() -> PluginOptions {
    PluginOptions {
        index: "99".to_owned(),
        ..once(PLUGIN)
    }
}

fn at_our_index(version: Version, before: bool) -> Result<()> {
    let mut node = Node::start(version, "")?;
    if before {
        node.daemon.stop()?;
    }
    let plugin = node.plugin(&last())?;
    if before {
        node.daemon.launch()?;
    }
    let (sandbox, _) = node.pod_starts("earlier")?;
    node.register_only(PLUGIN, plugin.pid(), &["--index", "99"])?;
    if version.validates() {
        // The list says that it is called, and validation comes after all calls.
        node.container(&sandbox, "second")?;
        let text = node.sandbox_is_refused("pod")?;
        println!("{text}");
        ensure!(
            text.contains("its index 99 is not below nri-lease's 99"),
            "{text}"
        );
        return Ok(());
    }
    let pod = node.sandbox("pod")?;
    let listed = node.wait_audited("pod")?;
    println!("{listed}");
    ensure!(
        listed["reason"]
            .as_str()
            .is_some_and(|r| r.contains("its index 99 is not below"))
    );
    node.container_is_refused(&pod, "main")?;
    Ok(())
}

fn learnt_index(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.plugin(&last())?;
    node.register(PLUGIN, plugin.pid(), &[])?;
    // Nothing is known of the index yet; at the first container it is looked at again.
    let sandbox = node.sandbox("first")?;
    node.wait_audited("first")?;
    node.container(&sandbox, "main")?;
    node.wait_not_audited("first")?;
    if version.validates() {
        let text = node.sandbox_is_refused("second")?;
        ensure!(
            text.contains("its index 99 is not below nri-lease's 99"),
            "{text}"
        );
    }
    Ok(())
}

fn dies_after_us(version: Version) -> Result<()> {
    let node = Node::start(version, "[enforcement]\nunvetted_sandboxes = \"reject\"\n")?;
    // The daemon's index is 99, too: which of the two is called first is not defined, so that the
    // plugin may already be dead when we are asked. Then the sandbox is refused, or marked.
    let plugin = node.plugin(&last())?;
    node.register(PLUGIN, plugin.pid(), &[])?;
    plugin.fault("run_pod_sandbox", &Fault::Exit)?;
    let sandbox = node.sandbox("pod");
    plugin.wait_ended()?;
    let plugin = node.plugin(&once(PLUGIN))?;
    node.register(PLUGIN, plugin.pid(), &["--index", "10"])?;
    let sandbox = match sandbox {
        Ok(sandbox) => sandbox,
        Err(error) => {
            println!("called before us: {}", super::node::message(&error));
            return Ok(());
        }
    };
    ensure!(!plugin.processed_pod(&sandbox)?);
    let text = node.container_is_refused(&sandbox, "main")?;
    println!("{text}");
    ensure!(
        text.contains("has missed the start of this pod's sandbox"),
        "{text}"
    );
    node.wait_audited("pod")?;
    node.pod_starts("replacement")?;
    Ok(())
}
