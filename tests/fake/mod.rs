//! A daemon with canned answers, for the tests of the command line: both sockets, in a scratch
//! directory. The plugin's name chooses the answer ([`refuse`]); requests are noted.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use nri_lease_proto::lease::admin::*;
use nri_lease_proto::lease::admin_ttrpc::{Admin, create_admin};
use nri_lease_proto::lease::registry::*;
use nri_lease_proto::lease::registry_ttrpc::{Registry, create_registry};
use nri_lease_proto::lease::types::*;
use nri_lease_proto::protobuf::MessageField;
use nri_lease_proto::protobuf::well_known_types::duration::Duration as ProtoDuration;
use nri_lease_proto::protobuf::well_known_types::timestamp::Timestamp;
use nri_lease_proto::ttrpc::{self, Code, asynchronous::Server, asynchronous::TtrpcContext};

/// What another process may have written to forge a terminal's lines.
pub const EVIL: &str = "a\u{1b}[2Jb\nc\u{9b}d";

/// The running daemon; it ends when it is dropped.
pub struct Fake {
    pub dir: Arc<tempfile::TempDir>,
    pub answers: Arc<Answers>,
    runtime: Option<tokio::runtime::Runtime>,
}

/// What the daemon noted, and how it feels.
#[derive(Default)]
pub struct Answers {
    pub notes: Mutex<Vec<String>>,
    /// Everything that `doctor` looks at is wrong.
    pub sick: bool,
    /// The store is empty, no pod is around.
    pub empty: bool,
    /// The first Renew is answered with NOT_FOUND.
    pub forgets: bool,
    /// Further Registers are answered with PERMISSION_DENIED.
    pub denies_second: bool,
    /// Further Registers are answered with UNAVAILABLE.
    pub full_second: bool,
    /// Watch sends its events and ends the stream.
    pub ends_watch: bool,
    /// Answers as a daemon without any method would.
    pub older: bool,
}

impl Answers {
    fn note(&self, note: impl Into<String>) {
        self.notes.lock().unwrap().push(note.into());
    }

    /// How many requests were noted that begin so.
    pub fn count(&self, note: &str) -> usize {
        let notes = self.notes.lock().unwrap();
        notes.iter().filter(|n| n.starts_with(note)).count()
    }

    pub fn has(&self, note: &str) -> bool {
        self.notes.lock().unwrap().iter().any(|n| n.contains(note))
    }

    /// Waits until so many requests that begin so were noted.
    pub fn wait_for(&self, note: &str, count: usize) {
        until(&format!("{count} × {note:?}"), || {
            self.count(note) >= count
        });
    }
}

