//! Whatever happens to the files, the process lives, and what the mirror has comes back.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nri_lease_state::store::{Opened, Source, Tree};

use super::support::{open, remove, set, tree};

/// A closed store with history, so that the database has garbage, snapshots and several segments.
fn used_store(dir: &Path) {
    for round in 0..3 {
        let store = open(dir).store;
        for n in 0..400 {
            let value = format!(
                "{{\"n\":{n},\"round\":{round},\"pad\":\"{}\"}}",
                "x".repeat(300)
            );
            let lease = set(Tree::Leases, &n.to_string(), value);
            drop(store.commit(vec![lease]));
            drop(store.commit(vec![set(Tree::Pins, &n.to_string(), round)]));
        }
        store.commit(vec![remove(Tree::Pins, "0")]).wait().unwrap();
        store.close();
    }
}

fn assert_complete(opened: &Opened, what: &str) {
    let leases = tree(opened, Tree::Leases);
    let pins = tree(opened, Tree::Pins);
    assert_eq!(
        leases.len(),
        400,
        "{what}: {:?} {:?}",
        opened.source,
        opened.problems
    );
    assert!(
        leases.values().all(|lease| lease.contains("\"round\":2")),
        "{what}: an old lease"
    );
    assert_eq!(pins.len(), 399, "{what}");
    assert!(pins.values().all(|pin| pin == "2"), "{what}: an old pin");
}

#[test]
fn a_damaged_database_is_recovered_without_losing_a_mirrored_record() {
    let scratch = tempfile::tempdir().unwrap();
    let whole = scratch.path().join("whole");
    used_store(&whole);
    let mut from_mirror = 0;
    for seed in 0..120 {
        let dir = scratch.path().join(format!("damaged-{seed}"));
        super::basics::copy_dir(&whole, &dir);
        let what = format!("seed {seed}, {}", damage(&dir.join("db"), seed));
        let opened = open(&dir);
        assert_complete(&opened, &what);
        from_mirror += usize::from(opened.source == Source::Mirror);
        if opened.source == Source::Mirror {
            assert!(
                opened.problems.iter().any(|text| text.contains("corrupt-")),
                "{what}"
            );
        }
        opened
            .store
            .commit(vec![set(Tree::Bans, "b", 1)])
            .wait()
            .unwrap();
        opened.store.close();
        let again = open(&dir);
        assert_eq!(
            again.source,
            Source::Database,
            "{what}: {:?}",
            again.problems
        );
        assert_complete(&again, &what);
        drop(again);
        fs::remove_dir_all(&dir).unwrap();
    }
    println!("recovered from the mirror in {from_mirror} of 120 rounds");
    assert!(from_mirror > 10, "the damage did not hurt: {from_mirror}");
}

/// Does one bad thing to the files of a database and says what.
fn damage(database: &Path, seed: u64) -> String {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut files = files_below(database);
    files.sort();
    // Most of the time the log: it is where the values are.
    let path = match random.u8(..3) {
        0 => files[random.usize(..files.len())].clone(),
        _ => database.join("db"),
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let length = file.metadata().unwrap().len().max(1);
    let at = random.u64(..length);
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    match random.u8(..6) {
        0 => {
            file.set_len(at).unwrap();
            format!("{name} cut at {at}")
        }
        1 => {
            fs::remove_file(&path).unwrap();
            format!("{name} removed")
        }
        2 => {
            let count = random.usize(1..5000);
            file.write_all_at(&vec![0; count], at).unwrap();
            format!("{name} zeroed at {at} for {count}")
        }
        3 => {
            let noise: Vec<u8> = (0..random.usize(1..5000)).map(|_| random.u8(..)).collect();
            file.write_all_at(&noise, at).unwrap();
            format!("{name} noise at {at}")
        }
        _ => {
            let mut byte = [0];
            let _ = file.read_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ (1 << random.u8(..8))], at)
                .unwrap();
            format!("{name} bit flipped at {at}")
        }
    }
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_below(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_database_older_than_its_mirror_is_not_believed() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("state");
    open(&dir)
        .store
        .commit(vec![set(Tree::Leases, "old", 1)])
        .wait()
        .unwrap();
    super::basics::copy_dir(&dir.join("db"), &scratch.path().join("old"));
    open(&dir)
        .store
        .commit(vec![set(Tree::Leases, "new", 1)])
        .wait()
        .unwrap();
    fs::remove_dir_all(dir.join("db")).unwrap();
    fs::rename(scratch.path().join("old"), dir.join("db")).unwrap();
    let opened = open(&dir);
    assert_eq!(opened.source, Source::Mirror);
    assert!(tree(&opened, Tree::Leases).contains_key("new"));
}

