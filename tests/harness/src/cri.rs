//! The container runtime interface, as the kubelet uses it, through the Go driver `cridrv`.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::gobin;
use crate::jsonl::JsonProcess;

/// Longer than the driver's own deadline of 30 s for a request.
const ANSWER_WITHIN: Duration = Duration::from_secs(40);

/// A refusal or failure as CRI reports it.
#[derive(Debug, Clone)]
pub struct Status {
    /// gRPC code by name: `Unknown`, `NotFound`, …
    pub code: String,
    /// What the kubelet would show.
    pub message: String,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Status {}

/// A pod to run. It uses the host's network, so it needs no CNI.
#[derive(Debug, Clone, Serialize)]
pub struct Pod {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub attempt: u32,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub runtime_handler: String,
}

impl Pod {
    /// A pod of the namespace `default` with a uid made from its name.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            uid: format!("uid-{name}"),
            attempt: 0,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            runtime_handler: String::new(),
        }
    }

    /// Sets the namespace.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = namespace.to_owned();
        self
    }

    /// Sets the uid.
    pub fn uid(mut self, uid: &str) -> Self {
        self.uid = uid.to_owned();
        self
    }

    /// Adds a label.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Adds an annotation.
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }
}

/// A sandbox or container in a listing.
#[derive(Debug, Clone, Deserialize)]
pub struct Item {
    pub id: String,
    pub name: String,
    #[serde(default)]
    pub namespace: String,
    #[serde(default)]
    pub uid: String,
    /// Of a container: its sandbox.
    #[serde(default)]
    pub pod: String,
    /// CRI's name: `SANDBOX_READY`, `CONTAINER_RUNNING`, …
    pub state: String,
}

/// A request under way.
pub struct Pending(Receiver<Value>);

impl Pending {
    /// Waits for the answer: the value (an id, or empty) and how long CRI took.
    pub fn wait(self) -> Result<(String, Duration)> {
        let answer = self
            .0
            .recv_timeout(ANSWER_WITHIN)
            .map_err(|e| anyhow!("no answer from the CRI driver: {e}"))?;
        Answer::parse(answer).map(|a| (a.value, Duration::from_nanos(a.ns)))
    }
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    code: String,
    #[serde(default)]
    error: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    items: Vec<Item>,
    ns: u64,
    #[serde(default)]
    boottime_ns: u64,
}

impl Answer {
    fn parse(value: Value) -> Result<Self> {
        let answer: Self = serde_json::from_value(value)?;
        if answer.code.is_empty() {
            return Ok(answer);
        }
        Err(Status {
            code: answer.code,
            message: answer.error,
        }
        .into())
    }
}

/// A CRI client. Survives restarts of the runtime; requests may run concurrently.
pub struct Cri {
    driver: JsonProcess,
    cgroup_parent: String,
}

impl Cri {
    /// Starts the driver; `log` takes its stderr.
    pub fn start(socket: &Path, cgroup_parent: &str, log: &Path) -> Result<Self> {
        let driver = JsonProcess::start(
            "cridrv",
            Command::new(gobin::need("cridrv")?)
                .arg("-socket")
                .arg(socket)
                .stderr(File::create(log)?),
        )?;
        Ok(Self {
            driver,
            cgroup_parent: cgroup_parent.to_owned(),
        })
    }

    fn call(&self, order: Value) -> Result<Answer> {
        let op = order["op"].as_str().unwrap_or_default().to_owned();
        Answer::parse(self.driver.call(order, ANSWER_WITHIN)?).context(op)
    }

    /// Runtime name and version; fails within `timeout` when it does not answer.
    pub fn version(&self, timeout: Duration) -> Result<String> {
        let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        Ok(self.call(json!({"op": "version", "timeout_ms": ms}))?.value)
    }

