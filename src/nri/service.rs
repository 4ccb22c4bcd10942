//! NRI's Plugin service as the runtime calls it.
//!
//! Every method is answered: one that the generated code would answer by default with NOT_FOUND
//! rejects every pod, if it is subscribed. RunPodSandbox and RemovePodSandbox arrive as methods of
//! their own since NRI 0.12 and as StateChange before; both ways lead to the same hook.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use nri_lease_proto::nri::nri::{self as api, Event};
use nri_lease_proto::nri::nri_ttrpc::Plugin;
use protobuf::{EnumOrUnknown, MessageField};
use tokio::sync::mpsc;
use ttrpc::Code;
use ttrpc::r#async::TtrpcContext;
use ttrpc::error::get_rpc_status;

use super::events::{Generation, RuntimeIdentity};
use crate::enforce::hooks::{HookSession, Refusal};

/// What happened on the way to a synchronised session.
#[derive(Debug)]
pub(super) enum Progress {
    /// The runtime asked what we want.
    Configured {
        identity: RuntimeIdentity,
        generation: Generation,
        request_timeout: Duration,
        registration_timeout: Duration,
    },
    /// The last message of the synchronisation.
    Synchronized { pods: usize },
    /// The runtime says that it is going down. Rarely sent.
    Shutdown,
}

/// One session's service.
pub(super) struct PluginService {
    hooks: Arc<HookSession>,
    /// Used when the version does not tell.
    fallback: Generation,
    progress: mpsc::UnboundedSender<Progress>,
    /// Pods of a synchronisation that comes in several messages.
    synchronizing: Mutex<Vec<api::PodSandbox>>,
}

impl PluginService {
    pub(super) fn new(
        hooks: Arc<HookSession>,
        fallback: Generation,
        progress: mpsc::UnboundedSender<Progress>,
    ) -> Self {
        Self {
            hooks,
            fallback,
            progress,
            synchronizing: Mutex::default(),
        }
    }

    fn report(&self, progress: Progress) {
        // The session may be ending; then nobody needs to know.
        let _ = self.progress.send(progress);
    }

    fn sandbox_started(&self, pod: &MessageField<api::PodSandbox>) -> ttrpc::Result<()> {
        answer(self.hooks.run_pod_sandbox(required(pod, "pod")?))
    }

    fn sandbox_removed(&self, pod: &MessageField<api::PodSandbox>) -> ttrpc::Result<()> {
        self.hooks.remove_pod_sandbox(required(pod, "pod")?);
        Ok(())
    }
}

fn required<'a, T>(field: &'a MessageField<T>, name: &str) -> ttrpc::Result<&'a T> {
    field.as_ref().ok_or_else(|| {
        get_rpc_status(
            Code::INVALID_ARGUMENT,
            format!("the runtime's request has no {name}"),
        )
    })
}

/// A refusal as a returned error, which keeps the connection (a timeout would lose it). Not one of
/// the codes that NRI takes for a lost plugin.
fn answer(decided: Result<(), Refusal>) -> ttrpc::Result<()> {
    decided.map_err(|refusal| get_rpc_status(Code::FAILED_PRECONDITION, refusal.text))
}

fn millis(value: i64) -> Duration {
    Duration::from_millis(value.max(0) as u64)
}

type Answer<T> = ttrpc::Result<T>;

