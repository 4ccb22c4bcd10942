//! The plugin's service: answers the runtime's calls as the options say.

use super::record::{Recorder, Seen, Validated};
use super::{Behaviour, Options};
use crate::event::{falls_back_to_state_change, rpc_name};
use crate::mux::Mux;
use async_trait::async_trait;
use nri_lease_proto::nri::nri::{self as api, Event};
use nri_lease_proto::nri::nri_ttrpc as rpc;
use nri_lease_proto::protobuf::{Message, UnknownValue};
use std::sync::Arc;
use ttrpc::asynchronous::TtrpcContext;

pub(crate) struct PluginService {
    options: Options,
    recorder: Arc<Recorder>,
    mux: Arc<Mux>,
}

/// How a call came.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    OwnRpc,
    StateChange,
}

impl PluginService {
    pub fn new(options: Options, recorder: Arc<Recorder>, mux: Arc<Mux>) -> Self {
        PluginService {
            options,
            recorder,
            mux,
        }
    }

    /// Does what it is told to do, and writes down that it processed the event, if it did.
    async fn process(
        &self,
        event: Event,
        way: Way,
        pod: &api::PodSandbox,
        container: Option<&api::Container>,
    ) -> ttrpc::Result<()> {
        if way == Way::OwnRpc && self.options.state_change_only && falls_back_to_state_change(event)
        {
            return Err(status(
                ttrpc::Code::UNIMPLEMENTED,
                format!("{} is not implemented", rpc_name(event)),
            ));
        }
        match event {
            Event::RUN_POD_SANDBOX => self.behave(&self.options.in_run_pod_sandbox).await?,
            Event::CREATE_CONTAINER => self.behave(&self.options.in_create_container).await?,
            _ => {}
        }
        let container = container.cloned().unwrap_or_default();
        self.recorder.seen(Seen {
            rpc: rpc_name(event).into(),
            state_change: way == Way::StateChange,
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            pod_id: pod.id.clone(),
            container: container.name,
            container_id: container.id,
        });
        Ok(())
    }

    async fn behave(&self, behaviour: &Behaviour) -> ttrpc::Result<()> {
        match behaviour {
            Behaviour::Answer => Ok(()),
            Behaviour::Delay(delay) => {
                tokio::time::sleep(*delay).await;
                Ok(())
            }
            Behaviour::Hang => std::future::pending().await,
            Behaviour::Refuse(message) => Err(status(ttrpc::Code::UNKNOWN, message.clone())),
            Behaviour::Exit(code) => std::process::exit(*code),
            Behaviour::Disconnect => {
                self.mux.close().await;
                std::future::pending().await
            }
        }
    }

    async fn verdict(&self) -> ttrpc::Result<api::ValidateContainerAdjustmentResponse> {
        let mut response = api::ValidateContainerAdjustmentResponse::new();
        match &self.options.in_validate {
            Behaviour::Refuse(reason) => {
                response.reject = true;
                response.reason = reason.clone();
            }
            other => self.behave(other).await?,
        }
        Ok(response)
    }
}

#[async_trait]
impl rpc::Plugin for PluginService {
    async fn configure(
        &self,
        _context: &TtrpcContext,
        request: api::ConfigureRequest,
    ) -> ttrpc::Result<api::ConfigureResponse> {
        self.behave(&self.options.in_configure).await?;
        self.recorder.update(|record| {
            record.timeouts_ms = (request.registration_timeout, request.request_timeout);
            record.runtime = (
                request.runtime_name,
                request.runtime_version,
                request.NRI_version,
            );
        });
        let mut response = api::ConfigureResponse::new();
        response.events = self.options.events;
        Ok(response)
    }

    async fn synchronize(
        &self,
        _context: &TtrpcContext,
        request: api::SynchronizeRequest,
    ) -> ttrpc::Result<api::SynchronizeResponse> {
        self.behave(&self.options.in_synchronize).await?;
        self.recorder.update(|record| {
            record.synchronize_messages += 1;
            record.synchronized_pods += request.pods.len();
            record.synchronized_containers += request.containers.len();
            record.synchronized += usize::from(!request.more);
        });
        if !request.more {
            let record = self.recorder.copy();
            self.recorder.say(&format!(
                "synchronized {} {}",
                record.synchronized_pods, record.synchronized_containers
            ));
        }
        let mut response = api::SynchronizeResponse::new();
        response.more = request.more;
        Ok(response)
    }

    async fn shutdown(
        &self,
        _context: &TtrpcContext,
        _request: api::Empty,
    ) -> ttrpc::Result<api::Empty> {
        Ok(api::Empty::new())
    }

    async fn create_container(
        &self,
        _context: &TtrpcContext,
        request: api::CreateContainerRequest,
    ) -> ttrpc::Result<api::CreateContainerResponse> {
        let event = Event::CREATE_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(injecting(&self.options.cdi_devices))
    }

    async fn validate_container_adjustment(
        &self,
        _context: &TtrpcContext,
        request: api::ValidateContainerAdjustmentRequest,
    ) -> ttrpc::Result<api::ValidateContainerAdjustmentResponse> {
        let response = self.verdict().await?;
        self.recorder.validated(Validated {
            container_id: request.container.id.clone(),
            plugins: request
                .plugins
                .iter()
                .map(|plugin| (plugin.name.clone(), plugin.index.clone()))
                .collect(),
            cdi_devices: request
                .adjust
                .CDI_devices
                .iter()
                .map(|device| device.name.clone())
                .collect(),
        });
        Ok(response)
    }

