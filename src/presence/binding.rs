//! When a connection counts: the rules of one connection and of one process, as pure code.
//!
//! Pending → Accepted → (fence) Bound → Broken. What was never bound is simply forgotten when it
//! closes. Time is a sequence number that the tracker counts up: an observation has the number
//! at which it was complete, a fence the number at which it was about to be opened. A fence binds
//! what was seen accepted at a smaller number. The payload `H` is whatever the tracker needs to
//! ask the kernel again; nothing here does.

use super::tracker::RuntimeId;
use super::unix_diag::VfsId;

/// Connections watched per process. Those to sockets known to be no runtime's do not count.
pub const MAX_CONNECTIONS: usize = 256;

/// The evidence for one holder and one runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The process lives and all its bound connections to the runtime are open.
    Bound,
    /// No connection to this runtime is known.
    NeverConnected,
    /// A connection waits to be accepted (the kernel does not tell by whom).
    Pending,
    /// Accepted, but the runtime has not synchronised it yet, as far as is known.
    NotSynchronised,
    /// The runtime, or the process itself, has closed a bound connection.
    Broken,
    /// The process has ended.
    ProcessGone,
    /// The kernel could not be asked: because it has no unix_diag, as `View::kernel_evidence`
    /// says, or about this one process (no descriptors left, no permission). Only the first is a
    /// reason to let another source decide alone.
    Unknown { reason: String },
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// In the accept queue of some listening socket.
    Pending,
    /// Accepted at this sequence number or before.
    Accepted { at: u64 },
    /// A fence has passed after it was seen accepted.
    Bound,
    /// It was bound, and is closed.
    Broken,
}

/// One connection of a process, for `inspect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// `None`: not yet known which runtime is at the other end.
    pub runtime: Option<RuntimeId>,
    pub inode: u64,
    pub netns_inode: u64,
    pub state: ConnectionState,
    /// CLOCK_BOOTTIME nanoseconds when it was first seen.
    pub seen_boottime_ns: u64,
    /// CLOCK_BOOTTIME nanoseconds when it was bound.
    pub bound_boottime_ns: Option<u64>,
    /// The runtime started the plugin itself (a socketpair, no listening socket).
    pub launched: bool,
}

/// A socket over the life of the kernel: inodes are reused, cookies are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SocketId {
    pub inode: u64,
    pub cookie: u64,
}

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FarEnd {
    /// Nobody yet: in an accept queue.
    Unaccepted,
    /// An end accepted from the listening socket with this file.
    Listener(VfsId),
    /// An unnamed socket in this runtime's own descriptor table.
    Launched(RuntimeId),
}

/// How a runtime's connections are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimeIdentity {
    pub runtime: RuntimeId,
    /// `None` until a fence or the daemon's own connection has shown it.
    pub listener: Option<VfsId>,
}

/// A fence that was seen accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    pub runtime: RuntimeId,
    pub listener: VfsId,
    /// The sequence number just before it was opened.
    pub opened: u64,
}

/// One connection and what is known of it.
#[derive(Clone, Debug)]
pub struct Connection<H> {
    pub id: SocketId,
    pub far: FarEnd,
    pub state: ConnectionState,
    /// Set once it is bound.
    pub runtime: Option<RuntimeId>,
    pub seen_boottime_ns: u64,
    pub bound_boottime_ns: Option<u64>,
    pub handle: H,
}

impl<H> Connection<H> {
    /// Whether it leads to this runtime, as far as is known.
    fn may_lead_to(&self, identity: &RuntimeIdentity) -> bool {
        match (self.runtime, self.far) {
            (Some(runtime), _) | (None, FarEnd::Launched(runtime)) => runtime == identity.runtime,
            (None, FarEnd::Listener(file)) => identity.listener.is_none_or(|l| l == file),
            (None, FarEnd::Unaccepted) => false,
        }
    }

    fn is_bound_by(&self, fence: &Fence) -> bool {
        let leads_there = match self.far {
            FarEnd::Listener(file) => file == fence.listener,
            FarEnd::Launched(runtime) => runtime == fence.runtime,
            FarEnd::Unaccepted => false,
        };
        leads_there && matches!(self.state, ConnectionState::Accepted { at } if at < fence.opened)
    }
}

