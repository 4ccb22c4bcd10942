//! `explain` says what the hook decides: both are asked about the same generated states, policies,
//! pods and containers. The presence is real: plugin processes that are connected to a simulated
//! runtime, one that never connected, one that is gone.
//!
//! Left out is what explain cannot know: devices of a container of a pod that it only knows by its
//! uid, a list of plugins that contradicts the kernel, and connections lost in mid-request.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use fastrand::Rng;
use nri_lease_proto::lease::admin as pb;
use nri_lease_proto::lease::types::Verdict as PbVerdict;
use nri_lease_proto::nri::nri::{
    CDIDevice, Container, PluginInstance, PodSandbox, ValidateContainerAdjustmentRequest,
};
use nri_lease_sim::{Options, Runtime, plugin};
use nri_lease_state::record::Mode as LeaseMode;
use nri_lease_state::rules::{Command, Lease, Limits, SandboxPod, State};
use nri_lease_state::scope::{Operation, Scope, ScopeRule};
use nri_lease_state::store::{self, Store};
use nri_lease_state::time::{Boottime, Now, Ttl};
use nri_lease_state::{HolderFacts, PluginIndex, PluginName, PodIdentity, PodUid, ProcessKey};
use protobuf::MessageField;
use tokio::sync::mpsc;

use super::AdminService;
use crate::clock::SystemClock;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::enforce::decision::Verdict;
use crate::enforce::hooks::{HookSession, Hooks, PublishedListings};
use crate::enforce::policy::Policy;
use crate::enforce::record::Trace;
use crate::enforce::snapshot::{Published, Snapshot};
use crate::engine::{Engine, Parts};
use crate::events::Events;
use crate::nri::events::{Generation, RuntimeIdentity};
use crate::nri::status::{Connected, RuntimeStatus};
use crate::presence::{HolderSpec, RuntimeId, Settled, Tracker, proc};

/// Decisions compared in every test run.
const DECISIONS: u64 = 100_000;
const PODS_OF_A_STATE: usize = 60;
const RUNTIME: RuntimeId = RuntimeId(0);
const SOCKET_VARIABLE: &str = "NRI_LEASE_TEST_PLUGIN_SOCKET";
const PATIENCE: Duration = Duration::from_secs(20);

const PLUGINS: [&str; 6] = ["a.net", "b", "cpu", "dra.net", "e+f", "z"];
const NAMESPACES: [&str; 4] = ["default", "kube-system", "prod-1", "prod-2"];
const HANDLERS: [&str; 3] = ["", "runc", "kata-qemu"];
const DEVICES: [&str; 3] = ["dra.net/nic=eth1", "dra.net/nic=eth2", "vendor.com/gpu=0"];
const CONTAINERS: [&str; 3] = ["app", "db", "init"];

