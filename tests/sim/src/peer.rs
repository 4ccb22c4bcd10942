//! One plugin's connection as the runtime holds it: register, configure, synchronise, call, close
//! (containerd/nri v0.12.0 `pkg/adaptation/plugin.go`).

use crate::event::falls_back_to_state_change;
use crate::journal::{Journal, What};
use crate::mux::{MAX_MESSAGE_BYTES, Mux};
use crate::options::Options;
use async_trait::async_trait;
use futures::StreamExt;
use nri_lease_proto::nri::nri::{self as api, Event};
use nri_lease_proto::nri::nri_ttrpc as rpc;
use nri_lease_proto::protobuf::{Message, UnknownValueRef};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use ttrpc::asynchronous::transport::{Listener, Socket};
use ttrpc::asynchronous::{Client, Server, TtrpcContext};
use ttrpc::context::Context;

/// `recalcObjsPerSyncMsg`: a synchronisation is not split into smaller pieces than this.
const MIN_OBJECTS_PER_MESSAGE: usize = 8;
/// What a ttrpc request adds to its payload: service, method, timeout.
const REQUEST_OVERHEAD_BYTES: usize = 128;

/// Tells how the plugin registered.
pub(crate) type Registered = mpsc::Receiver<Result<(), String>>;

/// What became of a call.
#[derive(Debug)]
pub(crate) enum Answer<T> {
    Ok(T),
    /// The plugin returned an error; its connection stays.
    Error(ttrpc::Status),
    /// Too late, or the connection broke: it is closed now, in the kernel too.
    Lost(String),
}

/// A plugin's connection.
pub(crate) struct Peer {
    pub pid: i32,
    pub mux: Mux,
    client: rpc::PluginClient,
    raw_client: Client,
    /// Serves until it is dropped. In a mutex because it is not Sync.
    _server: Mutex<Server>,
    identity: Arc<Mutex<Identity>>,
    events: AtomicI32,
    /// Set when it answered UNIMPLEMENTED to an RPC of NRI 0.12: all of those go as StateChange
    /// from then on (`wrapOrigImpl`).
    state_change_only: AtomicBool,
    options: Options,
    journal: Arc<Journal>,
}

#[derive(Clone, Debug, Default)]
struct Identity {
    name: String,
    index: String,
}

impl Peer {
    /// Takes an accepted connection over. `requests` is what UpdateContainers waits for.
    pub async fn connect(
        stream: UnixStream,
        options: &Options,
        journal: &Arc<Journal>,
        requests: Arc<tokio::sync::Mutex<()>>,
    ) -> (Arc<Peer>, Registered) {
        let pid = stream
            .peer_cred()
            .ok()
            .and_then(|credentials| credentials.pid())
            .unwrap_or(0);
        journal.note("", What::Accepted { pid });
        let identity = Arc::new(Mutex::new(Identity::default()));
        let (tell_registered, registered) = mpsc::channel(1);
        let service = RuntimeService {
            identity: identity.clone(),
            registered: tell_registered,
            checks_name_characters: options.nri.checks_name_characters(),
            journal: journal.clone(),
            requests,
        };
        let (mux, connections) = Mux::start(stream);
        let client = Client::new(Socket::new(connections.plugin_service));
        let server = serve(
            connections.runtime_service,
            rpc::create_runtime(Arc::new(service)),
        )
        .await;
        let peer = Arc::new(Peer {
            pid,
            mux,
            client: rpc::PluginClient::new(client.clone()),
            raw_client: client,
            _server: Mutex::new(server),
            identity,
            events: AtomicI32::new(0),
            state_change_only: AtomicBool::new(false),
            options: options.clone(),
            journal: journal.clone(),
        });
        (peer, registered)
    }

    /// Waits for the plugin to register.
    pub async fn wait_registered(&self, mut registered: Registered) -> Result<(), NotStarted> {
        tokio::select! {
            biased;
            result = registered.recv() => match result {
                Some(Ok(())) => {
                    self.journal.note(&self.full_name(), What::Registered);
                    Ok(())
                }
                // Go does not close the connection here; the plugin may hang on to it.
                Some(Err(reason)) => Err(NotStarted::LeftOpen(format!("failed to register plugin: {reason}"))),
                None => Err(NotStarted::Closed("failed to register plugin, connection closed".into())),
            },
            _ = self.mux.ended() => {
                Err(NotStarted::Closed("failed to register plugin, connection closed".into()))
            }
            () = tokio::time::sleep(self.options.registration_timeout) => {
                self.mux.close().await;
                Err(NotStarted::Closed("plugin registration timed out".into()))
            }
        }
    }