/// All connections of one process that matter.
#[derive(Clone, Debug)]
pub struct ProcessBindings<H> {
    /// In the order in which they were first seen.
    connections: Vec<Connection<H>>,
}

impl<H> Default for ProcessBindings<H> {
    fn default() -> Self {
        Self {
            connections: Vec::new(),
        }
    }
}

impl<H> ProcessBindings<H> {
    pub fn connections(&self) -> &[Connection<H>] {
        &self.connections
    }

    /// The handles of bound connections to this runtime, to be completed.
    pub fn bound_handles_mut(&mut self, runtime: RuntimeId) -> impl Iterator<Item = &mut H> {
        self.connections
            .iter_mut()
            .filter(move |c| c.state == ConnectionState::Bound && c.runtime == Some(runtime))
            .map(|c| &mut c.handle)
    }

    /// An open or pending connection was seen. Returns whether anything changed.
    pub fn observe(
        &mut self,
        id: SocketId,
        far: FarEnd,
        at: u64,
        boottime_ns: u64,
        handle: H,
    ) -> bool {
        let state = match far {
            FarEnd::Unaccepted => ConnectionState::Pending,
            FarEnd::Listener(_) | FarEnd::Launched(_) => ConnectionState::Accepted { at },
        };
        if let Some(known) = self.connections.iter_mut().find(|c| c.id == id) {
            let newly_accepted =
                known.state == ConnectionState::Pending && state != ConnectionState::Pending;
            if newly_accepted {
                known.far = far;
                known.state = state;
                known.handle = handle;
            }
            return newly_accepted;
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            return false;
        }
        self.connections.push(Connection {
            id,
            far,
            state,
            runtime: None,
            seen_boottime_ns: boottime_ns,
            bound_boottime_ns: None,
            handle,
        });
        true
    }

    /// A connection bound before a restart of the daemon, which the kernel has confirmed, or
    /// (`broken`) has not.
    pub fn restore(&mut self, mut connection: Connection<H>, runtime: RuntimeId, broken: bool) {
        connection.state = match broken {
            true => ConnectionState::Broken,
            false => ConnectionState::Bound,
        };
        connection.runtime = Some(runtime);
        self.connections.retain(|c| c.id != connection.id);
        if self.connections.len() < MAX_CONNECTIONS {
            self.connections.push(connection);
        }
    }

    /// Asks about every connection that matches, and takes note of those that are closed.
    /// Returns whether anything changed.
    pub fn verify(
        &mut self,
        mut which: impl FnMut(&Connection<H>) -> bool,
        mut is_open: impl FnMut(&Connection<H>) -> bool,
    ) -> bool {
        let mut changed = false;
        self.connections.retain_mut(|c| {
            if c.state == ConnectionState::Broken || !which(c) || is_open(c) {
                return true;
            }
            changed = true;
            if c.state == ConnectionState::Bound {
                c.state = ConnectionState::Broken;
                return true;
            }
            false
        });
        changed
    }

    /// A fence was accepted: binds what it proves and what is still open. Returns whether
    /// anything changed.
    ///
    /// Each newly bound connection takes the place of one broken one, the oldest, and not of all:
    /// in a process that hosts two plugins, both lost in a restart of the runtime, the first to
    /// come back must not vouch for the other.
    pub fn bind(
        &mut self,
        fence: &Fence,
        boottime_ns: u64,
        mut is_open: impl FnMut(&Connection<H>) -> bool,
    ) -> bool {
        self.bind_where(fence, boottime_ns, |c| c.is_bound_by(fence), &mut is_open)
    }

    /// [`ProcessBindings::bind`] for a fence opened elsewhere (in a hook): binds only what was
    /// proved there, because sequence numbers say nothing about the order of the two.
    pub fn bind_proved(
        &mut self,
        fence: &Fence,
        proved: &[SocketId],
        boottime_ns: u64,
        mut is_open: impl FnMut(&Connection<H>) -> bool,
    ) -> bool {
        let is_proved = |c: &Connection<H>| proved.contains(&c.id) && c.is_bound_by(fence);
        self.bind_where(fence, boottime_ns, is_proved, &mut is_open)
    }