/// Waits for a condition, for at most 20 s.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Fake {
    pub fn start() -> Fake {
        Fake::with(Answers::default())
    }

    pub fn with(answers: Answers) -> Fake {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        Fake::at(dir, Arc::new(answers))
    }

    /// Starts in a directory where another one may have run before.
    pub fn at(dir: Arc<tempfile::TempDir>, answers: Arc<Answers>) -> Fake {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let address = |name: &str| {
            let path = dir.path().join(name);
            let _ = std::fs::remove_file(&path);
            format!("unix://{}", path.display())
        };
        let (admin, registry) = (address("admin.sock"), address("registry.sock"));
        runtime.block_on(async {
            let service = Arc::new(Canned(answers.clone()));
            let mut admin = Server::new()
                .bind(&admin)
                .unwrap()
                .register_service(create_admin(service.clone()));
            let mut registry = Server::new()
                .bind(&registry)
                .unwrap()
                .register_service(create_registry(service));
            admin.start().await.unwrap();
            registry.start().await.unwrap();
            // The servers live as long as the runtime.
            std::mem::forget((admin, registry));
        });
        Fake {
            dir,
            answers,
            runtime: Some(runtime),
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Ends at once, as if killed: connections break, the socket files stay.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Canned(Arc<Answers>);

fn status<T>(code: Code, message: &str) -> ttrpc::Result<T> {
    let status = ttrpc::get_status(code, message.to_string());
    Err(ttrpc::Error::RpcStatus(status))
}

impl Canned {
    /// Fails as the plugin's name says.
    async fn refuse(&self, plugin: &str) -> ttrpc::Result<()> {
        if self.0.older {
            return status(Code::NOT_FOUND, "/nri.lease.v1.X/Y is not supported");
        }
        match plugin {
            "unknown" => status(Code::NOT_FOUND, "no lease of \"unknown\""),
            "denied" => status(Code::PERMISSION_DENIED, "uid 7 may not register \"denied\""),
            "invalid" => status(Code::INVALID_ARGUMENT, "ttl 1s is below min_ttl 5s"),
            "exhausted" => status(Code::RESOURCE_EXHAUSTED, "256 leases are the limit"),
            "banned" => status(Code::FAILED_PRECONDITION, "\"banned\" is banned"),
            "full" => status(Code::UNAVAILABLE, "the store cannot write: no space left"),
            "evil" => status(Code::INTERNAL, EVIL),
            "slow" => std::future::pending().await,
            _ => Ok(()),
        }
    }
}

fn seconds(seconds: i64, nanos: i32) -> MessageField<ProtoDuration> {
    MessageField::some(ProtoDuration {
        seconds,
        nanos,
        ..Default::default()
    })
}

fn at(seconds: i64) -> MessageField<Timestamp> {
    MessageField::some(Timestamp {
        seconds,
        ..Default::default()
    })
}

fn pod(name: &str) -> MessageField<Pod> {
    MessageField::some(Pod {
        namespace: "kube-system".into(),
        name: name.into(),
        uid: "uid-1".into(),
        ..Default::default()
    })
}

fn pin(plugin: &str, pod_uid: &str) -> Pin {
    Pin {
        plugin: plugin.into(),
        pod_uid: pod_uid.into(),
        expires_at: at(1_800_000_000),
        expires_in: seconds(3_600, 0),
        pinned_at: at(1_799_996_400),
        ..Default::default()
    }
}

/// A lease of `plugin` with one holder, one pin and a rule.
fn lease(plugin: &str, state: PluginState) -> Lease {
    let missing = state == PluginState::PLUGIN_STATE_MISSING;
    let connection = Connection {
        socket: "/run/nri.sock".into(),
        inode: 815,
        state: "bound".into(),
        ..Default::default()
    };
    Lease {
        plugin: plugin.into(),
        state: state.into(),
        state_reason: if missing { EVIL.into() } else { String::new() },
        mode: Mode::MODE_ENFORCE.into(),
        generation: 3,
        ttl: seconds(60, 0),
        expires_at: at(1_800_000_000),
        expires_in: seconds(41, 234_000_000),
        registered_at: at(1_799_999_000),
        renewed_at: at(1_799_999_981),
        scope: MessageField::some(Scope {
            rules: vec![ScopeRule {
                namespaces: vec!["prod-*".into()],
                operations: vec![Operation::OPERATION_CONTAINER.into()],
                ..Default::default()
            }],
            ..Default::default()
        }),
        holders: vec![Holder {
            pid: 4711,
            uid: 0,
            start_time: 99,
            connected: !missing,
            pod: pod("dranet-x7f2p"),
            registered_at: at(1_799_999_000),
            connections: vec![connection],
            ..Default::default()
        }],
        pins: vec![pin(plugin, "uid-9")],
        index: "10".into(),
        ..Default::default()
    }
}

fn decision(verdict: Verdict, container: &str) -> Decision {
    Decision {
        time: at(1_799_999_990),
        verdict: verdict.into(),
        operation: match container {
            "" => Operation::OPERATION_SANDBOX.into(),
            _ => Operation::OPERATION_CONTAINER.into(),
        },
        pod: pod("web-1"),
        container: container.into(),
        plugin: "dra.net".into(),
        reason: "required NRI plugin \"dra.net\" is not connected".into(),
        steps: vec!["lease dra.net covers it: rule 1".into(), EVIL.into()],
        ..Default::default()
    }
}

fn ban(plugin: &str) -> Ban {
    Ban {
        plugin: plugin.into(),
        expires_at: at(1_800_000_600),
        expires_in: seconds(600, 0),
        reason: "broken release".into(),
        ..Default::default()
    }
}

fn pause() -> MessageField<Pause> {
    MessageField::some(Pause {
        expires_at: at(1_800_000_600),
        expires_in: seconds(600, 0),
        reason: "incident 12".into(),
        paused_at: at(1_800_000_000),
        ..Default::default()
    })
}

fn event(kind: EventKind, message: &str) -> Event {
    Event {
        time: at(1_799_999_990),
        kind: kind.into(),
        plugin: "dra.net".into(),
        pid: 4711,
        pod: pod("web-1"),
        message: message.into(),
        ..Default::default()
    }
}

#[async_trait]
impl Registry for Canned {
    async fn register(
        &self,
        _: &TtrpcContext,
        request: RegisterRequest,
    ) -> ttrpc::Result<RegisterResponse> {
        self.0.note(format!("register {request}"));
        let second = self.0.count("register") > 1;
        if second && self.0.denies_second {
            self.refuse("denied").await?;
        }
        if second && self.0.full_second {
            self.refuse("full").await?;
        }
        self.refuse(&request.plugin).await?;
        Ok(RegisterResponse {
            lease: MessageField::some(lease(&request.plugin, PluginState::PLUGIN_STATE_MISSING)),
            renew_every: seconds(0, 50_000_000),
            ..Default::default()
        })
    }

    async fn renew(&self, _: &TtrpcContext, request: RenewRequest) -> ttrpc::Result<RenewResponse> {
        self.0.note(format!("renew {request}"));
        if self.0.forgets && self.0.count("renew") == 1 {
            return status(Code::NOT_FOUND, "no such lease");
        }
        self.refuse(&request.plugin).await?;
        Ok(RenewResponse {
            plugin: request.plugin,
            ttl: seconds(60, 0),
            expires_at: at(1_800_000_000),
            renew_every: seconds(0, 50_000_000),
            generation: 3,
            ..Default::default()
        })
    }

    async fn release(
        &self,
        _: &TtrpcContext,
        request: ReleaseRequest,
    ) -> ttrpc::Result<ReleaseResponse> {
        self.0.note(format!("release {request}"));
        self.refuse(&request.plugin).await?;
        Ok(ReleaseResponse {
            lease_ended: true,
            ..Default::default()
        })
    }

    async fn pin(&self, _: &TtrpcContext, request: PinRequest) -> ttrpc::Result<PinResponse> {
        self.refuse(&request.plugin).await?;
        Ok(PinResponse {
            pin: MessageField::some(pin(&request.plugin, &request.pod_uid)),
            ..Default::default()
        })
    }

    async fn unpin(&self, _: &TtrpcContext, request: UnpinRequest) -> ttrpc::Result<UnpinResponse> {
        self.refuse(&request.plugin).await?;
        Ok(UnpinResponse {
            existed: request.pod_uid == "uid-9",
            ..Default::default()
        })
    }

    async fn describe(
        &self,
        _: &TtrpcContext,
        _: DescribeRequest,
    ) -> ttrpc::Result<DescribeResponse> {
        self.refuse("").await?;
        Ok(DescribeResponse::new())
    }
}

#[async_trait]
impl Admin for Canned {
    async fn list_leases(
        &self,
        _: &TtrpcContext,
        _: ListLeasesRequest,
    ) -> ttrpc::Result<ListLeasesResponse> {
        self.refuse("").await?;
        let mut leases = vec![lease("dra.net", PluginState::PLUGIN_STATE_PRESENT)];
        if self.0.sick {
            leases.push(lease("image-policy", PluginState::PLUGIN_STATE_MISSING));
        }
        if self.0.empty {
            leases.clear();
        }
        Ok(ListLeasesResponse {
            leases,
            ..Default::default()
        })
    }

    async fn get_lease(
        &self,
        _: &TtrpcContext,
        request: GetLeaseRequest,
    ) -> ttrpc::Result<GetLeaseResponse> {
        self.refuse(&request.plugin).await?;
        Ok(GetLeaseResponse {
            lease: MessageField::some(lease(&request.plugin, PluginState::PLUGIN_STATE_MISSING)),
            decisions: vec![decision(Verdict::VERDICT_REJECT, "app")],
            ..Default::default()
        })
    }

    async fn revoke_lease(
        &self,
        _: &TtrpcContext,
        request: RevokeLeaseRequest,
    ) -> ttrpc::Result<RevokeLeaseResponse> {
        self.0.note(format!("revoke {request}"));
        self.refuse(&request.plugin).await?;
        let banned = request.ban.is_some();
        Ok(RevokeLeaseResponse {
            lease: MessageField::some(lease(&request.plugin, PluginState::PLUGIN_STATE_PRESENT)),
            ban: banned.then(|| ban(&request.plugin)).into(),
            ..Default::default()
        })
    }

    async fn list_bans(
        &self,
        _: &TtrpcContext,
        _: ListBansRequest,
    ) -> ttrpc::Result<ListBansResponse> {
        self.refuse("").await?;
        let bans = if self.0.empty {
            vec![]
        } else {
            vec![ban("dra.net")]
        };
        Ok(ListBansResponse {
            bans,
            ..Default::default()
        })
    }

    async fn set_ban(
        &self,
        _: &TtrpcContext,
        request: SetBanRequest,
    ) -> ttrpc::Result<SetBanResponse> {
        self.0.note(format!("ban {request}"));
        self.refuse(&request.plugin).await?;
        Ok(SetBanResponse {
            existed: request.plugin != "never-banned",
            ban: request
                .duration
                .is_some()
                .then(|| ban(&request.plugin))
                .into(),
            ..Default::default()
        })
    }

    async fn explain(
        &self,
        _: &TtrpcContext,
        request: ExplainRequest,
    ) -> ttrpc::Result<ExplainResponse> {
        self.0.note(format!("explain {request}"));
        self.refuse(&request.pod_uid).await?;
        Ok(ExplainResponse {
            decisions: vec![
                decision(Verdict::VERDICT_ADMIT, ""),
                decision(Verdict::VERDICT_REJECT, "app"),
            ],
            ..Default::default()
        })
    }

    async fn list_audit(
        &self,
        _: &TtrpcContext,
        _: ListAuditRequest,
    ) -> ttrpc::Result<ListAuditResponse> {
        self.refuse("").await?;
        if self.0.empty {
            return Ok(ListAuditResponse::new());
        }
        Ok(ListAuditResponse {
            sandboxes: vec![UnvettedSandbox {
                pod: pod("web-1"),
                plugins: vec!["dra.net".into()],
                since: at(1_799_999_990),
                reason: "the daemon was away".into(),
                ..Default::default()
            }],
            would_reject: vec![decision(Verdict::VERDICT_WOULD_REJECT, "app")],
            ..Default::default()
        })
    }

    async fn get_status(
        &self,
        _: &TtrpcContext,
        _: GetStatusRequest,
    ) -> ttrpc::Result<GetStatusResponse> {
        self.refuse("").await?;
        let sick = self.0.sick;
        let runtime = |connected: bool| Runtime {
            socket: "/run/nri.sock".into(),
            connected,
            detail: if connected { "" } else { "connection refused" }.into(),
            name: "containerd".into(),
            version: "v2.3.4".into(),
            nri_version: "0.12.0".into(),
            request_timeout: seconds(2, 0),
            connected_since: at(1_799_999_000),
            evidence: vec!["list".into(), "kernel".into(), "fence".into()],
            warnings: if sick {
                vec!["no unix_diag".into()]
            } else {
                vec![]
            },
            sandbox_enforcement: "reject".into(),
            pods: 12,
            ..Default::default()
        };
        Ok(GetStatusResponse {
            version: "0.1.0".into(),
            pid: 77,
            started_at: at(1_799_999_000),
            runtimes: if sick {
                vec![runtime(true), runtime(false)]
            } else {
                vec![runtime(true)]
            },
            store: MessageField::some(Store {
                path: "/var/lib/nri-lease".into(),
                healthy: !sick,
                error: if sick { "no space left" } else { "" }.into(),
                loaded_from: "database".into(),
                ..Default::default()
            }),
            pause: if sick { pause() } else { MessageField::none() },
            mode: "enforce".into(),
            leases: 1,
            leases_missing: u32::from(sick),
            ..Default::default()
        })
    }

    async fn set_pause(
        &self,
        _: &TtrpcContext,
        request: SetPauseRequest,
    ) -> ttrpc::Result<SetPauseResponse> {
        self.0.note(format!("pause {request}"));
        self.refuse("").await?;
        let pausing = request.duration.is_some();
        Ok(SetPauseResponse {
            pause: if pausing {
                pause()
            } else {
                MessageField::none()
            },
            was_paused: !pausing,
            ..Default::default()
        })
    }

    async fn watch(
        &self,
        _: &TtrpcContext,
        request: WatchRequest,
        events: ttrpc::asynchronous::ServerStreamSender<Event>,
    ) -> ttrpc::Result<()> {
        self.0.note(format!("watch {request}"));
        for plugin in &request.plugins {
            self.refuse(plugin).await?;
        }
        if !self.0.empty {
            events
                .send(&event(EventKind::EVENT_KIND_REGISTERED, "TTL 60s"))
                .await?;
            events
                .send(&event(EventKind::EVENT_KIND_HOLDER_LOST, EVIL))
                .await?;
        }
        match self.0.ends_watch {
            true => Ok(()),
            false => std::future::pending().await,
        }
    }
}
