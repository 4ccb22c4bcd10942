//! The plugin is late, exits, is killed or hangs, in a call or before it.

use std::time::Duration;

use nri_lease_harness::containerd::Version;
use nri_lease_harness::plugin::{Fault, Plugin, PluginOptions};
use nri_lease_harness::{Result, ensure};

use super::Run;
use super::node::{Node, PLUGIN, let_pass, once};

pub const TESTS: &[(&str, Run)] = &[
    ("late_in_run_pod_sandbox", late_in_run_pod),
    ("exits_in_run_pod_sandbox", |v| {
        dies_in_run_pod(v, &Fault::Exit)
    }),
    ("killed_in_run_pod_sandbox", |v| {
        dies_in_run_pod(v, &Fault::Kill)
    }),
    ("hangs_before_run_pod_sandbox", hangs_in_run_pod),
    ("late_in_create_container", |v| {
        fails_in_create(v, &Fault::Sleep(LATE))
    }),
    ("exits_in_create_container", |v| {
        fails_in_create(v, &Fault::Exit)
    }),
    ("killed_in_create_container", |v| {
        fails_in_create(v, &Fault::Kill)
    }),
    ("hangs_before_create_container", hangs_in_create),
    ("reconnects_in_run_pod_sandbox", reconnects_in_run_pod),
    ("reconnects_in_create_container", reconnects_in_create),
    (
        "reconnected_between_sandbox_and_container_is_there",
        reconnects_between,
    ),
    ("killed_while_idle_one_second_before", killed_while_idle),
    (
        "back_50_ms_after_run_pod_sandbox_is_no_excuse_where_unvetted_is_refused",
        back_and_rejected,
    ),
    (
        "back_50_ms_after_run_pod_sandbox_is_listed_where_unvetted_is_allowed",
        back_and_listed,
    ),
    ("impostor_under_the_name_of_a_dead_holder", impostor),
    ("child_with_the_connection_of_a_dead_holder", inherited),
];

/// Over the runtime's request timeout of 2 s.
const LATE: Duration = Duration::from_secs(3);

fn late_in_run_pod(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    plugin.fault("run_pod_sandbox", &Fault::Sleep(LATE))?;
    let reason = node.sandbox_does_not_pass("late")?;
    println!("{reason}");
    ensure!(
        reason.contains("lost its connection during this call"),
        "{reason}"
    );
    if version == Version::V2_3 {
        // It tells us the pid of the sandbox, and so when the request had begun.
        ensure!(!reason.contains("or at most"), "{reason}");
    }
    Ok(())
}

fn dies_in_run_pod(version: Version, fault: &Fault) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    plugin.fault("run_pod_sandbox", fault)?;
    let reason = node.sandbox_does_not_pass("dies")?;
    println!("{reason}");
    plugin.wait_ended()
}

fn hangs_in_run_pod(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    plugin.freeze();
    let outcome = node.sandbox_does_not_pass("hangs");
    plugin.thaw();
    println!("{}", outcome?);
    Ok(())
}

fn fails_in_create(version: Version, fault: &Fault) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    let (sandbox, _) = node.pod_starts("pod")?;
    plugin.fault("create_container", fault)?;
    println!("{}", node.container_is_refused(&sandbox, "second")?);
    println!("{}", node.container_is_refused(&sandbox, "third")?);
    Ok(())
}

fn hangs_in_create(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    let (sandbox, _) = node.pod_starts("pod")?;
    plugin.freeze();
    let outcome = node.container_is_refused(&sandbox, "second");
    plugin.thaw();
    println!("{}", outcome?);
    Ok(())
}

const AT_ONCE: Fault = Fault::Disconnect {
    reconnect_after: Some(Duration::ZERO),
};

fn reconnects_in_run_pod(version: Version) -> Result<()> {
    let node = Node::start(version, "[enforcement]\nunvetted_sandboxes = \"reject\"\n")?;
    let plugin = node.leased_plugin()?;
    plugin.fault("run_pod_sandbox", &AT_ONCE)?;
    // Back before anybody asks; but for this sandbox it was not there.
    println!("{}", node.sandbox_does_not_pass("missed")?);
    plugin.wait_synchronized()?;
    node.wait_state(PLUGIN, "present")?;
    node.pod_starts("after")?;
    Ok(())
}