    fn bind_where(
        &mut self,
        fence: &Fence,
        boottime_ns: u64,
        is_bound: impl Fn(&Connection<H>) -> bool,
        is_open: &mut impl FnMut(&Connection<H>) -> bool,
    ) -> bool {
        if !self.connections.iter().any(&is_bound) {
            return false;
        }
        // First what was bound before: a connection that broke unnoticed must be replaced, too.
        self.verify(|_| true, is_open);
        for at in 0.. {
            let Some(connection) = self.connections.get_mut(at) else {
                break;
            };
            if is_bound(connection) {
                connection.state = ConnectionState::Bound;
                connection.runtime = Some(fence.runtime);
                connection.bound_boottime_ns = Some(boottime_ns);
                self.forget_oldest_broken(fence.runtime);
            }
        }
        true
    }

    fn forget_oldest_broken(&mut self, runtime: RuntimeId) {
        let oldest = self
            .connections
            .iter_mut()
            .find(|c| c.state == ConnectionState::Broken && c.runtime == Some(runtime));
        // Marked here and removed by `drop_forgotten`, so that indices stay.
        if let Some(oldest) = oldest {
            oldest.runtime = None;
        }
    }

    /// Broken connections to a runtime no longer count. Returns whether there were any.
    pub fn forget_broken(&mut self, runtime: RuntimeId) -> bool {
        let before = self.connections.len();
        self.connections
            .retain(|c| c.state != ConnectionState::Broken || c.runtime != Some(runtime));
        self.connections.len() != before
    }

    /// Drops what can no longer matter: broken connections that were replaced, and accepted ones
    /// for which `is_foreign` holds. Returns whether there were any.
    pub fn drop_forgotten(&mut self, mut is_foreign: impl FnMut(FarEnd) -> bool) -> bool {
        let before = self.connections.len();
        self.connections.retain(|c| match c.state {
            ConnectionState::Broken => c.runtime.is_some(),
            ConnectionState::Accepted { .. } => !is_foreign(c.far),
            ConnectionState::Pending | ConnectionState::Bound => true,
        });
        self.connections.len() != before
    }

    /// Whether a fence for this runtime, if one were opened now, could bind something.
    pub fn wants_fence(&self, identity: &RuntimeIdentity) -> bool {
        self.connections
            .iter()
            .any(|c| matches!(c.state, ConnectionState::Accepted { .. }) && c.may_lead_to(identity))
    }

    pub fn has_pending(&self) -> bool {
        let mut states = self.connections.iter().map(|c| c.state);
        states.any(|s| s == ConnectionState::Pending)
    }

    /// Whether the tracker should look for new connections to this runtime.
    pub fn is_settled(&self, identity: &RuntimeIdentity) -> bool {
        !self.wants_fence(identity)
            && self.presence(identity, None, |_| Ok(true)) == Presence::Bound
    }

    /// The verdict for one runtime. `is_open` is asked about bound connections only; with
    /// `inode`, only that connection counts.
    pub fn presence(
        &self,
        identity: &RuntimeIdentity,
        inode: Option<u64>,
        is_open: impl FnMut(&Connection<H>) -> Result<bool, String>,
    ) -> Presence {
        self.presence_pardoning(identity, inode, |_| false, is_open)
    }

