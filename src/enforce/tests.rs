//! The decision and its words, one behaviour each: real rules and policies, made-up evidence.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use nri_lease_proto::nri::nri::PodSandbox;
use nri_lease_state::record::Mode as LeaseMode;
use nri_lease_state::rules::{Command, Lease, Limits, State};
use nri_lease_state::scope::{Scope, ScopeRule};
use nri_lease_state::time::{BootId, Boottime, Now, Ttl, WallTime};
use nri_lease_state::{ContainerView, HolderFacts, PluginName, PodIdentity, PodUid, ProcessKey};

use super::decision::{Decision, Request, Verdict, decide, required_for_sandbox};
use super::evidence::{Evidence, LostWhen, Missing};
use super::hooks::Hooks;
use super::policy::Policy;
use super::question::pod_view;
use super::snapshot::Snapshot;
use super::text;
use crate::clock::SystemClock;
use crate::config::Config;
use crate::nri::events::{Generation, RuntimeIdentity};
use crate::nri::status::RuntimeStatus;
use crate::presence::{Presence, RuntimeId};

const SECOND: u64 = 1_000_000_000;

/// Who is there, as a test says.
#[derive(Default)]
struct Told {
    present: Vec<String>,
    /// None: there is no list.
    list: Option<Vec<String>>,
    missing: Option<Missing>,
}

impl Evidence for Told {
    fn present(&self, plugin: &PluginName, lease: Option<&Lease>) -> Result<(), Missing> {
        let lease = lease.ok_or(Missing::NoLease)?;
        if self.present.iter().any(|one| one == plugin.as_str()) {
            return Ok(());
        }
        Err(self.missing.clone().unwrap_or(match lease.holders.first() {
            None => Missing::NoHolder,
            Some(holder) => Missing::Holder {
                pid: holder.facts.process.pid,
                presence: Presence::NeverConnected,
                lost: None,
            },
        }))
    }

    fn listed(&self, plugin: &PluginName) -> Option<bool> {
        let list = self.list.as_ref()?;
        Some(list.iter().any(|one| one == plugin.as_str()))
    }
}

/// A node: its leases, its configuration, its time, and who is connected.
struct Node {
    state: State,
    config: String,
    now: Now,
    limits: Limits,
    told: Told,
    hold_until: Option<Boottime>,
    unvetted: Vec<(PluginName, String)>,
    may_refuse_sandbox: bool,
}

impl Node {
    fn new() -> Self {
        Self {
            state: State::new(),
            config: String::new(),
            now: Now {
                boottime: Boottime(1000 * SECOND),
                wall: WallTime(1_700_000_000 * SECOND as i64),
                boot_id: BootId::from("boot"),
            },
            limits: Limits::default(),
            told: Told::default(),
            hold_until: None,
            unvetted: Vec::new(),
            may_refuse_sandbox: true,
        }
    }

    fn configured(config: &str) -> Self {
        Self {
            config: config.to_owned(),
            ..Self::new()
        }
    }

    fn done(&mut self, command: Command) -> &mut Self {
        self.state
            .apply(command, &self.now, &self.limits)
            .expect("not refused");
        self
    }

    fn pass(&mut self, seconds: u64) -> &mut Self {
        self.now.boottime.0 += seconds * SECOND;
        self.now.wall.0 += (seconds * SECOND) as i64;
        self
    }

    fn lease(&mut self, plugin: &str) -> &mut Self {
        self.lease_with(plugin, Scope::all(), LeaseMode::Enforce)
    }

    fn lease_with(&mut self, plugin: &str, scope: Scope, mode: LeaseMode) -> &mut Self {
        self.done(Command::Register {
            plugin: name(plugin),
            ttl: Some(ttl(60)),
            scope,
            mode,
            index: None,
            events: None,
            holder: holder(4711, None),
        })
    }

    /// Its holder's process ends.
    fn lost(&mut self) -> &mut Self {
        let process = holder(4711, None).process;
        self.done(Command::HolderLost { process })
    }

