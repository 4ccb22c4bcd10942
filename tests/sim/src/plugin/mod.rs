//! The other side: a small NRI plugin, to be run in a process of its own or inside a test.
//!
//! It does as NRI's Go stub does: connect, register, take the configuration, be synchronised, answer
//! hooks. And it does what plugins should not, when told so, see [`Behaviour`].

mod command;
mod record;
mod service;

pub use command::{Command, CommandError};
pub use record::{Record, Seen, Validated};

use crate::mux::Mux;
use crate::peer::serve;
use nri_lease_proto::nri::nri as api;
use nri_lease_proto::nri::nri_ttrpc as rpc;
use record::Recorder;
use service::PluginService;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};
use ttrpc::asynchronous::transport::Socket;
use ttrpc::asynchronous::{Client, Server};

/// Longer than the runtime's own registration timeout (5 s), which a silent client in front of us
/// can use up, several times over.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(30);

/// What a plugin does in a hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Behaviour {
    /// Answers at once.
    #[default]
    Answer,
    /// Answers after so long.
    Delay(Duration),
    /// Never answers.
    Hang,
    /// Answers with an error: the runtime rejects the request.
    Refuse(String),
    /// The process exits with this code, without an answer.
    Exit(i32),
    /// The connection is closed without an answer; the process lives on.
    Disconnect,
}

/// The mask of all events that every NRI version knows: not validation.
pub const COMMON_EVENTS: i32 = (1 << 11) - 1;

/// How a simulated plugin behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// Event mask as in Configure's answer. 0 is everything the runtime knows, which makes the
    /// plugin a validator, too. [`COMMON_EVENTS`] by default.
    pub events: i32,
    pub in_configure: Behaviour,
    pub in_synchronize: Behaviour,
    pub in_run_pod_sandbox: Behaviour,
    pub in_create_container: Behaviour,
    /// In ValidateContainerAdjustment: `Refuse` is an answer with `reject` set.
    pub in_validate: Behaviour,
    /// CDI devices that it adds to every container it sees created.
    pub cdi_devices: Vec<String>,
    /// Answers UNIMPLEMENTED to the RPCs that NRI 0.12 added, as plugins built with older ones do.
    pub state_change_only: bool,
    /// For [`run`]: connect again so long after the connection ended, instead of exiting as
    /// plugins made with NRI's stub do.
    pub reconnect: Option<Duration>,
}

impl Default for Options {
    /// A plugin that takes part in everything and does it right.
    fn default() -> Self {
        Options {
            events: COMMON_EVENTS,
            in_configure: Behaviour::Answer,
            in_synchronize: Behaviour::Answer,
            in_run_pod_sandbox: Behaviour::Answer,
            in_create_container: Behaviour::Answer,
            in_validate: Behaviour::Answer,
            cdi_devices: Vec::new(),
            state_change_only: false,
            reconnect: None,
        }
    }
}

impl Options {
    /// A plugin that validates, where the runtime can validate, beside everything else.
    pub fn validator() -> Self {
        Options {
            events: 0,
            ..Options::default()
        }
    }
}

/// The event mask for these events.
pub fn event_mask(events: impl IntoIterator<Item = api::Event>) -> i32 {
    events
        .into_iter()
        .map(|event| 1 << (event as i32 - 1))
        .fold(0, |mask, bit| mask | bit)
}

/// A connected plugin. Dropping it closes the connection.
pub struct Plugin {
    mux: Arc<Mux>,
    recorder: Arc<Recorder>,
    client: rpc::RuntimeClient,
    /// Serves until it is dropped. In a mutex because it is not Sync.
    _server: Mutex<Server>,
}

impl Plugin {
    /// Connects and registers; returns when the runtime has answered, before Synchronize.
    pub async fn connect(
        socket: &Path,
        name: &str,
        index: &str,
        options: Options,
    ) -> io::Result<Plugin> {
        let stream = UnixStream::connect(socket).await?;
        Plugin::connect_over(stream, name, index, options).await
    }

    /// Registers on a connection that is already there, as a plugin does that the runtime launched.
    pub async fn connect_over(
        stream: UnixStream,
        name: &str,
        index: &str,
        options: Options,
    ) -> io::Result<Plugin> {
        Plugin::start(stream, name, index, options, Arc::default()).await
    }