    /// Configures the plugin, and subscribes it to what it asks for. On an error the connection is
    /// closed.
    pub async fn configure(&self, refuse_mask: bool) -> Result<(), NotStarted> {
        let mut request = api::ConfigureRequest::new();
        request.runtime_name = self.options.name.clone();
        request.runtime_version = self.options.version.clone();
        request.registration_timeout = millis(self.options.registration_timeout);
        request.request_timeout = millis(self.options.request_timeout);
        request.NRI_version = self.options.nri.announced().into();
        let answer = self
            .call(self.client.configure(self.context(), &request))
            .await;
        let refused = match answer {
            Answer::Ok(response) if refuse_mask => invalid_events(response.events),
            Answer::Ok(response) => match self.accept_mask(response.events) {
                Ok(()) => return Ok(()),
                Err(reason) => reason,
            },
            Answer::Error(status) => format!("failed to configure plugin: {}", describe(&status)),
            Answer::Lost(reason) => format!("failed to configure plugin: {reason}"),
        };
        self.mux.close().await;
        Err(NotStarted::Closed(refused))
    }

    fn accept_mask(&self, events: i32) -> Result<(), String> {
        let valid = self.options.nri.valid_events();
        let unknown = events & !valid;
        if unknown != 0 {
            return Err(invalid_events(unknown));
        }
        let events = if events == 0 { valid } else { events };
        self.events.store(events, Ordering::Relaxed);
        self.journal
            .note(&self.full_name(), What::Configured { events });
        Ok(())
    }

