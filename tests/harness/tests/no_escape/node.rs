//! A node of one of the three containerds: runtime, daemon, and what a test asks them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nri_lease_harness::containerd::{Containerd, Options, Version};
use nri_lease_harness::cri::{Pod, Status};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::plugin::{Plugin, PluginOptions};
use nri_lease_harness::wait::{PATIENCE, wait_for, wait_until};
use nri_lease_harness::{Context, Result, bail, ensure};
use serde_json::Value;

pub const PLUGIN: &str = "demo";

/// How many attempts a pod gets where the kubelet would go on for ever.
const ATTEMPTS: u32 = 5;

pub struct Node {
    pub containerd: Containerd,
    pub daemon: Daemon,
    attempts: AtomicU32,
}

impl Node {
    pub fn start(version: Version, config: &str) -> Result<Self> {
        Self::start_with(version, &Options::default(), config)
    }

    pub fn start_with(version: Version, options: &Options, config: &str) -> Result<Self> {
        let containerd = Containerd::start(version, options)?;
        let daemon = Daemon::start(
            &containerd.dir().join("d"),
            &containerd.nri_socket(),
            config,
        )?;
        Ok(Self {
            containerd,
            daemon,
            attempts: AtomicU32::new(0),
        })
    }

    /// Whether this containerd cleans up refused sandboxes, so that `auto` refuses them.
    pub fn refuses_sandboxes(&self) -> bool {
        self.containerd.version() != Version::V1_7
    }

    pub fn plugin(&self, options: &PluginOptions) -> Result<Plugin> {
        Plugin::start_synchronized(
            options,
            &self.containerd.nri_socket(),
            self.containerd.dir(),
        )
    }

    /// A plugin that stays away once it has lost its connection, registered for ten minutes.
    pub fn leased_plugin(&self) -> Result<Plugin> {
        let plugin = self.plugin(&once(PLUGIN))?;
        self.register(PLUGIN, plugin.pid(), &[])?;
        Ok(plugin)
    }

    /// Registers a process once and waits until it is present; nobody renews.
    pub fn register(&self, plugin: &str, pid: i32, more: &[&str]) -> Result<()> {
        self.register_only(plugin, pid, more)?;
        self.wait_state(plugin, "present")
    }

    pub fn register_only(&self, plugin: &str, pid: i32, more: &[&str]) -> Result<()> {
        let pid = pid.to_string();
        let mut args = vec!["register", plugin, "--ttl", "10m", "--pid", &pid, "--once"];
        args.extend(more);
        self.daemon.cli(&args)?.ok().map(drop)
    }

    pub fn lease(&self, plugin: &str) -> Result<Option<Value>> {
        let list = self.daemon.cli(&["-o", "json", "list"])?.ok()?.json()?;
        let leases = list["leases"].as_array().context("leases")?;
        Ok(leases.iter().find(|l| l["plugin"] == plugin).cloned())
    }

    pub fn wait_state(&self, plugin: &str, state: &str) -> Result<()> {
        let mut last = None;
        wait_until(&format!("{plugin} to be {state}"), PATIENCE, || {
            last = self.lease(plugin).ok().flatten();
            last.as_ref().is_some_and(|lease| lease["state"] == state)
        })
        .with_context(|| format!("last: {last:?}"))
    }

    /// A pod of this name whose attempt no other test step has used.
    pub fn pod(&self, name: &str) -> Pod {
        let mut pod = Pod::named(name);
        pod.attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        pod
    }

    pub fn sandbox(&self, name: &str) -> Result<String> {
        self.containerd.cri().run_pod(&self.pod(name))
    }

    pub fn container(&self, sandbox: &str, name: &str) -> Result<String> {
        self.containerd.cri().create_container(sandbox, name)
    }

    /// Sandbox and container, admitted at once.
    pub fn pod_starts(&self, name: &str) -> Result<(String, String)> {
        self.pod_starts_in("default", name)
    }