#[test]
fn a_missing_database_comes_back_from_the_mirror() {
    let scratch = tempfile::tempdir().unwrap();
    used_store(scratch.path());
    fs::remove_dir_all(scratch.path().join("db")).unwrap();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Mirror);
    assert_complete(&opened, "missing database");
}

#[test]
fn a_damaged_mirror_does_not_hurt_and_is_written_again() {
    let scratch = tempfile::tempdir().unwrap();
    used_store(scratch.path());
    fs::write(scratch.path().join("leases.json"), "{\"format\":1,\"rec").unwrap();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Database);
    assert!(
        opened.problems[0].contains("leases.json"),
        "{:?}",
        opened.problems
    );
    assert_complete(&opened, "damaged mirror");
    drop(opened);
    assert_eq!(open(scratch.path()).problems, Vec::<String>::new());
}

#[test]
fn with_both_unreadable_it_starts_empty_says_so_and_keeps_the_remains() {
    let scratch = tempfile::tempdir().unwrap();
    used_store(scratch.path());
    fs::write(scratch.path().join("leases.json"), "garbage").unwrap();
    fs::write(scratch.path().join("db/db"), "garbage").unwrap();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Empty { lost: true });
    assert!(
        opened.problems.iter().any(|text| text.contains("lost")),
        "{:?}",
        opened.problems
    );
    let corrupt = corrupt_folders(scratch.path());
    assert_eq!(
        fs::read(corrupt[0].join("leases.json")).unwrap(),
        b"garbage"
    );
    assert_eq!(fs::read(corrupt[0].join("db/db")).unwrap(), b"garbage");
    drop(opened);
    let again = open(scratch.path());
    assert_eq!(again.source, Source::Database, "it says so once");
}

/// sled takes an empty log for a new database.
#[test]
fn an_emptied_database_without_a_mirror_is_known_to_be_a_loss() {
    let scratch = tempfile::tempdir().unwrap();
    used_store(scratch.path());
    fs::remove_file(scratch.path().join("leases.json")).unwrap();
    for entry in fs::read_dir(scratch.path().join("db")).unwrap() {
        let path = entry.unwrap().path();
        if path
            .file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("snap.")
        {
            fs::remove_file(path).unwrap();
        }
    }
    fs::write(scratch.path().join("db/db"), "").unwrap();
    assert_eq!(open(scratch.path()).source, Source::Empty { lost: true });
}

#[test]
fn a_mirror_of_a_newer_format_is_not_guessed_at() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(
        scratch.path().join("leases.json"),
        r#"{"format":2,"records":{}}"#,
    )
    .unwrap();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Empty { lost: true });
    assert!(
        opened.problems[0].contains("format is 2"),
        "{:?}",
        opened.problems
    );
}

#[test]
fn an_unfinished_snapshot_of_sled_is_no_damage() {
    let scratch = tempfile::tempdir().unwrap();
    used_store(scratch.path());
    fs::write(
        scratch.path().join("db/snap.7FFFFFFFFFFFFFFF.generating"),
        "half",
    )
    .unwrap();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
    assert_complete(&opened, "unfinished snapshot");
}

#[test]
fn at_most_three_damaged_databases_are_kept() {
    let scratch = tempfile::tempdir().unwrap();
    for round in 0..5 {
        let store = open(scratch.path()).store;
        store
            .commit(vec![set(Tree::Leases, "a", round)])
            .wait()
            .unwrap();
        store.close();
        fs::write(scratch.path().join("db/db"), "garbage").unwrap();
    }
    assert_eq!(tree(&open(scratch.path()), Tree::Leases)["a"], "4");
    assert_eq!(corrupt_folders(scratch.path()).len(), 3);
}

#[test]
fn a_crash_between_the_two_steps_of_a_replacement_is_undone() {
    let scratch = tempfile::tempdir().unwrap();
    used_store(scratch.path());
    fs::rename(scratch.path().join("db"), scratch.path().join("db.old")).unwrap();
    fs::create_dir(scratch.path().join("db.new")).unwrap();
    let opened = open(scratch.path());
    assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
    assert_complete(&opened, "interrupted replacement");
    assert!(!scratch.path().join("db.new").exists());
}

fn corrupt_folders(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with("corrupt-")
        })
        .collect()
}