    /// Presents pods and containers, in as many messages as ttrpc's limit or `pieces` ask for.
    /// On an error the connection is closed.
    pub async fn synchronize(
        &self,
        mut pods: Vec<api::PodSandbox>,
        mut containers: Vec<api::Container>,
        pieces: usize,
    ) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + self.options.request_timeout;
        let mut pods_per_message = pods.len().div_ceil(pieces.max(1));
        let mut containers_per_message = containers.len().div_ceil(pieces.max(1));
        let mut messages = 0;
        loop {
            pods_per_message = pods_per_message.min(pods.len());
            containers_per_message = containers_per_message.min(containers.len());
            let bytes = encoded_bytes(&pods[..pods_per_message])
                + encoded_bytes(&containers[..containers_per_message])
                + REQUEST_OVERHEAD_BYTES;
            if bytes > MAX_MESSAGE_BYTES {
                let Some(counts) = smaller(pods_per_message, containers_per_message, bytes) else {
                    self.mux.close().await;
                    return Err("failed to synchronize plugin with split messages".into());
                };
                (pods_per_message, containers_per_message) = counts;
                continue;
            }
            let mut request = api::SynchronizeRequest::new();
            request.pods = pods.drain(..pods_per_message).collect();
            request.containers = containers
                .drain(..containers_per_message)
                .map(|container| container.write_to_bytes())
                .collect::<Result<_, _>>()
                .expect("a container without required fields is always complete");
            request.more = !pods.is_empty() || !containers.is_empty() || messages + 1 < pieces;
            let limit = deadline.saturating_duration_since(tokio::time::Instant::now());
            let answer = self
                .call_within(limit, self.client.synchronize(within(limit), &request))
                .await;
            messages += 1;
            let problem = match answer {
                Answer::Ok(_) if !request.more => {
                    self.journal
                        .note(&self.full_name(), What::Synchronized { messages });
                    return Ok(());
                }
                Answer::Ok(response) if response.more => continue,
                Answer::Ok(_) => "plugin does not handle split sync requests".into(),
                Answer::Error(status) => describe(&status),
                Answer::Lost(reason) => reason,
            };
            self.mux.close().await;
            return Err(problem);
        }
    }

    /// Relays a pod or container event, as a call of its own or as StateChange.
    pub async fn event(
        &self,
        event: Event,
        pod: &api::PodSandbox,
        container: Option<&api::Container>,
    ) -> Answer<()> {
        if self.has_own_rpc(event) {
            let answer = self.call(self.event_rpc(event, pod, container)).await;
            match answer {
                Answer::Error(status)
                    if falls_back_to_state_change(event) && is_unimplemented(&status) =>
                {
                    self.state_change_only.store(true, Ordering::Relaxed);
                }
                answer => return answer,
            }
        }
        let mut request = api::StateChangeEvent::new();
        request.event = event.into();
        request.pod = Some(pod.clone()).into();
        request.container = container.cloned().into();
        let call = self.client.state_change(self.context(), &request);
        self.call(async { call.await.map(drop) }).await
    }

    fn has_own_rpc(&self, event: Event) -> bool {
        match event {
            Event::UPDATE_POD_SANDBOX | Event::UPDATE_CONTAINER | Event::STOP_CONTAINER => true,
            _ => {
                self.options.nri.has_event_rpcs() && !self.state_change_only.load(Ordering::Relaxed)
            }
        }
    }

    async fn event_rpc(
        &self,
        event: Event,
        pod: &api::PodSandbox,
        container: Option<&api::Container>,
    ) -> ttrpc::Result<()> {
        macro_rules! pod_call {
            ($request:ident, $method:ident) => {{
                let mut request = api::$request::new();
                request.pod = Some(pod.clone()).into();
                self.client
                    .$method(self.context(), &request)
                    .await
                    .map(drop)
            }};
        }
        macro_rules! container_call {
            ($request:ident, $method:ident) => {{
                let mut request = api::$request::new();
                request.pod = Some(pod.clone()).into();
                request.container = container.cloned().into();
                self.client
                    .$method(self.context(), &request)
                    .await
                    .map(drop)
            }};
        }
        match event {
            Event::RUN_POD_SANDBOX => pod_call!(RunPodSandboxRequest, run_pod_sandbox),
            Event::STOP_POD_SANDBOX => pod_call!(StopPodSandboxRequest, stop_pod_sandbox),
            Event::REMOVE_POD_SANDBOX => pod_call!(RemovePodSandboxRequest, remove_pod_sandbox),
            Event::UPDATE_POD_SANDBOX => pod_call!(UpdatePodSandboxRequest, update_pod_sandbox),
            Event::POST_UPDATE_POD_SANDBOX => {
                pod_call!(PostUpdatePodSandboxRequest, post_update_pod_sandbox)
            }
            Event::POST_CREATE_CONTAINER => {
                container_call!(PostCreateContainerRequest, post_create_container)
            }
            Event::START_CONTAINER => container_call!(StartContainerRequest, start_container),
            Event::POST_START_CONTAINER => {
                container_call!(PostStartContainerRequest, post_start_container)
            }
            Event::UPDATE_CONTAINER => container_call!(UpdateContainerRequest, update_container),
            Event::POST_UPDATE_CONTAINER => {
                container_call!(PostUpdateContainerRequest, post_update_container)
            }
            Event::STOP_CONTAINER => container_call!(StopContainerRequest, stop_container),
            Event::REMOVE_CONTAINER => container_call!(RemoveContainerRequest, remove_container),
            Event::CREATE_CONTAINER | Event::VALIDATE_CONTAINER_ADJUSTMENT | Event::UNKNOWN => {
                unreachable!("not an event that is merely relayed")
            }
        }
    }

    /// Calls CreateContainer; the answer is the CDI devices that the plugin injects.
    pub async fn create_container(
        &self,
        request: &api::CreateContainerRequest,
    ) -> Answer<Vec<api::CDIDevice>> {
        let answer = self
            .call(self.client.create_container(self.context(), request))
            .await;
        match answer {
            Answer::Ok(response) => Answer::Ok(injected_devices(&response)),
            Answer::Error(status) => Answer::Error(status),
            Answer::Lost(reason) => Answer::Lost(reason),
        }
    }

    pub async fn validate(
        &self,
        request: &api::ValidateContainerAdjustmentRequest,
    ) -> Answer<api::ValidateContainerAdjustmentResponse> {
        let call = self
            .client
            .validate_container_adjustment(self.context(), request);
        self.call(call).await
    }

    /// Calls a method that does not exist.
    pub async fn unknown_rpc(&self) {
        let mut request = ttrpc::Request::new();
        request.service = "nri.pkg.api.v1alpha1.Plugin".into();
        request.method = "ReadMind".into();
        request.timeout_nano = self.context().timeout_nano;
        let _ = self.raw_client.request(request).await;
    }

    async fn call<T>(&self, call: impl Future<Output = ttrpc::Result<T>>) -> Answer<T> {
        self.call_within(self.options.request_timeout, call).await
    }

    /// A late or broken call closes the connection (`isFatalError`), and this returns only when it
    /// is closed.
    async fn call_within<T>(
        &self,
        limit: Duration,
        call: impl Future<Output = ttrpc::Result<T>>,
    ) -> Answer<T> {
        if self.mux.is_closed() {
            return Answer::Lost("ttrpc: closed".into());
        }
        let began = Instant::now();
        let reason = match tokio::time::timeout(limit, call).await {
            Ok(Ok(answer)) => return Answer::Ok(answer),
            // The ttrpc client, and the other side's server, watch the same deadline.
            _ if began.elapsed() >= limit => "context deadline exceeded".into(),
            Ok(Err(ttrpc::Error::RpcStatus(status))) => return Answer::Error(status),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "context deadline exceeded".into(),
        };
        self.mux.close().await;
        Answer::Lost(reason)
    }

    fn context(&self) -> Context {
        within(self.options.request_timeout)
    }

    pub fn is_subscribed(&self, event: Event) -> bool {
        self.events.load(Ordering::Relaxed) & (1 << (event as i32 - 1)) != 0
    }

    pub fn events(&self) -> i32 {
        self.events.load(Ordering::Relaxed)
    }

    pub fn name(&self) -> String {
        self.identity().name
    }

    pub fn index(&self) -> String {
        self.identity().index
    }

    /// `INDEX-NAME`; empty before it has registered.
    pub fn full_name(&self) -> String {
        let Identity { name, index } = self.identity();
        if name.is_empty() {
            return name;
        }
        format!("{index}-{name}")
    }

    fn identity(&self) -> Identity {
        self.identity
            .lock()
            .expect("no holder of this lock panics")
            .clone()
    }
}