    async fn start(
        stream: UnixStream,
        name: &str,
        index: &str,
        options: Options,
        recorder: Arc<Recorder>,
    ) -> io::Result<Plugin> {
        let (mux, connections) = Mux::start(stream);
        let mux = Arc::new(mux);
        let service = PluginService::new(options, recorder.clone(), mux.clone());
        let server = serve(
            connections.plugin_service,
            rpc::create_plugin(Arc::new(service)),
        )
        .await;
        let client = rpc::RuntimeClient::new(Client::new(Socket::new(connections.runtime_service)));
        let plugin = Plugin {
            mux,
            recorder,
            client,
            _server: Mutex::new(server),
        };
        plugin.register(name, index).await?;
        Ok(plugin)
    }

    async fn register(&self, name: &str, index: &str) -> io::Result<()> {
        let mut request = api::RegisterPluginRequest::new();
        request.plugin_name = name.into();
        request.plugin_idx = index.into();
        request.NRI_version = "v0.12.0".into();
        let context = ttrpc::context::with_duration(REGISTER_TIMEOUT);
        match self.client.register_plugin(context, &request).await {
            Ok(_) => Ok(()),
            Err(error) => Err(io::Error::other(format!("registering {name:?}: {error}"))),
        }
    }

    /// A copy of what it has seen.
    pub fn record(&self) -> Record {
        self.recorder.copy()
    }

    /// Waits until what it has seen satisfies `wanted`; false when that takes longer than `limit`.
    pub async fn wait_until(&self, limit: Duration, wanted: impl Fn(&Record) -> bool) -> bool {
        self.recorder.wait_until(limit, wanted).await
    }

    /// Waits until the runtime has synchronised it.
    pub async fn wait_synchronized(&self, limit: Duration) -> bool {
        self.wait_until(limit, |record| record.synchronized > 0)
            .await
    }

    /// Asks the runtime to update no containers, which well-behaved plugins do not do in a hook.
    pub async fn update_containers(&self, limit: Duration) -> ttrpc::Result<()> {
        let context = ttrpc::context::with_duration(limit);
        let request = api::UpdateContainersRequest::new();
        let answer = self.client.update_containers(context, &request).await;
        answer.map(drop)
    }

    /// Writes bytes between two frames, whatever they are.
    pub async fn write_raw(&self, bytes: Vec<u8>) -> io::Result<()> {
        self.mux.write_raw(bytes).await
    }

    /// Waits until the connection has ended, and says why.
    pub async fn closed(&self) -> String {
        self.mux.ended().await
    }

    /// Closes the connection; on return it is closed.
    pub async fn close(self) {
        self.mux.close().await;
    }
}

/// A whole plugin process: connects, serves until the connection ends, connects again if told to.
/// SIGTERM and SIGINT end it with success. Prints one line per step on stdout:
/// `registered`, `synchronized PODS CONTAINERS`, `RPC NAMESPACE/POD [CONTAINER]`, `closed REASON`.
pub async fn run(socket: &Path, name: &str, index: &str, options: Options) -> ExitCode {
    let signals = signal(SignalKind::terminate()).and_then(|terminate| {
        let interrupt = signal(SignalKind::interrupt())?;
        Ok((terminate, interrupt))
    });
    let (mut terminate, mut interrupt) = match signals {
        Ok(signals) => signals,
        Err(error) => {
            say(&format!("cannot wait for signals: {error}"));
            return ExitCode::FAILURE;
        }
    };
    tokio::select! {
        code = serve_again_and_again(socket, name, index, options) => code,
        _ = terminate.recv() => ExitCode::SUCCESS,
        _ = interrupt.recv() => ExitCode::SUCCESS,
    }
}

async fn serve_again_and_again(
    socket: &Path,
    name: &str,
    index: &str,
    options: Options,
) -> ExitCode {
    loop {
        match serve_once(socket, name, index, options.clone()).await {
            Ok(reason) => say(&format!("closed {reason}")),
            Err(error) => say(&format!("not connected: {error}")),
        }
        match options.reconnect {
            Some(pause) => tokio::time::sleep(pause).await,
            None => return ExitCode::FAILURE,
        }
    }
}

/// Serves until the connection ends, and says why it did.
async fn serve_once(
    socket: &Path,
    name: &str,
    index: &str,
    options: Options,
) -> io::Result<String> {
    let stream = UnixStream::connect(socket).await?;
    let recorder = Arc::new(Recorder::default());
    recorder.tell(say);
    let plugin = Plugin::start(stream, name, index, options, recorder).await?;
    say("registered");
    Ok(plugin.closed().await)
}

/// Prints a line at once, also into a pipe. Nobody listening is no reason to stop.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}