    /// [`ProcessBindings::presence`], with connections that are lost and do not count against it.
    pub fn presence_pardoning(
        &self,
        identity: &RuntimeIdentity,
        inode: Option<u64>,
        is_pardoned: impl Fn(SocketId) -> bool,
        mut is_open: impl FnMut(&Connection<H>) -> Result<bool, String>,
    ) -> Presence {
        let mut weaker = Presence::NeverConnected;
        let mut bound = false;
        let mut unknown = None;
        let counts = |c: &&Connection<H>| inode.is_none_or(|inode| inode == c.id.inode);
        for connection in self.connections.iter().filter(counts) {
            match connection.state {
                ConnectionState::Pending if weaker == Presence::NeverConnected => {
                    weaker = Presence::Pending;
                }
                ConnectionState::Accepted { .. } if connection.may_lead_to(identity) => {
                    weaker = Presence::NotSynchronised;
                }
                ConnectionState::Bound if connection.runtime == Some(identity.runtime) => {
                    match is_open(connection) {
                        Ok(true) => bound = true,
                        Ok(false) if is_pardoned(connection.id) => {}
                        Ok(false) => return Presence::Broken,
                        Err(reason) => unknown = Some(reason),
                    }
                }
                ConnectionState::Broken
                    if connection.runtime == Some(identity.runtime)
                        && !is_pardoned(connection.id) =>
                {
                    return Presence::Broken;
                }
                _ => {}
            }
        }
        match unknown {
            Some(reason) => Presence::Unknown { reason },
            None if bound => Presence::Bound,
            None => weaker,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: RuntimeId = RuntimeId(1);
    const OTHER: RuntimeId = RuntimeId(2);
    const FILE: VfsId = VfsId { dev: 1, ino: 7 };
    const OTHER_FILE: VfsId = VfsId { dev: 1, ino: 8 };
    const KNOWN: RuntimeIdentity = RuntimeIdentity {
        runtime: R,
        listener: Some(FILE),
    };

    type Bindings = ProcessBindings<()>;

    fn id(inode: u64) -> SocketId {
        SocketId {
            inode,
            cookie: inode + 100,
        }
    }

    fn fence(opened: u64) -> Fence {
        Fence {
            runtime: R,
            listener: FILE,
            opened,
        }
    }

    fn accepted(bindings: &mut Bindings, inode: u64, at: u64) {
        bindings.observe(id(inode), FarEnd::Listener(FILE), at, 0, ());
    }

    fn lose(bindings: &mut Bindings, inode: u64) {
        bindings.verify(|c| c.id.inode == inode, |_| false);
    }

    fn pass(bindings: &mut Bindings, opened: u64) {
        bindings.bind(&fence(opened), 0, |_| true);
        bindings.drop_forgotten(|_| false);
    }

    fn presence(bindings: &Bindings) -> Presence {
        bindings.presence(&KNOWN, None, |_| Ok(true))
    }

    #[test]
    fn a_connection_is_bound_only_by_a_fence_opened_after_it_was_seen_accepted() {
        let mut b = Bindings::default();
        assert_eq!(presence(&b), Presence::NeverConnected);
        b.observe(id(1), FarEnd::Unaccepted, 1, 0, ());
        assert_eq!(presence(&b), Presence::Pending);
        pass(&mut b, 2);
        assert_eq!(presence(&b), Presence::Pending);
        accepted(&mut b, 1, 5);
        assert_eq!(presence(&b), Presence::NotSynchronised);
        pass(&mut b, 4);
        pass(&mut b, 5);
        assert_eq!(presence(&b), Presence::NotSynchronised);
        pass(&mut b, 6);
        assert_eq!(presence(&b), Presence::Bound);
    }

    #[test]
    fn seeing_it_again_does_not_make_it_younger() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 5);
        accepted(&mut b, 1, 9);
        pass(&mut b, 7);
        assert_eq!(presence(&b), Presence::Bound);
    }

