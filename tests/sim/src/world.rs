//! The pods and containers of the simulated node, as NRI sees them. No I/O.

use nri_lease_proto::nri::nri::{self as api};
use nri_lease_proto::protobuf::UnknownValue;
use std::collections::{BTreeMap, HashMap};

/// Id that the runtime gave a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodId(pub String);

/// Id that the runtime gave a container.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerId(pub String);

/// A pod to run.
#[derive(Clone, Debug, Default)]
pub struct PodSpec {
    pub namespace: String,
    pub name: String,
    /// Pod UID; made up from namespace and name when empty.
    pub uid: String,
    pub labels: HashMap<String, String>,
    pub annotations: HashMap<String, String>,
    /// Empty is the default handler.
    pub runtime_handler: String,
    /// Empty: a besteffort cgroup derived from the UID.
    pub cgroup_parent: String,
}

impl PodSpec {
    pub fn new(namespace: &str, name: &str) -> Self {
        PodSpec {
            namespace: namespace.into(),
            name: name.into(),
            ..PodSpec::default()
        }
    }

    pub fn uid(mut self, uid: &str) -> Self {
        self.uid = uid.into();
        self
    }

    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.into(), value.into());
        self
    }

    pub fn runtime_handler(mut self, handler: &str) -> Self {
        self.runtime_handler = handler.into();
        self
    }
}

/// A container to create.
#[derive(Clone, Debug, Default)]
pub struct ContainerSpec {
    pub name: String,
    pub labels: HashMap<String, String>,
    pub annotations: HashMap<String, String>,
    pub cdi_devices: Vec<String>,
    /// Sent as NRI's fields 7 and 8, which the daemon does not read: weight on the wire.
    pub args: Vec<String>,
    pub env: Vec<String>,
}

impl ContainerSpec {
    pub fn new(name: &str) -> Self {
        ContainerSpec {
            name: name.into(),
            ..ContainerSpec::default()
        }
    }

    pub fn cdi_device(mut self, name: &str) -> Self {
        self.cdi_devices.push(name.into());
        self
    }

    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.into(), value.into());
        self
    }
}

/// Where a container is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerState {
    Created,
    Running,
    Stopped,
}

#[derive(Clone, Debug)]
pub(crate) struct Container {
    pub api: api::Container,
    pub state: ContainerState,
}

#[derive(Clone, Debug)]
pub(crate) struct Pod {
    pub api: api::PodSandbox,
    /// A stopped sandbox is still there, and still synchronised, until it is removed.
    pub ready: bool,
}

/// Pods and containers that exist: what outlives a restart of the runtime.
#[derive(Clone, Debug, Default)]
pub struct World {
    pub(crate) pods: BTreeMap<PodId, Pod>,
    pub(crate) containers: BTreeMap<ContainerId, Container>,
    next_id: u64,
}

impl World {
    /// Puts a running pod into the world without asking any plugin, as if it had been there before.
    pub fn add_pod(&mut self, spec: &PodSpec) -> PodId {
        let pod = self.draft_pod(spec);
        self.insert_pod(pod)
    }

    /// Puts a running container into the world without asking any plugin.
    pub fn add_container(&mut self, pod: &PodId, spec: &ContainerSpec) -> ContainerId {
        let draft = self.draft_container(pod, spec);
        let id = self.insert_container(draft);
        self.set_state(&id, ContainerState::Running);
        id
    }

    pub fn pod_ids(&self) -> Vec<PodId> {
        self.pods.keys().cloned().collect()
    }

    pub fn container_ids(&self) -> Vec<ContainerId> {
        self.containers.keys().cloned().collect()
    }

    pub fn container_state(&self, id: &ContainerId) -> Option<ContainerState> {
        self.containers.get(id).map(|container| container.state)
    }

    pub(crate) fn draft_pod(&mut self, spec: &PodSpec) -> api::PodSandbox {
        let mut pod = api::PodSandbox::new();
        pod.id = self.new_id();
        pod.name = spec.name.clone();
        pod.namespace = spec.namespace.clone();
        pod.uid = match spec.uid.as_str() {
            "" => format!("uid-{}-{}", spec.namespace, spec.name),
            uid => uid.into(),
        };
        pod.labels = spec.labels.clone();
        pod.annotations = spec.annotations.clone();
        pod.runtime_handler = spec.runtime_handler.clone();
        let linux = pod.linux.mut_or_insert_default();
        linux.cgroup_parent = match spec.cgroup_parent.as_str() {
            "" => format!("/kubepods/besteffort/pod{}", pod.uid),
            parent => parent.into(),
        };
        pod
    }

    pub(crate) fn draft_container(&mut self, pod: &PodId, spec: &ContainerSpec) -> api::Container {
        let mut container = api::Container::new();
        container.id = self.new_id();
        container.pod_sandbox_id = pod.0.clone();
        container.name = spec.name.clone();
        container.labels = spec.labels.clone();
        container.annotations = spec.annotations.clone();
        container.CDI_devices = spec.cdi_devices.iter().map(|name| device(name)).collect();
        let unknown = container.special_fields.mut_unknown_fields();
        for (number, values) in [(7, &spec.args), (8, &spec.env)] {
            for value in values {
                unknown.add_value(
                    number,
                    UnknownValue::LengthDelimited(value.clone().into_bytes()),
                );
            }
        }
        container
    }

    pub(crate) fn insert_pod(&mut self, pod: api::PodSandbox) -> PodId {
        let id = PodId(pod.id.clone());
        self.pods.insert(
            id.clone(),
            Pod {
                api: pod,
                ready: true,
            },
        );
        id
    }

    pub(crate) fn insert_container(&mut self, container: api::Container) -> ContainerId {
        let id = ContainerId(container.id.clone());
        self.containers.insert(
            id.clone(),
            Container {
                api: container,
                state: ContainerState::Created,
            },
        );
        self.set_state(&id, ContainerState::Created);
        id
    }

    pub(crate) fn set_state(&mut self, id: &ContainerId, state: ContainerState) {
        if let Some(container) = self.containers.get_mut(id) {
            container.state = state;
            container.api.state = match state {
                ContainerState::Created => api::ContainerState::CONTAINER_CREATED,
                ContainerState::Running => api::ContainerState::CONTAINER_RUNNING,
                ContainerState::Stopped => api::ContainerState::CONTAINER_STOPPED,
            }
            .into();
        }
    }

    /// What Synchronize presents: all sandboxes, and the containers that have not exited
    /// (containerd's `listContainers` leaves the others out).
    pub(crate) fn present(&self) -> (Vec<api::PodSandbox>, Vec<api::Container>) {
        let pods = self.pods.values().map(|pod| pod.api.clone()).collect();
        let containers = self
            .containers
            .values()
            .filter(|container| container.state != ContainerState::Stopped)
            .map(|container| container.api.clone())
            .collect();
        (pods, containers)
    }

    /// 64 hexadecimal digits, as containerd's ids are.
    fn new_id(&mut self) -> String {
        self.next_id += 1;
        format!("{:064x}", self.next_id)
    }
}

pub(crate) fn device(name: &str) -> api::CDIDevice {
    let mut device = api::CDIDevice::new();
    device.name = name.into();
    device
}
