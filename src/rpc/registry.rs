//! The Registry service, for plugins.
//!
//! A registration is [`RegistryService::register_plugin`], top to bottom. A registration for
//! another process names it as the subject; which of the subject's descendants is the plugin can
//! become known later, see [`Followed`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use globset::Glob;
use nri_lease_proto::lease::registry as pb;
use nri_lease_proto::lease::registry_ttrpc::Registry;
use nri_lease_proto::lease::types::{Lease as PbLease, Subject};
use nri_lease_state::name::PluginName;
use nri_lease_state::process::{HolderFacts, ProcessKey};
use nri_lease_state::rules::{Command, Lease, Reply};
use nri_lease_state::{PodIdentity, PodUid};
use protobuf::MessageField;
use tracing::warn;
use ttrpc::Code;
use ttrpc::r#async::{ServerStream, TtrpcContext};
use ttrpc::error::get_rpc_status;

use super::convert::{self, denied, invalid, not_found};
use super::peer::Peer;
use super::server::Caller;
use crate::daemon::Daemon;
use crate::events::Event;
use crate::presence::proc::{self, ProcessFacts};
use crate::presence::{ConnectionState, Settled};

/// How long a registration waits for the plugin's connection to be bound, so that the lease is not
/// enforced against a plugin that is there. Past it the lease counts all the same.
const SETTLE: Duration = Duration::from_secs(1);
/// After a registration whose subject is not connected yet, the first look at its descendants; each
/// later one after twice the time, until renewals take over.
const FOLLOW_FIRST: Duration = Duration::from_millis(100);
const FOLLOW_LONGEST: Duration = Duration::from_secs(30);

/// The service of one connection.
pub struct RegistryService {
    daemon: Arc<Daemon>,
    caller: Caller,
    /// A renewal's look at the holders' connections is under way.
    looking: Arc<AtomicBool>,
}

type Answer<T> = ttrpc::Result<T>;

impl RegistryService {
    pub fn new(daemon: Arc<Daemon>, caller: Caller) -> Self {
        Self {
            daemon,
            caller,
            looking: Arc::default(),
        }
    }

    fn peer(&self) -> Answer<&Peer> {
        self.caller.as_deref().map_err(denied)
    }

    async fn register_plugin(&self, request: pb::RegisterRequest) -> Answer<pb::RegisterResponse> {
        let peer = self.peer()?;
        let plugin = convert::plugin_name(&request.plugin)?;
        let ttl = convert::ttl(&request.ttl)?;
        let scope = convert::scope(&request.scope)?;
        let mode = convert::mode(request.mode)?;
        let index = convert::index(&request.index)?;
        let events = request.events.as_ref().map(|events| events.mask);

        self.may_register(peer, &plugin)?;
        let subject = self.subject(peer, &request.subject).await?;
        let Subjected { named, facts } = subject;
        let holder = HolderFacts {
            process: facts.key(),
            uid: facts.uid,
            cgroup: facts.cgroup.clone(),
            pod: pod_of(&self.daemon, &facts),
            connection_inode: Some(request.connection_inode).filter(|inode| *inode != 0),
            registered_by: Some(peer.process()).filter(|caller| *caller != facts.key()),
            subject: named,
        };
        self.drop_dead_holders(&plugin).await;
        // Before the lease counts: the plugin may be connected already.
        let settled = self.daemon.tracker.settle(facts.key(), SETTLE);
        // The tracker keeps to SETTLE by itself, unless it is too busy to look at the clock.
        let settled = tokio::time::timeout(2 * SETTLE, settled).await;
        let is_new = self
            .daemon
            .live_lease(plugin.as_str())
            .is_none_or(|lease| !lease.is_held_by(facts.key()));
        let command = Command::Register {
            plugin: plugin.clone(),
            ttl,
            scope,
            mode,
            index,
            events,
            holder,
        };
        let reply = self.daemon.engine.carry_out(command).await;
        let Reply::Registered { lease } = reply.map_err(convert::status)? else {
            return Err(unexpected());
        };
        if is_new && settled == Ok(Settled::Bound) {
            // The tracker has told so before there was a lease that it concerned.
            let connected = Event::holder_connected(&lease.plugin, facts.key());
            self.daemon.events.tell(connected);
        }
        // It may have ended before it was watched.
        if proc::key_of(facts.pid).ok() != Some(facts.key()) {
            let process = facts.key();
            self.daemon
                .engine
                .tell(Command::HolderLost { process })
                .await;
        }
        let mut holders = lease.holders.iter();
        if let Some(holder) = holders.find(|holder| holder.facts.process == facts.key())
            && let Some(followed) = Followed::of(&self.daemon, &plugin, &holder.facts)
        {
            tokio::spawn(followed.until_renewed(renew_every(&lease)));
        }
        Ok(pb::RegisterResponse {
            renew_every: convert::pb_duration(renew_every(&lease)),
            lease: MessageField::some(self.daemon.describe(&lease)),
            ..Default::default()
        })
    }

