//! A node of a test: the daemon, a simulated runtime, plugins in pods, and its reboots.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nri_lease_sim::plugin;
use nri_lease_sim::story::{CommandLine, Process, Scratch};
use nri_lease_sim::{
    ContainerId, ContainerSpec, Options, PodId, PodSpec, RequestError, Runtime, World,
};
use serde_json::Value;

use super::cgroup::Cgroups;

/// Longer than anything takes on a busy machine: a test that needs it has failed.
pub const LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);
const PLUGIN_VARIABLE: &str = "NRI_LEASE_TEST_PLUGIN";

/// Short TTLs, and a grace that tests can wait for.
pub const QUICK: &str = "[leases]\nmin_ttl = '1s'\nreboot_grace = '1m'\n";

pub const POD_A: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a01";
pub const POD_B: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a02";
pub const POD_C: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a03";

/// What [`Node::plugin_command`] starts, when this program is started as a plugin.
pub async fn be_a_plugin_if_asked() {
    if let Ok(arguments) = std::env::var(PLUGIN_VARIABLE) {
        let arguments = arguments.split('\n').map(str::to_owned);
        let command = plugin::Command::parse(arguments).expect("written by a test");
        command.run().await;
    }
}

/// Dropping it ends everything.
pub struct Node {
    runtime: Option<Runtime>,
    daemon: Option<Process>,
    boot: u32,
    /// Seconds that CLOCK_BOOTTIME is ahead in the daemon's time namespace.
    boottime_ahead: i64,
    pub cgroups: Cgroups,
    // Last: processes end before their directory goes.
    scratch: Scratch,
}

impl Node {
    /// A runtime without pods, and the daemon connected to it.
    pub async fn start(config: &str) -> Self {
        let mut node = Self::prepared(config);
        node.start_runtime(World::default()).await;
        node.start_daemon().await;
        node
    }

