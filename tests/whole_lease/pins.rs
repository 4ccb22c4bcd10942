//! Pins: exactly that pod waits, until the pin ends, the pod is gone, or the plugin unpins it.

use nri_lease_sim::{ContainerSpec, PodSpec};

use super::node::{Node, POD_A, POD_B, QUICK, says, until, workload};

fn pinned() -> PodSpec {
    workload("claims").uid(POD_A)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_pod_is_refused_while_every_other_pod_starts() {
    let mut node = Node::start(QUICK).await;
    let plugin = node.plugin("dra.net", None).await;
    let scope = node.file("scope.yaml", "- namespaces: [nowhere]\n");
    let pid = plugin.pid();
    node.register_with("dra.net", pid, "60s", &["--scope", &scope]);
    node.wait_state("dra.net", "present");
    node.done(&["pin", "dra.net", POD_A, "--ttl", "10m"]);
    let sandbox = node.starts(pinned()).await;
    drop(plugin);
    node.wait_state("dra.net", "missing");

    let refusal = node.refused(pinned()).await;
    says(
        &refusal,
        &[
            "required NRI plugin \"dra.net\"",
            "the pod is pinned to it for ",
            &format!("Override: nri-lease unpin dra.net {POD_A}"),
        ],
    );
    let refusal = node
        .container_refused(&sandbox, ContainerSpec::new("second"))
        .await;
    says(&refusal, &["the pod is pinned to it"]);
    node.starts(workload("other").uid(POD_B)).await;

    // The pin is durable, and outlives the plugin's lease.
    node.restart_daemon().await;
    node.done(&["revoke", "dra.net"]);
    says(&node.refused(pinned()).await, &["it has no lease"]);
    // The refusal's own command works.
    node.done(&["unpin", "dra.net", POD_A]);
    node.starts(pinned()).await;
    assert!(
        node.done(&["unpin", "dra.net", POD_A])
            .contains("was not pinned")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_ends_with_its_ttl() {
    let node = Node::start(QUICK).await;
    node.done(&["pin", "dra.net", POD_A, "--ttl", "2s"]);
    node.refused(pinned()).await;
    until("the pin to end", || node.json(&["status"])["pins"] == 0);
    node.starts(pinned()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_goes_with_its_pod_and_not_with_a_refused_sandbox() {
    let node = Node::start(QUICK).await;
    let plugin = node.required_plugin("dra.net", None, "60s").await;
    node.done(&["pin", "dra.net", POD_A]);
    drop(plugin);
    node.wait_state("dra.net", "missing");
    // The runtime sends Stop and Remove for the sandbox that was refused.
    node.refused(pinned()).await;
    assert_eq!(node.json(&["status"])["pins"], 1);
    let _plugin = node.required_plugin("dra.net", None, "60s").await;
    let first = node.starts(pinned()).await;
    // A pod that has lost its sandbox gets another one before the old one is removed.
    let second = node.starts(pinned()).await;
    node.runtime()
        .remove_pod_sandbox(&first)
        .await
        .expect("removed");
    until("one pod to be left", || {
        node.json(&["status"])["runtimes"][0]["pods"] == 1
    });
    assert_eq!(node.json(&["status"])["pins"], 1);
    node.runtime()
        .remove_pod_sandbox(&second)
        .await
        .expect("removed");
    until("the pin to be gone", || node.json(&["status"])["pins"] == 0);
}

/// After a restart the runtime sends no hook for the removal of a pod that is older.
#[tokio::test(flavor = "multi_thread")]
async fn a_pin_of_a_pod_that_went_unseen_is_removed_at_the_next_synchronisation() {
    let mut node = Node::start(QUICK).await;
    let _plugin = node.plugin("dra.net", None).await;
    for uid in [POD_A, POD_B] {
        node.done(&["pin", "elsewhere", uid]);
    }
    node.done(&[
        "pause",
        "--for",
        "10m",
        "--reason",
        "the plugin never comes",
    ]);
    let gone = node.starts(pinned()).await;
    node.starts(workload("stays").uid(POD_B)).await;
    let world = node.stop_runtime().await;
    node.start_runtime(world).await;
    node.wait_connected().await;
    until("both pods to be known", || {
        node.json(&["status"])["runtimes"][0]["pods"] == 2
    });
    node.runtime()
        .remove_pod_sandbox(&gone)
        .await
        .expect("removed");
    assert_eq!(node.json(&["status"])["pins"], 2, "nobody has told us");
    node.stop_daemon().await;
    node.start_daemon().await;
    until("the pin to be gone", || node.json(&["status"])["pins"] == 1);
    node.done(&["resume"]);
    node.refused(workload("stays").uid(POD_B)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_starts_right_after_a_synchronisation_keeps_its_pin() {
    let mut node = Node::start(QUICK).await;
    let _plugin = node.required_plugin("dra.net", None, "10m").await;
    for round in 0..5 {
        let uid = format!("1f2e3d4c-5b6a-4798-8a9b-00000000000{round}");
        node.done(&["pin", "dra.net", &uid]);
        node.kill_daemon();
        node.spawn_daemon();
        let listed = node
            .runtime()
            .wait_for_plugin("nri-lease", super::node::LIMIT)
            .await;
        assert!(listed.is_some());
        let pod = workload(&format!("early-{round}")).uid(&uid);
        node.runtime()
            .run_pod_sandbox(pod)
            .await
            .expect("the plugin is there");
        node.wait_connected().await;
        until("the pod to be known", || {
            node.json(&["status"])["runtimes"][0]["pods"] == round + 1
        });
        assert_eq!(node.json(&["status"])["pins"], round + 1, "round {round}");
    }
}
