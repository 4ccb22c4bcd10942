//! The node under test: a containerd, a plugin with the supervisor that a real one has in its
//! DaemonSet, and, where it is part of the variant, the daemon.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nri_lease_harness::containerd::{Containerd, Options, Version};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::plugin::{Nri, Plugin, PluginOptions};
use nri_lease_harness::process;
use nri_lease_harness::wait::{PATIENCE, wait_for, wait_until};
use nri_lease_harness::{Context, Result};

use super::PLUGIN;
use super::journal::{SECOND, Time, now};
use super::shared::{Shared, Variant};

/// Long enough to outlast every fault but the one that is about it.
const TTL: &str = "60s";
const INDEX: &str = "10";

pub struct Node {
    daemon: Option<Daemon>,
    plugin: Option<Plugin>,
    /// Keeps the current plugin process's lease alive, as the plugin itself would.
    registrar: Option<Child>,
    pub shared: Arc<Shared>,
    // Last: its directory, with everybody's logs, goes with it.
    pub containerd: Containerd,
}

impl Node {
    pub fn containerd(variant: Variant, version: Version) -> Result<Containerd> {
        let required = |name: &str| Some(vec![name.to_owned()]);
        let options = Options {
            default_validator: match variant {
                Variant::Lease | Variant::LeaseReject => required("nri-lease"),
                Variant::ValidatorOnly => required(PLUGIN),
                Variant::Nothing => None,
            },
            ..Options::default()
        };
        Containerd::start(version, &options)
    }

    /// A healthy node: everything runs, the plugin is registered and present.
    pub fn start(containerd: Containerd, shared: Arc<Shared>) -> Result<Self> {
        let daemon = match shared.variant.config() {
            None => None,
            Some(config) => {
                let dir = Shared::daemon_dir(containerd.dir());
                Some(Daemon::start(&dir, &containerd.nri_socket(), config)?)
            }
        };
        let mut node = Self {
            containerd,
            daemon,
            plugin: None,
            registrar: None,
            shared,
        };
        node.start_plugin(false)?;
        node.register()?;
        node.wait_recovered()?;
        node.shared.ledger.lease_lives_from(now());
        Ok(node)
    }

    pub fn has_daemon(&self) -> bool {
        self.daemon.is_some()
    }

    pub fn daemon(&mut self) -> Result<&mut Daemon> {
        self.daemon.as_mut().context("a variant with the daemon")
    }

    pub fn plugin(&mut self) -> Result<&mut Plugin> {
        self.plugin.as_mut().context("the plugin is away")
    }

    fn new_plugin(&self, isolated: bool) -> Result<Plugin> {
        let options = PluginOptions {
            nri: match self.containerd.version() {
                Version::V2_3 => Nri::V0_12,
                Version::V2_2 => Nri::V0_11,
                Version::V1_7 => Nri::V0_8,
            },
            index: INDEX.to_owned(),
            isolated,
            ..PluginOptions::named(PLUGIN)
        };
        let plugin = Plugin::start(
            &options,
            &self.containerd.nri_socket(),
            self.containerd.dir(),
        )?;
        let place = if isolated {
            " in its own namespaces"
        } else {
            ""
        };
        self.shared
            .say(format!("plugin pid {} started{place}", plugin.pid()));
        Ok(plugin)
    }

    /// A new process in place of one that is gone. It connects by itself.
    pub fn start_plugin(&mut self, isolated: bool) -> Result<()> {
        self.plugin = Some(self.new_plugin(isolated)?);
        Ok(())
    }

    /// SIGKILL.
    pub fn kill_plugin(&mut self) -> Result<()> {
        self.plugin()?.kill();
        self.stop_registrar();
        Ok(())
    }

    /// The supervisor has seen the process end.
    pub fn reap_plugin(&mut self) -> Result<()> {
        self.plugin()?.wait_ended()?;
        self.kill_plugin()
    }

    /// `nri-lease register`, which then renews; until it is acknowledged.
    pub fn register(&mut self) -> Result<()> {
        if self.daemon.is_none() {
            return Ok(());
        }
        self.stop_registrar();
        let pid = self.plugin()?.pid();
        self.registrar = Some(self.registrar_for(pid)?);
        self.shared.say(format!("registered pid {pid}"));
        Ok(())
    }

    fn registrar_for(&mut self, pid: i32) -> Result<Child> {
        let pid = pid.to_string();
        wait_for("a registration", PATIENCE, || {
            let args = [
                "register", PLUGIN, "--ttl", TTL, "--index", INDEX, "--pid", &pid,
            ];
            let mut command = self.daemon.as_ref()?.cli_command(&args).ok()?;
            command.stdout(Stdio::piped()).stderr(Stdio::null());
            let mut child = command.spawn().ok()?;
            let mut line = String::new();
            let read = BufReader::new(child.stdout.take()?).read_line(&mut line);
            if read.is_ok() && line.starts_with("registered") {
                return Some(child);
            }
            process::kill_and_reap(&mut child);
            None
        })
    }