    pub fn pod_starts_in(&self, namespace: &str, name: &str) -> Result<(String, String)> {
        let pod = self.pod(name).namespace(namespace);
        let sandbox = self.containerd.cri().run_pod(&pod)?;
        let container = self.container(&sandbox, "main")?;
        self.containerd.cri().start_container(&container)?;
        Ok((sandbox, container))
    }

    pub fn sandbox_is_refused(&self, name: &str) -> Result<String> {
        refused(self.sandbox(name))
    }

    pub fn container_is_refused(&self, sandbox: &str, name: &str) -> Result<String> {
        refused(self.container(sandbox, name))
    }

    /// The sandbox of a plugin that is away: refused, or, where that would leak, started and
    /// listed, and its container refused. Returns the reason.
    pub fn sandbox_does_not_pass(&self, name: &str) -> Result<String> {
        if self.refuses_sandboxes() {
            return self.sandbox_is_refused(name);
        }
        let sandbox = self.sandbox(name)?;
        let listed = self.wait_audited(name)?;
        self.container_is_refused(&sandbox, "main")?;
        listed["reason"]
            .as_str()
            .map(str::to_owned)
            .context("reason")
    }

    /// The entries of `audit` by pod name.
    pub fn audit(&self) -> Result<BTreeMap<String, Value>> {
        let audit = self.daemon.cli(&["-o", "json", "audit"])?.ok()?.json()?;
        let sandboxes = audit["sandboxes"].as_array().context("sandboxes")?;
        Ok(sandboxes
            .iter()
            .filter_map(|s| Some((s["pod"]["name"].as_str()?.to_owned(), s.clone())))
            .collect())
    }

    /// Marks are made known a moment after the request was answered.
    pub fn wait_audited(&self, name: &str) -> Result<Value> {
        wait_for(&format!("{name} to be in the audit"), PATIENCE, || {
            self.audit().ok()?.remove(name)
        })
    }

    pub fn wait_not_audited(&self, name: &str) -> Result<()> {
        wait_until(&format!("{name} not to be in the audit"), PATIENCE, || {
            self.audit().is_ok_and(|audit| !audit.contains_key(name))
        })
    }

    /// A scope file for one namespace.
    pub fn scope_of(&self, namespace: &str) -> Result<String> {
        let path: PathBuf = self.containerd.dir().join(format!("{namespace}.toml"));
        std::fs::write(
            &path,
            format!("[[rules]]\nnamespaces = [\"{namespace}\"]\n"),
        )?;
        Ok(path.display().to_string())
    }

    pub fn status(&self) -> Result<Value> {
        self.daemon.cli(&["-o", "json", "status"])?.ok()?.json()
    }

    /// As the kubelet does: again until it is admitted. Returns the refusals before that.
    pub fn pod_starts_in_the_end(&self, namespace: &str, name: &str) -> Result<Vec<String>> {
        let mut refusals = vec![];
        for _ in 0..ATTEMPTS {
            match self.pod_starts_in(namespace, name) {
                Ok(_) => return Ok(refusals),
                Err(error) => refusals.push(message(&error)),
            }
        }
        bail!("{name} was refused {ATTEMPTS} times: {refusals:#?}")
    }
}

/// A plugin that does not connect again by itself.
pub fn once(name: &str) -> PluginOptions {
    PluginOptions {
        reconnect: false,
        ..PluginOptions::named(name)
    }
}

pub fn message(error: &nri_lease_harness::Error) -> String {
    error
        .downcast_ref::<Status>()
        .map_or_else(|| format!("{error:#}"), |status| status.message.clone())
}

/// The text of a refusal of ours; anything else fails.
pub fn refused(outcome: Result<String>) -> Result<String> {
    let error = match outcome {
        Ok(id) => bail!("{id} was admitted"),
        Err(error) => error,
    };
    let text = message(&error);
    ensure!(text.contains("required NRI plugin"), "{text}");
    Ok(text)
}

/// A moment that is itself part of what is tested ("one second before", "50 ms later"); nothing is
/// waited for.
pub fn let_pass(time: Duration) {
    std::thread::sleep(time);
}
