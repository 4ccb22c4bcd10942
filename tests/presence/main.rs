//! Presence against the real kernel: processes, sockets and namespaces as they are, and only the
//! runtime's accept loop played by the test. Needs root, for the namespaces.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod plugin;
mod runtime;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nri_lease::presence::{
    ConnectionState, Event, HolderSpec, OwnSocket, Presence, ProcessKey, RuntimeId, Settled,
    Tracker,
};
use plugin::{Place, Plugin};
use runtime::Runtime;
use tempfile::TempDir;
use tokio::sync::broadcast;

const R: RuntimeId = RuntimeId(0);
/// Ample, for a busy machine; nothing waits for it to pass.
const LONG: Duration = Duration::from_secs(20);
/// For what must not happen: as long as many scans and looks at a fence.
const SHORT: Duration = Duration::from_millis(100);

/// Waits for a condition, with a deadline.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Node {
    directory: TempDir,
    runtime: Runtime,
    tracker: Tracker,
}

impl Node {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let runtime = Runtime::start(&directory.path().join("nri.sock"));
        let tracker = Tracker::start().unwrap();
        tracker.kernel_evidence().unwrap();
        tracker.runtime_added(R, runtime.path.clone());
        Self {
            directory,
            runtime,
            tracker,
        }
    }

    fn path(&self) -> PathBuf {
        self.runtime.path.clone()
    }

    fn hold(&self, plugins: &[&Plugin]) {
        let spec = |p: &&Plugin| HolderSpec {
            process: p.key(),
            connection_inode: None,
        };
        self.tracker.set_holders(plugins.iter().map(spec).collect());
    }

    fn check(&self, key: ProcessKey) -> Presence {
        self.tracker.view().check(&key, R, None)
    }

    /// A plugin with one bound connection.
    async fn bound(&self, place: Place) -> (Plugin, u64) {
        let mut plugin = Plugin::start_in(place);
        let inode = plugin.connect(&self.path());
        self.hold(&[&plugin]);
        let settled = self.tracker.settle(plugin.key(), LONG).await;
        assert_eq!(settled, Settled::Bound);
        assert_eq!(self.check(plugin.key()), Presence::Bound);
        (plugin, inode)
    }
}

async fn next(events: &mut broadcast::Receiver<Event>) -> Event {
    let event = tokio::time::timeout(LONG, events.recv()).await;
    event.expect("an event in time").unwrap()
}

#[tokio::test]
async fn a_plugin_is_present_only_once_the_runtime_accepts_the_next_connection() {
    let node = Node::start();
    node.runtime.allow(0);
    let mut plugin = Plugin::start();
    let key = plugin.key();
    let nothing = node.tracker.settle(key, SHORT).await;
    assert_eq!(nothing, Settled::NothingToBind);
    assert_eq!(node.check(key), Presence::NeverConnected);

    plugin.connect(&node.path());
    assert_eq!(node.tracker.settle(key, SHORT).await, Settled::Deadline);
    assert_eq!(node.check(key), Presence::Pending);

    // Accepted, and being synchronised.
    node.runtime.allow(1);
    eventually("the accept", || {
        node.runtime.connections_of(plugin.pid) == 1
    });
    assert_eq!(node.tracker.settle(key, SHORT).await, Settled::Deadline);
    assert_eq!(node.check(key), Presence::NotSynchronised);

    // Synchronised: the loop goes on, and takes the fence that waits.
    node.runtime.allow_all();
    assert_eq!(node.tracker.settle(key, LONG).await, Settled::Bound);
    assert_eq!(node.check(key), Presence::Bound);
    assert_eq!(node.tracker.fences_opened(), 1);
    let connections = node.tracker.view().connections(&key);
    assert_eq!(connections.len(), 1);
    assert_eq!(connections[0].state, ConnectionState::Bound);
    assert_eq!(connections[0].runtime, Some(R));
}

#[tokio::test]
async fn a_connection_the_runtime_closes_is_broken_at_once() {
    let node = Node::start();
    let mut events = node.tracker.events();
    let (plugin, inode) = node.bound(Place::Host).await;
    let (process, runtime) = (plugin.key(), R);
    assert_eq!(
        next(&mut events).await,
        Event::Connected { process, runtime }
    );
    node.runtime.close_oldest_of(plugin.pid);
    assert_eq!(node.check(process), Presence::Broken);
    let named = node.tracker.view().check(&process, R, Some(inode));
    assert_eq!(named, Presence::Broken);
    let event = next(&mut events).await;
    assert_eq!(event, Event::Disconnected { process, runtime });
}

