//! A scratch directory for one test: short enough for socket paths (108 bytes),
//! with a cgroup of its own name, and emptied of processes, mounts and cgroups on drop.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

use crate::process;
use crate::wait::wait_until;

/// Owns `/tmp/nlt-XXXXXX` and everything that lives there.
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    /// A new, empty directory, mode 0700.
    pub fn new() -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("nlt-")
            .rand_bytes(6)
            .tempdir_in("/tmp")?;
        Ok(Self { dir })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A path in the directory.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The cgroup parent of pods started for this directory, as CRI wants it.
    pub fn cgroup_parent(&self) -> String {
        format!("/{}", self.name())
    }

    fn name(&self) -> &str {
        self.path()
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or("nlt")
    }

    /// Ends what containerd leaves running on purpose: shims, which name this
    /// directory's containerd socket, and whatever is in our cgroups.
    fn end_processes(&self) {
        let socket = self.join("c.sock");
        for pid in process::with_argument(&socket.to_string_lossy()) {
            process::signal(pid, Signal::SIGKILL);
        }
        let groups = self.cgroups();
        let _ = wait_until("cgroups to empty", Duration::from_secs(10), || {
            let mut empty = true;
            for group in &groups {
                for pid in pids_in(group) {
                    process::signal(pid, Signal::SIGKILL);
                    empty = false;
                }
            }
            empty
        });
        // Children first: `cgroups` lists parents before them.
        for group in groups.iter().rev() {
            let _ = std::fs::remove_dir(group);
        }
    }

    /// Our cgroup in every hierarchy (v1) or the one (v2), with all below it.
    fn cgroups(&self) -> Vec<PathBuf> {
        let base = Path::new("/sys/fs/cgroup");
        let hierarchies = std::fs::read_dir(base)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.path())
            .chain([base.to_owned()]);
        let mut found = vec![];
        for hierarchy in hierarchies {
            collect_dirs(&hierarchy.join(self.name()), &mut found);
        }
        found
    }

    /// Mount points below the directory, deepest last.
    pub fn mounts(&self) -> Vec<PathBuf> {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        table
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .map(PathBuf::from)
            .filter(|point| point.starts_with(self.path()))
            .collect()
    }

    /// What is still there: processes, mounts and cgroups of this directory. For
    /// tests of the cleanup; empty is clean.
    pub fn leftovers(&self) -> Vec<String> {
        leftovers_of(self.path())
    }

    /// Shim sockets outside of the directory (containerd before 2.3 has no setting for them).
    fn remove_shim_sockets(&self) {
        let tasks = self.join("s/io.containerd.runtime.v2.task/k8s.io");
        for task in std::fs::read_dir(tasks).into_iter().flatten().flatten() {
            for file in ["bootstrap.json", "address"] {
                let Ok(text) = std::fs::read_to_string(task.path().join(file)) else {
                    continue;
                };
                if let Some((_, rest)) = text.split_once("unix://") {
                    let path: String = rest.chars().take_while(|c| *c != '"').collect();
                    let _ = std::fs::remove_file(path.trim());
                }
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.remove_shim_sockets();
        self.end_processes();
        for point in self.mounts().iter().rev() {
            let _ = umount2(point, MntFlags::MNT_DETACH);
        }
        if std::env::var_os("NRI_LEASE_KEEP_SCRATCH").is_some() {
            self.dir.disable_cleanup(true);
            eprintln!("kept {}", self.path().display());
        }
    }
}

/// What is left of a scratch directory that may be gone: its processes, mounts,
/// cgroups and the directory itself.
pub fn leftovers_of(dir: &Path) -> Vec<String> {
    let mut left = vec![];
    for pid in process::with_argument(&dir.join("c.sock").to_string_lossy()) {
        left.push(format!("process {pid}"));
    }
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for line in table.lines() {
        if let Some(point) = line
            .split(' ')
            .nth(4)
            .filter(|p| Path::new(p).starts_with(dir))
        {
            left.push(format!("mount {point}"));
        }
    }
    if let Some(name) = dir.file_name() {
        let mut groups = vec![];
        for hierarchy in std::fs::read_dir("/sys/fs/cgroup")
            .into_iter()
            .flatten()
            .flatten()
        {
            collect_dirs(&hierarchy.path().join(name), &mut groups);
        }
        left.extend(groups.iter().map(|g| format!("cgroup {}", g.display())));
    }
    if dir.exists() {
        left.push(format!("directory {}", dir.display()));
    }
    left
}

fn collect_dirs(dir: &Path, found: &mut Vec<PathBuf>) {
    if !dir.is_dir() {
        return;
    }
    found.push(dir.to_owned());
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            collect_dirs(&entry.path(), found);
        }
    }
}

fn pids_in(cgroup: &Path) -> Vec<i32> {
    std::fs::read_to_string(cgroup.join("cgroup.procs"))
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.parse().ok())
        .collect()
}
