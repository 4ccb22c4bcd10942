//! What plugins see of requests, and what becomes of requests.

mod common;

use common::{LIMIT, ended, node, quick};
use nri_lease_proto::nri::nri::Event;
use nri_lease_sim::plugin::{Behaviour, Options as PluginOptions, event_mask};
use nri_lease_sim::{ContainerSpec, NriVersion, Options, PodSpec, RequestError, What};
use std::time::Duration;

const ALL_VERSIONS: [NriVersion; 3] = [NriVersion::V0_8, NriVersion::V0_11, NriVersion::V0_12];

#[tokio::test]
async fn a_plugin_processes_every_step_of_a_pods_life_in_every_version() {
    for version in ALL_VERSIONS {
        let node = node(Options::containerd(version)).await;
        let plugin = node
            .plugin("dra.net", "10", PluginOptions::validator())
            .await;
        let runtime = &node.runtime;
        let pod = runtime
            .run_pod_sandbox(PodSpec::new("default", "web"))
            .await
            .unwrap();
        let container = runtime
            .create_container(&pod, ContainerSpec::new("app"))
            .await
            .unwrap();
        runtime.start_container(&container).await.unwrap();
        runtime.update_container(&container).await.unwrap();
        runtime.update_pod_sandbox(&pod).await.unwrap();
        runtime
            .stop_container(&container, Duration::ZERO)
            .await
            .unwrap();
        runtime.remove_pod_sandbox(&pod).await.unwrap();

        let record = plugin.record();
        let mut expected = vec![
            "RunPodSandbox",
            "CreateContainer",
            "PostCreateContainer",
            "StartContainer",
            "PostStartContainer",
            "UpdateContainer",
            "PostUpdateContainer",
            "UpdatePodSandbox",
            "PostUpdatePodSandbox",
            "StopContainer",
            "StopPodSandbox",
            "RemoveContainer",
            "RemovePodSandbox",
        ];
        if version == NriVersion::V0_8 {
            expected.retain(|rpc| !rpc.contains("UpdatePodSandbox"));
        }
        assert_eq!(record.rpcs(), expected, "{version:?}");
        let run = &record.seen[0];
        assert_eq!(
            (run.namespace.as_str(), run.pod.as_str()),
            ("default", "web")
        );
        assert_eq!(
            run.state_change,
            version != NriVersion::V0_12,
            "{version:?}"
        );
        assert!(!record.seen[1].state_change, "{version:?}");
        assert_eq!(record.runtime.0, "containerd");
        assert_eq!(record.runtime.2.is_empty(), version != NriVersion::V0_12);
        assert_eq!(record.timeouts_ms, (5000, 2000));
        assert!(runtime.world().pod_ids().is_empty());
        assert!(runtime.world().container_ids().is_empty());
    }
}

#[tokio::test]
async fn a_validator_gets_the_list_of_plugins_whether_they_subscribed_or_not() {
    for version in [NriVersion::V0_11, NriVersion::V0_12] {
        let node = node(Options::containerd(version)).await;
        let validator = node
            .plugin("nri-lease", "99", PluginOptions::validator())
            .await;
        let _injector = node
            .plugin(
                "dra.net",
                "10",
                PluginOptions {
                    cdi_devices: vec!["dra.net/nic=eth1".into()],
                    ..PluginOptions::default()
                },
            )
            .await;
        let _idle = node
            .plugin(
                "topology",
                "20",
                PluginOptions {
                    events: event_mask([Event::REMOVE_POD_SANDBOX]),
                    ..PluginOptions::default()
                },
            )
            .await;
        let pod = node
            .runtime
            .run_pod_sandbox(PodSpec::new("a", "b"))
            .await
            .unwrap();
        let container = node
            .runtime
            .create_container(&pod, ContainerSpec::new("app"))
            .await
            .unwrap();
        let record = validator.record();
        let validated = record.validated.back().unwrap();
        assert_eq!(validated.container_id, container.0);
        let names: Vec<_> = validated
            .plugins
            .iter()
            .map(|(name, index)| format!("{index}-{name}"))
            .collect();
        assert_eq!(names, ["10-dra.net", "20-topology", "99-nri-lease"]);
        assert_eq!(validated.cdi_devices, ["dra.net/nic=eth1"]);
    }
}

