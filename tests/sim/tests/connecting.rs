//! How plugins get into the runtime's list, one at a time.

mod common;

use common::{LIMIT, ended, node, quick};
use nri_lease_sim::fault::silent_client;
use nri_lease_sim::plugin::{Options as PluginOptions, Plugin};
use nri_lease_sim::{
    ContainerSpec, Entry, Fault, NriVersion, Options, PodSpec, Runtime, SyncBlock, What, World,
};
use std::time::{Duration, Instant};

fn listed(name: &'static str) -> impl Fn(&Entry) -> bool {
    move |entry| entry.plugin.ends_with(name) && entry.what == What::Listed
}

#[tokio::test]
async fn a_plugin_is_synchronised_before_it_is_listed() {
    let node = node(Options::default()).await;
    let pod = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    node.runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap();
    let plugin = node.plugin("dra.net", "10", PluginOptions::default()).await;
    let record = plugin.record();
    assert_eq!(
        (
            record.synchronized,
            record.synchronized_pods,
            record.synchronized_containers
        ),
        (1, 1, 1)
    );
    let whats: Vec<_> = node
        .runtime
        .journal()
        .into_iter()
        .map(|entry| entry.what)
        .collect();
    let pid = i32::try_from(std::process::id()).unwrap();
    assert_eq!(
        whats,
        [
            What::Accepted { pid },
            What::Registered,
            What::Configured { events: 0x7ff },
            What::Synchronized { messages: 1 },
            What::Listed,
        ]
    );
    let info = &node.runtime.plugins()[0];
    assert_eq!((info.pid, info.index.as_str()), (pid, "10"));
}

#[tokio::test]
async fn a_silent_client_holds_up_the_next_for_the_registration_timeout() {
    let node = node(quick(Options::default())).await;
    let silent = silent_client(&node.socket).await.unwrap();
    let began = Instant::now();
    let _plugin = node.plugin("dra.net", "10", PluginOptions::default()).await;
    assert!(began.elapsed() >= Duration::from_millis(500));
    let reasons: Vec<_> = node.runtime.journal();
    assert!(reasons.iter().any(|entry| matches!(
        &entry.what,
        What::NotStarted { reason } if reason == "plugin registration timed out"
    )));
    drop(silent);
}

#[tokio::test]
async fn a_client_that_goes_away_holds_up_nobody() {
    let node = node(Options::default()).await;
    for _ in 0..20 {
        drop(silent_client(&node.socket).await.unwrap());
    }
    let began = Instant::now();
    let _plugin = node.plugin("dra.net", "10", PluginOptions::default()).await;
    assert!(began.elapsed() < Options::default().registration_timeout);
}

#[tokio::test]
async fn names_and_indices_are_checked_and_the_refused_connection_stays_open() {
    for (version, name, index, fine) in [
        (NriVersion::V0_12, "dra.net_1+x-y", "00", true),
        (NriVersion::V0_12, "", "10", false),
        (NriVersion::V0_12, "a/b", "10", false),
        (NriVersion::V0_11, "a/b", "10", true),
        (NriVersion::V0_8, "", "10", false),
        (NriVersion::V0_12, "a", "1", false),
        (NriVersion::V0_12, "a", "1x", false),
        (NriVersion::V0_12, "a", "100", false),
    ] {
        let node = node(Options::containerd(version)).await;
        let plugin = Plugin::connect(&node.socket, name, index, PluginOptions::default()).await;
        assert_eq!(plugin.is_ok(), fine, "{version:?} {name:?} {index:?}");
        let decided = |entry: &Entry| match &entry.what {
            What::NotStarted { reason } => reason.starts_with("failed to register plugin: "),
            what => *what == What::Listed,
        };
        let entry = node.runtime.wait_for_entry(LIMIT, decided).await.unwrap();
        assert_eq!(entry.what == What::Listed, fine);
    }
}