    /// Waits until the runtime answers; when it did, in CLOCK_BOOTTIME
    /// nanoseconds, with a resolution of a few milliseconds.
    pub fn wait_ready(&self, timeout: Duration) -> Result<u64> {
        let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        Ok(self
            .call(json!({"op": "wait_ready", "timeout_ms": ms}))?
            .boottime_ns)
    }

    fn run_pod_order(&self, pod: &Pod) -> Result<Value> {
        let mut order = serde_json::to_value(pod)?;
        order["op"] = "run_pod".into();
        order["cgroup_parent"] = self.cgroup_parent.clone().into();
        Ok(order)
    }

    /// RunPodSandbox; the sandbox id. A refusal is a [`Status`] (downcast to it).
    pub fn run_pod(&self, pod: &Pod) -> Result<String> {
        Ok(self.call(self.run_pod_order(pod)?)?.value)
    }

    /// RunPodSandbox without waiting.
    pub fn run_pod_pending(&self, pod: &Pod) -> Result<Pending> {
        Ok(Pending(self.driver.send(self.run_pod_order(pod)?)?))
    }

    /// CreateContainer of a busybox that sleeps; the container id.
    pub fn create_container(&self, sandbox: &str, name: &str) -> Result<String> {
        self.create_container_with(sandbox, name, 0, &["/bin/sleep", "2147483647"])
    }

    /// CreateContainer with a command and an attempt (the kubelet counts them up).
    pub fn create_container_with(
        &self,
        sandbox: &str,
        name: &str,
        attempt: u32,
        command: &[&str],
    ) -> Result<String> {
        let order = create_order(sandbox, name, attempt, command);
        Ok(self.call(order)?.value)
    }

    /// CreateContainer without waiting.
    pub fn create_container_pending(&self, sandbox: &str, name: &str) -> Result<Pending> {
        let order = create_order(sandbox, name, 0, &["/bin/sleep", "2147483647"]);
        Ok(Pending(self.driver.send(order)?))
    }

    /// StartContainer.
    pub fn start_container(&self, container: &str) -> Result<()> {
        self.call(json!({"op": "start_container", "container": container}))
            .map(drop)
    }

    /// StopContainer: SIGTERM, and SIGKILL after `grace_seconds`. The default
    /// command of our image is process 1 and ignores SIGTERM.
    pub fn stop_container(&self, container: &str, grace_seconds: u32) -> Result<()> {
        self.call(stop_order(container, grace_seconds)).map(drop)
    }

    /// StopContainer without waiting.
    pub fn stop_container_pending(&self, container: &str, grace_seconds: u32) -> Result<Pending> {
        Ok(Pending(
            self.driver.send(stop_order(container, grace_seconds))?,
        ))
    }

    /// RemoveContainer.
    pub fn remove_container(&self, container: &str) -> Result<()> {
        self.call(json!({"op": "remove_container", "container": container}))
            .map(drop)
    }

    /// StopPodSandbox.
    pub fn stop_pod(&self, sandbox: &str) -> Result<()> {
        self.call(json!({"op": "stop_pod", "pod": sandbox}))
            .map(drop)
    }

    /// RemovePodSandbox.
    pub fn remove_pod(&self, sandbox: &str) -> Result<()> {
        self.call(json!({"op": "remove_pod", "pod": sandbox}))
            .map(drop)
    }

    /// All sandboxes.
    pub fn pods(&self) -> Result<Vec<Item>> {
        Ok(self.call(json!({"op": "list_pods"}))?.items)
    }

    /// All containers.
    pub fn containers(&self) -> Result<Vec<Item>> {
        Ok(self.call(json!({"op": "list_containers"}))?.items)
    }
}

fn create_order(sandbox: &str, name: &str, attempt: u32, command: &[&str]) -> Value {
    json!({"op": "create_container", "pod": sandbox, "name": name, "attempt": attempt,
        "image": "localhost/busybox:1", "command": command})
}

fn stop_order(container: &str, grace_seconds: u32) -> Value {
    json!({"op": "stop_container", "container": container, "grace_s": grace_seconds})
}
