//! The CRI requests of the simulated runtime, and how plugins take part in each.

use crate::runtime::Runtime;
use crate::world::{ContainerId, ContainerSpec, PodId, PodSpec};
use std::time::Duration;

/// A plugin refused the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{context}{message}")]
pub struct Rejected {
    /// What containerd puts in front when it answers the kubelet.
    pub context: &'static str,
    /// The runtime library's own text, for example
    /// `validator "99-nri-lease" rejected container adjustment, reason: …`.
    pub message: String,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Rejected(#[from] Rejected),
    #[error("sandbox {0} does not exist")]
    NoSuchPod(String),
    #[error("container {0} does not exist")]
    NoSuchContainer(String),
}

impl Runtime {
    /// Runs a sandbox: plugins are called in index order; a returned error rejects it (and Stop
    /// and Remove are sent); a late or broken plugin is closed and skipped.
    pub async fn run_pod_sandbox(&self, _spec: PodSpec) -> Result<PodId, Rejected> {
        unimplemented!()
    }

    /// Creates a container: plugins in index order, then all validators at once with the list.
    pub async fn create_container(
        &self,
        _pod: &PodId,
        _spec: ContainerSpec,
    ) -> Result<ContainerId, RequestError> {
        unimplemented!()
    }

    /// Starts a created container.
    pub async fn start_container(&self, _id: &ContainerId) -> Result<(), RequestError> {
        unimplemented!()
    }

    /// Stops a container, which takes `grace`; meanwhile no plugin can be synchronised.
    pub async fn stop_container(
        &self,
        _id: &ContainerId,
        _grace: Duration,
    ) -> Result<(), RequestError> {
        unimplemented!()
    }

    /// Removes a container, stopping it first.
    pub async fn remove_container(&self, _id: &ContainerId) -> Result<(), RequestError> {
        unimplemented!()
    }

    /// Stops a sandbox and its containers.
    pub async fn stop_pod_sandbox(&self, _id: &PodId) -> Result<(), RequestError> {
        unimplemented!()
    }

    /// Removes a sandbox and its containers.
    pub async fn remove_pod_sandbox(&self, _id: &PodId) -> Result<(), RequestError> {
        unimplemented!()
    }
}