#[async_trait]
impl Plugin for PluginService {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: api::ConfigureRequest,
    ) -> Answer<api::ConfigureResponse> {
        let identity = RuntimeIdentity {
            name: request.runtime_name,
            version: request.runtime_version,
            nri_version: request.NRI_version,
        };
        let generation = identity.generation().unwrap_or(self.fallback);
        let request_timeout = millis(request.request_timeout);
        let registration_timeout = millis(request.registration_timeout);
        self.hooks
            .configured(&identity, generation, request_timeout, registration_timeout);
        self.report(Progress::Configured {
            identity,
            generation,
            request_timeout,
            registration_timeout,
        });
        Ok(api::ConfigureResponse {
            events: generation.mask(),
            ..Default::default()
        })
    }

    async fn synchronize(
        &self,
        _: &TtrpcContext,
        request: api::SynchronizeRequest,
    ) -> Answer<api::SynchronizeResponse> {
        let more = request.more;
        let pods = {
            let mut pods = self
                .synchronizing
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            pods.extend(request.pods);
            if more {
                None
            } else {
                Some(std::mem::take(&mut *pods))
            }
        };
        if let Some(pods) = pods {
            self.report(Progress::Synchronized { pods: pods.len() });
            self.hooks.synchronized(pods).await;
        }
        Ok(api::SynchronizeResponse {
            more,
            ..Default::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, _: api::Empty) -> Answer<api::Empty> {
        self.report(Progress::Shutdown);
        Ok(api::Empty::new())
    }

    async fn run_pod_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::RunPodSandboxRequest,
    ) -> Answer<api::RunPodSandboxResponse> {
        self.sandbox_started(&request.pod)?;
        Ok(api::RunPodSandboxResponse::new())
    }

    async fn remove_pod_sandbox(
        &self,
        _: &TtrpcContext,
        request: api::RemovePodSandboxRequest,
    ) -> Answer<api::RemovePodSandboxResponse> {
        self.sandbox_removed(&request.pod)?;
        Ok(api::RemovePodSandboxResponse::new())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: api::CreateContainerRequest,
    ) -> Answer<api::CreateContainerResponse> {
        let pod = required(&request.pod, "pod")?;
        let container = required(&request.container, "container")?;
        answer(self.hooks.create_container(pod, container))?;
        Ok(api::CreateContainerResponse::new())
    }

    async fn validate_container_adjustment(
        &self,
        _: &TtrpcContext,
        request: api::ValidateContainerAdjustmentRequest,
    ) -> Answer<api::ValidateContainerAdjustmentResponse> {
        let mut response = api::ValidateContainerAdjustmentResponse::new();
        if let Err(refusal) = self.hooks.validate_container(&request) {
            response.reject = true;
            response.reason = refusal.text;
        }
        Ok(response)
    }

    async fn state_change(
        &self,
        _: &TtrpcContext,
        request: api::StateChangeEvent,
    ) -> Answer<api::Empty> {
        match request.event.enum_value() {
            Ok(Event::RUN_POD_SANDBOX) => self.sandbox_started(&request.pod)?,
            Ok(Event::REMOVE_POD_SANDBOX) => self.sandbox_removed(&request.pod)?,
            Ok(_) | Err(_) => ignored(request.event),
        }
        Ok(api::Empty::new())
    }

    // Not subscribed; answered all the same.

    async fn update_pod_sandbox(
        &self,
        _: &TtrpcContext,
        _: api::UpdatePodSandboxRequest,
    ) -> Answer<api::UpdatePodSandboxResponse> {
        Ok(Default::default())
    }

    async fn post_update_pod_sandbox(
        &self,
        _: &TtrpcContext,
        _: api::PostUpdatePodSandboxRequest,
    ) -> Answer<api::PostUpdatePodSandboxResponse> {
        Ok(Default::default())
    }

    async fn stop_pod_sandbox(
        &self,
        _: &TtrpcContext,
        _: api::StopPodSandboxRequest,
    ) -> Answer<api::StopPodSandboxResponse> {
        Ok(Default::default())
    }

    async fn post_create_container(
        &self,
        _: &TtrpcContext,
        _: api::PostCreateContainerRequest,
    ) -> Answer<api::PostCreateContainerResponse> {
        Ok(Default::default())
    }

    async fn start_container(
        &self,
        _: &TtrpcContext,
        _: api::StartContainerRequest,
    ) -> Answer<api::StartContainerResponse> {
        Ok(Default::default())
    }

    async fn post_start_container(
        &self,
        _: &TtrpcContext,
        _: api::PostStartContainerRequest,
    ) -> Answer<api::PostStartContainerResponse> {
        Ok(Default::default())
    }

    async fn update_container(
        &self,
        _: &TtrpcContext,
        _: api::UpdateContainerRequest,
    ) -> Answer<api::UpdateContainerResponse> {
        Ok(Default::default())
    }

    async fn post_update_container(
        &self,
        _: &TtrpcContext,
        _: api::PostUpdateContainerRequest,
    ) -> Answer<api::PostUpdateContainerResponse> {
        Ok(Default::default())
    }

    async fn stop_container(
        &self,
        _: &TtrpcContext,
        _: api::StopContainerRequest,
    ) -> Answer<api::StopContainerResponse> {
        Ok(Default::default())
    }

    async fn remove_container(
        &self,
        _: &TtrpcContext,
        _: api::RemoveContainerRequest,
    ) -> Answer<api::RemoveContainerResponse> {
        Ok(Default::default())
    }
}

fn ignored(event: EnumOrUnknown<Event>) {
    tracing::debug!(event = event.value(), "not subscribed to this event");
}
