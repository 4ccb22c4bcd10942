//! The one task that owns the state: commands in, durable records and a published snapshot out.
//!
//! ```text
//! a registration:  rpc → command → rules → store, durable → publish → reply
//! time:            timer → tick → rules → store → publish
//! ```
//! Commands that must be durable before they are answered go in groups, one group at the disk at a
//! time; what arrives meanwhile is the next group. Renewals and expiry do not wait for the disk.

use std::collections::VecDeque;
use std::sync::Arc;

use nri_lease_state::rules::{Applied, Change, Command, Durability, Limits, Refusal, Reply, State};
use nri_lease_state::store::{CommitError, Store, Ticket, Tree, Write};
use nri_lease_state::time::Boottime;
use nri_lease_state::{PluginName, ProcessKey};
use tokio::sync::{broadcast, mpsc, oneshot};
use tracing::{error, warn};

use crate::clock::{BootTimer, SystemClock};
use crate::enforce::policy::Policy;
use crate::enforce::snapshot::{Published, Snapshot};
use crate::events::{Event, Events};
use crate::presence::{self, HolderSpec, Tracker};

/// Commands that may wait; further callers wait in their own task.
const QUEUE: usize = 1024;
/// Commands in one group.
const GROUP: usize = 256;

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("{0}")]
    Refused(#[from] Refusal),
    #[error("{0}; leases that exist stay enforced")]
    Store(#[from] CommitError),
    #[error("the daemon is shutting down; try again")]
    Stopped,
}

enum Job {
    Command {
        command: Box<Command>,
        reply: Option<Replier>,
    },
    Reload {
        policy: Arc<Policy>,
        limits: Box<Limits>,
    },
    Publish {
        done: oneshot::Sender<()>,
    },
    Stop {
        done: oneshot::Sender<()>,
    },
}

type Replier = oneshot::Sender<Result<Reply, EngineError>>;

/// A handle to the engine; clones share it.
#[derive(Clone, Debug)]
pub struct Engine {
    jobs: mpsc::Sender<Job>,
    published: Published,
}

/// What the engine starts with.
pub struct Parts {
    pub state: State,
    pub store: Arc<Store>,
    pub policy: Arc<Policy>,
    pub limits: Limits,
    pub clock: SystemClock,
    pub tracker: Tracker,
    pub events: Events,
    pub published: Published,
}

impl Engine {
    /// Starts the task.
    ///
    /// # Errors
    /// The kernel gives no timer.
    pub fn start(parts: Parts) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel(QUEUE);
        let engine = Self {
            jobs,
            published: parts.published.clone(),
        };
        let presence = parts.tracker.events();
        let task = Task {
            timer: BootTimer::new()?,
            group: None,
            waiting: VecDeque::new(),
            holders: Vec::new(),
            awaiting: Vec::new(),
            dirty: true,
            parts,
        };
        tokio::spawn(task.run(queue, presence));
        Ok(engine)
    }

    /// Carries out a command; answered once it is as durable as it has to be.
    ///
    /// # Errors
    /// It was refused, or could not be made durable.
    pub async fn carry_out(&self, command: Command) -> Result<Reply, EngineError> {
        let (reply, answer) = oneshot::channel();
        let job = Job::Command {
            command: Box::new(command),
            reply: Some(reply),
        };
        self.jobs
            .send(job)
            .await
            .map_err(|_| EngineError::Stopped)?;
        answer.await.map_err(|_| EngineError::Stopped)?
    }

    /// Carries out a command whose outcome nobody waits for.
    pub async fn tell(&self, command: Command) {
        let job = Job::Command {
            command: Box::new(command),
            reply: None,
        };
        // Gone only at shutdown.
        let _ = self.jobs.send(job).await;
    }

    /// Waits until hooks see what was told before.
    pub async fn settled(&self) {
        let (done, settled) = oneshot::channel();
        if self.jobs.send(Job::Publish { done }).await.is_ok() {
            // An error is the task having ended.
            let _ = settled.await;
        }
    }

    /// Takes a new configuration over.
    pub async fn reload(&self, policy: Arc<Policy>, limits: Limits) {
        let job = Job::Reload {
            policy,
            limits: Box::new(limits),
        };
        let _ = self.jobs.send(job).await;
    }

    /// Ends the task. Whoever waits for an answer is told that the daemon is shutting down.
    pub async fn stop(&self) {
        let (done, stopped) = oneshot::channel();
        if self.jobs.send(Job::Stop { done }).await.is_ok() {
            // An error is the task having ended, too.
            let _ = stopped.await;
        }
    }

    /// What hooks see now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.published.load_full()
    }
}

