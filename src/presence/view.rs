//! The published state: what a hook reads, and the questions a hook asks the kernel itself.
//!
//! Nothing here waits for the tracker: it keeps its own diag sockets, and tells the tracker what
//! it noticed by a message.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::actor::Command;
use super::binding::{
    self, ConnectionInfo, FarEnd, Presence, ProcessBindings, RuntimeIdentity, SocketId,
};
use super::fence::{Fence, Passed};
use super::mailbox::WeakMailbox;
use super::netns::{Asker, NetnsCache};
use super::proc::ProcessKey;
use super::process::WatchedProcess;
use super::scan::{Far, Handle, is_open, is_released, scan};
use super::sys;
use super::tracker::RuntimeId;

/// The most that [`View::bind_in_hook`] waits. The runtime is blocked meanwhile.
const MAX_HOOK_BUDGET: Duration = Duration::from_millis(10);

/// An immutable picture of all tracked processes and their connections.
#[derive(Default)]
pub struct View {
    pub(super) processes: HashMap<ProcessKey, ViewProcess>,
    pub(super) runtimes: HashMap<RuntimeId, ViewRuntime>,
    /// Why the kernel cannot be asked; `None` if it can.
    pub(super) no_evidence: Option<String>,
    pub(super) netns: Option<Arc<NetnsCache>>,
    pub(super) mailbox: WeakMailbox,
}

/// A process's bound connections to one runtime, as the kernel sees them now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BoundConnections {
    pub open: Vec<SocketId>,
    pub lost: Vec<Lost>,
    /// CLOCK_BOOTTIME nanoseconds when the youngest open one was bound; 0 when none is known.
    pub youngest_ns: u64,
}

/// A bound connection that was lost and not yet replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    pub id: SocketId,
    /// CLOCK_BOOTTIME nanoseconds when it was last seen open; 0 when this daemon never did.
    pub open_at_ns: u64,
    /// The runtime has closed its end, too.
    pub released: bool,
}

/// Why a holder's process is not watched.
#[derive(Clone, Debug)]
pub(super) enum Unwatched {
    Gone,
    Failed(String),
}

#[derive(Clone)]
pub(super) struct ViewProcess {
    pub process: Result<Arc<WatchedProcess>, Unwatched>,
    pub bindings: Arc<ProcessBindings<Handle>>,
    pub foreign: Arc<HashSet<u64>>,
    /// Sockets of a process that has ended.
    pub had: Vec<SocketId>,
}

#[derive(Clone)]
pub(super) struct ViewRuntime {
    pub socket_path: PathBuf,
    pub identity: RuntimeIdentity,
    pub pid: Option<u32>,
}

/// What a hook has proved, for the tracker to keep.
pub(super) struct HookBinding {
    pub process: ProcessKey,
    pub runtime: RuntimeId,
    pub passed: Passed,
    /// Seen accepted before the fence was opened.
    pub proved: Vec<(SocketId, FarEnd, Handle)>,
}

impl View {
    /// Is the process present for the runtime, at this moment, by the kernel's word? A few system
    /// calls for each of its bound connections; takes no lock that anything slow holds. With
    /// `inode`, only that connection of the process counts.
    pub fn check(&self, process: &ProcessKey, runtime: RuntimeId, inode: Option<u64>) -> Presence {
        self.check_pardoning(process, runtime, inode, |_| false)
    }