    /// A holder that has just died must not keep its successor out.
    async fn drop_dead_holders(&self, plugin: &PluginName) {
        let Some(lease) = self.daemon.live_lease(plugin.as_str()) else {
            return;
        };
        for holder in &lease.holders {
            let process = holder.facts.process;
            if proc::key_of(process.pid).ok() != Some(process) {
                let command = Command::HolderLost { process };
                self.daemon.engine.tell(command).await;
            }
        }
    }

    /// The `[[registrar]]` entries; without any, uid 0 may register every name.
    fn may_register(&self, peer: &Peer, plugin: &PluginName) -> Answer<()> {
        let config = self.daemon.config.load();
        if config.registrar.is_empty() {
            return match peer.uid {
                0 => Ok(()),
                uid => Err(denied(format!(
                    "uid {uid} may not register plugin \"{plugin}\": only uid 0 may, unless the \
                     daemon's configuration has a [[registrar]] entry for it"
                ))),
            };
        }
        let namespace = pod_of(&self.daemon, &peer.facts)
            .and_then(|pod| pod.namespace)
            .unwrap_or_default();
        let allowed = config.registrar.iter().any(|entry| {
            let names = Glob::new(&entry.plugin)
                .is_ok_and(|glob| glob.compile_matcher().is_match(plugin.as_str()));
            let namespaces = entry.namespaces.is_empty() || entry.namespaces.contains(&namespace);
            names && entry.uids.contains(&peer.uid) && namespaces
        });
        if allowed {
            return Ok(());
        }
        let place = match (&peer.facts.pod_uid, namespace.as_str()) {
            (None, _) => "on the host".to_owned(),
            (Some(uid), "") => format!("in pod {uid}, whose namespace is not known yet"),
            (Some(_), namespace) => format!("in namespace {namespace}"),
        };
        Err(denied(format!(
            "uid {} {place} may not register plugin \"{plugin}\": no [[registrar]] entry of the \
             daemon's configuration allows it",
            peer.uid
        )))
    }

    /// The process that becomes the holder: the caller, or the subject it names; of a wrapper, the
    /// descendant that owns the NRI connection.
    async fn subject(&self, peer: &Peer, subject: &MessageField<Subject>) -> Answer<Subjected> {
        let Some(subject) = subject.as_ref() else {
            return Ok(Subjected {
                named: None,
                facts: peer.facts.clone(),
            });
        };
        if subject.pid == 0 {
            return Err(invalid(
                "subject.pid is 0: give the pid of the plugin's process, or leave subject out",
            ));
        }
        let named = facts_of(subject.pid)?;
        if subject.start_time != 0 && subject.start_time != named.start_time {
            return Err(not_found(format!(
                "process {} that started at {} has ended: its pid belongs to another process now",
                subject.pid, subject.start_time
            )));
        }
        if !peer.may_speak_for(&named) {
            return Err(denied(format!(
                "pid {} may not speak for pid {}, which is neither a descendant of it nor in the same \
                 pod: call from the plugin's own pod, or as uid 0 of the host",
                peer.facts.pid, named.pid
            )));
        }
        let facts = match connection_owner(&self.daemon, named.key()).await {
            Some(owner) if owner != named.key() => facts_of(owner.pid)?,
            _ => named.clone(),
        };
        Ok(Subjected {
            named: Some(named.key()),
            facts,
        })
    }

