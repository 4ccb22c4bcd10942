//! The NRI side of the daemon against runtimes that misbehave, restart, are of other versions, or
//! are not there yet: it comes back by itself and decides again.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use std::path::Path;
use std::time::{Duration, Instant};

use node::{LIMIT, Node, until};
use nri_lease_sim::plugin::Command;
use nri_lease_sim::story::Process;
use nri_lease_sim::{
    ContainerSpec, Entry, Fault, NriVersion, Options, PodSpec, Runtime, What, World, fault,
};

const OURS: &str = "99-nri-lease";

fn nri_lease() -> String {
    "nri-lease".into()
}

/// Starts in short order again, and after a crash, too.
async fn runtime(socket: &Path, options: Options) -> Runtime {
    Runtime::start(socket, options).await.unwrap()
}

/// How often the runtime's journal says this of the daemon.
fn count(runtime: &Runtime, what: impl Fn(&What) -> bool) -> usize {
    let entries = runtime.journal();
    let ours = entries.iter().filter(|entry| entry.plugin == OURS);
    ours.filter(|entry| what(&entry.what)).count()
}

fn listed(runtime: &Runtime) -> usize {
    count(runtime, |what| *what == What::Listed)
}

async fn is_listed(runtime: &Runtime, times: usize) {
    let what = format!("the daemon to be listed {times} times");
    until(&what, async || listed(runtime) >= times).await;
}

/// A pod of a name that no other has.
fn pod() -> PodSpec {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    PodSpec::new("default", &format!("p{number}"))
}

async fn refuses_sandboxes(runtime: &Runtime) {
    let refused = runtime.run_pod_sandbox(pod()).await.unwrap_err();
    let text = refused.message;
    assert!(text.contains("required NRI plugin \"missing\""), "{text}");
}

#[tokio::test]
async fn a_broken_connection_is_made_again_and_decides_again() {
    let node = Node::start("").await;
    let runtime = runtime(&node.nri_socket(), Options::default()).await;
    node.connected().await;
    node.registers("missing").await;
    let mut times = 1;
    for fault in [
        Fault::CloseConnection {
            plugin: nri_lease(),
        },
        Fault::GarbageFrame {
            plugin: nri_lease(),
        },
        Fault::OversizedFrame {
            plugin: nri_lease(),
        },
        Fault::EofInFrame {
            plugin: nri_lease(),
        },
        Fault::HalfFrame {
            plugin: nri_lease(),
        },
    ] {
        is_listed(&runtime, times).await;
        refuses_sandboxes(&runtime).await;
        runtime.inject(fault.clone()).await.unwrap();
        if matches!(fault, Fault::GarbageFrame { .. } | Fault::HalfFrame { .. }) {
            // The connection may stand. What the runtime says next cannot be understood, or can.
            let answer = runtime.run_pod_sandbox(pod()).await;
            println!("{fault:?}: the next pod was {answer:?}");
        }
        // Back by itself, or never gone.
        until("the daemon to be open", async || {
            let open = runtime.wait_for_plugin("nri-lease", LIMIT).await;
            open.is_some() && runtime.run_pod_sandbox(pod()).await.is_err()
        })
        .await;
        println!("{fault:?}: listed {} times by now", listed(&runtime));
        times = listed(&runtime);
    }
    refuses_sandboxes(&runtime).await;
    let before = listed(&runtime);
    let unknown = Fault::UnknownRpc {
        plugin: nri_lease(),
    };
    runtime.inject(unknown).await.unwrap();
    refuses_sandboxes(&runtime).await;
    assert_eq!(listed(&runtime), before, "an unknown RPC ends no session");
    assert!(node.rss_kib() < 100 << 10);
    node.becomes_idle().await;
}

