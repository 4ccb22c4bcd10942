//! What the demo needs to act: a scratch directory, the simulated runtime in this process, the
//! daemon and the plugin as children. Knows how to start and end them, not what they show.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nri_lease_proto::lease::registry::RegisterRequest;
use nri_lease_sim::story::{CommandLine, Process, Scratch};
use nri_lease_sim::{ContainerSpec, Options, PodId, PodSpec, Runtime, plugin};

use super::super::client::Daemon;
use super::super::error::{CliError, Complaint};
use super::super::view::lease::LeaseView;
use super::super::view::values;
use super::super::{list, process, renewal};

pub const PLUGIN: &str = "demo";
const INDEX: &str = "10";
/// For everything that takes milliseconds on an idle machine.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
/// Lines of a child's output in an error.
const EVIDENCE_LINES: usize = 8;

/// Dropped from top to bottom: processes before the directory they write to.
pub struct Stage {
    plugin: Option<Process>,
    daemon: Option<Process>,
    runtime: Runtime,
    nri_socket: PathBuf,
    /// `nri-leased` and this program.
    programs: (PathBuf, PathBuf),
    client: Daemon,
    scratch: Scratch,
}

/// A registration, and between which moments its lease ends: the daemon counts from some moment
/// between the call and its answer.
pub struct Registered {
    pub ends_from: Instant,
    pub ends_until: Instant,
}

pub fn failed(attempt: impl Into<String>, problem: impl Into<String>) -> CliError {
    CliError::Failed(Complaint::new(attempt, problem, ""))
}

impl Stage {
    /// Makes the directory and starts the runtime.
    pub async fn set() -> Result<Self, CliError> {
        let prepare = |error: std::io::Error| failed("prepare the demo", error.to_string());
        let this = std::env::current_exe().map_err(prepare)?;
        let leased = this.with_file_name("nri-leased");
        if !leased.is_file() {
            return Err(CliError::Failed(Complaint::new(
                "find the daemon",
                format!("there is no {}", leased.display()),
                "Install nri-leased beside nri-lease, or build both: cargo build --bins",
            )));
        }
        let scratch = Scratch::new("nri-lease-demo").map_err(prepare)?;
        let nri_socket = scratch.join("nri.sock");
        let runtime = Runtime::start(&nri_socket, Options::default())
            .await
            .map_err(prepare)?;
        // Who starts the demo may register its plugin, and with a TTL that is short to wait for.
        let config = format!(
            "[leases]\nmin_ttl = \"1s\"\n[[registrar]]\nplugin = \"{PLUGIN}\"\nuids = [{}]\n",
            nix::unistd::geteuid()
        );
        std::fs::write(scratch.join("config.toml"), config).map_err(prepare)?;
        Ok(Self {
            plugin: None,
            daemon: None,
            runtime,
            nri_socket,
            programs: (leased, this),
            client: Daemon {
                run_dir: scratch.join("run"),
                timeout: PATIENCE,
            },
            scratch,
        })
    }

    pub fn directory(&self) -> String {
        self.scratch.path().display().to_string()
    }

