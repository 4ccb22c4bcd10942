//! What an acknowledgement is worth in a power cut: seen from the system calls.

use std::io::Write as _;
use std::process::Command;

use nri_lease_state::store::Tree;

use super::support::{child, child_dir, open, set};

const COMMITS: usize = 20;

#[test]
fn sixty_four_concurrent_commits_share_few_barriers() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    store.commit(vec![]).wait().unwrap();
    let before = store.counters().barriers;
    let tickets: Vec<_> = (0..64)
        .map(|n| store.commit(vec![set(Tree::Leases, &n.to_string(), n)]))
        .collect();
    tickets
        .into_iter()
        .for_each(|ticket| ticket.wait().unwrap());
    let barriers = store.counters().barriers - before;
    assert!(barriers <= 16, "{barriers} barriers for 64 commits");
}

#[test]
fn each_acknowledgement_follows_exactly_one_finished_fdatasync_of_the_database() {
    if Command::new("strace").arg("-V").output().is_err() {
        println!("skipped: no strace");
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let trace = scratch.path().join("trace");
    let dir = scratch.path().join("state");
    let wrapper = [
        "strace",
        "-f",
        "-y",
        "-e",
        "trace=fsync,fdatasync,write",
        "-o",
        trace.to_str().unwrap(),
    ];
    let output = child("barriers::child_commits", &dir, &wrapper)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let trace = std::fs::read_to_string(&trace).unwrap();
    let database = format!("{}>", dir.join("db/db").display());

    let mut syncs = 0;
    let mut under_way = Vec::new();
    let mut acknowledged = 0;
    for line in trace.lines() {
        let (thread, call) = line.split_once(' ').unwrap();
        let is_sync = call.contains("fdatasync(") || call.contains("fsync(");
        if is_sync && call.contains(&database) {
            if call.contains("<unfinished") {
                under_way.push(thread);
            } else {
                syncs += 1;
            }
        } else if call.contains("sync resumed") && under_way.contains(&thread) {
            under_way.retain(|other| *other != thread);
            syncs += 1;
        } else if call.contains("write(") && call.contains("begin ") {
            syncs = 0;
        } else if call.contains("write(") && call.contains("acknowledged ") {
            assert_eq!(syncs, 1, "before {call}");
            assert!(under_way.is_empty(), "before {call}");
            acknowledged += 1;
            syncs = 0;
        }
    }
    assert_eq!(acknowledged, COMMITS);
}

#[test]
#[ignore = "the process that is traced"]
fn child_commits() {
    let Some(dir) = child_dir() else { return };
    let store = open(&dir).store;
    store.commit(vec![]).wait().unwrap();
    let say = |text: String| std::io::stdout().write_all(text.as_bytes()).unwrap();
    // A line that is not our own may be in the buffer.
    say("\n".to_owned());
    say("begin \n".to_owned());
    for n in 0..COMMITS {
        store
            .commit(vec![set(Tree::Leases, "a", n)])
            .wait()
            .unwrap();
        say(format!("acknowledged {n}\n"));
    }
    store.close();
}
