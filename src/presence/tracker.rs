//! The handle to the tracker: what the rest of the daemon may ask. Every call is a message to the
//! tracker's thread ([`super::actor`]) or a read of the published view; none waits for a lock.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::sys::stat::fstat;
use serde::{Deserialize, Serialize};
use tokio::sync::{broadcast, oneshot};

use super::actor::{self, Command};
use super::mailbox::Mailbox;
use super::owner;
use super::proc::ProcessKey;
use super::unix_diag::VfsId;
use super::view::View;

/// Names one NRI socket of this daemon's configuration; the daemon numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuntimeId(pub u32);

/// A process whose connections are watched, because it holds a live lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderSpec {
    pub process: ProcessKey,
    /// The inode of the plugin's own connection, if the registration named one. The tracker
    /// watches all connections of the process either way; the inode is for `View::check`.
    pub connection_inode: Option<u64>,
}

/// The moment before the daemon connects to a runtime by itself: whatever was seen accepted by
/// then is bound when that connection is synchronised.
#[derive(Clone, Copy, Debug)]
#[must_use = "pass it to own_synchronized"]
pub struct OwnFence {
    pub(super) opened: u64,
}

/// What the tracker needs to know of the daemon's own connection to a runtime.
#[derive(Clone, Copy, Debug)]
pub struct OwnSocket {
    pub inode: u64,
    /// The process that listens, from `SO_PEERCRED`; `None` when it is not visible from here.
    pub runtime_pid: Option<u32>,
}

impl OwnSocket {
    /// Reads both facts from the connected socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let stat = fstat(socket.as_fd())?;
        let credentials = getsockopt(&socket, PeerCredentials)?;
        Ok(Self {
            inode: stat.st_ino,
            runtime_pid: u32::try_from(credentials.pid())
                .ok()
                .filter(|pid| *pid != 0),
        })
    }
}

/// How [`Tracker::settle`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Every NRI connection found is bound, and there is at least one.
    Bound,
    /// The process has no connection to a known runtime.
    NothingToBind,
    /// A connection was found, but the runtime had not synchronised it by the deadline.
    Deadline,
    /// The process is gone.
    ProcessGone,
    /// The kernel cannot be asked; see [`Tracker::kernel_evidence`].
    NoEvidence,
}

/// What changed; sent once per change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The process became present for the runtime.
    Connected {
        process: ProcessKey,
        runtime: RuntimeId,
    },
    /// The process was present for the runtime and no longer is.
    Disconnected {
        process: ProcessKey,
        runtime: RuntimeId,
    },
    /// The process has ended. Its `Disconnected` events come first.
    ProcessGone { process: ProcessKey },
}

/// A bound connection as it is kept over a restart of the daemon. It is valid again when the
/// kernel confirms socket, cookie and listener on the same boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindingRecord {
    pub boot_id: String,
    pub process: ProcessKey,
    /// The runtime's socket path as configured: runtime ids are not stable over restarts.
    pub runtime_socket: PathBuf,
    pub inode: u64,
    pub cookie: u64,
    pub netns_inode: u64,
    /// The listening socket's file in the kernel's encoding; `None` for a launched plugin.
    pub listener: Option<VfsId>,
    /// The runtime had closed it and no newer connection had taken its place.
    pub broken: bool,
    /// CLOCK_BOOTTIME nanoseconds when it was bound; 0 in records that do not say.
    #[serde(default)]
    pub bound_boottime_ns: u64,
}

/// Keeps track of the holders' connections. Clones share one tracker; its thread ends with the
/// last of them.
#[derive(Clone)]
pub struct Tracker {
    mailbox: Mailbox,
    shared: Arc<actor::Shared>,
}

impl Tracker {
    /// Starts the tracker's thread.
    ///
    /// # Errors
    /// When the thread or its wake-up pipe cannot be made. A kernel without unix_diag is no
    /// error: see [`Tracker::kernel_evidence`].
    pub fn start() -> io::Result<Self> {
        let (mailbox, shared) = actor::start()?;
        Ok(Self { mailbox, shared })
    }

    /// `Err` says why the kernel cannot be asked about unix connections here. Then `View::check`
    /// answers `Unknown` for all that live, and the runtime's list has to decide alone.
    pub fn kernel_evidence(&self) -> Result<(), String> {
        self.shared.evidence.clone()
    }

