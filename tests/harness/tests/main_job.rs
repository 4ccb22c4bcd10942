//! The main job on a real containerd: a plugin is required, goes away, comes back, or does not.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nri_lease_harness::containerd::{Containerd, Options, Version};
use nri_lease_harness::cri::{Pod, Status};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::plugin::{Plugin, PluginOptions};
use nri_lease_harness::runner::{self, Test};
use nri_lease_harness::wait::{PATIENCE, wait_until};
use nri_lease_harness::{Context, Result, ensure};

fn main() -> ExitCode {
    let mut tests = vec![];
    for isolated in [false, true] {
        let place = if isolated { "own_namespaces" } else { "host" };
        tests.push(Test::new(
            format!("{place}::pods_wait_for_a_killed_plugin_until_it_is_back"),
            move |_| killed_and_back(isolated),
        ));
        tests.push(Test::new(
            format!("{place}::lease_of_a_plugin_that_is_gone_runs_out"),
            move |_| runs_out(isolated),
        ));
    }
    let mut add = |name: &str, run: fn() -> Result<()>| {
        tests.push(Test::new(name, move |_| run()));
    };
    add(
        "acknowledged_lease_survives_sigkill_of_the_daemon",
        daemon_killed,
    );
    add(
        "runtime_restart_is_enforced_before_the_plugin_is_back",
        runtime_restart,
    );
    add("revoked_lease_no_longer_holds_pods_up", revoked);
    add(
        "a_hundred_rejections_leave_the_runtime_and_the_daemon_sound",
        hundred_rejections,
    );
    add(
        "plugin_that_waits_for_its_synchronize_is_not_present",
        waits_for_synchronize,
    );
    runner::main(1, tests)
}

const PLUGIN: &str = "demo";

/// containerd, the daemon and a connected plugin.
struct Node {
    containerd: Containerd,
    daemon: Daemon,
    plugin: Plugin,
    isolated: bool,
    attempts: AtomicU32,
}

impl Node {
    fn start(isolated: bool) -> Result<Self> {
        let containerd = Containerd::start(Version::V2_3, &Options::default())?;
        let daemon = Daemon::start(&containerd.dir().join("d"), &containerd.nri_socket(), "")?;
        let plugin = start_plugin(&containerd, isolated)?;
        Ok(Self {
            containerd,
            daemon,
            plugin,
            isolated,
            attempts: AtomicU32::new(0),
        })
    }

    /// Registers the plugin's process once; nobody renews.
    fn register(&self, ttl: &str) -> Result<()> {
        let pid = self.plugin.pid().to_string();
        self.daemon
            .cli(&["register", PLUGIN, "--ttl", ttl, "--pid", &pid, "--once"])?
            .ok()?;
        self.wait_state("present")
    }

    fn restart_plugin(&mut self) -> Result<()> {
        self.plugin = start_plugin(&self.containerd, self.isolated)?;
        Ok(())
    }

    fn lease(&self) -> Result<Option<serde_json::Value>> {
        let list = self.daemon.cli(&["-o", "json", "list"])?.ok()?.json()?;
        let leases = list["leases"].as_array().context("leases")?;
        Ok(leases.iter().find(|l| l["plugin"] == PLUGIN).cloned())
    }

    fn wait_state(&self, state: &str) -> Result<()> {
        let mut last = None;
        wait_until(&format!("the lease to be {state}"), PATIENCE, || {
            last = self.lease().ok().flatten();
            last.as_ref().is_some_and(|lease| lease["state"] == state)
        })
        .with_context(|| format!("last: {last:?}"))
    }

    fn pod_starts(&self, name: &str) -> Result<String> {
        let pod = self.containerd.cri().run_pod(&self.attempt(name))?;
        let container = self.containerd.cri().create_container(&pod, "main")?;
        self.containerd.cri().start_container(&container)?;
        Ok(pod)
    }

    fn sandbox_is_refused(&self, name: &str) -> Result<String> {
        refused(self.containerd.cri().run_pod(&self.attempt(name)))
    }

    /// A new attempt each time, as the kubelet makes: containerd now and then fails to clean up a
    /// refused sandbox and keeps its name.
    fn attempt(&self, name: &str) -> Pod {
        let mut pod = Pod::named(name);
        pod.attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        pod
    }

    fn container_is_refused(&self, pod: &str, name: &str) -> Result<String> {
        refused(self.containerd.cri().create_container(pod, name))
    }
}

