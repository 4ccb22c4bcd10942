//! The CRI requests of the simulated runtime, and how plugins take part in each
//! (containerd/nri v0.12.0 `pkg/adaptation/adaptation.go`; containerd 2.3.4 `internal/nri/nri.go`,
//! `internal/cri/nri/nri_api_linux.go` and `internal/cri/server/`).

use crate::event::rpc_name;
use crate::journal::What;
use crate::options::SyncBlock;
use crate::peer::{Answer, Peer, describe};
use crate::runtime::{Node, Runtime, lock};
use crate::world::{ContainerId, ContainerSpec, ContainerState, PodId, PodSpec};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use nri_lease_proto::nri::nri::{self as api, Event};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::RwLockReadGuard;

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
    /// Runs a sandbox: plugins are called in index order; a returned error rejects it, and Stop and
    /// Remove are sent; a late or broken plugin is closed and skipped.
    pub async fn run_pod_sandbox(&self, spec: PodSpec) -> Result<PodId, Rejected> {
        let node = &self.node;
        let pod = lock(&node.world).draft_pod(&spec);
        let _block = node.block_sync().await;
        if let Err(message) = node.relay(Event::RUN_POD_SANDBOX, &pod, None).await {
            node.inform(Event::STOP_POD_SANDBOX, &pod, None).await;
            node.inform(Event::REMOVE_POD_SANDBOX, &pod, None).await;
            return Err(Rejected {
                context: "NRI RunPodSandbox failed: ",
                message,
            });
        }
        let id = lock(&node.world).insert_pod(pod);
        lock(&node.told).insert(id.clone());
        Ok(id)
    }

    /// Creates a container: plugins in index order, then all validators at once with the list.
    pub async fn create_container(
        &self,
        pod: &PodId,
        spec: ContainerSpec,
    ) -> Result<ContainerId, RequestError> {
        let node = &self.node;
        let pod = node.pod(pod)?;
        let container = lock(&node.world).draft_container(&PodId(pod.id.clone()), &spec);
        let block = node.block_sync().await;
        if let Err(message) = node.create(&pod, &container).await {
            // `UndoCreateContainer`, deferred until after the block is lifted.
            drop(block);
            node.inform(Event::STOP_CONTAINER, &pod, Some(&container))
                .await;
            node.inform(Event::REMOVE_CONTAINER, &pod, Some(&container))
                .await;
            return Err(RequestError::Rejected(Rejected {
                context: "failed to create containerd container: \
                          failed to get NRI adjustment for container: ",
                message,
            }));
        }
        let id = lock(&node.world).insert_container(container.clone());
        node.inform(Event::POST_CREATE_CONTAINER, &pod, Some(&container))
            .await;
        Ok(id)
    }

    /// Starts a created container.
    pub async fn start_container(&self, id: &ContainerId) -> Result<(), RequestError> {
        let node = &self.node;
        let (pod, container) = node.container(id)?;
        let _block = node.block_sync().await;
        if let Err(message) = node
            .relay(Event::START_CONTAINER, &pod, Some(&container))
            .await
        {
            node.inform(Event::STOP_CONTAINER, &pod, Some(&container))
                .await;
            return Err(RequestError::Rejected(Rejected {
                context: "NRI container start failed: ",
                message,
            }));
        }
        lock(&node.world).set_state(id, ContainerState::Running);
        let (pod, container) = node.container(id)?;
        node.inform(Event::POST_START_CONTAINER, &pod, Some(&container))
            .await;
        Ok(())
    }

    /// Changes a container's resources, as far as plugins see it.
    pub async fn update_container(&self, id: &ContainerId) -> Result<(), RequestError> {
        let node = &self.node;
        let (pod, container) = node.container(id)?;
        let _block = node.block_sync().await;
        node.relay(Event::UPDATE_CONTAINER, &pod, Some(&container))
            .await
            .map_err(|message| Rejected {
                context: "NRI container update failed: ",
                message,
            })?;
        node.inform(Event::POST_UPDATE_CONTAINER, &pod, Some(&container))
            .await;
        Ok(())
    }

    /// Changes a sandbox's resources, as far as plugins see it. Nothing happens before NRI 0.10.
    pub async fn update_pod_sandbox(&self, id: &PodId) -> Result<(), RequestError> {
        let node = &self.node;
        let pod = node.pod(id)?;
        if !node.options.nri.has_validation() {
            return Ok(());
        }
        let _block = node.block_sync().await;
        node.relay(Event::UPDATE_POD_SANDBOX, &pod, None)
            .await
            .map_err(|message| Rejected {
                context: "NRI sandbox update failed: ",
                message,
            })?;
        node.inform(Event::POST_UPDATE_POD_SANDBOX, &pod, None)
            .await;
        Ok(())
    }

    /// Stops a container, which takes `grace` when it runs; meanwhile no plugin can be synchronised.
    pub async fn stop_container(
        &self,
        id: &ContainerId,
        grace: Duration,
    ) -> Result<(), RequestError> {
        self.node.container(id)?;
        let _block = self.node.block_sync().await;
        self.node.stop_container(id, grace).await
    }

    /// Removes a container, stopping it first.
    pub async fn remove_container(&self, id: &ContainerId) -> Result<(), RequestError> {
        self.node.container(id)?;
        let _block = self.node.block_sync().await;
        self.node.remove_container(id).await
    }

    /// Stops a sandbox and its containers.
    pub async fn stop_pod_sandbox(&self, id: &PodId) -> Result<(), RequestError> {
        self.node.pod(id)?;
        let _block = self.node.block_sync().await;
        self.node.stop_pod(id).await
    }

    /// Removes a sandbox and its containers, stopping them first.
    pub async fn remove_pod_sandbox(&self, id: &PodId) -> Result<(), RequestError> {
        let node = &self.node;
        let pod = node.pod(id)?;
        let _block = node.block_sync().await;
        node.stop_pod(id).await?;
        for container in node.containers_of(id) {
            node.remove_container(&container).await?;
        }
        if lock(&node.told).remove(id) {
            node.inform(Event::REMOVE_POD_SANDBOX, &pod, None).await;
        }
        lock(&node.world).pods.remove(id);
        Ok(())
    }
}

