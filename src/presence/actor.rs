//! The tracker's thread: one loop that takes messages, watches processes, and moves connections
//! from accepted to bound.
//!
//! A thread and not a task, because all it does is short blocking calls (/proc, netlink), and
//! because a fence wants looks 0.2 ms apart. It sleeps in one ppoll(2) on its wake-up socket and
//! the pidfds of the holders. What it knows is in this file's structs; how a connection moves on
//! is in [`super::binding`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tokio::sync::{broadcast, oneshot};

use super::binding::{
    self, Connection, ConnectionState, FarEnd, Presence, ProcessBindings, RuntimeIdentity, SocketId,
};
use super::fence::{Fence, FenceError, Passed};
use super::mailbox::{self, Inbox, Mailbox, WeakMailbox};
use super::netns::{Asker, NetnsCache};
use super::proc::{self, ProcError, ProcessKey};
use super::process::WatchedProcess;
use super::scan::{Far, Handle, RuntimeEnd, Scan, is_open, scan};
use super::tracker::{BindingRecord, Event, HolderSpec, OwnFence, OwnSocket, RuntimeId, Settled};
use super::unix_diag::{self, Detail, VfsId};
use super::view::{HookBinding, Unwatched, View, ViewProcess, ViewRuntime};
use super::{sys, unix_diag::DiagError};

/// How often holders without a bound connection are scanned, and how often for 2 s after a
/// runtime has come or gone.
const SWEEP: Duration = Duration::from_millis(250);
const FAST_SWEEP: Duration = Duration::from_millis(20);
const FAST_FOR: Duration = Duration::from_secs(2);
/// How often bound connections are looked at for the sake of events; hooks ask for themselves.
const VERIFY: Duration = Duration::from_secs(1);
/// How often a process is scanned while its registration waits for it.
const SETTLE_SCAN: Duration = Duration::from_millis(5);
/// How long a process is kept that has been settled but is in no lease yet.
const KEEP_SETTLED: Duration = Duration::from_secs(10);
/// A fence waits in the accept queue while the runtime is busy, e.g. with a slow StopContainer.
const FENCE_DEADLINE: Duration = Duration::from_secs(30);
const FENCE_RETRY: Duration = Duration::from_millis(50);
const FENCE_RETRY_MOST: Duration = Duration::from_secs(2);
/// Sockets remembered per process as being no connection to a runtime.
const MAX_FOREIGN: usize = 4096;
/// Binding records taken from the store: 256 leases of 16 holders with two connections each.
const MAX_IMPORTED: usize = 8192;
/// Descendants looked at for the owner of a connection.
const MAX_DESCENDANTS: usize = 4096;

pub(super) enum Command {
    RuntimeAdded {
        runtime: RuntimeId,
        socket_path: PathBuf,
    },
    BeforeOwnConnect {
        runtime: RuntimeId,
        reply: oneshot::Sender<OwnFence>,
    },
    OwnSynchronized {
        runtime: RuntimeId,
        fence: OwnFence,
        own: OwnSocket,
    },
    RuntimeLost {
        runtime: RuntimeId,
    },
    SetHolders {
        holders: Vec<HolderSpec>,
    },
    Settle {
        process: ProcessKey,
        deadline: Duration,
        reply: oneshot::Sender<Settled>,
    },
    Rescan {
        process: ProcessKey,
        reply: oneshot::Sender<()>,
    },
    ForgetBroken {
        process: ProcessKey,
        runtime: RuntimeId,
    },
    Export {
        reply: oneshot::Sender<Vec<BindingRecord>>,
    },
    Import {
        records: Vec<BindingRecord>,
    },
    /// A hook has found a bound connection closed.
    Verify {
        process: ProcessKey,
    },
    /// A hook has fenced a connection by itself.
    HookBound(HookBinding),
}

/// What the handles share with the thread.
pub(super) struct Shared {
    pub evidence: Result<(), String>,
    pub view: Arc<ArcSwap<View>>,
    pub events: broadcast::Sender<Event>,
    pub fences_opened: AtomicU64,
}

struct Runtime {
    socket_path: PathBuf,
    listener: Option<VfsId>,
    /// The process that listens, if it is visible from here.
    process: Option<Arc<WatchedProcess>>,
    fence: Option<OpenFence>,
    /// Failed fences in a row, and when to try again.
    failures: u32,
    retry_at: Instant,
}

struct OpenFence {
    fence: Fence,
    opened: u64,
    next_look: Instant,
}

struct Tracked {
    process: Result<Arc<WatchedProcess>, Unwatched>,
    bindings: Arc<ProcessBindings<Handle>>,
    foreign: Arc<HashSet<u64>>,
    /// What it had when it ended: another process that has it too did not make it.
    had: Vec<SocketId>,
    /// In a live lease, by the last `set_holders`.
    is_holder: bool,
    keep_until: Instant,
    /// Runtimes for which `Connected` was the last event sent.
    present: BTreeSet<RuntimeId>,
    gone_sent: bool,
}

