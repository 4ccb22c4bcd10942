//! The runtime: its socket, its accept loop, its list of plugins
//! (containerd/nri v0.12.0 `pkg/adaptation/adaptation.go`).

use crate::fault::{Fault, Pending};
use crate::journal::{Entry, Journal, What};
use crate::options::{Options, SyncBlock};
use crate::peer::{NotStarted, Peer};
use crate::world::{PodId, World};
use nri_lease_proto::nri::nri::Event;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::{RwLock, RwLockWriteGuard};
use tokio::task::JoinHandle;

/// Refused connections that their plugin keeps open are remembered up to this number; the oldest
/// is closed for a new one.
const MAX_LEFT_OPEN: usize = 64;

/// A plugin in the runtime's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginInfo {
    /// Base name, without the index.
    pub name: String,
    pub index: String,
    /// As the kernel says of the socket's other end.
    pub pid: i32,
    /// Events it is called for.
    pub events: i32,
    /// Its connection has ended, but no request has cleaned the list since.
    pub closed: bool,
}

/// A simulated NRI runtime. Dropping it is a crash: connections end, the socket file stays.
pub struct Runtime {
    pub(crate) node: Arc<Node>,
    accept_loop: JoinHandle<()>,
}

/// What the accept loop and the requests share.
pub(crate) struct Node {
    pub options: Options,
    socket: PathBuf,
    pub journal: Arc<Journal>,
    /// Held through a whole chain of hooks, through Synchronize, and to enter the list.
    pub requests: Arc<tokio::sync::Mutex<()>>,
    /// Read by requests, written by a plugin's synchronisation (`BlockPluginSync`). It is fair:
    /// requests that come after a waiting plugin wait behind it, as with Go's RWMutex.
    pub sync_block: RwLock<()>,
    list: Mutex<List>,
    pub world: Mutex<World>,
    /// Sandboxes run since this runtime started. containerd forgets at a restart which sandboxes
    /// NRI was told of, and sends no Stop and no Remove for older ones (`internal/nri` keeps that
    /// in memory and relearns only containers).
    pub told: Mutex<HashSet<PodId>>,
    pending: Mutex<Pending>,
    /// Every connection that is not known to be closed.
    connections: Mutex<Vec<Arc<Peer>>>,
}

/// Plugins in the order of calls, and those of them that validate. A plugin that ends while idle
/// stays in both until a request or another plugin's arrival cleans up.
#[derive(Default)]
pub(crate) struct List {
    pub plugins: Vec<Arc<Peer>>,
    pub validators: Vec<Arc<Peer>>,
}

impl List {
    /// `removeClosedPlugins`.
    pub fn remove_closed(&mut self) {
        self.plugins.retain(|plugin| !plugin.mux.is_closed());
        self.validators = self.plugins.iter().filter(is_validator).cloned().collect();
    }

    fn add(&mut self, plugin: Arc<Peer>) {
        self.plugins.push(plugin);
        self.remove_closed();
        self.plugins.sort_by_key(|plugin| plugin.index());
        self.validators.sort_by_key(|plugin| plugin.index());
    }
}

fn is_validator(plugin: &&Arc<Peer>) -> bool {
    plugin.is_subscribed(Event::VALIDATE_CONTAINER_ADJUSTMENT)
}

impl Runtime {
    /// Starts on `socket` with an empty node. An old socket file is removed first, as containerd
    /// does, so a runtime can be started again on the same path.
    pub async fn start(socket: &Path, options: Options) -> io::Result<Runtime> {
        Runtime::start_with(socket, options, World::default()).await
    }

    /// Starts with pods and containers that are already there.
    pub async fn start_with(socket: &Path, options: Options, world: World) -> io::Result<Runtime> {
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if let Some(directory) = socket.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let listener = UnixListener::bind(socket)?;
        let node = Arc::new(Node {
            options,
            socket: socket.into(),
            journal: Arc::new(Journal::new()),
            requests: Arc::default(),
            sync_block: RwLock::new(()),
            list: Mutex::default(),
            world: Mutex::new(world),
            told: Mutex::default(),
            pending: Mutex::default(),
            connections: Mutex::default(),
        });
        let accept_loop = tokio::spawn(accept_plugins(node.clone(), listener));
        Ok(Runtime { node, accept_loop })
    }

    /// Stops: closes the listener and every connection, and gives back pods and containers so that
    /// the next start can present them in Synchronize. The socket file goes.
    pub async fn stop(self) -> World {
        // Go unlinks the socket when it closes the listener; a missing file is as good.
        let _ = std::fs::remove_file(&self.node.socket);
        self.crash().await
    }

    /// Ends as after SIGKILL: the same, but the socket file stays behind.
    pub async fn crash(mut self) -> World {
        self.accept_loop.abort();
        // Wait for the abort: after it no new connection appears, and the listener is closed.
        let _ = (&mut self.accept_loop).await;
        let connections = std::mem::take(&mut *lock(&self.node.connections));
        for connection in connections {
            connection.mux.close().await;
        }
        self.world()
    }

    /// The list, in the order of calls.
    pub fn plugins(&self) -> Vec<PluginInfo> {
        self.node
            .list()
            .plugins
            .iter()
            .map(|plugin| PluginInfo {
                name: plugin.name(),
                index: plugin.index(),
                pid: plugin.pid,
                events: plugin.events(),
                closed: plugin.mux.is_closed(),
            })
            .collect()
    }

    /// Waits until a plugin of that base name is in the list and its connection open.
    pub async fn wait_for_plugin(&self, name: &str, limit: Duration) -> Option<PluginInfo> {
        let open = |plugin: &PluginInfo| plugin.name == name && !plugin.closed;
        self.node
            .journal
            .wait_for(limit, || self.plugins().into_iter().find(open))
            .await
    }

