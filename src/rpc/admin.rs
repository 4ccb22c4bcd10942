//! The Admin service.

#[cfg(test)]
mod agreement;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use nri_lease_proto::lease::admin as pb;
use nri_lease_proto::lease::admin_ttrpc::Admin;
use nri_lease_proto::lease::types as pt;
use nri_lease_proto::nri::nri::PodSandbox;
use nri_lease_state::rules::{Command, Reply};
use nri_lease_state::store::Health;
use nri_lease_state::time::Now;
use protobuf::{EnumOrUnknown, MessageField};
use tokio::sync::broadcast::error::RecvError;
use ttrpc::Code;
use ttrpc::r#async::{ServerStreamSender, TtrpcContext};
use ttrpc::error::get_rpc_status;

use super::convert::{self, denied, invalid, not_found};
use super::peer::Peer;
use super::server::Caller;
use crate::daemon::Daemon;
use crate::enforce::decision::Verdict;
use crate::enforce::evidence::Live;
use crate::enforce::hooks::settling_time;
use crate::enforce::question::{self, Question};
use crate::nri::events::Generation;
use crate::nri::status::{RuntimeStatus, Session};
use crate::presence::RuntimeId;

/// Decisions shown by `inspect`.
const SHOWN_DECISIONS: usize = 20;
/// Would-be rejections shown by `audit`.
const SHOWN_AUDIT: usize = 200;

/// The service of one connection.
pub struct AdminService {
    daemon: Arc<Daemon>,
    caller: Caller,
}

type Answer<T> = ttrpc::Result<T>;

impl AdminService {
    pub fn new(daemon: Arc<Daemon>, caller: Caller) -> Self {
        Self { daemon, caller }
    }

    /// The run directory is mounted into plugin pods, so the socket's mode alone is not enough.
    fn peer(&self) -> Answer<&Peer> {
        let peer = self.caller.as_deref().map_err(denied)?;
        match &peer.facts.pod_uid {
            None => Ok(peer),
            Some(uid) => Err(denied(format!(
                "pid {} runs in pod {uid}: the admin socket is for processes of the host",
                peer.facts.pid
            ))),
        }
    }

    async fn carry_out(&self, command: Command) -> Answer<Reply> {
        self.daemon
            .engine
            .carry_out(command)
            .await
            .map_err(convert::status)
    }

    fn describe_runtime(&self, status: &RuntimeStatus) -> pb::Runtime {
        let mut runtime = pb::Runtime {
            socket: status.socket.display().to_string(),
            ..Default::default()
        };
        match &*status.session() {
            Session::Disconnected { detail } => runtime.detail = detail.clone(),
            Session::Connected(connected) => {
                let identity = &connected.identity;
                runtime.connected = true;
                runtime.name = identity.name.clone();
                runtime.version = identity.version.clone();
                runtime.nri_version = match (identity.nri_version.as_str(), identity.nri_minor()) {
                    ("", Some(minor)) => format!("0.{minor} (by the runtime's version)"),
                    (told, _) => told.to_owned(),
                };
                runtime.request_timeout = convert::pb_duration(connected.request_timeout);
                runtime.registration_timeout = convert::pb_duration(connected.registration_timeout);
                runtime.connected_since = convert::pb_time(connected.since);
                runtime.pods = self.daemon.pods.count(status.id) as u32;
                if connected.generation == Generation::WithValidation {
                    runtime.evidence.push("list".to_owned());
                } else {
                    runtime.warnings.push(
                        "this runtime's NRI has no validation: containers are decided by the \
                         plugin's connection alone"
                            .to_owned(),
                    );
                }
                match self.daemon.tracker.kernel_evidence() {
                    Ok(()) => {
                        runtime.evidence.push("kernel".to_owned());
                        if identity.accepts_serially() {
                            runtime.evidence.push("fence".to_owned());
                        }
                        if !identity.accepts_serially() {
                            runtime.warnings.push(format!(
                                "it is not verified that {} {} accepts plugins one at a time, \
                                 which the fence rests on: a plugin counts for sandboxes only {} s \
                                 after it has connected, and for containers by the runtime's list",
                                identity.name,
                                identity.version,
                                settling_time(connected.registration_timeout).as_secs()
                            ));
                        }
                    }
                    Err(error) => runtime.warnings.push(format!(
                        "the kernel cannot be asked about connections ({error}): sandboxes are \
                         not enforced, containers by the runtime's list alone"
                    )),
                }
                let refuses = question::may_refuse_sandbox(
                    &self.daemon.engine.snapshot(),
                    identity.cleans_up_refused_sandboxes(),
                );
                runtime.sandbox_enforcement = if refuses { "reject" } else { "mark" }.to_owned();
            }
        }
        runtime
    }

