//! SIGHUP: a good configuration is taken over, one that cannot be used changes nothing.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use node::{Node, limit, refusal, registration, until};
use nri_lease_proto::ttrpc::Code;
use nri_lease_sim::{Options, PodSpec, Runtime};

async fn reloaded(node: &mut Node, says: &str, times: usize) {
    node.hang_up();
    until(says, async || node.logged(says) == times).await;
}

#[tokio::test]
async fn a_good_configuration_is_taken_over_at_sighup() {
    let mut node = Node::start("").await;
    let runtime = Runtime::start(&node.nri_socket(), Options::default())
        .await
        .unwrap();
    node.connected().await;
    node.registers("a").await;
    let pod = |name: &str| PodSpec::new("tools", name);
    runtime.run_pod_sandbox(pod("a")).await.unwrap_err();

    node.write_config(
        "[leases]\nmax_leases = 1\nmax_ttl = \"2m\"\n[exempt]\nnamespaces = [\"tools\"]\n",
    );
    reloaded(&mut node, "the configuration is reloaded", 1).await;
    runtime.run_pod_sandbox(pod("b")).await.unwrap();
    let registry = node.registry().await;
    let (code, text) = refusal(registry.register(limit(), &registration("b", 60)).await);
    assert_eq!(code, Code::RESOURCE_EXHAUSTED, "{text}");
    let (_, text) = refusal(registry.register(limit(), &registration("a", 121)).await);
    assert!(text.contains("5s to 120s"), "{text}");

    node.write_config("[enforcement]\nmode = \"audit\"\n");
    reloaded(&mut node, "the configuration is reloaded", 2).await;
    assert_eq!(node.status().await.mode, "audit");
    runtime
        .run_pod_sandbox(PodSpec::new("default", "c"))
        .await
        .unwrap();

    node.write_config("[[registrar]]\nplugin = \"dra.*\"\nuids = [0]\n");
    reloaded(&mut node, "the configuration is reloaded", 3).await;
    let (code, text) = refusal(registry.register(limit(), &registration("b", 60)).await);
    assert_eq!(code, Code::PERMISSION_DENIED, "{text}");
    node.registers("dra.net").await;
    runtime
        .run_pod_sandbox(PodSpec::new("default", "d"))
        .await
        .unwrap_err();
}

#[tokio::test]
async fn a_configuration_that_cannot_be_used_changes_nothing_and_says_why() {
    let good = "[exempt]\nnamespaces = [\"tools\"]\n";
    let mut node = Node::start(good).await;
    let runtime = Runtime::start(&node.nri_socket(), Options::default())
        .await
        .unwrap();
    node.connected().await;
    node.registers("a").await;
    let stays = "the configuration stays as it was";
    for (number, (bad, says)) in [
        ("[leases]\nmax_leases = 1\ndefault_tll = \"5s\"\n", "line 3"),
        ("[leases]\ndefault_ttl = \"soon\"\n", "\\\"90s\\\""),
        (
            "[leases]\nmin_ttl = \"2h\"\nmax_ttl = \"1h\"\n",
            "leases.min_ttl",
        ),
        ("[exempt]\nnamespaces = [\"[\"]\n", "exempt.namespaces"),
        ("[exempt]\npod_labels = \"a in (\"\n", "exempt.pod_labels"),
        ("[[registrar]]\nplugin = \"[\"\nuids = [0]\n", "registrar"),
        ("[[registrar]]\nplugin = \"*\"\n", "uids"),
        ("not toml", "line 1"),
    ]
    .into_iter()
    .enumerate()
    {
        node.write_config(bad);
        reloaded(&mut node, stays, number + 1).await;
        let output = node.daemon.output();
        let from = output
            .iter()
            .rposition(|line| line.contains(stays))
            .unwrap();
        let said = output[from..].join("\n").replace('"', "\\\"");
        assert!(said.contains(says), "{bad:?}: no {says:?} in {said}");
        assert!(said.contains("config.toml"), "{said}");
        // Still as it was.
        let pod = |namespace: &str| PodSpec::new(namespace, &format!("p{number}"));
        runtime.run_pod_sandbox(pod("tools")).await.unwrap();
        runtime.run_pod_sandbox(pod("default")).await.unwrap_err();
        node.registers("b").await;
    }
    std::fs::remove_file(node.dir.join("config.toml")).unwrap();
    reloaded(&mut node, stays, 9).await;
    runtime
        .run_pod_sandbox(PodSpec::new("tools", "last"))
        .await
        .unwrap();
}
