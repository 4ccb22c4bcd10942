//! Plugins as processes of their own, and the building blocks of a demonstration.

mod common;

use common::LIMIT;
use nix::sys::signal::Signal;
use nri_lease_sim::plugin::{Behaviour, Command, Options as PluginOptions};
use nri_lease_sim::story::{CommandLine, Process, Scratch, Teller};
use nri_lease_sim::{ContainerSpec, Options, PodSpec, Runtime};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

fn start(socket: &Path, name: &str, index: &str, options: PluginOptions) -> Process {
    let mut command = Command::new(socket, name, index);
    command.options = options;
    CommandLine::new(env!("CARGO_BIN_EXE_nri-lease-sim-plugin"))
        .args(command.to_args())
        .start()
        .expect("starts")
}

#[tokio::test]
async fn a_plugin_process_says_what_it_processes_and_ends_on_sigterm() {
    let scratch = Scratch::new("sim").unwrap();
    let socket = scratch.join("nri.sock");
    let runtime = Runtime::start(&socket, Options::default()).await.unwrap();
    let mut plugin = start(&socket, "dra.net", "10", PluginOptions::default());
    let info = runtime.wait_for_plugin("dra.net", LIMIT).await.unwrap();
    assert_eq!(u32::try_from(info.pid).unwrap(), plugin.pid());
    let pod = runtime
        .run_pod_sandbox(PodSpec::new("default", "web"))
        .await
        .unwrap();
    runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .unwrap();
    let line = "CreateContainer default/web app";
    assert!(
        plugin
            .wait_for_line(LIMIT, |said| said == line)
            .await
            .is_some()
    );
    assert_eq!(
        plugin.output()[..3],
        [
            "registered",
            "synchronized 0 0",
            "RunPodSandbox default/web"
        ]
    );
    let status = plugin.terminate(LIMIT).await.unwrap();
    assert!(status.success());
    assert!(runtime.wait_for_plugin_gone("dra.net", LIMIT).await);
}

#[tokio::test]
async fn a_plugin_process_can_exit_in_a_hook() {
    let scratch = Scratch::new("sim").unwrap();
    let socket = scratch.join("nri.sock");
    let runtime = Runtime::start(&socket, Options::default()).await.unwrap();
    let options = PluginOptions {
        in_create_container: Behaviour::Exit(3),
        ..PluginOptions::default()
    };
    let mut plugin = start(&socket, "p", "10", options);
    runtime.wait_for_plugin("p", LIMIT).await.unwrap();
    let pod = runtime
        .run_pod_sandbox(PodSpec::new("a", "b"))
        .await
        .unwrap();
    runtime
        .create_container(&pod, ContainerSpec::new("app"))
        .await
        .expect("the container is created without the plugin");
    let status = plugin.wait(LIMIT).await.unwrap().expect("has ended");
    assert_eq!(status.code(), Some(3));
}

#[tokio::test]
async fn a_plugin_process_reconnects_when_told_to_and_else_fails() {
    let scratch = Scratch::new("sim").unwrap();
    let socket = scratch.join("nri.sock");
    let runtime = Runtime::start(&socket, Options::default()).await.unwrap();
    let options = PluginOptions {
        reconnect: Some(Duration::from_millis(20)),
        ..PluginOptions::default()
    };
    let _faithful = start(&socket, "faithful", "10", options);
    let mut once = start(&socket, "once", "20", PluginOptions::default());
    runtime.wait_for_plugin("faithful", LIMIT).await.unwrap();
    runtime.wait_for_plugin("once", LIMIT).await.unwrap();
    let world = runtime.stop().await;
    let runtime = Runtime::start_with(&socket, Options::default(), world)
        .await
        .unwrap();
    runtime.wait_for_plugin("faithful", LIMIT).await.unwrap();
    let status = once.wait(LIMIT).await.unwrap().expect("has ended");
    assert_eq!(status.code(), Some(1));
}

#[tokio::test]
async fn a_killed_plugin_is_gone_from_the_kernel_and_from_the_list() {
    let scratch = Scratch::new("sim").unwrap();
    let socket = scratch.join("nri.sock");
    let runtime = Runtime::start(&socket, Options::default()).await.unwrap();
    let mut plugin = start(&socket, "p", "10", PluginOptions::default());
    runtime.wait_for_plugin("p", LIMIT).await.unwrap();
    plugin.signal(Signal::SIGKILL).unwrap();
    assert!(runtime.wait_for_plugin_gone("p", LIMIT).await);
    assert!(!plugin.wait(LIMIT).await.unwrap().unwrap().success());
}

#[test]
fn command_lines_survive_the_trip() {
    let mut command = Command::new("/run/nri.sock", "dra.net", "10");
    command.options = PluginOptions {
        events: 9,
        in_configure: Behaviour::Exit(2),
        in_synchronize: Behaviour::Hang,
        in_run_pod_sandbox: Behaviour::Delay(Duration::from_millis(30)),
        in_create_container: Behaviour::Refuse("no: never".into()),
        in_validate: Behaviour::Disconnect,
        cdi_devices: vec!["a/b=c".into(), "d/e=f".into()],
        state_change_only: true,
        reconnect: Some(Duration::from_millis(7)),
    };
    let parsed = Command::parse(command.to_args()).unwrap();
    assert_eq!(format!("{parsed:?}"), format!("{command:?}"));
    for wrong in [
        &["/s", "n"][..],
        &["/s", "n", "1", "--colour", "red"],
        &["/s", "n", "1", "--events"],
        &["/s", "n", "1", "--in-validate", "sleep"],
        &["/s", "n", "1", "--reconnect", "soon"],
    ] {
        let args = wrong.iter().map(|word| word.to_string());
        assert!(Command::parse(args).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_scratch_directory_is_private_and_goes_away() {
    let scratch = Scratch::new("sim").unwrap();
    let path = scratch.path().to_path_buf();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    std::fs::write(scratch.directory("run").unwrap().join("file"), "x").unwrap();
    drop(scratch);
    assert!(!path.exists());
}

#[test]
fn a_teller_numbers_steps_and_indents_details() {
    let mut teller = Teller::new(Vec::new());
    teller.step("a pod starts").unwrap();
    teller.detail("one\ntwo").unwrap();
    teller.step("it stops").unwrap();
    assert_eq!(teller.steps(), 2);
    let told = String::from_utf8(teller.into_inner()).unwrap();
    let lines: Vec<_> = told.lines().collect();
    assert!(lines[1].starts_with(" 1. [") && lines[1].ends_with("] a pod starts"));
    assert_eq!(lines[2..4], ["      one", "      two"]);
    assert!(lines[5].starts_with(" 2. ["));
}
