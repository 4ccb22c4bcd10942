//! Facts about a process, read from /proc and robust against pid reuse.
//!
//! Everything is as seen from the daemon, whose pid namespace must be the host's. Nothing here
//! knows what a lease or a connection is.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

pub use nri_lease_state::process::ProcessKey;

/// What the kernel says about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    pub pid: u32,
    pub start_time: u64,
    /// The effective uid, in the daemon's user namespace.
    pub uid: u32,
    pub ppid: u32,
    /// The cgroup path that names the pod if one does, else that of cgroup v2, else the first
    /// one listed; `/` when there is none.
    pub cgroup: String,
    /// The Kubernetes pod uid out of the cgroup path, with dashes. Static pods have a uid of 32
    /// hex digits without any.
    pub pod_uid: Option<String>,
    pub container_id: Option<String>,
    pub netns_inode: u64,
    /// The same user namespace as the daemon's, which runs in the host's.
    pub in_host_userns: bool,
    /// The same pid namespace as the daemon's, which runs in the host's.
    pub in_host_pidns: bool,
}

/// Why facts are missing.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    /// No such process, or another one has taken its pid meanwhile.
    #[error("process {pid} is gone")]
    Gone { pid: u32 },
    /// /proc could not be read.
    #[error("reading {path}: {source}")]
    Read { path: String, source: io::Error },
    /// /proc did not look as expected.
    #[error("{path} does not look as expected: {what}")]
    Malformed { path: String, what: &'static str },
}

impl ProcessFacts {
    /// Reads all facts; the start time is read before and after, so that they belong together.
    pub fn read(pid: u32) -> Result<Self, ProcError> {
        let before = stat(pid)?;
        let uid = effective_uid(&read(pid, "status")?).ok_or_else(|| ProcError::Malformed {
            path: format!("/proc/{pid}/status"),
            what: "no Uid line",
        })?;
        let (cgroup, pod) = choose_cgroup(&read(pid, "cgroup")?);
        let facts = Self {
            pid,
            start_time: before.start_time,
            uid,
            ppid: before.ppid,
            cgroup,
            pod_uid: pod.as_ref().map(|p| p.uid.clone()),
            container_id: pod.and_then(|p| p.container_id),
            netns_inode: namespace(pid, "net")?,
            in_host_userns: namespace(pid, "user")? == own_namespace("user")?,
            in_host_pidns: namespace(pid, "pid")? == own_namespace("pid")?,
        };
        if stat(pid)?.start_time != facts.start_time {
            return Err(ProcError::Gone { pid });
        }
        Ok(facts)
    }

    /// The process these facts are about.
    pub fn key(&self) -> ProcessKey {
        ProcessKey {
            pid: self.pid,
            start_time: self.start_time,
        }
    }
}

/// The process that has this pid now.
pub fn key_of(pid: u32) -> Result<ProcessKey, ProcError> {
    Ok(ProcessKey {
        pid,
        start_time: stat(pid)?.start_time,
    })
}

/// CLOCK_BOOTTIME nanoseconds by when a process had started for sure; `None` when there is none.
pub fn started_by_ns(pid: u32) -> Option<u64> {
    // USER_HZ is 100 on every architecture that has containers; field 22 is rounded down to it.
    const TICK_NS: u64 = 10_000_000;
    let ticks = key_of(pid).ok()?.start_time;
    Some(ticks.saturating_add(1).saturating_mul(TICK_NS))
}

/// Whether `pid` descends from `ancestor`, or is it. Follows parents, of which there are at most
/// 1,024 here; a process whose parent has died belongs to its reaper.
pub fn is_descendant(pid: u32, ancestor: u32) -> bool {
    let mut at = pid;
    for _ in 0..1024 {
        if at == ancestor {
            return true;
        }
        match stat(at) {
            Ok(stat) if stat.ppid != 0 => at = stat.ppid,
            _ => return false,
        }
    }
    false
}

/// The living descendants of a process, nearest first, at most `limit`.
pub fn descendants(of: u32, limit: usize) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    for entry in entries.flatten() {
        let pid = entry.file_name().to_str().and_then(|n| n.parse().ok());
        if let Some(pid) = pid
            && let Ok(stat) = stat(pid)
        {
            children.entry(stat.ppid).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    // A pid reused while we read could close a circle.
    let mut seen = HashSet::from([of]);
    let mut next = 0;
    let mut parent = of;
    loop {
        for child in children.remove(&parent).unwrap_or_default() {
            if found.len() == limit {
                return found;
            }
            if seen.insert(child) {
                found.push(child);
            }
        }
        match found.get(next) {
            Some(pid) => parent = *pid,
            None => return found,
        }
        next += 1;
    }
}

/// The inodes of all sockets in a process's descriptor table.
pub fn socket_inodes(pid: u32) -> io::Result<HashSet<u64>> {
    let mut inodes = HashSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor closed meanwhile is no error.
        let target = entry.and_then(|e| fs::read_link(e.path()));
        if let Ok(target) = target
            && let Some(inode) = target.to_str().and_then(socket_inode)
        {
            inodes.insert(inode);
        }
    }
    Ok(inodes)
}