    fn pin(&mut self, plugin: &str, pod: &str) -> &mut Self {
        self.done(Command::Pin {
            plugin: name(plugin),
            pod_uid: uid(pod),
            ttl: Some(ttl(600)),
        })
    }

    fn pause(&mut self) -> &mut Self {
        self.done(Command::Pause {
            duration: Duration::from_secs(60),
            reason: "incident 7".to_owned(),
            by_uid: 1001,
        })
    }

    fn snapshot(&self) -> Snapshot {
        let config = Config::parse(&self.config, Path::new("test")).expect("good");
        Snapshot {
            state: self.state.clone(),
            policy: Arc::new(Policy::compile(&config).expect("good")),
            hold_until: self.hold_until,
        }
    }

    fn explained(
        &self,
        pod: &PodSandbox,
        container: Option<(&str, &[&str])>,
    ) -> (Decision, Vec<String>) {
        let request = Request {
            pod: pod_view(pod),
            container: container.map(|(name, cdi_devices)| ContainerView { name, cdi_devices }),
            unvetted: &self.unvetted,
            may_refuse_sandbox: self.may_refuse_sandbox,
        };
        let mut steps = Vec::new();
        let snapshot = self.snapshot();
        let decision = decide(&snapshot, &request, &self.told, &self.now, Some(&mut steps));
        let silent = decide(&snapshot, &request, &self.told, &self.now, None);
        assert_eq!(silent.text, decision.text, "explaining changes nothing");
        (decision, steps)
    }

    fn sandbox(&self, pod: &PodSandbox) -> Decision {
        self.explained(pod, None).0
    }

    fn container(&self, pod: &PodSandbox) -> Decision {
        self.explained(pod, Some(("app", &[]))).0
    }

    /// The same for sandbox and container.
    fn both(&self, pod: &PodSandbox) -> (Verdict, String) {
        let (sandbox, container) = (self.sandbox(pod), self.container(pod));
        assert_eq!(
            sandbox.verdict, container.verdict,
            "{sandbox:?} {container:?}"
        );
        (sandbox.verdict, sandbox.text)
    }
}

fn name(text: &str) -> PluginName {
    PluginName::try_from(text).unwrap()
}

fn uid(text: &str) -> PodUid {
    PodUid::try_from(text).unwrap()
}

fn ttl(seconds: u64) -> Ttl {
    Ttl::new(Duration::from_secs(seconds)).unwrap()
}

fn holder(pid: u32, pod: Option<PodIdentity>) -> HolderFacts {
    HolderFacts {
        process: ProcessKey { pid, start_time: 1 },
        uid: 0,
        cgroup: String::new(),
        pod,
        connection_inode: None,
        registered_by: None,
        subject: None,
    }
}

fn pod(pod_uid: &str) -> PodSandbox {
    PodSandbox {
        id: format!("sandbox-{pod_uid}"),
        uid: pod_uid.to_owned(),
        name: "web".to_owned(),
        namespace: "default".to_owned(),
        ..Default::default()
    }
}

fn annotated(pairs: &[(&str, &str)]) -> PodSandbox {
    PodSandbox {
        annotations: map(pairs),
        ..pod("u1")
    }
}

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    pairs.iter().map(owned).collect()
}

fn namespaces(pattern: &str) -> Scope {
    Scope {
        rules: vec![ScopeRule {
            namespaces: vec![pattern.to_owned()],
            ..Default::default()
        }],
    }
}

const REQUIRED: &str = "required-plugins.noderesource.dev";
const TOLERATED: &str = "tolerate-missing-plugins.noderesource.dev";
const STATIC: (&str, &str) = ("kubernetes.io/config.source", "file");

#[test]
fn a_covered_pod_waits_for_its_plugin_and_starts_when_it_is_there() {
    let mut node = Node::new();
    assert_eq!(
        node.both(&pod("u1")),
        (Verdict::Admit, "no lease covers it".to_owned())
    );
    node.lease("dra.net");
    assert_eq!(node.both(&pod("u1")).0, Verdict::Reject);
    node.told.present.push("dra.net".to_owned());
    assert_eq!(node.both(&pod("u1")).0, Verdict::Admit);
    node.told.present.clear();
    node.pass(60);
    assert_eq!(node.both(&pod("u1")).0, Verdict::Admit, "it has run out");
}

