//! Who holds a lease: several instances in a rolling update, sidecars, wrappers.

use std::time::Duration;

use nix::sys::signal::Signal;
use nri_lease_sim::PodSpec;
use nri_lease_sim::story::Process;
use serde_json::Value;

use super::node::{LIMIT, Node, POD_A, POD_B, QUICK, lives, says, until, workload};

fn holder_pids(lease: &Value) -> Vec<u64> {
    let holders = lease["holders"].as_array().expect("holders");
    holders
        .iter()
        .filter_map(|holder| holder["pid"].as_u64())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_rolling_update_the_newer_instance_decides_and_the_lease_never_lapses() {
    let node = Node::start(QUICK).await;
    let old = node.required_plugin("dra.net", None, "60s").await;
    assert_eq!(node.lease("dra.net").expect("a lease")["generation"], 1);
    let new = node.plugin("dra.net", None).await;
    node.register_with("dra.net", new.pid(), "120s", &["--mode", "audit"]);
    let lease = node.lease("dra.net").expect("a lease");
    assert_eq!(lease["generation"], 2, "{lease}");
    assert_eq!(lease["ttl_seconds"], 120, "{lease}");
    assert_eq!(lease["mode"], "audit", "{lease}");
    assert_eq!(holder_pids(&lease).len(), 2);
    node.register_with("dra.net", new.pid(), "120s", &["--mode", "enforce"]);
    assert_eq!(node.lease("dra.net").expect("a lease")["generation"], 3);

    // The old one registers again, after a runtime restart say: that undoes nothing.
    node.register("dra.net", old.pid(), "60s");
    let lease = node.lease("dra.net").expect("a lease");
    assert_eq!(lease["ttl_seconds"], 120, "{lease}");
    assert_eq!(lease["mode"], "enforce", "{lease}");

    // The plugin is there while any of them is.
    let pid = old.pid();
    drop(old);
    until("the old instance to be gone", || {
        let lease = node.lease("dra.net").expect("a lease");
        !lives(pid) && holder_pids(&lease) == [u64::from(new.pid())]
    });
    node.starts(workload("web")).await;
    let generation = |lease: Value| lease["generation"].as_u64();
    let after = node.lease("dra.net").and_then(generation);
    assert_eq!(after, generation(lease).map(|before| before + 1));
    // The last holder's release ends it.
    node.done(&["release", "dra.net"]);
    assert!(node.lease("dra.net").is_none());
    drop(new);
    node.starts(workload("later")).await;
}

/// `nri-lease register` as uid 1000 in a pod; it keeps renewing.
fn sidecar(node: &Node, pod: Option<&str>, plugin: &str, pid: u32, ttl: &str) -> Process {
    let run = node.path("run");
    let run = run.to_str().expect("ASCII");
    let pid = pid.to_string();
    let command = [
        "setpriv",
        "--reuid=1000",
        "--regid=0",
        "--clear-groups",
        env!("CARGO_BIN_EXE_nri-lease"),
        "--run-dir",
        run,
        "register",
        plugin,
        "--pid",
        &pid,
        "--ttl",
        ttl,
    ];
    let command = node.in_pod(pod, command.map(Into::into));
    command.start().expect("starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_registers_for_a_process_of_its_own_pod_and_for_no_other() {
    let config = format!(
        "{QUICK}[[registrar]]\nplugin = '*'\nuids = [0]\n\
         [[registrar]]\nplugin = 'dra.*'\nuids = [1000]\nnamespaces = ['kube-system']\n"
    );
    let node = Node::start(&config).await;
    node.starts(PodSpec::new("kube-system", "dranet-x7k2p").uid(POD_A))
        .await;
    node.starts(PodSpec::new("kube-system", "other").uid(POD_B))
        .await;
    let plugin = node.plugin("dra.net", Some(POD_A)).await;
    for (pod, name, part) in [
        (Some(POD_B), "dra.net", "may not speak for pid"),
        (
            Some(POD_A),
            "cpu",
            "in namespace kube-system may not register plugin \"cpu\"",
        ),
        (None, "dra.net", "uid 1000 on the host may not register"),
    ] {
        let mut refused = sidecar(&node, pod, name, plugin.pid(), "60s");
        let ended = refused.wait(LIMIT).await.expect("waited").expect("it ends");
        assert_eq!(ended.code(), Some(5), "{:?}", refused.output());
        says(&refused.output().join("\n"), &[part]);
    }

    let mut sidecar = sidecar(&node, Some(POD_A), "dra.net", plugin.pid(), "2s");
    node.wait_state("dra.net", "present");
    let lease = node.lease("dra.net").expect("a lease");
    let holder = &lease["holders"][0];
    assert_eq!(holder["pid"], plugin.pid(), "{lease}");
    assert_eq!(holder["registered_by_pid"], sidecar.pid(), "{lease}");
    assert_eq!(holder["pod"]["name"], "dranet-x7k2p", "{lease}");
    // It renews what it registered, long beyond the TTL.
    let renewed = lease["renewed_at"].clone();
    let registered = std::time::Instant::now();
    until("renewals beyond the TTL", || {
        let lease = node.lease("dra.net").expect("it lives");
        lease["renewed_at"] != renewed && registered.elapsed() > Duration::from_secs(4)
    });
    // The pod is deleted: both get SIGTERM, and the lease runs out by itself.
    sidecar.signal(Signal::SIGTERM).expect("sent");
    drop(plugin);
    node.wait_state("dra.net", "missing");
    until("the lease to run out", || node.lease("dra.net").is_none());
}

/// A wrapper that starts the plugin as its child once a file is there.
fn wrapper(node: &Node, go: &str) -> Process {
    let plugin = node.plugin_command("dra.net", None);
    let wait = "while [ ! -e \"$0\" ]; do sleep 0.02; done; \"$@\"; exit $?";
    let mut command = node
        .in_pod(None, ["sh".into(), "-c".into(), wait.into()])
        .arg(go)
        .arg(plugin.program)
        .args(plugin.args);
    command.env = plugin.env;
    command.start().expect("starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrapper_that_registers_before_its_child_connects_hands_the_lease_to_the_child() {
    let node = Node::start(QUICK).await;
    let go = node.path("go").display().to_string();
    let wrapper = wrapper(&node, &go);
    let pid = wrapper.pid().to_string();
    let _renewing = node.cli_process(&["register", "dra.net", "--ttl", "60s", "--pid", &pid]);
    node.wait_state("dra.net", "missing");
    let lease = node.lease("dra.net").expect("a lease");
    assert_eq!(holder_pids(&lease), [u64::from(wrapper.pid())]);
    node.refused(workload("early")).await;

    std::fs::write(&go, "").expect("written");
    // Long before the first renewal, which is 20 s away.
    node.wait_state("dra.net", "present");
    let lease = node.lease("dra.net").expect("a lease");
    let holders = holder_pids(&lease);
    assert_eq!(holders.len(), 1, "{lease}");
    assert_ne!(holders[0], u64::from(wrapper.pid()), "{lease}");
    node.starts(workload("web")).await;
    // Who names the wrapper still renews and releases.
    node.done(&["renew", "dra.net", "--pid", &pid]);
    node.register("dra.net", wrapper.pid(), "60s");
    let again = node.lease("dra.net").expect("a lease");
    assert_eq!(holder_pids(&again), holders, "{again}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_finds_a_child_that_connects_much_later() {
    let node = Node::start(QUICK).await;
    let go = node.path("go").display().to_string();
    let wrapper = wrapper(&node, &go);
    let pid = wrapper.pid().to_string();
    node.register("dra.net", wrapper.pid(), "3s");
    // Looks of its own end with the time for the first renewal, 1 s: let that pass.
    let registered = std::time::Instant::now();
    until("the daemon's own looks to end", || {
        node.done(&["renew", "dra.net", "--pid", &pid]);
        registered.elapsed() > Duration::from_secs(2)
    });
    std::fs::write(&go, "").expect("written");
    until("the child to hold it", || {
        node.done(&["renew", "dra.net", "--pid", &pid]);
        let lease = node.lease("dra.net").expect("it is renewed");
        lease["state"] == "present"
    });
    let lease = node.lease("dra.net").expect("a lease");
    assert_ne!(holder_pids(&lease), [u64::from(wrapper.pid())], "{lease}");
}
