//! A power cut, as far as it can be had without pulling a plug: what the device below the file
//! system has received at a random moment is mounted again, as after a cut.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nri_lease_state::store::{Source, Tree};

use super::disk::{Unmount, image_of, mount_image, on_freezable_disk};
use super::support::{child, open, tree};

const CUTS: u64 = 12;

#[test]
fn what_was_acknowledged_is_there_after_a_power_cut() {
    on_freezable_disk(|disk| {
        let mut random = fastrand::Rng::with_seed(7);
        let mut acknowledged = BTreeMap::new();
        let mut process = child("kill::child_commits", &disk.join("state"), &[])
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(process.id().try_into().unwrap());
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        for cut in 0..CUTS {
            for line in lines.by_ref().take(random.usize(20..400)) {
                super::kill::note(&line.unwrap(), &mut acknowledged);
            }
            // Nothing writes while the device is copied, so the copy is of one moment.
            kill(pid, Signal::SIGSTOP).unwrap();
            let copy = disk.with_extension("copy");
            fs::copy(image_of(disk), &copy).unwrap();
            assert_all_there(&copy, &acknowledged, cut);
            kill(pid, Signal::SIGCONT).unwrap();
        }
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(!acknowledged.is_empty());
    });
}

fn assert_all_there(image: &Path, acknowledged: &BTreeMap<String, u64>, cut: u64) {
    let after = image.with_extension("after");
    fs::create_dir_all(&after).unwrap();
    mount_image(image, &after).unwrap();
    let _unmount = Unmount(&after);
    let opened = open(&after.join("state"));
    assert_eq!(
        opened.source,
        Source::Database,
        "cut {cut}: {:?}",
        opened.problems
    );
    let leases = tree(&opened, Tree::Leases);
    for (key, value) in acknowledged {
        let lease = leases.get(key).map_or(0, |text| text.parse().unwrap());
        assert!(
            lease >= *value,
            "cut {cut}: {key} is {lease}, acknowledged {value}"
        );
    }
}
