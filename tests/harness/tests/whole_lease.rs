//! The whole lease on a real containerd: plugins that run as pods come back after a reboot, a
//! rollout replaces one, a pin holds up one pod, a pause lets everything pass.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nri_lease_harness::containerd::{Containerd, Options, Version};
use nri_lease_harness::cri::{Pod, Status};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::plugin::{Plugin, PluginOptions};
use nri_lease_harness::runner::{self, Test};
use nri_lease_harness::wait::{PATIENCE, wait_until};
use nri_lease_harness::{Context, Result, bail, ensure};
use serde_json::Value;

fn main() -> ExitCode {
    let mut tests = vec![];
    let mut add = |name: &str, run: fn() -> Result<()>| {
        tests.push(Test::new(name, move |_| run()));
    };
    add(
        "two_plugins_in_pods_come_back_after_a_reboot_and_workloads_wait_for_both",
        reboot,
    );
    add(
        "a_rollout_replaces_the_plugins_pod_while_its_lease_is_live",
        rollout,
    );
    add(
        "a_pinned_pod_is_refused_while_every_other_pod_starts",
        pinned,
    );
    add(
        "a_pause_lets_everything_pass_and_ends_in_time_across_a_restart",
        paused,
    );
    runner::main(1, tests)
}

const NET_UID: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a01";
const NEW_NET_UID: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a02";
const CPU_UID: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a03";
const NEW_CPU_UID: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a04";

struct Node {
    containerd: Containerd,
    daemon: Daemon,
    /// Attempts by pod: a new one each time, as the kubelet does. containerd now and then keeps the
    /// name of a refused sandbox.
    attempts: Mutex<HashMap<String, u32>>,
}

impl Node {
    fn start() -> Result<Self> {
        let containerd = Containerd::start(Version::V2_3, &Options::default())?;
        let daemon = Daemon::start(&containerd.dir().join("d"), &containerd.nri_socket(), "")?;
        Ok(Self {
            containerd,
            daemon,
            attempts: Mutex::default(),
        })
    }

    /// A plugin's process in its pod's cgroup, registered with the runtime only.
    fn plugin(&self, name: &str, pod_uid: Option<&str>) -> Result<Plugin> {
        let options = PluginOptions::named(name);
        let dir = self.containerd.dir();
        let plugin = Plugin::start_synchronized(&options, &self.containerd.nri_socket(), dir)?;
        if let Some(uid) = pod_uid {
            let procs = pod_cgroup(dir, uid)?.join("cgroup.procs");
            std::fs::write(&procs, plugin.pid().to_string())
                .with_context(|| format!("entering {}", procs.display()))?;
        }
        Ok(plugin)
    }

    fn required_plugin(&self, name: &str, pod_uid: Option<&str>) -> Result<Plugin> {
        let plugin = self.plugin(name, pod_uid)?;
        let pid = plugin.pid().to_string();
        let register = ["register", name, "--ttl", "5m", "--pid", &pid, "--once"];
        self.daemon.cli(&register)?.ok()?;
        self.wait_state(name, "present")?;
        Ok(plugin)
    }

    fn json(&self, args: &[&str]) -> Result<Value> {
        self.daemon
            .cli(&[&["-o", "json"], args].concat())?
            .ok()?
            .json()
    }

    fn lease(&self, plugin: &str) -> Result<Option<Value>> {
        let list = self.json(&["list"])?;
        let leases = list["leases"].as_array().context("leases")?;
        Ok(leases.iter().find(|l| l["plugin"] == plugin).cloned())
    }

    fn wait_state(&self, plugin: &str, state: &str) -> Result<()> {
        let mut last = None;
        wait_until(&format!("{plugin} to be {state}"), PATIENCE, || {
            last = self.lease(plugin).ok().flatten();
            last.as_ref().is_some_and(|lease| lease["state"] == state)
        })
        .with_context(|| format!("last: {last:?}"))
    }

    fn wait_pins(&self, pins: u64) -> Result<()> {
        wait_until(&format!("{pins} pins"), PATIENCE, || {
            self.json(&["status"])
                .is_ok_and(|status| status["pins"] == pins)
        })
    }

    fn run_pod(&self, pod: &Pod) -> Result<String> {
        let mut pod = pod.clone();
        let mut attempts = self.attempts.lock().expect("no test thread panicked");
        let attempt = attempts.entry(pod.name.clone()).or_default();
        pod.attempt = *attempt;
        *attempt += 1;
        self.containerd.cri().run_pod(&pod)
    }

