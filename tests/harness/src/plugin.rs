//! A real NRI plugin (NRI's own stub, in Go), its faults, and its record of what it processed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::containerd::log_file;
use crate::gobin;
use crate::jsonl::JsonProcess;
use crate::process;
use crate::runner::evidence;
use crate::wait::{PATIENCE, wait_for};

/// The NRI versions that `tests/go` builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nri {
    V0_12,
    V0_11,
    V0_10,
    V0_8,
}

impl Nri {
    /// All of them, newest first.
    pub const ALL: [Self; 4] = [Self::V0_12, Self::V0_11, Self::V0_10, Self::V0_8];

    /// The folder in `target/go-bin`.
    pub fn folder(self) -> &'static str {
        match self {
            Self::V0_12 => "nri-0.12",
            Self::V0_11 => "nri-0.11",
            Self::V0_10 => "nri-0.10",
            Self::V0_8 => "nri-0.8",
        }
    }

    /// True where container adjustments are validated.
    pub fn validates(self) -> bool {
        self != Self::V0_8
    }
}

/// What to start.
#[derive(Debug, Clone)]
pub struct PluginOptions {
    pub nri: Nri,
    pub name: String,
    /// Two digits.
    pub index: String,
    /// NRI event names, comma separated (`run_pod_sandbox`, `create_container`,
    /// `validate_container_adjustment`, …).
    pub events: String,
    /// Connect again, every 20 ms, when the runtime goes away or closes the connection.
    pub reconnect: bool,
    /// A network and a pid namespace of its own, as in a pod.
    pub isolated: bool,
    /// Do not connect before [`Plugin::connect`].
    pub idle: bool,
    /// As a validator, refuse containers unless these plugins are listed.
    pub require: Vec<String>,
    /// A second plugin of this name in the same process, see [`Plugin::second`].
    pub second: Option<String>,
}

impl PluginOptions {
    /// NRI 0.12, index 10, RunPodSandbox and CreateContainer, reconnecting.
    pub fn named(name: &str) -> Self {
        Self {
            nri: Nri::V0_12,
            name: name.to_owned(),
            index: "10".to_owned(),
            events: "run_pod_sandbox,create_container".to_owned(),
            reconnect: true,
            isolated: false,
            idle: false,
            require: vec![],
            second: None,
        }
    }
}

/// What goes wrong in the next event of a kind; used up by it.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Sleeps, then completes as usual (recorded as late when the runtime has given up).
    Sleep(Duration),
    /// exit(1), without completing.
    Exit,
    /// SIGKILL to itself, without completing.
    Kill,
    /// Closes its connection, and opens a new one after so long.
    Disconnect { reconnect_after: Option<Duration> },
    /// Answers with an error.
    Refuse(String),
}

impl Fault {
    fn order(&self, event: &str) -> Value {
        let mut order = json!({"at": event});
        match self {
            Self::Sleep(time) => {
                order["do"] = "sleep".into();
                order["ms"] = millis(*time);
            }
            Self::Exit => order["do"] = "exit".into(),
            Self::Kill => order["do"] = "kill".into(),
            Self::Disconnect { reconnect_after } => {
                order["do"] = "disconnect".into();
                order["reconnect_ms"] = reconnect_after.map_or_else(|| (-1).into(), millis);
            }
            Self::Refuse(text) => {
                order["do"] = "refuse".into();
                order["text"] = text.clone().into();
            }
        }
        order
    }
}

/// One thing the plugin completed. Times are CLOCK_BOOTTIME nanoseconds.
#[derive(Debug, Clone, Deserialize)]
pub struct Entry {
    /// `configure`, `synchronize`, `run_pod_sandbox`, `create_container`, …
    pub event: String,
    pub pid: i32,
    /// Which of its connections, from 1.
    pub connection: u64,
    pub begin_ns: u64,
    pub end_ns: u64,
    /// The answer did not count: the runtime had given up on the call before it
    /// was completed, or the connection was closed.
    #[serde(default)]
    pub late: bool,
    /// It answered with this error.
    #[serde(default)]
    pub error: String,
    /// Sandbox id.
    #[serde(default)]
    pub pod: String,
    #[serde(default)]
    pub pod_uid: String,
    #[serde(default)]
    pub pod_name: String,
    #[serde(default)]
    pub namespace: String,
    /// Container id.
    #[serde(default)]
    pub container: String,
    /// Container name; of `configure`: the runtime's name and version.
    #[serde(default)]
    pub name: String,
    /// Of `synchronize`: sandbox ids.
    #[serde(default)]
    pub pods: Vec<String>,
    /// Of `synchronize`: container ids.
    #[serde(default)]
    pub containers: Vec<String>,
    /// Of `validate_container_adjustment`: the runtime's list.
    #[serde(default)]
    pub plugins: Vec<String>,
}

