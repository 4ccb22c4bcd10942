//! What others may ask about the store at any time, without waiting for it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::CommitError;

/// Can the store write?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Healthy,
    /// Commits fail with `error`; records are served from memory. `since` is when it began.
    Failing {
        since: Instant,
        error: String,
    },
}

/// What was done since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Groups of writes made durable together, each with one fdatasync of the database file.
    pub barriers: u64,
    /// Values written or removed.
    pub writes: u64,
    /// Times `leases.json` was written.
    pub mirror_writes: u64,
    /// Times writing `leases.json` failed (it is tried again).
    pub mirror_failures: u64,
    /// Barriers that failed.
    pub write_failures: u64,
    /// Attempts to reopen the database after a failure.
    pub reopen_attempts: u64,
    /// Times the database was rebuilt because it had grown too large.
    pub compactions: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub barriers: AtomicU64,
    pub writes: AtomicU64,
    pub mirror_writes: AtomicU64,
    pub mirror_failures: AtomicU64,
    pub write_failures: AtomicU64,
    pub reopen_attempts: AtomicU64,
    pub compactions: AtomicU64,
}

/// Shared by the handle, the writer and the mirror's thread.
#[derive(Debug)]
pub(super) struct Status {
    path: PathBuf,
    stall_after: Duration,
    started: Instant,
    counts: Counts,
    /// Spares the healthy path the lock below.
    is_failing: AtomicBool,
    failing: Mutex<Option<Failing>>,
    /// When the barrier under way began, in ms since `started`, plus one; 0 when there is none.
    barrier_since: AtomicU64,
}

#[derive(Clone, Debug)]
struct Failing {
    since: Instant,
    reason: String,
    retry_at: Instant,
}

impl Status {
    pub fn new(path: PathBuf, stall_after: Duration) -> Self {
        Self {
            path,
            stall_after,
            started: Instant::now(),
            counts: Counts::default(),
            is_failing: AtomicBool::new(false),
            failing: Mutex::new(None),
            barrier_since: AtomicU64::new(0),
        }
    }

    pub fn count(&self, which: impl FnOnce(&Counts) -> &AtomicU64) -> &AtomicU64 {
        which(&self.counts)
    }

    pub fn counters(&self) -> Counters {
        let counts = &self.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counters {
            barriers: read(&counts.barriers),
            writes: read(&counts.writes),
            mirror_writes: read(&counts.mirror_writes),
            mirror_failures: read(&counts.mirror_failures),
            write_failures: read(&counts.write_failures),
            reopen_attempts: read(&counts.reopen_attempts),
            compactions: read(&counts.compactions),
        }
    }

    fn failing(&self) -> MutexGuard<'_, Option<Failing>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn barrier_begins(&self) {
        let ms = self.started.elapsed().as_millis() as u64 + 1;
        self.barrier_since.store(ms, Ordering::Release);
    }

    pub fn barrier_ends(&self) {
        self.barrier_since.store(0, Ordering::Release);
    }

    /// The store cannot write; the next attempt to heal is at `retry_at`.
    pub fn fails(&self, reason: &str, retry_at: Instant) {
        let mut failing = self.failing();
        let since = failing
            .as_ref()
            .map_or_else(Instant::now, |failing| failing.since);
        *failing = Some(Failing {
            since,
            reason: reason.to_owned(),
            retry_at,
        });
        self.is_failing.store(true, Ordering::Release);
    }

    pub fn healed(&self) {
        let mut failing = self.failing();
        *failing = None;
        self.is_failing.store(false, Ordering::Release);
    }

    /// Why a commit would fail now.
    pub fn refusal(&self) -> Option<CommitError> {
        self.trouble().map(|(_, error)| error)
    }

    pub fn health(&self) -> Health {
        match self.trouble() {
            None => Health::Healthy,
            Some((since, error)) => Health::Failing {
                since,
                error: error.to_string(),
            },
        }
    }

    fn trouble(&self) -> Option<(Instant, CommitError)> {
        if self.is_failing.load(Ordering::Acquire)
            && let Some(failing) = self.failing().clone()
        {
            let left = failing.retry_at.saturating_duration_since(Instant::now());
            let error = CommitError::CannotWrite {
                path: self.path.clone(),
                reason: failing.reason,
                retry_in_seconds: left.as_millis().div_ceil(1000) as u64,
            };
            return Some((failing.since, error));
        }
        let since_ms = self.barrier_since.load(Ordering::Acquire).checked_sub(1)?;
        let since = self.started + Duration::from_millis(since_ms);
        let waited = since.elapsed();
        (waited >= self.stall_after).then(|| {
            let error = CommitError::Stalled {
                path: self.path.clone(),
                for_seconds: waited.as_secs(),
            };
            (since, error)
        })
    }
}
