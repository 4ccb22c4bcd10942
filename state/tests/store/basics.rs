//! What a caller relies on when nothing breaks.

use std::fs;
use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use nix::fcntl::{Flock, FlockArg};
use nri_lease_state::store::{CommitError, Health, OpenError, Options, Source, Store, Tree};

use super::support::{PATIENCE, child, child_dir, open, options, remove, set, tree, wait_until};

#[test]
fn a_new_directory_is_empty_and_nothing_is_lost() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("state");
    let opened = open(&dir);
    assert_eq!(opened.source, Source::Empty { lost: false });
    assert_eq!(opened.problems, Vec::<String>::new());
    assert_eq!(opened.store.health(), Health::Healthy);
    assert_eq!(dir.metadata().unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn committed_values_are_there_after_closing_and_reopening_at_once() {
    let scratch = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let opened = open(scratch.path());
        if round > 0 {
            assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
            assert_eq!(tree(&opened, Tree::Leases)["a"], (round - 1).to_string());
        }
        opened
            .store
            .commit(vec![set(Tree::Leases, "a", round)])
            .wait()
            .unwrap();
        opened.store.close();
    }
}

#[test]
fn a_removed_value_stays_removed() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    store
        .commit(vec![set(Tree::Leases, "a", 1), set(Tree::Pins, "a", 2)])
        .wait()
        .unwrap();
    store
        .commit(vec![remove(Tree::Leases, "a")])
        .wait()
        .unwrap();
    store.close();
    let opened = open(scratch.path());
    assert!(tree(&opened, Tree::Leases).is_empty());
    assert_eq!(tree(&opened, Tree::Pins)["a"], "2");
}

#[test]
fn every_tree_keeps_its_own_keys() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let writes = Tree::ALL.map(|tree| set(tree, "key", format!("\"{}\"", tree.name())));
    store.commit(writes.to_vec()).wait().unwrap();
    store.close();
    let opened = open(scratch.path());
    for name in Tree::ALL {
        assert_eq!(tree(&opened, name)["key"], format!("\"{}\"", name.name()));
    }
}

#[test]
fn writes_of_both_kinds_keep_their_order_for_a_key() {
    let scratch = tempfile::tempdir().unwrap();
    let slow = Options {
        soon_delay: PATIENCE,
        ..options()
    };
    let store = Store::open(scratch.path(), slow).unwrap().store;
    store.write_soon(vec![set(Tree::Leases, "commit is last", 1)]);
    let ticket = store.commit(vec![
        set(Tree::Leases, "commit is last", 2),
        set(Tree::Leases, "soon is last", 1),
    ]);
    store.write_soon(vec![set(Tree::Leases, "soon is last", 2)]);
    ticket.wait().unwrap();
    store.close();
    let opened = open(scratch.path());
    assert_eq!(tree(&opened, Tree::Leases)["commit is last"], "2");
    assert_eq!(tree(&opened, Tree::Leases)["soon is last"], "2");
}

#[test]
fn what_is_written_soon_reaches_the_disk_without_a_commit_and_coalesced() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("state");
    let store = open(&dir).store;
    store.commit(vec![]).wait().unwrap();
    let before = store.counters();
    for value in 0..1000 {
        store.write_soon(vec![set(Tree::Meta, "renewed", value)]);
    }
    wait_until("the last value is written", || {
        let copy = tempfile::tempdir().unwrap();
        copy_dir(&dir.join("db"), &copy.path().join("db"));
        tree(&open(copy.path()), Tree::Meta)
            .get("renewed")
            .map(String::as_str)
            == Some("999")
    });
    let writes = store.counters().writes - before.writes;
    assert!(writes < 500, "{writes} writes for 1000 changes of one key");
}

#[test]
fn the_mirror_is_complete_readable_json_without_what_is_good_for_one_boot() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let odd = "a \"quoted\" \\ key\nwith a line";
    store
        .commit(vec![
            set(Tree::Leases, "dra.net", r#"{"ttl":60}"#),
            set(Tree::Leases, odd, "[1, 2]"),
            set(Tree::Bans, "b", "null"),
            set(Tree::Sandboxes, "s", "1"),
            set(Tree::Meta, "m", "1"),
        ])
        .wait()
        .unwrap();
    store.mirror_soon();
    let path = scratch.path().join("leases.json");
    wait_until("the mirror is written", || {
        fs::read_to_string(&path).is_ok_and(|text| text.contains("dra.net"))
    });
    let mirror: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(mirror["format"], 1);
    assert_eq!(mirror["records"]["leases"]["dra.net"]["ttl"], 60);
    assert_eq!(mirror["records"]["leases"][odd][1], 2);
    assert!(mirror["records"]["bans"]["b"].is_null());
    assert!(mirror["records"].get("sandboxes").is_none());
    assert!(mirror["records"].get("meta").is_none());
    assert!(mirror["written_at"].as_str().unwrap().ends_with('Z'));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn values_that_could_not_be_mirrored_are_refused_with_the_reason() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let not_json = store.commit(vec![set(Tree::Leases, "a", "{")]).wait();
    assert!(
        matches!(not_json, Err(CommitError::NotJson { .. })),
        "{not_json:?}"
    );
    let mut write = set(Tree::Leases, "a", "");
    write.value = Some(b"\"\xff\"".to_vec());
    let not_utf8 = store.commit(vec![write]).wait();
    assert!(
        matches!(not_utf8, Err(CommitError::NotJson { .. })),
        "{not_utf8:?}"
    );
    let large = format!("\"{}\"", "x".repeat(1 << 20));
    let too_large = store.commit(vec![set(Tree::Leases, "a", large)]).wait();
    assert!(
        matches!(too_large, Err(CommitError::TooLarge { .. })),
        "{too_large:?}"
    );
}

