//! A scratch directory for one test: short enough for socket paths (108 bytes),
//! with a cgroup of its own name, and emptied of processes, mounts and cgroups on drop.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use anyhow::Result;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

use crate::process;
use crate::wait::wait_until;

const PARENT: &str = "/tmp";
const PREFIX: &str = "nlt-";
/// The file that says who made a scratch directory.
const OWNER: &str = "owner";

/// Owns `/tmp/nlt-XXXXXX` and everything that lives there.
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    /// A new, empty directory, mode 0700.
    pub fn new() -> Result<Self> {
        static SWEEP: Once = Once::new();
        SWEEP.call_once(sweep);
        let dir = tempfile::Builder::new()
            .prefix(PREFIX)
            .rand_bytes(6)
            .tempdir_in(PARENT)?;
        std::fs::write(dir.path().join(OWNER), owner())?;
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
        name_of(self.path())
    }

    /// Mount points below the directory, deepest last.
    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_below(self.path())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        clear(self.path());
        if std::env::var_os("NRI_LEASE_KEEP_SCRATCH").is_some() {
            self.dir.disable_cleanup(true);
            eprintln!("kept {}", self.path().display());
        }
    }
}

/// Empties a scratch directory of everything but its files.
fn clear(dir: &Path) {
    remove_shim_sockets(dir);
    end_processes(dir);
    for point in mounts_below(dir).iter().rev() {
        let _ = umount2(point, MntFlags::MNT_DETACH);
    }
}

/// Removes what test programs left that were killed before they could clean up:
/// directories of ours whose owner is gone.
fn sweep() {
    for entry in std::fs::read_dir(PARENT).into_iter().flatten().flatten() {
        let dir = entry.path();
        if !name_of(&dir).starts_with(PREFIX) {
            continue;
        }
        let Ok(owner) = std::fs::read_to_string(dir.join(OWNER)) else {
            continue;
        };
        let mut words = owner.split(' ');
        let pid = words.next().and_then(|w| w.parse().ok());
        let ticks = words.next().and_then(|w| w.parse().ok());
        let (Some(pid), Some(ticks)) = (pid, ticks) else {
            continue;
        };
        // In another pid namespace, "gone" may only mean out of our sight.
        let visible = words.next() == Some(pid_namespace().as_str());
        let alive = process::is_alive(pid) && process::start_ticks(pid) == Some(ticks);
        if visible && !alive {
            clear(&dir);
            let _ = std::fs::remove_dir_all(&dir);
        }
    }
}

/// Who made a scratch directory: "PID START_TICKS PID_NAMESPACE".
fn owner() -> String {
    let pid = nix::unistd::getpid().as_raw();
    let ticks = process::start_ticks(pid).unwrap_or(0);
    format!("{pid} {ticks} {}", pid_namespace())
}

fn pid_namespace() -> String {
    std::fs::read_link("/proc/self/ns/pid")
        .map(|link| link.display().to_string())
        .unwrap_or_default()
}

/// Ends what runs in a directory: shims, which name its containerd socket,
/// containerd and our daemon by their configuration, and all in our cgroups.
fn end_processes(dir: &Path) {
    for pid in processes_of(dir) {
        process::signal(pid, Signal::SIGKILL);
    }
    let groups = cgroups(dir);
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

fn processes_of(dir: &Path) -> Vec<i32> {
    let socket = dir.join("c.sock");
    let socket = socket.to_string_lossy();
    process::with_argument(|arg| {
        arg == socket || (Path::new(arg).starts_with(dir) && arg.ends_with("/config.toml"))
    })
}

/// Shim sockets outside of the directory (containerd before 2.3 has no setting for them).
fn remove_shim_sockets(dir: &Path) {
    let tasks = dir.join("s/io.containerd.runtime.v2.task/k8s.io");
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

fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .filter(|point| point.starts_with(dir))
        .collect()
}

/// The directory's cgroup in every hierarchy (v1) or the one (v2), with all below it.
fn cgroups(dir: &Path) -> Vec<PathBuf> {
    let base = Path::new("/sys/fs/cgroup");
    let hierarchies = std::fs::read_dir(base)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .chain([base.to_owned()]);
    let mut found = vec![];
    for hierarchy in hierarchies {
        collect_dirs(&hierarchy.join(name_of(dir)), &mut found);
    }
    found
}

fn name_of(dir: &Path) -> &str {
    dir.file_name().and_then(|n| n.to_str()).unwrap_or_default()
}

/// What is left of a scratch directory that may be gone: its processes, mounts,
/// cgroups and the directory itself. Empty is clean.
pub fn leftovers_of(dir: &Path) -> Vec<String> {
    let processes = processes_of(dir).into_iter();
    let mounts = mounts_below(dir).into_iter();
    let groups = cgroups(dir).into_iter();
    processes
        .map(|pid| format!("process {pid}"))
        .chain(mounts.map(|m| format!("mount {}", m.display())))
        .chain(groups.map(|g| format!("cgroup {}", g.display())))
        .chain(dir.exists().then(|| format!("directory {}", dir.display())))
        .collect()
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