#[test]
fn the_refusal_reads_as_the_design_says() {
    let mut node = Node::new();
    node.lease("dra.net").pass(7).lost().pass(12);
    assert_eq!(
        node.both(&pod("u1")).1,
        "required NRI plugin \"dra.net\" is not connected to the runtime (lease expires in 41s; \
         holder pid 4711 gone since 12s). The pod is retried. Override: nri-lease revoke dra.net"
    );
}

#[test]
fn a_pod_outside_the_scope_does_not_wait() {
    let mut node = Node::new();
    node.lease_with("dra.net", namespaces("prod-*"), LeaseMode::Enforce);
    let (decision, steps) = node.explained(&pod("u1"), None);
    assert_eq!(decision.verdict, Verdict::Admit);
    assert_eq!(steps[0], "plugin dra.net: its scope does not cover this");
}

#[test]
fn only_containers_with_a_device_of_the_scope_wait() {
    let mut node = Node::new();
    let scope = Scope {
        rules: vec![ScopeRule {
            cdi_devices: vec!["dra.net/*=*".to_owned()],
            ..Default::default()
        }],
    };
    node.lease_with("dra.net", scope, LeaseMode::Enforce);
    let verdict = |devices: &[&str]| node.explained(&pod("u1"), Some(("app", devices))).0.verdict;
    assert_eq!(verdict(&["dra.net/nic=eth1"]), Verdict::Reject);
    assert_eq!(
        verdict(&["vendor.com/gpu=0", "dra.net/nic=e"]),
        Verdict::Reject
    );
    assert_eq!(verdict(&["vendor.com/gpu=0"]), Verdict::Admit);
    assert_eq!(verdict(&[]), Verdict::Admit);
}

#[test]
fn a_pinned_pod_waits_whatever_the_scope_and_even_without_a_lease() {
    let mut node = Node::new();
    node.lease_with("dra.net", namespaces("other"), LeaseMode::Enforce)
        .pin("dra.net", "u1");
    let (verdict, text) = node.both(&pod("u1"));
    assert_eq!(verdict, Verdict::Reject);
    assert!(text.contains("the pod is pinned to it for 10m"), "{text}");
    assert!(
        text.ends_with("Override: nri-lease unpin dra.net u1"),
        "{text}"
    );
    assert_eq!(node.both(&pod("u2")).0, Verdict::Admit, "others start");

    node.pass(60).done(Command::Tick);
    let (verdict, text) = node.both(&pod("u1"));
    assert_eq!(verdict, Verdict::Reject);
    assert!(text.contains("it has no lease"), "{text}");
    node.pass(540);
    assert_eq!(node.both(&pod("u1")).0, Verdict::Admit, "the pin has ended");
}