#[tokio::test]
async fn a_connection_the_runtime_shuts_down_and_keeps_is_broken() {
    let node = Node::start();
    let (plugin, _) = node.bound(Place::Host).await;
    node.runtime.shut_down_oldest_of(plugin.pid);
    assert_eq!(node.runtime.connections_of(plugin.pid), 1);
    assert_eq!(node.check(plugin.key()), Presence::Broken);
}

#[tokio::test]
async fn a_child_that_the_runtime_is_starting_hides_no_close() {
    let node = Node::start();
    let (plugin, _) = node.bound(Place::Host).await;
    let mut child = node.runtime.close_oldest_of_during_a_fork(plugin.pid);
    let presence = node.check(plugin.key());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(presence, Presence::Broken);
}

#[tokio::test]
async fn a_lost_connection_is_an_event_although_no_hook_asks() {
    let node = Node::start();
    let mut events = node.tracker.events();
    let (plugin, _) = node.bound(Place::Host).await;
    let (process, runtime) = (plugin.key(), R);
    assert_eq!(
        next(&mut events).await,
        Event::Connected { process, runtime }
    );
    node.runtime.close_oldest_of(plugin.pid);
    let event = next(&mut events).await;
    assert_eq!(event, Event::Disconnected { process, runtime });
}

#[tokio::test]
async fn a_reconnected_plugin_is_present_again() {
    let node = Node::start();
    let (mut plugin, _) = node.bound(Place::Host).await;
    node.runtime.close_oldest_of(plugin.pid);
    assert_eq!(node.check(plugin.key()), Presence::Broken);
    plugin.connect(&node.path());
    // Without Register or Renew: by the tracker's own scans.
    eventually("the plugin to be bound", || {
        node.check(plugin.key()) == Presence::Bound
    });
}

#[tokio::test]
async fn a_killed_plugin_is_gone_at_once() {
    let node = Node::start();
    let mut events = node.tracker.events();
    let (mut plugin, _) = node.bound(Place::Host).await;
    let (process, runtime) = (plugin.key(), R);
    plugin.kill();
    let presence = node.check(process);
    assert!(
        matches!(presence, Presence::ProcessGone | Presence::Broken),
        "{presence:?}"
    );
    let expected = [
        Event::Connected { process, runtime },
        Event::Disconnected { process, runtime },
        Event::ProcessGone { process },
    ];
    for event in expected {
        assert_eq!(next(&mut events).await, event);
    }
    assert_eq!(node.check(process), Presence::ProcessGone);
    let settled = node.tracker.settle(process, LONG).await;
    assert_eq!(settled, Settled::ProcessGone);
}

#[tokio::test]
async fn a_child_that_keeps_the_socket_open_is_no_presence() {
    let node = Node::start();
    let (mut plugin, inode) = node.bound(Place::Host).await;
    let process = plugin.key();
    let child = plugin.share_with_child(inode);
    plugin.kill();
    assert!(node.runtime.connections_of(plugin.pid) == 1);
    eventually("the end of the plugin", || {
        node.check(process) == Presence::ProcessGone
    });
    // Nor does it make the child present, should that hold a lease itself.
    let heir = nri_lease::presence::proc::key_of(child.0).unwrap();
    let settled = node.tracker.settle(heir, LONG).await;
    assert_eq!(settled, Settled::NothingToBind);
    let view = node.tracker.view();
    assert_eq!(view.check(&heir, R, None), Presence::NeverConnected);
    let in_hook = view.bind_in_hook(&heir, R, None, Duration::from_millis(10));
    assert_eq!(in_hook, Presence::NeverConnected);
}

#[tokio::test]
async fn a_connection_given_away_is_presence_for_neither() {
    let node = Node::start();
    let (mut plugin, inode) = node.bound(Place::Host).await;
    let child = plugin.share_with_child(inode);
    assert_eq!(node.check(plugin.key()), Presence::Bound);
    plugin.close(inode);
    assert_eq!(node.check(plugin.key()), Presence::Broken);
    let heir = nri_lease::presence::proc::key_of(child.0).unwrap();
    let settled = node.tracker.settle(heir, LONG).await;
    assert_eq!(settled, Settled::NothingToBind);
    assert_eq!(node.check(heir), Presence::NeverConnected);
}