/// Why a connection did not become a plugin.
#[derive(Debug)]
pub(crate) enum NotStarted {
    Closed(String),
    /// Refused, but the socket stays open until the plugin gives up: so it is in Go.
    LeftOpen(String),
}

impl NotStarted {
    pub fn reason(&self) -> &str {
        match self {
            NotStarted::Closed(reason) | NotStarted::LeftOpen(reason) => reason,
        }
    }
}

/// The runtime's own service on the plugin's connection.
struct RuntimeService {
    identity: Arc<Mutex<Identity>>,
    registered: mpsc::Sender<Result<(), String>>,
    checks_name_characters: bool,
    journal: Arc<Journal>,
    requests: Arc<tokio::sync::Mutex<()>>,
}

#[async_trait]
impl rpc::Runtime for RuntimeService {
    async fn register_plugin(
        &self,
        _context: &TtrpcContext,
        request: api::RegisterPluginRequest,
    ) -> ttrpc::Result<api::Empty> {
        let checked = self
            .check_name(&request.plugin_name)
            .map_err(|problem| format!("invalid plugin name: {problem}"))
            .and_then(|()| {
                check_index(&request.plugin_idx)
                    .map_err(|problem| format!("invalid plugin index: {problem}"))
            });
        if checked.is_ok() {
            // A second registration renames the plugin, as in Go.
            *self.identity.lock().expect("no holder of this lock panics") = Identity {
                name: request.plugin_name,
                index: request.plugin_idx,
            };
        }
        // Nobody listens any more when the registration came too late.
        let _ = self.registered.send(checked.clone()).await;
        match checked {
            Ok(()) => Ok(api::Empty::new()),
            Err(problem) => Err(ttrpc::Error::RpcStatus(ttrpc::get_status(
                ttrpc::Code::UNKNOWN,
                problem,
            ))),
        }
    }

