//! What a plugin, an admin and a node see of the rules. The model test covers how they meet.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::exempt::{ExemptConfig, Exemption, Exemptions, provider_pod};
use crate::record::{Grace, Tree};
use crate::scope::{PodView, ScopeRule};
use crate::time::{BootId, Boottime, WallTime};

const SECOND: u64 = 1_000_000_000;

struct Node {
    now: Now,
    state: State,
    limits: Limits,
}

impl Node {
    fn new() -> Self {
        Self {
            now: Now {
                boottime: Boottime(1000 * SECOND),
                wall: WallTime(1_800_000_000 * SECOND as i64),
                boot_id: BootId::from("one"),
            },
            state: State::new(),
            limits: Limits::default(),
        }
    }

    fn apply(&mut self, command: Command) -> Result<Applied, Refusal> {
        self.state.apply(command, &self.now, &self.limits)
    }

    fn done(&mut self, command: Command) -> Applied {
        self.apply(command).unwrap()
    }

    /// The kind of refusal and its text.
    fn refused(&mut self, command: Command) -> (RefusalKind, String) {
        let before = self.state.records();
        let refusal = self.apply(command).unwrap_err();
        assert_eq!(self.state.records(), before);
        (refusal.kind(), refusal.to_string())
    }

    fn pass(&mut self, seconds: u64) {
        self.now.boottime = Boottime(self.now.boottime.0 + seconds * SECOND);
        self.now.wall = WallTime(self.now.wall.0 + (seconds * SECOND) as i64);
    }

    fn restart(&mut self, recovery: Recovery) -> Loaded {
        let records = self.state.records();
        let stored = records.iter().map(|r| (r.key(), r.encode()));
        let loaded = State::load(
            stored.collect::<Vec<_>>(),
            recovery,
            &self.now,
            &self.limits,
        );
        self.state = loaded.state.clone();
        loaded
    }

    fn reboot(&mut self, down: u64) {
        self.pass(down);
        self.now.boot_id = BootId::from(format!("{}'", self.now.boot_id));
        self.now.boottime = Boottime(10 * SECOND);
        self.restart(Recovery::Database);
    }

    fn lives(&self, plugin: &str) -> bool {
        let lease = self.state.lease(plugin);
        lease.is_some_and(|lease| lease.counts_at(self.now.boottime))
    }

    fn left(&self, plugin: &str) -> u64 {
        self.state.lease(plugin).unwrap().left(&self.now).as_secs()
    }
}

fn name(text: &str) -> PluginName {
    PluginName::try_from(text).unwrap()
}

fn process(pid: u32, start_time: u64) -> ProcessKey {
    ProcessKey { pid, start_time }
}

fn facts(pid: u32, start_time: u64) -> HolderFacts {
    HolderFacts {
        process: process(pid, start_time),
        uid: 0,
        cgroup: String::new(),
        pod: None,
        connection_inode: None,
        registered_by: None,
        subject: None,
    }
}

fn pod(uid: &str, namespace: Option<&str>, name: Option<&str>) -> PodIdentity {
    PodIdentity {
        uid: PodUid::try_from(uid).unwrap(),
        namespace: namespace.map(str::to_owned),
        name: name.map(str::to_owned),
        labels: BTreeMap::new(),
    }
}

fn register_as(plugin: &str, ttl_seconds: u64, holder: HolderFacts) -> Command {
    Command::Register {
        plugin: name(plugin),
        ttl: Some(Ttl::new(Duration::from_secs(ttl_seconds)).unwrap()),
        scope: Scope::all(),
        mode: Mode::Enforce,
        index: None,
        events: None,
        holder,
    }
}

fn register(plugin: &str, ttl_seconds: u64) -> Command {
    register_as(plugin, ttl_seconds, facts(100, 1))
}

fn renew(plugin: &str) -> Command {
    Command::Renew {
        plugin: name(plugin),
        holders: vec![process(100, 1)],
    }
}

fn kinds(applied: &Applied) -> Vec<EventKind> {
    applied.events.iter().map(|event| event.kind).collect()
}

