//! The rules of leases (DESIGN section 3): (state, command, now) → changes, events, a reply.
//!
//! [`State::apply`] is the one way in. It changes the state in memory and says which records
//! changed and how durable they must be; writing them, and [`State::undo`] when that fails, is the
//! caller's. One command, one file.

mod ban;
mod event;
mod holder_lost;
mod holder_moved;
mod lease;
mod limits;
mod load;
mod pause;
mod pin;
mod refusal;
mod register;
mod release;
mod renew;
mod revoke;
mod runtime;
mod sandbox;
mod state;
#[cfg(test)]
mod tests;
mod tick;
mod transition;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub use event::{Event, EventKind};
pub use lease::Lease;
pub use limits::Limits;
pub use load::{LoadIssue, LoadProblem, Loaded, Recovery};
pub use refusal::{Refusal, RefusalKind};
pub use sandbox::{PresentSandbox, SandboxPod};
pub use state::{BanMap, LeaseMap, PinMap, PinsOfPod, SandboxMap, State};

use crate::name::{PluginIndex, PluginName, PodUid};
use crate::process::{HolderFacts, PodIdentity, ProcessKey};
use crate::record::{BanRecord, Mode, PauseRecord, PinRecord, Record, RecordKey};
use crate::scope::Scope;
use crate::time::{Now, Ttl};

/// What can happen to leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Rules 1 and 7. The holder's process must have been seen alive by the caller.
    Register {
        plugin: PluginName,
        /// None: the default.
        ttl: Option<Ttl>,
        scope: Scope,
        mode: Mode,
        index: Option<PluginIndex>,
        /// NRI's event mask; None: not said; 0: all.
        events: Option<i32>,
        holder: HolderFacts,
    },
    /// Rule 2. `holders`: processes that the caller may speak for.
    Renew {
        plugin: PluginName,
        holders: Vec<ProcessKey>,
    },
    /// Rule 3. `processes`: those that the caller may speak for.
    Release {
        plugin: PluginName,
        processes: Vec<ProcessKey>,
    },
    /// A process is gone; every lease that it held goes on without it.
    HolderLost { process: ProcessKey },
    /// The holder that was registered as a subject turned out not to own the NRI connection, and a
    /// descendant of the subject does: that one becomes the holder. No such holder is no error.
    HolderMoved {
        plugin: PluginName,
        from: ProcessKey,
        to: HolderFacts,
    },
    /// Rule 5.
    Revoke {
        plugin: PluginName,
        ban: Option<Duration>,
        reason: String,
        by_uid: u32,
    },
    SetBan {
        plugin: PluginName,
        duration: Duration,
        reason: String,
        by_uid: u32,
    },
    /// No such ban is no error.
    LiftBan { plugin: PluginName },
    /// Rule 8; a pin that exists gets its TTL anew.
    Pin {
        plugin: PluginName,
        pod_uid: PodUid,
        /// None: the default for pins.
        ttl: Option<Ttl>,
    },
    /// No such pin is no error.
    Unpin { plugin: PluginName, pod_uid: PodUid },
    /// The pod itself is gone, not just one of its sandboxes: its pins go.
    PodGone { pod_uid: PodUid },
    /// All pods that a runtime (its NRI socket) has, compared at Synchronize: pins of a pod that
    /// it had once and has no more go.
    PodsSeen {
        runtime: String,
        present: BTreeSet<PodUid>,
    },
    /// Break-glass.
    Pause {
        duration: Duration,
        reason: String,
        by_uid: u32,
    },
    /// Not paused is no error.
    Resume,
    /// A runtime is synchronised: the reboot grace of rule 6 begins, at the first one. To be
    /// applied before the first hook of the runtime is answered, where possible.
    RuntimeSynchronized,
    /// NRI's pod list, or one pod of it: who the holders' pods are.
    LearnPods { pods: Vec<PodIdentity> },
    /// A sandbox starts; `unvetted`: plugins that may have missed it, and why.
    SandboxAppeared {
        sandbox: SandboxPod,
        unvetted: Vec<(PluginName, String)>,
    },
    /// A sandbox is removed; with a pod's last one that is known, the pod's pins go.
    SandboxGone { sandbox_id: String },
    /// What was found out about a known sandbox later. An unknown one is no error.
    SandboxVetting {
        sandbox_id: String,
        vetted: Vec<PluginName>,
        unvetted: Vec<(PluginName, String)>,
    },
    /// All sandboxes that a runtime has, compared at Synchronize: unknown ones appeared while the
    /// daemon was not connected and are unvetted for the plugins that cover them; at first contact
    /// with the runtime they are grandfathered. Known ones that it has no more are forgotten.
    SandboxesSynchronized {
        runtime: String,
        present: Vec<PresentSandbox>,
    },
    /// Removes what has ended. At most [`Limits::max_expired_per_tick`] records at once; tick again
    /// while [`State::next_deadline`] has passed.
    Tick,
}

