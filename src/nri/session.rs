//! One connection to a runtime, from connect to end of file.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use nri_lease_proto::nri::nri::{self as api};
use nri_lease_proto::nri::{nri_ttrpc, nri_ttrpc::RuntimeClient};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tracing::{info, warn};
use ttrpc::r#async::{Client, Server};
use ttrpc::asynchronous::transport::{Listener, Socket};

use super::events::Generation;
use super::mux::{self, MuxStream};
use super::service::{PluginService, Progress};
use super::status::Connected;
use super::supervisor::RuntimeContext;
use crate::presence::OwnSocket;

/// What we tell the runtime of the NRI that we implement.
const NRI_VERSION: &str = "v0.12.0";
/// How often a registration that is not answered is mentioned. It is never given up: the runtime
/// accepts connections one at a time, and a silent client or a slow stop in front of us holds it
/// up for as long as that takes. Connecting again would not help.
const STILL_WAITING: Duration = Duration::from_secs(10);

/// How a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// It had been synchronised.
    AfterSync(String),
    /// The runtime closed it right after Configure: it does not know an event of `tried`.
    EventsRefused { tried: Generation },
    /// It ended before, for another reason.
    BeforeSync(String),
}

/// Registers on `stream` and serves hooks until the connection ends. Must run on the NRI thread.
pub(super) async fn run(
    context: &RuntimeContext,
    stream: UnixStream,
    fallback: Generation,
    fence: crate::presence::OwnFence,
) -> End {
    let own = match OwnSocket::of(&stream) {
        Ok(own) => own,
        Err(error) => return End::BeforeSync(format!("cannot read our own socket: {error}")),
    };
    let (plugin_side, runtime_side, pump) = mux::split(stream);
    let mut pump = std::pin::pin!(pump);
    let (progress_tx, mut progress) = mpsc::unbounded_channel();
    let hooks = context.hooks.session(context.status.clone());
    let service = PluginService::new(hooks, fallback, progress_tx);
    let mut server = match serve(plugin_side, service) {
        Ok(server) => server,
        Err(error) => return End::BeforeSync(format!("cannot serve the runtime: {error}")),
    };
    if let Err(error) = server.start().await {
        return End::BeforeSync(format!("cannot serve the runtime: {error}"));
    }
    let client = RuntimeClient::new(Client::new(Socket::new(runtime_side)));
    let mut register = std::pin::pin!(register(&client, context));
    let mut registered = false;
    let mut phase = Phase::Waiting;
    let mut fence = Some(fence);

    loop {
        tokio::select! {
            // Hooks first would starve nothing: they run in tasks of their own.
            ended = &mut pump => {
                let detail = match ended {
                    Ok(()) => "the runtime closed the connection".to_owned(),
                    Err(error) => format!("the connection broke: {error}"),
                };
                return phase.end(detail);
            }
            outcome = &mut register, if !registered => match outcome {
                Ok(()) => registered = true,
                Err(error) => return phase.end(format!("the runtime refused to register us: {error}")),
            },
            Some(step) = progress.recv() => match step {
                Progress::Configured { identity, generation, request_timeout, registration_timeout } => {
                    info!(
                        socket = %context.status.socket.display(),
                        runtime = identity.name,
                        version = identity.version,
                        nri = identity.nri_version,
                        ?generation,
                        "the runtime has configured us"
                    );
                    let known = identity.generation().is_some();
                    phase = Phase::Configured {
                        known,
                        connected: Connected {
                            identity,
                            generation,
                            since: SystemTime::now(),
                            request_timeout,
                            registration_timeout,
                            pods: 0,
                        },
                    };
                }
                Progress::Synchronized { pods } => {
                    if let Some(fence) = fence.take() {
                        context.tracker.own_synchronized(context.status.id, fence, own);
                    }
                    if let Phase::Configured { mut connected, .. } = std::mem::replace(&mut phase, Phase::Synchronized) {
                        connected.pods = pods;
                        connected.since = SystemTime::now();
                        context.status.set_connected(connected);
                        info!(socket = %context.status.socket.display(), pods, "synchronised with the runtime");
                    }
                }
                Progress::Shutdown => info!(socket = %context.status.socket.display(), "the runtime is going down"),
            },
            () = tokio::time::sleep(STILL_WAITING), if !matches!(phase, Phase::Synchronized) => {
                warn!(
                    socket = %context.status.socket.display(),
                    "still waiting for the runtime; it serves one new plugin at a time, and one in front of us is silent or waits for a container to stop"
                );
            }
        }
    }
}

enum Phase {
    Waiting,
    Configured { known: bool, connected: Connected },
    Synchronized,
}

impl Phase {
    fn end(self, detail: String) -> End {
        match self {
            Self::Waiting => End::BeforeSync(detail),
            // A runtime whose version is known gets the mask that fits it.
            Self::Configured { known: true, .. } => End::BeforeSync(detail),
            Self::Configured { connected, .. } => End::EventsRefused {
                tried: connected.generation,
            },
            Self::Synchronized => End::AfterSync(detail),
        }
    }
}

fn serve(plugin_side: MuxStream, service: PluginService) -> ttrpc::Result<Server> {
    // ttrpc's server panics at shutdown when its listener has ended: this one never does.
    let incoming = futures::stream::once(async move { Ok(plugin_side) })
        .chain(futures::stream::pending::<io::Result<MuxStream>>());
    Ok(Server::new()
        .add_listener(Listener::new(incoming))
        .register_service(nri_ttrpc::create_plugin(Arc::new(service))))
}

async fn register(client: &RuntimeClient, context: &RuntimeContext) -> ttrpc::Result<()> {
    let request = api::RegisterPluginRequest {
        plugin_name: context.plugin_name.clone(),
        plugin_idx: context.plugin_index.clone(),
        NRI_version: NRI_VERSION.to_owned(),
        ..Default::default()
    };
    client
        .register_plugin(ttrpc::context::Context::default(), &request)
        .await
        .map(drop)
}