#[test]
fn a_lease_outlives_its_crashed_holder_until_its_deadline() {
    let mut node = Node::new();
    node.done(register("a", 10));
    let lost = node.done(Command::HolderLost {
        process: process(100, 1),
    });
    assert_eq!(kinds(&lost), [EventKind::HolderLost]);
    node.pass(9);
    assert!(node.lives("a"));
    assert_eq!(
        node.state
            .lease("a")
            .unwrap()
            .last_holder
            .as_ref()
            .unwrap()
            .pid,
        100
    );
    node.pass(1);
    assert!(!node.lives("a"));
    assert_eq!(node.state.next_deadline(), Some(node.now.boottime));
    let tick = node.done(Command::Tick);
    assert_eq!(kinds(&tick), [EventKind::Expired]);
    assert_eq!(tick.durability, Durability::Barrier);
    assert!(node.state.lease("a").is_none());
}

#[test]
fn a_lease_without_a_holder_cannot_be_renewed() {
    let mut node = Node::new();
    let (kind, text) = node.refused(renew("a"));
    assert_eq!(kind, RefusalKind::NotFound);
    assert!(text.contains("register again"), "{text}");
    node.done(register("a", 10));
    node.done(Command::HolderLost {
        process: process(100, 1),
    });
    let (kind, text) = node.refused(renew("a"));
    assert_eq!(kind, RefusalKind::FailedPrecondition);
    assert!(text.contains("ends in 10s: register again"), "{text}");
}

#[test]
fn registering_waits_for_the_disk_and_renewing_does_not() {
    let mut node = Node::new();
    assert_eq!(node.done(register("a", 10)).durability, Durability::Barrier);
    assert_eq!(node.done(register("a", 10)).durability, Durability::Barrier);
    node.pass(1);
    assert_eq!(node.done(renew("a")).durability, Durability::Soon);
    assert_eq!(node.left("a"), 10);
    assert_eq!(node.state.lease("a").unwrap().generation, 1);
}

#[test]
fn a_renewal_keeps_the_compiled_scope() {
    let mut node = Node::new();
    node.done(register("a", 10));
    let before = node.state.lease("a").unwrap().scope.clone();
    node.done(renew("a"));
    assert!(Arc::ptr_eq(&before, &node.state.lease("a").unwrap().scope));
}

#[test]
fn a_ttl_out_of_bounds_names_the_bounds() {
    let mut node = Node::new();
    for ttl in [4, 24 * 3600 + 1] {
        let (kind, text) = node.refused(register("a", ttl));
        assert_eq!(kind, RefusalKind::InvalidArgument);
        assert!(text.starts_with("ttl of "), "{text}");
        assert!(text.contains("5s to 86400s"), "{text}");
    }
}

#[test]
fn the_257th_lease_and_the_17th_holder_are_refused_with_the_limit() {
    let mut node = Node::new();
    for n in 0..256 {
        node.done(register(&format!("p{n}"), 60));
    }
    let (kind, text) = node.refused(register("more", 60));
    assert_eq!(kind, RefusalKind::ResourceExhausted);
    assert!(text.contains("256"), "{text}");
    for n in 1..16 {
        node.done(register_as("p0", 60, facts(100 + n, 1)));
    }
    let (kind, text) = node.refused(register_as("p0", 60, facts(200, 1)));
    assert_eq!(kind, RefusalKind::ResourceExhausted);
    assert!(text.contains("16"), "{text}");
    node.pass(60);
    node.done(register("more", 60)); // Ended leases take no place.
}

#[test]
fn a_plugin_that_hears_of_no_start_cannot_be_required() {
    let mut node = Node::new();
    let with = |mask| {
        let mut command = register("a", 10);
        if let Command::Register { events, .. } = &mut command {
            *events = Some(mask);
        }
        command
    };
    // StopPodSandbox (event 2) and RemovePodSandbox (event 3).
    let (kind, text) = node.refused(with(0b110));
    assert_eq!(kind, RefusalKind::FailedPrecondition);
    assert!(text.contains("RunPodSandbox"), "{text}");
    for good in [0, 1, 1 << 3] {
        node.done(with(good));
    }
}

#[test]
fn a_malformed_scope_is_refused_with_rule_and_field() {
    let mut node = Node::new();
    let mut command = register("a", 10);
    if let Command::Register { scope, .. } = &mut command {
        scope.rules.push(ScopeRule {
            containers: vec!["[".to_owned()],
            ..ScopeRule::default()
        });
    }
    let (kind, text) = node.refused(command);
    assert_eq!(kind, RefusalKind::InvalidArgument);
    assert!(text.starts_with("scope.rules[1].containers: "), "{text}");
}

