//! A node for whole-program tests: the real daemon in a scratch directory, clients of both its
//! sockets, and what the kernel says of the process. The runtime is played by `nri_lease_sim`.

// Every test program uses a part of it.
#![allow(dead_code)]

use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nri_lease_proto::lease::admin::{GetStatusRequest, GetStatusResponse, ListLeasesRequest};
use nri_lease_proto::lease::admin_ttrpc::AdminClient;
use nri_lease_proto::lease::registry::RegisterRequest;
use nri_lease_proto::lease::registry_ttrpc::RegistryClient;
use nri_lease_proto::lease::types::{Lease, Subject};
use nri_lease_proto::protobuf::MessageField;
use nri_lease_proto::protobuf::well_known_types::duration::Duration as PbDuration;
use nri_lease_proto::ttrpc;
use nri_lease_sim::Runtime;
use nri_lease_sim::plugin::Command;
use nri_lease_sim::story::{CommandLine, Process, Scratch};
use tokio::net::UnixStream;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::Context;

/// Longer than anything takes on a busy machine: a test that needs it has failed.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Leases that may be short, so that tests see them end.
pub const SHORT_TTLS: &str = "[leases]\nmin_ttl = \"100ms\"\n";

pub struct Node {
    pub dir: Scratch,
    pub daemon: Process,
    /// A process that lives and is connected to no runtime: a plugin that is missing.
    pub idle: Process,
    /// NRI sockets it was told of.
    pub nri_sockets: Vec<PathBuf>,
    state_dir: PathBuf,
}

impl Node {
    /// Starts the daemon with `config` and waits until both sockets answer. Its runtime would be
    /// at `nri.sock`.
    pub async fn start(config: &str) -> Node {
        Node::start_with(config, &["nri.sock"], &[]).await
    }

    /// The same with these NRI sockets in the scratch directory, and started by `wrapper`, which
    /// must become the daemon by exec.
    pub async fn start_with(config: &str, nri_sockets: &[&str], wrapper: &[&str]) -> Node {
        let dir = Scratch::new("nlt").expect("a scratch directory");
        let state_dir = dir.join("state");
        Node::start_in(dir, state_dir, config, nri_sockets, wrapper).await
    }

    pub async fn start_in(
        dir: Scratch,
        state_dir: PathBuf,
        config: &str,
        nri_sockets: &[&str],
        wrapper: &[&str],
    ) -> Node {
        // Sockets have their own modes; other users must be able to get there.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(dir.path(), open).expect("ours");
        std::fs::write(dir.join("config.toml"), config).expect("ours");
        let nri_sockets: Vec<PathBuf> = nri_sockets.iter().map(|name| dir.join(name)).collect();
        let daemon = spawn(&dir, &state_dir, &nri_sockets, wrapper);
        let mut node = Node {
            dir,
            daemon,
            idle: idle_process(),
            nri_sockets,
            state_dir,
        };
        node.wait_serving().await;
        node
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.daemon.kill().expect("it is ours");
    }

    /// Starts the daemon again, on the same directories, after it has ended.
    pub async fn start_again(&mut self) {
        self.daemon = spawn(&self.dir, &self.state_dir, &self.nri_sockets, &[]);
        self.wait_serving().await;
    }