/// In DESIGN's order: one pod that every exemption applies to, and they are taken away one by one.
#[test]
fn the_first_exemption_in_the_designs_order_is_named() {
    let exempt = "[exempt]\nnamespaces = ['kube-*']\npod_labels = 'tier=node'\n\
                  runtime_handlers = ['kata*']\ntoleration_namespaces = ['*']\n";
    let mut node = Node::configured(&format!("{exempt}[enforcement]\nmode = 'audit'\n"));
    let host = PodIdentity {
        uid: uid("u1"),
        namespace: Some("kube-system".to_owned()),
        name: Some("dranet-x7k2p".to_owned()),
        labels: BTreeMap::new(),
    };
    node.done(Command::Register {
        plugin: name("dra.net"),
        ttl: Some(ttl(600)),
        scope: Scope::all(),
        mode: LeaseMode::Audit,
        index: None,
        events: None,
        holder: holder(4711, Some(host)),
    })
    .pause();
    let mut web = PodSandbox {
        name: "dranet-x7k2p".to_owned(),
        namespace: "kube-system".to_owned(),
        labels: map(&[("tier", "node")]),
        runtime_handler: "kata-qemu".to_owned(),
        ..annotated(&[STATIC, (TOLERATED, "true")])
    };
    let named = |node: &Node, web: &PodSandbox, wanted: &str| {
        let (verdict, text) = node.both(web);
        assert!(
            text.starts_with(wanted),
            "{wanted:?} is not first in {text:?}"
        );
        verdict
    };

    let verdict = named(
        &node,
        &web,
        "enforcement is paused by uid 1001 (incident 7), and passes anyway: static pod",
    );
    assert_eq!(verdict, Verdict::Exempt, "it would not be refused");
    node.done(Command::Resume);
    named(&node, &web, "audit mode, and passes anyway: static pod");
    node.config = exempt.to_owned();
    named(&node, &web, "audit mode of the lease, and passes anyway");
    let enforced = |node: &mut Node| {
        node.done(Command::Register {
            plugin: name("dra.net"),
            ttl: Some(ttl(600)),
            scope: Scope::all(),
            mode: LeaseMode::Enforce,
            index: None,
            events: None,
            holder: node.state.lease("dra.net").unwrap().holders[0]
                .facts
                .clone(),
        });
    };
    enforced(&mut node);
    assert_eq!(named(&node, &web, "static pod"), Verdict::Exempt);
    web.annotations.remove(STATIC.0);
    named(&node, &web, "pod of the plugin \"dra.net\"");
    web.uid = "u2".to_owned();
    named(&node, &web, "pod of the plugin"); // by its name
    web.name = "web".to_owned();
    web.labels.insert("app".to_owned(), "web".to_owned());
    named(&node, &web, "namespace exempt in the configuration");
    web.namespace = "default".to_owned();
    named(&node, &web, "pod labels exempt in the configuration");
    web.labels.clear();
    named(&node, &web, "runtime handler exempt in the configuration");
    web.runtime_handler = "runc".to_owned();
    named(&node, &web, "annotation tolerate-missing-plugins");
    web.annotations.clear();
    assert_eq!(node.both(&web).0, Verdict::Reject);
}

#[test]
fn a_pinned_pod_of_a_plugin_waits_too() {
    let mut node = Node::new();
    let host = PodIdentity {
        uid: uid("u1"),
        namespace: Some("default".to_owned()),
        name: Some("web".to_owned()),
        labels: BTreeMap::new(),
    };
    node.done(Command::Register {
        plugin: name("cpu"),
        ttl: Some(ttl(60)),
        scope: Scope::all(),
        mode: LeaseMode::Enforce,
        index: None,
        events: None,
        holder: holder(4711, Some(host)),
    });
    assert_eq!(node.both(&pod("u1")).0, Verdict::Exempt);
    node.pin("dra.net", "u1");
    assert_eq!(node.both(&pod("u1")).0, Verdict::Reject);
}

#[test]
fn static_pods_wait_where_the_configuration_says_so() {
    let mut node = Node::configured("[exempt]\nstatic_pods = false\n");
    node.lease("dra.net");
    assert_eq!(node.both(&annotated(&[STATIC])).0, Verdict::Reject);
    node.config.clear();
    assert_eq!(node.both(&annotated(&[STATIC])).0, Verdict::Exempt);
    let from_api = annotated(&[(STATIC.0, "api")]);
    assert_eq!(node.both(&from_api).0, Verdict::Reject);
}

#[test]
fn a_toleration_counts_only_in_its_namespaces_and_for_its_container() {
    let mut node = Node::new();
    node.lease("dra.net");
    let mut web = annotated(&[(TOLERATED, "true")]);
    assert_eq!(node.both(&web).0, Verdict::Reject);
    web.namespace = "kube-system".to_owned();
    assert_eq!(node.both(&web).0, Verdict::Exempt);
    web.annotations = map(&[(&format!("{TOLERATED}/container.app"), "true")]);
    assert_eq!(node.container(&web).verdict, Verdict::Exempt);
    assert_eq!(node.sandbox(&web).verdict, Verdict::Reject);
    web.annotations = map(&[(TOLERATED, "true"), (&format!("{TOLERATED}/pod"), "false")]);
    assert_eq!(
        node.both(&web).0,
        Verdict::Reject,
        "the narrower one counts"
    );
}