    /// Waits until no open connection of that base name is in the list.
    pub async fn wait_for_plugin_gone(&self, name: &str, limit: Duration) -> bool {
        let open = |plugin: &PluginInfo| plugin.name == name && !plugin.closed;
        let gone = || (!self.plugins().iter().any(open)).then_some(());
        self.node.journal.wait_for(limit, gone).await.is_some()
    }

    /// Commits a fault. Errors when it needs a connected plugin of that name and there is none.
    pub async fn inject(&self, fault: Fault) -> io::Result<()> {
        let Some(fault) = lock(&self.node.pending).keep(fault) else {
            return Ok(());
        };
        let name = fault.plugin();
        let peer = lock(&self.node.connections)
            .iter()
            .rev()
            .find(|peer| peer.name() == name && !peer.mux.is_closed())
            .cloned();
        match peer {
            Some(peer) => crate::fault::commit(&fault, &peer).await,
            None => Err(io::Error::new(
                io::ErrorKind::NotConnected,
                format!("no plugin {name:?} is connected"),
            )),
        }
    }

    /// What happened so far, oldest first.
    pub fn journal(&self) -> Vec<Entry> {
        self.node.journal.entries()
    }

    /// Waits until an entry satisfies `wanted`, those of the past included.
    pub async fn wait_for_entry(
        &self,
        limit: Duration,
        wanted: impl Fn(&Entry) -> bool,
    ) -> Option<Entry> {
        self.node
            .journal
            .wait_for(limit, || self.node.journal.find(&wanted))
            .await
    }

    /// A copy of the pods and containers that exist.
    pub fn world(&self) -> World {
        lock(&self.node.world).clone()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // The loop and its tasks hold the node; connections close when the last peer goes.
        self.accept_loop.abort();
        lock(&self.node.connections).clear();
        *self.node.list() = List::default();
    }
}

impl Node {
    pub fn list(&self) -> MutexGuard<'_, List> {
        lock(&self.list)
    }

    fn remember(self: &Arc<Self>, peer: &Arc<Peer>) {
        lock(&self.connections).push(peer.clone());
        let (node, peer) = (Arc::downgrade(self), Arc::downgrade(peer));
        let ended = peer.upgrade().map(|peer| peer.mux.watch());
        tokio::spawn(async move {
            if let Some(ended) = ended {
                crate::mux::wait_ended(ended).await;
            }
            let (Some(node), Some(peer)) = (node.upgrade(), peer.upgrade()) else {
                return;
            };
            lock(&node.connections).retain(|other| !Arc::ptr_eq(other, &peer));
            node.journal.note(&peer.full_name(), What::Closed);
        });
    }

    /// Closes the oldest of the connections that were refused and left open, when too many are.
    async fn limit_left_open(&self, left_open: &mut Vec<Arc<Peer>>) {
        left_open.retain(|peer| !peer.mux.is_closed());
        if left_open.len() >= MAX_LEFT_OPEN {
            left_open.remove(0).mux.close().await;
        }
    }
}

/// One connection after the other: accept, register, configure, synchronise, enter the list.
async fn accept_plugins(node: Arc<Node>, listener: UnixListener) {
    let mut left_open = Vec::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "stopped accepting plugin connections");
                return;
            }
        };
        let (peer, registered) =
            Peer::connect(stream, &node.options, &node.journal, node.requests.clone()).await;
        node.remember(&peer);
        if let Err(problem) = admit(&node, &peer, registered).await {
            node.journal.note(
                &peer.full_name(),
                What::NotStarted {
                    reason: problem.reason().into(),
                },
            );
            if let NotStarted::LeftOpen(_) = problem {
                node.limit_left_open(&mut left_open).await;
                left_open.push(peer);
            }
        }
    }
}

async fn admit(
    node: &Arc<Node>,
    peer: &Arc<Peer>,
    registered: crate::peer::Registered,
) -> Result<(), NotStarted> {
    peer.wait_registered(registered).await?;
    let faults = lock(&node.pending).take(&peer.name());
    peer.configure(faults.refuse_mask).await?;
    pause(faults.delay_before_synchronize).await;
    let blocked = match node.options.sync_block {
        SyncBlock::Requests => Some(wait_for_requests(node, peer).await),
        SyncBlock::HooksOnly => None,
    };
    synchronize(node, peer, faults.messages).await?;
    pause(faults.delay_before_list_entry).await;
    {
        let _turn = node.requests.lock().await;
        node.list().add(peer.clone());
    }
    drop(blocked);
    node.journal.note(&peer.full_name(), What::Listed);
    Ok(())
}

/// Waits until no request is running; requests that come later wait until the plugin is listed.
async fn wait_for_requests<'a>(node: &'a Node, peer: &Peer) -> RwLockWriteGuard<'a, ()> {
    let mut turn = pin!(node.sync_block.write());
    tokio::select! {
        biased;
        guard = &mut turn => return guard,
        // Its place in the queue is taken by now.
        () = std::future::ready(()) => node.journal.note(&peer.full_name(), What::WaitsForRequests),
    }
    turn.await
}

/// Sleeps, but not for nothing: a sleep of no length still takes up to a millisecond.
pub(crate) async fn pause(length: Duration) {
    if !length.is_zero() {
        tokio::time::sleep(length).await;
    }
}

async fn synchronize(node: &Node, peer: &Peer, messages: usize) -> Result<(), NotStarted> {
    let _turn = node.requests.lock().await;
    let (pods, containers) = lock(&node.world).present();
    peer.synchronize(pods, containers, messages)
        .await
        .map_err(|reason| NotStarted::Closed(format!("failed to synchronize plugin: {reason}")))
}

/// Locks for a few instructions; nothing can panic while one of these is held.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}
