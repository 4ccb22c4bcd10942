//! The processes that are watched, and the scans that find their connections.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::binding::{Connection, ConnectionState, FarEnd, RuntimeIdentity, SocketId};
use super::super::netns::Asker;
use super::super::proc::{self, ProcError, ProcessKey};
use super::super::process::WatchedProcess;
use super::super::scan::{Far, Handle, Scan, is_open, scan};
use super::super::sys;
use super::super::tracker::{HolderSpec, RuntimeId};
use super::super::unix_diag::Detail;
use super::super::view::Unwatched;
use super::{Actor, FAST_SWEEP, Runtime, Tracked};

/// How often holders without a bound connection are scanned.
const SWEEP: Duration = Duration::from_millis(250);
/// Sockets remembered per process as being no connection to a runtime.
const MAX_FOREIGN: usize = 4096;

impl Actor {
    pub(super) fn set_holders(&mut self, holders: &[HolderSpec]) {
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

    pub(super) fn drop_unwanted(&mut self) {
        let now = Instant::now();
        let before = self.processes.len();
        self.processes
            .retain(|_, t| t.is_holder || t.keep_until > now);
        self.is_dirty |= self.processes.len() != before;
    }

    /// Starts to watch a process; returns whether it was not watched before.
    pub(super) fn track(&mut self, key: ProcessKey) -> bool {
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
    pub(super) fn reap(&mut self) {
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

    pub(super) fn sweep(&mut self) {
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

    /// Looks for connections the process has and we do not know, and at those that wait.
    pub(super) fn scan_process(&mut self, key: ProcessKey) {
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

    pub(super) fn take_in(&mut self, key: ProcessKey, process: &WatchedProcess, found: Scan) {
        let at = self.shared.tick();
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
    pub(super) fn belongs_to_another(&self, key: ProcessKey, id: SocketId) -> bool {
        let mut others = self.processes.iter().filter(|(other, _)| **other != key);
        others.any(|(_, t)| {
            t.had.contains(&id) || t.bindings.connections().iter().any(|c| c.id == id)
        })
    }

    pub(super) fn verify_process(&mut self, key: ProcessKey) {
        if let Some(tracked) = self.processes.get_mut(&key) {
            self.is_dirty |= verify(tracked, |_| true);
        }
    }

    pub(super) fn verify_all(&mut self, which: impl Fn(&Connection<Handle>) -> bool) {
        for tracked in self.processes.values_mut() {
            self.is_dirty |= verify(tracked, &which);
        }
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

/// Known to be no runtime's listening socket: only when all of theirs are known.
pub(super) fn is_foreign(far: FarEnd, identities: &[RuntimeIdentity]) -> bool {
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

/// For unbinding: a question without an answer leaves things as they are; a hook asks again. A
/// pending connection is not open, and not closed either.
fn is_not_closed(process: &WatchedProcess, c: &Connection<Handle>) -> bool {
    if c.state != ConnectionState::Pending {
        return is_open(process, c.id, &c.handle, Asker::Tracker) != Ok(false);
    }
    let answer = c
        .handle
        .netns
        .query(Asker::Tracker, c.id.inode, Some(c.id.cookie), Detail::Peer);
    process.holds(c.id.inode, c.handle.fd)
        && answer.is_ok_and(|s| s.is_some_and(|s| s.is_pending() || s.is_open()))
}
