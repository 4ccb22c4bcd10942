//! Whose connection is it? Two plugins in one process, plugins that the runtime starts itself, and
//! registrations that say what the plugin listens to or which socket is its own.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use nri_lease_harness::containerd::Version;
use nri_lease_harness::plugin::{Fault, Nri, Plugin, PluginOptions, read_record};
use nri_lease_harness::registry;
use nri_lease_harness::wait::{PATIENCE, wait_for};
use nri_lease_harness::{Result, Signal, ensure, gobin, process};
use nri_lease_proto::lease::registry::RegisterRequest;
use nri_lease_proto::lease::types::{EventMask, Subject};

use super::Run;
use super::node::{Node, PLUGIN, let_pass, once};

pub const TESTS: &[(&str, Run)] = &[
    ("deaf_plugin_is_refused_if_it_says_so", deaf),
    (
        "of_two_plugins_in_a_process_the_one_dropped_in_a_call_is_missing",
        dropped_in_a_call,
    ),
    (
        "of_two_plugins_in_a_process_the_one_lost_while_idle_is_missing",
        lost_while_idle,
    ),
    (
        "two_plugins_in_a_process_that_name_their_sockets_are_told_apart_at_once",
        told_apart_by_socket,
    ),
    ("plugin_that_the_runtime_starts_itself", launched),
];

fn request(plugin: &str, pid: i32) -> RegisterRequest {
    let pid = u32::try_from(pid).expect("a pid is positive");
    RegisterRequest {
        plugin: plugin.to_owned(),
        subject: Some(Subject {
            pid,
            ..Default::default()
        })
        .into(),
        ..Default::default()
    }
}

const STOP_POD_SANDBOX: i32 = 1 << 1;

fn deaf(version: Version) -> Result<()> {
    let node = Node::start(version, "")?;
    let plugin = node.plugin(&PluginOptions {
        events: "stop_pod_sandbox".to_owned(),
        ..once(PLUGIN)
    })?;
    let says_so = RegisterRequest {
        events: Some(EventMask {
            mask: STOP_POD_SANDBOX,
            ..Default::default()
        })
        .into(),
        ..request(PLUGIN, plugin.pid())
    };
    let refused = registry::register(&node.daemon.run_dir(), &says_so);
    let text = format!("{:#}", refused.expect_err("it can never process a pod"));
    println!("{text}");
    for part in ["demo", "RunPodSandbox", "CreateContainer"] {
        ensure!(text.contains(part), "{part} is not in {text}");
    }
    ensure!(node.lease(PLUGIN)?.is_none());
    // Said nothing: present, as for the runtime.
    node.register(PLUGIN, plugin.pid(), &[])?;
    node.pod_starts("pod")?;
    Ok(())
}

/// Plugins "demo" (pods of namespace a) and "other" (of b) in one process, and a pod for each.
struct Two {
    node: Node,
    plugin: Plugin,
    in_a: String,
    in_b: String,
}

impl Two {
    fn start(version: Version) -> Result<Self> {
        let node = Node::start(version, "")?;
        let plugin = node.plugin(&PluginOptions {
            second: Some("other".to_owned()),
            ..once(PLUGIN)
        })?;
        plugin.second().wait_synchronized()?;
        for (name, namespace) in [(PLUGIN, "a"), ("other", "b")] {
            let scope = node.scope_of(namespace)?;
            node.register(name, plugin.pid(), &["--scope", &scope])?;
        }
        let (in_a, _) = node.pod_starts_in("a", "pod-a")?;
        let (in_b, _) = node.pod_starts_in("b", "pod-b")?;
        Ok(Self {
            node,
            plugin,
            in_a,
            in_b,
        })
    }