#[test]
fn many_large_values_survive() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let large = |n: usize| format!("\"{}\"", (n % 10).to_string().repeat(60_000));
    for n in 0..60 {
        store
            .commit(vec![set(Tree::Leases, &n.to_string(), large(n))])
            .wait()
            .unwrap();
    }
    store.close();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
    let leases = tree(&opened, Tree::Leases);
    assert!((0..60).all(|n| leases[&n.to_string()] == large(n)));
}

#[test]
fn a_ticket_can_be_awaited() {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let mut ticket = pin!(store.commit(vec![set(Tree::Leases, "a", 1)]));
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let answer = loop {
        match ticket.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(answer) => break answer,
            Poll::Pending => std::thread::park_timeout(PATIENCE),
        }
    };
    assert_eq!(answer, Ok(()));
}

#[test]
fn a_database_that_grows_too_large_is_rebuilt_and_keeps_everything() {
    let scratch = tempfile::tempdir().unwrap();
    let small = Options {
        compact_above_bytes: 600 << 10,
        ..options()
    };
    let store = Store::open(scratch.path(), small).unwrap().store;
    store
        .commit(vec![set(Tree::Pins, "kept", 1)])
        .wait()
        .unwrap();
    let value = format!("\"{}\"", "x".repeat(20_000));
    let mut last = 0;
    while store.counters().compactions < 1 {
        let key = (last % 10).to_string();
        store
            .commit(vec![
                set(Tree::Leases, &key, &value),
                set(Tree::Control, "last", last),
            ])
            .wait()
            .unwrap();
        last += 1;
        assert!(last < 20_000, "it never grows");
    }
    store
        .commit(vec![set(Tree::Control, "last", last)])
        .wait()
        .unwrap();
    store.close();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
    assert_eq!(tree(&opened, Tree::Pins)["kept"], "1");
    assert_eq!(tree(&opened, Tree::Control)["last"], last.to_string());
    assert_eq!(tree(&opened, Tree::Leases).len(), 10.min(last as usize));
    assert!(!scratch.path().join("db.new").exists());
}

#[test]
fn a_second_process_is_told_which_one_has_the_directory() {
    let scratch = tempfile::tempdir().unwrap();
    let _first = open(scratch.path());
    let output = child("basics::child_opens", scratch.path(), &[])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let pid = format!("in use by process {}", std::process::id());
    assert!(said.contains(&pid), "{said}");
}

#[test]
#[ignore = "the other process of a_second_process_is_told_which_one_has_the_directory"]
fn child_opens() {
    if let Some(dir) = child_dir() {
        match Store::open(&dir, options()) {
            Err(error @ OpenError::InUse { .. }) => println!("{error}"),
            other => println!("unexpected: {other:?}"),
        }
    }
}

/// sled frees its lock some time after it was closed.
#[test]
fn a_lock_that_lingers_is_waited_for() {
    let scratch = tempfile::tempdir().unwrap();
    open(scratch.path()).store.close();
    let file = fs::File::open(scratch.path().join("db/db")).unwrap();
    let lock = Flock::lock(file, FlockArg::LockExclusive).unwrap();
    let lingers = std::time::Duration::from_millis(200);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(lingers);
            drop(lock);
        });
        assert_eq!(open(scratch.path()).source, Source::Database);
    });
}

#[test]
fn a_database_that_somebody_else_has_open_is_left_alone_and_named() {
    let scratch = tempfile::tempdir().unwrap();
    open(scratch.path()).store.close();
    let file = fs::File::open(scratch.path().join("db/db")).unwrap();
    let _lock = Flock::lock(file, FlockArg::LockExclusive).unwrap();
    match Store::open(scratch.path(), options()) {
        Err(OpenError::InUse { pid, .. }) => assert_eq!(pid, std::process::id()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_directory_that_cannot_be_created_is_an_error_that_names_it() {
    let error = Store::open("/proc/nothing/here".as_ref(), options()).unwrap_err();
    assert!(error.to_string().contains("/proc/nothing/here"), "{error}");
}

pub fn copy_dir(from: &std::path::Path, to: &std::path::Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