    async fn wait_serving(&mut self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let connected = (
                UnixStream::connect(self.registry_socket()).await,
                UnixStream::connect(self.admin_socket()).await,
            );
            if let (Ok(_), Ok(_)) = connected {
                return;
            }
            let ended = self.daemon.wait(Duration::ZERO).await.expect("ours");
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "the daemon does not serve ({ended:?}): {:#?}",
                self.daemon.output()
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    pub fn registry_socket(&self) -> PathBuf {
        self.run_dir().join("registry.sock")
    }

    pub fn admin_socket(&self) -> PathBuf {
        self.run_dir().join("admin.sock")
    }

    pub fn nri_socket(&self) -> PathBuf {
        self.nri_sockets[0].clone()
    }

    pub fn write_config(&self, config: &str) {
        std::fs::write(self.dir.join("config.toml"), config).expect("ours");
    }

    /// A client whose peer is this very process.
    pub async fn registry(&self) -> RegistryClient {
        let stream = UnixStream::connect(self.registry_socket()).await;
        RegistryClient::new(ttrpc::asynchronous::Client::new(Socket::from(
            stream.expect("the daemon serves plugins"),
        )))
    }

    pub async fn admin(&self) -> AdminClient {
        let stream = UnixStream::connect(self.admin_socket()).await;
        AdminClient::new(ttrpc::asynchronous::Client::new(Socket::from(
            stream.expect("the daemon serves admins"),
        )))
    }

    /// Registers a plugin that is missing; the daemon is serving and well if that works.
    pub async fn registers(&self, plugin: &str) -> Lease {
        self.registers_for(plugin, self.idle.pid()).await
    }

    /// The same with this process as its holder. Not with our own: the runtime is in it, too,
    /// and what connects a process with itself is no plugin's connection.
    pub async fn registers_for(&self, plugin: &str, pid: u32) -> Lease {
        let answer = self.registry().await;
        let mut request = registration(plugin, 60);
        request.subject = subject(pid);
        let answer = answer.register(limit(), &request).await;
        let answer = answer.unwrap_or_else(|error| panic!("registering {plugin}: {error}"));
        answer.lease.into_option().expect("always there")
    }

    /// A plugin process that is connected to `runtime` and registered here: present.
    pub async fn plugin(&self, runtime: &Runtime, plugin: Command) -> Process {
        let program = std::env::current_exe().expect("this test program");
        let process = CommandLine::new(program)
            .args(["--exact", "node::plugin_process", "--nocapture"])
            .env(PLUGIN, plugin.to_args().join("\n"))
            .start()
            .expect("the plugin runs");
        let listed = runtime.wait_for_plugin(&plugin.name, LIMIT).await;
        assert!(listed.is_some(), "{:#?}", process.output());
        self.registers_for(&plugin.name, process.pid()).await;
        process
    }

    pub async fn leases(&self) -> Vec<Lease> {
        let admin = self.admin().await;
        let answer = admin.list_leases(limit(), &ListLeasesRequest::new()).await;
        answer.expect("listed").leases
    }

    pub async fn lease_names(&self) -> Vec<String> {
        let leases = self.leases().await.into_iter();
        leases.map(|lease| lease.plugin).collect()
    }

    pub async fn status(&self) -> GetStatusResponse {
        let admin = self.admin().await;
        let answer = admin.get_status(limit(), &GetStatusRequest::new()).await;
        answer.expect("a status")
    }

    /// Waits until the daemon is synchronised with all its runtimes.
    pub async fn connected(&self) {
        until("the daemon to be connected", async || {
            let status = self.status().await;
            status.runtimes.iter().all(|runtime| runtime.connected)
        })
        .await;
    }

    /// `nri-lease ARGS`, started by `wrapper` if there is one.
    pub fn cli(&self, wrapper: &[&str], args: &[&str]) -> Output {
        let run_dir = self.run_dir();
        let mut line: Vec<&str> = wrapper.to_vec();
        let run_dir = run_dir.to_str().expect("plain");
        line.extend([env!("CARGO_BIN_EXE_nri-lease"), "--run-dir", run_dir]);
        line.extend(args);
        let mut command = std::process::Command::new(line[0]);
        command.args(&line[1..]).output().expect("nri-lease runs")
    }

    /// `nri-lease ARGS` that goes on running.
    pub fn cli_started(&self, args: &[&str]) -> Process {
        let command = CommandLine::new(env!("CARGO_BIN_EXE_nri-lease"))
            .arg("--run-dir")
            .arg(self.run_dir())
            .args(args.iter().copied());
        command.start().expect("nri-lease runs")
    }

    pub fn hang_up(&mut self) {
        self.daemon.signal(Signal::SIGHUP).expect("it is ours");
    }

    pub async fn logs(&self, text: &str) -> String {
        let line = self.daemon.wait_for_line(LIMIT, |line| line.contains(text));
        match line.await {
            Some(line) => line,
            None => panic!("no {text:?} in {:#?}", self.daemon.output()),
        }
    }

    /// Lines of the log with this text.
    pub fn logged(&self, text: &str) -> usize {
        let lines = self.daemon.output();
        lines.iter().filter(|line| line.contains(text)).count()
    }

    /// Resident memory now, in KiB.
    pub fn rss_kib(&self) -> u64 {
        self.memory_kib("VmRSS:")
    }

    /// The most there ever was, in KiB.
    pub fn peak_rss_kib(&self) -> u64 {
        self.memory_kib("VmHWM:")
    }

    /// Of [`Node::rss_kib`], what is not backed by a file: without the program itself.
    pub fn anonymous_kib(&self) -> u64 {
        self.memory_kib("RssAnon:")
    }

    fn memory_kib(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.daemon.pid());
        let status = std::fs::read_to_string(path).expect("the daemon runs");
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.expect("a figure in KiB")
    }