#[test]
fn a_paused_node_refuses_nothing_and_says_who_paused_it_and_why() {
    let mut node = Node::new();
    node.lease("dra.net").pause();
    let (verdict, text) = node.both(&pod("u1"));
    assert_eq!(verdict, Verdict::WouldReject);
    assert!(
        text.starts_with("enforcement is paused by uid 1001 (incident 7): required NRI plugin"),
        "{text}"
    );
    node.pass(59);
    assert_eq!(node.both(&pod("u1")).0, Verdict::WouldReject);
    node.lease("dra.net").pass(1);
    assert_eq!(node.both(&pod("u1")).0, Verdict::Reject, "it has an end");
}

#[test]
fn audit_mode_of_the_node_or_of_a_lease_refuses_nothing() {
    let mut node = Node::configured("[enforcement]\nmode = 'audit'\n");
    node.lease("dra.net");
    let (verdict, text) = node.both(&pod("u1"));
    assert_eq!(verdict, Verdict::WouldReject);
    assert!(text.starts_with("audit mode: required NRI"), "{text}");

    let mut node = Node::new();
    node.lease_with("dra.net", Scope::all(), LeaseMode::Audit);
    assert_eq!(node.both(&pod("u1")).0, Verdict::WouldReject);
    // One that is enforced speaks for all, wherever it comes in the order of names.
    for enforced in ["aaa", "zzz"] {
        node.lease(enforced);
        let decision = node.sandbox(&pod("u1"));
        assert_eq!(decision.verdict, Verdict::Reject);
        assert_eq!(decision.plugin, Some(name(enforced)));
        node.done(Command::Revoke {
            plugin: name(enforced),
            ban: None,
            reason: String::new(),
            by_uid: 0,
        });
    }
}

#[test]
fn an_audited_lease_refuses_no_container_of_an_unvetted_sandbox() {
    let mut node = Node::configured("[enforcement]\nunvetted_sandboxes = 'reject'\n");
    node.lease_with("dra.net", Scope::all(), LeaseMode::Audit);
    node.told.present.push("dra.net".to_owned());
    node.unvetted = vec![(name("dra.net"), "it was away".to_owned())];
    assert_eq!(node.container(&pod("u1")).verdict, Verdict::WouldReject);
    // Audited plugins that are away do not hide an enforced objection.
    node.lease_with("aaa", Scope::all(), LeaseMode::Audit);
    node.lease("dra.net");
    assert_eq!(node.container(&pod("u1")).verdict, Verdict::Reject);
}

#[test]
fn containers_of_an_unvetted_sandbox_wait_for_its_deletion_if_configured() {
    let mut node = Node::new();
    node.lease("dra.net");
    node.told.present.push("dra.net".to_owned());
    node.unvetted = vec![(name("dra.net"), "it was away".to_owned())];
    assert_eq!(node.container(&pod("u1")).verdict, Verdict::Admit);
    node.config = "[enforcement]\nunvetted_sandboxes = 'reject'\n".to_owned();
    let decision = node.container(&pod("u1"));
    assert_eq!(decision.verdict, Verdict::Reject);
    for part in [
        "it was away",
        "kubectl delete pod -n default web",
        "nri-lease revoke dra.net",
    ] {
        assert!(decision.text.contains(part), "{}", decision.text);
    }
    node.pass(60);
    assert_eq!(
        node.container(&pod("u1")).verdict,
        Verdict::Admit,
        "the lease it was unvetted for has ended"
    );
}

#[test]
fn where_refused_sandboxes_leak_they_start_unvetted_and_their_containers_wait() {
    let mut node = Node::new();
    node.lease("dra.net");
    node.may_refuse_sandbox = false;
    let decision = node.sandbox(&pod("u1"));
    assert_eq!(decision.verdict, Verdict::Unvetted);
    assert_eq!(decision.missing.len(), 1);
    let (plugin, reason) = &decision.missing[0];
    assert_eq!(plugin.as_str(), "dra.net");
    assert_eq!(
        reason,
        "when it started, the plugin is not connected to the runtime (holder pid 4711 has no \
         connection to it)"
    );
    assert_eq!(node.container(&pod("u1")).verdict, Verdict::Reject);
    node.pause();
    assert_eq!(node.sandbox(&pod("u1")).verdict, Verdict::Unvetted);
    assert_eq!(node.container(&pod("u1")).verdict, Verdict::WouldReject);
}

