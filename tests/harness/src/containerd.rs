//! A real containerd, with CRI and NRI, in a scratch directory.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::Signal;

use crate::cri::Cri;
use crate::gobin;
use crate::process;
use crate::runner::evidence;
use crate::scratch::Scratch;
use crate::wait::{PATIENCE, wait_for, wait_until};

/// The containerds that `tests/go` builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// 2.3.4 with NRI 0.12.
    V2_3,
    /// 2.2.7 with NRI 0.11.
    V2_2,
    /// 1.7.30 with NRI 0.8: no validation.
    V1_7,
}

impl Version {
    /// All of them, newest first.
    pub const ALL: [Self; 3] = [Self::V2_3, Self::V2_2, Self::V1_7];

    /// The folder in `target/go-bin`.
    pub fn folder(self) -> &'static str {
        match self {
            Self::V2_3 => "containerd-2.3",
            Self::V2_2 => "containerd-2.2",
            Self::V1_7 => "containerd-1.7",
        }
    }

    /// Name and version as NRI's Configure tells them to plugins.
    pub fn told(self) -> &'static str {
        match self {
            Self::V2_3 => "containerd v2.3.4",
            Self::V2_2 => "containerd v2.2.7",
            Self::V1_7 => "containerd v1.7.30",
        }
    }

    /// True where NRI validates container adjustments (≥ 0.10).
    pub fn validates(self) -> bool {
        self != Self::V1_7
    }
}

/// What differs between tests.
#[derive(Debug, Clone)]
pub struct Options {
    /// NRI's plugin_request_timeout.
    pub request_timeout: Duration,
    /// NRI's plugin_registration_timeout.
    pub registration_timeout: Duration,
    /// Plugins that the built-in default validator requires; `None`: validator off.
    pub default_validator: Option<Vec<String>>,
    /// The default validator's `tolerate_missing_plugins_annotation`.
    pub tolerate_annotation: Option<String>,
    /// `debug` shows every NRI call in the log.
    pub log_level: &'static str,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(2),
            registration_timeout: Duration::from_secs(5),
            default_validator: None,
            tolerate_annotation: None,
            log_level: "info",
        }
    }
}

/// A running (or stopped) containerd. Ended and cleaned up on drop; the end of
/// its log is printed when the test fails.
pub struct Containerd {
    child: Option<Child>,
    cri: Cri,
    version: Version,
    /// How long the last start took until CRI answered.
    pub started_in: Duration,
    // Last: processes end before their directory goes.
    scratch: Scratch,
}

impl Containerd {
    /// Starts it, waits until CRI answers and imports the images.
    ///
    /// # Errors
    /// [`crate::runner::Skip`] where root, runc or the built programs are missing.
    pub fn start(version: Version, options: &Options) -> Result<Self> {
        gobin::need_root()?;
        let runc = gobin::need_tool("runc")?;
        let images = gobin::need("images.tar")?;
        gobin::need(&format!("{}/containerd", version.folder()))?;
        let scratch = Scratch::new()?;
        let config = config(version, options, scratch.path(), &runc);
        std::fs::write(scratch.join("config.toml"), config)?;
        let cri = Cri::start(
            &scratch.join("c.sock"),
            &scratch.cgroup_parent(),
            &scratch.join("cri.log"),
        )?;
        let mut this = Self {
            child: None,
            cri,
            version,
            started_in: Duration::ZERO,
            scratch,
        };
        this.launch()?;
        this.import(&images)?;
        Ok(this)
    }

    /// Starts the process again after [`Self::kill`] or [`Self::stop`] and waits for CRI.
    pub fn launch(&mut self) -> Result<()> {
        let began = self.spawn()?;
        self.wait_ready()?;
        self.started_in = began.elapsed();
        Ok(())
    }

    /// Starts the process without waiting for anything.
    pub fn spawn(&mut self) -> Result<Instant> {
        let folder = gobin::need(self.version.folder())?;
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())?;
        let path = std::env::var("PATH").unwrap_or_default();
        let began = Instant::now();
        let child = Command::new(folder.join("containerd"))
            .arg("--config")
            .arg(self.scratch.join("config.toml"))
            // The shim is found on PATH.
            .env("PATH", format!("{}:{path}:/usr/sbin", folder.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting containerd")?;
        self.child = Some(child);
        Ok(began)
    }

    /// Waits until CRI answers; when it did, in CLOCK_BOOTTIME nanoseconds (as
    /// the times in a plugin's record).
    pub fn wait_ready(&mut self) -> Result<u64> {
        let child = self.child.as_mut().context("containerd is not started")?;
        let cri = &self.cri;
        wait_for("CRI to answer", PATIENCE, || match child.try_wait() {
            Ok(Some(status)) => Some(Err(anyhow!("containerd ended with {status}"))),
            _ => cri.wait_ready(Duration::from_millis(500)).ok().map(Ok),
        })?
    }

    fn import(&self, images: &Path) -> Result<()> {
        let output = Command::new(gobin::need(&format!("{}/ctr", self.version.folder()))?)
            .arg("-a")
            .arg(self.scratch.join("c.sock"))
            .args(["-n", "k8s.io", "images", "import"])
            .arg(images)
            .output()?;
        if !output.status.success() {
            bail!(
                "importing images: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    /// SIGKILL. Pods keep running under their shims.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            process::kill_and_reap(&mut child);
        }
    }

    /// SIGTERM, and waits for the end. Pods keep running under their shims.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        process::signal(process::pid_of(&child), Signal::SIGTERM);
        let ended = wait_until("containerd to stop", PATIENCE, || {
            !matches!(child.try_wait(), Ok(None))
        });
        process::kill_and_reap(&mut child);
        ended
    }

    /// [`Self::stop`] and [`Self::launch`].
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.launch()
    }

