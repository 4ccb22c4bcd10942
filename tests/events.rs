//! `nri-lease watch` shows what happens, with the right plugin and a text for people.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use nix::sys::signal::Signal;
use node::{LIMIT, Node, SHORT_TTLS, limit, millis, registration, until};
use nri_lease_proto::lease::admin::{RevokeLeaseRequest, SetBanRequest, SetPauseRequest};
use nri_lease_proto::lease::registry::{PinRequest, ReleaseRequest, RenewRequest, UnpinRequest};
use nri_lease_sim::plugin::Command;
use nri_lease_sim::story::Process;
use nri_lease_sim::{ContainerSpec, Fault, Options, PodSpec, Runtime};
use serde_json::Value;

/// A running `nri-lease -o json watch`.
struct Watch(Process);

impl Watch {
    /// Returns when it hears.
    async fn start(node: &Node, plugins: &[&str]) -> Watch {
        let args = [&["-o", "json", "watch"], plugins].concat();
        let watch = Watch(node.cli_started(&args));
        let probe = plugins.first().unwrap_or(&"probe");
        until("the watch to hear", async || {
            node.registers(probe).await;
            !watch.0.output().is_empty()
        })
        .await;
        watch
    }

    async fn event(&self, kind: &str, plugin: &str, text: &str) -> Value {
        let parse = |line: &str| serde_json::from_str::<Value>(line).ok();
        let wanted = |line: &str| {
            parse(line).is_some_and(|event| {
                let plugin_fits = match plugin {
                    "" => event["plugin"].is_null(),
                    plugin => event["plugin"] == plugin,
                };
                event["kind"] == kind
                    && plugin_fits
                    && event["message"].as_str().unwrap().contains(text)
            })
        };
        match self.0.wait_for_line(LIMIT, wanted).await {
            Some(line) => parse(&line).unwrap(),
            None => panic!(
                "no {kind} of {plugin:?} with {text:?}: {:#?}",
                self.0.output()
            ),
        }
    }
}