    /// The pod that an ExplainRequest is about, its containers, and where it runs.
    fn explained_pod(&self, request: &pb::ExplainRequest) -> Answer<Explained> {
        if let Some(described) = request.described.as_ref() {
            let pod = PodSandbox {
                name: described.name.clone(),
                namespace: described.namespace.clone(),
                uid: described.uid.clone(),
                labels: described.labels.clone(),
                annotations: described.annotations.clone(),
                runtime_handler: described.runtime_handler.clone(),
                ..Default::default()
            };
            let containers = described
                .containers
                .iter()
                .map(|container| (container.name.clone(), container.cdi_devices.clone()))
                .collect();
            return Ok(Explained {
                runtime: None,
                pod,
                containers,
            });
        }
        let by_name = !request.pod_name.is_empty();
        if request.pod_uid.is_empty() && !by_name {
            return Err(invalid(
                "no pod is given: give pod_uid, or pod_namespace and pod_name, or described",
            ));
        }
        let found = self.daemon.pods.find(|pod| match by_name {
            true => pod.namespace == request.pod_namespace && pod.name == request.pod_name,
            false => pod.uid == request.pod_uid,
        });
        let (runtime, pod) = found.ok_or_else(|| {
            not_found(
                "no runtime has told of such a pod: check the name with kubectl or crictl pods, \
                 or describe the pod in a file",
            )
        })?;
        let containers = match request.container.as_str() {
            "" => Vec::new(),
            name => vec![(name.to_owned(), Vec::new())],
        };
        Ok(Explained {
            runtime: Some(runtime),
            pod,
            containers,
        })
    }

    /// The decisions that hooks would come to now, for the sandbox and for each container.
    fn explain_pod(&self, request: &pb::ExplainRequest) -> Answer<pb::ExplainResponse> {
        let explained = self.explained_pod(request)?;
        let now = self.daemon.clock.now();
        let mut decisions = Vec::new();
        if request.container.is_empty() {
            decisions.push(self.explain_one(&explained, None, &now));
        }
        for container in &explained.containers {
            if request.container.is_empty() || request.container == container.0 {
                decisions.push(self.explain_one(&explained, Some(container), &now));
            }
        }
        if decisions.is_empty() {
            return Err(not_found(format!(
                "the described pod has no container \"{}\"",
                request.container
            )));
        }
        Ok(pb::ExplainResponse {
            decisions,
            ..Default::default()
        })
    }

