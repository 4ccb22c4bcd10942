//! Real containerd, real plugin, without our daemon: what the harness promises.

use std::process::ExitCode;
use std::time::Duration;

use nri_lease_harness::containerd::{Containerd, Options, Version};
use nri_lease_harness::cri::{Pod, Status};
use nri_lease_harness::plugin::{Fault, Nri, Plugin, PluginOptions};
use nri_lease_harness::runner::{self, Test};
use nri_lease_harness::{Context, Result, ensure};

fn main() -> ExitCode {
    let mut tests = vec![];
    for version in Version::ALL {
        let folder = version.folder();
        tests.push(Test::new(
            format!("{folder}::pod_and_container_are_recorded_by_the_plugin"),
            move |_| pod_and_container_are_recorded(version, false),
        ));
        tests.push(Test::new(
            format!("{folder}::plugin_in_its_own_namespaces_is_called"),
            move |_| pod_and_container_are_recorded(version, true),
        ));
        tests.push(Test::new(
            format!("{folder}::plugin_finds_the_pods_again_after_a_runtime_restart"),
            move |_| restart(version),
        ));
        tests.push(Test::new(
            format!("{folder}::plugin_lost_in_run_pod_sandbox_lets_the_pod_through"),
            move |_| lost_in_run_pod_sandbox(version),
        ));
        if version.validates() {
            tests.push(Test::new(
                format!("{folder}::default_validator_accepts_a_plugin_lost_in_create_container"),
                move |_| lost_in_create_container(version),
            ));
            tests.push(Test::new(
                format!("{folder}::default_validator_refuses_while_the_plugin_is_missing"),
                move |_| default_validator(version),
            ));
        }
    }
    tests.push(Test::new("two_containerds_side_by_side", |_| {
        side_by_side()
    }));
    runner::main(1, tests)
}

fn plugin_for(version: Version) -> PluginOptions {
    PluginOptions {
        nri: match version {
            Version::V2_3 => Nri::V0_12,
            Version::V2_2 => Nri::V0_11,
            Version::V1_7 => Nri::V0_8,
        },
        ..PluginOptions::named("test.plugin")
    }
}