#[tokio::test]
async fn an_event_that_the_runtime_does_not_know_fails_configure() {
    for (version, events, fine) in [
        (NriVersion::V0_8, 0x7ff, true),
        (NriVersion::V0_8, 0x800, false),
        (NriVersion::V0_11, 0x3fff, true),
        (NriVersion::V0_12, 0x3fff, true),
        (NriVersion::V0_12, 0x4000, false),
    ] {
        let node = node(Options::containerd(version)).await;
        let options = PluginOptions {
            events,
            ..PluginOptions::default()
        };
        let plugin = Plugin::connect(&node.socket, "p", "10", options)
            .await
            .unwrap();
        if fine {
            assert!(node.runtime.wait_for_plugin("p", LIMIT).await.is_some());
            assert_eq!(node.runtime.plugins()[0].events, events);
        } else {
            ended(&plugin).await;
            let reason = format!("invalid plugin events: 0x{events:x}");
            let refused = |entry: &Entry| {
                entry.what
                    == What::NotStarted {
                        reason: reason.clone(),
                    }
            };
            assert!(node.runtime.wait_for_entry(LIMIT, refused).await.is_some());
        }
    }
}

#[tokio::test]
async fn plugins_are_called_by_index_and_may_share_a_name() {
    let node = node(Options::default()).await;
    let _c = node.plugin("c", "90", PluginOptions::default()).await;
    let _a = node.plugin("a", "05", PluginOptions::default()).await;
    let _b = node.plugin("b", "40", PluginOptions::default()).await;
    let twin = Plugin::connect(&node.socket, "a", "41", PluginOptions::default())
        .await
        .unwrap();
    assert!(twin.wait_synchronized(LIMIT).await);
    assert!(
        node.runtime
            .wait_for_entry(LIMIT, listed("41-a"))
            .await
            .is_some()
    );
    node.runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    let called: Vec<_> = node
        .runtime
        .journal()
        .into_iter()
        .filter(|entry| matches!(entry.what, What::Called { .. }))
        .map(|entry| entry.plugin)
        .collect();
    assert_eq!(called, ["05-a", "40-b", "41-a", "90-c"]);
}

#[tokio::test]
async fn a_stopping_container_holds_up_synchronisation_and_then_new_requests() {
    let node = node(Options::default()).await;
    let runtime = &node.runtime;
    let pod = runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    let container = runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap();
    runtime.start_container(&container).await.unwrap();

    let grace = Duration::from_millis(600);
    let began = Instant::now();
    let stop = runtime.stop_container(&container, grace);
    let others = async {
        let plugin = Plugin::connect(&node.socket, "p", "10", PluginOptions::default())
            .await
            .unwrap();
        let waits = |entry: &Entry| entry.what == What::WaitsForRequests;
        runtime.wait_for_entry(LIMIT, waits).await.unwrap();
        let pod = runtime
            .run_pod_sandbox(PodSpec::new("a", "c"))
            .await
            .unwrap();
        assert!(began.elapsed() >= grace, "the pod waited behind the plugin");
        assert!(
            plugin.record().has("RunPodSandbox", &pod.0),
            "and was seen by it"
        );
        // The container had stopped by then.
        assert_eq!(plugin.record().synchronized_containers, 0);
    };
    let (stopped, ()) = tokio::join!(stop, others);
    stopped.unwrap();
}

#[tokio::test]
async fn crio_lets_requests_pass_between_synchronisation_and_the_list() {
    let node = node(Options::crio()).await;
    assert_eq!(Options::crio().sync_block, SyncBlock::HooksOnly);
    node.runtime
        .inject(Fault::DelayBeforeListEntry {
            plugin: "p".into(),
            delay: Duration::from_millis(500),
        })
        .await
        .unwrap();
    let plugin = Plugin::connect(&node.socket, "p", "10", PluginOptions::default())
        .await
        .unwrap();
    assert!(plugin.wait_synchronized(LIMIT).await);
    let missed = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    assert!(node.runtime.wait_for_plugin("p", LIMIT).await.is_some());
    let seen = node
        .runtime
        .run_pod_sandbox(PodSpec::new("a", "c"))
        .await
        .unwrap();
    let record = plugin.record();
    assert_eq!(record.synchronized_pods, 0);
    assert!(!record.has("RunPodSandbox", &missed.0));
    assert!(record.has("RunPodSandbox", &seen.0));
}