/// Commands whose changes are at the disk.
struct Group {
    ticket: Ticket,
    changes: Vec<Change>,
    events: Vec<Event>,
    replies: Vec<(Option<Replier>, Reply)>,
}

struct Task {
    parts: Parts,
    timer: BootTimer,
    group: Option<Group>,
    waiting: VecDeque<(Command, Option<Replier>)>,
    /// As last told to the tracker.
    holders: Vec<HolderSpec>,
    /// Who waits for the next publication.
    awaiting: Vec<oneshot::Sender<()>>,
    dirty: bool,
}

impl Task {
    async fn run(
        mut self,
        mut queue: mpsc::Receiver<Job>,
        mut presence: broadcast::Receiver<presence::Event>,
    ) {
        self.apply_now(Command::Tick, None);
        loop {
            // What was seen before a command came is told before the command counts.
            while let Ok(event) = presence.try_recv() {
                self.presence_changed(Ok(event));
            }
            self.start_group();
            self.publish();
            for done in self.awaiting.drain(..) {
                // Whoever waited may have given up.
                let _ = done.send(());
            }
            tokio::select! {
                answer = async { (&mut self.group.as_mut().expect("guarded").ticket).await },
                    if self.group.is_some() => self.finish_group(answer),
                fired = self.timer.fired() => {
                    if let Err(error) = fired {
                        error!(%error, "the expiry timer failed");
                    }
                    self.apply_now(Command::Tick, None);
                }
                event = presence.recv() => self.presence_changed(event),
                job = queue.recv(), if self.waiting.len() < GROUP => match job {
                    Some(Job::Command { command, reply }) => self.take(*command, reply),
                    Some(Job::Reload { policy, limits }) => {
                        self.parts.policy = policy;
                        self.parts.limits = *limits;
                        self.dirty = true;
                    }
                    Some(Job::Publish { done }) => self.awaiting.push(done),
                    Some(Job::Stop { done }) => {
                        let _ = done.send(());
                        return;
                    }
                    None => return,
                },
            }
            // A group takes what is there, so that it is as large as the load is.
            while self.waiting.len() < GROUP {
                match queue.try_recv() {
                    Ok(Job::Command { command, reply }) => self.take(*command, reply),
                    Ok(Job::Reload { policy, limits }) => {
                        self.parts.policy = policy;
                        self.parts.limits = *limits;
                        self.dirty = true;
                    }
                    Ok(Job::Publish { done }) => self.awaiting.push(done),
                    Ok(Job::Stop { done }) => {
                        let _ = done.send(());
                        return;
                    }
                    Err(_) => break,
                }
            }
        }
    }

    fn take(&mut self, command: Command, reply: Option<Replier>) {
        if is_durable(&command) {
            self.waiting.push_back((command, reply));
        } else {
            self.apply_now(command, reply);
        }
    }

    /// A command that is answered from memory and written soon.
    fn apply_now(&mut self, command: Command, reply: Option<Replier>) {
        let outcome = self.apply(command).map(|applied| {
            self.write_soon(&applied.changes);
            if applied
                .changes
                .iter()
                .any(|change| change.key.tree == Tree::Leases && change.after.is_none())
            {
                self.parts.store.mirror_soon();
            }
            for event in applied.events {
                self.parts.events.tell(event.into());
            }
            applied.reply
        });
        respond(reply, outcome);
    }

    fn apply(&mut self, command: Command) -> Result<Applied, EngineError> {
        let now = self.parts.clock.now();
        let applied = self.parts.state.apply(command, &now, &self.parts.limits)?;
        self.dirty |= !applied.changes.is_empty();
        Ok(applied)
    }

    /// Sends what waits to the disk, unless a group is there already.
    fn start_group(&mut self) {
        if self.group.is_some() || self.waiting.is_empty() {
            return;
        }
        let mut changes = Vec::new();
        let mut events = Vec::new();
        let mut replies = Vec::new();
        for (command, reply) in std::mem::take(&mut self.waiting) {
            match self.apply(command) {
                Err(refused) => respond(reply, Err(refused)),
                Ok(applied) if applied.durability == Durability::Barrier => {
                    changes.extend(applied.changes);
                    events.extend(applied.events.into_iter().map(Event::from));
                    replies.push((reply, applied.reply));
                }
                Ok(applied) => {
                    self.write_soon(&applied.changes);
                    for event in applied.events {
                        self.parts.events.tell(event.into());
                    }
                    respond(reply, Ok(applied.reply));
                }
            }
        }
        if replies.is_empty() {
            return;
        }
        let ticket = self.parts.store.commit(writes(&changes));
        self.group = Some(Group {
            ticket,
            changes,
            events,
            replies,
        });
    }