#[tokio::test]
async fn a_plugin_in_its_own_namespaces_behaves_the_same() {
    let node = Node::start();
    let (mut plugin, _) = node.bound(Place::OwnNamespaces).await;
    let process = plugin.key();
    assert_ne!(plugin.wrapper_pid(), plugin.pid);
    let facts = nri_lease::presence::ProcessFacts::read(plugin.pid).unwrap();
    assert!(!facts.in_host_pidns && facts.in_host_userns);
    let connections = node.tracker.view().connections(&process);
    assert_eq!(connections[0].netns_inode, facts.netns_inode);
    assert_eq!(node.tracker.namespaces_open(), 1);

    let owner = node.tracker.find_connection_owner(plugin.wrapper_pid());
    assert_eq!(owner, Some(process));
    assert_eq!(node.tracker.find_connection_owner(plugin.pid), owner);

    node.runtime.close_oldest_of(plugin.pid);
    assert_eq!(node.check(process), Presence::Broken);
    plugin.connect(&node.path());
    assert_eq!(node.tracker.settle(process, LONG).await, Settled::Bound);
    plugin.kill();
    eventually("the end of the plugin", || {
        node.check(process) == Presence::ProcessGone
    });
    // Its network namespace is not kept alive.
    eventually("the namespace to be closed", || {
        node.tracker.namespaces_open() == 0
    });
}

#[tokio::test]
async fn a_socket_made_in_another_namespace_than_its_process_is_found() {
    let node = Node::start();
    let mut plugin = Plugin::start();
    plugin.connect_from_another_netns(&node.path());
    let settled = node.tracker.settle(plugin.key(), LONG).await;
    assert_eq!(settled, Settled::Bound);
    let connections = node.tracker.view().connections(&plugin.key());
    let home = nri_lease::presence::ProcessFacts::read(plugin.pid).unwrap();
    assert_ne!(connections[0].netns_inode, home.netns_inode);
    node.runtime.close_oldest_of(plugin.pid);
    assert_eq!(node.check(plugin.key()), Presence::Broken);
}

#[tokio::test]
async fn of_two_connections_of_a_process_both_must_be_open() {
    let node = Node::start();
    let mut plugin = Plugin::start();
    let key = plugin.key();
    let first = plugin.connect(&node.path());
    let second = plugin.connect(&node.path());
    assert_eq!(node.tracker.settle(key, LONG).await, Settled::Bound);
    node.runtime.close_oldest_of(plugin.pid);
    assert_eq!(node.check(key), Presence::Broken);
    let view = node.tracker.view();
    assert_eq!(view.check(&key, R, Some(first)), Presence::Broken);
    assert_eq!(view.check(&key, R, Some(second)), Presence::Bound);
    // A validation has listed the plugin.
    node.tracker.rescan_now(key).await;
    node.tracker.forget_broken(key, R);
    eventually("the broken one to be forgotten", || {
        node.check(key) == Presence::Bound
    });
}

#[tokio::test]
async fn a_busy_accept_loop_binds_nobody_and_costs_one_fence() {
    let node = Node::start();
    let mut plugins: Vec<Plugin> = (0..8).map(|_| Plugin::start()).collect();
    node.runtime.allow(plugins.len() as u64);
    for plugin in &mut plugins {
        plugin.connect(&node.path());
    }
    eventually("all to be accepted", || node.runtime.accepted_in_all() == 8);
    let holders: Vec<&Plugin> = plugins.iter().collect();
    node.hold(&holders);
    let settled = plugins.iter().map(|p| node.tracker.settle(p.key(), SHORT));
    for settled in futures::future::join_all(settled).await {
        assert_eq!(settled, Settled::Deadline);
    }
    node.runtime.allow_all();
    for plugin in &plugins {
        let settled = node.tracker.settle(plugin.key(), LONG).await;
        assert_eq!(settled, Settled::Bound);
    }
    // All were seen accepted before the first fence, but for those found one scan later.
    let fences = node.tracker.fences_opened();
    assert!(fences <= 2, "{fences} fences");
}