#[test]
fn the_process_that_started_last_decides() {
    let mut node = Node::new();
    node.done(register_as("a", 10, facts(100, 1)));
    node.done(register_as("a", 20, facts(101, 2)));
    assert_eq!(node.left("a"), 20);
    // The old one registers again after a runtime restart.
    node.done(register_as("a", 10, facts(100, 1)));
    assert_eq!(node.left("a"), 20);
    let lease = node.state.lease("a").unwrap();
    assert_eq!((lease.generation, lease.holders.len()), (2, 2));
    // The new one is gone for good.
    let release = node.done(Command::Release {
        plugin: name("a"),
        processes: vec![process(101, 2)],
    });
    assert!(matches!(
        release.reply,
        Reply::Released {
            ended: false,
            holders_left: 1
        }
    ));
    assert_eq!(
        node.state.lease("a").unwrap().settings.ttl.get().as_secs(),
        10
    );
    let release = node.done(Command::Release {
        plugin: name("a"),
        processes: vec![process(100, 1)],
    });
    assert!(matches!(release.reply, Reply::Released { ended: true, .. }));
    assert!(!node.lives("a"));
}

#[test]
fn a_second_holder_needs_the_same_uid_and_namespace() {
    let in_pod = |pid, uid, namespace| {
        let mut facts = facts(pid, 1);
        facts.pod = Some(pod(uid, namespace, Some("name")));
        facts
    };
    let mut node = Node::new();
    node.done(register_as("a", 10, in_pod(1, "u1", Some("kube-system"))));
    node.done(register_as("a", 10, in_pod(2, "u2", Some("kube-system"))));
    node.done(register_as("a", 10, in_pod(3, "u1", None))); // A sidecar of the first.
    let mut other_uid = in_pod(4, "u4", Some("kube-system"));
    other_uid.uid = 1000;
    for stranger in [
        in_pod(5, "u5", Some("default")),
        in_pod(6, "u6", None),
        facts(7, 1),
        other_uid,
    ] {
        let (kind, text) = node.refused(register_as("a", 10, stranger));
        assert_eq!(kind, RefusalKind::FailedPrecondition);
        assert!(text.contains("nri-lease revoke a"), "{text}");
    }
    for pid in 1..=3 {
        node.done(Command::HolderLost {
            process: process(pid, 1),
        });
    }
    node.done(register_as("a", 10, facts(7, 1))); // Nobody is there to object.
}

#[test]
fn the_descendant_that_owns_the_connection_takes_its_wrappers_place() {
    let mut node = Node::new();
    let wrapper = HolderFacts {
        subject: Some(process(100, 1)),
        registered_by: Some(process(90, 1)),
        ..facts(100, 1)
    };
    let child = HolderFacts {
        process: process(101, 2),
        pod: Some(pod("u1", Some("kube-system"), Some("dranet-x7k2p"))),
        ..wrapper.clone()
    };
    node.done(register_as("a", 60, wrapper.clone()));
    let moved = Command::HolderMoved {
        plugin: name("a"),
        from: process(100, 1),
        to: child.clone(),
    };
    let applied = node.done(moved.clone());
    assert_eq!(applied.durability, Durability::Soon);
    let lease = node.state.lease("a").unwrap().clone();
    assert_eq!(lease.holders.len(), 1);
    assert_eq!(lease.holders[0].facts, child);
    assert_eq!(lease.generation, 2);
    assert_eq!(
        lease.providers.len(),
        1,
        "its pod is a provider from now on"
    );
    assert!(node.done(moved).changes.is_empty(), "once is enough");

    // Registering the same subject again finds the child at once, and no wrapper beside it.
    node.done(register_as("b", 60, wrapper));
    node.done(register_as("b", 60, child.clone()));
    let lease = node.state.lease("b").unwrap();
    assert_eq!(lease.holders.len(), 1);
    assert_eq!(lease.holders[0].facts.process, process(101, 2));
}

#[test]
fn a_descendant_that_may_not_join_the_other_holders_does_not_take_the_place() {
    let mut node = Node::new();
    node.done(register_as("a", 60, facts(50, 1)));
    node.done(register("a", 60));
    let (kind, text) = node.refused(Command::HolderMoved {
        plugin: name("a"),
        from: process(100, 1),
        to: HolderFacts {
            uid: 1000,
            ..facts(101, 2)
        },
    });
    assert_eq!(kind, RefusalKind::FailedPrecondition);
    assert!(text.contains("uid 1000"), "{text}");
    assert_eq!(node.state.lease("a").unwrap().holders.len(), 2);
}