#[tokio::test]
async fn watch_shows_a_lease_from_its_registration_to_its_end() {
    let mut node = Node::start(SHORT_TTLS).await;
    let mut runtime = Runtime::start(&node.nri_socket(), Options::default())
        .await
        .unwrap();
    node.connected().await;
    let watch = Watch::start(&node, &[]).await;
    let registry = node.registry().await;
    assert!(node.cli(&[], &["revoke", "probe"]).status.success());

    let socket = node.nri_socket();
    let plugin = Command::new(&socket, "a", "10");
    let mut plugin = node.plugin(&runtime, plugin).await;
    let event = watch.event("registered", "a", "generation 1").await;
    assert_eq!(event["pid"], plugin.pid());
    assert!(event["time"].is_string(), "{event}");
    let event = watch.event("connected", "a", "synchronised").await;
    assert_eq!(event["pid"], plugin.pid());
    let renew = RenewRequest {
        plugin: "a".into(),
        ..Default::default()
    };
    registry.renew(limit(), &renew).await.unwrap();
    watch.event("renewed", "a", "renewed").await;

    let pod = runtime
        .run_pod_sandbox(PodSpec::new("default", "early"))
        .await
        .unwrap();
    // The runtime drops it; the process lives on.
    let loss = Fault::CloseConnection { plugin: "a".into() };
    plugin.signal(Signal::SIGSTOP).unwrap();
    runtime.inject(loss).await.unwrap();
    let event = watch.event("disconnected", "a", "not connected to the runtime any more");
    assert_eq!(event.await["pid"], plugin.pid());
    runtime
        .run_pod_sandbox(PodSpec::new("default", "late"))
        .await
        .unwrap_err();
    let event = watch
        .event("rejected", "a", "required NRI plugin \"a\"")
        .await;
    assert_eq!(event["pod"]["name"], "late");
    assert_eq!(event["pod"]["namespace"], "default");
    let spec = ContainerSpec::new("main");
    runtime.create_container(&pod, spec).await.unwrap_err();
    until("the container's rejection", async || {
        watch.0.output().iter().any(|line| {
            line.contains("rejected") && line.contains("\"main\"") && line.contains("early")
        })
    })
    .await;

    // Another process is lost.
    let mut holder = node.cli_started(&["register", "b", "--ttl", "60s"]);
    watch.event("registered", "b", "").await;
    let pid = holder.pid();
    holder.kill().unwrap();
    let event = watch
        .event("holder-lost", "b", "is gone, 0 holders are left")
        .await;
    assert_eq!(event["pid"], pid);

    let mut short = registration("c", 0);
    short.ttl = millis(300);
    registry.register(limit(), &short).await.unwrap();
    watch.event("expired", "c", "").await;
    let release = ReleaseRequest {
        plugin: "a".into(),
        ..Default::default()
    };
    registry.release(limit(), &release).await.unwrap();
    watch
        .event("released", "a", "released the lease, which ends")
        .await;
    let admin = node.admin().await;
    let revoke = RevokeLeaseRequest {
        plugin: "b".into(),
        reason: "spring cleaning".into(),
        ..Default::default()
    };
    admin.revoke_lease(limit(), &revoke).await.unwrap();
    watch
        .event("revoked", "b", "by uid 0: spring cleaning")
        .await;

    let pin = PinRequest {
        plugin: "d".into(),
        pod_uid: "u-1".into(),
        ..Default::default()
    };
    registry.pin(limit(), &pin).await.unwrap();
    let event = watch.event("pinned", "d", "").await;
    assert_eq!(event["pod"]["uid"], "u-1");
    let unpin = UnpinRequest {
        plugin: "d".into(),
        pod_uid: "u-1".into(),
        ..Default::default()
    };
    registry.unpin(limit(), &unpin).await.unwrap();
    watch.event("unpinned", "d", "").await;
    let ban = SetBanRequest {
        plugin: "e".into(),
        duration: millis(60_000),
        reason: "bad release".into(),
        ..Default::default()
    };
    admin.set_ban(limit(), &ban).await.unwrap();
    watch.event("banned", "e", "bad release").await;
    let pause = SetPauseRequest {
        duration: millis(60_000),
        reason: "incident 7".into(),
        ..Default::default()
    };
    admin.set_pause(limit(), &pause).await.unwrap();
    watch.event("paused", "", "incident 7").await;
    node.registers("f").await;
    runtime
        .run_pod_sandbox(PodSpec::new("default", "while-paused"))
        .await
        .unwrap();
    watch.event("would-reject", "f", "").await;
    let resume = SetPauseRequest::new();
    admin.set_pause(limit(), &resume).await.unwrap();
    watch.event("resumed", "", "").await;

    let world = runtime.stop().await;
    watch.event("runtime-disconnected", "", "nri.sock").await;
    let again = Runtime::start_with(&socket, Options::default(), world);
    runtime = again.await.unwrap();
    watch.event("runtime-connected", "", "2 pods").await;
    drop(runtime);

    // The stream ends with the daemon, and the command says so.
    node.kill();
    let mut process = watch.0;
    assert!(process.wait(LIMIT).await.unwrap().is_some());
    let output = process.output();
    assert!(
        output.last().unwrap().contains("ended the stream"),
        "{output:#?}"
    );
}

#[tokio::test]
async fn watch_of_one_plugin_shows_nothing_of_others() {
    let node = Node::start("").await;
    let watch = Watch::start(&node, &["a"]).await;
    node.registers("b").await;
    let revoke = RevokeLeaseRequest {
        plugin: "a".into(),
        ..Default::default()
    };
    node.admin()
        .await
        .revoke_lease(limit(), &revoke)
        .await
        .unwrap();
    watch.event("revoked", "a", "").await;
    let output = watch.0.output();
    assert!(
        output.iter().all(|line| !line.contains("\"b\"")),
        "{output:#?}"
    );
}