    /// Starts the daemon and waits until the runtime lists it and it answers.
    pub async fn start_daemon(&mut self) -> Result<u32, CliError> {
        let attempt = "start nri-leased";
        let child = CommandLine::new(&self.programs.0)
            .arg("--config")
            .arg(self.scratch.join("config.toml"))
            .arg("--state-dir")
            .arg(self.scratch.join("state"))
            .arg("--run-dir")
            .arg(&self.client.run_dir)
            .arg("--nri-socket")
            .arg(&self.nri_socket)
            .own_group()
            .start()
            .map_err(|error| failed(attempt, error.to_string()))?;
        let pid = child.pid();
        let child = self.daemon.insert(child);
        let listed = tokio::select! {
            listed = self.runtime.wait_for_plugin("nri-lease", PATIENCE) => listed.is_some(),
            _ = child.wait(PATIENCE) => false,
        };
        if !listed {
            // Its last words may still be on their way.
            child.wait_for_line(POLL * 100, |_| true).await;
            return Err(failed(attempt, "it does not connect to the runtime"));
        }
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.leases().await {
            if Instant::now() >= deadline {
                return Err(error);
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(pid)
    }

    /// SIGKILL; returns when the runtime has noticed.
    pub async fn kill_daemon(&mut self) -> Result<(), CliError> {
        kill(&mut self.daemon, "nri-leased")?;
        match self
            .runtime
            .wait_for_plugin_gone("nri-lease", PATIENCE)
            .await
        {
            true => Ok(()),
            false => Err(failed("kill nri-leased", "the runtime still lists it")),
        }
    }

    /// Starts the plugin and waits until the runtime lists it.
    pub async fn start_plugin(&mut self) -> Result<u32, CliError> {
        let attempt = "start the plugin";
        let child = CommandLine::new(&self.programs.1)
            .arg("sim-plugin")
            .args(plugin::Command::new(&self.nri_socket, PLUGIN, INDEX).to_args())
            .own_group()
            .start()
            .map_err(|error| failed(attempt, error.to_string()))?;
        let pid = child.pid();
        self.plugin = Some(child);
        let listed = self.runtime.wait_for_plugin(PLUGIN, PATIENCE).await;
        listed.ok_or_else(|| failed(attempt, "it does not connect to the runtime"))?;
        Ok(pid)
    }

    /// SIGKILL; returns at once, whether the runtime has noticed or not.
    pub async fn kill_plugin(&mut self) -> Result<(), CliError> {
        kill(&mut self.plugin, "the plugin")
    }

    /// Registers the plugin's process, as its parent may.
    pub async fn register(&self, pid: u32, ttl: Duration) -> Result<Registered, CliError> {
        let pid = i32::try_from(pid).map_err(|error| failed("register", error.to_string()))?;
        let request = RegisterRequest {
            plugin: PLUGIN.to_owned(),
            ttl: values::to_proto(ttl),
            index: INDEX.to_owned(),
            subject: process::subject(pid),
            ..Default::default()
        };
        let registry = self.client.registry().await?;
        let called = Instant::now();
        renewal::register(&self.client, &registry, &request).await?;
        Ok(Registered {
            ends_from: called + ttl,
            ends_until: Instant::now() + ttl,
        })
    }

    pub async fn leases(&self) -> Result<Vec<LeaseView>, CliError> {
        list::leases(&self.client).await
    }

    /// The leases, as soon as the plugin's is in this state.
    pub async fn wait_state(&self, state: &str) -> Result<Vec<LeaseView>, CliError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let leases = self.leases().await?;
            match leases.iter().find(|lease| lease.plugin == PLUGIN) {
                Some(lease) if lease.state == state => return Ok(leases),
                _ if Instant::now() < deadline => tokio::time::sleep(POLL).await,
                other => {
                    let found = other.map_or("no lease", |lease| lease.state.as_str());
                    return Err(failed(
                        format!("see the plugin {state}"),
                        format!("it is {found}"),
                    ));
                }
            }
        }
    }

    /// As the kubelet asks for; the error is what the runtime answers.
    pub async fn run_pod(&self, name: &str) -> Result<PodId, String> {
        let ran = self
            .runtime
            .run_pod_sandbox(PodSpec::new("default", name))
            .await;
        ran.map_err(|rejected| rejected.to_string())
    }

    pub async fn create_container(&self, pod: &PodId, name: &str) -> Result<(), String> {
        let created = self.runtime.create_container(pod, ContainerSpec::new(name));
        created.await.map(drop).map_err(|error| error.to_string())
    }

    /// Ends the processes in order and removes the directory.
    pub async fn clear(mut self) -> Result<(), CliError> {
        let end = |error: std::io::Error| failed("clear the stage", error.to_string());
        for mut child in [self.plugin.take(), self.daemon.take()]
            .into_iter()
            .flatten()
        {
            let status = child.terminate(PATIENCE).await.map_err(end)?;
            if !status.success() {
                return Err(failed("stop a process with SIGTERM", status.to_string()));
            }
        }
        self.runtime.stop().await;
        std::fs::remove_dir_all(self.scratch.path()).map_err(end)
    }

    /// The complaint with the last words of the children.
    pub fn with_evidence(&self, mut complaint: Complaint) -> Complaint {
        for (name, child) in [("nri-leased", &self.daemon), ("plugin", &self.plugin)] {
            let output = child.as_ref().map(Process::output).unwrap_or_default();
            for line in output.iter().rev().take(EVIDENCE_LINES).rev() {
                complaint.remedy.push_str(&format!("\n  {name}: {line}"));
            }
        }
        complaint.remedy = complaint.remedy.trim().to_owned();
        complaint
    }
}

fn kill(child: &mut Option<Process>, name: &str) -> Result<(), CliError> {
    match child.take() {
        Some(mut child) => child
            .kill()
            .map(drop)
            .map_err(|error| failed(format!("kill {name}"), error.to_string())),
        None => Err(failed(format!("kill {name}"), "it is not running")),
    }
}