impl Node {
    /// `BlockPluginSync`: no plugin is synchronised while the guard lives.
    async fn block_sync(&self) -> Option<RwLockReadGuard<'_, ()>> {
        match self.options.sync_block {
            SyncBlock::Requests => Some(self.sync_block.read().await),
            SyncBlock::HooksOnly => None,
        }
    }

    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RequestError> {
        let (_, container) = self.container(id)?;
        if container.state == api::ContainerState::CONTAINER_STOPPED.into() {
            return Ok(());
        }
        if container.state == api::ContainerState::CONTAINER_RUNNING.into() {
            crate::runtime::pause(grace).await;
        }
        lock(&self.world).set_state(id, ContainerState::Stopped);
        let (pod, container) = self.container(id)?;
        self.inform(Event::STOP_CONTAINER, &pod, Some(&container))
            .await;
        Ok(())
    }

    async fn remove_container(&self, id: &ContainerId) -> Result<(), RequestError> {
        self.stop_container(id, Duration::ZERO).await?;
        let (pod, container) = self.container(id)?;
        self.inform(Event::REMOVE_CONTAINER, &pod, Some(&container))
            .await;
        lock(&self.world).containers.remove(id);
        Ok(())
    }

    async fn stop_pod(&self, id: &PodId) -> Result<(), RequestError> {
        for container in self.containers_of(id) {
            self.stop_container(&container, Duration::ZERO).await?;
        }
        let pod = self.pod(id)?;
        let was_ready = match lock(&self.world).pods.get_mut(id) {
            Some(pod) => std::mem::replace(&mut pod.ready, false),
            None => false,
        };
        if was_ready && lock(&self.told).contains(id) {
            self.inform(Event::STOP_POD_SANDBOX, &pod, None).await;
        }
        Ok(())
    }

    /// Calls the plugins that want this event, one after the other; the first error ends it.
    async fn relay(
        &self,
        event: Event,
        pod: &api::PodSandbox,
        container: Option<&api::Container>,
    ) -> Result<(), String> {
        let _turn = self.requests.lock().await;
        let plugins = self.list().plugins.clone();
        let id = container.map_or(&pod.id, |container| &container.id);
        let mut result = Ok(());
        for plugin in plugins.iter().filter(|plugin| plugin.is_subscribed(event)) {
            let answer = plugin.event(event, pod, container).await;
            if let Err(message) = self.outcome(plugin, rpc_name(event), id, answer) {
                result = Err(message);
                break;
            }
        }
        self.list().remove_closed();
        result
    }

    /// Relays where containerd only logs what a plugin says against it.
    async fn inform(
        &self,
        event: Event,
        pod: &api::PodSandbox,
        container: Option<&api::Container>,
    ) {
        // Already in the journal.
        let _ = self.relay(event, pod, container).await;
    }

    /// CreateContainer, and validation if there is a validator at the start.
    async fn create(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
    ) -> Result<(), String> {
        let _turn = self.requests.lock().await;
        let result = self.create_and_validate(pod, container).await;
        self.list().remove_closed();
        result
    }

    async fn create_and_validate(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
    ) -> Result<(), String> {
        let (plugins, validators) = {
            let list = self.list();
            (list.plugins.clone(), list.validators.clone())
        };
        let mut request = api::CreateContainerRequest::new();
        request.pod = Some(pod.clone()).into();
        request.container = Some(container.clone()).into();
        let mut validation = api::ValidateContainerAdjustmentRequest::new();
        validation.pod = request.pod.clone();
        validation.container = request.container.clone();
        let adjustment = validation.adjust.mut_or_insert_default();
        for plugin in &plugins {
            // Before the call, and whether it is called or not.
            validation.plugins.push(instance(plugin));
            if !plugin.is_subscribed(Event::CREATE_CONTAINER) {
                continue;
            }
            let answer = plugin.create_container(&request).await;
            if let Some(devices) = self.outcome(
                plugin,
                rpc_name(Event::CREATE_CONTAINER),
                &container.id,
                answer,
            )? {
                // Later plugins see what earlier ones did.
                let injected = devices.iter().cloned();
                request
                    .container
                    .mut_or_insert_default()
                    .CDI_devices
                    .extend(injected);
                adjustment.CDI_devices.extend(devices);
            }
        }
        if !self.options.nri.has_validation() || validators.is_empty() {
            return Ok(());
        }
        self.validate(&validators, &validation, &container.id).await
    }

    /// Asks all validators at once; the first to object wins, but all are waited for.
    async fn validate(
        &self,
        validators: &[Arc<Peer>],
        request: &api::ValidateContainerAdjustmentRequest,
        id: &str,
    ) -> Result<(), String> {
        let mut verdicts: FuturesUnordered<_> = validators
            .iter()
            .map(|validator| self.verdict(validator, request, id))
            .collect();
        let mut result = Ok(());
        while let Some(verdict) = verdicts.next().await {
            result = result.and(verdict);
        }
        result
    }

    async fn verdict(
        &self,
        validator: &Peer,
        request: &api::ValidateContainerAdjustmentRequest,
        id: &str,
    ) -> Result<(), String> {
        let rpc = rpc_name(Event::VALIDATE_CONTAINER_ADJUSTMENT);
        let name = validator.full_name();
        let failed = |reason: String| format!("validator plugin {name} failed: {reason}");
        let verdict = match validator.validate(request).await {
            Answer::Ok(response) if response.reject => {
                let reason = match response.reason.as_str() {
                    "" => "unknown rejection reason",
                    reason => reason,
                };
                Err(format!(
                    "validator {name:?} rejected container adjustment, reason: {reason}"
                ))
            }
            Answer::Ok(_) => Ok(()),
            Answer::Error(status) => Err(failed(describe(&status))),
            Answer::Lost(reason) => {
                self.journal.note(
                    &name,
                    What::Skipped {
                        rpc,
                        id: id.into(),
                        reason: reason.clone(),
                    },
                );
                return Err(failed(reason));
            }
        };
        self.journal
            .note(&name, called(rpc, id, verdict.as_ref().err()));
        verdict
    }

    /// Writes down what became of a call. None: the plugin is skipped and the request goes on.
    fn outcome<T>(
        &self,
        plugin: &Peer,
        rpc: &'static str,
        id: &str,
        answer: Answer<T>,
    ) -> Result<Option<T>, String> {
        let name = plugin.full_name();
        match answer {
            Answer::Ok(value) => {
                self.journal.note(&name, called(rpc, id, None));
                Ok(Some(value))
            }
            Answer::Error(status) => {
                let message = describe(&status);
                self.journal.note(&name, called(rpc, id, Some(&message)));
                Err(message)
            }
            Answer::Lost(reason) => {
                let id = id.into();
                self.journal.note(&name, What::Skipped { rpc, id, reason });
                Ok(None)
            }
        }
    }

    fn pod(&self, id: &PodId) -> Result<api::PodSandbox, RequestError> {
        match lock(&self.world).pods.get(id) {
            Some(pod) => Ok(pod.api.clone()),
            None => Err(RequestError::NoSuchPod(id.0.clone())),
        }
    }

    fn container(
        &self,
        id: &ContainerId,
    ) -> Result<(api::PodSandbox, api::Container), RequestError> {
        let container = match lock(&self.world).containers.get(id) {
            Some(container) => container.api.clone(),
            None => return Err(RequestError::NoSuchContainer(id.0.clone())),
        };
        let pod = self.pod(&PodId(container.pod_sandbox_id.clone()))?;
        Ok((pod, container))
    }

    fn containers_of(&self, pod: &PodId) -> Vec<ContainerId> {
        lock(&self.world)
            .containers
            .iter()
            .filter(|(_, container)| container.api.pod_sandbox_id == pod.0)
            .map(|(id, _)| id.clone())
            .collect()
    }
}

fn called(rpc: &'static str, id: &str, refusal: Option<&String>) -> What {
    let id = id.into();
    match refusal {
        None => What::Called { rpc, id },
        Some(message) => What::Refused {
            rpc,
            id,
            message: message.clone(),
        },
    }
}

fn instance(plugin: &Peer) -> api::PluginInstance {
    let mut instance = api::PluginInstance::new();
    instance.name = plugin.name();
    instance.index = plugin.index();
    instance
}
