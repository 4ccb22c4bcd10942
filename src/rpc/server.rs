//! Accepts on one of the daemon's sockets and gives every connection a ttrpc server of its own,
//! bound to the peer that the kernel named. Knows connections, not services.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
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

/// Connections served at once on each socket; a further one takes the place of another, see
/// [`Connections::admit`], or is closed.
pub const MAX_CONNECTIONS: usize = 256;
/// After a failed accept (no descriptors left), before the next.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often it is checked that the socket is still where it was made.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The caller, or the sentence that says why it cannot be served.
pub type Caller = Result<Arc<Peer>, String>;

/// A listening socket, and where it has to stay.
pub struct Endpoint {
    listener: UnixListener,
    /// None: systemd's, who sees to it.
    place: Option<Place>,
}

struct Place {
    path: PathBuf,
    mode: u32,
    group: Option<nix::unistd::Gid>,
    /// Device and inode of the socket's file.
    file: (u64, u64),
}

impl Endpoint {
    /// One that is handed over.
    pub fn handed_over(listener: UnixListener) -> Self {
        Self {
            listener,
            place: None,
        }
    }

    /// Binds `path`, as [`bind`] says.
    ///
    /// # Errors
    /// As [`bind`].
    pub fn bind(path: &Path, mode: u32, group: Option<nix::unistd::Gid>) -> io::Result<Self> {
        let listener = bind(path, mode, group)?;
        let place = Place {
            path: path.to_owned(),
            mode,
            group,
            file: file_of(path)?,
        };
        Ok(Self {
            listener,
            place: Some(place),
        })
    }

    /// Somebody may have removed the socket or its directory, and nobody could connect any more.
    fn stay(&mut self, name: &str) {
        let Some(place) = &self.place else {
            return;
        };
        if file_of(&place.path).is_ok_and(|file| file == place.file) {
            return;
        }
        if let Some(directory) = place.path.parent() {
            // What is wrong with it shows when binding.
            let _ = std::fs::create_dir_all(directory);
        }
        match Self::bind(&place.path, place.mode, place.group) {
            Ok(endpoint) => {
                warn!(socket = name, path = %place.path.display(), "the socket was removed; made again");
                *self = endpoint;
            }
            Err(error) => {
                warn!(socket = name, %error, "the socket was removed and cannot be made again; trying again");
            }
        }
    }
}

fn file_of(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

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

/// Serves `endpoint` until the task is dropped. `services` makes the services of one connection.
pub async fn serve<F>(name: &'static str, mut endpoint: Endpoint, services: F)
where
    F: Fn(Caller) -> HashMap<String, Service>,
{
    let connections = Connections::default();
    let mut look = tokio::time::interval(LOOK_EVERY);
    loop {
        let accepted = tokio::select! {
            accepted = endpoint.listener.accept() => accepted,
            _ = look.tick() => {
                endpoint.stay(name);
                continue;
            }
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(socket = name, %error, "cannot accept; trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let uid = stream.peer_cred().map_or(u32::MAX, |peer| peer.uid());
        let Some(slot) = connections.admit(uid) else {
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

/// A connection that is served.
struct Open {
    uid: u32,
    activity: Arc<Activity>,
}

/// The connections of one socket.
#[derive(Clone)]
struct Connections {
    open: Arc<Mutex<Vec<Open>>>,
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
    /// Room for one more connection of `uid`, made if need be by closing one of the uid that has the
    /// most: the longest idle, or for another uid the longest unused. So nobody can fill the socket
    /// for others.
    fn admit(&self, uid: u32) -> Option<Slot> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() >= MAX_CONNECTIONS {
            let given_up = Self::given_up(&open, uid)?;
            open.swap_remove(given_up).activity.evict();
        }
        let activity = Arc::new(Activity::default());
        open.push(Open {
            uid,
            activity: activity.clone(),
        });
        Some(Slot {
            activity,
            connections: self.clone(),
        })
    }

    /// Which one goes: always one of the uid that has the most.
    fn given_up(open: &[Open], newcomer: u32) -> Option<usize> {
        let mut counts: HashMap<u32, usize> = HashMap::new();
        for one in open {
            *counts.entry(one.uid).or_default() += 1;
        }
        let (greediest, most) = counts.iter().max_by_key(|(_, count)| **count)?;
        let theirs = || {
            let open = open.iter().enumerate();
            open.filter(|(_, one)| one.uid == *greediest)
        };
        let idle = theirs().filter(|(_, one)| one.activity.is_idle());
        if let Some((at, _)) = idle.min_by_key(|(_, one)| one.activity.last_used()) {
            return Some(at);
        }
        if counts.get(&newcomer).copied().unwrap_or(0) >= *most {
            return None;
        }
        Some(theirs().min_by_key(|(_, one)| one.activity.last_used())?.0)
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
        open.retain(|one| !Arc::ptr_eq(&one.activity, &self.activity));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_that_was_removed_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        std::fs::create_dir(&run).unwrap();
        let path = run.join("registry.sock");
        let mut endpoint = Endpoint::bind(&path, 0o660, None).unwrap();
        endpoint.stay("test");
        let before = file_of(&path).unwrap();
        endpoint.stay("test");
        assert_eq!(file_of(&path).unwrap(), before, "nothing to do");
        std::fs::remove_dir_all(&run).unwrap();
        endpoint.stay("test");
        let _client = UnixStream::connect(&path).await.unwrap();
        endpoint.listener.accept().await.unwrap();
    }

    #[test]
    fn one_uid_cannot_fill_the_socket_for_others() {
        let connections = Connections {
            open: Arc::default(),
            epoch: Instant::now(),
        };
        let busy = |slot: &Slot| slot.activity.pretend_busy();
        let greedy: Vec<Slot> = (0..MAX_CONNECTIONS)
            .map(|_| connections.admit(1000).unwrap())
            .inspect(busy)
            .collect();
        assert!(connections.admit(1000).is_none());
        let other = connections.admit(0);
        assert!(other.is_some());
        assert!(connections.admit(1000).is_none());
        drop(greedy);
    }
}