fn start_plugin(containerd: &Containerd, isolated: bool) -> Result<Plugin> {
    let options = PluginOptions {
        isolated,
        reconnect: true,
        ..PluginOptions::named(PLUGIN)
    };
    Plugin::start_synchronized(&options, &containerd.nri_socket(), containerd.dir())
}

/// The runtime's error, which must have the text of DESIGN section 5.
fn refused(outcome: Result<String>) -> Result<String> {
    let error = match outcome {
        Ok(id) => nri_lease_harness::bail!("{id} was admitted"),
        Err(error) => error,
    };
    let status = error.downcast_ref::<Status>().context("no CRI status")?;
    let text = status.message.clone();
    for part in [
        "required NRI plugin \"demo\" is not ",
        "lease expires in ",
        "The pod is retried. Override: nri-lease revoke demo",
    ] {
        ensure!(text.contains(part), "{part:?} is not in {text:?}");
    }
    Ok(text)
}

fn killed_and_back(isolated: bool) -> Result<()> {
    let mut node = Node::start(isolated)?;
    node.register("1m")?;
    let pod = node.pod_starts("before")?;

    node.plugin.kill();
    let text = node.sandbox_is_refused("while-away")?;
    println!("{text}");
    let text = node.container_is_refused(&pod, "second")?;
    println!("{text}");
    node.wait_state("missing")?;
    let again = node.sandbox_is_refused("while-away")?;
    ensure!(again.contains("gone since"), "{again}");
    let told = node.daemon.cli(&["explain", "--pod", "default/before"])?;
    let step = "required (its lease covers this), missing: holder pid ";
    ensure!(told.stdout.contains(step), "{told:?}");

    node.restart_plugin()?;
    // Connected, and registered by nobody yet: the name alone is not enough.
    node.sandbox_is_refused("not-registered-yet")?;
    node.register("1m")?;
    node.pod_starts("after")?;
    Ok(())
}

fn runs_out(isolated: bool) -> Result<()> {
    let mut node = Node::start(isolated)?;
    let (mut watch, events) = watch(&node.daemon)?;
    node.register("5s")?;
    node.plugin.kill();
    node.sandbox_is_refused("while-away")?;
    let lease = node.lease()?.context("the lease")?;
    let left = lease["expires_in_seconds"].as_f64().context("seconds")?;
    let deadline = Instant::now() + Duration::from_secs_f64(left);
    let mut admitted = None;
    let mut pod = Pod::named("later");
    wait_until("a pod to be admitted", PATIENCE, || {
        let began = Instant::now();
        // A new attempt each time, as the kubelet does: containerd now and then fails to clean up
        // a refused sandbox ("failed to delete task: ttrpc: closed") and keeps its name.
        pod.attempt += 1;
        if node.containerd.cri().run_pod(&pod).is_ok() {
            admitted = Some(began);
        }
        admitted.is_some()
    })?;
    let began = admitted.context("admitted")?;
    // A request takes some time until it reaches the daemon: one second of grace for that.
    ensure!(
        began + Duration::from_secs(1) >= deadline,
        "admitted {:?} before the deadline",
        deadline - began
    );
    ensure!(
        began < deadline + Duration::from_secs(1),
        "admitted {:?} after the deadline",
        began - deadline
    );
    let expired = wait_for_event(&events, "expired")?;
    println!("{expired}");
    ensure!(node.lease()?.is_none());
    let _ = watch.kill();
    let _ = watch.wait();
    Ok(())
}