    /// The holders of a lease that the caller may speak for, or the one it names.
    fn holders_of(
        &self,
        plugin: &PluginName,
        subject: &MessageField<Subject>,
    ) -> Answer<Vec<HolderFacts>> {
        let peer = self.peer()?;
        let Some(lease) = self.daemon.live_lease(plugin.as_str()) else {
            return Ok(Vec::new());
        };
        let named = subject.as_ref();
        Ok(lease
            .holders
            .iter()
            .filter(|holder| {
                let process = holder.facts.process;
                // By its own pid, or by that of the wrapper it was registered as.
                let wanted = named.is_none_or(|subject| {
                    let mut names = [Some(process), holder.facts.subject].into_iter().flatten();
                    names.any(|known| {
                        subject.pid == known.pid
                            && (subject.start_time == 0 || subject.start_time == known.start_time)
                    })
                });
                wanted
                    && (holder.facts.registered_by == Some(peer.process())
                        || ProcessFacts::read(process.pid).is_ok_and(|facts| {
                            facts.key() == process && peer.may_speak_for(&facts)
                        }))
            })
            .map(|holder| holder.facts.clone())
            .collect())
    }

    async fn renew_lease(&self, request: &pb::RenewRequest) -> Answer<pb::RenewResponse> {
        let plugin = convert::plugin_name(&request.plugin)?;
        let mut holders = Vec::new();
        for holder in self.holders_of(&plugin, &request.subject)? {
            let followed = Followed::of(&self.daemon, &plugin, &holder);
            let process = match followed {
                Some(followed) => followed.look().await.unwrap_or(holder.process),
                None => holder.process,
            };
            holders.push(process);
        }
        self.look_at(holders.clone());
        let command = Command::Renew { plugin, holders };
        let reply = self.daemon.engine.carry_out(command).await;
        let Reply::Renewed { lease } = reply.map_err(convert::status)? else {
            return Err(unexpected());
        };
        let now = self.daemon.clock.now();
        Ok(pb::RenewResponse {
            plugin: lease.plugin.to_string(),
            ttl: convert::pb_duration(lease.settings.ttl.get()),
            expires_at: convert::pb_wall(now.wall_at(lease.deadline.boottime)),
            renew_every: convert::pb_duration(renew_every(&lease)),
            generation: lease.generation,
            ..Default::default()
        })
    }

    /// Looks for connections that the holders have made since, one look at a time: a peer that
    /// renews faster than that must not fill the tracker's queue, in which registrations wait.
    fn look_at(&self, holders: Vec<ProcessKey>) {
        if self.looking.swap(true, Ordering::AcqRel) {
            return;
        }
        let (tracker, looking) = (self.daemon.tracker.clone(), self.looking.clone());
        tokio::spawn(async move {
            for holder in holders {
                tracker.rescan_now(holder).await;
            }
            looking.store(false, Ordering::Release);
        });
    }

    /// Pins may be set by whoever may register the plugin's name.
    fn may_pin(&self, plugin: &PluginName) -> Answer<()> {
        self.may_register(self.peer()?, plugin)
    }
}

fn renew_every(lease: &Lease) -> Duration {
    lease.settings.ttl.get() / 3
}

/// The process that becomes the holder.
struct Subjected {
    /// The one that the caller named, if it named one.
    named: Option<ProcessKey>,
    /// That one, a descendant of it, or the caller.
    facts: ProcessFacts,
}

/// A holder that was registered as a subject and has no NRI connection: a descendant of the
/// subject may be the plugin, and takes its place once it is connected.
struct Followed {
    daemon: Arc<Daemon>,
    plugin: PluginName,
    holder: HolderFacts,
    subject: ProcessKey,
}