#[test]
fn only_who_holds_a_lease_renews_or_releases_it() {
    let mut node = Node::new();
    node.done(register("a", 10));
    let stranger = vec![process(100, 2)];
    for command in [
        Command::Renew {
            plugin: name("a"),
            holders: stranger.clone(),
        },
        Command::Release {
            plugin: name("a"),
            processes: stranger,
        },
    ] {
        let (kind, text) = node.refused(command);
        assert_eq!(kind, RefusalKind::PermissionDenied);
        assert!(text.contains("100"), "{text}");
    }
}

#[test]
fn revoking_with_a_ban_keeps_the_plugin_out_until_the_ban_ends() {
    let mut node = Node::new();
    node.done(register("a", 10));
    node.done(Command::Revoke {
        plugin: name("a"),
        ban: Some(Duration::from_secs(60)),
        reason: "broken build".to_owned(),
        by_uid: 7,
    });
    assert!(!node.lives("a"));
    let (kind, text) = node.refused(register("a", 10));
    assert_eq!(kind, RefusalKind::FailedPrecondition);
    assert!(text.contains("another 60s (broken build)"), "{text}");
    node.restart(Recovery::Database);
    node.refused(register("a", 10));
    node.pass(60);
    node.done(register("a", 10));
}

#[test]
fn a_pause_has_a_reason_and_an_end_and_survives_a_restart() {
    let mut node = Node::new();
    let pause = |seconds, reason: &str| Command::Pause {
        duration: Duration::from_secs(seconds),
        reason: reason.to_owned(),
        by_uid: 0,
    };
    assert_eq!(node.refused(pause(60, " ")).0, RefusalKind::InvalidArgument);
    assert_eq!(node.refused(pause(0, "x")).0, RefusalKind::InvalidArgument);
    assert_eq!(
        node.refused(pause(86_401, "x")).0,
        RefusalKind::InvalidArgument
    );
    assert_eq!(
        node.refused(pause(60, &"x".repeat(257))).0,
        RefusalKind::InvalidArgument
    );
    node.done(pause(2, "night"));
    node.restart(Recovery::Database);
    assert!(node.state.pause().unwrap().counts_at(node.now.boottime));
    node.pass(2);
    assert!(!node.state.pause().unwrap().counts_at(node.now.boottime));
    assert_eq!(kinds(&node.done(Command::Tick)), [EventKind::Resumed]);
}

#[test]
fn a_wall_clock_that_jumps_ends_no_lease_early_or_late() {
    for jump in [-86_400_i64, 86_400] {
        let mut node = Node::new();
        node.done(register("a", 10));
        node.now.wall = WallTime(node.now.wall.0 + jump * SECOND as i64);
        node.restart(Recovery::Database);
        node.pass(9);
        assert!(node.lives("a"));
        node.pass(1);
        assert!(!node.lives("a"));
    }
}

#[test]
fn a_dead_plugins_lease_ends_in_time_however_often_the_daemon_restarts() {
    let mut node = Node::new();
    node.done(register("a", 10));
    for _ in 0..9 {
        node.pass(1);
        node.restart(Recovery::Database);
        node.done(Command::RuntimeSynchronized);
        assert!(node.lives("a"));
    }
    node.pass(1);
    node.restart(Recovery::Database);
    node.done(Command::RuntimeSynchronized);
    assert!(!node.lives("a"));
}

#[test]
fn a_reboot_gives_one_grace_from_the_first_synchronize() {
    let mut node = Node::new();
    node.done(register("a", 60));
    node.reboot(3600);
    assert!(node.state.lease("a").unwrap().holders.is_empty());
    node.pass(1000); // No runtime yet: nothing can be refused, and nothing ends.
    assert!(node.lives("a"));
    let granted = node.done(Command::RuntimeSynchronized);
    assert_eq!(granted.durability, Durability::Barrier);
    node.pass(100);
    node.done(Command::RuntimeSynchronized); // The runtime restarts: no second grace.
    assert_eq!(node.left("a"), 200);
    node.pass(200);
    assert!(!node.lives("a"));
}