#[tokio::test]
async fn a_large_synchronisation_in_many_messages_is_taken() {
    let node = Node::start("").await;
    node.registers("missing").await;
    let mut world = World::default();
    for number in 0..500 {
        let spec = PodSpec::new("default", &format!("pod{number}"));
        let pod = world.add_pod(&spec.label("app", "db").annotation("a", "b"));
        for container in 0..10 {
            let mut spec = ContainerSpec::new(&format!("c{container}"));
            spec.args = vec!["--flag=value".into(); 8];
            spec.env = vec!["KEY=a value of some length".into(); 16];
            world.add_container(&pod, &spec);
        }
    }
    let runtime = Runtime::start_with(&node.nri_sockets[0], Options::default(), world);
    let runtime = runtime.await.unwrap();
    is_listed(&runtime, 1).await;
    // In one message as the runtime decides, and then in at least forty.
    let split = Fault::SplitSynchronize {
        plugin: nri_lease(),
        messages: 40,
    };
    runtime.inject(split).await.unwrap();
    let close = Fault::CloseConnection {
        plugin: nri_lease(),
    };
    runtime.inject(close).await.unwrap();
    is_listed(&runtime, 2).await;
    let mut configured = None;
    for entry in runtime
        .journal()
        .iter()
        .filter(|entry| entry.plugin == OURS)
    {
        match &entry.what {
            What::Configured { .. } => configured = Some(entry.at),
            What::Synchronized { messages } => println!(
                "500 pods and 5,000 containers in {messages} messages: {:?} after Configure",
                entry.at - configured.unwrap()
            ),
            _ => {}
        }
    }
    assert_eq!(
        count(
            &runtime,
            |what| matches!(what, What::Synchronized { messages } if *messages >= 40)
        ),
        1
    );
    until("the pods to be known", async || {
        node.status().await.runtimes[0].pods == 500
    })
    .await;
    println!("resident: {} KiB", node.rss_kib());
    refuses_sandboxes(&runtime).await;
}

#[tokio::test]
async fn behind_a_silent_client_it_waits_and_does_not_flap() {
    let node = Node::start("").await;
    let slow = Options {
        registration_timeout: Duration::from_secs(6),
        ..Options::default()
    };
    // Bound to another name first, so that the silent client is in front.
    let hidden = node.dir.join("hidden.sock");
    let runtime = runtime(&hidden, slow).await;
    let _silent = fault::silent_client(&hidden).await.unwrap();
    std::fs::rename(&hidden, node.nri_socket()).unwrap();
    is_listed(&runtime, 1).await;
    node.connected().await;
    let daemon = i32::try_from(node.daemon.pid()).unwrap();
    let accepted: Vec<Entry> = runtime.journal();
    let accepted = accepted
        .iter()
        .filter(|entry| entry.what == What::Accepted { pid: daemon });
    assert_eq!(accepted.count(), 1, "{:#?}", runtime.journal());
    assert_eq!(count(&runtime, |what| *what == What::Registered), 1);
}

#[tokio::test]
async fn a_runtime_of_unknown_name_gets_the_smaller_mask_when_it_refuses_the_larger() {
    let node = Node::start("").await;
    let exotic = Options {
        name: "exotic".into(),
        version: "rolling".into(),
        ..Options::containerd(NriVersion::V0_8)
    };
    let runtime = runtime(&node.nri_socket(), exotic).await;
    node.connected().await;
    let masks: Vec<i32> = runtime
        .journal()
        .iter()
        .filter_map(|entry| match entry.what {
            What::Configured { events } if entry.plugin == OURS => Some(events),
            _ => None,
        })
        .collect();
    assert_eq!(masks.last(), Some(&0b1101), "{:#?}", runtime.journal());
    assert_eq!(node.logged("trying the other set"), 1);
    node.registers("missing").await;
    // Not known to clean up after refused sandboxes: its containers wait instead.
    let pod = runtime.run_pod_sandbox(pod()).await.unwrap();
    let refused = runtime
        .create_container(&pod, ContainerSpec::new("c"))
        .await;
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("required NRI plugin")
    );
    let status = node.status().await;
    assert!(
        status.runtimes[0]
            .warnings
            .iter()
            .any(|w| w.contains("no validation")),
        "{status}"
    );
    assert!(
        status.runtimes[0]
            .warnings
            .iter()
            .any(|w| w.contains("not verified")),
        "{status}"
    );
}