    fn starts(&self, pod: &Pod) -> Result<String> {
        let sandbox = self.run_pod(pod).with_context(|| pod.name.clone())?;
        let container = self.containerd.cri().create_container(&sandbox, "main")?;
        self.containerd.cri().start_container(&container)?;
        Ok(sandbox)
    }

    fn is_refused(&self, pod: &Pod, parts: &[&str]) -> Result<()> {
        refused(self.run_pod(pod), parts)
    }
}

fn refused(outcome: Result<String>, parts: &[&str]) -> Result<()> {
    let error = match outcome {
        Ok(id) => bail!("{id} was admitted"),
        Err(error) => error,
    };
    let text = &error
        .downcast_ref::<Status>()
        .context("no CRI status")?
        .message;
    for part in parts {
        ensure!(text.contains(part), "{part:?} is not in {text:?}");
    }
    println!("{text}");
    Ok(())
}

/// A pod's cgroup as the kubelet names it, below the scratch directory's, which is emptied with it.
fn pod_cgroup(scratch: &Path, uid: &str) -> Result<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let pids = root.join("pids");
    let hierarchy = if pids.is_dir() { &pids } else { root };
    let name = scratch.file_name().context("a name")?;
    let pod = hierarchy
        .join(name)
        .join(format!("kubepods/besteffort/pod{uid}"));
    std::fs::create_dir_all(&pod)?;
    Ok(pod)
}

fn provider(name: &str, uid: &str, app: &str, revision: &str) -> Pod {
    Pod::named(name)
        .namespace("kube-system")
        .uid(uid)
        .label("app", app)
        .label("controller-revision-hash", revision)
        .label("pod-template-generation", revision)
}

fn reboot() -> Result<()> {
    let mut node = Node::start()?;
    node.starts(&provider("dranet-x7k2p", NET_UID, "dranet", "1"))?;
    node.starts(&provider("cpu-b9wzq", CPU_UID, "cpu", "1"))?;
    let net = node.required_plugin("dra.net", Some(NET_UID))?;
    let cpu = node.required_plugin("cpu", Some(CPU_UID))?;
    let host = node.lease("dra.net")?.context("a lease")?["holders"][0]["pod"].clone();
    ensure!(host["name"] == "dranet-x7k2p", "{host}");
    node.starts(&Pod::named("before"))?;

    // Nothing is left of the boot before but what is on the disk.
    drop((net, cpu));
    node.daemon.kill();
    node.containerd.remove_all()?;
    node.containerd.kill();
    node.containerd.launch()?;
    node.daemon.launch()?;
    ensure!(node.containerd.cri().pods()?.is_empty());

    node.is_refused(
        &Pod::named("web"),
        &["required NRI plugin \"cpu\"", "also missing: dra.net"],
    )?;
    let etcd = Pod::named("etcd")
        .namespace("kube-system")
        .annotation("kubernetes.io/config.source", "file");
    node.starts(&etcd)?;
    // One pod as it was, one made anew by its controller; no manual step.
    node.starts(&provider("dranet-x7k2p", NET_UID, "dranet", "1"))?;
    node.starts(&provider("cpu-d4f5g", NEW_CPU_UID, "cpu", "1"))?;
    let _net = node.required_plugin("dra.net", Some(NET_UID))?;
    node.is_refused(&Pod::named("web"), &["required NRI plugin \"cpu\""])?;
    let _cpu = node.required_plugin("cpu", Some(NEW_CPU_UID))?;
    node.starts(&Pod::named("web"))?;
    Ok(())
}

fn rollout() -> Result<()> {
    let node = Node::start()?;
    let pod = node.starts(&provider("dranet-x7k2p", NET_UID, "dranet", "1"))?;
    let old = node.required_plugin("dra.net", Some(NET_UID))?;
    node.starts(&Pod::named("before"))?;

    kill(Pid::from_raw(old.pid()), Signal::SIGTERM)?;
    old.wait_ended()?;
    node.containerd.cri().stop_pod(&pod)?;
    node.containerd.cri().remove_pod(&pod)?;
    node.wait_state("dra.net", "missing")?;
    node.is_refused(
        &Pod::named("web"),
        &[
            "required NRI plugin \"dra.net\" is not connected to the runtime (lease expires in ",
            "gone since ",
            "The pod is retried. Override: nri-lease revoke dra.net",
        ],
    )?;
    node.starts(&provider("dranet-b9wzq", NEW_NET_UID, "dranet", "2"))?;
    let elsewhere = provider("dranet-c8xyz", NEW_CPU_UID, "dranet", "2").namespace("default");
    node.is_refused(&elsewhere, &["required NRI plugin \"dra.net\""])?;
    let _new = node.required_plugin("dra.net", Some(NEW_NET_UID))?;
    node.starts(&Pod::named("web"))?;
    Ok(())
}