#[tokio::test]
async fn the_daemons_own_connection_is_a_fence_for_what_came_before_it() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Runtime::start(&directory.path().join("nri.sock"));
    let tracker = Tracker::start().unwrap();
    // A path at which the tracker cannot open fences of its own.
    tracker.runtime_added(R, directory.path().join("no.sock"));
    let mut early = Plugin::start();
    let mut late = Plugin::start();
    let spec = |p: &Plugin| HolderSpec {
        process: p.key(),
        connection_inode: None,
    };
    tracker.set_holders(vec![spec(&early), spec(&late)]);
    let check = |p: &Plugin| tracker.view().check(&p.key(), R, None);

    early.connect(&runtime.path);
    eventually("the accept", || runtime.connections_of(early.pid) == 1);
    tracker.rescan_now(early.key()).await;
    let fence = tracker.before_own_connect(R).await;
    let own = std::os::unix::net::UnixStream::connect(&runtime.path).unwrap();
    eventually("the accept", || runtime.accepted_in_all() == 2);
    late.connect(&runtime.path);
    eventually("the accept", || runtime.connections_of(late.pid) == 1);
    tracker.rescan_now(late.key()).await;
    tracker.own_synchronized(R, fence, OwnSocket::of(&own).unwrap());
    eventually("the early plugin to be bound", || {
        check(&early) == Presence::Bound
    });
    assert_eq!(check(&late), Presence::NotSynchronised);

    let fence = tracker.before_own_connect(R).await;
    tracker.own_synchronized(R, fence, OwnSocket::of(&own).unwrap());
    eventually("the late plugin to be bound", || {
        check(&late) == Presence::Bound
    });
}

#[tokio::test]
async fn a_runtime_restart_breaks_all_and_reconnecting_mends_it() {
    let mut node = Node::start();
    let (mut plugin, _) = node.bound(Place::Host).await;
    let key = plugin.key();
    let path = node.path();
    drop(node.runtime);
    assert_eq!(node.tracker.view().check(&key, R, None), Presence::Broken);
    node.tracker.runtime_lost(R);
    node.runtime = Runtime::start(&path);
    plugin.connect(&path);
    eventually("the plugin to be bound", || {
        node.tracker.view().check(&key, R, None) == Presence::Bound
    });
    assert_eq!(node.directory.path(), path.parent().unwrap());
}

#[tokio::test]
async fn bindings_survive_a_restart_of_the_daemon_without_a_fence() {
    let node = Node::start();
    let (mut plugin, _) = node.bound(Place::Host).await;
    let key = plugin.key();
    let records = node.tracker.export().await;
    assert_eq!(records.len(), 1);
    let stored = serde_json::to_string(&records).unwrap();
    let records: Vec<nri_lease::presence::BindingRecord> = serde_json::from_str(&stored).unwrap();
    node.runtime.allow(0);

    let restarted = |records: Vec<_>| {
        let tracker = Tracker::start().unwrap();
        tracker.runtime_added(R, node.path());
        tracker.import(records);
        tracker.set_holders(vec![HolderSpec {
            process: key,
            connection_inode: None,
        }]);
        tracker
    };
    let tracker = restarted(records.clone());
    tracker.rescan_now(key).await;
    assert_eq!(tracker.view().check(&key, R, None), Presence::Bound);
    assert_eq!(tracker.fences_opened(), 0);

    // What the kernel does not confirm exactly is not bound.
    for damage in 0..4 {
        let mut wrong = records.clone();
        match damage {
            0 => wrong[0].cookie += 1,
            1 => wrong[0].boot_id.push('x'),
            2 => wrong[0].netns_inode += 1,
            _ => wrong[0].listener.as_mut().unwrap().ino += 1,
        }
        let tracker = restarted(wrong);
        tracker.rescan_now(key).await;
        assert_ne!(tracker.view().check(&key, R, None), Presence::Bound);
    }

    // Closed while the daemon was away, and so broken until another is bound.
    node.runtime.close_oldest_of(plugin.pid);
    let tracker = restarted(records);
    tracker.rescan_now(key).await;
    assert_eq!(tracker.view().check(&key, R, None), Presence::Broken);
    node.runtime.allow_all();
    plugin.connect(&node.path());
    assert_eq!(tracker.settle(key, LONG).await, Settled::Bound);
}