impl Entry {
    /// True when the plugin did its work in time and without error.
    pub fn done(&self) -> bool {
        !self.late && self.error.is_empty()
    }
}

/// How the plugin sees itself.
#[derive(Debug, Clone, Deserialize)]
pub struct PluginStatus {
    /// Registered and configured, and the connection is open.
    pub connected: bool,
    /// Synchronize was completed on this connection.
    pub synchronized: bool,
    /// Connections opened so far.
    pub connections: u64,
    /// The socket of the current one; 0: none.
    #[serde(default)]
    pub inode: u64,
    /// Of [`Plugin::share`].
    #[serde(default)]
    child: i32,
    /// Name and version that the runtime told.
    pub runtime: String,
    #[serde(default)]
    pub last_error: String,
    #[serde(default)]
    error: String,
}

/// A plugin process. Killed on drop; its record stays.
pub struct Plugin {
    process: JsonProcess,
    pid: i32,
    record: PathBuf,
    second_record: Option<PathBuf>,
}

/// The second plugin of a process that hosts two.
pub struct Second<'a>(&'a Plugin);

impl Second<'_> {
    /// How it sees itself.
    pub fn status(&self) -> Result<PluginStatus> {
        self.0.order(json!({"cmd": "status", "second": true}))
    }

    /// Waits until it has completed Synchronize on its current connection.
    pub fn wait_synchronized(&self) -> Result<PluginStatus> {
        wait_for("the second plugin to be synchronised", PATIENCE, || {
            self.status().ok().filter(|s| s.synchronized)
        })
    }

    /// As [`Plugin::fault`].
    pub fn fault(&self, event: &str, fault: &Fault) -> Result<()> {
        let order = json!({"cmd": "fault", "second": true, "fault": fault.order(event)});
        self.0.order(order).map(drop)
    }

    /// As [`Plugin::connect`].
    pub fn connect(&self) -> Result<()> {
        self.0
            .order(json!({"cmd": "connect", "second": true}))
            .map(drop)
    }

    /// As [`Plugin::disconnect`].
    pub fn disconnect(&self, reconnect_after: Option<Duration>) -> Result<()> {
        let ms: Value = reconnect_after.map_or_else(|| (-1).into(), millis);
        self.0
            .order(json!({"cmd": "disconnect", "second": true, "reconnect_ms": ms}))
            .map(drop)
    }

    /// Everything it completed.
    pub fn record(&self) -> Result<Vec<Entry>> {
        match &self.0.second_record {
            Some(path) => read_record(path),
            None => Ok(vec![]),
        }
    }
}

impl Plugin {
    /// Starts it; `dir` takes its record (`NAME.record`, appended to by later
    /// starts with the same name) and its log. Returns before it is connected.
    pub fn start(options: &PluginOptions, nri_socket: &Path, dir: &Path) -> Result<Self> {
        let program = gobin::need(&format!("{}/plugin", options.nri.folder()))?;
        let record = dir.join(format!("{}.record", options.name));
        let mut command = if options.isolated {
            gobin::need_root()?;
            let mut unshare = Command::new(gobin::need_tool("unshare")?);
            unshare.args(["--net", "--pid", "--fork", "--kill-child", "--"]);
            unshare.arg(program);
            unshare
        } else {
            Command::new(program)
        };
        command
            .args(["-name", &options.name, "-idx", &options.index])
            .args(["-events", &options.events])
            .arg("-socket")
            .arg(nri_socket)
            .arg("-record")
            .arg(&record)
            .stderr(log_file(&dir.join(format!("{}.log", options.name)))?);
        if options.reconnect {
            command.arg("-reconnect");
        }
        if options.idle {
            command.arg("-idle");
        }
        if !options.require.is_empty() {
            command.args(["-require", &options.require.join(",")]);
        }
        let second_record = options
            .second
            .as_ref()
            .map(|name| dir.join(format!("{name}.record")));
        if let (Some(name), Some(record)) = (&options.second, &second_record) {
            command.args(["-second", name]).arg("-second-record");
            command.arg(record);
        }
        let process = JsonProcess::start(&options.name, &mut command)?;
        let pid = if options.isolated {
            process::only_child(process.pid())?
        } else {
            process.pid()
        };
        Ok(Self {
            process,
            pid,
            record,
            second_record,
        })
    }

    /// [`Self::start`], and waits until it is synchronised.
    pub fn start_synchronized(
        options: &PluginOptions,
        nri_socket: &Path,
        dir: &Path,
    ) -> Result<Self> {
        let plugin = Self::start(options, nri_socket, dir)?;
        plugin.wait_synchronized()?;
        Ok(plugin)
    }

