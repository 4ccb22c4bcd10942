//! Accepts on one of the daemon's sockets and gives every connection a ttrpc server of its own,
//! bound to the peer that the kernel named. Knows connections, not services.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{debug, info, warn};
use ttrpc::r#async::{Server, Service};
use ttrpc::asynchronous::transport::Listener;

use super::guard::{Activity, Guarded};
use super::peer::Peer;

/// Connections served at once on each socket; a further one takes the place of the one that has
/// been idle longest, or is closed when none is idle.
pub const MAX_CONNECTIONS: usize = 256;
/// After a failed accept (no descriptors left), before the next.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The caller, or the sentence that says why it cannot be served.
pub type Caller = Result<Arc<Peer>, String>;

/// Binds `path` with `mode`, replacing the socket of a daemon that ended.
///
/// # Errors
/// The path is no socket, or another process answers on it.
pub fn bind(path: &Path, mode: u32, group: Option<nix::unistd::Gid>) -> io::Result<UnixListener> {
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{} exists and is not a socket; remove it", path.display()),
            ));
        }
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("another process serves {}", path.display()),
            ));
        }
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    if group.is_some() {
        nix::unistd::chown(path, None, group)?;
    }
    Ok(listener)
}

/// Serves `listener` until the task is dropped. `services` makes the services of one connection.
pub async fn serve<F>(name: &'static str, listener: UnixListener, services: F)
where
    F: Fn(Caller) -> HashMap<String, Service>,
{
    let connections = Connections::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(socket = name, %error, "cannot accept; trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(slot) = connections.admit() else {
            warn!(
                socket = name,
                limit = MAX_CONNECTIONS,
                "too many busy connections; closing a new one"
            );
            continue;
        };
        let caller = Peer::of(&stream).map(Arc::new);
        match &caller {
            Ok(peer) => debug!(
                socket = name,
                pid = peer.facts.pid,
                uid = peer.uid,
                "accepted"
            ),
            Err(reason) => info!(
                socket = name,
                reason, "accepted a caller that will be refused"
            ),
        }
        serve_one(stream, slot, services(caller)).await;
    }
}

async fn serve_one(stream: UnixStream, slot: Slot, services: HashMap<String, Service>) {
    let (open, closed) = oneshot::channel::<()>();
    let guarded = Guarded::new(
        stream,
        slot.activity.clone(),
        slot.connections.epoch,
        (open, slot),
    );
    // ttrpc's server panics at shutdown when its listener has ended, and takes an ended one for a
    // reason to stop; this one never yields a second connection and never ends.
    let incoming = futures::stream::once(async move { Ok(guarded) })
        .chain(futures::stream::pending::<io::Result<Guarded>>());
    let mut server = Server::new()
        .add_listener(Listener::new(incoming))
        .register_service(services);
    if let Err(error) = server.start().await {
        warn!(%error, "cannot serve a connection");
        return;
    }
    tokio::spawn(async move {
        // `open` is dropped with the connection.
        let _ = closed.await;
        drop(server);
    });
}

/// The connections of one socket.
#[derive(Clone)]
struct Connections {
    open: Arc<Mutex<Vec<Arc<Activity>>>>,
    epoch: Instant,
}

impl Default for Connections {
    fn default() -> Self {
        Self {
            open: Arc::default(),
            epoch: Instant::now(),
        }
    }
}

impl Connections {
    /// Room for one more connection, made by closing the longest idle one if need be.
    fn admit(&self) -> Option<Slot> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() >= MAX_CONNECTIONS {
            let oldest = open
                .iter()
                .enumerate()
                .filter(|(_, activity)| activity.is_idle())
                .min_by_key(|(_, activity)| activity.last_used())?
                .0;
            open.swap_remove(oldest).evict();
        }
        let activity = Arc::new(Activity::default());
        open.push(activity.clone());
        Some(Slot {
            activity,
            connections: self.clone(),
        })
    }
}

struct Slot {
    activity: Arc<Activity>,
    connections: Connections,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = self
            .connections
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        open.retain(|activity| !Arc::ptr_eq(activity, &self.activity));
    }
}

/// Where the daemon's two sockets are.
#[derive(Clone, Debug)]
pub struct SocketPaths {
    /// For plugins.
    pub registry: PathBuf,
    /// For admins.
    pub admin: PathBuf,
}

impl SocketPaths {
    /// In `run_dir`, which is mounted into plugin pods as a directory.
    pub fn in_dir(run_dir: &Path) -> Self {
        Self {
            registry: run_dir.join("registry.sock"),
            admin: run_dir.join("admin.sock"),
        }
    }
}