#[test]
fn a_sandbox_whose_plugin_is_in_doubt_starts_unvetted_unless_something_else_is_sure() {
    let mut node = Node::new();
    node.lease("dra.net");
    node.told.missing = Some(Missing::InDoubt { pid: 4711 });
    assert_eq!(node.sandbox(&pod("u1")).verdict, Verdict::Unvetted);
    node.hold_until = Some(node.now.boottime.plus(Duration::from_secs(30)));
    assert_eq!(node.sandbox(&pod("u1")).verdict, Verdict::Reject);
}

#[test]
fn a_lost_store_holds_pods_that_are_not_exempt() {
    let mut node = Node::new();
    node.hold_until = Some(node.now.boottime.plus(Duration::from_secs(30)));
    let (verdict, text) = node.both(&pod("u1"));
    assert_eq!(verdict, Verdict::Reject);
    assert!(
        text.contains("waits 30s for plugins to register again"),
        "{text}"
    );
    assert_eq!(node.both(&annotated(&[STATIC])).0, Verdict::Exempt);
    // An audited lease does not hide it.
    node.lease_with("dra.net", Scope::all(), LeaseMode::Audit);
    assert_eq!(node.both(&pod("u1")).0, Verdict::Reject);
    node.pass(30);
    assert_eq!(node.both(&pod("u1")).0, Verdict::WouldReject);
}

#[test]
fn an_annotated_plugin_with_a_lease_is_required_by_presence_whatever_the_scope() {
    let mut node = Node::new();
    node.lease_with("dra.net", namespaces("other"), LeaseMode::Enforce);
    let web = annotated(&[(REQUIRED, "[dra.net]")]);
    let (verdict, text) = node.both(&web);
    assert_eq!(verdict, Verdict::Reject);
    assert!(text.contains("required by the pod's annotation"), "{text}");
    // Being in the list is not enough for one that has a lease.
    node.told.list = Some(vec!["dra.net".to_owned()]);
    assert_eq!(node.container(&web).verdict, Verdict::Reject);
    node.told.present.push("dra.net".to_owned());
    assert_eq!(node.both(&web).0, Verdict::Admit);
}

#[test]
fn an_annotated_plugin_without_a_lease_is_required_by_the_list() {
    let mut node = Node::new();
    let web = annotated(&[(REQUIRED, "[dra.net]")]);
    assert_eq!(node.both(&web).0, Verdict::Admit, "no list: nobody to ask");
    node.told.list = Some(vec![]);
    let decision = node.container(&web);
    assert_eq!(decision.verdict, Verdict::Reject);
    assert!(
        decision
            .text
            .ends_with("Override: nri-lease pause --for 10m --reason TEXT"),
        "{}",
        decision.text
    );
    node.told.list = Some(vec!["dra.net".to_owned()]);
    assert_eq!(node.container(&web).verdict, Verdict::Admit);
    node.told.list = Some(vec![]);
    node.config = "[enforcement]\nrequired_plugins_annotation = false\n".to_owned();
    assert_eq!(node.container(&web).verdict, Verdict::Admit);
}

#[test]
fn annotations_of_one_container_do_not_hold_up_the_sandbox() {
    let mut node = Node::new();
    node.lease_with("dra.net", namespaces("other"), LeaseMode::Enforce);
    let web = annotated(&[(&format!("{REQUIRED}/container.app"), "[dra.net]")]);
    assert_eq!(node.sandbox(&web).verdict, Verdict::Admit);
    assert_eq!(node.container(&web).verdict, Verdict::Reject);
    let web = annotated(&[(&format!("{REQUIRED}/container.db"), "[dra.net]")]);
    assert_eq!(node.container(&web).verdict, Verdict::Admit);
}