    async fn state_change(
        &self,
        _context: &TtrpcContext,
        request: api::StateChangeEvent,
    ) -> ttrpc::Result<api::Empty> {
        let event = request.event.enum_value_or_default();
        self.process(
            event,
            Way::StateChange,
            &request.pod,
            request.container.as_ref(),
        )
        .await?;
        Ok(api::Empty::new())
    }

    async fn run_pod_sandbox(
        &self,
        _context: &TtrpcContext,
        request: api::RunPodSandboxRequest,
    ) -> ttrpc::Result<api::RunPodSandboxResponse> {
        let event = Event::RUN_POD_SANDBOX;
        self.process(event, Way::OwnRpc, &request.pod, None).await?;
        Ok(api::RunPodSandboxResponse::new())
    }

    async fn update_pod_sandbox(
        &self,
        _context: &TtrpcContext,
        request: api::UpdatePodSandboxRequest,
    ) -> ttrpc::Result<api::UpdatePodSandboxResponse> {
        let event = Event::UPDATE_POD_SANDBOX;
        self.process(event, Way::OwnRpc, &request.pod, None).await?;
        Ok(api::UpdatePodSandboxResponse::new())
    }

    async fn post_update_pod_sandbox(
        &self,
        _context: &TtrpcContext,
        request: api::PostUpdatePodSandboxRequest,
    ) -> ttrpc::Result<api::PostUpdatePodSandboxResponse> {
        let event = Event::POST_UPDATE_POD_SANDBOX;
        self.process(event, Way::OwnRpc, &request.pod, None).await?;
        Ok(api::PostUpdatePodSandboxResponse::new())
    }

    async fn stop_pod_sandbox(
        &self,
        _context: &TtrpcContext,
        request: api::StopPodSandboxRequest,
    ) -> ttrpc::Result<api::StopPodSandboxResponse> {
        let event = Event::STOP_POD_SANDBOX;
        self.process(event, Way::OwnRpc, &request.pod, None).await?;
        Ok(api::StopPodSandboxResponse::new())
    }

    async fn remove_pod_sandbox(
        &self,
        _context: &TtrpcContext,
        request: api::RemovePodSandboxRequest,
    ) -> ttrpc::Result<api::RemovePodSandboxResponse> {
        let event = Event::REMOVE_POD_SANDBOX;
        self.process(event, Way::OwnRpc, &request.pod, None).await?;
        Ok(api::RemovePodSandboxResponse::new())
    }

    async fn post_create_container(
        &self,
        _context: &TtrpcContext,
        request: api::PostCreateContainerRequest,
    ) -> ttrpc::Result<api::PostCreateContainerResponse> {
        let event = Event::POST_CREATE_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(api::PostCreateContainerResponse::new())
    }

    async fn start_container(
        &self,
        _context: &TtrpcContext,
        request: api::StartContainerRequest,
    ) -> ttrpc::Result<api::StartContainerResponse> {
        let event = Event::START_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(api::StartContainerResponse::new())
    }

    async fn post_start_container(
        &self,
        _context: &TtrpcContext,
        request: api::PostStartContainerRequest,
    ) -> ttrpc::Result<api::PostStartContainerResponse> {
        let event = Event::POST_START_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(api::PostStartContainerResponse::new())
    }

    async fn update_container(
        &self,
        _context: &TtrpcContext,
        request: api::UpdateContainerRequest,
    ) -> ttrpc::Result<api::UpdateContainerResponse> {
        let event = Event::UPDATE_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(api::UpdateContainerResponse::new())
    }

    async fn post_update_container(
        &self,
        _context: &TtrpcContext,
        request: api::PostUpdateContainerRequest,
    ) -> ttrpc::Result<api::PostUpdateContainerResponse> {
        let event = Event::POST_UPDATE_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(api::PostUpdateContainerResponse::new())
    }

    async fn stop_container(
        &self,
        _context: &TtrpcContext,
        request: api::StopContainerRequest,
    ) -> ttrpc::Result<api::StopContainerResponse> {
        let event = Event::STOP_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(api::StopContainerResponse::new())
    }

    async fn remove_container(
        &self,
        _context: &TtrpcContext,
        request: api::RemoveContainerRequest,
    ) -> ttrpc::Result<api::RemoveContainerResponse> {
        let event = Event::REMOVE_CONTAINER;
        self.process(event, Way::OwnRpc, &request.pod, request.container.as_ref())
            .await?;
        Ok(api::RemoveContainerResponse::new())
    }
}

/// An answer whose adjustment (field 1, which the protocol crate leaves out) adds CDI devices.
fn injecting(devices: &[String]) -> api::CreateContainerResponse {
    let mut response = api::CreateContainerResponse::new();
    if devices.is_empty() {
        return response;
    }
    let mut adjustment = api::ContainerAdjustment::new();
    adjustment.CDI_devices = devices
        .iter()
        .map(|name| crate::world::device(name))
        .collect();
    let bytes = adjustment
        .write_to_bytes()
        .expect("a message without required fields can always be encoded");
    response
        .special_fields
        .mut_unknown_fields()
        .add_value(1, UnknownValue::LengthDelimited(bytes));
    response
}

fn status(code: ttrpc::Code, message: String) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, message))
}
