//! SIGKILL at any moment loses nothing that was acknowledged.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::time::Duration;

use nri_lease_state::store::{Source, Tree};

use super::support::{child, child_dir, open, set, tree};

const ROUNDS: u64 = 40;
const CLIENTS: usize = 4;

#[test]
fn what_was_acknowledged_is_there_after_sigkill() {
    let scratch = tempfile::tempdir().unwrap();
    let mut acknowledged: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 0..ROUNDS {
        let before = acknowledged.values().sum::<u64>();
        kill_a_child_at_work(scratch.path(), seed, &mut acknowledged);
        let opened = open(scratch.path());
        assert!(
            matches!(
                opened.source,
                Source::Database | Source::Empty { lost: false }
            ),
            "seed {seed}: {:?} {:?}",
            opened.source,
            opened.problems
        );
        let leases = tree(&opened, Tree::Leases);
        let pins = tree(&opened, Tree::Pins);
        for (key, value) in &acknowledged {
            let lease = leases.get(key).map_or(0, |text| text.parse().unwrap());
            let pin = pins.get(key).map_or(0, |text| text.parse().unwrap());
            assert!(
                lease >= *value,
                "seed {seed}: {key} is {lease}, acknowledged {value}"
            );
            assert_eq!(lease, pin, "seed {seed}: half a group of {key}");
        }
        if seed == ROUNDS - 1 {
            assert!(before > 0, "no child ever got anything acknowledged");
        }
        opened.store.close();
    }
}

/// Runs a child until a moment that the seed chooses, sometimes while it is still opening.
fn kill_a_child_at_work(dir: &Path, seed: u64, acknowledged: &mut BTreeMap<String, u64>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut process = child("kill::child_commits", dir, &[]).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    if random.u8(..4) > 0 {
        lines
            .by_ref()
            .take(random.usize(..300))
            .for_each(|line| note(&line.unwrap(), acknowledged));
    }
    std::thread::sleep(Duration::from_micros(random.u64(..30_000)));
    process.kill().unwrap();
    lines.for_each(|line| note(&line.unwrap_or_default(), acknowledged));
    process.wait().unwrap();
}

/// The test harness writes lines of its own, and SIGKILL cuts one short at most.
pub fn note(line: &str, acknowledged: &mut BTreeMap<String, u64>) {
    let mut words = line.split_whitespace();
    if let (Some("acknowledged"), Some(key), Some(value), Some("end")) =
        (words.next(), words.next(), words.next(), words.next())
    {
        acknowledged.insert(key.to_owned(), value.parse().unwrap());
    }
}

#[test]
#[ignore = "the process that what_was_acknowledged_is_there_after_sigkill kills"]
fn child_commits() {
    let Some(dir) = child_dir() else { return };
    let opened = open(&dir);
    let leases = tree(&opened, Tree::Leases);
    let store = &opened.store;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let leases = &leases;
            scope.spawn(move || {
                for round in 1.. {
                    let key = format!("{client}-{}", round % 50);
                    let value = leases.get(&key).map_or(0, |text| text.parse().unwrap()) + round;
                    let group = vec![set(Tree::Leases, &key, value), set(Tree::Pins, &key, value)];
                    store.commit(group).wait().unwrap();
                    let line = format!("acknowledged {key} {value} end\n");
                    std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
                    if round % 7 == 0 {
                        store.write_soon(vec![set(Tree::Meta, &key, value)]);
                        store.mirror_soon();
                    }
                }
            });
        }
    });
}
