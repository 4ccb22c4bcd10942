//! What a full daemon costs: 256 leases, 4,096 pins, 500 pods with 5,000 containers.
//!
//! `NRI_LEASE_BIN=target/release cargo test --test footprint -- --nocapture` for figures.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use futures::StreamExt;
use node::{Node, limit, registration, subject, until};
use nri_lease_proto::lease::registry::PinRequest;
use nri_lease_sim::{ContainerSpec, Options, PodSpec, Runtime, World};

const LEASES: usize = 256;
const PINS: usize = 4096;
const PODS: usize = 500;

/// A pod as the kubelet makes them.
fn world() -> World {
    let mut world = World::default();
    for number in 0..PODS {
        let mut spec = PodSpec::new("default", &format!("web-7c9d8b6f5d-{number:05}"))
            .uid(&format!("5f1c7a54-0d6e-4c7b-9a53-{number:012}"))
            .annotation(
                "kubernetes.io/config.seen",
                "2026-01-01T00:00:00.000000000Z",
            )
            .annotation("kubernetes.io/config.source", "api");
        for label in ["app", "tier", "pod-template-hash", "app.kubernetes.io/name"] {
            spec = spec.label(label, "a-value");
        }
        let pod = world.add_pod(&spec);
        for container in 0..10 {
            let mut spec = ContainerSpec::new(&format!("c{container}"));
            spec.args = vec!["--flag=value".into(); 8];
            spec.env = vec!["KEY=a value of some length".into(); 16];
            world.add_container(&pod, &spec);
        }
    }
    world
}

fn print(what: &str, node: &Node) {
    let (now, anonymous) = (node.rss_kib(), node.anonymous_kib());
    let peak = node.peak_rss_kib();
    println!("{what}: {now} KiB, {anonymous} of them anonymous, {peak} at most");
}

#[tokio::test]
async fn a_full_daemon_stays_small() {
    let node = Node::start("").await;
    print("empty", &node);
    let registry = node.registry().await;
    futures::stream::iter(0..LEASES)
        .for_each_concurrent(16, async |number| {
            let mut request = registration(&format!("plugin-{number}"), 3600);
            request.subject = subject(node.idle.pid());
            registry.register(limit(), &request).await.unwrap();
        })
        .await;
    print("256 leases", &node);
    futures::stream::iter(0..PINS)
        .for_each_concurrent(16, async |number| {
            let pin = PinRequest {
                plugin: format!("plugin-{}", number % LEASES),
                pod_uid: format!("5f1c7a54-0d6e-4c7b-9a53-{:012}", number % PODS),
                ..Default::default()
            };
            registry.pin(limit(), &pin).await.unwrap();
        })
        .await;
    print("and 4,096 pins", &node);
    let socket = node.nri_socket();
    let runtime = Runtime::start_with(&socket, Options::default(), world());
    let _runtime = runtime.await.unwrap();
    until("the pods to be known", async || {
        let status = node.status().await;
        status.runtimes[0].connected && status.runtimes[0].pods as usize == PODS
    })
    .await;
    node.becomes_idle().await;
    let status = node.status().await;
    assert_eq!(
        (status.leases as usize, status.pins as usize),
        (LEASES, PINS)
    );
    print("and 500 pods", &node);
    let now = node.rss_kib();
    // A debug build is larger; nothing may grow with use, though.
    assert!(now < 96 << 10, "{now} KiB");
}
