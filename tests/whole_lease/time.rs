//! Leases end when they should, whatever restarts and clocks do.

use std::time::{Duration, Instant};

use nri_lease_state::store::{self, Store, Tree, Write};
use serde_json::Value;

use super::node::{LIMIT, Node, QUICK, workload};

const DAY_NS: i64 = 86_400 * 1_000_000_000;

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_plugins_lease_ends_in_time_although_the_daemon_is_restarted_every_second() {
    let mut node = Node::start(QUICK).await;
    let plugin = node.required_plugin("dra.net", None, "6s").await;
    drop(plugin);
    let left = node.seconds_left("dra.net").expect("a lease");
    let deadline = Instant::now() + Duration::from_secs_f64(left);
    let mut restarts = 0;
    while node
        .runtime()
        .run_pod_sandbox(workload("web"))
        .await
        .is_err()
    {
        assert!(
            Instant::now() < deadline + Duration::from_secs(1),
            "it lives {:?} after its deadline",
            deadline.elapsed()
        );
        // The daemon that is up when the deadline passes must notice; others do not get to it.
        let next = Instant::now() + Duration::from_secs(1);
        node.restart_daemon().await;
        restarts += 1;
        while Instant::now() < next.min(deadline) {
            node.refused(workload("web")).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let early = deadline.saturating_duration_since(Instant::now());
    assert!(early < Duration::from_millis(100), "{early:?} early");
    assert!(restarts >= 4, "only {restarts} restarts");
    assert!(node.lease("dra.net").is_none());
}

/// Moves what the wall clock says of every record by `by`, which is what a step of the clock the
/// other way looks like: the daemon compares the two. The machine's own clock stays as it is.
async fn step_wall_clock(node: &Node, by: i64) {
    let dir = node.state_dir();
    let opened = loop {
        // The lock of the killed daemon goes a moment after it.
        match Store::open(&dir, store::Options::default()) {
            Ok(opened) => break opened,
            Err(error) => {
                println!("{error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    let writes: Vec<Write> = opened
        .records
        .into_iter()
        .filter(|(tree, ..)| *tree == Tree::Leases)
        .map(|(tree, key, value)| {
            let mut record: Value = serde_json::from_slice(&value).expect("JSON");
            let wall = &mut record["deadline"]["wall_ns"];
            *wall = (wall.as_i64().expect("a time") - by).into();
            let value = Some(serde_json::to_vec(&record).expect("JSON"));
            Write { tree, key, value }
        })
        .collect();
    assert!(!writes.is_empty());
    opened.store.commit(writes).await.expect("durable");
    tokio::task::spawn_blocking(move || opened.store.close())
        .await
        .expect("closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wall_clock_that_jumps_a_day_ends_no_lease_early_or_late() {
    for day in [DAY_NS, -DAY_NS] {
        let mut node = Node::start(QUICK).await;
        let plugin = node.required_plugin("dra.net", None, "8s").await;
        drop(plugin);
        let left = node.seconds_left("dra.net").expect("a lease");
        let deadline = Instant::now() + Duration::from_secs_f64(left);
        node.kill_daemon();
        step_wall_clock(&node, day).await;
        node.start_daemon().await;
        while Instant::now() + Duration::from_millis(300) < deadline {
            node.refused(workload("web")).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let late = deadline + Duration::from_secs(1);
        while node
            .runtime()
            .run_pod_sandbox(workload("web"))
            .await
            .is_err()
        {
            assert!(Instant::now() < late, "not ended 1 s after its deadline");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_reboot_with_a_stepped_wall_clock_a_lease_keeps_between_nothing_and_its_ttl() {
    for (day, least, most) in [(DAY_NS, 0.0, 2.0), (-DAY_NS, 15.0, 20.0)] {
        // As good as no grace, so that the clamp shows.
        let mut node = Node::start("[leases]\nmin_ttl = '1s'\nreboot_grace = '2s'\n").await;
        let plugin = node.required_plugin("dra.net", None, "20s").await;
        drop(plugin);
        node.power_off().await;
        step_wall_clock(&node, day).await;
        node.start_runtime(Default::default()).await;
        node.start_daemon().await;
        let left = node.seconds_left("dra.net").unwrap_or_default();
        assert!(
            (least..=most).contains(&left),
            "{left} s left after {day} ns"
        );
    }
}

/// The plugin renews through all of it; nobody else does.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_renewed_outlives_restarts_of_daemon_and_runtime() {
    let mut node = Node::start(QUICK).await;
    let plugin = node.plugin("dra.net", None).await;
    let pid = plugin.pid().to_string();
    let renewing = node.cli_process(&["register", "dra.net", "--ttl", "2s", "--pid", &pid]);
    let registered = renewing.wait_for_line(LIMIT, |line| line.starts_with("registered"));
    assert!(registered.await.is_some(), "{:?}", renewing.output());
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        node.restart_daemon().await;
        node.wait_state("dra.net", "present");
        node.starts(workload("web")).await;
    }
}