fn watch(daemon: &Daemon) -> Result<(Child, mpsc::Receiver<String>)> {
    let mut command: Command = daemon.cli_command(&["-o", "json", "watch"])?;
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let lines = BufReader::new(child.stdout.take().context("stdout")?).lines();
    let (sender, events) = mpsc::channel();
    std::thread::spawn(move || {
        for line in lines.map_while(std::result::Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    // A renewal of a name that is not leased is refused, and no event: registering a first lease
    // and seeing its event shows that the stream is open.
    let mut opened = None;
    let pid = std::process::id().to_string();
    wait_until("the event stream to be open", PATIENCE, || {
        let _ = daemon.cli(&["register", "probe", "--pid", &pid, "--once"]);
        opened = events.recv_timeout(Duration::from_millis(100)).ok();
        opened.is_some()
    })?;
    daemon.cli(&["revoke", "probe"])?.ok()?;
    Ok((child, events))
}

fn wait_for_event(events: &mpsc::Receiver<String>, kind: &str) -> Result<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = events
            .recv_timeout(left)
            .with_context(|| format!("no event {kind}"))?;
        let event: serde_json::Value = serde_json::from_str(&line)?;
        if event["kind"] == kind && event["plugin"] == PLUGIN {
            return Ok(line);
        }
    }
}

fn daemon_killed() -> Result<()> {
    let mut node = Node::start(false)?;
    let pid = node.plugin.pid().to_string();
    node.daemon
        .cli(&["register", PLUGIN, "--ttl", "30s", "--pid", &pid, "--once"])?
        .ok()?;
    let acknowledged = Instant::now();
    node.daemon.kill();
    node.plugin.kill();
    node.daemon.launch()?;
    let lease = node.lease()?.context("the lease is lost")?;
    ensure!(lease["state"] == "missing", "{lease}");
    let left = lease["expires_in_seconds"].as_f64().context("seconds")?;
    let expected = 30.0 - acknowledged.elapsed().as_secs_f64();
    ensure!(
        (left - expected).abs() < 2.0,
        "{left} s left, expected {expected}"
    );
    node.sandbox_is_refused("while-away")?;
    Ok(())
}

fn runtime_restart() -> Result<()> {
    let mut node = Node::start(false)?;
    node.register("1m")?;
    let pod = node.pod_starts("before")?;
    node.plugin.kill();
    node.containerd.restart()?;
    // At once: nobody waits for the daemon here.
    node.sandbox_is_refused("right-after")?;
    node.container_is_refused(&pod, "right-after")?;
    node.restart_plugin()?;
    node.register("1m")?;
    node.pod_starts("after")?;
    // The plugin lives through the next one and registers nothing again.
    node.containerd.restart()?;
    node.plugin.wait_synchronized()?;
    node.pod_starts("plugin-reconnected")?;
    Ok(())
}

fn revoked() -> Result<()> {
    let mut node = Node::start(false)?;
    node.register("1m")?;
    node.plugin.kill();
    node.sandbox_is_refused("before")?;
    node.daemon.cli(&["revoke", PLUGIN])?.ok()?;
    node.pod_starts("after")?;
    ensure!(node.lease()?.is_none());
    Ok(())
}

fn hundred_rejections() -> Result<()> {
    let mut node = Node::start(false)?;
    node.register("10m")?;
    node.plugin.kill();
    for attempt in 0..100 {
        node.sandbox_is_refused("again")
            .with_context(|| format!("attempt {attempt}"))?;
    }
    node.containerd.restart()?;
    node.daemon.wait_connected()?;
    let status = node.daemon.cli(&["-o", "json", "status"])?.ok()?.json()?;
    ensure!(status["rejected_total"] == 100, "{status}");
    node.sandbox_is_refused("still")?;
    node.restart_plugin()?;
    node.register("1m")?;
    node.pod_starts("again")?;
    Ok(())
}

fn waits_for_synchronize() -> Result<()> {
    let node = Node::start(false)?;
    node.register("1m")?;
    let slow = node.containerd.cri().run_pod(&Pod::named("slow"))?;
    let container = node.containerd.cri().create_container(&slow, "stubborn")?;
    node.containerd.cri().start_container(&container)?;
    let existing = node.containerd.cri().run_pod(&Pod::named("existing"))?;

    // The stop holds plugin synchronisation up for its whole grace period.
    let stopping = node
        .containerd
        .cri()
        .stop_container_pending(&container, 4)?;
    let line = format!("StopContainer for \\\"{container}\\\" with timeout");
    wait_until("the stop to be under way", PATIENCE, || {
        node.containerd.log().contains(&line)
    })?;
    node.plugin.disconnect(Some(Duration::ZERO))?;
    let mut status = node.plugin.status()?;
    wait_until("the plugin to be connected again", PATIENCE, || {
        status = node.plugin.status().unwrap_or_else(|_| status.clone());
        status.connected && !status.synchronized
    })?;
    // Connected, and the process lives; but nobody calls it yet.
    node.wait_state("missing")?;
    let waiting = node
        .containerd
        .cri()
        .create_container_pending(&existing, "meanwhile")?;
    ensure!(
        !node.plugin.status()?.synchronized,
        "the stop ended too early"
    );
    stopping.wait()?;
    node.plugin.wait_synchronized()?;
    node.wait_state("present")?;
    // The runtime held it back behind the plugin, so the plugin has seen it.
    let (container, _) = waiting.wait()?;
    ensure!(node.plugin.processed_container(&container)?);
    node.pod_starts("after")?;
    Ok(())
}
