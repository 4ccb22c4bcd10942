//! Facts about a process, read from /proc and robust against pid reuse.
use serde::{Deserialize, Serialize};

/// A process for its whole life: a pid alone may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessKey {
    pub pid: u32,
    /// Field 22 of /proc/PID/stat: clock ticks after boot.
    pub start_time: u64,
}

/// What the kernel says about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    pub pid: u32,
    pub start_time: u64,
    /// The effective uid, as the host sees it.
    pub uid: u32,
    pub ppid: u32,
    /// The cgroup path (v2, else the named systemd hierarchy of v1, else memory); `/` for none.
    pub cgroup: String,
    /// The Kubernetes pod uid out of the cgroup path, in its dashed form.
    pub pod_uid: Option<String>,
    pub container_id: Option<String>,
    pub netns_inode: u64,
    pub in_host_userns: bool,
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
    Read {
        path: String,
        source: std::io::Error,
    },
    /// /proc did not look as expected.
    #[error("{path} does not look as expected: {what}")]
    Malformed { path: String, what: &'static str },
}

impl ProcessFacts {
    /// Reads all facts; the start time is read before and after, so that they belong together.
    pub fn read(pid: u32) -> Result<Self, ProcError> {
        Err(ProcError::Gone { pid })
    }

    pub fn key(&self) -> ProcessKey {
        ProcessKey {
            pid: self.pid,
            start_time: self.start_time,
        }
    }
}

impl ProcessKey {
    /// The process that has this pid now.
    pub fn of(pid: u32) -> Result<Self, ProcError> {
        Err(ProcError::Gone { pid })
    }
}

/// Whether `pid` is a descendant of `ancestor` (or the same process).
pub fn is_descendant(pid: u32, ancestor: u32) -> bool {
    pid == ancestor
}