#[test]
fn a_malformed_annotation_is_refused_and_says_so_unless_something_exempts_the_pod() {
    let mut node = Node::new();
    let mut web = annotated(&[(REQUIRED, "{not: a list}")]);
    let (verdict, text) = node.both(&web);
    assert_eq!(verdict, Verdict::Reject);
    for part in [
        REQUIRED,
        "is not a YAML list",
        "Correct it",
        "nri-lease pause",
    ] {
        assert!(text.contains(part), "{text}");
    }
    node.may_refuse_sandbox = false;
    assert_eq!(node.sandbox(&web).verdict, Verdict::Unvetted);
    node.may_refuse_sandbox = true;
    node.pause();
    let (verdict, text) = node.both(&web);
    assert_eq!(verdict, Verdict::WouldReject);
    assert!(text.starts_with("enforcement is paused"), "{text}");
    node.done(Command::Resume);
    // A lease in audit mode has nothing to do with it.
    node.lease_with("dra.net", Scope::all(), LeaseMode::Audit);
    assert_eq!(node.both(&web).0, Verdict::Reject);
    web.annotations
        .insert(STATIC.0.to_owned(), STATIC.1.to_owned());
    let (verdict, text) = node.both(&web);
    assert_eq!(verdict, Verdict::Exempt);
    assert!(text.starts_with("static pod"), "{text}");
}

#[test]
fn several_missing_plugins_are_all_named() {
    let mut node = Node::new();
    node.lease("a").lease("b").lease("c").lease("d");
    node.told.present.push("c".to_owned());
    let decision = node.sandbox(&pod("u1"));
    assert_eq!(decision.plugin, Some(name("a")));
    assert!(
        decision.text.contains("also missing: b, d"),
        "{}",
        decision.text
    );
    let missing: Vec<_> = decision.missing.iter().map(|(p, _)| p.as_str()).collect();
    assert_eq!(missing, ["a", "b", "d"]);
}

#[test]
fn what_a_sandbox_requires_does_not_depend_on_who_is_there() {
    let mut node = Node::new();
    node.lease("scoped")
        .lease_with("annotated", namespaces("other"), LeaseMode::Enforce)
        .pin("pinned", "u1");
    let web = annotated(&[(REQUIRED, "[annotated, unknown]")]);
    let required = required_for_sandbox(&node.snapshot(), pod_view(&web), &node.now);
    let names: Vec<_> = required.iter().map(PluginName::as_str).collect();
    assert_eq!(names, ["pinned", "scoped", "annotated"]);
}

/// Every reason with everything as long as it may be: at most 512 bytes, and still the plugin, the
/// reason's beginning, and a command.
#[test]
fn refusals_of_any_length_fit_and_keep_what_helps() {
    let long = "n".repeat(128);
    let mut random = fastrand::Rng::with_seed(4);
    let reasons = [
        Missing::NoHolder,
        Missing::NotListed,
        Missing::NoLease,
        Missing::OtherIndex {
            listed: "10".to_owned(),
            registered: "20".to_owned(),
        },
        Missing::CalledAfterUs {
            index: 99,
            ours: 99,
        },
        Missing::Holder {
            pid: u32::MAX,
            presence: Presence::Unknown {
                reason: "é".repeat(400),
            },
            lost: None,
        },
        Missing::Holder {
            pid: u32::MAX,
            presence: Presence::Broken,
            lost: Some(LostWhen::Recently {
                at_most: Duration::from_secs(3),
            }),
        },
        Missing::InDoubt { pid: u32::MAX },
        Missing::Holder {
            pid: u32::MAX,
            presence: Presence::NotSynchronised,
            lost: None,
        },
    ];
    for round in 0..500 {
        let mut node = Node::configured("[enforcement]\nunvetted_sandboxes = 'reject'\n");
        let plugin = &long[..random.usize(1..=128)];
        node.lease(plugin);
        for other in 0..random.usize(0..40) {
            node.lease(&format!("other-{other}"));
        }
        let pod_uid = &long[..random.usize(1..=128)];
        if random.bool() {
            node.pin(plugin, pod_uid);
        }
        let mut web = pod(pod_uid);
        web.name = "p".repeat(random.usize(1..=253));
        if random.u8(..8) == 0 {
            web.annotations = map(&[(REQUIRED, &"é\u{7}{".repeat(random.usize(1..600)))]);
        }
        node.told.missing = Some(reasons[round % reasons.len()].clone());
        if random.u8(..4) == 0 {
            node.told.present = node
                .state
                .leases()
                .keys()
                .map(ToString::to_string)
                .collect();
        }
        node.unvetted = vec![(name(plugin), "é".repeat(random.usize(0..400)))];
        for decision in [node.sandbox(&web), node.container(&web)] {
            if decision.verdict != Verdict::Reject {
                continue;
            }
            let text = &decision.text;
            assert!(
                text.len() <= text::MAX_BYTES,
                "{} bytes: {text}",
                text.len()
            );
            assert!(text.contains("Override: nri-lease "), "{text}");
            match &decision.plugin {
                Some(plugin) => assert!(
                    text.starts_with(&format!("required NRI plugin \"{plugin}\" ")),
                    "{text}"
                ),
                None => assert!(text.contains("annotation required-plugins"), "{text}"),
            }
            if text.contains("The pod is retried") && decision.plugin.is_some() {
                assert!(text.contains(" (lease expires"), "{text}");
            }
        }
    }
}

