//! Which pods and containers wait: scopes as files, annotations, static pods, tolerations.

use nri_lease_sim::{ContainerSpec, PodSpec};

use super::node::{Node, QUICK, says, workload};

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_of_cdi_devices_refuses_only_containers_that_carry_one() {
    let node = Node::start(QUICK).await;
    let plugin = node.plugin("dra.net", None).await;
    let scope = node.file("scope.toml", "[[rules]]\ncdi_devices = ['dra.net/*=*']\n");
    node.register_with("dra.net", plugin.pid(), "60s", &["--scope", &scope]);
    drop(plugin);
    node.wait_state("dra.net", "missing");

    let pod = node.starts(workload("web")).await;
    let device = |name: &str, device: &str| ContainerSpec::new(name).cdi_device(device);
    node.container_starts(&pod, device("gpu", "vendor.com/gpu=0"))
        .await;
    let refusal = node
        .container_refused(&pod, device("net", "dra.net/nic=eth1"))
        .await;
    says(&refusal, &["required NRI plugin \"dra.net\""]);

    let described = r#"{"metadata": {"name": "web", "annotations": {"cdi.k8s.io/x": "dra.net/nic=eth1"}},
        "spec": {"containers": [{"name": "net"}]}}"#;
    let file = node.file("pod.json", described);
    let explained = node.json(&["explain", "--file", &file]);
    let verdicts = explained["decisions"].as_array().expect("two").iter();
    let verdicts: Vec<_> = verdicts.map(|decision| &decision["verdict"]).collect();
    assert_eq!(verdicts, ["admit", "reject"], "{explained}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scopes_of_every_kind_decide_and_bad_ones_name_rule_and_field() {
    let node = Node::start(QUICK).await;
    let plugin = node.plugin("dra.net", None).await;
    let scope = node.file(
        "scope.yaml",
        "- namespaces: [prod-*]\n  pod_labels: 'tier in (db,web),!legacy'\n\
         - pod_annotations: [dra.net/claim=x]\n\
         - runtime_handlers: [kata*]\n  operations: [sandbox]\n\
         - containers: [init-*]\n",
    );
    node.register_with("dra.net", plugin.pid(), "60s", &["--scope", &scope]);
    drop(plugin);
    node.wait_state("dra.net", "missing");
    let prod = |name: &str| PodSpec::new("prod-1", name);
    node.refused(prod("a").label("tier", "db")).await;
    node.starts(prod("b").label("tier", "db").label("legacy", "1"))
        .await;
    node.starts(workload("c").label("tier", "db")).await;
    node.refused(workload("d").annotation("dra.net/claim", "x"))
        .await;
    node.starts(workload("e").annotation("dra.net/claim", "y"))
        .await;
    node.refused(workload("f").runtime_handler("kata-qemu"))
        .await;
    let pod = node.starts(workload("g")).await;
    node.container_refused(&pod, ContainerSpec::new("init-net"))
        .await;

    for (text, field) in [
        ("- namespaces: ['[']\n", "scope.rules[1].namespaces"),
        (
            "- namespaces: [a]\n- pod_labels: 'a in ('\n",
            "scope.rules[2].pod_labels",
        ),
        ("- {}\n", "scope.rules[1]"),
    ] {
        let bad = node.file("bad.yaml", text);
        let pid = std::process::id().to_string();
        let args = ["register", "bad", "--pid", &pid, "--once", "--scope", &bad];
        let (code, said) = node.failed(&args);
        assert_eq!(code, 2, "{said}");
        says(&said, &[field]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_static_pods_of_a_control_plane_start_although_a_node_wide_plugin_is_away() {
    let mut node = Node::start(QUICK).await;
    let plugin = node.required_plugin("dra.net", None, "60s").await;
    drop(plugin);
    // The node boots, and the kubelet has nothing but its manifests.
    node.reboot().await;
    for name in ["etcd-n1", "kube-apiserver-n1", "kube-scheduler-n1"] {
        let pod = PodSpec::new("kube-system", name);
        node.starts(pod.annotation("kubernetes.io/config.source", "file"))
            .await;
    }
    node.refused(PodSpec::new("kube-system", "coredns")).await;
    let scheduled = PodSpec::new("kube-system", "from-the-api");
    node.refused(scheduled.annotation("kubernetes.io/config.source", "api"))
        .await;
    assert_eq!(
        node.json(&["status"])["exempt_total"],
        6,
        "3 sandboxes, 3 containers"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_own_exemptions_and_tolerations_pass() {
    let exempt = "[exempt]\nnamespaces = ['monitoring']\npod_labels = 'tier=node'\n\
                  runtime_handlers = ['kata*']\n";
    let node = Node::start(&format!("{QUICK}{exempt}")).await;
    let plugin = node.required_plugin("dra.net", None, "60s").await;
    drop(plugin);
    node.wait_state("dra.net", "missing");
    node.starts(PodSpec::new("monitoring", "exporter")).await;
    node.starts(workload("agent").label("tier", "node")).await;
    node.starts(workload("vm").runtime_handler("kata-qemu"))
        .await;
    let tolerates = "tolerate-missing-plugins.noderesource.dev";
    let system = PodSpec::new("kube-system", "coredns");
    node.starts(system.annotation(tolerates, "true")).await;
    node.refused(workload("own-goal").annotation(tolerates, "true"))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn annotated_requirements_hold_up_containers_by_the_list_and_sandboxes_by_the_lease() {
    const REQUIRED: &str = "required-plugins.noderesource.dev";
    let mut node = Node::start(QUICK).await;
    // Without a lease the runtime's list decides, for containers.
    let pod = workload("web").annotation(REQUIRED, "[topology]");
    let sandbox = node
        .runtime()
        .run_pod_sandbox(pod.clone())
        .await
        .expect("nobody to ask");
    let refusal = node
        .container_refused(&sandbox, ContainerSpec::new("app"))
        .await;
    says(
        &refusal,
        &[
            "required NRI plugin \"topology\" was not called by the runtime (it has no lease",
            "required by the pod's annotation required-plugins.noderesource.dev",
            "Override: nri-lease pause",
        ],
    );
    let explain = ["explain", "--pod", "default/web", "--container", "app"];
    let explained = node.json(&explain);
    assert_eq!(
        explained["decisions"][0]["verdict"], "reject",
        "{explained}"
    );
    let plugin = node.plugin("topology", None).await;
    node.container_starts(&sandbox, ContainerSpec::new("app"))
        .await;
    assert_eq!(node.json(&explain)["decisions"][0]["verdict"], "admit");

    // With one, presence decides, and the sandbox waits too.
    let scope = node.file("scope.yaml", "- namespaces: [nowhere]\n");
    let pid = plugin.pid();
    node.register_with("topology", pid, "60s", &["--scope", &scope]);
    node.wait_state("topology", "present");
    node.starts(pod.clone()).await;
    drop(plugin);
    node.wait_state("topology", "missing");
    node.refused(pod).await;
    node.starts(workload("other")).await;

    let narrow = workload("narrow").annotation(&format!("{REQUIRED}/container.app"), "[topology]");
    let sandbox = node
        .runtime()
        .run_pod_sandbox(narrow)
        .await
        .expect("not for the sandbox");
    node.container_refused(&sandbox, ContainerSpec::new("app"))
        .await;
    node.container_starts(&sandbox, ContainerSpec::new("db"))
        .await;

    let refusal = node
        .refused(workload("bad").annotation(REQUIRED, "{a: b}"))
        .await;
    says(
        &refusal,
        &["is not a YAML list of plugin names", "Correct it"],
    );

    node.configure(&format!(
        "{QUICK}[enforcement]\nrequired_plugins_annotation = false\n"
    ));
    node.restart_daemon().await;
    node.starts(workload("bad").annotation(REQUIRED, "{a: b}"))
        .await;
}