struct Settling {
    process: ProcessKey,
    deadline: Instant,
    next_scan: Instant,
    reply: oneshot::Sender<Settled>,
}

struct Actor {
    inbox: Inbox,
    mailbox: WeakMailbox,
    shared: Arc<Shared>,
    /// `None` where the kernel has no unix_diag; then only processes are watched.
    netns: Option<Arc<NetnsCache>>,
    boot_id: String,
    /// Counts up with every scan and every fence: the order that binding rests on.
    sequence: u64,
    runtimes: BTreeMap<RuntimeId, Runtime>,
    processes: HashMap<ProcessKey, Tracked>,
    settling: Vec<Settling>,
    /// Answered once the view that has the result is published.
    scanned: Vec<oneshot::Sender<()>>,
    imported: Vec<BindingRecord>,
    /// Something came back from there, and its other end is still to be looked up.
    is_restored: bool,
    next_sweep: Instant,
    next_verify: Instant,
    fast_until: Instant,
    is_dirty: bool,
}

pub(super) fn start() -> io::Result<(Mailbox, Arc<Shared>)> {
    let (mailbox, inbox) = mailbox::open()?;
    let netns = unix_diag::probe()
        .map_err(|e| e.to_string())
        .and_then(|()| NetnsCache::new().map_err(|e| e.to_string()));
    let shared = Arc::new(Shared {
        evidence: netns.as_ref().map(|_| ()).map_err(Clone::clone),
        view: Arc::default(),
        events: broadcast::channel(1024).0,
        fences_opened: AtomicU64::new(0),
    });
    let now = Instant::now();
    let mut actor = Actor {
        inbox,
        mailbox: mailbox.downgrade(),
        shared: shared.clone(),
        netns: netns.ok().map(Arc::new),
        boot_id: proc::boot_id()?,
        sequence: 1,
        runtimes: BTreeMap::new(),
        processes: HashMap::new(),
        settling: Vec::new(),
        scanned: Vec::new(),
        imported: Vec::new(),
        is_restored: false,
        next_sweep: now,
        next_verify: now + VERIFY,
        fast_until: now,
        is_dirty: true,
    };
    actor.publish();
    std::thread::Builder::new()
        .name("presence".into())
        .stack_size(512 * 1024)
        .spawn(move || actor.run())?;
    Ok((mailbox, shared))
}

impl Actor {
    fn run(mut self) {
        loop {
            self.sleep();
            self.inbox.drain_wake();
            loop {
                match self.inbox.next() {
                    Ok(Some(command)) => self.handle(command),
                    Ok(None) => break,
                    Err(()) => return,
                }
            }
            self.reap();
            self.look_at_fences();
            let now = Instant::now();
            if now >= self.next_sweep {
                self.sweep();
            }
            if now >= self.next_verify {
                self.verify_all(|_| true);
                self.drop_unwanted();
                self.next_verify = now + VERIFY;
            }
            self.scan_settling();
            if std::mem::take(&mut self.is_restored) {
                for identity in self.identities() {
                    self.find_runtime_ends(identity.runtime);
                }
            }
            self.start_fences();
            self.publish();
            self.answer();
        }
    }

