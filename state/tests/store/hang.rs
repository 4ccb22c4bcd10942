//! A disk that does not answer holds nobody up, and is used again when it does.

use std::time::{Duration, Instant};

use nri_lease_state::store::{CommitError, Health, Options, Source, Store, Tree};

use super::disk::{Frozen, on_freezable_disk};
use super::support::{PATIENCE, open, options, set, tree, wait_until};

#[test]
fn a_hanging_disk_blocks_no_caller_and_is_used_again_when_it_answers() {
    on_freezable_disk(|disk| {
        let dir = disk.join("state");
        let impatient = Options {
            stall_after: Duration::from_millis(100),
            stuck_after: Duration::from_secs(1),
            ..options()
        };
        let store = Store::open(&dir, impatient).unwrap().store;
        store
            .commit(vec![set(Tree::Leases, "before", 1)])
            .wait()
            .unwrap();

        let frozen = Frozen::freeze(disk);
        let begin = Instant::now();
        let hanging = store.commit(vec![set(Tree::Leases, "during", 1)]);
        wait_until("it is noticed", || store.health() != Health::Healthy);
        let fast = Instant::now();
        let refused = store.commit(vec![set(Tree::Leases, "refused", 1)]).wait();
        assert!(
            matches!(refused, Err(CommitError::Stalled { .. })),
            "{refused:?}"
        );
        store.write_soon(vec![set(Tree::Meta, "soon", 1)]);
        store.mirror_soon();
        assert!(
            fast.elapsed() < Duration::from_millis(500),
            "{:?}",
            fast.elapsed()
        );
        let given_up = hanging.wait_for(PATIENCE).expect("it is given up");
        assert!(
            given_up
                .unwrap_err()
                .to_string()
                .contains("no answer from the disk")
        );
        assert!(begin.elapsed() >= Duration::from_secs(1));
        let refused = store.commit(vec![set(Tree::Leases, "refused", 1)]).wait();
        assert!(
            matches!(refused, Err(CommitError::CannotWrite { .. })),
            "{refused:?}"
        );

        drop(frozen);
        wait_until("it has healed", || store.health() == Health::Healthy);
        store
            .commit(vec![set(Tree::Leases, "after", 1)])
            .wait()
            .unwrap();
        store.close();
        let opened = open(&dir);
        assert_eq!(opened.source, Source::Database, "{:?}", opened.problems);
        let leases: Vec<_> = tree(&opened, Tree::Leases).into_keys().collect();
        assert_eq!(leases, ["after", "before"]);
        assert_eq!(tree(&opened, Tree::Meta)["soon"], "1");
    });
}
