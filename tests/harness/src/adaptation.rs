//! NRI's own runtime side (`pkg/adaptation`), as containerd embeds it, without containers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::containerd::log_file;
use crate::gobin;
use crate::jsonl::JsonProcess;
use crate::plugin::Nri;
use crate::wait::PATIENCE;

/// How to start it.
#[derive(Debug, Clone)]
pub struct AdaptationOptions {
    pub nri: Nri,
    /// Told to plugins.
    pub runtime_version: String,
    pub request_timeout: Duration,
    pub registration_timeout: Duration,
    /// Plugins that the built-in default validator requires; empty: validator off.
    pub default_validator: Vec<String>,
    /// What a connecting plugin is synchronised with.
    pub pods: u32,
    pub containers: u32,
}

impl AdaptationOptions {
    /// As containerd by default, with no pods.
    pub fn new(nri: Nri) -> Self {
        let runtime_version = match nri {
            Nri::V0_12 => "v2.3.4",
            Nri::V0_11 => "v2.2.7",
            Nri::V0_10 => "v2.2.0",
            Nri::V0_8 => "v1.7.30",
        };
        Self {
            nri,
            runtime_version: runtime_version.to_owned(),
            request_timeout: Duration::from_secs(2),
            registration_timeout: Duration::from_secs(5),
            default_validator: vec![],
            pods: 0,
            containers: 0,
        }
    }
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    error: String,
    ns: u64,
    #[serde(default)]
    all_ns: Vec<u64>,
}

/// A request under way.
pub struct Pending(Receiver<Value>);

impl Pending {
    /// Waits; how long the call took, or the plugins' refusal.
    pub fn wait(self) -> Result<Duration> {
        let answer = self
            .0
            .recv_timeout(PATIENCE)
            .map_err(|e| anyhow!("no answer from the adaptation: {e}"))?;
        Ok(Duration::from_nanos(parse(answer)?.ns))
    }
}

fn parse(value: Value) -> Result<Answer> {
    let answer: Answer = serde_json::from_value(value)?;
    if !answer.error.is_empty() {
        bail!("{}", answer.error);
    }
    Ok(answer)
}

/// The process, listening. Killed on drop.
pub struct Adaptation {
    process: JsonProcess,
    socket: PathBuf,
}

impl Adaptation {
    /// Starts it and lets it listen on `socket`; its log goes beside it.
    pub fn start(options: &AdaptationOptions, socket: &Path) -> Result<Self> {
        let program = gobin::need(&format!("{}/adaptation", options.nri.folder()))?;
        let timeout = |d: Duration| format!("{}ms", d.as_millis());
        let process = JsonProcess::start(
            "adaptation",
            Command::new(program)
                .arg("-socket")
                .arg(socket)
                .args(["-version", &options.runtime_version])
                .args(["-request-timeout", &timeout(options.request_timeout)])
                .args([
                    "-registration-timeout",
                    &timeout(options.registration_timeout),
                ])
                .args(["-default-validator", &options.default_validator.join(",")])
                .stderr(log_file(&socket.with_extension("log"))?),
        )?;
        let this = Self {
            process,
            socket: socket.to_owned(),
        };
        this.call(
            json!({"op": "populate", "pods": options.pods, "containers": options.containers}),
        )?;
        this.call(json!({"op": "start"}))?;
        Ok(this)
    }

    fn call(&self, order: Value) -> Result<Answer> {
        parse(self.process.call(order, PATIENCE)?)
    }

    /// Where plugins connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its pid.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// RunPodSandbox of a pod with id, name and uid made from `name`; how long it
    /// took. An error is a plugin's refusal.
    pub fn run_pod(&self, name: &str) -> Result<Duration> {
        self.run_pod_from(pod(name))
    }

    /// RunPodSandbox with NRI's own fields (`id, name, uid, namespace, labels, annotations, …`).
    pub fn run_pod_from(&self, pod: Value) -> Result<Duration> {
        let answer = self.call(json!({"op": "run_pod_sandbox", "pod": pod}))?;
        Ok(Duration::from_nanos(answer.ns))
    }

    /// RunPodSandbox without waiting.
    pub fn run_pod_pending(&self, name: &str) -> Result<Pending> {
        let order = json!({"op": "run_pod_sandbox", "pod": pod(name)});
        Ok(Pending(self.process.send(order)?))
    }

    /// CreateContainer with validation, in a pod run before (or, without it, in an unknown one).
    pub fn create_container(&self, pod_name: &str, name: &str) -> Result<Duration> {
        let answer = self.call(create(pod_name, name))?;
        Ok(Duration::from_nanos(answer.ns))
    }

    /// CreateContainer with NRI's own fields.
    pub fn create_container_from(&self, pod: Value, container: Value) -> Result<Duration> {
        let order = json!({"op": "create_container", "pod": pod, "container": container});
        Ok(Duration::from_nanos(self.call(order)?.ns))
    }

    /// CreateContainer without waiting.
    pub fn create_container_pending(&self, pod_name: &str, name: &str) -> Result<Pending> {
        Ok(Pending(self.process.send(create(pod_name, name))?))
    }

    /// CreateContainer so often, one after the other; every single duration.
    pub fn bench_create_container(&self, pod_name: &str, repeat: u32) -> Result<Vec<Duration>> {
        let mut order = create(pod_name, "bench");
        order["op"] = "bench".into();
        order["repeat"] = repeat.into();
        let answer = parse(self.process.call(order, Duration::from_secs(300))?)?;
        Ok(answer
            .all_ns
            .into_iter()
            .map(Duration::from_nanos)
            .collect())
    }

    /// RemovePodSandbox.
    pub fn remove_pod(&self, name: &str) -> Result<()> {
        self.call(json!({"op": "remove_pod_sandbox", "pod": {"id": pod_id(name)}}))
            .map(drop)
    }

    /// StopContainer.
    pub fn stop_container(&self, pod_name: &str, name: &str) -> Result<()> {
        let mut order = create(pod_name, name);
        order["op"] = "stop_container".into();
        self.call(order).map(drop)
    }

    /// Holds back the synchronisation of connecting plugins, as a StopContainer does.
    pub fn block_plugin_sync(&self) -> Result<()> {
        self.call(json!({"op": "block_plugin_sync"})).map(drop)
    }

    /// Ends [`Self::block_plugin_sync`].
    pub fn unblock_plugin_sync(&self) -> Result<()> {
        self.call(json!({"op": "unblock_plugin_sync"})).map(drop)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}

/// The sandbox id of [`Adaptation::run_pod`].
pub fn pod_id(name: &str) -> String {
    format!("pod-{name}")
}

/// The container id of [`Adaptation::create_container`].
pub fn container_id(pod_name: &str, name: &str) -> String {
    format!("ctr-{pod_name}-{name}")
}

fn pod(name: &str) -> Value {
    json!({"id": pod_id(name), "name": name, "uid": format!("uid-{name}"), "namespace": "default"})
}

fn create(pod_name: &str, name: &str) -> Value {
    json!({"op": "create_container", "pod": pod(pod_name),
        "container": {"id": container_id(pod_name, name), "name": name}})
}
