//! What goes wrong, one thing at a time. Each fault makes the trouble, ends it, and returns when
//! the last obstacle was gone; that all is well again is confirmed by the injector.

use std::time::Duration;

use fastrand::Rng;
use nix::sys::signal::Signal;
use nri_lease_harness::plugin::Fault;
use nri_lease_harness::wait::{PATIENCE, wait_until};
use nri_lease_harness::{Result, ensure};

use super::journal::{MILLISECOND, SECOND, Time, now};
use super::node::Node;

type Inject = fn(&mut Node, &mut Rng) -> Result<Time>;

/// A kind of fault.
#[derive(Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    /// The plugin is away for some time, so that refusing is right.
    pub may_refuse: bool,
    /// The daemon may not be connected.
    pub daemon_away: bool,
    needs_daemon: bool,
    pub inject: Inject,
}

const fn plugin(name: &'static str, inject: Inject) -> Kind {
    Kind {
        name,
        may_refuse: true,
        daemon_away: false,
        needs_daemon: false,
        inject,
    }
}

const fn harmless(name: &'static str, inject: Inject) -> Kind {
    Kind {
        may_refuse: false,
        ..plugin(name, inject)
    }
}

const fn daemon(name: &'static str, inject: Inject) -> Kind {
    Kind {
        daemon_away: true,
        needs_daemon: true,
        ..plugin(name, inject)
    }
}

const fn runtime(name: &'static str, inject: Inject) -> Kind {
    Kind {
        daemon_away: true,
        ..plugin(name, inject)
    }
}

/// The deck that the injector shuffles.
const KINDS: [Kind; 20] = [
    plugin("plugin killed", killed),
    plugin("plugin killed in RunPodSandbox", |n, r| {
        dies_in(n, r, SANDBOX)
    }),
    plugin("plugin killed in CreateContainer", |n, r| {
        dies_in(n, r, CONTAINER)
    }),
    plugin("plugin slow in RunPodSandbox", |n, r| {
        slow_in(n, r, SANDBOX)
    }),
    plugin("plugin slow in CreateContainer", |n, r| {
        slow_in(n, r, CONTAINER)
    }),
    plugin("plugin stopped for seconds", |n, r| {
        stopped(n, r.u64(2_200..4_500))
    }),
    harmless("plugin stopped for a moment", |n, r| {
        stopped(n, r.u64(50..700))
    }),
    plugin("plugin disconnected", disconnected),
    plugin(
        "plugin disconnected, not at once back",
        disconnected_for_long,
    ),
    plugin("plugin leaves in RunPodSandbox", |n, r| {
        leaves_in(n, r, SANDBOX)
    }),
    plugin("plugin leaves in CreateContainer", |n, r| {
        leaves_in(n, r, CONTAINER)
    }),
    plugin("plugin restarted", restarted),
    harmless("plugin upgraded", upgraded),
    daemon("daemon killed", |n, r| daemon_restarted(n, r, true)),
    daemon("daemon terminated", |n, r| daemon_restarted(n, r, false)),
    daemon("daemon and plugin killed", both_killed),
    daemon(
        "daemon killed, plugin slow meanwhile",
        slow_while_daemon_away,
    ),
    runtime("containerd killed", |n, r| runtime_restarted(n, r, true)),
    runtime("containerd terminated", |n, r| {
        runtime_restarted(n, r, false)
    }),
    plugin("plugin gone for good", gone_for_good),
];

const SANDBOX: &str = "run_pod_sandbox";
const CONTAINER: &str = "create_container";

/// All kinds that this variant can have, in a random order.
pub fn deck(has_daemon: bool, rng: &mut Rng) -> Vec<Kind> {
    let mut deck: Vec<Kind> = KINDS
        .into_iter()
        .filter(|kind| has_daemon || !kind.needs_daemon)
        .collect();
    rng.shuffle(&mut deck);
    deck
}

