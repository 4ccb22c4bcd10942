//! A pod's cgroup, as the kubelet makes it: what the daemon learns a process's pod from.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest wait for the processes in it to be gone.
const LIMIT: Duration = Duration::from_secs(10);

/// Cgroups of one test, below a directory of its own in one hierarchy. Removed on drop.
pub struct Cgroups {
    base: PathBuf,
}

impl Cgroups {
    pub fn new(name: &str) -> Self {
        let root = Path::new("/sys/fs/cgroup");
        // A hierarchy of version 1, or the only one of version 2.
        let pids = root.join("pids");
        let hierarchy = if pids.is_dir() { pids } else { root.to_owned() };
        Self {
            base: hierarchy.join(name),
        }
    }

    /// The file that takes the pids of processes that enter the pod.
    pub fn of_pod(&self, uid: &str) -> PathBuf {
        let pod = self.base.join(format!("kubepods/besteffort/pod{uid}"));
        fs::create_dir_all(&pod).expect("root may make cgroups");
        pod.join("cgroup.procs")
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        let give_up = Instant::now() + LIMIT;
        // A killed process leaves its cgroup a moment later.
        while self.base.is_dir() && !remove(&self.base) && Instant::now() < give_up {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Children first: a cgroup with children cannot be removed, nor its files one by one.
fn remove(dir: &Path) -> bool {
    let children = fs::read_dir(dir).into_iter().flatten().flatten();
    for child in children.filter(|child| child.path().is_dir()) {
        remove(&child.path());
    }
    fs::remove_dir(dir).is_ok()
}
