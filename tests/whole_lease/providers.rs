//! Pods that host plugins start although their plugin is away, also those that succeed them.

use nix::sys::signal::Signal;
use nri_lease_sim::PodSpec;

use super::node::{LIMIT, Node, POD_A, POD_B, POD_C, QUICK, says, workload};

/// A DaemonSet's pod of one revision.
fn provider(name: &str, uid: &str, revision: &str) -> PodSpec {
    PodSpec::new("kube-system", name)
        .uid(uid)
        .label("app", "dranet")
        .label("controller-revision-hash", revision)
        .label("pod-template-generation", revision)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_without_surge_keeps_the_lease_and_lets_the_new_pod_take_over() {
    let node = Node::start(QUICK).await;
    node.starts(provider("dranet-x7k2p", POD_A, "1")).await;
    let mut old = node.plugin("dra.net", Some(POD_A)).await;
    let pid = old.pid().to_string();
    let mut sidecar = node.cli_process(&["register", "dra.net", "--ttl", "20s", "--pid", &pid]);
    node.wait_state("dra.net", "present");
    node.starts(workload("before")).await;

    // The kubelet ends the old pod first: SIGTERM to the plugin and to what registered it.
    sidecar.signal(Signal::SIGTERM).expect("sent");
    old.signal(Signal::SIGTERM).expect("sent");
    assert!(old.wait(LIMIT).await.expect("waited").is_some());
    let ended = sidecar.wait(LIMIT).await.expect("waited");
    assert!(ended.expect("it ends").success(), "{:?}", sidecar.output());
    node.wait_state("dra.net", "missing");
    let refusal = node.refused(workload("web")).await;
    says(
        &refusal,
        &[
            "required NRI plugin \"dra.net\" is not connected to the runtime (lease expires in ",
            &format!("holder pid {pid} gone since "),
            "The pod is retried. Override: nri-lease revoke dra.net",
        ],
    );

    node.starts(provider("dranet-b9wzq", POD_B, "2")).await;
    node.refused(workload("web")).await;
    let _new = node.required_plugin("dra.net", Some(POD_B), "20s").await;
    node.starts(workload("web")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chart_upgrade_that_renames_the_pod_is_recognised_by_its_labels() {
    let node = Node::start(QUICK).await;
    let chart = |pod: PodSpec, version: &str| {
        pod.label("helm.sh/chart", &format!("dranet-{version}"))
            .label("app.kubernetes.io/version", version)
    };
    node.starts(chart(provider("dranet-x7k2p", POD_A, "1"), "1.0"))
        .await;
    let old = node.required_plugin("dra.net", Some(POD_A), "60s").await;
    drop(old);
    node.wait_state("dra.net", "missing");
    let renamed = provider("dranet-agent-b9wzq", POD_B, "2");
    node.starts(chart(renamed.clone(), "1.1")).await;
    // Other labels, or another namespace, are another pod's.
    node.refused(renamed.clone().uid(POD_C).label("role", "probe"))
        .await;
    let elsewhere = PodSpec {
        namespace: "default".to_owned(),
        ..renamed
    };
    node.refused(elsewhere.uid(POD_C)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugins_pod_is_exempt_from_the_leases_of_other_plugins() {
    let node = Node::start(QUICK).await;
    node.starts(provider("dranet-x7k2p", POD_A, "1")).await;
    let _net = node.required_plugin("dra.net", Some(POD_A), "60s").await;
    let cpu = node.required_plugin("cpu", None, "60s").await;
    drop(cpu);
    node.wait_state("cpu", "missing");
    node.refused(workload("web")).await;
    node.starts(provider("dranet-b9wzq", POD_B, "2")).await;
    let explained = node.json(&["explain", "--pod", POD_B]);
    let decision = &explained["decisions"][0];
    assert_eq!(decision["verdict"], "exempt", "{decision}");
    assert_eq!(decision["reason"], "pod of the plugin \"dra.net\"");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_is_learnt_from_the_pod_list_and_known_after_a_restart() {
    let mut node = Node::prepared(QUICK);
    node.start_runtime(Default::default()).await;
    // Pod and plugin are there before the daemon is.
    let pod = provider("dranet-x7k2p", POD_A, "1");
    node.runtime()
        .run_pod_sandbox(pod)
        .await
        .expect("nobody objects");
    let plugin = node.plugin("dra.net", Some(POD_A)).await;
    node.start_daemon().await;
    node.register("dra.net", plugin.pid(), "60s");
    let lease = node.lease("dra.net").expect("registered");
    let host = &lease["holders"][0]["pod"];
    assert_eq!(host["name"], "dranet-x7k2p", "{lease}");
    assert_eq!(host["namespace"], "kube-system", "{lease}");
    assert_eq!(host["uid"], POD_A, "{lease}");

    drop(plugin);
    node.wait_state("dra.net", "missing");
    node.restart_daemon().await;
    node.refused(workload("web")).await;
    node.starts(provider("dranet-b9wzq", POD_B, "2")).await;
}