    /// "demo" is gone and stays refused, on either way; "other" is admitted in the end.
    fn only_other_is_there(&self) -> Result<()> {
        let node = &self.node;
        let refusals = node.pod_starts_in_the_end("b", "new-b")?;
        println!(
            "pods of the healthy plugin were refused {} times",
            refusals.len()
        );
        node.wait_not_audited("new-b")?;
        node.container(&self.in_b, "second")?;
        node.pod_starts_in("b", "newer-b")?;
        for name in ["second", "third"] {
            println!("{}", node.container_is_refused(&self.in_a, name)?);
        }
        let outcome = node
            .containerd
            .cri()
            .run_pod(&node.pod("new-a").namespace("a"));
        match node.refuses_sandboxes() {
            true => println!("{}", super::node::refused(outcome)?),
            false => println!("{}", node.container_is_refused(&outcome?, "main")?),
        }
        ensure!(
            node.lease("other")?
                .is_some_and(|l| l["state"] == "present")
        );
        ensure!(node.lease(PLUGIN)?.is_some_and(|l| l["state"] == "missing"));
        Ok(())
    }

    fn both_again(&self) -> Result<()> {
        self.plugin.connect()?;
        self.plugin.wait_synchronized()?;
        self.node.wait_state(PLUGIN, "present")?;
        self.node.pod_starts_in("a", "again-a")?;
        self.node.pod_starts_in("b", "again-b")?;
        Ok(())
    }
}

fn dropped_in_a_call(version: Version) -> Result<()> {
    let two = Two::start(version)?;
    let late = Fault::Sleep(Duration::from_secs(3));
    two.plugin.fault("create_container", &late)?;
    println!("{}", two.node.container_is_refused(&two.in_a, "dropped")?);
    if !version.validates() {
        // Without lists nobody can say whose connection it was: neither passes on the other's.
        two.node.container_is_refused(&two.in_b, "unclear")?;
        return two.both_again();
    }
    two.only_other_is_there()?;
    two.both_again()
}

fn lost_while_idle(version: Version) -> Result<()> {
    if !version.validates() {
        // As above.
        return Ok(());
    }
    let two = Two::start(version)?;
    two.plugin.disconnect(None)?;
    two.node.wait_state(PLUGIN, "missing")?;
    two.only_other_is_there()?;
    two.both_again()
}

fn told_apart_by_socket(version: Version) -> Result<()> {
    let two = Two::start(version)?;
    let run_dir = two.node.daemon.run_dir();
    for (name, inode, namespace) in [
        (PLUGIN, two.plugin.status()?.inode, "a"),
        ("other", two.plugin.second().status()?.inode, "b"),
    ] {
        ensure!(inode != 0);
        let scope = nri_lease_proto::lease::types::Scope {
            rules: vec![nri_lease_proto::lease::types::ScopeRule {
                namespaces: vec![namespace.to_owned()],
                ..Default::default()
            }],
            ..Default::default()
        };
        registry::register(
            &run_dir,
            &RegisterRequest {
                connection_inode: inode,
                scope: Some(scope).into(),
                ..request(name, two.plugin.pid())
            },
        )?;
    }
    two.plugin.disconnect(None)?;
    two.node.container_is_refused(&two.in_a, "second")?;
    two.node.container(&two.in_b, "second")?;
    two.node.pod_starts_in("b", "new-b")?;
    Ok(())
}

fn launched(version: Version) -> Result<()> {
    let mut node = Node::start(version, "")?;
    let program = gobin::need(&format!("{}/plugin", Nri::V0_12.folder()))?;
    let record = node.containerd.dir().join("launched.record");
    let script = node.containerd.plugin_dir().join("10-launched");
    std::fs::create_dir_all(node.containerd.plugin_dir())?;
    std::fs::write(
        &script,
        format!(
            "#!/bin/sh\nexec {} -record {}\n",
            program.display(),
            record.display()
        ),
    )?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    node.containerd.restart()?;
    node.daemon.wait_connected()?;
    let pid = wait_for("the launched plugin", PATIENCE, || {
        let record = read_record(&record).ok()?;
        record
            .iter()
            .find(|e| e.event == "synchronize")
            .map(|e| e.pid)
    })?;
    node.register("launched", pid, &[])?;
    let (sandbox, container) = node.pod_starts("pod")?;
    let done = read_record(&record)?;
    ensure!(done.iter().any(|e| e.pod == sandbox && e.done()));
    ensure!(done.iter().any(|e| e.container == container && e.done()));

    process::signal(pid, Signal::SIGKILL);
    let_pass(Duration::from_millis(100));
    println!("{}", node.container_is_refused(&sandbox, "second")?);
    node.sandbox_does_not_pass("other")?;
    Ok(())
}