#[test]
fn a_node_that_boots_again_and_again_keeps_a_dead_plugins_lease_for_one_grace() {
    let mut node = Node::new();
    node.done(register("a", 60));
    let mut lived = 0;
    for _ in 0..20 {
        node.reboot(0);
        node.done(Command::RuntimeSynchronized);
        if !node.lives("a") {
            break;
        }
        node.pass(30);
        lived += 30;
    }
    assert!(!node.lives("a"));
    assert!(lived <= 60 + 300, "{lived} s");
}

#[test]
fn a_renewal_makes_the_next_reboot_grant_its_grace_again() {
    let mut node = Node::new();
    node.done(register("a", 60));
    node.reboot(3600);
    node.done(Command::RuntimeSynchronized);
    node.done(register("a", 60));
    assert_eq!(node.left("a"), 60);
    node.reboot(3600);
    node.done(Command::RuntimeSynchronized);
    assert_eq!(node.left("a"), 300);
}

#[test]
fn a_reboot_keeps_no_more_than_the_ttl_and_no_less_than_nothing() {
    for (down, left) in [(10_i64, 7190), (-86_400, 7200)] {
        let mut node = Node::new();
        node.done(register("a", 7200));
        node.now.wall = WallTime(node.now.wall.0 + down * SECOND as i64);
        node.reboot(0);
        assert_eq!(node.left("a"), left);
        node.done(Command::RuntimeSynchronized);
        assert_eq!(node.left("a"), left); // The grace is shorter, and not used up.
        assert_eq!(node.state.lease("a").unwrap().grace, Grace::Unused);
    }
}

#[test]
fn a_grace_that_cannot_be_recorded_ends_all_the_same() {
    let mut node = Node::new();
    node.done(register("a", 60));
    node.reboot(3600);
    let granted = node.done(Command::RuntimeSynchronized);
    node.state.undo(&granted.changes);
    assert!(node.lives("a"));
    node.pass(299);
    assert!(node.lives("a"));
    // The store is back: recorded now.
    let tick = node.done(Command::Tick);
    assert_eq!(tick.durability, Durability::Barrier);
    assert_eq!(node.state.lease("a").unwrap().grace, Grace::Used);
    node.state.undo(&tick.changes);
    node.pass(1);
    assert!(!node.lives("a"));
}

#[test]
fn leases_from_the_mirror_get_time_to_renew() {
    let mut node = Node::new();
    node.done(register("short", 60));
    node.done(register("long", 3600));
    node.pass(50_000);
    node.restart(Recovery::Mirror);
    assert_eq!((node.left("short"), node.left("long")), (60, 300));
}