/// The inode in the target of a /proc/PID/fd link, `socket:[INODE]`.
pub(super) fn socket_inode(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

/// The boot these processes live in; pids and start times repeat after a reboot.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

struct Stat {
    ppid: u32,
    start_time: u64,
}

fn stat(pid: u32) -> Result<Stat, ProcError> {
    parse_stat(&read(pid, "stat")?).ok_or_else(|| ProcError::Malformed {
        path: format!("/proc/{pid}/stat"),
        what: "too few fields",
    })
}

/// The start time in the text of /proc/PID/stat.
pub(super) fn start_time_of(stat: &str) -> Option<u64> {
    parse_stat(stat).map(|s| s.start_time)
}

fn parse_stat(text: &str) -> Option<Stat> {
    // Field 2 is the command in parentheses and may contain anything, parentheses too.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    let ppid = fields.nth(1)?.parse().ok()?; // field 4
    let start_time = fields.nth(17)?.parse().ok()?; // field 22
    Some(Stat { ppid, start_time })
}

fn effective_uid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn read(pid: u32, file: &str) -> Result<String, ProcError> {
    let path = format!("/proc/{pid}/{file}");
    match fs::read(&path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(e) => Err(read_error(pid, path, e)),
    }
}

fn read_error(pid: u32, path: String, source: io::Error) -> ProcError {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => ProcError::Gone { pid },
        _ => ProcError::Read { path, source },
    }
}

fn namespace(pid: u32, kind: &str) -> Result<u64, ProcError> {
    let path = format!("/proc/{pid}/ns/{kind}");
    match fs::metadata(&path) {
        Ok(meta) => Ok(meta.ino()),
        Err(e) => Err(read_error(pid, path, e)),
    }
}

fn own_namespace(kind: &str) -> Result<u64, ProcError> {
    namespace(std::process::id(), kind)
}

/// The pod and container a cgroup path belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupPod {
    pub uid: String,
    pub container_id: Option<String>,
}

/// Reads the pod out of a cgroup path, for the cgroupfs and systemd drivers of the kubelet with
/// containerd and CRI-O. Only below a `kubepods` cgroup, and never below `user.slice`, where
/// users name cgroups as they like.
pub fn pod_of_cgroup(path: &str) -> Option<CgroupPod> {
    // containerd without a systemd driver on a systemd kubelet joins three parts with colons.
    let mut parts = path.split(['/', ':']).filter(|part| !part.is_empty());
    let mut below_kubepods = false;
    let uid = parts.find_map(|part| {
        if part == "user.slice" {
            return Some(None);
        }
        let slice = part.strip_suffix(".slice");
        let name = slice.unwrap_or(part);
        let is_root = name == "kubepods" || (slice.is_some() && name.ends_with("-kubepods"));
        below_kubepods |= is_root || name.starts_with("kubepods-") || name.contains("-kubepods-");
        if !below_kubepods {
            return None;
        }
        let after = match slice {
            Some(name) => name.rsplit_once("-pod")?.1,
            None => name.strip_prefix("pod")?,
        };
        pod_uid(after).map(Some)
    })??;
    Some(CgroupPod {
        uid,
        container_id: parts.find_map(container_id),
    })
}

/// `1f2e...` in its three spellings: dashed, with underscores (systemd), 32 digits (static pods).
fn pod_uid(text: &str) -> Option<String> {
    let dashed = text.replace('_', "-");
    let digits = dashed.bytes().filter(u8::is_ascii_hexdigit).count();
    let dashes: Vec<usize> = dashed.match_indices('-').map(|(at, _)| at).collect();
    let well_formed = digits == 32
        && match dashed.len() {
            32 => dashes.is_empty(),
            36 => dashes == [8, 13, 18, 23],
            _ => false,
        };
    well_formed.then_some(dashed)
}

/// `cri-containerd-ID.scope`, `crio-ID.scope`, `crio-ID` or plain `ID`.
fn container_id(part: &str) -> Option<String> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit_once('-').map_or(name, |(_, id)| id);
    let is_conmon = name.starts_with("crio-conmon-");
    let is_id = id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit());
    (is_id && !is_conmon).then(|| id.to_owned())
}