fn pod_and_container_are_recorded(version: Version, isolated: bool) -> Result<()> {
    let containerd = Containerd::start(version, &Options::default())?;
    let options = PluginOptions {
        isolated,
        ..plugin_for(version)
    };
    let plugin = Plugin::start_synchronized(&options, &containerd.nri_socket(), containerd.dir())?;
    if isolated {
        let ns = |pid: String| std::fs::read_link(format!("/proc/{pid}/ns/net"));
        ensure!(ns(plugin.pid().to_string())? != ns("self".into())?);
    }
    // As a distribution's build says it: what plugins tell runtimes apart by.
    let told = plugin.status()?.runtime;
    ensure!(told == version.told(), "{told}");
    let began = std::time::Instant::now();
    let pod = containerd.cri().run_pod(&Pod::named("one"))?;
    let ran = began.elapsed();
    let container = containerd.cri().create_container(&pod, "main")?;
    let created = began.elapsed();
    containerd.cri().start_container(&container)?;
    println!(
        "{}: start to CRI {:?}, RunPodSandbox {ran:?}, CreateContainer {:?}, StartContainer {:?}",
        version.folder(),
        containerd.started_in,
        created - ran,
        began.elapsed() - created
    );
    ensure!(plugin.processed_pod(&pod)?, "{:?}", plugin.record()?);
    ensure!(plugin.processed_container(&container)?);
    let states: Vec<_> = containerd
        .cri()
        .containers()?
        .into_iter()
        .map(|c| c.state)
        .collect();
    ensure!(states == ["CONTAINER_RUNNING"], "{states:?}");
    drop(plugin);
    let left = containerd.clean_up();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

fn restart(version: Version) -> Result<()> {
    let mut containerd = Containerd::start(version, &Options::default())?;
    let plugin = Plugin::start_synchronized(
        &plugin_for(version),
        &containerd.nri_socket(),
        containerd.dir(),
    )?;
    let pod = containerd.cri().run_pod(&Pod::named("before"))?;
    for killed in [false, true] {
        let before = plugin.status()?.connections;
        if killed {
            containerd.kill();
            plugin.wait_disconnected()?;
            containerd.launch()?;
        } else {
            containerd.restart()?;
        }
        let status = plugin.wait_synchronized()?;
        ensure!(status.connections > before, "{status:?}");
        let record = plugin.record()?;
        let last = record.iter().rev().find(|e| e.event == "synchronize");
        let pods = &last.context("a synchronize")?.pods;
        ensure!(*pods == [pod.clone()], "{pods:?}");
        println!(
            "{}: restart to CRI {:?}",
            version.folder(),
            containerd.started_in
        );
    }
    containerd.remove_all()?;
    let left = containerd.clean_up();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

fn default_validator(version: Version) -> Result<()> {
    let options = Options {
        default_validator: Some(vec!["test.plugin".into()]),
        ..Options::default()
    };
    let containerd = Containerd::start(version, &options)?;
    let pod = containerd.cri().run_pod(&Pod::named("one"))?;
    let refused = containerd.cri().create_container(&pod, "main");
    let error = refused
        .err()
        .context("created without its required plugin")?;
    let status = error.downcast_ref::<Status>().context("a CRI status")?;
    ensure!(status.message.contains("test.plugin"), "{status}");

    let _plugin = Plugin::start_synchronized(
        &plugin_for(version),
        &containerd.nri_socket(),
        containerd.dir(),
    )?;
    containerd.cri().create_container(&pod, "main")?;
    Ok(())
}

/// How a plugin can be lost in a hook. Shorter than the runtime's default timeout.
fn losses() -> [Fault; 4] {
    [
        Fault::Sleep(Duration::from_millis(1_000)),
        Fault::Exit,
        Fault::Kill,
        Fault::Disconnect {
            reconnect_after: None,
        },
    ]
}

fn short_timeout() -> Options {
    Options {
        request_timeout: Duration::from_millis(300),
        ..Options::default()
    }
}

/// The gap that nri-lease closes, seen on the runtime itself: these tests fail
/// on a runtime that has closed it, and then we want to know.
fn lost_in_run_pod_sandbox(version: Version) -> Result<()> {
    let containerd = Containerd::start(version, &short_timeout())?;
    for (fault, isolated) in losses().into_iter().zip([false, false, true, true]) {
        let options = PluginOptions {
            isolated,
            reconnect: false,
            ..plugin_for(version)
        };
        let plugin =
            Plugin::start_synchronized(&options, &containerd.nri_socket(), containerd.dir())?;
        plugin.fault("run_pod_sandbox", &fault)?;
        let name = format!("{fault:?}");
        let pod = containerd.cri().run_pod(&Pod::named(&name))?;
        ensure!(!plugin.processed_pod(&pod)?, "{name}");
        match fault {
            Fault::Exit | Fault::Kill => plugin.wait_ended()?,
            _ => drop(plugin.wait_disconnected()?),
        }
    }
    let pods = containerd.cri().pods()?;
    ensure!(
        pods.len() == 4 && pods.iter().all(|p| p.state == "SANDBOX_READY"),
        "{pods:?}"
    );
    Ok(())
}

fn lost_in_create_container(version: Version) -> Result<()> {
    let containerd = Containerd::start(
        version,
        &Options {
            default_validator: Some(vec!["test.plugin".into()]),
            ..short_timeout()
        },
    )?;
    let pod = containerd.cri().run_pod(&Pod::named("one"))?;
    for fault in losses() {
        let options = PluginOptions {
            reconnect: false,
            ..plugin_for(version)
        };
        let plugin =
            Plugin::start_synchronized(&options, &containerd.nri_socket(), containerd.dir())?;
        plugin.fault("create_container", &fault)?;
        let name = format!("{fault:?}");
        containerd
            .cri()
            .create_container(&pod, &name)
            .with_context(|| format!("{name}; record {:?}", plugin.record()))?;
        // And the next one, without the plugin, is refused.
        let refused = containerd
            .cri()
            .create_container(&pod, &format!("{name}-next"));
        ensure!(refused.is_err(), "after {name}");
    }
    Ok(())
}

/// Same pod names, same plugin names, and the end of one does not touch the other.
fn side_by_side() -> Result<()> {
    let one = Containerd::start(Version::V2_3, &Options::default())?;
    let two = Containerd::start(Version::V2_2, &Options::default())?;
    let pod_of_one = one.cri().run_pod(&Pod::named("same"))?;
    let pod_of_two = two.cri().run_pod(&Pod::named("same"))?;
    ensure!(pod_of_one != pod_of_two);
    let left = one.clean_up();
    ensure!(left.is_empty(), "left behind: {left:?}");
    let container = two.cri().create_container(&pod_of_two, "main")?;
    two.cri().start_container(&container)?;
    let pods = two.cri().pods()?;
    ensure!(
        pods.len() == 1 && pods[0].state == "SANDBOX_READY",
        "{pods:?}"
    );
    Ok(())
}
