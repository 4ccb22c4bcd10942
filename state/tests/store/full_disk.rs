//! A full disk: refused with a reason, nothing acknowledged is lost, healed by itself.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use nri_lease_state::store::{Health, Source, Tree};

use super::disk::{on_freezable_disk, on_small_disk};
use super::support::{open, set, tree, wait_until};

fn fill(disk: &Path) {
    let mut file = fs::File::create(disk.join("filler")).unwrap();
    for size in [1 << 16, 4096, 1] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
}

fn value(n: usize) -> String {
    format!("{{\"n\":{n},\"pad\":\"{}\"}}", "x".repeat(1000))
}

#[test]
fn a_full_disk_refuses_commits_keeps_the_acknowledged_and_heals_by_itself() {
    on_small_disk("size=24m", survive_a_full_disk);
}

/// ext4 allocates late: here the error may come from the barrier instead of the write.
#[test]
fn the_same_holds_on_ext4() {
    on_freezable_disk(survive_a_full_disk);
}

fn survive_a_full_disk(disk: &Path) {
    let dir = disk.join("state");
    let store = open(&dir).store;
    let mut acknowledged = Vec::new();
    let mut next = 0;
    for _ in 0..3 {
        fill(disk);
        let error = loop {
            match store
                .commit(vec![set(Tree::Leases, &next.to_string(), value(next))])
                .wait()
            {
                Ok(()) => acknowledged.push(next),
                Err(error) => break error.to_string(),
            }
            next += 1;
            assert!(next < 100_000, "the disk never fills");
        };
        assert!(
            error.contains("No space left on device; free space; retried in"),
            "{error}"
        );
        assert!(error.contains(&*dir.to_string_lossy()), "{error}");
        assert!(matches!(store.health(), Health::Failing { .. }));
        let refused = next;
        next += 1;
        store.write_soon(vec![set(Tree::Meta, "soon", next)]);
        let attempts = store.counters().reopen_attempts;
        wait_until("it has tried again", || {
            store.counters().reopen_attempts > attempts + 1
        });
        assert!(store.commit(vec![]).wait().is_err());

        fs::remove_file(disk.join("filler")).unwrap();
        wait_until("it has healed", || store.health() == Health::Healthy);
        store
            .commit(vec![set(Tree::Bans, "b", next)])
            .wait()
            .unwrap();

        let copy = tempfile::tempdir().unwrap();
        super::basics::copy_dir(&dir.join("db"), &copy.path().join("db"));
        let seen = open(copy.path());
        let leases = tree(&seen, Tree::Leases);
        assert!(
            acknowledged
                .iter()
                .all(|n| leases[&n.to_string()] == value(*n))
        );
        assert!(
            !leases.contains_key(&refused.to_string()),
            "a refused value is there"
        );
        assert_eq!(tree(&seen, Tree::Meta)["soon"], next.to_string());
    }
    store.close();
    let opened = open(&dir);
    assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
    assert_eq!(tree(&opened, Tree::Leases).len(), acknowledged.len());
}

#[test]
fn a_store_that_starts_on_a_full_disk_knows_everything_and_heals_by_itself() {
    on_small_disk("size=24m", |disk| {
        let dir = disk.join("state");
        let store = open(&dir).store;
        for n in 0..200 {
            drop(store.commit(vec![set(Tree::Leases, &n.to_string(), value(n))]));
        }
        store.commit(vec![set(Tree::Meta, "m", 1)]).wait().unwrap();
        store.close();
        fill(disk);
        let opened = open(&dir);
        assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
        assert_eq!(tree(&opened, Tree::Leases).len(), 200);
        assert_eq!(tree(&opened, Tree::Meta).len(), 1);
        assert!(
            opened.problems[0].contains("No space left"),
            "{:?}",
            opened.problems
        );
        assert!(matches!(opened.store.health(), Health::Failing { .. }));
        fs::remove_file(disk.join("filler")).unwrap();
        wait_until("it has healed", || {
            opened
                .store
                .commit(vec![set(Tree::Bans, "b", 1)])
                .wait()
                .is_ok()
        });
        opened.store.close();
        let opened = open(&dir);
        assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
        assert_eq!(tree(&opened, Tree::Leases).len(), 200);
        assert_eq!(tree(&opened, Tree::Bans).len(), 1);
    });
}