/// The path of /proc/PID/cgroup to go by: one that names a pod (hybrid nodes have a v2 line that
/// says only `/`), else the v2 one, else the first.
fn choose_cgroup(text: &str) -> (String, Option<CgroupPod>) {
    let paths = || {
        text.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let hierarchy = fields.next()?;
            fields.next()?;
            Some((hierarchy, fields.next()?))
        })
    };
    if let Some((path, pod)) = paths().find_map(|(_, path)| Some((path, pod_of_cgroup(path)?))) {
        return (path.to_owned(), Some(pod));
    }
    let path = paths()
        .find(|(hierarchy, _)| *hierarchy == "0")
        .or_else(|| paths().next())
        .map_or("/", |(_, path)| path);
    (path.to_owned(), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4fb5a8f1d3c2b1a09f8e7d6c5b4a39281706f5e4d3c2b1a09f8e7d6c5b4a3928";
    const UID: &str = "1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a5b";

    fn pod(path: &str) -> Option<(String, Option<String>)> {
        pod_of_cgroup(path).map(|p| (p.uid, p.container_id))
    }

    #[test]
    fn pods_are_read_from_every_driver_and_runtime() {
        let systemd = UID.replace('-', "_");
        let with_container = [
            format!("/kubepods/burstable/pod{UID}/{ID}"),
            format!("/kubepods/pod{UID}/{ID}"),
            format!("/kubepods/besteffort/pod{UID}/crio-{ID}"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{systemd}.slice/cri-containerd-{ID}.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{systemd}.slice/crio-{ID}.scope"),
            format!("/kubepods.slice/kubepods-pod{systemd}.slice/crio-{ID}.scope/container"),
            format!(
                "/system.slice/containerd.service/kubepods-besteffort-pod{systemd}.slice:cri-containerd:{ID}"
            ),
            format!(
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{systemd}.slice/cri-containerd-{ID}.scope"
            ),
            // As seen from a cgroup namespace of one's own.
            format!("/../../kubepods-burstable-pod{systemd}.slice/cri-containerd-{ID}.scope"),
        ];
        for path in with_container {
            assert_eq!(
                pod(&path),
                Some((UID.to_owned(), Some(ID.to_owned()))),
                "{path}"
            );
        }
    }

    #[test]
    fn static_pods_have_a_uid_without_dashes() {
        let uid = "0123456789abcdef0123456789abcdef";
        let path = format!(
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/crio-conmon-{ID}.scope"
        );
        assert_eq!(pod(&path), Some((uid.to_owned(), None)));
    }

    #[test]
    fn what_is_no_pod_is_none() {
        for path in [
            "/",
            "/system.slice/containerd.service",
            "/kubepods/burstable",
            "/kubepods/pod1234",
            "/user.slice/user-1000.slice/kubepods/pod1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a5b",
            "/machine/pod1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a5b",
            "/kubepods/pod1f2e3d4c-5b6a-4798-8a9b-0c1d2e3f4a5z",
        ] {
            assert_eq!(pod(path), None, "{path}");
        }
    }

    #[test]
    fn hybrid_nodes_name_the_pod_only_in_v1_hierarchies() {
        let text = format!("9:name=systemd:/kubepods/pod{UID}/{ID}\n4:memory:/x\n0::/\n");
        let (cgroup, pod) = choose_cgroup(&text);
        assert_eq!(cgroup, format!("/kubepods/pod{UID}/{ID}"));
        assert_eq!(pod.unwrap().uid, UID);
        assert_eq!(choose_cgroup("4:memory:/x\n0::/y\n").0, "/y");
        assert_eq!(choose_cgroup("4:memory:/x\n").0, "/x");
        assert_eq!(choose_cgroup("").0, "/");
    }

    #[test]
    fn a_command_may_contain_parentheses_and_spaces() {
        let text = "12 (a) R (b) S 7 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.ppid, stat.start_time), (7, 98765));
        assert!(parse_stat("12 (a S 7").is_none());
    }

    #[test]
    fn facts_of_this_process_are_consistent() {
        let pid = std::process::id();
        let facts = ProcessFacts::read(pid).unwrap();
        assert_eq!(facts.key(), key_of(pid).unwrap());
        assert_eq!(facts.uid, nix::unistd::geteuid().as_raw());
        assert!(facts.in_host_userns && facts.in_host_pidns);
        assert!(is_descendant(pid, facts.ppid));
        assert!(!is_descendant(facts.ppid, pid));
    }

    #[test]
    fn a_reaped_child_is_gone_and_a_live_one_is_a_descendant() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        assert!(descendants(std::process::id(), 4096).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        let read = ProcessFacts::read(child.id());
        assert!(matches!(read, Err(ProcError::Gone { .. })), "{read:?}");
    }
}