#[test]
fn what_cannot_be_read_is_left_out_and_named() {
    let node = Node::new();
    let key = |tree, key: &str| RecordKey {
        tree,
        key: key.to_owned(),
    };
    let records = vec![
        (key(Tree::Leases, "a"), b"{".to_vec()),
        (key(Tree::Bans, "b"), br#"{"version":"2.0"}"#.to_vec()),
    ];
    let loaded = State::load(records, Recovery::Database, &node.now, &node.limits);
    let problems: Vec<_> = loaded
        .issues
        .iter()
        .map(|i| i.problem.to_string())
        .collect();
    assert_eq!(problems.len(), 2);
    assert!(problems[1].contains("newer release"), "{}", problems[1]);
    assert!(loaded.state.records().is_empty());
}

#[test]
fn a_stored_scope_that_does_not_compile_covers_everything_until_the_next_registration() {
    let mut node = Node::new();
    node.done(register("a", 60));
    let Some(Record::Lease(lease)) = node.state.records().pop() else {
        panic!("there is a lease");
    };
    let mut lease = Arc::unwrap_or_clone(lease);
    let bad = Scope {
        rules: vec![ScopeRule::default()],
    };
    lease.settings.scope = Arc::new(bad.clone());
    let record = Record::Lease(Arc::new(lease));
    let loaded = State::load(
        [(record.key(), record.encode())],
        Recovery::Database,
        &node.now,
        &node.limits,
    );
    assert_eq!(loaded.issues.len(), 1);
    node.state = loaded.state;
    assert!(node.lives("a"));
    assert!(node.state.lease("a").unwrap().scope.is_all());
    let mut again = register("a", 60);
    if let Command::Register { scope, .. } = &mut again {
        *scope = bad;
    }
    assert_eq!(node.refused(again).0, RefusalKind::InvalidArgument);
    node.done(register("a", 60));
}

#[test]
fn a_failed_registration_takes_no_renewal_back() {
    let mut node = Node::new();
    node.done(register("a", 10));
    node.pass(5);
    let failing = node.done(register_as("a", 10, facts(101, 2)));
    node.pass(1);
    node.done(renew("a"));
    node.done(Command::HolderLost {
        process: process(100, 1),
    });
    node.state.undo(&failing.changes);
    let lease = node.state.lease("a").unwrap();
    assert_eq!(node.left("a"), 10);
    assert!(lease.holders.is_empty()); // One never came, the other is gone.
    assert!(lease.generation > 3);
}

#[test]
fn a_pin_waits_for_its_pod_and_goes_with_it() {
    let mut node = Node::new();
    let uid = |text: &str| PodUid::try_from(text).unwrap();
    let seen = |pods: &[&str]| Command::PodsSeen {
        runtime: "/run/nri.sock".to_owned(),
        present: pods.iter().map(|pod| uid(pod)).collect(),
    };
    node.done(Command::Pin {
        plugin: name("a"),
        pod_uid: uid("u1"),
        ttl: None,
    });
    node.done(seen(&[])); // Made before the pod exists.
    assert_eq!(node.state.pin_count(), 1);
    node.done(seen(&["u1"]));
    node.restart(Recovery::Database);
    assert_eq!(node.state.pin_count(), 1);
    let gone = node.done(seen(&[]));
    assert_eq!(kinds(&gone), [EventKind::Unpinned]);
    assert_eq!(node.state.pin_count(), 0);
}

#[test]
fn a_pods_second_sandbox_keeps_its_pin() {
    let mut node = Node::new();
    let uid = PodUid::try_from("u1").unwrap();
    node.done(Command::Pin {
        plugin: name("a"),
        pod_uid: uid.clone(),
        ttl: None,
    });
    for id in ["s1", "s2"] {
        node.done(Command::SandboxAppeared {
            sandbox: SandboxPod {
                sandbox_id: id.to_owned(),
                runtime: "r".to_owned(),
                pod_namespace: "default".to_owned(),
                pod_name: "web".to_owned(),
                pod_uid: Some(uid.clone()),
            },
            unvetted: vec![],
        });
    }
    let gone = |id: &str| Command::SandboxGone {
        sandbox_id: id.to_owned(),
    };
    node.done(gone("s1"));
    assert_eq!(node.state.pin_count(), 1);
    node.done(gone("s2"));
    assert_eq!(node.state.pin_count(), 0);
}

#[test]
fn what_starts_while_nobody_looks_is_unvetted_except_at_first_contact() {
    let mut node = Node::new();
    let sync = |ids: &[&str]| {
        let present = ids.iter().map(|id| PresentSandbox {
            sandbox: SandboxPod {
                sandbox_id: (*id).to_owned(),
                runtime: "r".to_owned(),
                pod_namespace: "default".to_owned(),
                pod_name: "web".to_owned(),
                pod_uid: None,
            },
            covered_by: vec![name("a")],
        });
        Command::SandboxesSynchronized {
            runtime: "r".to_owned(),
            present: present.collect(),
        }
    };
    node.done(sync(&["old"]));
    node.restart(Recovery::Database);
    node.done(sync(&["old", "new"]));
    let sandboxes = node.state.sandboxes();
    assert!(sandboxes["old"].unvetted.is_empty());
    assert!(sandboxes["new"].unvetted.contains_key("a"));
    node.done(sync(&["new"]));
    assert!(!node.state.sandboxes().contains_key("old"));
}

#[test]
fn two_plugins_in_pods_start_again_after_a_reboot() {
    let mut node = Node::new();
    for (plugin, pid, uid, pod_name) in
        [("net", 1, "u1", "net-x7k2p"), ("cpu", 2, "u2", "cpu-b9wzq")]
    {
        let mut facts = facts(pid, 1);
        facts.pod = Some(pod(uid, None, None));
        node.done(register_as(plugin, 60, facts));
        node.done(Command::LearnPods {
            pods: vec![pod(uid, Some("kube-system"), Some(pod_name))],
        });
    }
    node.reboot(600);
    node.done(Command::RuntimeSynchronized);
    let nothing = HashMap::new();
    let view = |name: &'static str, uid: &'static str| PodView {
        namespace: "kube-system",
        name,
        uid,
        labels: &nothing,
        annotations: &nothing,
        runtime_handler: "",
    };
    let exempt = |node: &Node, pod: &PodView<'_>| {
        let leases = node.state.leases().clone();
        provider_pod(pod, leases.values(), node.state.pins(), node.now.boottime)
    };
    let plugin = |text| Some(Exemption::ProviderPod { plugin: name(text) });
    assert_eq!(exempt(&node, &view("net-zzzzz", "n1")), plugin("net"));
    assert_eq!(exempt(&node, &view("cpu-zzzzz", "n2")), plugin("cpu"));
    assert_eq!(exempt(&node, &view("web", "n3")), None);
    node.done(Command::Pin {
        plugin: name("cpu"),
        pod_uid: PodUid::try_from("n1").unwrap(),
        ttl: None,
    });
    assert_eq!(exempt(&node, &view("net-zzzzz", "n1")), None);
    node.pass(300);
    assert_eq!(exempt(&node, &view("cpu-zzzzz", "n2")), None); // No live lease, no provider.
}

