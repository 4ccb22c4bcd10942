//! Faults: each does what it says, to the plugin it names, and the runtime goes on.

mod common;

use common::{LIMIT, ended, node, quick};
use nri_lease_sim::plugin::{Behaviour, Options as PluginOptions, Plugin};
use nri_lease_sim::{Entry, Fault, Options, PodSpec, What};
use std::time::Duration;

#[tokio::test]
async fn synchronise_is_split_on_demand_even_with_nothing_to_say() {
    let node = node(Options::default()).await;
    let plugin = "p".to_string();
    node.runtime
        .inject(Fault::SplitSynchronize {
            plugin,
            messages: 5,
        })
        .await
        .unwrap();
    let plugin = node.plugin("p", "10", PluginOptions::default()).await;
    assert_eq!(plugin.record().synchronize_messages, 5);
    assert_eq!(plugin.record().synchronized, 1);
    plugin.close().await;
    assert!(node.runtime.wait_for_plugin_gone("p", LIMIT).await);
    // Once.
    let plugin = node.plugin("p", "10", PluginOptions::default()).await;
    assert_eq!(plugin.record().synchronize_messages, 1);
}

#[tokio::test]
async fn a_delay_before_synchronise_holds_up_this_plugin_only_by_its_name() {
    let node = node(Options::default()).await;
    let delay = Duration::from_millis(300);
    let plugin = "slow".to_string();
    node.runtime
        .inject(Fault::DelayBeforeSynchronize { plugin, delay })
        .await
        .unwrap();
    let _quick = node.plugin("quick", "10", PluginOptions::default()).await;
    let _slow = node.plugin("slow", "10", PluginOptions::default()).await;
    let journal = node.runtime.journal();
    let at = |name: &str| {
        let listed = |entry: &&Entry| entry.plugin == name && entry.what == What::Listed;
        journal.iter().find(listed).unwrap().at
    };
    assert!(at("10-slow") - at("10-quick") >= delay);
}

#[tokio::test]
async fn a_refused_mask_closes_the_connection_once() {
    let node = node(Options::default()).await;
    let plugin = "p".to_string();
    node.runtime
        .inject(Fault::RefuseMask { plugin })
        .await
        .unwrap();
    let plugin = Plugin::connect(&node.socket, "p", "10", PluginOptions::default())
        .await
        .unwrap();
    ended(&plugin).await;
    let refused = |entry: &Entry| matches!(&entry.what, What::NotStarted { reason } if reason.starts_with("invalid plugin events"));
    assert!(node.runtime.wait_for_entry(LIMIT, refused).await.is_some());
    let _again = node.plugin("p", "10", PluginOptions::default()).await;
}

#[tokio::test]
async fn broken_frames_end_the_connection_and_nothing_else() {
    type Make = fn(String) -> Fault;
    let faults: [Make; 3] = [
        |plugin| Fault::CloseConnection { plugin },
        |plugin| Fault::OversizedFrame { plugin },
        |plugin| Fault::EofInFrame { plugin },
    ];
    for fault in faults {
        let node = node(Options::default()).await;
        let victim = node.plugin("victim", "10", PluginOptions::default()).await;
        let other = node.plugin("other", "20", PluginOptions::default()).await;
        node.runtime.inject(fault("victim".into())).await.unwrap();
        ended(&victim).await;
        assert!(node.runtime.wait_for_plugin_gone("victim", LIMIT).await);
        let pod = node
            .runtime
            .run_pod_sandbox(PodSpec::new("a", "b"))
            .await
            .unwrap();
        assert!(other.record().has("RunPodSandbox", &pod.0));
    }
}

#[tokio::test]
async fn garbage_and_a_half_frame_make_the_next_call_late() {
    type Make = fn(String) -> Fault;
    let faults: [Make; 2] = [
        |plugin| Fault::GarbageFrame { plugin },
        |plugin| Fault::HalfFrame { plugin },
    ];
    for fault in faults {
        let node = node(quick(Options::default())).await;
        let victim = node.plugin("victim", "10", PluginOptions::default()).await;
        let fault = fault("victim".into());
        node.runtime.inject(fault.clone()).await.unwrap();
        let pod = node
            .runtime
            .run_pod_sandbox(PodSpec::new("a", "b"))
            .await
            .unwrap();
        assert!(!victim.record().has("RunPodSandbox", &pod.0), "{fault:?}");
        assert!(node.runtime.plugins().is_empty(), "{fault:?}");
        ended(&victim).await;
    }
}

#[tokio::test]
async fn an_unknown_rpc_is_answered_and_the_plugin_stays() {
    let node = node(Options::default()).await;
    let plugin = node.plugin("p", "10", PluginOptions::default()).await;
    let fault = Fault::UnknownRpc { plugin: "p".into() };
    node.runtime.inject(fault).await.unwrap();
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    assert!(plugin.record().has("RunPodSandbox", &pod.0));
}

#[tokio::test]
async fn a_fault_for_a_plugin_that_is_not_there_is_an_error() {
    let node = node(Options::default()).await;
    let fault = Fault::CloseConnection { plugin: "p".into() };
    let error = node.runtime.inject(fault).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotConnected);
}

#[tokio::test]
async fn a_plugin_that_fails_to_synchronise_is_not_listed() {
    for behaviour in [
        Behaviour::Hang,
        Behaviour::Refuse("no".into()),
        Behaviour::Disconnect,
    ] {
        let node = node(quick(Options::default())).await;
        let options = PluginOptions {
            in_synchronize: behaviour.clone(),
            ..PluginOptions::default()
        };
        let plugin = Plugin::connect(&node.socket, "p", "10", options)
            .await
            .unwrap();
        let failed = |entry: &Entry| matches!(&entry.what, What::NotStarted { reason } if reason.starts_with("failed to synchronize"));
        assert!(
            node.runtime.wait_for_entry(LIMIT, failed).await.is_some(),
            "{behaviour:?}"
        );
        ended(&plugin).await;
        assert!(node.runtime.plugins().is_empty());
        // And requests go on.
        node.runtime
            .run_pod_sandbox(PodSpec::new("a", "b"))
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_plugin_that_disconnects_in_a_hook_is_skipped() {
    let node = node(Options::default()).await;
    let options = PluginOptions {
        in_run_pod_sandbox: Behaviour::Disconnect,
        ..PluginOptions::default()
    };
    let _plugin = node.plugin("p", "10", options).await;
    node.runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    assert!(node.runtime.plugins().is_empty());
    let skipped = |entry: &Entry| {
        matches!(
            entry.what,
            What::Skipped {
                rpc: "RunPodSandbox",
                ..
            }
        )
    };
    assert!(node.runtime.journal().iter().any(skipped));
}

#[tokio::test]
async fn a_plugin_that_sends_too_large_a_frame_is_dropped_as_by_go() {
    let node = node(Options::default()).await;
    let plugin = node.plugin("p", "10", PluginOptions::default()).await;
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&2u32.to_be_bytes());
    bytes.extend_from_slice(&4097u32.to_be_bytes());
    bytes.resize(8 + 4097, 0);
    plugin.write_raw(bytes).await.unwrap();
    ended(&plugin).await;
    assert!(node.runtime.wait_for_plugin_gone("p", LIMIT).await);
}