#[tokio::test]
async fn a_hook_binds_a_connection_that_no_scan_has_seen() {
    let node = Node::start();
    let (mut plugin, _) = node.bound(Place::Host).await;
    let key = plugin.key();
    let budget = Duration::from_millis(10);
    // The view as a hook loaded it, before the plugin came back.
    let view = node.tracker.view();
    node.runtime.close_oldest_of(plugin.pid);
    assert_eq!(view.bind_in_hook(&key, R, None, budget), Presence::Broken);

    node.runtime.allow(1);
    plugin.connect(&node.path());
    eventually("the accept", || {
        node.runtime.connections_of(plugin.pid) == 1
    });
    // The accept loop is busy with it: the plugin is not in the list.
    let began = Instant::now();
    assert_eq!(view.bind_in_hook(&key, R, None, budget), Presence::Broken);
    let took = began.elapsed();
    assert!(took >= budget / 2, "it waited: {took:?}");
    assert!(took < LONG / 2, "and gave up: {took:?}");

    node.runtime.allow_all();
    eventually("a hook to bind it", || {
        assert_eq!(view.check(&key, R, None), Presence::Broken);
        view.bind_in_hook(&key, R, None, budget) == Presence::Bound
    });
    eventually("the tracker to know", || node.check(key) == Presence::Bound);
}

#[tokio::test]
async fn a_plugin_the_runtime_launched_itself_is_found() {
    let node = Node::start();
    // The listening process is this one, so its end of the pair is in the runtime's table.
    let (runtimes_end, plugins_end) = std::os::unix::net::UnixStream::pair().unwrap();
    let plugin = Plugin::launched(plugins_end);
    let (other, _) = node.bound(Place::Host).await; // shows who listens
    node.hold(&[&plugin, &other]);
    let settled = node.tracker.settle(plugin.key(), LONG).await;
    assert_eq!(settled, Settled::Bound);
    assert!(node.tracker.view().connections(&plugin.key())[0].launched);
    drop(runtimes_end);
    assert_eq!(node.check(plugin.key()), Presence::Broken);
}

#[tokio::test]
async fn connections_to_other_servers_cost_no_fences() {
    let node = Node::start();
    let elsewhere = Runtime::start(&node.directory.path().join("kubelet.sock"));
    let (_known, _) = node.bound(Place::Host).await;
    let before = node.tracker.fences_opened();
    let mut plugin = Plugin::start();
    plugin.connect(&elsewhere.path);
    eventually("the accept", || elsewhere.accepted_in_all() == 1);
    let settled = node.tracker.settle(plugin.key(), LONG).await;
    assert_eq!(settled, Settled::NothingToBind);
    for _ in 0..10 {
        node.tracker.rescan_now(plugin.key()).await;
    }
    assert_eq!(node.tracker.fences_opened(), before);
    assert_eq!(node.check(plugin.key()), Presence::NeverConnected);
    assert_eq!(node.tracker.find_connection_owner(plugin.pid), None);
}

#[tokio::test]
async fn a_runtime_that_is_away_delays_no_registration() {
    let directory = tempfile::tempdir().unwrap();
    let elsewhere = Runtime::start(&directory.path().join("kubelet.sock"));
    let tracker = Tracker::start().unwrap();
    tracker.runtime_added(R, directory.path().join("nri.sock"));
    let mut plugin = Plugin::start();
    plugin.connect(&elsewhere.path);
    eventually("the accept", || elsewhere.accepted_in_all() == 1);
    let began = Instant::now();
    let settled = tracker.settle(plugin.key(), LONG).await;
    assert_eq!(settled, Settled::NothingToBind);
    assert!(began.elapsed() < LONG / 2);
}

#[tokio::test]
async fn who_is_in_no_lease_is_not_watched() {
    let node = Node::start();
    let mut plugin = Plugin::start();
    plugin.connect(&node.path());
    node.hold(&[&plugin]);
    eventually("the plugin to be bound", || {
        node.check(plugin.key()) == Presence::Bound
    });
    node.hold(&[]);
    eventually("the plugin to be forgotten", || {
        node.tracker.view().connections(&plugin.key()).is_empty()
    });
    assert_eq!(node.check(plugin.key()), Presence::NeverConnected);
}

#[tokio::test]
async fn the_tracker_ends_with_its_last_handle() {
    let node = Node::start();
    let (_plugin, _) = node.bound(Place::OwnNamespaces).await;
    let shared = std::sync::Arc::downgrade(&node.tracker.view_cell());
    let view = node.tracker.view();
    let clone = node.tracker.clone();
    drop(node.tracker);
    clone
        .rescan_now(nri_lease::presence::proc::key_of(1).unwrap())
        .await;
    assert!(shared.upgrade().is_some());
    drop(clone);
    // A view that a hook still has keeps nothing running.
    eventually("the thread to end", || shared.upgrade().is_none());
    drop(view);
}