#[tokio::test]
async fn a_mask_refused_once_is_not_given_up_for_ever() {
    let node = Node::start("").await;
    let exotic = Options {
        name: "exotic".into(),
        version: "rolling".into(),
        ..Options::containerd(NriVersion::V0_11)
    };
    let socket = node.dir.join("hidden.sock");
    let runtime = runtime(&socket, exotic).await;
    let refuse = Fault::RefuseMask {
        plugin: nri_lease(),
    };
    runtime.inject(refuse).await.unwrap();
    std::fs::rename(&socket, node.nri_socket()).unwrap();
    is_listed(&runtime, 1).await;
    node.registers("missing").await;
    let pod = runtime.run_pod_sandbox(pod()).await.unwrap();
    runtime
        .create_container(&pod, ContainerSpec::new("c"))
        .await
        .unwrap_err();
}

#[tokio::test]
async fn every_version_of_nri_refuses_what_lacks_its_plugin_and_admits_the_rest() {
    for (options, sandboxes, container_rpc) in [
        (
            Options::containerd(NriVersion::V0_8),
            "mark",
            "CreateContainer",
        ),
        (
            Options::containerd(NriVersion::V0_11),
            "reject",
            "ValidateContainerAdjustment",
        ),
        (Options::crio(), "reject", "ValidateContainerAdjustment"),
        (
            Options::containerd(NriVersion::V0_12),
            "reject",
            "ValidateContainerAdjustment",
        ),
    ] {
        let what = format!("{} {}", options.name, options.version);
        let node = Node::start("").await;
        let runtime = runtime(&node.nri_socket(), options.clone()).await;
        node.connected().await;
        let status = node.status().await;
        assert_eq!(status.runtimes[0].sandbox_enforcement, sandboxes, "{what}");
        let early = runtime.run_pod_sandbox(pod()).await.unwrap();

        let mut plugin = node
            .plugin(&runtime, Command::new(node.nri_socket(), "missing", "10"))
            .await;
        let good = runtime.run_pod_sandbox(pod()).await.unwrap();
        let container = ContainerSpec::new("c");
        runtime
            .create_container(&good, container.clone())
            .await
            .unwrap();

        plugin.kill().unwrap();
        let refused = runtime.create_container(&early, container.clone()).await;
        let text = refused.unwrap_err().to_string();
        assert!(
            text.contains("required NRI plugin \"missing\""),
            "{what}: {text}"
        );
        if sandboxes == "reject" {
            refuses_sandboxes(&runtime).await;
        } else {
            let pod = runtime.run_pod_sandbox(pod()).await.unwrap();
            runtime.create_container(&pod, container).await.unwrap_err();
        }
        let refusals = |wanted: &str| {
            count(
                &runtime,
                |what| matches!(what, What::Refused { rpc, .. } if *rpc == wanted),
            )
        };
        assert!(
            refusals(container_rpc) >= 1,
            "{what}: {:#?}",
            runtime.journal()
        );
        println!("{what}: containers are refused in {container_rpc}, sandboxes: {sandboxes}");
    }
}

#[tokio::test]
async fn each_of_several_runtimes_is_decided_by_its_own_connections() {
    let node = Node::start_with("", &["one.sock", "two.sock"], &[]).await;
    let one = runtime(&node.nri_sockets[0], Options::default()).await;
    let two = runtime(&node.nri_sockets[1], Options::crio()).await;
    node.connected().await;
    let plugin = Command::new(&node.nri_sockets[0], "missing", "10");
    let _plugin: Process = node.plugin(&one, plugin).await;
    one.run_pod_sandbox(pod()).await.unwrap();
    refuses_sandboxes(&two).await;
    // One that goes does not disturb the other.
    drop(two.crash().await);
    until("the status to say so", async || {
        let status = node.status().await;
        status.runtimes[0].connected && !status.runtimes[1].connected
    })
    .await;
    one.run_pod_sandbox(pod()).await.unwrap();
    let two = runtime(&node.nri_sockets[1], Options::crio()).await;
    is_listed(&two, 1).await;
    refuses_sandboxes(&two).await;
    one.run_pod_sandbox(pod()).await.unwrap();
}