    /// Nothing is started.
    pub fn prepared(config: &str) -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "these tests make cgroups and mounts: run them as root"
        );
        let scratch = Scratch::new("nlw").expect("a scratch directory");
        fs::write(scratch.join("config.toml"), config).expect("written");
        // Plugins of other users reach the registry socket through it.
        fs::set_permissions(scratch.path(), Permissions::from_mode(0o755)).expect("changed");
        let name = scratch.path().file_name().and_then(|name| name.to_str());
        Self {
            runtime: None,
            daemon: None,
            boot: 1,
            boottime_ahead: 0,
            cgroups: Cgroups::new(name.expect("an ASCII name")),
            scratch,
        }
    }

    pub fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the runtime is started")
    }

    pub async fn start_runtime(&mut self, world: World) {
        let socket = self.nri_socket();
        let runtime = Runtime::start_with(&socket, Options::default(), world).await;
        self.runtime = Some(runtime.expect("the simulated runtime starts"));
    }

    /// Its pods outlive it; no hook tells of what becomes of them.
    pub async fn stop_runtime(&mut self) -> World {
        self.runtime.take().expect("it is started").stop().await
    }

    /// Starts the daemon in the current boot, and waits until it is synchronised.
    pub async fn start_daemon(&mut self) {
        self.spawn_daemon();
        self.wait_connected().await;
    }

    pub fn spawn_daemon(&mut self) {
        let boot_id = self.scratch.join("boot_id");
        let id = format!("00000000-0000-4000-8000-{:012}\n", self.boot);
        fs::write(&boot_id, id).expect("written");
        // The daemon reads its boot id where the kernel shows it: another one is mounted over it,
        // in a mount namespace of its own.
        let mut command = CommandLine::new("unshare").args(["--mount", "--propagation", "private"]);
        if self.boottime_ahead != 0 {
            command = command
                .arg("--time")
                .arg("--boottime")
                .arg(self.boottime_ahead.to_string());
        }
        let mount = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
        let command = command
            .args(["sh", "-c", mount])
            .arg(boot_id)
            .arg(env!("CARGO_BIN_EXE_nri-leased"))
            .arg("--config")
            .arg(self.scratch.join("config.toml"))
            .arg("--state-dir")
            .arg(self.state_dir())
            .arg("--run-dir")
            .arg(self.scratch.join("run"))
            .arg("--nri-socket")
            .arg(self.nri_socket());
        self.daemon = Some(command.start().expect("the daemon starts"));
    }

    /// Until it has told what it was synchronised with: sandboxes are compared by then.
    pub async fn wait_connected(&mut self) {
        let daemon = self.daemon.as_ref().expect("it is started");
        let ready =
            daemon.wait_for_line(LIMIT, |line| line.contains("synchronised with the runtime"));
        let line = ready.await;
        assert!(line.is_some(), "not connected: {:#?}", self.log());
        let status = |node: &Self| node.try_json(&["status"]);
        until("the daemon to be connected", || {
            status(self).is_some_and(|status| status["runtimes"][0]["connected"] == true)
        });
    }

    pub fn log(&self) -> Vec<String> {
        self.daemon
            .as_ref()
            .map(Process::output)
            .unwrap_or_default()
    }

    /// SIGKILL.
    pub fn kill_daemon(&mut self) {
        self.daemon
            .take()
            .expect("it is started")
            .kill()
            .expect("killed");
    }

    /// SIGTERM: what was to be written soon is written.
    pub async fn stop_daemon(&mut self) {
        let mut daemon = self.daemon.take().expect("it is started");
        let status = daemon.terminate(LIMIT).await.expect("ended");
        assert!(status.success(), "{:#?}", daemon.output());
    }

    pub async fn restart_daemon(&mut self) {
        self.kill_daemon();
        self.start_daemon().await;
    }

    pub fn signal_daemon(&mut self, signal: Signal) {
        let daemon = self.daemon.as_mut().expect("it is started");
        daemon.signal(signal).expect("sent");
    }

    /// The node loses power and comes up again: all sandboxes are gone, the boot id is another,
    /// CLOCK_BOOTTIME begins somewhere else, and so do the runtime and the daemon. Plugins are not
    /// running unless the caller's still are.
    pub async fn reboot(&mut self) {
        self.power_off().await;
        self.start_runtime(World::default()).await;
        self.start_daemon().await;
    }

    pub async fn power_off(&mut self) {
        if self.daemon.is_some() {
            self.kill_daemon();
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.crash().await;
        }
        self.boot += 1;
    }

    /// In later boots the daemon's CLOCK_BOOTTIME is so far ahead of this machine's.
    pub fn set_boottime_ahead(&mut self, seconds: i64) {
        self.boottime_ahead = seconds;
    }

    pub fn configure(&self, config: &str) {
        fs::write(self.scratch.join("config.toml"), config).expect("written");
    }

    pub fn nri_socket(&self) -> PathBuf {
        self.scratch.join("nri.sock")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.scratch.join("state")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// A file for `--scope`, `--file`.
    pub fn file(&self, name: &str, text: &str) -> String {
        let path = self.scratch.join(name);
        fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    /// `nri-lease ARGS`.
    pub fn cli(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nri-lease"));
        command.arg("--run-dir").arg(self.scratch.join("run"));
        command.args(args).stdin(Stdio::null());
        command.output().expect("nri-lease starts")
    }

    /// A command that must succeed; what it printed.
    pub fn done(&self, args: &[&str]) -> String {
        let output = self.cli(args);
        assert!(
            output.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// A command that must fail; its exit code and what it said.
    pub fn failed(&self, args: &[&str]) -> (i32, String) {
        let output = self.cli(args);
        assert!(!output.status.success(), "{args:?} succeeded");
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        (output.status.code().expect("an exit code"), said)
    }

    pub fn json(&self, args: &[&str]) -> Value {
        let printed = self.done(&[&["-o", "json"], args].concat());
        serde_json::from_str(&printed).expect("JSON")
    }

    fn try_json(&self, args: &[&str]) -> Option<Value> {
        let output = self.cli(&[&["-o", "json"], args].concat());
        serde_json::from_slice(&output.stdout).ok()
    }

    /// A command that goes on until it is told to stop (`register`).
    pub fn cli_process(&self, args: &[&str]) -> Process {
        CommandLine::new(env!("CARGO_BIN_EXE_nri-lease"))
            .arg("--run-dir")
            .arg(self.scratch.join("run"))
            .args(args)
            .start()
            .expect("nri-lease starts")
    }

    /// `register` once, by root for another process.
    pub fn register(&self, plugin: &str, pid: u32, ttl: &str) {
        self.register_with(plugin, pid, ttl, &[]);
    }

    pub fn register_with(&self, plugin: &str, pid: u32, ttl: &str, more: &[&str]) {
        let pid = pid.to_string();
        let args = ["register", plugin, "--ttl", ttl, "--pid", &pid, "--once"];
        self.done(&[&args, more].concat());
    }

    pub fn lease(&self, plugin: &str) -> Option<Value> {
        let list = self.json(&["list"]);
        let leases = list["leases"].as_array().expect("leases");
        leases
            .iter()
            .find(|lease| lease["plugin"] == plugin)
            .cloned()
    }

    pub fn seconds_left(&self, plugin: &str) -> Option<f64> {
        self.lease(plugin)?["expires_in_seconds"].as_f64()
    }

    pub fn wait_state(&self, plugin: &str, state: &str) {
        let mut last = None;
        let arrived = holds_within(LIMIT, || {
            last = self.lease(plugin);
            last.as_ref().is_some_and(|lease| lease["state"] == state)
        });
        assert!(
            arrived,
            "{plugin} is not {state}: {last:?}\n{:#?}",
            self.log()
        );
    }

    /// The command line of a plugin's process in the pod's cgroup; `None`: on the host.
    pub fn plugin_command(&self, name: &str, pod_uid: Option<&str>) -> CommandLine {
        let command = plugin::Command::new(self.nri_socket(), name, "10");
        let arguments = command.to_args().join("\n");
        let program = std::env::current_exe().expect("this test program");
        self.in_pod(
            pod_uid,
            [program.into(), "--exact".into(), "plugin_process".into()],
        )
        .env(PLUGIN_VARIABLE, arguments)
    }

    /// Any command, in the pod's cgroup from its first moment on.
    pub fn in_pod(
        &self,
        pod_uid: Option<&str>,
        command: impl IntoIterator<Item = OsString>,
    ) -> CommandLine {
        let cgroup = match pod_uid {
            Some(uid) => self.cgroups.of_pod(uid),
            None => "/dev/null".into(),
        };
        CommandLine::new("sh")
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(cgroup)
            .args(command)
    }

    /// A plugin's process that is registered with the runtime, and with us by nobody yet.
    pub async fn plugin(&self, name: &str, pod_uid: Option<&str>) -> Process {
        let process = self.plugin_command(name, pod_uid).start().expect("starts");
        let listed = process.wait_for_line(LIMIT, |line| line.starts_with("synchronized"));
        assert!(listed.await.is_some(), "{:?}", process.output());
        process
    }

    /// A plugin that is there and required, in its pod.
    pub async fn required_plugin(&self, name: &str, pod_uid: Option<&str>, ttl: &str) -> Process {
        let process = self.plugin(name, pod_uid).await;
        self.register(name, process.pid(), ttl);
        self.wait_state(name, "present");
        process
    }

    /// A sandbox and a container in it; both must start.
    pub async fn starts(&self, pod: PodSpec) -> PodId {
        let sandbox = self.runtime().run_pod_sandbox(pod.clone()).await;
        let sandbox = sandbox.unwrap_or_else(|refused| {
            panic!(
                "{}/{}: {refused}\n{:#?}",
                pod.namespace,
                pod.name,
                self.log()
            )
        });
        self.container_starts(&sandbox, ContainerSpec::new("app"))
            .await;
        sandbox
    }

    pub async fn container_starts(&self, pod: &PodId, container: ContainerSpec) -> ContainerId {
        let created = self.runtime().create_container(pod, container).await;
        created.unwrap_or_else(|refused| panic!("{refused}"))
    }

    /// The sandbox must be refused; the refusal as the runtime tells it.
    pub async fn refused(&self, pod: PodSpec) -> String {
        let name = pod.name.clone();
        match self.runtime().run_pod_sandbox(pod).await {
            Ok(_) => panic!("{name} started; log: {:#?}", self.log()),
            Err(refused) => refused.to_string(),
        }
    }

    pub async fn container_refused(&self, pod: &PodId, container: ContainerSpec) -> String {
        match self.runtime().create_container(pod, container).await {
            Err(RequestError::Rejected(refused)) => refused.to_string(),
            other => panic!("not refused: {other:?}"),
        }
    }
}

pub fn workload(name: &str) -> PodSpec {
    PodSpec::new("default", name)
}

/// Waits for a condition, with a deadline: the only way tests here wait.
pub fn until(what: &str, condition: impl FnMut() -> bool) {
    assert!(holds_within(LIMIT, condition), "waited in vain for {what}");
}

fn holds_within(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let give_up = Instant::now() + limit;
    while !condition() {
        if Instant::now() > give_up {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// The refusal must have every part.
pub fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// Whether a process with this pid is there.
pub fn lives(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}