    /// [`View::check`], with lost connections that do not count against it: because they were
    /// another plugin's of the same process.
    pub fn check_pardoning(
        &self,
        process: &ProcessKey,
        runtime: RuntimeId,
        inode: Option<u64>,
        is_pardoned: impl Fn(SocketId) -> bool,
    ) -> Presence {
        let Some(seen) = self.processes.get(process) else {
            return Presence::NeverConnected;
        };
        let watched = match &seen.process {
            Ok(watched) if watched.has_ended() => return Presence::ProcessGone,
            Ok(watched) => watched,
            Err(Unwatched::Gone) => return Presence::ProcessGone,
            Err(Unwatched::Failed(reason)) => {
                return Presence::Unknown {
                    reason: reason.clone(),
                };
            }
        };
        if let Some(reason) = &self.no_evidence {
            return Presence::Unknown {
                reason: reason.clone(),
            };
        }
        let mut noticed = false;
        let identity = self.identity(runtime);
        let presence = seen
            .bindings
            .presence_pardoning(&identity, inode, is_pardoned, |c| {
                let open = is_open(watched, c.id, &c.handle, Asker::Hook);
                noticed |= open == Ok(false);
                open
            });
        if noticed {
            self.mailbox.send(Command::Verify { process: *process });
        }
        // It may have ended in between: then its socket is closed, and that is why.
        match presence {
            Presence::Broken if watched.has_ended() => Presence::ProcessGone,
            other => other,
        }
    }

    /// What became of a living process's bound connections to the runtime. Costs a few system
    /// calls for each: for refusals and the like, not for what passes.
    pub fn bound(&self, process: &ProcessKey, runtime: RuntimeId) -> BoundConnections {
        let mut bound = BoundConnections::default();
        let Some(seen) = self.processes.get(process) else {
            return bound;
        };
        let Ok(watched) = &seen.process else {
            return bound;
        };
        for c in seen.bindings.connections() {
            if c.runtime != Some(runtime) {
                continue;
            }
            let open = match c.state {
                binding::ConnectionState::Broken => Ok(false),
                binding::ConnectionState::Bound => is_open(watched, c.id, &c.handle, Asker::Hook),
                _ => continue,
            };
            if open == Ok(true) {
                bound.open.push(c.id);
                bound.youngest_ns = bound.youngest_ns.max(c.bound_boottime_ns.unwrap_or(0));
            } else if open == Ok(false) {
                bound.lost.push(Lost {
                    id: c.id,
                    open_at_ns: c.handle.open_at_ns.load(Ordering::Relaxed),
                    released: is_released(&c.handle, Asker::Hook),
                });
            }
        }
        bound
    }

    /// As [`super::Tracker::kernel_evidence`], for a hook.
    pub fn kernel_evidence(&self) -> Result<(), &str> {
        self.no_evidence.as_deref().map_or(Ok(()), Err)
    }

    /// [`View::check`] for a hook that would otherwise refuse: looks for a connection that is
    /// accepted and not yet bound, and fences it on the spot, waiting at most `budget` (10 ms at
    /// most). Only valid inside a hook of that runtime.
    ///
    /// The runtime holds its plugin-list lock during the whole hook chain and enters a plugin
    /// into the list under it. A fence accepted during a hook means that everything accepted
    /// before it was in the list before the chain began, and thus part of it. This covers the
    /// time between a plugin's reconnect and the tracker's next scan. With a busy accept loop
    /// the budget passes and nothing is bound.
    pub fn bind_in_hook(
        &self,
        process: &ProcessKey,
        runtime: RuntimeId,
        inode: Option<u64>,
        budget: Duration,
    ) -> Presence {
        let deadline = Instant::now() + budget.min(MAX_HOOK_BUDGET);
        let before = self.check(process, runtime, inode);
        if matches!(
            before,
            Presence::Bound | Presence::ProcessGone | Presence::Unknown { .. }
        ) {
            return before;
        }
        self.search_and_fence(process, runtime, inode, deadline)
            .unwrap_or(before)
    }