impl Followed {
    /// None when there is nothing to find out.
    fn of(daemon: &Arc<Daemon>, plugin: &PluginName, holder: &HolderFacts) -> Option<Self> {
        let subject = holder.subject?;
        if holder.connection_inode.is_some() || is_connected(daemon, &holder.process) {
            return None;
        }
        Some(Self {
            daemon: daemon.clone(),
            plugin: plugin.clone(),
            holder: holder.clone(),
            subject,
        })
    }

    /// Looks once; the new holder, if the place has changed hands.
    async fn look(&self) -> Option<ProcessKey> {
        let owner = connection_owner(&self.daemon, self.subject).await?;
        if owner == self.holder.process {
            return None;
        }
        let facts = ProcessFacts::read(owner.pid).ok()?;
        if facts.key() != owner {
            return None;
        }
        let to = HolderFacts {
            process: owner,
            uid: facts.uid,
            cgroup: facts.cgroup.clone(),
            pod: pod_of(&self.daemon, &facts),
            ..self.holder.clone()
        };
        self.daemon.tracker.settle(owner, SETTLE).await;
        let command = Command::HolderMoved {
            plugin: self.plugin.clone(),
            from: self.holder.process,
            to,
        };
        match self.daemon.engine.carry_out(command).await {
            Ok(_) => Some(owner),
            Err(error) => {
                warn!(plugin = %self.plugin, pid = owner.pid, %error, "the process that owns the \
                    connection cannot become the holder");
                None
            }
        }
    }

    /// Looks again and again, less and less often: a child is usually connected within a moment,
    /// and the first renewal can be minutes away.
    async fn until_renewed(self, renewed_in: Duration) {
        let mut pause = FOLLOW_FIRST;
        let mut waited = Duration::ZERO;
        while waited < renewed_in.min(FOLLOW_LONGEST) {
            tokio::time::sleep(pause).await;
            waited += pause;
            pause *= 2;
            let lease = self.daemon.live_lease(self.plugin.as_str());
            let holds = lease.is_some_and(|lease| {
                let mut holders = lease.holders.iter();
                holders.any(|holder| holder.facts.process == self.holder.process)
            });
            let settled = !holds || is_connected(&self.daemon, &self.holder.process);
            if settled || self.look().await.is_some() {
                return;
            }
        }
    }
}

/// Whether a process has a connection to a runtime that is open, as far as was seen.
fn is_connected(daemon: &Daemon, process: &ProcessKey) -> bool {
    let connections = daemon.tracker.view().connections(process);
    let mut states = connections.iter().map(|connection| connection.state);
    states.any(|state| state != ConnectionState::Broken)
}

/// The process that owns an NRI connection: the one named, else a descendant of it.
async fn connection_owner(daemon: &Daemon, of: ProcessKey) -> Option<ProcessKey> {
    let tracker = daemon.tracker.clone();
    let found = tokio::task::spawn_blocking(move || {
        let owner = tracker.find_connection_owner(of.pid)?;
        // Its pid may belong to another process by now, whose descendants are none of its own.
        (proc::key_of(of.pid).ok()? == of).then_some(owner)
    });
    found.await.ok().flatten()
}

fn pod_of(daemon: &Daemon, facts: &ProcessFacts) -> Option<PodIdentity> {
    let uid = PodUid::try_from(facts.pod_uid.as_deref()?).ok()?;
    Some(daemon.pods.identity(uid))
}

fn facts_of(pid: u32) -> Answer<ProcessFacts> {
    ProcessFacts::read(pid).map_err(|error| not_found(format!("subject: {error}")))
}

fn unexpected() -> ttrpc::Error {
    get_rpc_status(Code::INTERNAL, "the daemon gave an answer of another kind")
}

#[async_trait]
impl Registry for RegistryService {
    async fn register(
        &self,
        _: &TtrpcContext,
        request: pb::RegisterRequest,
    ) -> Answer<pb::RegisterResponse> {
        self.register_plugin(request).await
    }

    async fn renew(
        &self,
        _: &TtrpcContext,
        request: pb::RenewRequest,
    ) -> Answer<pb::RenewResponse> {
        self.renew_lease(&request).await
    }