/// Not a test of its own: the plugin's process, which is this program once more.
#[tokio::test]
async fn plugin_process() {
    if let Some(socket) = std::env::var_os(SOCKET_VARIABLE) {
        let options = plugin::Options::default();
        plugin::run(Path::new(&socket), "p", "10", options).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_agrees_with_the_hook_in_every_generated_case() {
    let seed = std::env::var("NRI_LEASE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(20_260_504);
    let node = Node::start().await;
    let mut seen: HashMap<&'static str, u64> = HashMap::new();
    let mut decisions = 0;
    let mut case = 0;
    while decisions < DECISIONS {
        case += 1;
        let mut random = Rng::with_seed(seed + case);
        let world = World::generate(&node, &mut random).await;
        for pod in &world.pods {
            for question in world.questions(&mut random, pod) {
                let told = node.hook(&world, &question);
                let explained = node.explain(&question);
                assert_eq!(
                    (told.verdict, &told.plugin, without_numbers(&told.text)),
                    (
                        explained.verdict,
                        &explained.plugin,
                        without_numbers(&explained.text)
                    ),
                    "seed {seed}, case {case}: hook and explain disagree about {question:#?}\n\
                     explain: {:#?}",
                    explained.steps
                );
                *seen.entry(name_of(told.verdict)).or_default() += 1;
                decisions += 1;
            }
        }
    }
    println!("{decisions} decisions in {case} states, seed {seed}: {seen:?}");
    for verdict in ["admit", "reject", "would reject", "exempt", "unvetted"] {
        let count = seen.get(verdict).copied().unwrap_or_default();
        assert!(
            count > DECISIONS / 200,
            "too few decisions are {verdict}: {seen:?}"
        );
    }
}

/// Times tick between the two answers.
fn without_numbers(text: &str) -> String {
    let mut kept: String = text.chars().filter(|c| !c.is_ascii_digit()).collect();
    for unit in ["h m s", "m s", "h m", "h s", "h", "m", "s"] {
        kept = kept.replace(&format!("in {unit};"), "in;");
        kept = kept.replace(&format!("in {unit})"), "in)");
        kept = kept.replace(&format!("for {unit};"), "for;");
        kept = kept.replace(&format!("for {unit})"), "for)");
    }
    kept
}

fn name_of(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Admit => "admit",
        Verdict::Reject => "reject",
        Verdict::WouldReject => "would reject",
        Verdict::Exempt => "exempt",
        Verdict::Unvetted => "unvetted",
    }
}

/// What one side answered.
struct Answered {
    verdict: Verdict,
    plugin: String,
    text: String,
    steps: Vec<String>,
}

/// What both sides are asked.
#[derive(Debug)]
struct Asked {
    pod: PodSandbox,
    container: Option<Container>,
    /// Else explain finds the pod by its uid.
    described: bool,
}

/// A daemon without its NRI session and sockets, and the processes that hold leases.
struct Node {
    daemon: Arc<Daemon>,
    admin: AdminService,
    hooks: Arc<Hooks>,
    published: Published,
    traces: tokio::sync::Mutex<mpsc::Receiver<Trace>>,
    /// Present, present, never connected, gone.
    processes: Vec<ProcessKey>,
    _children: Vec<Killed>,
    _runtime: Runtime,
    _directory: tempfile::TempDir,
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Node {
    async fn start() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let socket = directory.path().join("nri.sock");
        let runtime = Runtime::start(&socket, Options::default())
            .await
            .expect("the simulated runtime starts");
        let mut children: Vec<Killed> = (0..2).map(|_| plugin_child(&socket)).collect();
        children.push(Killed(quiet(Process::new("sleep").arg("3600"))));
        let key = |child: &Killed| proc::key_of(child.0.id()).expect("it runs");
        let mut processes: Vec<_> = children.iter().map(key).collect();
        let gone = Killed(quiet(Process::new("sleep").arg("3600")));
        processes.push(key(&gone));

        let tracker = Tracker::start().expect("the tracker starts");
        tracker.runtime_added(RUNTIME, socket.clone());
        let spec = |process: &ProcessKey| HolderSpec {
            process: *process,
            connection_inode: None,
        };
        tracker.set_holders(processes.iter().map(spec).collect());
        drop(gone);
        for process in &processes[..2] {
            let began = SystemTime::now();
            while tracker.settle(*process, PATIENCE).await != Settled::Bound {
                let waited = began.elapsed().unwrap_or_default();
                assert!(waited < PATIENCE, "the plugin is not connected");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        let (daemon, published) = daemon(tracker.clone(), &socket, directory.path()).await;
        let (traces, queue) = mpsc::channel(16);
        let hooks = Arc::new(Hooks {
            published: published.clone(),
            view: tracker.view_cell(),
            clock: daemon.clock.clone(),
            totals: daemon.totals.clone(),
            traces,
            listings: daemon.listings.clone(),
        });
        Self {
            admin: AdminService::new(daemon.clone(), Err("a test".to_owned())),
            daemon,
            hooks,
            published,
            traces: tokio::sync::Mutex::new(queue),
            processes,
            _children: children,
            _runtime: runtime,
            _directory: directory,
        }
    }

    /// What the runtime gets as an answer, and what the hook left behind about it.
    fn hook(&self, world: &World, asked: &Asked) -> Answered {
        let session = &world.session;
        let outcome = match &asked.container {
            None => {
                let outcome = session.run_pod_sandbox(&asked.pod);
                session.remove_pod_sandbox(&asked.pod);
                outcome
            }
            Some(container) if world.has_validation => {
                session.validate_container(&ValidateContainerAdjustmentRequest {
                    pod: MessageField::some(asked.pod.clone()),
                    container: MessageField::some(container.clone()),
                    plugins: world.list.clone(),
                    ..Default::default()
                })
            }
            Some(container) => session.create_container(&asked.pod, container),
        };
        let mut decided = None;
        let mut traces = self.traces.try_lock().expect("one at a time");
        while let Ok(trace) = traces.try_recv() {
            if let Trace::Decided(trace) = trace {
                decided = Some(trace);
            }
        }
        let Some(decided) = decided else {
            assert!(outcome.is_ok(), "a refusal leaves a trace");
            return Answered {
                verdict: Verdict::Admit,
                plugin: String::new(),
                text: "no lease covers it".to_owned(),
                steps: Vec::new(),
            };
        };
        match outcome {
            Ok(()) => assert_ne!(decided.verdict, Verdict::Reject),
            Err(refusal) => {
                assert_eq!(decided.verdict, Verdict::Reject);
                assert_eq!(decided.text, refusal.text);
                assert!(refusal.text.len() <= 512, "{}", refusal.text);
            }
        }
        Answered {
            verdict: decided.verdict,
            plugin: decided.plugin.map(|p| p.to_string()).unwrap_or_default(),
            text: decided.text,
            steps: Vec::new(),
        }
    }

    fn explain(&self, asked: &Asked) -> Answered {
        let pod = &asked.pod;
        let name = asked.container.as_ref().map(|container| &container.name);
        let mut request = pb::ExplainRequest {
            container: name.cloned().unwrap_or_default(),
            ..Default::default()
        };
        if asked.described {
            let containers = asked.container.iter().map(|container| {
                let devices = container.CDI_devices.iter();
                pb::ContainerDescription {
                    name: container.name.clone(),
                    cdi_devices: devices.map(|device| device.name.clone()).collect(),
                    ..Default::default()
                }
            });
            request.described = MessageField::some(pb::PodDescription {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                labels: pod.labels.clone(),
                annotations: pod.annotations.clone(),
                runtime_handler: pod.runtime_handler.clone(),
                containers: containers.collect(),
                ..Default::default()
            });
        } else {
            request.pod_uid = pod.uid.clone();
        }
        let response = self.admin.explain_pod(&request).expect("it is explained");
        assert_eq!(response.decisions.len(), 1, "{request:?}");
        let decision = &response.decisions[0];
        assert!(!decision.steps.is_empty());
        Answered {
            verdict: match decision.verdict.enum_value().expect("a known verdict") {
                PbVerdict::VERDICT_ADMIT => Verdict::Admit,
                PbVerdict::VERDICT_REJECT => Verdict::Reject,
                PbVerdict::VERDICT_WOULD_REJECT => Verdict::WouldReject,
                PbVerdict::VERDICT_EXEMPT => Verdict::Exempt,
                PbVerdict::VERDICT_UNVETTED => Verdict::Unvetted,
                PbVerdict::VERDICT_UNSPECIFIED => panic!("no verdict"),
            },
            plugin: decision.plugin.clone(),
            text: decision.reason.clone(),
            steps: decision.steps.clone(),
        }
    }
}

fn plugin_child(socket: &Path) -> Killed {
    let program = std::env::current_exe().expect("this test program");
    let mut command = Process::new(program);
    command
        .args(["--exact", "rpc::admin::agreement::plugin_process"])
        .env(SOCKET_VARIABLE, socket);
    Killed(quiet(&mut command))
}

fn quiet(command: &mut Process) -> Child {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts")
}

async fn daemon(tracker: Tracker, socket: &Path, state_dir: &Path) -> (Arc<Daemon>, Published) {
    let clock = SystemClock::new().expect("a boot id");
    let opened = Store::open(&state_dir.join("state"), store::Options::default());
    let store = Arc::new(opened.expect("a new store").store);
    let config = Config::default();
    let policy = Arc::new(Policy::compile(&config).expect("the defaults are good"));
    let published: Published = Arc::new(ArcSwap::from_pointee(Snapshot {
        state: State::new(),
        policy: policy.clone(),
        hold_until: None,
    }));
    let events = Events::default();
    let engine = Engine::start(Parts {
        state: State::new(),
        store: store.clone(),
        policy,
        limits: Limits::default(),
        clock: clock.clone(),
        tracker: tracker.clone(),
        events: events.clone(),
        published: published.clone(),
    })
    .expect("the engine starts");
    // Its first picture is published by then, and none after it.
    let plugin = PluginName::try_from("nobody").expect("a name");
    let lifted = engine.carry_out(Command::LiftBan { plugin }).await;
    lifted.expect("lifting no ban is no error");
    let daemon = Daemon {
        engine,
        store,
        loaded_from: "empty",
        state_dir: PathBuf::from(state_dir),
        tracker,
        runtimes: vec![Arc::new(RuntimeStatus::new(RUNTIME, socket))],
        pods: Arc::default(),
        events,
        ring: Arc::default(),
        totals: Arc::default(),
        listings: PublishedListings::default(),
        clock,
        config: ArcSwap::from_pointee(config),
        started_at: SystemTime::now(),
    };
    (Arc::new(daemon), published)
}

/// One generated state, policy, runtime and set of pods.
struct World {
    session: Arc<HookSession>,
    has_validation: bool,
    list: Vec<PluginInstance>,
    pods: Vec<PodSandbox>,
}

impl World {
    async fn generate(node: &Node, random: &mut Rng) -> Self {
        let now = node.daemon.clock.now();
        let pods: Vec<_> = (0..PODS_OF_A_STATE).map(|n| pod(random, n)).collect();
        let state = state(node, random, &now, &pods);
        let list = list(node, random, &state, &now);
        let config = Config::parse(&config(random), Path::new("generated")).expect("valid");
        node.daemon.pods.replace(RUNTIME, &pods);
        node.published.store(Arc::new(Snapshot {
            state,
            policy: Arc::new(Policy::compile(&config).expect("valid")),
            hold_until: (random.u8(..10) == 0).then(|| now.boottime.plus(HOUR)),
        }));

        let version = *pick(random, &["v2.3.4", "v2.3.4", "v2.2.1", "v1.7.30"]);
        let identity = RuntimeIdentity {
            name: "containerd".to_owned(),
            version: version.to_owned(),
            nri_version: String::new(),
        };
        let generation = identity.generation().expect("the version tells");
        let status = &node.daemon.runtimes[0];
        status.set_connected(Connected {
            identity: identity.clone(),
            generation,
            since: SystemTime::now(),
            request_timeout: Duration::from_secs(2),
            registration_timeout: Duration::from_secs(5),
            pods: 0,
        });
        let session = node.hooks.session(status.clone());
        // A budget that a busy test machine does not exceed.
        session.configured(&identity, generation, HOUR, Duration::from_secs(5));
        let described = PodSandbox {
            id: DESCRIBED.to_owned(),
            ..Default::default()
        };
        let known = pods.iter().cloned().chain([described]).collect();
        // The daemon's part of it: it has compared them, and found nothing new.
        let compared = async {
            if let Some(Trace::Synchronized { done, .. }) = node.traces.lock().await.recv().await {
                done.send(()).expect("the session waits");
            }
        };
        tokio::join!(session.synchronized(known), compared);
        Self {
            session,
            has_validation: generation == Generation::WithValidation,
            list,
            pods,
        }
    }

    /// The sandbox and some containers, known to explain by uid or described.
    fn questions(&self, random: &mut Rng, pod: &PodSandbox) -> Vec<Asked> {
        let started = PodSandbox {
            id: format!("new-{}", pod.id),
            ..pod.clone()
        };
        let mut asked = vec![Asked {
            pod: started,
            container: None,
            described: random.bool(),
        }];
        for _ in 0..3 {
            let described = random.bool();
            let mut container = Container {
                name: (*pick(random, &CONTAINERS)).to_owned(),
                ..Default::default()
            };
            let mut pod = pod.clone();
            if described {
                // A description has no sandbox that could be unvetted.
                pod.id = DESCRIBED.to_owned();
                let devices = DEVICES.iter().filter(|_| random.bool());
                container.CDI_devices = devices
                    .map(|device| CDIDevice {
                        name: (*device).to_owned(),
                        ..Default::default()
                    })
                    .collect();
            }
            asked.push(Asked {
                pod,
                container: Some(container),
                described,
            });
        }
        asked
    }
}

const DESCRIBED: &str = "described";
const HOUR: Duration = Duration::from_secs(3600);

fn pick<'a, T>(random: &mut Rng, from: &'a [T]) -> &'a T {
    &from[random.usize(..from.len())]
}

fn name(text: &str) -> PluginName {
    PluginName::try_from(text).expect("a plugin name")
}

fn pod_uid(pod: &PodSandbox) -> PodUid {
    PodUid::try_from(pod.uid.as_str()).expect("a pod uid")
}

fn pod(random: &mut Rng, number: usize) -> PodSandbox {
    let mut pod = PodSandbox {
        id: format!("sandbox-{number}"),
        uid: format!("uid-{number}"),
        namespace: (*pick(random, &NAMESPACES)).to_owned(),
        name: match random.u8(..3) {
            0 => format!("{}-x7k2p", pick(random, &["plugin", "web"])),
            1 => format!("plugin-{number}"),
            _ => format!("web-{number}"),
        },
        runtime_handler: (*pick(random, &HANDLERS)).to_owned(),
        ..Default::default()
    };
    for (key, values) in [
        ("app", ["web", "plugin"]),
        ("tier", ["node", "work"]),
        ("controller-revision-hash", ["1", "2"]),
    ] {
        if random.bool() {
            let value = (*pick(random, &values)).to_owned();
            pod.labels.insert(key.to_owned(), value);
        }
    }
    for (likely, key, values) in [
        (8, "kubernetes.io/config.source", ["file", "api"]),
        (3, "dra.net/claim", ["x", "y"]),
        (
            6,
            "tolerate-missing-plugins.noderesource.dev",
            ["true", "0"],
        ),
        (
            8,
            "tolerate-missing-plugins.noderesource.dev/container.app",
            ["true", "f"],
        ),
        (
            4,
            "required-plugins.noderesource.dev",
            ["[a.net, unknown]", "[cpu]"],
        ),
        (8, "required-plugins.noderesource.dev/pod", ["- z\n- b", ""]),
        (
            8,
            "required-plugins.noderesource.dev/container.app",
            ["[other]", "{bad"],
        ),
        (
            30,
            "required-plugins.noderesource.dev/pod",
            ["{bad", "[a b]"],
        ),
    ] {
        if random.u8(..likely) == 0 {
            let value = (*pick(random, &values)).to_owned();
            pod.annotations.insert(key.to_owned(), value);
        }
    }
    pod
}

fn config(random: &mut Rng) -> String {
    let mut text = String::from("[enforcement]\n");
    let mut set = |random: &mut Rng, key: &str, values: &[&str]| {
        let value = *pick(random, values);
        if !value.is_empty() {
            text.push_str(&format!("{key} = {value}\n"));
        }
    };
    set(random, "mode", &["", "", "", "'audit'"]);
    set(random, "sandbox", &["", "'auto'", "'always'", "'never'"]);
    set(random, "unvetted_sandboxes", &["", "'reject'"]);
    set(random, "required_plugins_annotation", &["", "", "false"]);
    set(random, "[exempt]\nstatic_pods", &["true", "false"]);
    set(random, "namespaces", &["", "", "['kube-*']"]);
    set(random, "pod_labels", &["", "", "'tier in (node)'"]);
    set(random, "runtime_handlers", &["", "", "['kata*']"]);
    set(random, "toleration_namespaces", &["", "['*']", "[]"]);
    text
}

fn scope(random: &mut Rng) -> Scope {
    if random.bool() {
        return Scope::all();
    }
    let some = |random: &mut Rng, values: &[&str]| match random.u8(..3) {
        0 => vec![(*pick(random, values)).to_owned()],
        _ => Vec::new(),
    };
    let rules = (0..random.usize(1..3)).map(|_| ScopeRule {
        namespaces: vec![(*pick(random, &["*", "prod-*", "default"])).to_owned()],
        pod_labels: some(random, &["app=web", "tier notin (node)", "!app"]).concat(),
        pod_annotations: some(random, &["dra.net/claim", "dra.net/claim=x"]),
        runtime_handlers: some(random, &["", "kata*"]),
        cdi_devices: some(random, &["dra.net/*=*", "vendor.com/gpu=*"]),
        containers: some(random, &["app", "*"]),
        operations: match random.u8(..4) {
            0 => vec![Operation::Sandbox],
            1 => vec![Operation::Container],
            _ => Vec::new(),
        },
    });
    // Some combinations can never match and are refused.
    let scope = Scope {
        rules: rules.collect(),
    };
    match scope.compile() {
        Ok(_) => scope,
        Err(_) => Scope::all(),
    }
}

fn state(node: &Node, random: &mut Rng, now: &Now, pods: &[PodSandbox]) -> State {
    let limits = Limits::default();
    let mut state = State::new();
    // Registered long enough ago to have ended.
    let before = Now {
        boottime: Boottime(now.boottime.0.saturating_sub(10_000_000_000)),
        ..now.clone()
    };
    let mut apply = |random: &mut Rng, may_end: bool, command: Command| {
        let at = match may_end && random.u8(..8) == 0 {
            true => &before,
            false => now,
        };
        // Some are refused, such as a holder that may not join.
        let _ = state.apply(command, at, &limits);
    };
    for _ in 0..random.usize(0..7) {
        let (plugin, process) = (*pick(random, &PLUGINS), *pick(random, &node.processes));
        let ends = random.u8(..8) == 0;
        let host = pick(random, pods);
        let command = Command::Register {
            plugin: name(plugin),
            ttl: Ttl::new(if ends { Duration::from_secs(5) } else { HOUR }).ok(),
            scope: scope(random),
            mode: match random.u8(..4) {
                0 => LeaseMode::Audit,
                _ => LeaseMode::Enforce,
            },
            index: random
                .bool()
                .then(|| *pick(random, &["10", "98", "99"]))
                .and_then(|index| PluginIndex::try_from(index).ok()),
            events: None,
            holder: HolderFacts {
                process,
                uid: 0,
                cgroup: String::new(),
                pod: random.bool().then(|| PodIdentity {
                    uid: pod_uid(host),
                    namespace: Some(host.namespace.clone()),
                    name: Some(host.name.clone()),
                    labels: host.labels.clone().into_iter().collect(),
                }),
                connection_inode: None,
                registered_by: None,
                subject: None,
            },
        };
        apply(random, ends, command);
    }
    for _ in 0..random.usize(0..6) {
        let (plugin, pod) = (*pick(random, &PLUGINS), pick(random, pods));
        let command = Command::Pin {
            plugin: name(plugin),
            pod_uid: pod_uid(pod),
            ttl: Ttl::new(HOUR).ok(),
        };
        apply(random, false, command);
    }
    for _ in 0..random.usize(0..2) {
        let process = *pick(random, &node.processes);
        apply(random, false, Command::HolderLost { process });
    }
    if random.u8(..6) == 0 {
        let command = Command::Pause {
            duration: HOUR,
            reason: "a test".to_owned(),
            by_uid: 1,
        };
        apply(random, false, command);
    }
    for pod in pods {
        if random.u8(..3) != 0 {
            continue;
        }
        let missed = PLUGINS.iter().filter(|_| random.u8(..4) == 0);
        let unvetted = missed.map(|plugin| (name(plugin), "it was away".to_owned()));
        let command = Command::SandboxAppeared {
            sandbox: SandboxPod {
                sandbox_id: pod.id.clone(),
                runtime: "nri.sock".to_owned(),
                pod_namespace: pod.namespace.clone(),
                pod_name: pod.name.clone(),
                pod_uid: Some(pod_uid(pod)),
            },
            unvetted: unvetted.collect(),
        };
        apply(random, false, command);
    }
    state
}

/// What the runtime would list: every plugin with a connected holder, at the holder's index; of the
/// others, those that it has not noticed to be gone.
fn list(node: &Node, random: &mut Rng, state: &State, now: &Now) -> Vec<PluginInstance> {
    let mut list = Vec::new();
    let mut add = |name: &str, index: &str| {
        list.push(PluginInstance {
            name: name.to_owned(),
            index: index.to_owned(),
            ..Default::default()
        });
    };
    let live = |lease: &&Arc<Lease>| lease.counts_at(now.boottime);
    for lease in state.leases().values().filter(live) {
        for holder in &lease.holders {
            let connected = node.processes[..2].contains(&holder.facts.process);
            if connected || random.bool() {
                let index = holder.settings.index.map(|index| index.to_string());
                add(lease.plugin.as_str(), index.as_deref().unwrap_or("10"));
            }
        }
    }
    for unleased in PLUGINS.iter().chain(&["unknown", "other"]) {
        if state.lease(unleased).is_none() && random.bool() {
            add(unleased, "20");
        }
    }
    list
}