#[test]
fn the_first_exemption_in_order_is_named() {
    let config = ExemptConfig {
        namespaces: vec!["kube-*".to_owned()],
        pod_labels: "tier=infra".to_owned(),
        runtime_handlers: vec!["kata*".to_owned()],
        toleration_namespaces: vec!["ops".to_owned()],
        ..ExemptConfig::default()
    };
    let exemptions = Exemptions::compile(&config).unwrap();
    let map = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
        let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(owned).collect()
    };
    let node = Node::new();
    let first = |namespace, handler, labels: &[(&str, &str)], annotations: &[(&str, &str)]| {
        let (labels, annotations) = (map(labels), map(annotations));
        let pod = PodView {
            namespace,
            name: "web",
            uid: "u",
            labels: &labels,
            annotations: &annotations,
            runtime_handler: handler,
        };
        let leases = node.state.leases().clone();
        let pins = node.state.pins();
        exemptions
            .first(&pod, Some("c0"), leases.values(), pins, node.now.boottime)
            .map(|exemption| exemption.name())
    };
    let infra = [("tier", "infra")];
    let from_file = [("kubernetes.io/config.source", "file")];
    let from_api = [("kubernetes.io/config.source", "api")];
    let tolerates = [("tolerate-missing-plugins.noderesource.dev/pod", "true")];
    let refuses = [
        ("tolerate-missing-plugins.noderesource.dev", "true"),
        (
            "tolerate-missing-plugins.noderesource.dev/container.c0",
            "false",
        ),
    ];
    assert_eq!(
        first("kube-system", "", &infra, &from_file),
        Some("static_pod")
    );
    assert_eq!(
        first("kube-system", "", &infra, &from_api),
        Some("namespace")
    );
    assert_eq!(
        first("ops", "kata-qemu", &infra, &tolerates),
        Some("pod_labels")
    );
    assert_eq!(
        first("ops", "kata-qemu", &[], &tolerates),
        Some("runtime_handler")
    );
    assert_eq!(first("ops", "", &[], &tolerates), Some("toleration"));
    assert_eq!(first("ops", "", &[], &refuses), None);
    assert_eq!(first("default", "", &[], &tolerates), None);
}

#[test]
fn records_survive_storing_and_newer_minor_versions() {
    let mut node = Node::new();
    let mut facts = facts(1, 1);
    facts.pod = Some(pod("u1", Some("ns"), Some("pod")));
    node.done(register_as("a", 60, facts));
    node.done(Command::Pin {
        plugin: name("a"),
        pod_uid: PodUid::try_from("u1").unwrap(),
        ttl: None,
    });
    for record in node.state.records() {
        let text = String::from_utf8(record.encode()).unwrap();
        assert_eq!(
            Record::decode(&record.key(), text.as_bytes()).unwrap(),
            record
        );
        let newer = text.replacen("\"1.0\"", "\"1.9\",\"invented\":[1]", 1);
        assert_eq!(
            Record::decode(&record.key(), newer.as_bytes()).unwrap(),
            record
        );
        let other = RecordKey {
            tree: record.key().tree,
            key: "other".to_owned(),
        };
        assert!(Record::decode(&other, text.as_bytes()).is_err());
    }
}
