//! Runtimes as they come and go, and the fences to them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::super::binding::{self, Connection, ConnectionState, RuntimeIdentity, SocketId};
use super::super::fence::{Fence, FenceError, Passed};
use super::super::netns::Asker;
use super::super::process::WatchedProcess;
use super::super::scan::{Handle, RuntimeEnd, is_open};
use super::super::sys;
use super::super::tracker::{OwnFence, OwnSocket, RuntimeId};
use super::super::unix_diag::{Detail, VfsId};
use super::super::view::HookBinding;
use super::watching::is_foreign;
use super::{Actor, FAST_SWEEP, OpenFence, Runtime};

/// How long scans are fast after a runtime has come or gone.
const FAST_FOR: Duration = Duration::from_secs(2);
/// A fence waits in the accept queue while the runtime is busy, e.g. with a slow StopContainer.
const FENCE_DEADLINE: Duration = Duration::from_secs(30);
/// Pause after a fence that failed, doubled each time up to the most.
const FENCE_RETRY: Duration = Duration::from_millis(50);
const FENCE_RETRY_MOST: Duration = Duration::from_secs(2);

impl Actor {
    pub(super) fn runtime_added(&mut self, runtime: RuntimeId, socket_path: PathBuf) {
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

    pub(super) fn own_synchronized(&mut self, runtime: RuntimeId, fence: OwnFence, own: OwnSocket) {
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

    pub(super) fn listener_behind(&self, inode: u64) -> Option<VfsId> {
        let own = self.netns.as_ref()?.own();
        let query = |inode| own.query(Asker::Tracker, inode, None, Detail::PeerAndName);
        let peer = query(inode).ok()??.peer.filter(|peer| *peer != 0)?;
        query(peer).ok()??.vfs
    }

    pub(super) fn runtime_lost(&mut self, runtime: RuntimeId) {
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
    pub(super) fn hurry(&mut self, now: Instant) {
        self.fast_until = now + FAST_FOR;
        self.next_sweep = self.next_sweep.min(now + FAST_SWEEP);
    }

    pub(super) fn identity(&self, runtime: RuntimeId) -> RuntimeIdentity {
        RuntimeIdentity {
            runtime,
            listener: self.runtimes.get(&runtime).and_then(|r| r.listener),
        }
    }

    pub(super) fn identities(&self) -> Vec<RuntimeIdentity> {
        let runtimes = self.runtimes.keys();
        runtimes.map(|runtime| self.identity(*runtime)).collect()
    }

    pub(super) fn start_fences(&mut self) {
        let Some(netns) = self.netns.clone() else {
            return;
        };
        let now = Instant::now();
        for identity in self.identities() {
            let is_wanted = self
                .processes
                .values()
                .any(|t| t.process.is_ok() && t.bindings.wants_fence(&identity));
            let Some(runtime) = self.runtimes.get_mut(&identity.runtime) else {
                continue;
            };
            if !is_wanted || runtime.fence.is_some() || now < runtime.retry_at {
                continue;
            }
            let opened = self.shared.tick();
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

    pub(super) fn look_at_fences(&mut self) {
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
    pub(super) fn fence_passed(&mut self, runtime: RuntimeId, passed: Passed, opened: u64) {
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
    pub(super) fn find_runtime_ends(&mut self, runtime: RuntimeId) {
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

    pub(super) fn hook_bound(&mut self, proof: HookBinding) {
        self.learn_listener(proof.runtime, proof.passed);
        let at = self.shared.tick();
        let fence = binding::Fence {
            runtime: proof.runtime,
            listener: proof.passed.listener,
            opened: self.shared.tick(),
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
    pub(super) fn learn_listener(&mut self, runtime: RuntimeId, passed: Passed) {
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
            let key = passed
                .runtime_pid
                .and_then(|p| crate::presence::proc::key_of(p).ok());
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
    pub(super) fn nothing_is_foreign(&mut self) {
        for tracked in self.processes.values_mut() {
            if !tracked.foreign.is_empty() {
                tracked.foreign = Arc::default();
            }
        }
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

/// For binding: a question without an answer is a no.
fn is_surely_open(process: &WatchedProcess, c: &Connection<Handle>) -> bool {
    is_open(process, c.id, &c.handle, Asker::Tracker) == Ok(true)
}