    async fn keep_alive(
        &self,
        _: &TtrpcContext,
        mut stream: ServerStream<pb::RenewResponse, pb::RenewRequest>,
    ) -> Answer<()> {
        while let Some(request) = stream.recv().await? {
            let response = self.renew_lease(&request).await.unwrap_or_else(|error| {
                let (code, message) = match error {
                    ttrpc::Error::RpcStatus(status) => (status.code.value(), status.message),
                    other => (Code::UNKNOWN as i32, other.to_string()),
                };
                pb::RenewResponse {
                    plugin: request.plugin.clone(),
                    error_code: code,
                    error_message: message,
                    ..Default::default()
                }
            });
            stream.send(&response).await?;
        }
        Ok(())
    }

    async fn release(
        &self,
        _: &TtrpcContext,
        request: pb::ReleaseRequest,
    ) -> Answer<pb::ReleaseResponse> {
        let plugin = convert::plugin_name(&request.plugin)?;
        let holders = self.holders_of(&plugin, &request.subject)?;
        let processes = holders.iter().map(|holder| holder.process).collect();
        let command = Command::Release { plugin, processes };
        let reply = self.daemon.engine.carry_out(command).await;
        let Reply::Released {
            ended,
            holders_left,
        } = reply.map_err(convert::status)?
        else {
            return Err(unexpected());
        };
        Ok(pb::ReleaseResponse {
            lease_ended: ended,
            holders_left: holders_left as u32,
            ..Default::default()
        })
    }

    async fn pin(&self, _: &TtrpcContext, request: pb::PinRequest) -> Answer<pb::PinResponse> {
        let plugin = convert::plugin_name(&request.plugin)?;
        let pod_uid = convert::pod_uid(&request.pod_uid)?;
        let ttl = convert::ttl(&request.ttl)?;
        self.may_pin(&plugin)?;
        let command = Command::Pin {
            plugin,
            pod_uid,
            ttl,
        };
        let reply = self.daemon.engine.carry_out(command).await;
        let Reply::Pinned { pin } = reply.map_err(convert::status)? else {
            return Err(unexpected());
        };
        Ok(pb::PinResponse {
            pin: MessageField::some(convert::pb_pin(&pin, &self.daemon.clock.now())),
            ..Default::default()
        })
    }

    async fn unpin(
        &self,
        _: &TtrpcContext,
        request: pb::UnpinRequest,
    ) -> Answer<pb::UnpinResponse> {
        let plugin = convert::plugin_name(&request.plugin)?;
        let pod_uid = convert::pod_uid(&request.pod_uid)?;
        self.may_pin(&plugin)?;
        let command = Command::Unpin { plugin, pod_uid };
        let reply = self.daemon.engine.carry_out(command).await;
        let Reply::Unpinned { existed } = reply.map_err(convert::status)? else {
            return Err(unexpected());
        };
        Ok(pb::UnpinResponse {
            existed,
            ..Default::default()
        })
    }

    async fn describe(
        &self,
        _: &TtrpcContext,
        request: pb::DescribeRequest,
    ) -> Answer<pb::DescribeResponse> {
        self.peer()?;
        let wanted = match request.plugin.as_str() {
            "" => None,
            plugin => Some(convert::plugin_name(plugin)?),
        };
        let snapshot = self.daemon.engine.snapshot();
        let now = self.daemon.clock.now();
        let mut leases: Vec<PbLease> = Vec::new();
        for lease in snapshot.state.leases().values() {
            let asked = wanted.as_ref().is_none_or(|plugin| lease.plugin == *plugin);
            if !asked || !lease.counts_at(now.boottime) {
                continue;
            }
            if !self
                .holders_of(&lease.plugin, &MessageField::none())?
                .is_empty()
            {
                leases.push(self.daemon.describe(lease));
            }
        }
        match wanted {
            Some(plugin) if leases.is_empty() => Err(not_found(format!(
                "no lease of plugin \"{plugin}\" that the caller holds; register it first"
            ))),
            _ => Ok(pb::DescribeResponse {
                leases,
                ..Default::default()
            }),
        }
    }
}