    #[test]
    fn a_fence_of_another_runtime_or_listener_binds_nothing() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        let other = Fence {
            runtime: OTHER,
            listener: OTHER_FILE,
            opened: 9,
        };
        assert!(!b.bind(&other, 0, |_| true));
        assert_eq!(presence(&b), Presence::NotSynchronised);
        pass(&mut b, 9);
        let of_other = RuntimeIdentity {
            runtime: OTHER,
            listener: Some(OTHER_FILE),
        };
        let there = b.presence(&of_other, None, |_| Ok(true));
        assert_eq!(there, Presence::NeverConnected);
    }

    #[test]
    fn a_connection_that_closed_before_the_fence_passed_is_forgotten() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        b.bind(&fence(2), 0, |_| false);
        assert_eq!(presence(&b), Presence::NeverConnected);
    }

    #[test]
    fn a_bound_connection_that_closes_stays_broken() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        pass(&mut b, 2);
        // Found closed at decision time, before the tracker knows.
        let now = b.presence(&KNOWN, None, |_| Ok(false));
        assert_eq!(now, Presence::Broken);
        lose(&mut b, 1);
        assert_eq!(presence(&b), Presence::Broken);
        // Merely connecting again does not mend it.
        accepted(&mut b, 2, 3);
        assert_eq!(presence(&b), Presence::Broken);
        pass(&mut b, 4);
        assert_eq!(presence(&b), Presence::Bound);
    }

    #[test]
    fn a_connection_that_broke_unnoticed_is_replaced_by_the_next_one_bound() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        pass(&mut b, 2);
        accepted(&mut b, 2, 3);
        b.bind(&fence(4), 0, |c| c.id.inode == 2);
        b.drop_forgotten(|_| false);
        assert_eq!(presence(&b), Presence::Bound);
        assert_eq!(b.connections().len(), 1);
    }

    #[test]
    fn one_of_two_plugins_in_a_process_cannot_vouch_for_the_other() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        accepted(&mut b, 2, 1);
        pass(&mut b, 2);
        lose(&mut b, 1);
        assert_eq!(presence(&b), Presence::Broken);
        // Named at registration, each counts for itself.
        let one = b.presence(&KNOWN, Some(1), |_| Ok(true));
        let two = b.presence(&KNOWN, Some(2), |_| Ok(true));
        assert_eq!((one, two), (Presence::Broken, Presence::Bound));
    }

    #[test]
    fn after_losing_two_connections_one_new_one_is_not_enough() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        accepted(&mut b, 2, 1);
        pass(&mut b, 2);
        lose(&mut b, 1);
        lose(&mut b, 2);
        accepted(&mut b, 3, 3);
        pass(&mut b, 4);
        assert_eq!(presence(&b), Presence::Broken);
        accepted(&mut b, 4, 5);
        pass(&mut b, 6);
        assert_eq!(presence(&b), Presence::Bound);
    }

    #[test]
    fn being_listed_mends_what_is_broken_but_binds_nothing() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        accepted(&mut b, 2, 1);
        pass(&mut b, 2);
        lose(&mut b, 1);
        assert!(b.forget_broken(R));
        assert_eq!(presence(&b), Presence::Bound);
        lose(&mut b, 2);
        assert!(b.forget_broken(R));
        assert_eq!(presence(&b), Presence::NeverConnected);
    }

    #[test]
    fn a_pardoned_loss_does_not_count_and_binds_nothing() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        accepted(&mut b, 2, 1);
        pass(&mut b, 2);
        lose(&mut b, 1);
        let pardoning = |b: &Bindings, inode| {
            b.presence_pardoning(&KNOWN, None, |lost| lost == id(inode), |_| Ok(true))
        };
        assert_eq!(pardoning(&b, 1), Presence::Bound);
        assert_eq!(pardoning(&b, 2), Presence::Broken);
        lose(&mut b, 2);
        assert_eq!(pardoning(&b, 1), Presence::Broken);
    }

    #[test]
    fn an_unanswered_question_is_not_a_yes() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        accepted(&mut b, 2, 1);
        pass(&mut b, 2);
        let verdict = b.presence(&KNOWN, None, |c| match c.id.inode {
            1 => Err("no".into()),
            _ => Ok(true),
        });
        assert!(matches!(verdict, Presence::Unknown { .. }));
    }

    #[test]
    fn a_launched_plugin_is_bound_by_a_fence_of_its_runtime() {
        let mut b = Bindings::default();
        b.observe(id(1), FarEnd::Launched(R), 1, 0, ());
        assert!(b.wants_fence(&KNOWN));
        pass(&mut b, 2);
        assert_eq!(presence(&b), Presence::Bound);
    }

    #[test]
    fn a_fence_is_wanted_only_for_what_may_lead_there() {
        let mut b = Bindings::default();
        b.observe(id(1), FarEnd::Listener(OTHER_FILE), 1, 0, ());
        assert!(!b.wants_fence(&KNOWN));
        let unknown = RuntimeIdentity {
            runtime: R,
            listener: None,
        };
        assert!(b.wants_fence(&unknown));
        assert!(b.drop_forgotten(|far| far == FarEnd::Listener(OTHER_FILE)));
        assert!(!b.wants_fence(&unknown));
    }

    #[test]
    fn connections_are_bounded() {
        let mut b = Bindings::default();
        for inode in 0..2 * MAX_CONNECTIONS as u64 {
            accepted(&mut b, inode, 1);
        }
        assert_eq!(b.connections().len(), MAX_CONNECTIONS);
    }

    #[test]
    fn a_reused_inode_is_a_new_connection() {
        let mut b = Bindings::default();
        accepted(&mut b, 1, 1);
        pass(&mut b, 2);
        lose(&mut b, 1);
        let reused = SocketId {
            inode: 1,
            cookie: 999,
        };
        b.observe(reused, FarEnd::Listener(FILE), 3, 0, ());
        assert_eq!(presence(&b), Presence::Broken);
    }
}