    fn stop_registrar(&mut self) {
        if let Some(mut registrar) = self.registrar.take() {
            process::kill_and_reap(&mut registrar);
        }
    }

    /// Registers once more, with a TTL that will run out, and nobody renews. When it will at the
    /// earliest.
    pub fn let_lease_run_out(&mut self, ttl: &str) -> Result<Time> {
        self.stop_registrar();
        let pid = self.plugin()?.pid().to_string();
        let args = [
            "register", PLUGIN, "--ttl", ttl, "--index", INDEX, "--pid", &pid, "--once",
        ];
        self.daemon()?.cli(&args)?.ok()?;
        let asked = now();
        let lease = self.lease()?.context("the lease")?;
        let left = lease["expires_in_seconds"].as_f64().context("seconds")?;
        Ok(asked + (left * SECOND as f64) as Time)
    }

    /// The lease as `list` shows it.
    pub fn lease(&self) -> Result<Option<serde_json::Value>> {
        let daemon = self.daemon.as_ref().context("a daemon")?;
        let list = daemon.cli(&["-o", "json", "list"])?.ok()?.json()?;
        let leases = list["leases"].as_array().context("leases")?;
        Ok(leases.iter().find(|l| l["plugin"] == PLUGIN).cloned())
    }

    /// A second instance beside the first; then the first goes, with or without a release.
    pub fn upgrade(&mut self, isolated: bool, releases: bool) -> Result<()> {
        let new = self.new_plugin(isolated)?;
        new.wait_synchronized()?;
        if self.daemon.is_some() {
            let registrar = self.registrar_for(new.pid())?;
            self.wait_holder(new.pid())?;
            // The old instance's own renewals end with its release.
            self.stop_registrar();
            self.registrar = Some(registrar);
            if releases {
                let old = self.plugin()?.pid().to_string();
                let args = ["release", PLUGIN, "--pid", &old];
                self.daemon()?.cli(&args)?.ok()?;
            }
        }
        self.shared.say(format!("pid {} takes over", new.pid()));
        let mut old = std::mem::replace(self.plugin()?, new);
        process::signal(old.pid(), nix::sys::signal::Signal::SIGTERM);
        // The first process of a pid namespace does not have to heed SIGTERM.
        if wait_until("the old plugin to end", Duration::from_millis(300), || {
            !old.is_running()
        })
        .is_err()
        {
            old.kill();
        }
        Ok(())
    }

    fn wait_holder(&self, pid: i32) -> Result<()> {
        wait_until("the new holder to be connected", PATIENCE, || {
            self.lease().ok().flatten().is_some_and(|lease| {
                lease["holders"].as_array().is_some_and(|holders| {
                    holders
                        .iter()
                        .any(|h| h["pid"] == pid && h["connected"] == true)
                })
            })
        })
    }

    /// Plugin synchronised, runtime connected, lease present: a request from now on must pass.
    pub fn wait_recovered(&mut self) -> Result<()> {
        self.plugin()?.wait_synchronized()?;
        let Some(daemon) = self.daemon.as_mut() else {
            return Ok(());
        };
        daemon.wait_connected()?;
        let mut last = None;
        wait_until("the lease to be present", PATIENCE, || {
            last = self.lease().ok().flatten();
            last.as_ref()
                .is_some_and(|lease| lease["state"] == "present")
        })
        .with_context(|| format!("last: {last:?}"))
    }

    /// What was there at the end; empty when nothing is wrong.
    pub fn unknown_sandboxes(&self) -> Result<Vec<String>> {
        let pods = self.containerd.cri().pods()?;
        Ok(pods
            .into_iter()
            .filter(|pod| pod.state == "SANDBOX_READY" && !self.shared.knows(&pod.id))
            .map(|pod| format!("{} {}", pod.name, pod.id))
            .collect())
    }

    /// Where a runtime that hangs does so, in its log.
    pub fn dump_containerd(&self) {
        if let Some(pid) = self.containerd.pid() {
            process::signal(pid, nix::sys::signal::Signal::SIGUSR1);
        }
        let log = self.shared.dir.join("containerd.log");
        // The end of a dump is no other line than its own.
        let _ = wait_until("the dump", Duration::from_secs(5), || {
            std::fs::read_to_string(&log).is_ok_and(|log| log.contains("END goroutine stack dump"))
        });
    }

    /// How the runtime is restarted.
    pub fn end_containerd(&mut self, kill: bool) -> Result<()> {
        if kill {
            self.containerd.kill();
            return Ok(());
        }
        self.containerd.stop()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop_registrar();
    }
}