    fn explain_one(
        &self,
        explained: &Explained,
        container: Option<&(String, Vec<String>)>,
        now: &Now,
    ) -> pt::Decision {
        let snapshot = self.daemon.engine.snapshot();
        let view = self.daemon.tracker.view();
        let runtimes = &self.daemon.runtimes;
        let mut steps = Vec::new();
        // Where it runs, else where it would.
        let status = runtimes
            .iter()
            .find(|status| Some(status.id) == explained.runtime)
            .or(runtimes.iter().find(|status| status.connected().is_some()))
            .or(runtimes.first());
        let connected = status.and_then(|status| status.connected());
        if connected.is_none() {
            steps.push(
                "no runtime is connected, and nobody is asked before pods start: see nri-lease \
                 status"
                    .to_owned(),
            );
        }
        let runtime = status.map_or(RuntimeId(0), |status| status.id);
        let listings = self.daemon.listings_of(runtime);
        let settles_in = connected
            .as_ref()
            .filter(|connected| !connected.identity.accepts_serially())
            .map(|connected| settling_time(connected.registration_timeout));
        let evidence = Live::outside_hooks(&view, runtime, Some(&listings)).settled_for(settles_in);
        let validates = connected
            .as_ref()
            .is_none_or(|connected| connected.generation == Generation::WithValidation);
        let question = match container {
            None => {
                let cleans_up = connected
                    .is_some_and(|connected| connected.identity.cleans_up_refused_sandboxes());
                Question::sandbox(&snapshot, &explained.pod, cleans_up)
            }
            Some((name, devices)) => {
                if explained.runtime.is_some() {
                    steps.push(
                        "its CDI devices are known only while it is created; explain --file takes \
                         them from a pod's annotations"
                            .to_owned(),
                    );
                }
                let unvetted = question::published_unvetted(&snapshot, &explained.pod.id);
                let devices = devices.iter().map(String::as_str).collect();
                Question::container(&explained.pod, name, devices, unvetted, validates)
            }
        };
        let (decision, _) = question.decide(&snapshot, evidence, now, Some(&mut steps));
        pt::Decision {
            time: convert::pb_wall(now.wall),
            verdict: convert::pb_verdict(decision.verdict),
            operation: convert::pb_operation(container.map(|(name, _)| name.as_str())),
            pod: MessageField::some(convert::pb_pod(&(&explained.pod).into())),
            container: container.map(|(name, _)| name.clone()).unwrap_or_default(),
            plugin: decision
                .plugin
                .map(|plugin| plugin.to_string())
                .unwrap_or_default(),
            reason: decision.text,
            steps,
            ..Default::default()
        }
    }
}

struct Explained {
    runtime: Option<RuntimeId>,
    pod: PodSandbox,
    containers: Vec<(String, Vec<String>)>,
}

fn unexpected() -> ttrpc::Error {
    get_rpc_status(Code::INTERNAL, "the daemon gave an answer of another kind")
}

#[async_trait]
impl Admin for AdminService {
    async fn list_leases(
        &self,
        _: &TtrpcContext,
        _: pb::ListLeasesRequest,
    ) -> Answer<pb::ListLeasesResponse> {
        self.peer()?;
        let now = self.daemon.clock.now();
        let snapshot = self.daemon.engine.snapshot();
        Ok(pb::ListLeasesResponse {
            leases: snapshot
                .state
                .leases()
                .values()
                .filter(|lease| lease.counts_at(now.boottime))
                .map(|lease| self.daemon.describe(lease))
                .collect(),
            ..Default::default()
        })
    }

    async fn get_lease(
        &self,
        _: &TtrpcContext,
        request: pb::GetLeaseRequest,
    ) -> Answer<pb::GetLeaseResponse> {
        self.peer()?;
        let plugin = convert::plugin_name(&request.plugin)?;
        let lease = self.daemon.live_lease(plugin.as_str()).ok_or_else(|| {
            not_found(format!(
                "no lease of plugin \"{plugin}\": it was never registered, or has ended"
            ))
        })?;
        let decisions = self
            .daemon
            .ring
            .newest(SHOWN_DECISIONS, |decided| {
                decided.plugin.as_ref() == Some(&plugin)
            })
            .iter()
            .map(|decided| convert::pb_decision(decided, self.daemon.socket_of(decided.runtime)))
            .collect();
        Ok(pb::GetLeaseResponse {
            lease: MessageField::some(self.daemon.describe(&lease)),
            decisions,
            ..Default::default()
        })
    }