#[tokio::test]
async fn a_validators_refusal_reads_as_containerds() {
    let node = node(Options::default()).await;
    let validator = node
        .plugin(
            "nri-lease",
            "99",
            PluginOptions {
                in_validate: Behaviour::Refuse("plugin is away".into()),
                ..PluginOptions::validator()
            },
        )
        .await;
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    let refused = node
        .runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap_err();
    let RequestError::Rejected(rejected) = &refused else {
        panic!("{refused}");
    };
    assert_eq!(
        rejected.message,
        r#"validator "99-nri-lease" rejected container adjustment, reason: plugin is away"#
    );
    assert!(refused.to_string().starts_with(
        "failed to create containerd container: failed to get NRI adjustment for container: validator"
    ));
    assert!(node.runtime.world().container_ids().is_empty());
    // The container is undone, and the validator stays connected.
    let rpcs = validator.record();
    assert!(
        rpcs.rpcs()
            .ends_with(&["CreateContainer", "StopContainer", "RemoveContainer"])
    );
    assert!(!node.runtime.plugins()[0].closed);
}

#[tokio::test]
async fn nothing_is_validated_before_nri_0_10() {
    let node = node(Options::containerd(NriVersion::V0_8)).await;
    let validator = node
        .plugin(
            "nri-lease",
            "99",
            PluginOptions {
                in_validate: Behaviour::Refuse("no".into()),
                ..PluginOptions::validator()
            },
        )
        .await;
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    node.runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap();
    assert!(validator.record().validated.is_empty());
}

#[tokio::test]
async fn an_error_from_a_hook_rejects_the_sandbox_and_undoes_it() {
    for version in ALL_VERSIONS {
        let node = node(Options::containerd(version)).await;
        let earlier = node.plugin("earlier", "10", PluginOptions::default()).await;
        let _refusing = node
            .plugin(
                "refusing",
                "50",
                PluginOptions {
                    in_run_pod_sandbox: Behaviour::Refuse("not here".into()),
                    ..PluginOptions::default()
                },
            )
            .await;
        let later = node.plugin("later", "99", PluginOptions::default()).await;
        let rejected = node
            .runtime
            .run_pod_sandbox(PodSpec::new("a", "b"))
            .await
            .unwrap_err();
        assert_eq!(
            rejected.message,
            "rpc error: code = Unknown desc = not here"
        );
        assert_eq!(
            rejected.to_string(),
            "NRI RunPodSandbox failed: rpc error: code = Unknown desc = not here"
        );
        assert_eq!(
            earlier.record().rpcs(),
            ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"]
        );
        assert_eq!(
            later.record().rpcs(),
            ["StopPodSandbox", "RemovePodSandbox"]
        );
        assert!(node.runtime.world().pod_ids().is_empty());
        assert_eq!(node.runtime.plugins().len(), 3);
    }
}

#[tokio::test]
async fn a_late_plugin_is_closed_and_skipped_and_still_listed_for_the_validator() {
    let node = node(quick(Options::default())).await;
    let late = node
        .plugin(
            "late",
            "10",
            PluginOptions {
                in_create_container: Behaviour::Hang,
                ..PluginOptions::default()
            },
        )
        .await;
    let validator = node
        .plugin("nri-lease", "99", PluginOptions::validator())
        .await;
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    let container = node
        .runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .expect("goes on without the plugin");
    assert!(!late.record().has("CreateContainer", &container.0));
    ended(&late).await;
    let validated = validator.record().validated.back().cloned().unwrap();
    assert_eq!(validated.plugins[0], ("late".into(), "10".into()));
    assert_eq!(
        node.runtime.plugins().len(),
        1,
        "the list is clean afterwards"
    );
    assert!(node.runtime.journal().iter().any(|entry| matches!(
        &entry.what,
        What::Skipped { rpc: "CreateContainer", reason, .. } if reason == "context deadline exceeded"
    )));
}

