//! What a reboot leaves: plugins that run as pods come back by themselves, and no lease lives on
//! for ever because its node boots again and again.

use std::time::{Duration, Instant};

use nri_lease_sim::{PodSpec, World};

use super::node::{Node, POD_A, POD_B, POD_C, QUICK, says, workload};

fn dranet(suffix: &str, uid: &str) -> PodSpec {
    PodSpec::new("kube-system", &format!("dranet-{suffix}"))
        .uid(uid)
        .label("app", "dranet")
}

fn cpu(suffix: &str, uid: &str) -> PodSpec {
    PodSpec::new("cpu-manager", &format!("cpu-{suffix}"))
        .uid(uid)
        .label("app", "cpu")
}

#[tokio::test(flavor = "multi_thread")]
async fn two_node_wide_plugins_in_pods_come_back_after_a_reboot_and_workloads_wait_for_both() {
    let mut node = Node::start(QUICK).await;
    node.starts(dranet("x7k2p", POD_A)).await;
    node.starts(cpu("b9wzq", POD_B)).await;
    let net = node.required_plugin("dra.net", Some(POD_A), "60s").await;
    let cpus = node.required_plugin("cpu", Some(POD_B), "60s").await;
    node.starts(workload("before")).await;

    node.power_off().await;
    drop((net, cpus));
    node.start_runtime(World::default()).await;
    node.start_daemon().await;
    let refusal = node.refused(workload("web")).await;
    says(&refusal, &["required NRI plugin", "also missing: dra.net"]);

    // The kubelet starts one pod again as it was, and the other is made anew by its controller.
    node.starts(dranet("x7k2p", POD_A)).await;
    node.starts(cpu("d4f5g", POD_C)).await;
    let _net = node.required_plugin("dra.net", Some(POD_A), "60s").await;
    let refusal = node.refused(workload("web")).await;
    says(&refusal, &["required NRI plugin \"cpu\""]);
    let _cpus = node.required_plugin("cpu", Some(POD_C), "60s").await;
    node.starts(workload("web")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_reboot_a_lease_has_its_grace_because_no_plugin_could_renew() {
    let mut node = Node::start("[leases]\nmin_ttl = '1s'\nreboot_grace = '5m'\n").await;
    let plugin = node.required_plugin("dra.net", None, "20s").await;
    node.set_boottime_ahead(5_000);
    node.power_off().await;
    drop(plugin);
    node.start_runtime(World::default()).await;
    node.start_daemon().await;
    let left = node.seconds_left("dra.net").expect("the lease is there");
    assert!((290.0..=300.0).contains(&left), "{left} s left");
    node.refused(workload("web")).await;

    // A second reboot without a renewal gives none; what is left is no more than the TTL.
    node.reboot().await;
    let left = node.seconds_left("dra.net").expect("the lease is there");
    assert!((10.0..=20.0).contains(&left), "{left} s left");
}

/// Every boot has another boot id, another CLOCK_BOOTTIME and a runtime that synchronises us.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_boots_again_and_again_keeps_a_dead_plugins_lease_for_one_grace() {
    const TTL: f64 = 4.0;
    const GRACE: f64 = 5.0;
    let mut node = Node::start("[leases]\nmin_ttl = '1s'\nreboot_grace = '5s'\n").await;
    let plugin = node.required_plugin("dra.net", None, "4s").await;
    let registered = Instant::now();
    drop(plugin);
    let mut boots = 0;
    loop {
        boots += 1;
        node.set_boottime_ahead(boots * 1_000);
        node.reboot().await;
        let alive = node.lease("dra.net").is_some();
        let age = registered.elapsed().as_secs_f64();
        if !alive {
            assert!(age > TTL, "ended {age} s after its last renewal");
            break;
        }
        assert!(
            age < TTL + GRACE + 2.0,
            "it lives {age} s after its last renewal, in boot {boots}"
        );
        node.refused(workload("waits")).await;
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    assert!(boots >= 3, "only {boots} boots");
    node.starts(workload("web")).await;
}
