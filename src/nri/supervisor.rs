//! Keeps a session with one runtime: waits for its socket to appear, connects the moment it
//! accepts, and starts again when the session ends.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::events::Generation;
use super::session::{self, End};
use super::status::RuntimeStatus;
use crate::enforce::hooks::Hooks;
use crate::pollable::{Pollable, watched};
use crate::presence::{OwnFence, RuntimeId, Tracker};

/// Pause between attempts while nothing happens in the socket's directory; grows to the maximum.
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// A new socket file is bound first and listened on microseconds later: this long, attempts follow
/// each other without a pause.
const EAGER: Duration = Duration::from_millis(5);

/// What a session needs.
pub struct RuntimeContext {
    pub status: Arc<RuntimeStatus>,
    pub plugin_name: String,
    pub plugin_index: String,
    pub hooks: Arc<Hooks>,
    pub tracker: Tracker,
    /// Called when a synchronised session has ended.
    pub lost: Box<dyn Fn(RuntimeId) + Send + Sync>,
}

/// Never returns.
pub async fn run(context: RuntimeContext) {
    let socket = context.status.socket.clone();
    let mut fallback = Generation::WithValidation;
    let mut backoff = BACKOFF_MIN;
    let mut is_new = false;
    loop {
        let (stream, fence) = connect(&context, &mut backoff, is_new).await;
        is_new = false;
        context
            .status
            .set_disconnected("connected; waiting for the runtime to synchronise us".to_owned());
        let end = session::run(&context, stream, fallback, fence).await;
        let wants_pause = matches!(end, End::BeforeSync(_));
        let detail = match end {
            End::AfterSync(detail) => {
                context.tracker.runtime_lost(context.status.id);
                (context.lost)(context.status.id);
                backoff = BACKOFF_MIN;
                info!(socket = %socket.display(), detail, "session ended; connecting again");
                detail
            }
            End::EventsRefused { tried } => {
                fallback = match tried {
                    Generation::WithValidation => Generation::WithoutValidation,
                    Generation::WithoutValidation => Generation::WithValidation,
                };
                info!(socket = %socket.display(), ?tried, next = ?fallback, "the runtime refused our events; trying the other set");
                "the runtime refused our events".to_owned()
            }
            End::BeforeSync(detail) => {
                warn!(socket = %socket.display(), detail, "not synchronised; trying again");
                detail
            }
        };
        context.status.set_disconnected(detail);
        if wants_pause {
            // A runtime that starts meanwhile is not kept waiting.
            match SocketWatch::new(&socket) {
                Ok(watch) => tokio::select! {
                    () = watch.changed() => {
                        backoff = BACKOFF_MIN;
                        is_new = true;
                    }
                    () = pause(&mut backoff) => {}
                },
                Err(_) => pause(&mut backoff).await,
            }
        }
    }
}

/// Connects as soon as the runtime accepts. The fence is taken before: what it binds was accepted
/// before our own connection, however long we had to wait for it.
async fn connect(
    context: &RuntimeContext,
    backoff: &mut Duration,
    is_new: bool,
) -> (UnixStream, OwnFence) {
    let socket = &context.status.socket;
    // Its file has appeared just now: it may not listen yet.
    if is_new && let Some(connected) = connect_eagerly(context).await {
        return connected;
    }
    loop {
        let fence = context.tracker.before_own_connect(context.status.id).await;
        // Before the attempt, so that nothing is missed between the two.
        let watch = SocketWatch::new(socket);
        let error = match UnixStream::connect(socket).await {
            Ok(stream) => {
                debug!(socket = %socket.display(), "connected");
                return (stream, fence);
            }
            Err(error) => error,
        };
        context
            .status
            .set_disconnected(format!("cannot connect to {}: {error}", socket.display()));
        match watch {
            Ok(watch) => tokio::select! {
                () = watch.changed() => {
                    *backoff = BACKOFF_MIN;
                    if let Some(connected) = connect_eagerly(context).await {
                        return connected;
                    }
                }
                () = pause(backoff) => {}
            },
            Err(error) => {
                debug!(%error, "cannot watch the socket's directory");
                pause(backoff).await;
            }
        }
    }
}

/// Between bind and listen of a new socket, connecting is refused: yields instead of sleeping,
/// whose shortest nap is a millisecond.
async fn connect_eagerly(context: &RuntimeContext) -> Option<(UnixStream, OwnFence)> {
    let give_up = Instant::now() + EAGER;
    while Instant::now() < give_up {
        let fence = context.tracker.before_own_connect(context.status.id).await;
        match UnixStream::connect(&context.status.socket).await {
            Ok(stream) => {
                debug!(socket = %context.status.socket.display(), "connected at once");
                return Some((stream, fence));
            }
            Err(_) => tokio::task::yield_now().await,
        }
    }
    None
}

async fn pause(backoff: &mut Duration) {
    let jitter = backoff.mul_f64(0.75 + fastrand::f64() * 0.5);
    *backoff = (*backoff * 2).min(BACKOFF_MAX);
    tokio::time::sleep(jitter).await;
}

/// An inotify watch on the nearest directory that exists on the way to a path.
struct SocketWatch {
    inotify: AsyncFd<Pollable<Inotify>>,
    /// The socket's name, when its own directory is watched: others come and go there, too.
    name: Option<OsString>,
}

impl SocketWatch {
    fn new(socket: &Path) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        let mut directory: PathBuf = socket.parent().unwrap_or(Path::new("/")).to_owned();
        while let Err(error) = inotify.add_watch(&directory, flags) {
            if !directory.pop() {
                return Err(error.into());
            }
        }
        let name = match socket.parent() == Some(&directory) {
            true => socket.file_name().map(ToOwned::to_owned),
            false => None,
        };
        Ok(Self {
            inotify: watched(inotify)?,
            name,
        })
    }

    async fn changed(&self) {
        loop {
            let Ok(mut guard) = self.inotify.readable().await else {
                return std::future::pending().await;
            };
            match guard.try_io(|inotify| inotify.get_ref().0.read_events().map_err(Into::into)) {
                Ok(Ok(events)) => {
                    // Without a name: the directory itself has gone, or more happened than fits.
                    let is_ours = |event: &InotifyEvent| match (&event.name, &self.name) {
                        (Some(name), Some(ours)) => name == ours,
                        _ => true,
                    };
                    if events.iter().any(is_ours) {
                        return;
                    }
                }
                Ok(Err(_)) => return,
                Err(_would_block) => {}
            }
        }
    }
}