    fn finish_group(&mut self, answer: Result<(), CommitError>) {
        let Some(group) = self.group.take() else {
            return;
        };
        self.dirty = true;
        match answer {
            Ok(()) => {
                self.publish();
                for event in group.events {
                    self.parts.events.tell(event);
                }
                for (reply, outcome) in group.replies {
                    respond(reply, Ok(outcome));
                }
                self.parts.store.mirror_soon();
            }
            Err(error) => {
                warn!(%error, commands = group.replies.len(), "not durable, taken back");
                self.parts.state.undo(&group.changes);
                // A renewal in between may have queued a record that now is not to be.
                self.rewrite(&group.changes);
                self.publish();
                for (reply, _) in group.replies {
                    respond(reply, Err(error.clone().into()));
                }
            }
        }
    }

    fn rewrite(&self, changes: &[Change]) {
        let as_they_are = changes
            .iter()
            .map(|change| Write {
                tree: change.key.tree,
                key: change.key.key.clone(),
                value: self
                    .parts
                    .state
                    .record(&change.key)
                    .map(|record| record.encode()),
            })
            .collect();
        self.parts.store.write_soon(as_they_are);
    }

    fn write_soon(&self, changes: &[Change]) {
        if !changes.is_empty() {
            self.parts.store.write_soon(writes(changes));
        }
    }

    /// Makes the state visible to hooks, tells the tracker whom to watch, and sets the timer.
    fn publish(&mut self) {
        if !std::mem::take(&mut self.dirty) {
            return;
        }
        self.parts.published.store(Arc::new(Snapshot {
            state: self.parts.state.clone(),
            policy: self.parts.policy.clone(),
            hold_until: self.parts.published.load().hold_until,
        }));
        let holders: Vec<HolderSpec> = self
            .parts
            .state
            .leases()
            .values()
            .flat_map(|lease| &lease.holders)
            .map(|holder| HolderSpec {
                process: holder.facts.process,
                connection_inode: holder.facts.connection_inode,
            })
            .collect();
        if holders != self.holders {
            self.parts.tracker.set_holders(holders.clone());
            self.holders = holders;
        }
        let next: Option<Boottime> = self.parts.state.next_deadline();
        if let Err(error) = self.timer.set(next) {
            error!(%error, "cannot set the expiry timer");
        }
    }

    fn presence_changed(&mut self, event: Result<presence::Event, broadcast::error::RecvError>) {
        match event {
            Ok(presence::Event::ProcessGone { process }) => {
                self.apply_now(Command::HolderLost { process }, None);
            }
            Ok(presence::Event::Connected { process, .. }) => {
                self.tell_holder(process, Event::holder_connected);
            }
            Ok(presence::Event::Disconnected { process, .. }) => {
                self.tell_holder(process, Event::holder_disconnected);
            }
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                warn!(
                    missed,
                    "presence events were missed; looking at every holder"
                );
                let gone: Vec<_> = self
                    .holders
                    .iter()
                    .map(|holder| holder.process)
                    .filter(|process| presence::proc::key_of(process.pid).ok() != Some(*process))
                    .collect();
                for process in gone {
                    self.apply_now(Command::HolderLost { process }, None);
                }
            }
            // The tracker ends with the daemon.
            Err(broadcast::error::RecvError::Closed) => {}
        }
    }

    /// Tells it of every lease that the process holds.
    fn tell_holder(&self, process: ProcessKey, event: fn(&PluginName, ProcessKey) -> Event) {
        for lease in self.parts.state.leases().values() {
            if lease.is_held_by(process) {
                self.parts.events.tell(event(&lease.plugin, process));
            }
        }
    }
}

fn respond(reply: Option<Replier>, outcome: Result<Reply, EngineError>) {
    match reply {
        // The caller may have gone away; the command stands.
        Some(reply) => drop(reply.send(outcome)),
        None => {
            if let Err(error) = outcome {
                warn!(%error, "a command of the daemon itself was refused");
            }
        }
    }
}

/// Commands that are answered only after a barrier.
fn is_durable(command: &Command) -> bool {
    matches!(
        command,
        Command::Register { .. }
            | Command::Release { .. }
            | Command::Revoke { .. }
            | Command::SetBan { .. }
            | Command::LiftBan { .. }
            | Command::Pin { .. }
            | Command::Unpin { .. }
            | Command::Pause { .. }
            | Command::Resume
            | Command::RuntimeSynchronized
    )
}

/// The changes as the store takes them.
pub fn writes(changes: &[Change]) -> Vec<Write> {
    changes
        .iter()
        .map(|change| Write {
            tree: change.key.tree,
            key: change.key.key.clone(),
            value: change.after.as_ref().map(|record| record.encode()),
        })
        .collect()
}