/// The length of a fault, not a wait for something.
fn last(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// A new process, which registers and connects at the same time, as plugins do.
fn plugin_back(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    let healed = now();
    node.start_plugin(rng.u8(..3) == 0)?;
    node.register()?;
    Ok(healed)
}

fn killed(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    node.kill_plugin()?;
    last(rng.u64(0..2_000));
    plugin_back(node, rng)
}

fn dies_in(node: &mut Node, rng: &mut Rng, hook: &str) -> Result<Time> {
    let fault = if rng.bool() { Fault::Kill } else { Fault::Exit };
    node.plugin()?.fault(hook, &fault)?;
    node.reap_plugin()?;
    node.shared.say(format!("{fault:?} has struck"));
    last(rng.u64(0..1_500));
    plugin_back(node, rng)
}

fn slow_in(node: &mut Node, rng: &mut Rng, hook: &str) -> Result<Time> {
    let before = node.plugin()?.status()?.connections;
    let time = Duration::from_millis(rng.u64(2_200..3_500));
    node.plugin()?.fault(hook, &Fault::Sleep(time))?;
    wait_connections(node, before)?;
    Ok(now())
}

/// The plugin has lost its connection and is on its way to the next one.
fn wait_connections(node: &mut Node, before: u64) -> Result<()> {
    let plugin = node.plugin()?;
    wait_until("the plugin to connect again", PATIENCE, || {
        plugin.status().is_ok_and(|s| s.connections > before)
    })
}

fn stopped(node: &mut Node, ms: u64) -> Result<Time> {
    node.plugin()?.freeze();
    last(ms);
    let healed = now();
    node.plugin()?.thaw();
    node.shared.say(format!("thawed after {ms} ms"));
    Ok(healed)
}

fn disconnected(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    let before = node.plugin()?.status()?.connections;
    let after = Duration::from_millis(rng.u64(0..300));
    node.plugin()?.disconnect(Some(after))?;
    wait_connections(node, before)?;
    Ok(now())
}

fn disconnected_for_long(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    node.plugin()?.disconnect(None)?;
    last(rng.u64(200..2_000));
    let healed = now();
    node.plugin()?.connect()?;
    Ok(healed)
}

fn leaves_in(node: &mut Node, rng: &mut Rng, hook: &str) -> Result<Time> {
    let before = node.plugin()?.status()?.connections;
    let after = Duration::from_millis(rng.u64(0..100));
    let fault = Fault::Disconnect {
        reconnect_after: Some(after),
    };
    node.plugin()?.fault(hook, &fault)?;
    wait_connections(node, before)?;
    Ok(now())
}

/// A rollout with maxSurge 0.
fn restarted(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    let pid = node.plugin()?.pid();
    nri_lease_harness::process::signal(pid, Signal::SIGTERM);
    last(rng.u64(0..300));
    node.kill_plugin()?;
    plugin_back(node, rng)
}

/// A rollout with maxSurge 1: no request may be refused at any time.
fn upgraded(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    node.upgrade(rng.u8(..3) == 0, rng.bool())?;
    Ok(now())
}

fn end_daemon(node: &mut Node, kill: bool) -> Result<()> {
    if kill {
        node.daemon()?.kill();
    } else {
        node.daemon()?.stop()?;
    }
    let ledger = &node.shared.ledger;
    ledger.daemon_dead_from(now());
    node.shared.say("the daemon is gone".to_owned());
    Ok(())
}

fn daemon_back(node: &mut Node) -> Result<Time> {
    let healed = now();
    node.shared.ledger.daemon_dead_until(healed);
    node.daemon()?.spawn()?;
    node.shared.say("the daemon is started".to_owned());
    Ok(healed)
}

fn daemon_restarted(node: &mut Node, rng: &mut Rng, kill: bool) -> Result<Time> {
    end_daemon(node, kill)?;
    last(rng.u64(0..1_500));
    daemon_back(node)
}

/// Sandboxes start and nobody sees them: those are what `audit` is for.
fn both_killed(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    end_daemon(node, true)?;
    node.kill_plugin()?;
    last(rng.u64(200..1_500));
    if rng.bool() {
        daemon_back(node)?;
        plugin_back(node, rng)
    } else {
        let healed = now();
        node.start_plugin(false)?;
        daemon_back(node)?;
        node.register()?;
        Ok(healed)
    }
}

fn slow_while_daemon_away(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    let before = node.plugin()?.status()?.connections;
    end_daemon(node, true)?;
    let time = Duration::from_millis(rng.u64(2_200..3_000));
    node.plugin()?.fault(SANDBOX, &Fault::Sleep(time))?;
    last(rng.u64(100..3_000));
    let healed = daemon_back(node)?;
    wait_connections(node, before)?;
    Ok(healed)
}

fn runtime_restarted(node: &mut Node, rng: &mut Rng, kill: bool) -> Result<Time> {
    let before = node.plugin()?.status()?.connections;
    node.end_containerd(kill)?;
    node.shared.say("containerd is gone".to_owned());
    last(rng.u64(0..1_000));
    let healed = now();
    node.containerd.spawn()?;
    node.containerd.wait_ready()?;
    node.shared.say("CRI answers".to_owned());
    wait_connections(node, before)?;
    Ok(healed)
}

/// The shortest TTL there is.
const SHORT_TTL: &str = "5s";
const SHORT_TTL_MS: u64 = 5_000;

/// Nobody brings it back: the lease runs out and pods start. Later it comes back after all.
fn gone_for_good(node: &mut Node, rng: &mut Rng) -> Result<Time> {
    let shared = node.shared.clone();
    let ledger = &shared.ledger;
    let deadline = if node.has_daemon() {
        node.let_lease_run_out(SHORT_TTL)?
    } else {
        now() + SHORT_TTL_MS * MILLISECOND
    };
    ledger.lease_ends_at(deadline);
    node.kill_plugin()?;
    if node.has_daemon() {
        wait_until("the lease to run out", PATIENCE, || {
            node.lease().is_ok_and(|lease| lease.is_none())
        })?;
        let late = shared.since(deadline);
        shared.say(format!(
            "the lease has run out, seen {} ms after the deadline",
            late / MILLISECOND
        ));
        ensure!(
            late < 3 * SECOND,
            "the lease lives {late} ns beyond its deadline"
        );
        // From here on nothing may be refused, although the plugin is away.
        ledger.close_window(now());
        let since = now();
        let mut first = None;
        wait_until("pods to start without the plugin", PATIENCE, || {
            let (sandboxes, containers, at) = shared.admitted_since(since);
            first = at;
            sandboxes > 0 && containers > 0
        })?;
        let took = first.map_or(0, |at| at.saturating_sub(deadline));
        ledger.recovered("pods start after the lease has run out", took);
    } else {
        last(SHORT_TTL_MS + rng.u64(0..500));
    }
    ledger.open_window("plugin back after its lease", now(), true, false);
    let healed = plugin_back(node, rng)?;
    ledger.lease_lives_from(now());
    Ok(healed)
}
