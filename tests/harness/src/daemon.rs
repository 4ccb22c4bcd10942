//! Our own binaries, as a user runs them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::containerd::log_file;
use crate::process;
use crate::runner::{Skip, evidence};
use crate::wait::{PATIENCE, wait_until};

/// Finds one of our binaries: beside the test program's own directory
/// (`target/PROFILE/deps/..`), or in `NRI_LEASE_BIN`.
pub fn binary(name: &str) -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let built = exe
        .ancestors()
        .skip(1)
        .take(3)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file());
    std::env::var_os("NRI_LEASE_BIN")
        .map(|dir| Path::new(&dir).join(name))
        .or(built)
        .ok_or_else(|| Skip::new(format!("{name} is not built (cargo build)")).into())
}

/// What a command of ours answered.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit code; -1 when it was ended by a signal.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// stdout as JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout).with_context(|| format!("not JSON: {self:?}"))
    }

    /// Fails unless the exit code is 0.
    pub fn ok(self) -> Result<Self> {
        if self.code != 0 {
            bail!("exit code {}: {}{}", self.code, self.stderr, self.stdout);
        }
        Ok(self)
    }
}

/// The daemon, with its state and run directories below one directory. Killed on drop.
pub struct Daemon {
    child: Option<Child>,
    dir: PathBuf,
    nri_sockets: Vec<PathBuf>,
    /// How long the last start took until the daemon was connected to a runtime.
    pub connected_in: Duration,
}

impl Daemon {
    /// Starts `nri-leased` with `dir/state`, `dir/run`, and `config` as its
    /// configuration file, and waits until it is connected.
    pub fn start(dir: &Path, nri_socket: &Path, config: &str) -> Result<Self> {
        let mut daemon = Self::prepare(dir, nri_socket, config)?;
        daemon.launch()?;
        Ok(daemon)
    }

    /// Writes the configuration without starting anything.
    pub fn prepare(dir: &Path, nri_socket: &Path, config: &str) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        std::fs::write(dir.join("config.toml"), config)?;
        Ok(Self {
            child: None,
            dir: dir.to_owned(),
            nri_sockets: vec![nri_socket.to_owned()],
            connected_in: Duration::ZERO,
        })
    }

    /// Starts the process without waiting for anything.
    pub fn spawn(&mut self) -> Result<Instant> {
        let log = log_file(&self.log_path())?;
        self.spawn_with_stderr(log.into())
    }

    /// [`Self::spawn`] with its log elsewhere.
    pub fn spawn_with_stderr(&mut self, stderr: Stdio) -> Result<Instant> {
        let mut command = Command::new(binary("nri-leased")?);
        command
            .arg("--config")
            .arg(self.dir.join("config.toml"))
            .arg("--state-dir")
            .arg(self.state_dir())
            .arg("--run-dir")
            .arg(self.run_dir())
            .stdin(Stdio::null())
            .stdout(log_file(&self.log_path())?)
            .stderr(stderr);
        for socket in &self.nri_sockets {
            command.arg("--nri-socket").arg(socket);
        }
        let began = Instant::now();
        self.child = Some(command.spawn().context("starting nri-leased")?);
        Ok(began)
    }

    /// [`Self::spawn`], and waits until it is connected to a runtime.
    pub fn launch(&mut self) -> Result<()> {
        let began = self.spawn()?;
        self.wait_connected()?;
        self.connected_in = began.elapsed();
        Ok(())
    }

    /// Waits until `status` says that every runtime is connected.
    pub fn wait_connected(&mut self) -> Result<()> {
        let mut last = String::new();
        let mut ended = false;
        let waited = wait_until("the daemon to be connected", PATIENCE, || {
            ended = self
                .child
                .as_mut()
                .is_none_or(|c| !matches!(c.try_wait(), Ok(None)));
            if ended {
                return true;
            }
            match self.cli(&["-o", "json", "status"]) {
                Ok(output) => {
                    last = format!("{}{}", output.stdout, output.stderr);
                    output.code == 0 && output.json().is_ok_and(|status| is_connected(&status))
                }
                Err(e) => {
                    last = e.to_string();
                    false
                }
            }
        });
        if ended {
            bail!("nri-leased ended:\n{}", self.log());
        }
        waited.with_context(|| format!("last status: {last}\nlog:\n{}", self.log()))
    }

    /// Runs `nri-lease ARGS` against this daemon.
    pub fn cli<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<Output> {
        let output = self.cli_command(args)?.output().context("nri-lease")?;
        Ok(Output {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// The command of [`Self::cli`], to be started by the caller (`watch`, `register`).
    pub fn cli_command<S: AsRef<OsStr>>(&self, args: &[S]) -> Result<Command> {
        let mut command = Command::new(binary("nri-lease")?);
        command.arg("--run-dir").arg(self.run_dir()).args(args);
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// SIGKILL, and reaped.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            process::kill_and_reap(&mut child);
        }
    }

    /// SIGTERM, and waits for the end.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        process::signal(process::pid_of(&child), Signal::SIGTERM);
        let ended = wait_until("nri-leased to stop", PATIENCE, || {
            !matches!(child.try_wait(), Ok(None))
        });
        process::kill_and_reap(&mut child);
        ended
    }

    /// Any signal (SIGHUP, SIGSTOP, …).
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            process::signal(pid, signal);
        }
    }

    /// Its pid; `None` while it is not running.
    pub fn pid(&self) -> Option<i32> {
        self.child.as_ref().map(process::pid_of)
    }

    /// Where `registry.sock` and `admin.sock` are.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// Where the leases are stored.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    fn log_path(&self) -> PathBuf {
        self.dir.join("nri-leased.log")
    }

    /// stdout and stderr of all its starts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }
}

/// Every entry of `status`' `runtimes` has `connected: true`, and there is one.
fn is_connected(status: &Value) -> bool {
    status["runtimes"].as_array().is_some_and(|runtimes| {
        !runtimes.is_empty() && runtimes.iter().all(|r| r["connected"] == Value::Bool(true))
    })
}

impl Drop for Daemon {
    fn drop(&mut self) {
        evidence("nri-leased", &self.log());
        self.kill();
    }
}