fn reconnects_in_create(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    let (sandbox, _) = node.pod_starts("pod")?;
    plugin.fault("create_container", &AT_ONCE)?;
    println!("{}", node.container_is_refused(&sandbox, "missed")?);
    plugin.wait_synchronized()?;
    // Nobody has told the daemon, nor has it to be waited for: the hook looks for itself.
    let container = node.container(&sandbox, "after")?;
    ensure!(plugin.processed_container(&container)?);
    Ok(())
}

fn reconnects_between(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    node.pod_starts("earlier")?; // on runtimes with lists, its index is known from now on
    let sandbox = node.sandbox("pod")?;
    ensure!(plugin.processed_pod(&sandbox)?);
    plugin.disconnect(Some(Duration::ZERO))?;
    plugin.wait_synchronized()?;
    let container = node.container(&sandbox, "main")?;
    ensure!(plugin.processed_container(&container)?);
    Ok(())
}

fn killed_while_idle(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let mut plugin = node.leased_plugin()?;
    let (sandbox, _) = node.pod_starts("pod")?;
    plugin.kill();
    let_pass(Duration::from_secs(1));
    let text = node.container_is_refused(&sandbox, "second")?;
    println!("{text}");
    ensure!(text.contains("gone since"), "{text}");
    node.sandbox_does_not_pass("later")?;
    Ok(())
}

const NEVER: &str = "[enforcement]\nsandbox = \"never\"\n";

/// Exits in RunPodSandbox, and its successor is connected and registered from 50 ms later.
fn back_after_exit(version: Version, config: &str) -> Result<(Node, Plugin, String)> {
    let node = Node::start(version, config)?;
    let old = node.leased_plugin()?;
    old.fault("run_pod_sandbox", &Fault::Exit)?;
    let running = node.containerd.cri().run_pod_pending(&node.pod("missed"))?;
    old.wait_ended()?;
    let_pass(Duration::from_millis(50));
    let plugin = node.plugin(&once(PLUGIN))?;
    node.register(PLUGIN, plugin.pid(), &[])?;
    let (sandbox, _) = running.wait()?;
    ensure!(!plugin.processed_pod(&sandbox)?);
    Ok((node, plugin, sandbox))
}

fn back_and_rejected(version: Version) -> Result<()> {
    let config = format!("{NEVER}unvetted_sandboxes = \"reject\"\n");
    let (node, _plugin, sandbox) = back_after_exit(version, &config)?;
    let text = node.container_is_refused(&sandbox, "main")?;
    println!("{text}");
    ensure!(
        text.contains("has missed the start of this pod's sandbox"),
        "{text}"
    );
    ensure!(text.contains("delete the pod"), "{text}");
    // The pod that replaces it is processed.
    node.pod_starts("replacement")?;
    Ok(())
}

fn back_and_listed(version: Version) -> Result<()> {
    let (node, plugin, sandbox) = back_after_exit(version, NEVER)?;
    let container = node.container(&sandbox, "main")?;
    ensure!(plugin.processed_container(&container)?);
    let listed = node.wait_audited("missed")?;
    println!("{listed}");
    ensure!(listed["plugins"][0] == PLUGIN, "{listed}");
    Ok(())
}

fn impostor(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let mut holder = node.leased_plugin()?;
    let (sandbox, _) = node.pod_starts("pod")?;
    holder.kill();
    let impostor = node.plugin(&PluginOptions::named(PLUGIN))?;
    node.sandbox_does_not_pass("other")?;
    for name in ["second", "third"] {
        println!("{}", node.container_is_refused(&sandbox, name)?);
    }
    // What makes it the plugin is that it registers.
    node.register(PLUGIN, impostor.pid(), &[])?;
    node.pod_starts("after")?;
    Ok(())
}

fn inherited(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let mut holder = node.leased_plugin()?;
    let (sandbox, _) = node.pod_starts("pod")?;
    let heir = Heir(holder.share()?);
    holder.kill();
    // For the runtime the plugin is connected still, and slow.
    println!("{}", node.container_is_refused(&sandbox, "second")?);
    node.sandbox_does_not_pass("other")?;
    // Not even by name.
    node.register_only(PLUGIN, heir.0, &[])?;
    node.container_is_refused(&sandbox, "third")?;
    Ok(())
}

/// A process that a plugin left behind.
struct Heir(i32);

impl Drop for Heir {
    fn drop(&mut self) {
        nri_lease_harness::process::signal(self.0, nri_lease_harness::Signal::SIGKILL);
    }
}