#[tokio::test]
async fn a_restarted_runtime_is_joined_at_once() {
    const RESTARTS: usize = 30;
    let node = Node::start("").await;
    let mut runtime = runtime(&node.nri_socket(), Options::default()).await;
    node.connected().await;
    node.registers("missing").await;
    let mut times = Vec::new();
    for number in 0..RESTARTS {
        let world = match number % 2 {
            0 => runtime.stop().await,
            // The socket file stays behind.
            _ => runtime.crash().await,
        };
        // A real runtime takes longer than that to come back.
        until("the daemon to wait for the socket", async || {
            let status = node.status().await;
            status.runtimes[0].detail.contains("cannot connect")
        })
        .await;
        let again = Runtime::start_with(&node.nri_sockets[0], Options::default(), world);
        runtime = again.await.unwrap();
        let accepting = Instant::now();
        is_listed(&runtime, 1).await;
        let entry = |wanted: fn(&What) -> bool| {
            let journal = runtime.journal();
            journal.iter().find(|entry| wanted(&entry.what)).unwrap().at
        };
        let synchronized = entry(|what| matches!(what, What::Synchronized { .. }));
        times.push(synchronized.saturating_duration_since(accepting));
        refuses_sandboxes(&runtime).await;
    }
    times.sort();
    println!(
        "from the socket accepting to synchronised, debug build, {RESTARTS} restarts: median {:?}, worst {:?}",
        times[RESTARTS / 2],
        times[RESTARTS - 1]
    );
    assert!(times[RESTARTS - 1] < Duration::from_secs(2));
}

#[tokio::test]
async fn a_socket_is_found_when_its_directory_is_made_later() {
    let node = Node::start_with("", &["later/deep/nri.sock"], &[]).await;
    node.registers("missing").await;
    until("the daemon to look for it", async || {
        let status = node.status().await;
        status.runtimes[0].detail.contains("cannot connect")
    })
    .await;
    // Makes the directories, one by one.
    let runtime = runtime(&node.nri_socket(), Options::default()).await;
    is_listed(&runtime, 1).await;
    refuses_sandboxes(&runtime).await;

    // And again, when all of it goes and comes back.
    let world = runtime.stop().await;
    std::fs::remove_dir_all(node.dir.join("later")).unwrap();
    let again = Runtime::start_with(&node.nri_sockets[0], Options::default(), world);
    let runtime = again.await.unwrap();
    is_listed(&runtime, 1).await;
    refuses_sandboxes(&runtime).await;
    node.becomes_idle().await;
}

#[tokio::test]
async fn a_socket_that_replaces_another_by_rename_is_found() {
    let node = Node::start("").await;
    let old = runtime(&node.nri_socket(), Options::default()).await;
    node.connected().await;
    node.registers("missing").await;
    let fresh = node.dir.join("fresh.sock");
    let new = runtime(&fresh, Options::default()).await;
    std::fs::rename(&fresh, node.nri_socket()).unwrap();
    // The old one still speaks.
    refuses_sandboxes(&old).await;
    drop(old.crash().await);
    is_listed(&new, 1).await;
    refuses_sandboxes(&new).await;

    // While nobody listens: only the rename tells.
    let world = new.crash().await;
    until("the daemon to look for it", async || {
        !node.status().await.runtimes[0].connected
    })
    .await;
    let newest = Runtime::start_with(&fresh, Options::default(), world);
    let newest = newest.await.unwrap();
    std::fs::rename(&fresh, node.nri_socket()).unwrap();
    is_listed(&newest, 1).await;
    refuses_sandboxes(&newest).await;
}