    /// Ticks of 10 ms that all its threads have used.
    fn cpu_ticks(&self) -> u64 {
        let path = format!("/proc/{}/stat", self.daemon.pid());
        let stat = std::fs::read_to_string(path).expect("the daemon runs");
        let (_, fields) = stat.rsplit_once(')').expect("proc(5)");
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let ticks = |field: usize| fields[field].parse::<u64>().expect("a number");
        ticks(11) + ticks(12)
    }

    /// Waits for half a second in which the daemon used less than a tenth of a processor.
    pub async fn becomes_idle(&self) {
        const WINDOW: Duration = Duration::from_millis(500);
        until("the daemon to be idle", async || {
            let before = self.cpu_ticks();
            tokio::time::sleep(WINDOW).await;
            self.cpu_ticks() - before <= 5
        })
        .await;
    }
}

/// The arguments of the plugin that this test program is to be.
const PLUGIN: &str = "NRI_LEASE_TEST_PLUGIN";

/// The plugin of [`Node::plugin`]. Does nothing in an ordinary test run.
#[tokio::test]
async fn plugin_process() {
    if let Ok(args) = std::env::var(PLUGIN) {
        let plugin = Command::parse(args.lines().map(str::to_owned));
        plugin.expect("written by us").run().await;
    }
}

pub fn idle_process() -> Process {
    let sleep = CommandLine::new("sleep").arg("600");
    sleep.start().expect("sleep runs")
}

fn spawn(
    dir: &Scratch,
    state_dir: &std::path::Path,
    nri_sockets: &[PathBuf],
    wrapper: &[&str],
) -> Process {
    // Another build of it, for figures.
    let program = match std::env::var("NRI_LEASE_BIN") {
        Ok(dir) => format!("{dir}/nri-leased"),
        Err(_) => env!("CARGO_BIN_EXE_nri-leased").to_owned(),
    };
    let mut command = match wrapper {
        [] => CommandLine::new(&program),
        [first, rest @ ..] => CommandLine::new(first)
            .args(rest.iter().copied())
            .arg(program),
    };
    command = command
        .arg("--config")
        .arg(dir.join("config.toml"))
        .arg("--state-dir")
        .arg(state_dir)
        .arg("--run-dir")
        .arg(dir.join("run"));
    for socket in nri_sockets {
        command = command.arg("--nri-socket").arg(socket);
    }
    command.start().expect("nri-leased runs")
}

/// A call's limit.
pub fn limit() -> Context {
    ttrpc::context::with_duration(LIMIT)
}

pub fn registration(plugin: &str, ttl_seconds: i64) -> RegisterRequest {
    RegisterRequest {
        plugin: plugin.to_owned(),
        ttl: seconds(ttl_seconds),
        ..Default::default()
    }
}

pub fn seconds(seconds: i64) -> MessageField<PbDuration> {
    millis(seconds * 1000)
}

pub fn millis(millis: i64) -> MessageField<PbDuration> {
    MessageField::some(PbDuration {
        seconds: millis / 1000,
        nanos: i32::try_from(millis % 1000).expect("below 1000") * 1_000_000,
        ..Default::default()
    })
}

pub fn subject(pid: u32) -> MessageField<Subject> {
    MessageField::some(Subject {
        pid,
        ..Default::default()
    })
}

/// The code and text that a call was refused with.
pub fn refusal<T: std::fmt::Debug>(answer: ttrpc::Result<T>) -> (ttrpc::Code, String) {
    match answer {
        Err(ttrpc::Error::RpcStatus(status)) => (status.code(), status.message),
        other => panic!("not refused: {other:?}"),
    }
}

/// Waits for a condition, with a deadline.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition().await {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