    /// The kubelet's view.
    pub fn cri(&self) -> &Cri {
        &self.cri
    }

    /// Its pid; `None` while it is not running.
    pub fn pid(&self) -> Option<i32> {
        self.child.as_ref().map(process::pid_of)
    }

    /// Which one it is.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Where plugins connect.
    pub fn nri_socket(&self) -> PathBuf {
        self.scratch.join("nri.sock")
    }

    /// The scratch directory; gone after drop.
    pub fn dir(&self) -> &Path {
        self.scratch.path()
    }

    /// The pre-installed plugins' directory (empty).
    pub fn plugin_dir(&self) -> PathBuf {
        self.scratch.join("plugins")
    }

    /// stderr of all its starts.
    pub fn log_path(&self) -> PathBuf {
        self.scratch.join("containerd.log")
    }

    /// The log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Stops and removes all pods with their containers.
    pub fn remove_all(&self) -> Result<()> {
        for pod in self.cri.pods()? {
            self.cri.stop_pod(&pod.id)?;
            self.cri.remove_pod(&pod.id)?;
        }
        Ok(())
    }

    /// Ends everything and says what could not be cleaned up (empty: nothing).
    pub fn clean_up(self) -> Vec<String> {
        let dir = self.dir().to_owned();
        drop(self);
        crate::scratch::leftovers_of(&dir)
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        evidence("containerd", &self.log());
        // Shims and containers are ended by the scratch directory: quicker and
        // surer than asking a containerd that may be the thing that is broken.
        self.kill();
    }
}

/// The configuration. Every path is inside `dir`; `restrict_oom_score_adj`
/// because a build machine has no CAP_SYS_RESOURCE.
fn config(version: Version, options: &Options, dir: &Path, runc: &Path) -> String {
    let dir = dir.display();
    let runc = runc.display();
    let old = version == Version::V1_7;
    let mut toml = format!(
        "version = {}\nroot = '{dir}/r'\nstate = '{dir}/s'\ntemp = '{dir}/t'\n\
         [grpc]\naddress = '{dir}/c.sock'\n\
         [ttrpc]\naddress = '{dir}/c.sock.ttrpc'\n\
         [debug]\nlevel = '{}'\n",
        if old { 2 } else { 3 },
        options.log_level
    );
    let runtime = if old {
        "io.containerd.grpc.v1.cri"
    } else {
        "io.containerd.cri.v1.runtime"
    };
    let mut put = |line: String| {
        toml.push_str(&line);
        toml.push('\n');
    };
    if !old {
        put(
            "[plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = 'localhost/pause:1'"
                .into(),
        );
    }
    put(format!(
        "[plugins.'{runtime}']\nrestrict_oom_score_adj = true\ndisable_apparmor = true"
    ));
    if old {
        put("sandbox_image = 'localhost/pause:1'\nenable_selinux = false".into());
    }
    put(format!(
        "[plugins.'{runtime}'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'"
    ));
    put(format!(
        "[plugins.'{runtime}'.containerd.runtimes.runc.options]\nBinaryName = '{runc}'\nRoot = '{dir}/runc'\nSystemdCgroup = false"
    ));
    put(format!(
        "[plugins.'{runtime}'.cni]\nbin_dir = '{dir}/cni/bin'\nconf_dir = '{dir}/cni/conf'"
    ));
    if version == Version::V2_3 {
        put(format!(
            "[plugins.'io.containerd.shim.v1.manager']\nsocket_dir = '{dir}/h'"
        ));
    }
    put(format!(
        "[plugins.'io.containerd.internal.v1.opt']\npath = '{dir}/opt'"
    ));
    put(format!(
        "[plugins.'io.containerd.nri.v1.nri']\ndisable = false\nsocket_path = '{dir}/nri.sock'\n\
         plugin_path = '{dir}/plugins'\nplugin_config_path = '{dir}/plugins.d'\n\
         plugin_request_timeout = '{}ms'\nplugin_registration_timeout = '{}ms'",
        options.request_timeout.as_millis(),
        options.registration_timeout.as_millis(),
    ));
    if version.validates()
        && let Some(required) = &options.default_validator
    {
        let _ = writeln!(
            toml,
            "[plugins.'io.containerd.nri.v1.nri'.default_validator]\nenable = true\nrequired_plugins = {required:?}"
        );
        if let Some(key) = &options.tolerate_annotation {
            let _ = writeln!(toml, "tolerate_missing_plugins_annotation = '{key}'");
        }
    }
    toml
}

/// An empty file as stderr of helpers, so that their noise is kept with the test.
pub(crate) fn log_file(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("opening {}", path.display()))
}