    fn order(&self, order: Value) -> Result<PluginStatus> {
        let answer = self.process.call(order, PATIENCE)?;
        let status: PluginStatus = serde_json::from_value(answer)?;
        if !status.error.is_empty() {
            bail!("plugin: {}", status.error);
        }
        Ok(status)
    }

    /// The other plugin of this process.
    pub fn second(&self) -> Second<'_> {
        Second(self)
    }

    /// Starts a child that inherits the connection and does nothing; its pid. The caller ends it.
    pub fn share(&self) -> Result<i32> {
        Ok(self.order(json!({"cmd": "share"}))?.child)
    }

    /// Ends like a plugin that was told to: without an error, and its connection closed.
    pub fn quit(&mut self) -> Result<()> {
        // It ends before it can answer.
        let _ = self.process.send(json!({"cmd": "quit"}))?;
        self.wait_ended()
    }

    /// Its pid in our pid namespace (the host's), also when isolated.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// True until the process has ended.
    pub fn is_running(&self) -> bool {
        process::is_alive(self.pid)
    }

    /// How it sees itself.
    pub fn status(&self) -> Result<PluginStatus> {
        self.order(json!({"cmd": "status"}))
    }

    /// Waits until it has completed Synchronize on its current connection.
    pub fn wait_synchronized(&self) -> Result<PluginStatus> {
        wait_for("the plugin to be synchronised", PATIENCE, || {
            self.status().ok().filter(|s| s.synchronized)
        })
    }

    /// Waits until it has lost its connection.
    pub fn wait_disconnected(&self) -> Result<PluginStatus> {
        wait_for("the plugin to lose its connection", PATIENCE, || {
            self.status().ok().filter(|s| !s.connected)
        })
    }

    /// Waits until the process has ended.
    pub fn wait_ended(&self) -> Result<()> {
        wait_for("the plugin to end", PATIENCE, || {
            (!self.is_running()).then_some(())
        })
    }

    /// Sets what goes wrong in the next `event`.
    pub fn fault(&self, event: &str, fault: &Fault) -> Result<()> {
        self.order(json!({"cmd": "fault", "fault": fault.order(event)}))
            .map(drop)
    }

    /// Forgets faults that have not struck.
    pub fn clear_faults(&self) -> Result<()> {
        self.order(json!({"cmd": "clear"})).map(drop)
    }

    /// Connects, and keeps trying until it is configured.
    pub fn connect(&self) -> Result<()> {
        self.order(json!({"cmd": "connect"})).map(drop)
    }

    /// Closes its connection; opens a new one after so long, or not.
    pub fn disconnect(&self, reconnect_after: Option<Duration>) -> Result<()> {
        let ms: Value = reconnect_after.map_or_else(|| (-1).into(), millis);
        self.order(json!({"cmd": "disconnect", "reconnect_ms": ms}))
            .map(drop)
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        process::signal(self.pid, Signal::SIGKILL);
        self.process.kill();
        // An isolated plugin is a grandchild: it is reaped by its wrapper, or by init.
        let _ = self.wait_ended();
    }

    /// SIGSTOP: it hangs, its connection stays open.
    pub fn freeze(&self) {
        process::signal(self.pid, Signal::SIGSTOP);
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        process::signal(self.pid, Signal::SIGCONT);
    }

    /// Everything completed so far, by all processes that used this record.
    pub fn record(&self) -> Result<Vec<Entry>> {
        read_record(&self.record)
    }

    /// Where the record is.
    pub fn record_path(&self) -> &Path {
        &self.record
    }

    /// True when the plugin processed this sandbox in time.
    pub fn processed_pod(&self, sandbox: &str) -> Result<bool> {
        Ok(self
            .record()?
            .iter()
            .any(|e| e.event == "run_pod_sandbox" && e.pod == sandbox && e.done()))
    }

    /// True when the plugin processed this container in time.
    pub fn processed_container(&self, container: &str) -> Result<bool> {
        Ok(self
            .record()?
            .iter()
            .any(|e| e.event == "create_container" && e.container == container && e.done()))
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let log = std::fs::read_to_string(self.record.with_extension("log"));
        evidence(
            &format!("the plugin at {}", self.record.display()),
            &log.unwrap_or_default(),
        );
        self.kill();
    }
}

/// Reads a record; a last line cut short by a kill is impossible (one write each).
pub fn read_record(path: &Path) -> Result<Vec<Entry>> {
    let text = match std::fs::read_to_string(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        other => other?,
    };
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("record line {line}")))
        .collect()
}

fn millis(time: Duration) -> Value {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).into()
}