    async fn revoke_lease(
        &self,
        _: &TtrpcContext,
        request: pb::RevokeLeaseRequest,
    ) -> Answer<pb::RevokeLeaseResponse> {
        let by_uid = self.peer()?.uid;
        let plugin = convert::plugin_name(&request.plugin)?;
        let ban = convert::duration("ban", &request.ban)?;
        let before = self
            .daemon
            .live_lease(plugin.as_str())
            .map(|lease| self.daemon.describe(&lease));
        let command = Command::Revoke {
            plugin,
            ban,
            reason: request.reason,
            by_uid,
        };
        let Reply::Revoked { ban, .. } = self.carry_out(command).await? else {
            return Err(unexpected());
        };
        let now = self.daemon.clock.now();
        Ok(pb::RevokeLeaseResponse {
            lease: before.into(),
            ban: ban.map(|ban| convert::pb_ban(&ban, &now)).into(),
            ..Default::default()
        })
    }

    async fn list_bans(
        &self,
        _: &TtrpcContext,
        _: pb::ListBansRequest,
    ) -> Answer<pb::ListBansResponse> {
        self.peer()?;
        let now = self.daemon.clock.now();
        let snapshot = self.daemon.engine.snapshot();
        Ok(pb::ListBansResponse {
            bans: snapshot
                .state
                .bans()
                .values()
                .filter(|ban| ban.counts_at(now.boottime))
                .map(|ban| convert::pb_ban(ban, &now))
                .collect(),
            ..Default::default()
        })
    }

    async fn set_ban(
        &self,
        _: &TtrpcContext,
        request: pb::SetBanRequest,
    ) -> Answer<pb::SetBanResponse> {
        let by_uid = self.peer()?.uid;
        let plugin = convert::plugin_name(&request.plugin)?;
        let duration = convert::duration("duration", &request.duration)?.unwrap_or_default();
        let command = if duration.is_zero() {
            Command::LiftBan { plugin }
        } else {
            Command::SetBan {
                plugin,
                duration,
                reason: request.reason,
                by_uid,
            }
        };
        let Reply::Ban { ban, existed } = self.carry_out(command).await? else {
            return Err(unexpected());
        };
        let now = self.daemon.clock.now();
        Ok(pb::SetBanResponse {
            ban: ban.map(|ban| convert::pb_ban(&ban, &now)).into(),
            existed,
            ..Default::default()
        })
    }

    async fn explain(
        &self,
        _: &TtrpcContext,
        request: pb::ExplainRequest,
    ) -> Answer<pb::ExplainResponse> {
        self.peer()?;
        self.explain_pod(&request)
    }

    async fn list_audit(
        &self,
        _: &TtrpcContext,
        _: pb::ListAuditRequest,
    ) -> Answer<pb::ListAuditResponse> {
        self.peer()?;
        let snapshot = self.daemon.engine.snapshot();
        let sandboxes = snapshot
            .state
            .sandboxes()
            .values()
            .filter(|sandbox| !sandbox.unvetted.is_empty())
            .map(|sandbox| pb::UnvettedSandbox {
                pod: MessageField::some(pt::Pod {
                    namespace: sandbox.pod_namespace.clone(),
                    name: sandbox.pod_name.clone(),
                    uid: sandbox
                        .pod_uid
                        .as_ref()
                        .map(ToString::to_string)
                        .unwrap_or_default(),
                    sandbox_id: sandbox.sandbox_id.clone(),
                    ..Default::default()
                }),
                plugins: sandbox.unvetted.keys().map(ToString::to_string).collect(),
                since: convert::pb_wall(sandbox.appeared_at),
                reason: sandbox
                    .unvetted
                    .values()
                    .next()
                    .cloned()
                    .unwrap_or_default(),
                ..Default::default()
            })
            .collect();
        let would_reject = self
            .daemon
            .ring
            .newest(SHOWN_AUDIT, |decided| {
                decided.verdict == Verdict::WouldReject
            })
            .iter()
            .map(|decided| convert::pb_decision(decided, self.daemon.socket_of(decided.runtime)))
            .collect();
        Ok(pb::ListAuditResponse {
            sandboxes,
            would_reject,
            ..Default::default()
        })
    }