/// What a command answers.
#[derive(Debug, Clone)]
pub enum Reply {
    Registered {
        lease: Arc<Lease>,
    },
    Renewed {
        lease: Arc<Lease>,
    },
    Released {
        ended: bool,
        holders_left: usize,
    },
    Revoked {
        /// As it was.
        lease: Arc<Lease>,
        ban: Option<Arc<BanRecord>>,
    },
    Ban {
        /// None: lifted.
        ban: Option<Arc<BanRecord>>,
        existed: bool,
    },
    Pinned {
        pin: Arc<PinRecord>,
    },
    Unpinned {
        existed: bool,
    },
    Pause {
        /// None: resumed.
        pause: Option<Arc<PauseRecord>>,
        was_paused: bool,
    },
    Done,
}

/// When the changes must have reached the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// Nothing to write.
    None,
    /// Soon, coalesced; losing it in a crash is allowed.
    Soon,
    /// Before the command is acknowledged; when the write fails, [`State::undo`].
    Barrier,
}

/// One record before and after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub key: RecordKey,
    /// None: it was not there.
    pub before: Option<Record>,
    /// None: it is removed.
    pub after: Option<Record>,
}

/// A command that was carried out, in memory.
#[derive(Debug, Clone)]
pub struct Applied {
    pub reply: Reply,
    pub changes: Vec<Change>,
    /// To be sent out once the changes are as durable as they must be.
    pub events: Vec<Event>,
    pub durability: Durability,
}

impl State {
    /// Carries out one command.
    ///
    /// # Errors
    /// A [`Refusal`]; the state is then unchanged.
    pub fn apply(
        &mut self,
        command: Command,
        now: &Now,
        limits: &Limits,
    ) -> Result<Applied, Refusal> {
        let mut transition = transition::Transition::new(self, now, limits);
        match command.carry_out(&mut transition) {
            Ok(reply) => Ok(transition.finish(reply)),
            Err(refusal) => {
                transition.abandon();
                Err(refusal)
            }
        }
    }
}

impl Command {
    fn carry_out(self, t: &mut transition::Transition<'_>) -> Result<Reply, Refusal> {
        match self {
            Command::Register {
                plugin,
                ttl,
                scope,
                mode,
                index,
                events,
                holder,
            } => register::register(
                t,
                register::Registration {
                    plugin,
                    ttl,
                    scope,
                    mode,
                    index,
                    events,
                    holder,
                },
            ),
            Command::Renew { plugin, holders } => renew::renew(t, &plugin, &holders),
            Command::Release { plugin, processes } => release::release(t, &plugin, &processes),
            Command::HolderLost { process } => Ok(holder_lost::holder_lost(t, process)),
            Command::HolderMoved { plugin, from, to } => {
                holder_moved::holder_moved(t, &plugin, from, to)
            }
            Command::Revoke {
                plugin,
                ban,
                reason,
                by_uid,
            } => revoke::revoke(t, &plugin, ban, reason, by_uid),
            Command::SetBan {
                plugin,
                duration,
                reason,
                by_uid,
            } => ban::set_ban(t, plugin, duration, reason, by_uid),
            Command::LiftBan { plugin } => Ok(ban::lift_ban(t, &plugin)),
            Command::Pin {
                plugin,
                pod_uid,
                ttl,
            } => pin::pin(t, plugin, pod_uid, ttl),
            Command::Unpin { plugin, pod_uid } => Ok(pin::unpin(t, &plugin, &pod_uid)),
            Command::PodGone { pod_uid } => Ok(pin::pod_gone(t, &pod_uid)),
            Command::PodsSeen { runtime, present } => Ok(pin::pods_seen(t, &runtime, &present)),
            Command::Pause {
                duration,
                reason,
                by_uid,
            } => pause::pause(t, duration, reason, by_uid),
            Command::Resume => Ok(pause::resume(t)),
            Command::RuntimeSynchronized => Ok(runtime::runtime_synchronized(t)),
            Command::LearnPods { pods } => Ok(runtime::learn_pods(t, &pods)),
            Command::SandboxAppeared { sandbox, unvetted } => {
                sandbox::appeared(t, sandbox, unvetted)
            }
            Command::SandboxGone { sandbox_id } => Ok(sandbox::gone(t, &sandbox_id)),
            Command::SandboxVetting {
                sandbox_id,
                vetted,
                unvetted,
            } => Ok(sandbox::vetting(t, &sandbox_id, vetted, unvetted)),
            Command::SandboxesSynchronized { runtime, present } => {
                Ok(sandbox::synchronized(t, runtime, present))
            }
            Command::Tick => Ok(tick::tick(t)),
        }
    }
}