    fn search_and_fence(
        &self,
        key: &ProcessKey,
        runtime: RuntimeId,
        inode: Option<u64>,
        deadline: Instant,
    ) -> Option<Presence> {
        let seen = self.processes.get(key)?;
        let watched = seen.process.as_ref().ok()?;
        let netns = self.netns.as_ref()?;
        let path = &self.runtimes.get(&runtime)?.socket_path;
        let identity = self.identity(runtime);
        let now = sys::boottime_ns();
        let mut bindings = ProcessBindings::clone(&seen.bindings);
        let is_settled = |inode: u64| {
            seen.foreign.contains(&inode)
                || seen
                    .bindings
                    .connections()
                    .iter()
                    .any(|c| c.id.inode == inode && c.state == binding::ConnectionState::Bound)
        };
        for found in scan(watched, netns, Asker::Hook, is_settled).found {
            if let Far::Listener { file, .. } = found.far
                && !self.belongs_to_another(key, found.id)
            {
                bindings.observe(found.id, FarEnd::Listener(file), 0, now, found.handle);
            }
        }
        if !bindings.wants_fence(&identity) {
            return None;
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        let passed = Fence::open(path, netns.own().clone(), remaining)
            .and_then(|mut fence| fence.wait(Asker::Hook))
            .map_err(|error| tracing::debug!(pid = key.pid, %error, "no fence within the hook"))
            .ok()?;

        // Everything in `bindings` was seen before the fence was opened.
        let fence = binding::Fence {
            runtime,
            listener: passed.listener,
            opened: u64::MAX,
        };
        let unbound: Vec<SocketId> = bindings
            .connections()
            .iter()
            .filter(|c| c.state != binding::ConnectionState::Bound)
            .map(|c| c.id)
            .collect();
        bindings.bind(&fence, now, |c| {
            is_open(watched, c.id, &c.handle, Asker::Hook) == Ok(true)
        });
        bindings.drop_forgotten(|_| false);
        let proved: Vec<(SocketId, FarEnd, Handle)> = bindings
            .connections()
            .iter()
            .filter(|c| c.state == binding::ConnectionState::Bound && unbound.contains(&c.id))
            .map(|c| (c.id, c.far, c.handle.clone()))
            .collect();
        let identity = RuntimeIdentity {
            listener: Some(passed.listener),
            ..identity
        };
        let presence = bindings.presence(&identity, inode, |c| {
            is_open(watched, c.id, &c.handle, Asker::Hook)
        });
        if !proved.is_empty() {
            self.mailbox.send(Command::HookBound(HookBinding {
                process: *key,
                runtime,
                passed,
                proved,
            }));
        }
        Some(presence)
    }

    /// As the tracker sees it: a socket vouches for one holder only.
    fn belongs_to_another(&self, key: &ProcessKey, id: SocketId) -> bool {
        let mut others = self.processes.iter().filter(|(other, _)| *other != key);
        others.any(|(_, p)| {
            p.had.contains(&id) || p.bindings.connections().iter().any(|c| c.id == id)
        })
    }

    /// The connections of a process as last seen, for `inspect`.
    pub fn connections(&self, process: &ProcessKey) -> Vec<ConnectionInfo> {
        let Some(seen) = self.processes.get(process) else {
            return Vec::new();
        };
        let leads_to = |far: FarEnd| match far {
            FarEnd::Launched(runtime) => Some(runtime),
            FarEnd::Unaccepted => None,
            FarEnd::Listener(file) => {
                let mut runtimes = self.runtimes.values().map(|r| r.identity);
                Some(runtimes.find(|i| i.listener == Some(file))?.runtime)
            }
        };
        let info = |c: &binding::Connection<Handle>| ConnectionInfo {
            runtime: c.runtime.or_else(|| leads_to(c.far)),
            inode: c.id.inode,
            netns_inode: c.handle.netns.inode,
            state: c.state,
            seen_boottime_ns: c.seen_boottime_ns,
            bound_boottime_ns: c.bound_boottime_ns,
            launched: matches!(c.far, FarEnd::Launched(_)),
        };
        seen.bindings.connections().iter().map(info).collect()
    }

    pub(super) fn identity(&self, runtime: RuntimeId) -> RuntimeIdentity {
        let known = self.runtimes.get(&runtime);
        known.map_or(
            RuntimeIdentity {
                runtime,
                listener: None,
            },
            |r| r.identity,
        )
    }
}