fn pinned() -> Result<()> {
    let mut node = Node::start()?;
    let plugin = node.plugin("dra.net", None)?;
    let scope = node.containerd.dir().join("scope.yaml");
    std::fs::write(&scope, "- namespaces: [nowhere]\n")?;
    let pid = plugin.pid().to_string();
    let scope = scope.to_str().context("UTF-8")?;
    node.daemon
        .cli(&[
            "register", "dra.net", "--ttl", "5m", "--pid", &pid, "--once", "--scope", scope,
        ])?
        .ok()?;
    node.wait_state("dra.net", "present")?;
    let claims = Pod::named("claims").uid(NET_UID);
    node.daemon.cli(&["pin", "dra.net", NET_UID])?.ok()?;
    let sandbox = node.starts(&claims)?;
    drop(plugin);
    node.wait_state("dra.net", "missing")?;

    let unpin = format!("Override: nri-lease unpin dra.net {NET_UID}");
    node.is_refused(&claims, &["the pod is pinned to it for ", &unpin])?;
    let second = node.containerd.cri().create_container(&sandbox, "second");
    refused(second, &["the pod is pinned to it for ", &unpin])?;
    node.starts(&Pod::named("other"))?;
    node.wait_pins(1)?;

    // containerd tells nobody of the end of a pod that is older than itself: the comparison does.
    node.containerd.restart()?;
    node.daemon.wait_connected()?;
    node.is_refused(&claims, &["the pod is pinned to it"])?;
    node.containerd.cri().stop_pod(&sandbox)?;
    node.containerd.cri().remove_pod(&sandbox)?;
    node.daemon.stop()?;
    node.daemon.launch()?;
    node.wait_pins(0)?;
    node.starts(&claims)?;

    // The end of one that it has seen start is told.
    node.daemon.cli(&["pin", "dra.net", NEW_NET_UID])?.ok()?;
    node.is_refused(&Pod::named("next").uid(NEW_NET_UID), &["pinned"])?;
    node.wait_pins(1)?;
    node.daemon.cli(&["unpin", "dra.net", NEW_NET_UID])?.ok()?;
    let next = node.starts(&Pod::named("next").uid(NEW_NET_UID))?;
    node.daemon.cli(&["pin", "dra.net", NEW_NET_UID])?.ok()?;
    node.containerd.cri().stop_pod(&next)?;
    node.containerd.cri().remove_pod(&next)?;
    node.wait_pins(0)?;
    Ok(())
}

fn paused() -> Result<()> {
    let mut node = Node::start()?;
    let plugin = node.required_plugin("dra.net", None)?;
    let pod = node.starts(&Pod::named("before"))?;
    drop(plugin);
    node.wait_state("dra.net", "missing")?;
    node.is_refused(&Pod::named("web"), &["dra.net"])?;

    let began = Instant::now();
    let pause = ["pause", "--for", "5s", "--reason", "incident 7"];
    node.daemon.cli(&pause)?.ok()?;
    node.starts(&Pod::named("during"))?;
    node.containerd.cri().create_container(&pod, "during")?;
    let status = node.json(&["status"])?;
    ensure!(status["pause"]["reason"] == "incident 7", "{status}");
    ensure!(status["pause"]["set_by_uid"] == 0, "{status}");
    node.daemon.kill();
    node.daemon.launch()?;
    let status = node.json(&["status"])?;
    ensure!(status["pause"]["reason"] == "incident 7", "{status}");
    wait_until("the pause to end", PATIENCE, || {
        node.json(&["status"])
            .is_ok_and(|status| status["pause"].is_null())
    })?;
    let took = began.elapsed().as_secs_f64();
    ensure!((5.0..7.0).contains(&took), "it took {took} s");
    node.is_refused(&Pod::named("web"), &["dra.net"])?;
    refused(
        node.containerd.cri().create_container(&pod, "afterwards"),
        &["dra.net"],
    )
}