#[tokio::test]
async fn a_late_plugin_is_closed_in_the_kernel_before_the_next_is_called() {
    let node = node(quick(Options::default())).await;
    let late = node
        .plugin(
            "late",
            "10",
            PluginOptions {
                in_run_pod_sandbox: Behaviour::Hang,
                ..PluginOptions::default()
            },
        )
        .await;
    let _next = node.plugin("next", "99", PluginOptions::default()).await;
    node.runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    ended(&late).await;
    let journal = node.runtime.journal();
    let position = |wanted: &dyn Fn(&What) -> bool| {
        journal
            .iter()
            .position(|entry| wanted(&entry.what))
            .unwrap()
    };
    let skipped = position(&|what| matches!(what, What::Skipped { .. }));
    let called = position(&|what| {
        matches!(
            what,
            What::Called {
                rpc: "RunPodSandbox",
                ..
            }
        )
    });
    assert!(skipped < called);
}

#[tokio::test]
async fn a_late_validator_rejects_this_container_and_is_gone() {
    let node = node(quick(Options::default())).await;
    let _validator = node
        .plugin(
            "nri-lease",
            "99",
            PluginOptions {
                in_validate: Behaviour::Hang,
                ..PluginOptions::validator()
            },
        )
        .await;
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    let refused = node
        .runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap_err();
    assert!(
        refused
            .to_string()
            .ends_with("validator plugin 99-nri-lease failed: context deadline exceeded"),
        "{refused}"
    );
    node.runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .expect("nobody validates any more");
}

#[tokio::test]
async fn a_plugin_that_ended_while_idle_is_listed_until_the_next_request() {
    let node = node(Options::default()).await;
    let validator = node
        .plugin("nri-lease", "99", PluginOptions::validator())
        .await;
    let dead = node.plugin("dead", "10", PluginOptions::default()).await;
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    dead.close().await;
    assert!(node.runtime.wait_for_plugin_gone("dead", LIMIT).await);
    assert_eq!(node.runtime.plugins().len(), 2);
    assert!(node.runtime.plugins()[0].closed);
    node.runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap();
    let validated = validator.record().validated.back().cloned().unwrap();
    assert_eq!(validated.plugins[0].0, "dead");
    assert_eq!(node.runtime.plugins().len(), 1);
}

#[tokio::test]
async fn a_plugin_that_knows_only_state_change_gets_that() {
    let node = node(Options::default()).await;
    let plugin = node
        .plugin(
            "old",
            "10",
            PluginOptions {
                state_change_only: true,
                ..PluginOptions::default()
            },
        )
        .await;
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    node.runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap();
    let record = plugin.record();
    assert_eq!(
        record.rpcs(),
        ["RunPodSandbox", "CreateContainer", "PostCreateContainer"]
    );
    let ways: Vec<_> = record.seen.iter().map(|seen| seen.state_change).collect();
    assert_eq!(ways, [true, false, true]);
}

#[tokio::test]
async fn update_containers_from_a_hook_waits_for_the_hook() {
    let node = node(Options::default()).await;
    let slow = node
        .plugin(
            "slow",
            "10",
            PluginOptions {
                in_run_pod_sandbox: Behaviour::Delay(Duration::from_millis(400)),
                ..PluginOptions::default()
            },
        )
        .await;
    let ask = async {
        let called = |entry: &nri_lease_sim::Entry| entry.what == What::AskedForUpdates;
        let (answer, _) = tokio::join!(
            slow.update_containers(Duration::from_millis(100)),
            node.runtime.wait_for_entry(LIMIT, called)
        );
        answer
    };
    let (run, asked) = tokio::join!(node.runtime.run_pod_sandbox(PodSpec::new("a", "b")), ask);
    run.unwrap();
    assert!(
        asked.is_err(),
        "it got its answer although a hook was running"
    );
    slow.update_containers(LIMIT).await.unwrap();
}

#[tokio::test]
async fn what_does_not_exist_is_an_error() {
    let node = node(Options::default()).await;
    let pod = nri_lease_sim::PodId("none".into());
    let error = node
        .runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap_err();
    assert_eq!(error, RequestError::NoSuchPod("none".into()));
    let container = nri_lease_sim::ContainerId("none".into());
    let error = node.runtime.start_container(&container).await.unwrap_err();
    assert_eq!(error, RequestError::NoSuchContainer("none".into()));
}