    async fn update_containers(
        &self,
        _context: &TtrpcContext,
        _request: api::UpdateContainersRequest,
    ) -> ttrpc::Result<api::UpdateContainersResponse> {
        let Identity { name, index } = self
            .identity
            .lock()
            .expect("no holder of this lock panics")
            .clone();
        self.journal
            .note(&format!("{index}-{name}"), What::AskedForUpdates);
        // Waits for the request in progress: called from a hook, it never comes (before 0.12.1).
        let _turn = self.requests.lock().await;
        Ok(api::UpdateContainersResponse::new())
    }
}

impl RuntimeService {
    fn check_name(&self, name: &str) -> Result<(), String> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
        match name.chars().find(|c| !allowed(*c)) {
            _ if name.is_empty() => Err("invalid plugin name: name is empty".into()),
            Some(bad) if self.checks_name_characters => Err(format!(
                "invalid plugin name {name:?}: contains invalid character {bad:?}"
            )),
            _ => Ok(()),
        }
    }
}

fn check_index(index: &str) -> Result<(), String> {
    match index.as_bytes() {
        [a, b] if a.is_ascii_digit() && b.is_ascii_digit() => Ok(()),
        [_, _] => Err(format!("invalid plugin index {index:?} (not [0-9][0-9])")),
        _ => Err(format!("invalid plugin index {index:?}, must be 2 digits")),
    }
}

fn invalid_events(unknown: i32) -> String {
    format!("invalid plugin events: 0x{unknown:x}")
}

/// A server on one ready-made connection. It ends with the connection.
pub(crate) async fn serve(
    connection: tokio::io::DuplexStream,
    services: std::collections::HashMap<String, ttrpc::asynchronous::Service>,
) -> Server {
    let connection = futures::stream::iter([Ok(connection)]).chain(futures::stream::pending());
    let mut server = Server::new()
        .add_listener(Listener::new(connection))
        .register_service(services);
    server
        .start()
        .await
        .expect("a server with a listener always starts");
    server
}

/// CDI devices in the adjustment (field 1) of an answer. The protocol crate leaves that field out
/// because the daemon never reads it.
fn injected_devices(response: &api::CreateContainerResponse) -> Vec<api::CDIDevice> {
    response
        .special_fields
        .unknown_fields()
        .iter()
        .filter_map(|(number, value)| match value {
            UnknownValueRef::LengthDelimited(bytes) if number == 1 => Some(bytes),
            _ => None,
        })
        .filter_map(|bytes| api::ContainerAdjustment::parse_from_bytes(bytes).ok())
        .flat_map(|adjustment| adjustment.CDI_devices)
        .collect()
}

/// Bytes of these objects as elements of a repeated field: each has a tag and a length before it.
fn encoded_bytes(objects: &[impl Message]) -> usize {
    const FRAMING_BYTES: u64 = 6;
    let bytes: u64 = objects
        .iter()
        .map(|object| object.compute_size() + FRAMING_BYTES)
        .sum();
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// `recalcObjsPerSyncMsg`.
fn smaller(pods: usize, containers: usize, bytes: usize) -> Option<(usize, usize)> {
    if pods + containers <= MIN_OBJECTS_PER_MESSAGE {
        return None;
    }
    let scale = |count: usize| {
        let by_size = count * MAX_MESSAGE_BYTES / bytes;
        by_size.min(count * 9 / 10)
    };
    let (pods, containers) = (scale(pods), scale(containers));
    if pods + containers < MIN_OBJECTS_PER_MESSAGE {
        return Some((MIN_OBJECTS_PER_MESSAGE / 2, MIN_OBJECTS_PER_MESSAGE / 2));
    }
    Some((pods, containers))
}

fn is_unimplemented(status: &ttrpc::Status) -> bool {
    status.code() == ttrpc::Code::UNIMPLEMENTED
}

/// As Go prints a status error.
pub(crate) fn describe(status: &ttrpc::Status) -> String {
    let code: String = format!("{:?}", status.code())
        .split('_')
        .map(|word| match word.split_at_checked(1) {
            Some((first, rest)) => format!("{first}{}", rest.to_lowercase()),
            None => String::new(),
        })
        .collect();
    format!("rpc error: code = {code} desc = {}", status.message())
}

fn within(limit: Duration) -> Context {
    ttrpc::context::with_duration(limit)
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