    /// Sleeps until a message, the end of a process, or the next thing due.
    fn sleep(&self) {
        let fences = self.runtimes.values().filter_map(|r| r.fence.as_ref());
        let settling = self.settling.iter();
        let due = fences
            .map(|f| f.next_look)
            .chain(settling.map(|s| s.deadline.min(s.next_scan)))
            .chain([self.next_sweep, self.next_verify])
            .min()
            .unwrap_or(self.next_verify);
        let timeout = due.saturating_duration_since(Instant::now());
        let living = self
            .processes
            .values()
            .filter_map(|t| t.process.as_ref().ok());
        let mut fds = vec![PollFd::new(self.inbox.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(living.map(|p| PollFd::new(p.pidfd(), PollFlags::POLLIN)));
        // EINTR and everything else: the loop looks at everything anyway.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(timeout)), None);
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::RuntimeAdded {
                runtime,
                socket_path,
            } => self.runtime_added(runtime, socket_path),
            Command::BeforeOwnConnect { runtime, reply } => {
                let _ = reply.send(self.before_own_connect(runtime));
            }
            Command::OwnSynchronized {
                runtime,
                fence,
                own,
            } => self.own_synchronized(runtime, fence, own),
            Command::RuntimeLost { runtime } => self.runtime_lost(runtime),
            Command::SetHolders { holders } => self.set_holders(&holders),
            Command::Settle {
                process,
                deadline,
                reply,
            } => self.settle(process, deadline, reply),
            Command::Rescan { process, reply } => {
                if self.processes.contains_key(&process) {
                    self.verify_process(process);
                    self.scan_process(process);
                }
                self.scanned.push(reply);
            }
            Command::ForgetBroken { process, runtime } => {
                if let Some(tracked) = self.processes.get_mut(&process)
                    && Arc::make_mut(&mut tracked.bindings).forget_broken(runtime)
                {
                    self.is_dirty = true;
                }
            }
            Command::Export { reply } => {
                let _ = reply.send(self.export());
            }
            Command::Import { mut records } => {
                records.retain(|r| r.boot_id == self.boot_id);
                records.truncate(MAX_IMPORTED);
                self.imported = records;
            }
            Command::Verify { process } => self.verify_process(process),
            Command::HookBound(proof) => self.hook_bound(proof),
        }
    }

    // --- runtimes ---

    fn runtime_added(&mut self, runtime: RuntimeId, socket_path: PathBuf) {
        let now = Instant::now();
        self.runtimes.entry(runtime).or_insert(Runtime {
            socket_path,
            listener: None,
            process: None,
            fence: None,
            failures: 0,
            retry_at: now,
        });
        self.nothing_is_foreign();
        self.hurry(now);
    }

    fn before_own_connect(&mut self, _runtime: RuntimeId) -> OwnFence {
        self.scan_all();
        OwnFence {
            opened: self.tick(),
        }
    }

    fn own_synchronized(&mut self, runtime: RuntimeId, fence: OwnFence, own: OwnSocket) {
        let now = Instant::now();
        self.hurry(now);
        match self.listener_behind(own.inode) {
            Some(listener) => {
                let passed = Passed {
                    listener,
                    runtime_pid: own.runtime_pid,
                };
                self.fence_passed(runtime, passed, fence.opened);
            }
            // Closed again already, or no socket of this daemon: a fence of ours will tell.
            None => tracing::debug!(runtime = runtime.0, "own connection shows no listener"),
        }
        self.next_sweep = now;
    }

    fn listener_behind(&self, inode: u64) -> Option<VfsId> {
        let own = self.netns.as_ref()?.own();
        let query = |inode| own.query(Asker::Tracker, inode, None, Detail::PeerAndName);
        let peer = query(inode).ok()??.peer.filter(|peer| *peer != 0)?;
        query(peer).ok()??.vfs
    }

    fn runtime_lost(&mut self, runtime: RuntimeId) {
        let now = Instant::now();
        if let Some(lost) = self.runtimes.get_mut(&runtime) {
            lost.listener = None;
            lost.process = None;
            lost.fence = None;
            lost.failures = 0;
            lost.retry_at = now;
        }
        self.nothing_is_foreign();
        self.verify_all(|c| c.runtime == Some(runtime));
        self.hurry(now);
        self.is_dirty = true;
    }

    /// Scans faster for a while: plugins reconnect now.
    fn hurry(&mut self, now: Instant) {
        self.fast_until = now + FAST_FOR;
        self.next_sweep = self.next_sweep.min(now + FAST_SWEEP);
    }

    fn identity(&self, runtime: RuntimeId) -> RuntimeIdentity {
        RuntimeIdentity {
            runtime,
            listener: self.runtimes.get(&runtime).and_then(|r| r.listener),
        }
    }

    fn identities(&self) -> Vec<RuntimeIdentity> {
        let runtimes = self.runtimes.keys();
        runtimes.map(|runtime| self.identity(*runtime)).collect()
    }

    // --- fences ---

    fn start_fences(&mut self) {
        let Some(netns) = self.netns.clone() else {
            return;
        };
        let now = Instant::now();
        for identity in self.identities() {
            let is_wanted = self
                .processes
                .values()
                .any(|t| t.process.is_ok() && t.bindings.wants_fence(&identity));
            let opened = self.sequence;
            let Some(runtime) = self.runtimes.get_mut(&identity.runtime) else {
                continue;
            };
            if !is_wanted || runtime.fence.is_some() || now < runtime.retry_at {
                continue;
            }
            self.sequence += 1;
            self.shared.fences_opened.fetch_add(1, Ordering::Relaxed);
            match Fence::open(&runtime.socket_path, netns.own().clone(), FENCE_DEADLINE) {
                Ok(mut fence) => {
                    let next_look = now + fence.next_pause();
                    runtime.fence = Some(OpenFence {
                        fence,
                        opened,
                        next_look,
                    });
                }
                Err(error) => fence_failed(runtime, now, &error),
            }
        }
    }

    fn look_at_fences(&mut self) {
        let now = Instant::now();
        let mut passed = Vec::new();
        for (id, runtime) in &mut self.runtimes {
            let Some(open) = runtime.fence.as_mut().filter(|f| f.next_look <= now) else {
                continue;
            };
            match open.fence.look(Asker::Tracker) {
                Ok(None) => open.next_look = now + open.fence.next_pause(),
                Ok(Some(found)) => {
                    passed.push((*id, found, open.opened));
                    runtime.fence = None; // closes it, before anything else is done
                }
                Err(error) => {
                    runtime.fence = None;
                    fence_failed(runtime, now, &error);
                }
            }
        }
        for (runtime, found, opened) in passed {
            self.fence_passed(runtime, found, opened);
        }
    }

    /// Binds whatever was seen accepted before the fence was opened.
    fn fence_passed(&mut self, runtime: RuntimeId, passed: Passed, opened: u64) {
        self.learn_listener(runtime, passed);
        let fence = binding::Fence {
            runtime,
            listener: passed.listener,
            opened,
        };
        let now_ns = sys::boottime_ns();
        for tracked in self.processes.values_mut() {
            let Ok(process) = &tracked.process else {
                continue;
            };
            let bindings = Arc::make_mut(&mut tracked.bindings);
            let bound = bindings.bind(&fence, now_ns, |c| is_surely_open(process, c));
            self.is_dirty |= bindings.drop_forgotten(|_| false) || bound;
        }
        self.find_runtime_ends(runtime);
    }

    /// Looks up, once, where the runtime has its ends of newly bound connections.
    fn find_runtime_ends(&mut self, runtime: RuntimeId) {
        let known = self.runtimes.get(&runtime);
        let Some(process) = known.and_then(|r| r.process.clone()) else {
            return;
        };
        let mut table: Option<HashMap<u64, u32>> = None;
        for tracked in self.processes.values_mut() {
            let connections = tracked.bindings.connections().iter();
            let is_complete = connections
                .filter(|c| c.state == ConnectionState::Bound && c.runtime == Some(runtime))
                .all(|c| c.handle.runtime_end.is_some());
            if is_complete {
                continue;
            }
            let table = table.get_or_insert_with(|| {
                let sockets = process.sockets().into_iter();
                sockets.map(|(fd, inode)| (inode, fd)).collect()
            });
            for handle in Arc::make_mut(&mut tracked.bindings).bound_handles_mut(runtime) {
                // Not there: accepted by another process than the one that listens.
                if let Some(fd) = table.get(&handle.peer) {
                    handle.runtime_end = Some(RuntimeEnd {
                        process: process.clone(),
                        fd: *fd,
                    });
                    self.is_dirty = true;
                }
            }
        }
    }

    fn hook_bound(&mut self, proof: HookBinding) {
        self.learn_listener(proof.runtime, proof.passed);
        let at = self.tick();
        let fence = binding::Fence {
            runtime: proof.runtime,
            listener: proof.passed.listener,
            opened: self.tick(),
        };
        let mut proved = proof.proved;
        proved.retain(|(id, _, _)| !self.belongs_to_another(proof.process, *id));
        let Some(tracked) = self.processes.get_mut(&proof.process) else {
            return;
        };
        let Ok(process) = &tracked.process else {
            return;
        };
        let now_ns = sys::boottime_ns();
        let bindings = Arc::make_mut(&mut tracked.bindings);
        let ids: Vec<SocketId> = proved.iter().map(|(id, _, _)| *id).collect();
        for (id, far, handle) in proved {
            bindings.observe(id, far, at, now_ns, handle);
        }
        bindings.bind_proved(&fence, &ids, now_ns, |c| is_surely_open(process, c));
        bindings.drop_forgotten(|_| false);
        self.is_dirty = true;
        self.find_runtime_ends(proof.runtime);
    }

    /// Takes note of which listening socket, and which process, is behind a runtime's path.
    fn learn_listener(&mut self, runtime: RuntimeId, passed: Passed) {
        let Some(known) = self.runtimes.get_mut(&runtime) else {
            return;
        };
        known.failures = 0;
        known.retry_at = Instant::now();
        let seen = known.process.as_ref().filter(|p| !p.has_ended());
        let is_same_process = match passed.runtime_pid {
            Some(pid) => seen.is_some_and(|p| p.key.pid == pid),
            None => true,
        };
        if known.listener == Some(passed.listener) && is_same_process {
            return;
        }
        if !is_same_process {
            let key = passed.runtime_pid.and_then(|p| ProcessKey::of(p).ok());
            let process = key.and_then(|key| WatchedProcess::open(key).ok());
            known.process = process.map(Arc::new);
        }
        known.listener = Some(passed.listener);
        self.is_dirty = true;
        self.nothing_is_foreign();
        let identities = self.identities();
        for tracked in self.processes.values_mut() {
            let bindings = Arc::make_mut(&mut tracked.bindings);
            bindings.drop_forgotten(|far| is_foreign(far, &identities));
        }
    }

    /// What was no runtime's socket may be one now.
    fn nothing_is_foreign(&mut self) {
        for tracked in self.processes.values_mut() {
            if !tracked.foreign.is_empty() {
                tracked.foreign = Arc::default();
            }
        }
    }

    // --- processes ---

    fn set_holders(&mut self, holders: &[HolderSpec]) {
        for tracked in self.processes.values_mut() {
            tracked.is_holder = false;
        }
        for holder in holders {
            let is_new = self.track(holder.process);
            if let Some(tracked) = self.processes.get_mut(&holder.process) {
                tracked.is_holder = true;
            }
            if is_new {
                self.scan_process(holder.process);
            }
        }
        self.drop_unwanted();
        let processes = &self.processes;
        self.imported.retain(|r| processes.contains_key(&r.process));
    }

    fn drop_unwanted(&mut self) {
        let now = Instant::now();
        let before = self.processes.len();
        self.processes
            .retain(|_, t| t.is_holder || t.keep_until > now);
        self.is_dirty |= self.processes.len() != before;
    }

    /// Starts to watch a process; returns whether it was not watched before.
    fn track(&mut self, key: ProcessKey) -> bool {
        if self.processes.contains_key(&key) {
            return false;
        }
        let tracked = Tracked {
            process: watch(key),
            bindings: Arc::default(),
            foreign: Arc::default(),
            had: Vec::new(),
            is_holder: false,
            keep_until: Instant::now(),
            present: BTreeSet::new(),
            gone_sent: false,
        };
        self.processes.insert(key, tracked);
        self.is_dirty = true;
        true
    }

    /// Lets go of processes that have ended: of their descriptors, and of their namespaces.
    fn reap(&mut self) {
        for tracked in self.processes.values_mut() {
            if tracked.process.as_ref().is_ok_and(|p| p.has_ended()) {
                tracked.process = Err(Unwatched::Gone);
                tracked.had = tracked
                    .bindings
                    .connections()
                    .iter()
                    .map(|c| c.id)
                    .collect();
                tracked.bindings = Arc::default();
                tracked.foreign = Arc::default();
                self.is_dirty = true;
            }
        }
    }

    // --- scans ---

    fn sweep(&mut self) {
        let began = Instant::now();
        let known: Vec<RuntimeIdentity> = self
            .identities()
            .into_iter()
            .filter(|i| i.listener.is_some())
            .collect();
        let unsettled: Vec<ProcessKey> = self
            .processes
            .iter()
            .filter(|(_, t)| !matches!(t.process, Err(Unwatched::Gone)))
            .filter(|(_, t)| {
                known.is_empty()
                    || t.bindings.has_pending()
                    || known.iter().any(|i| !t.bindings.is_settled(i))
            })
            .map(|(key, _)| *key)
            .collect();
        for key in unsettled {
            self.scan_process(key);
        }
        // Hundreds of holders without a connection must not keep a core busy.
        let took = began.elapsed();
        let pause = match began < self.fast_until {
            true => FAST_SWEEP,
            false => SWEEP,
        };
        self.next_sweep = Instant::now() + pause.max(took * 4);
    }

    fn scan_all(&mut self) {
        let keys: Vec<ProcessKey> = self.processes.keys().copied().collect();
        for key in keys {
            self.scan_process(key);
        }
    }

    /// Looks for connections the process has and we do not know, and at those that wait.
    fn scan_process(&mut self, key: ProcessKey) {
        let Some(netns) = self.netns.clone() else {
            return;
        };
        let Some(tracked) = self.processes.get_mut(&key) else {
            return;
        };
        if let Err(Unwatched::Failed(_)) = tracked.process {
            tracked.process = watch(key);
            self.is_dirty = true;
        }
        let Ok(process) = tracked.process.clone() else {
            return;
        };
        let (foreign, bindings) = (tracked.foreign.clone(), tracked.bindings.clone());
        let is_known = |inode| {
            let mut connections = bindings.connections().iter();
            foreign.contains(&inode)
                || connections
                    .any(|c| c.id.inode == inode && matches!(c.state, ConnectionState::Bound))
        };
        let found = scan(&process, &netns, Asker::Tracker, is_known);
        self.take_in(key, &process, found);
        self.mend_from_store(key, None);
    }

    fn take_in(&mut self, key: ProcessKey, process: &WatchedProcess, found: Scan) {
        let at = self.tick();
        let now_ns = sys::boottime_ns();
        let identities = self.identities();
        let mut foreign = found.foreign;
        let mut connections = Vec::new();
        let mut runtime_sockets = RuntimeSockets::default();
        for socket in found.found {
            if self.belongs_to_another(key, socket.id) {
                continue;
            }
            let far = match socket.far {
                Far::Unaccepted => Some(FarEnd::Unaccepted),
                Far::Listener { file, .. } => Some(FarEnd::Listener(file)),
                Far::Unnamed => runtime_sockets
                    .owner(&self.runtimes, socket.handle.peer)
                    .map(FarEnd::Launched),
            };
            match far {
                Some(far) if !is_foreign(far, &identities) => {
                    connections.push((socket.id, far, socket.handle));
                }
                Some(_) => foreign.push(socket.id.inode),
                None if self.runtimes.values().all(|r| r.process.is_some()) => {
                    foreign.push(socket.id.inode);
                }
                None => {}
            }
        }
        for (id, far, handle) in &connections {
            self.mend_from_store(key, Some((*id, *far, handle)));
        }
        let Some(tracked) = self.processes.get_mut(&key) else {
            return;
        };
        if !foreign.is_empty() {
            let known = Arc::make_mut(&mut tracked.foreign);
            if known.len() + foreign.len() > MAX_FOREIGN {
                known.clear();
            }
            known.extend(foreign.into_iter().take(MAX_FOREIGN));
        }
        let bindings = Arc::make_mut(&mut tracked.bindings);
        // What waited and was closed is forgotten. Bound ones are for `verify_all` and hooks.
        let is_waiting = |c: &Connection<Handle>| c.state != ConnectionState::Bound;
        self.is_dirty |= bindings.verify(is_waiting, |c| {
            connections.iter().any(|(id, _, _)| *id == c.id) || is_not_closed(process, c)
        });
        for (id, far, handle) in connections {
            self.is_dirty |= bindings.observe(id, far, at, now_ns, handle);
        }
    }

    /// A socket that was handed over or inherited vouches for the holder first seen with it, and
    /// for nobody else while that one is in a lease.
    fn belongs_to_another(&self, key: ProcessKey, id: SocketId) -> bool {
        let mut others = self.processes.iter().filter(|(other, _)| **other != key);
        others.any(|(_, t)| {
            t.had.contains(&id) || t.bindings.connections().iter().any(|c| c.id == id)
        })
    }

    fn verify_process(&mut self, key: ProcessKey) {
        if let Some(tracked) = self.processes.get_mut(&key) {
            self.is_dirty |= verify(tracked, |_| true);
        }
    }

    fn verify_all(&mut self, which: impl Fn(&Connection<Handle>) -> bool) {
        for tracked in self.processes.values_mut() {
            self.is_dirty |= verify(tracked, &which);
        }
    }

    // --- settling ---

    fn settle(&mut self, key: ProcessKey, deadline: Duration, reply: oneshot::Sender<Settled>) {
        self.track(key);
        let now = Instant::now();
        if let Some(tracked) = self.processes.get_mut(&key) {
            tracked.keep_until = now + KEEP_SETTLED;
        }
        self.verify_process(key);
        self.settling.push(Settling {
            process: key,
            deadline: now + deadline,
            next_scan: now,
            reply,
        });
    }

    fn scan_settling(&mut self) {
        let now = Instant::now();
        let due: Vec<ProcessKey> = self
            .settling
            .iter_mut()
            .filter(|s| s.next_scan <= now)
            .map(|s| {
                s.next_scan = now + SETTLE_SCAN;
                s.process
            })
            .collect();
        for key in due {
            self.scan_process(key);
        }
    }

    fn answer(&mut self) {
        for reply in self.scanned.drain(..) {
            let _ = reply.send(());
        }
        let now = Instant::now();
        for settling in std::mem::take(&mut self.settling) {
            match self.how_settled(settling.process, now >= settling.deadline) {
                Some(settled) => {
                    let _ = settling.reply.send(settled);
                }
                None if settling.reply.is_closed() => {}
                None => self.settling.push(settling),
            }
        }
    }

    /// `None`: wait on.
    fn how_settled(&self, key: ProcessKey, is_late: bool) -> Option<Settled> {
        let Some(tracked) = self.processes.get(&key) else {
            return Some(Settled::NothingToBind);
        };
        match tracked.process {
            Err(Unwatched::Gone) => return Some(Settled::ProcessGone),
            Err(Unwatched::Failed(_)) => return Some(Settled::NoEvidence),
            Ok(_) => {}
        }
        if self.netns.is_none() {
            return Some(Settled::NoEvidence);
        }
        // A runtime whose socket refuses fences binds nothing soon, and is not waited for.
        let waits = |(id, r): (&RuntimeId, &Runtime)| {
            (r.failures == 0 || r.fence.is_some())
                && tracked.bindings.wants_fence(&self.identity(*id))
        };
        let is_waiting = tracked.bindings.has_pending() || self.runtimes.iter().any(waits);
        let is_bound = self
            .identities()
            .iter()
            .any(|i| tracked.bindings.presence(i, None, |_| Ok(true)) == Presence::Bound);
        match (is_waiting, is_bound) {
            (true, _) if is_late => Some(Settled::Deadline),
            (true, _) => None,
            (false, true) => Some(Settled::Bound),
            (false, false) => Some(Settled::NothingToBind),
        }
    }

    // --- the store's records ---

    fn export(&self) -> Vec<BindingRecord> {
        let mut records = Vec::new();
        for (key, tracked) in &self.processes {
            for connection in tracked.bindings.connections() {
                let broken = match connection.state {
                    ConnectionState::Bound => false,
                    ConnectionState::Broken => true,
                    _ => continue,
                };
                let Some(runtime) = connection.runtime.and_then(|r| self.runtimes.get(&r)) else {
                    continue;
                };
                records.push(BindingRecord {
                    boot_id: self.boot_id.clone(),
                    process: *key,
                    runtime_socket: runtime.socket_path.clone(),
                    inode: connection.id.inode,
                    cookie: connection.id.cookie,
                    netns_inode: connection.handle.netns.inode,
                    listener: match connection.far {
                        FarEnd::Listener(file) => Some(file),
                        FarEnd::Launched(_) | FarEnd::Unaccepted => None,
                    },
                    broken,
                });
            }
        }
        records
    }

    /// Puts back what the store remembers of this process. With a connection that was found: that
    /// one, if it is recorded just like that. With `None`, after a scan: the rest, as broken.
    fn mend_from_store(&mut self, key: ProcessKey, found: Option<(SocketId, FarEnd, &Handle)>) {
        let Some(own) = self.netns.as_ref().map(|n| n.own().clone()) else {
            return;
        };
        if self.imported.is_empty() {
            return;
        }
        let Some(tracked) = self.processes.get_mut(&key) else {
            return;
        };
        let runtimes = &self.runtimes;
        let is_match = |r: &mut BindingRecord| {
            r.process == key
                && found.is_none_or(|(id, far, handle)| {
                    let listener = match far {
                        FarEnd::Listener(file) => Some(file),
                        FarEnd::Launched(_) | FarEnd::Unaccepted => None,
                    };
                    !r.broken
                        && (r.inode, r.cookie) == (id.inode, id.cookie)
                        && r.netns_inode == handle.netns.inode
                        && r.listener == listener
                        && far != FarEnd::Unaccepted
                })
        };
        let records: Vec<BindingRecord> = self.imported.extract_if(.., is_match).collect();
        for record in records {
            let configured = runtimes
                .iter()
                .find(|(_, r)| r.socket_path == record.runtime_socket);
            let Some((runtime, _)) = configured else {
                continue;
            };
            let now_ns = sys::boottime_ns();
            let id = SocketId {
                inode: record.inode,
                cookie: record.cookie,
            };
            let (far, handle) = match (found, record.listener) {
                (Some((_, far, handle)), _) => (far, handle.clone()),
                // A broken connection is never asked about again.
                (None, Some(file)) => (FarEnd::Listener(file), unused_handle(&own)),
                (None, None) => (FarEnd::Launched(*runtime), unused_handle(&own)),
            };
            let connection = Connection {
                id,
                far,
                state: ConnectionState::Bound,
                runtime: Some(*runtime),
                seen_boottime_ns: now_ns,
                bound_boottime_ns: Some(now_ns),
                handle,
            };
            let bindings = Arc::make_mut(&mut tracked.bindings);
            bindings.restore(connection, *runtime, found.is_none());
            self.is_restored |= found.is_some();
            self.is_dirty = true;
        }
    }

    // --- what others see ---

    fn publish(&mut self) {
        if !std::mem::take(&mut self.is_dirty) {
            return;
        }
        let processes = self.processes.iter().map(|(key, t)| {
            let seen = ViewProcess {
                process: t.process.clone(),
                bindings: t.bindings.clone(),
                foreign: t.foreign.clone(),
                had: t.had.clone(),
            };
            (*key, seen)
        });
        let runtimes = self.runtimes.iter().map(|(id, r)| {
            let seen = ViewRuntime {
                socket_path: r.socket_path.clone(),
                identity: self.identity(*id),
                pid: r.process.as_ref().map(|p| p.key.pid),
            };
            (*id, seen)
        });
        self.shared.view.store(Arc::new(View {
            processes: processes.collect(),
            runtimes: runtimes.collect(),
            no_evidence: self.shared.evidence.clone().err(),
            netns: self.netns.clone(),
            mailbox: self.mailbox.clone(),
        }));
        self.send_events();
    }

    /// Compares what is with what was last told. After the view is published, so that who hears
    /// of it finds it there.
    fn send_events(&mut self) {
        let identities = self.identities();
        let send = |event| {
            // Nobody listening is fine.
            let _ = self.shared.events.send(event);
        };
        for (key, tracked) in &mut self.processes {
            let process = *key;
            for identity in &identities {
                let runtime = identity.runtime;
                let presence = tracked.bindings.presence(identity, None, |_| Ok(true));
                let is_present = tracked.process.is_ok() && presence == Presence::Bound;
                if is_present && tracked.present.insert(runtime) {
                    send(Event::Connected { process, runtime });
                } else if !is_present && tracked.present.remove(&runtime) {
                    send(Event::Disconnected { process, runtime });
                }
            }
            if matches!(tracked.process, Err(Unwatched::Gone)) && !tracked.gone_sent {
                tracked.gone_sent = true;
                send(Event::ProcessGone { process });
            }
        }
    }

    fn tick(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }
}

/// The descriptor tables of the runtimes, read at most once per scan.
#[derive(Default)]
struct RuntimeSockets(HashMap<RuntimeId, HashSet<u64>>);

impl RuntimeSockets {
    fn owner(&mut self, runtimes: &BTreeMap<RuntimeId, Runtime>, socket: u64) -> Option<RuntimeId> {
        let holds = |(id, runtime): (&RuntimeId, &Runtime)| {
            let pid = runtime.process.as_ref()?.key.pid;
            let sockets = self.0.entry(*id);
            let sockets = sockets.or_insert_with(|| proc::socket_inodes(pid).unwrap_or_default());
            sockets.contains(&socket).then_some(*id)
        };
        runtimes.iter().find_map(holds)
    }
}

fn watch(key: ProcessKey) -> Result<Arc<WatchedProcess>, Unwatched> {
    match WatchedProcess::open(key) {
        Ok(process) => Ok(Arc::new(process)),
        Err(ProcError::Gone { .. }) => Err(Unwatched::Gone),
        Err(error) => Err(Unwatched::Failed(error.to_string())),
    }
}

fn fence_failed(runtime: &mut Runtime, now: Instant, error: &FenceError) {
    tracing::debug!(socket = %runtime.socket_path.display(), %error, "fence failed");
    if !matches!(error, FenceError::Deadline) {
        runtime.failures = runtime.failures.saturating_add(1);
        let pause = FENCE_RETRY * 2u32.saturating_pow(runtime.failures.min(10) - 1);
        runtime.retry_at = now + pause.min(FENCE_RETRY_MOST);
    }
}

/// Known to be no runtime's listening socket: only when all of theirs are known.
fn is_foreign(far: FarEnd, identities: &[RuntimeIdentity]) -> bool {
    match far {
        FarEnd::Listener(file) => identities
            .iter()
            .all(|i| i.listener.is_some_and(|l| l != file)),
        FarEnd::Launched(_) | FarEnd::Unaccepted => false,
    }
}

fn verify(tracked: &mut Tracked, which: impl Fn(&Connection<Handle>) -> bool) -> bool {
    let Ok(process) = &tracked.process else {
        return false;
    };
    let bindings = Arc::make_mut(&mut tracked.bindings);
    bindings.verify(which, |c| is_not_closed(process, c))
}

/// For binding: a question without an answer is a no.
fn is_surely_open(process: &WatchedProcess, c: &Connection<Handle>) -> bool {
    is_open(process, c.id, &c.handle, Asker::Tracker) == Ok(true)
}

/// For unbinding: a question without an answer leaves things as they are; a hook asks again. A
/// pending connection is not open, and not closed either.
fn is_not_closed(process: &WatchedProcess, c: &Connection<Handle>) -> bool {
    if c.state != ConnectionState::Pending {
        return is_open(process, c.id, &c.handle, Asker::Tracker) != Ok(false);
    }
    let answer: Result<_, DiagError> =
        c.handle
            .netns
            .query(Asker::Tracker, c.id.inode, Some(c.id.cookie), Detail::Peer);
    process.holds(c.id.inode, c.handle.fd)
        && answer.is_ok_and(|s| s.is_some_and(|s| s.is_pending() || s.is_open()))
}

fn unused_handle(own: &Arc<super::netns::Netns>) -> Handle {
    Handle {
        netns: own.clone(),
        fd: u32::MAX,
        peer: 0,
        runtime_end: None,
    }
}

/// See [`super::Tracker::find_connection_owner`].
pub(super) fn find_connection_owner(shared: &Shared, pid: u32) -> Option<ProcessKey> {
    let view = shared.view.load_full();
    let netns = view.netns.as_ref()?;
    let mut launched: HashMap<RuntimeId, HashSet<u64>> = HashMap::new();
    for (id, runtime) in &view.runtimes {
        if let Some(pid) = runtime.pid {
            launched.insert(*id, proc::socket_inodes(pid).unwrap_or_default());
        }
    }
    let leads_to_runtime = |far: &Far, peer: u64| match far {
        Far::Unaccepted => false,
        Far::Listener { file, name } => view.runtimes.values().any(|r| match r.identity.listener {
            Some(listener) => listener == *file,
            None => {
                let path = r.socket_path.as_os_str().as_encoded_bytes();
                name.strip_suffix(&[0]).unwrap_or(name) == path
            }
        }),
        Far::Unnamed => launched.values().any(|sockets| sockets.contains(&peer)),
    };
    let candidates = std::iter::once(pid).chain(proc::descendants(pid, MAX_DESCENDANTS));
    let mut owners = candidates.filter_map(|pid| {
        let process = WatchedProcess::open(ProcessKey::of(pid).ok()?).ok()?;
        let found = scan(&process, netns, Asker::Tracker, |_| false).found;
        let owns = found
            .iter()
            .any(|f| leads_to_runtime(&f.far, f.handle.peer));
        owns.then_some(process.key)
    });
    owners.next()
}
