//! Rolling updates, restarts of the daemon, and reconnecting while a container stops.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nri_lease_harness::containerd::Version;
use nri_lease_harness::plugin::{Plugin, read_record};
use nri_lease_harness::wait::{PATIENCE, wait_until};
use nri_lease_harness::{Result, ensure};

use super::Run;
use super::node::{Node, PLUGIN, message, once};

pub const TESTS: &[(&str, Run)] = &[
    ("rolling_update_refuses_nothing", rolling_update),
    ("restarts_of_the_daemon_refuse_nothing", daemon_restarts),
    (
        "reconnecting_while_a_container_stops_neither_escapes_nor_refuses",
        slow_stop,
    ),
];

/// Starts pods until told otherwise; every refusal and every escape is a line.
fn pods_until(
    node: &Node,
    over: &AtomicBool,
    started: &AtomicU32,
    record: &Path,
) -> Result<Vec<String>> {
    let mut wrong = vec![];
    while !over.load(Ordering::Relaxed) {
        let name = format!("pod-{}", started.load(Ordering::Relaxed));
        match node.pod_starts(&name) {
            Err(error) => wrong.push(message(&error)),
            Ok((sandbox, container)) => {
                let done = read_record(record)?;
                let is_done = |id: &String| {
                    let mut mine = done.iter().filter(|e| e.done());
                    mine.any(|e| e.pod == *id || e.container == *id)
                };
                if !is_done(&sandbox) || !is_done(&container) {
                    wrong.push(format!("{name} was not processed"));
                }
                node.containerd.cri().stop_pod(&sandbox)?;
                node.containerd.cri().remove_pod(&sandbox)?;
            }
        }
        started.fetch_add(1, Ordering::Relaxed);
    }
    Ok(wrong)
}

fn rolling_update(version: Version) -> Result<()> {
    const UPDATES: u32 = 5;
    let node = Node::start(version, "")?;
    let mut old = node.leased_plugin()?;
    // One record for all instances, because they have one name.
    let record = old.record_path().to_owned();
    let (over, started) = (AtomicBool::new(false), AtomicU32::new(0));
    let (outcome, pods) = std::thread::scope(|scope| {
        let pods = scope.spawn(|| pods_until(&node, &over, &started, &record));
        let outcome = (0..UPDATES).try_for_each(|_| update(&node, &mut old, &started));
        over.store(true, Ordering::Relaxed);
        (outcome, pods.join().expect("it returns its errors"))
    });
    outcome?;
    let wrong = pods?;
    println!(
        "{} pods during {UPDATES} updates",
        started.load(Ordering::Relaxed)
    );
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// The new instance comes, the old one releases and goes, each while a pod is starting.
fn update(node: &Node, old: &mut Plugin, started: &AtomicU32) -> Result<()> {
    let next_pod = || {
        let before = started.load(Ordering::Relaxed);
        wait_until("the next pod", PATIENCE, || {
            started.load(Ordering::Relaxed) > before
        })
    };
    next_pod()?;
    let new = node.plugin(&once(PLUGIN))?;
    node.register(PLUGIN, new.pid(), &[])?;
    next_pod()?;
    let pid = old.pid().to_string();
    node.daemon.cli(&["release", PLUGIN, "--pid", &pid])?.ok()?;
    old.quit()?;
    *old = new;
    Ok(())
}

fn daemon_restarts(version: Version) -> Result<()> {
    let mut node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    node.pod_starts("before")?;
    let (sandbox, _) = node.pod_starts("present")?;
    for round in 0..4 {
        let is_killed = round % 2 == 0;
        let listed = node.audit()?.len();
        match is_killed {
            true => node.daemon.kill(),
            false => node.daemon.stop()?,
        }
        node.daemon.launch()?;
        println!("connected again after {:?}", node.daemon.connected_in);
        // What a kill loses is listed (marks are written soon, not at once); a stop loses nothing.
        ensure!(is_killed || node.audit()?.len() == listed);
        node.container(&sandbox, &format!("round-{round}"))?;
        let name = format!("round-{round}");
        node.pod_starts(&name)?;
        // The index is not known any more, so it was looked at again at the first container.
        node.wait_not_audited(&name)?;
    }
    ensure!(node.status()?["rejected_total"] == 0);
    ensure!(plugin.status()?.connections == 1);
    Ok(())
}

/// A container that ignores SIGTERM is stopped with this much grace.
const GRACE: Duration = Duration::from_secs(5);

fn slow_stop(version: Version) -> Result<()> {
    let mut node = Node::start(version, "")?;
    let plugin = node.leased_plugin()?;
    let (_, stubborn) = node.pod_starts("slow")?;
    let (sandbox, _) = node.pod_starts("present")?;
    let cri = node.containerd.cri();

    let stopping = cri.stop_container_pending(&stubborn, GRACE.as_secs() as u32)?;
    let line = format!("StopContainer for \\\"{stubborn}\\\" with timeout");
    wait_until("the stop to be under way", PATIENCE, || {
        node.containerd.log().contains(&line)
    })?;
    plugin.disconnect(Some(Duration::ZERO))?;
    wait_until("the plugin to be connected again", PATIENCE, || {
        plugin
            .status()
            .is_ok_and(|s| s.connected && s.connections > 1)
    })?;
    node.daemon.kill();
    node.daemon.spawn()?;
    let is_held_up = !plugin.status()?.synchronized;
    let began = Instant::now();
    let cri = node.containerd.cri();
    let container = cri.create_container_pending(&sandbox, "meanwhile")?;
    let pod = cri.run_pod_pending(&node.pod("meanwhile"))?;
    let container = container.wait();
    let container_took = began.elapsed();
    let pod = pod.wait();
    let pod_took = began.elapsed();
    stopping.wait()?;
    node.daemon.wait_connected()?;
    let daemon_took = began.elapsed();
    println!(
        "held up: {is_held_up}; a container took {container_took:?}, a pod {pod_took:?}, the daemon \
         was back after {daemon_took:?} (grace period {GRACE:?})"
    );
    // Whoever was admitted was processed, or is listed.
    let (container, _) = container?;
    ensure!(
        plugin.processed_container(&container)?,
        "a container escaped"
    );
    let (pod, _) = pod?;
    if !plugin.processed_pod(&pod)? {
        node.wait_audited("meanwhile")?;
    }
    plugin.wait_synchronized()?;
    node.wait_state(PLUGIN, "present")?;
    node.pod_starts("after")?;
    ensure!(node.status()?["rejected_total"] == 0);
    Ok(())
}