#[test]
fn an_index_that_is_called_after_us_names_both_indexes_and_what_to_do() {
    let mut node = Node::new();
    node.lease("late");
    node.told.missing = Some(Missing::CalledAfterUs {
        index: 99,
        ours: 99,
    });
    let text = node.sandbox(&pod("u1")).text;
    for part in [
        "cannot be checked for this sandbox",
        "index 99",
        "give the plugin a lower index",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// The budget of these sessions is used up before they begin.
#[test]
fn an_overloaded_daemon_refuses_only_what_it_has_to_vouch_for() {
    let ask = |node: &Node, pod: &PodSandbox| {
        let clock = SystemClock::new().expect("a boot id");
        // The hook reads the real clock; what a test has set up counts from there.
        let snapshot = Snapshot {
            hold_until: None,
            ..node.snapshot()
        };
        let (traces, mut told) = tokio::sync::mpsc::channel(16);
        let hooks = Arc::new(Hooks {
            published: Arc::new(ArcSwap::from_pointee(snapshot)),
            view: Arc::default(),
            clock,
            totals: Arc::default(),
            traces,
            listings: Arc::default(),
        });
        let status = Arc::new(RuntimeStatus::new(RuntimeId(0), Path::new("nri.sock")));
        let session = hooks.session(status);
        let identity = RuntimeIdentity {
            name: "containerd".to_owned(),
            version: "v2.3.4".to_owned(),
            nri_version: String::new(),
        };
        let (instant, none) = (Duration::from_nanos(1), Duration::ZERO);
        session.configured(&identity, Generation::WithValidation, instant, none);
        let outcome = session.run_pod_sandbox(pod);
        while told.try_recv().is_ok() {}
        outcome
    };
    let mut node = Node::new();
    node.now = SystemClock::new().expect("a boot id").now();
    ask(&node, &pod("u1")).expect("nothing covers it");
    node.lease("dra.net");
    let refusal = ask(&node, &pod("u1")).expect_err("it is missing");
    assert!(refusal.text.contains("dra.net"), "{}", refusal.text);
    node.done(Command::Revoke {
        plugin: name("dra.net"),
        ban: None,
        reason: String::new(),
        by_uid: 0,
    });
    // Required, and listed as far as can be said: nothing is missing, but it took too long.
    node.lease_with("dra.net", namespaces("other"), LeaseMode::Enforce);
    ask(&node, &pod("u1")).expect("out of its scope");
    node.lease("dra.net");
    ask(&node, &annotated(&[STATIC])).expect("a static pod starts on any node");
    node.pause();
    ask(&node, &pod("u1")).expect("a pause lets everything pass");
}