#[tokio::test]
async fn a_big_node_is_synchronised_in_several_messages() {
    let mut world = World::default();
    let mut heavy = ContainerSpec::new("app");
    heavy.env = (0..40)
        .map(|i| format!("SOME_VARIABLE_{i}=some value of it"))
        .collect();
    for i in 0..500 {
        let pod = world.add_pod(&PodSpec::new("default", &format!("pod-{i}")).label("app", "web"));
        for _ in 0..10 {
            world.add_container(&pod, &heavy);
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nri.sock");
    // The default of 2 s is enough, but not for an unoptimised build on a busy machine.
    let options = Options {
        request_timeout: LIMIT,
        ..Options::default()
    };
    let runtime = Runtime::start_with(&socket, options, world).await.unwrap();
    let plugin = Plugin::connect(&socket, "p", "10", PluginOptions::default())
        .await
        .unwrap();
    assert!(
        plugin.wait_synchronized(LIMIT).await,
        "{:?}",
        runtime.journal()
    );
    let journal = runtime.journal();
    let configured = journal
        .iter()
        .find(|entry| matches!(entry.what, What::Configured { .. }));
    println!("synchronised after {:?}", configured.unwrap().at.elapsed());
    let record = plugin.record();
    assert_eq!(
        (record.synchronized_pods, record.synchronized_containers),
        (500, 5000)
    );
    assert!(record.synchronize_messages > 1);
    assert!(runtime.wait_for_plugin("p", LIMIT).await.is_some());
}

#[tokio::test]
async fn a_restarted_runtime_presents_its_pods_and_forgets_whom_it_told() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nri.sock");
    let runtime = Runtime::start(&socket, Options::default()).await.unwrap();
    let before = Plugin::connect(&socket, "p", "10", PluginOptions::default())
        .await
        .unwrap();
    runtime.wait_for_plugin("p", LIMIT).await.unwrap();
    let pod = runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    let container = runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap();
    let world = runtime.stop().await;
    ended(&before).await;
    assert!(!socket.exists());
    assert!(
        Plugin::connect(&socket, "p", "10", PluginOptions::default())
            .await
            .is_err()
    );

    let runtime = Runtime::start_with(&socket, Options::default(), world)
        .await
        .unwrap();
    let after = Plugin::connect(&socket, "p", "10", PluginOptions::default())
        .await
        .unwrap();
    runtime.wait_for_plugin("p", LIMIT).await.unwrap();
    assert_eq!(after.record().synchronized_pods, 1);
    runtime.remove_pod_sandbox(&pod).await.unwrap();
    // As containerd: containers are known again from Synchronize, sandboxes are not.
    assert_eq!(after.record().rpcs(), ["StopContainer", "RemoveContainer"]);
    assert!(after.record().has("RemoveContainer", &container.0));
    // Ids are not used twice.
    let next = runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    assert_ne!(next, pod);
}

#[tokio::test]
async fn a_crashed_runtime_leaves_its_socket_file_and_starts_over_it() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nri.sock");
    let runtime = Runtime::start(&socket, Options::default()).await.unwrap();
    let plugin = Plugin::connect(&socket, "p", "10", PluginOptions::default())
        .await
        .unwrap();
    runtime.crash().await;
    ended(&plugin).await;
    assert!(socket.exists());
    let runtime = Runtime::start(&socket, Options::default()).await.unwrap();
    let _plugin = Plugin::connect(&socket, "p", "10", PluginOptions::default())
        .await
        .unwrap();
    assert!(runtime.wait_for_plugin("p", LIMIT).await.is_some());
}