    /// A runtime's NRI socket is known (it need not exist yet).
    pub fn runtime_added(&self, runtime: RuntimeId, socket_path: PathBuf) {
        self.mailbox.send(Command::RuntimeAdded {
            runtime,
            socket_path,
        });
    }

    /// Call right before the daemon connects to the runtime: marks the moment, so that what was
    /// seen accepted by then can be told from what came later. Waits for nothing: the daemon
    /// wants to be connected within 1 ms, and what no scan has seen yet costs one fence later.
    /// Take a new one for every attempt: it is only worth something if it is recent.
    pub async fn before_own_connect(&self, _runtime: RuntimeId) -> OwnFence {
        OwnFence {
            opened: self.shared.tick(),
        }
    }

    /// The daemon's own connection is synchronised: a fence for all that was seen accepted at
    /// `fence`, at no cost to the runtime.
    pub fn own_synchronized(&self, runtime: RuntimeId, fence: OwnFence, own: OwnSocket) {
        self.mailbox.send(Command::OwnSynchronized {
            runtime,
            fence,
            own,
        });
    }

    /// The daemon's own connection has ended: every binding to this runtime is verified at once.
    pub fn runtime_lost(&self, runtime: RuntimeId) {
        self.mailbox.send(Command::RuntimeLost { runtime });
    }

    /// The holders of all live leases. Processes not named are forgotten, unless a
    /// [`Tracker::settle`] for them was asked less than 10 s ago.
    pub fn set_holders(&self, holders: Vec<HolderSpec>) {
        self.mailbox.send(Command::SetHolders { holders });
    }

    /// Tracks the process, scans it now, and fences what it finds. Ends when everything found is
    /// bound, when there is nothing to bind, or after `deadline`.
    pub async fn settle(&self, process: ProcessKey, deadline: Duration) -> Settled {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(Command::Settle {
            process,
            deadline,
            reply,
        });
        answer.await.unwrap_or(Settled::NoEvidence)
    }

    /// Scans the process now (on Renew) and fences what is new; ends when the scan is done, not
    /// when the fence is.
    pub async fn rescan_now(&self, process: ProcessKey) {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(Command::Rescan { process, reply });
        let _ = answer.await;
    }

    /// A validation has listed the plugin of this process: its broken connections to the runtime
    /// no longer count against it.
    pub fn forget_broken(&self, process: ProcessKey, runtime: RuntimeId) {
        self.mailbox
            .send(Command::ForgetBroken { process, runtime });
    }

    /// The process that owns an NRI connection: `pid` itself, else a descendant. `None` when
    /// neither has one. Reads /proc, some milliseconds on a busy node: not for hooks, and to be
    /// called through `spawn_blocking`.
    pub fn find_connection_owner(&self, pid: u32) -> Option<ProcessKey> {
        owner::find_connection_owner(&self.shared.view.load_full(), pid)
    }

    /// The published view; lock-free.
    pub fn view(&self) -> Arc<View> {
        self.shared.view.load_full()
    }

    /// The cell behind [`Tracker::view`], for a thread that wants to load it itself.
    pub fn view_cell(&self) -> Arc<ArcSwap<View>> {
        self.shared.view.clone()
    }

    /// What changes from now on. A receiver that falls 1,024 events behind misses the oldest.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.shared.events.subscribe()
    }

    /// The bindings as they are now, for the store.
    pub async fn export(&self) -> Vec<BindingRecord> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(Command::Export { reply });
        answer.await.unwrap_or_default()
    }

    /// Bindings from before a restart. Call after `runtime_added` and before the first
    /// `set_holders`; each counts once the kernel confirms it.
    pub fn import(&self, records: Vec<BindingRecord>) {
        self.mailbox.send(Command::Import { records });
    }

    /// Fences opened so far by the tracker (not those inside hooks): a metric.
    pub fn fences_opened(&self) -> u64 {
        self.shared
            .fences_opened
            .load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Network namespaces other than the daemon's own that are open for holders: a metric.
    pub fn namespaces_open(&self) -> usize {
        let view = self.shared.view.load();
        view.netns.as_ref().map_or(0, |netns| netns.open_count())
    }
}