    async fn get_status(
        &self,
        _: &TtrpcContext,
        _: pb::GetStatusRequest,
    ) -> Answer<pb::GetStatusResponse> {
        self.peer()?;
        let daemon = &self.daemon;
        let now = daemon.clock.now();
        let snapshot = daemon.engine.snapshot();
        let live: Vec<_> = snapshot
            .state
            .leases()
            .values()
            .filter(|lease| lease.counts_at(now.boottime))
            .collect();
        let missing = live
            .iter()
            .filter(|lease| daemon.missing_reason(lease, &now).is_some())
            .count();
        let totals = &daemon.totals;
        let count = |total: &std::sync::atomic::AtomicU64| total.load(Ordering::Relaxed);
        let (healthy, error) = match daemon.store.health() {
            Health::Healthy => (true, String::new()),
            Health::Failing { error, .. } => (false, error),
        };
        Ok(pb::GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_at: convert::pb_time(daemon.started_at),
            runtimes: daemon
                .runtimes
                .iter()
                .map(|status| self.describe_runtime(status))
                .collect(),
            store: MessageField::some(pb::Store {
                path: daemon.state_dir.display().to_string(),
                healthy,
                error,
                loaded_from: daemon.loaded_from.to_owned(),
                ..Default::default()
            }),
            pause: snapshot
                .state
                .pause()
                .filter(|pause| pause.counts_at(now.boottime))
                .map(|pause| convert::pb_pause(pause, &now))
                .into(),
            mode: snapshot.policy.mode.as_str().to_owned(),
            leases: live.len() as u32,
            leases_missing: missing as u32,
            pins: snapshot.state.pin_count() as u32,
            bans: snapshot
                .state
                .bans()
                .values()
                .filter(|ban| ban.counts_at(now.boottime))
                .count() as u32,
            admitted_total: count(&totals.admitted),
            rejected_total: count(&totals.rejected),
            would_reject_total: count(&totals.would_reject),
            exempt_total: count(&totals.exempt),
            unvetted_sandboxes: snapshot
                .state
                .sandboxes()
                .values()
                .filter(|sandbox| !sandbox.unvetted.is_empty())
                .count() as u32,
            over_budget_total: count(&totals.over_budget),
            ..Default::default()
        })
    }

    async fn set_pause(
        &self,
        _: &TtrpcContext,
        request: pb::SetPauseRequest,
    ) -> Answer<pb::SetPauseResponse> {
        let by_uid = self.peer()?.uid;
        let duration = convert::duration("duration", &request.duration)?.unwrap_or_default();
        let command = if duration.is_zero() {
            Command::Resume
        } else {
            Command::Pause {
                duration,
                reason: request.reason,
                by_uid,
            }
        };
        let Reply::Pause { pause, was_paused } = self.carry_out(command).await? else {
            return Err(unexpected());
        };
        let now = self.daemon.clock.now();
        Ok(pb::SetPauseResponse {
            pause: pause.map(|pause| convert::pb_pause(&pause, &now)).into(),
            was_paused,
            ..Default::default()
        })
    }

    async fn watch(
        &self,
        _: &TtrpcContext,
        request: pb::WatchRequest,
        stream: ServerStreamSender<pt::Event>,
    ) -> Answer<()> {
        self.peer()?;
        let mut events = self.daemon.events.watch();
        let wanted: HashMap<String, ()> =
            request.plugins.into_iter().map(|name| (name, ())).collect();
        loop {
            let event = match events.recv().await {
                Ok(event) => {
                    let about = event.plugin.as_deref().unwrap_or_default();
                    if !wanted.is_empty() && !wanted.contains_key(about) {
                        continue;
                    }
                    convert::pb_event(event)
                }
                Err(RecvError::Lagged(dropped)) => pt::Event {
                    time: convert::pb_time(std::time::SystemTime::now()),
                    kind: EnumOrUnknown::new(pt::EventKind::EVENT_KIND_DROPPED),
                    message: format!("{dropped} events were lost: the reader is too slow"),
                    dropped,
                    ..Default::default()
                },
                Err(RecvError::Closed) => return Ok(()),
            };
            stream.send(&event).await?;
        }
    }
}
