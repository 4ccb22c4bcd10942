//! The writer thread: takes what is queued, makes it durable, answers; heals what fails.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Options;
use super::contents::Contents;
use super::database::Barrier;
use super::engine::{Engine, Failure, FailureKind};
use super::error::CommitError;
use super::files::Files;
use super::health::Status;
use super::lock::Lock;
use super::mirror::Mirror;
use super::queue::{Queue, Taken, Wake};
use super::rebuild::{Old, rebuild};

pub(super) struct Writer {
    pub files: Files,
    pub options: Options,
    pub queue: Arc<Queue>,
    pub status: Arc<Status>,
    pub mirror: Mirror,
    pub contents: Contents,
    pub state: State,
    /// The directory is ours until the last file is closed.
    pub lock: Lock,
    /// Raised when a database is this large although it was just rebuilt.
    pub compact_above_bytes: u64,
}

pub(super) enum State {
    Working(Engine),
    Broken {
        old: Old,
        retry_at: Instant,
        pause: Duration,
    },
}

impl Writer {
    /// Runs until the queue is closed and empty.
    pub fn run(mut self) {
        loop {
            let taken = self.queue.next(Wake {
                soon_delay: self.options.soon_delay,
                mirror_delay: self.options.mirror_delay,
                at: match self.state {
                    State::Working(_) => None,
                    State::Broken { retry_at, .. } => Some(retry_at),
                },
            });
            let (mirror, last) = (taken.mirror, taken.last);
            self.heal_if_due(last);
            self.write(taken);
            if mirror {
                self.mirror.want(self.contents.mirrored());
            }
            if last {
                return self.close();
            }
        }
    }

    fn write(&mut self, taken: Taken) {
        if taken.all.is_empty() && taken.promises.is_empty() {
            return;
        }
        let State::Working(engine) = &self.state else {
            return self.refuse(taken);
        };
        let barrier = Barrier {
            sequence: self.contents.sequence + 1,
            digest: self.contents.digest_after(&taken.all),
        };
        let count = taken.all.len() as u64;
        self.status.barrier_begins();
        let applied = engine.apply(taken.all, barrier, self.options.stuck_after);
        match applied {
            Ok(applied) => {
                self.contents.apply(applied.changes);
                self.contents.sequence = barrier.sequence;
                self.status.barrier_ends();
                self.count_barrier(count);
                for promise in taken.promises {
                    promise.answer(Ok(()));
                }
                self.compact_if_large(applied.file_bytes);
            }
            Err(failure) => {
                self.status
                    .count(|counts| &counts.write_failures)
                    .fetch_add(1, Ordering::Relaxed);
                self.break_down(&failure, self.options.retry_min);
                self.status.barrier_ends();
                self.refuse(Taken {
                    all: Default::default(),
                    ..taken
                });
            }
        }
    }

    fn count_barrier(&self, writes: u64) {
        self.status
            .count(|counts| &counts.barriers)
            .fetch_add(1, Ordering::Relaxed);
        self.status
            .count(|counts| &counts.writes)
            .fetch_add(writes, Ordering::Relaxed);
    }

    /// Groups fail; what may be written later is kept in memory, from which everything is rebuilt.
    fn refuse(&mut self, taken: Taken) {
        self.contents.apply(taken.soon);
        let error = self.status.refusal().unwrap_or(CommitError::Closed);
        for promise in taken.promises {
            promise.answer(Err(error.clone()));
        }
    }

    fn break_down(&mut self, failure: &Failure, pause: Duration) {
        // Jitter, so that stores which failed together do not come back together.
        let retry_at = Instant::now() + pause.mul_f64(0.75 + 0.5 * fastrand::f64());
        let old = match failure.kind {
            FailureKind::Refused | FailureKind::Locked => Old::Remove,
            FailureKind::Damaged | FailureKind::Stuck => Old::SetAside,
        };
        tracing::error!(
            path = %self.files.database().display(), reason = failure.reason,
            "the lease store cannot write; leases are served from memory"
        );
        self.status.fails(&failure.reason, retry_at);
        // The old engine, if any, closes on its own thread: it may hang.
        self.state = State::Broken {
            old,
            retry_at,
            pause,
        };
    }

    fn heal_if_due(&mut self, at_once: bool) {
        let State::Broken {
            old,
            retry_at,
            pause,
        } = self.state
        else {
            return;
        };
        if !at_once && Instant::now() < retry_at {
            return;
        }
        self.status
            .count(|counts| &counts.reopen_attempts)
            .fetch_add(1, Ordering::Relaxed);
        match rebuild(&self.files, &self.contents, old, self.options.stuck_after) {
            Ok(engine) => {
                self.state = State::Working(engine);
                self.status.healed();
                tracing::info!(path = %self.files.database().display(), "the lease store writes again");
            }
            Err(failure) => {
                let pause = (pause * 2).min(self.options.retry_max);
                self.break_down(&failure, pause);
                // What the first failure said about the old files stays true.
                if let State::Broken { old: kept, .. } = &mut self.state
                    && old == Old::SetAside
                {
                    *kept = old;
                }
            }
        }
    }

    fn compact_if_large(&mut self, file_bytes: u64) {
        if file_bytes <= self.compact_above_bytes {
            return;
        }
        let State::Working(engine) = std::mem::replace(
            &mut self.state,
            State::Broken {
                old: Old::Remove,
                retry_at: Instant::now(),
                pause: self.options.retry_min,
            },
        ) else {
            return;
        };
        self.status
            .count(|counts| &counts.compactions)
            .fetch_add(1, Ordering::Relaxed);
        let rebuilt = engine.close(self.options.stuck_after).and_then(|()| {
            rebuild(
                &self.files,
                &self.contents,
                Old::Remove,
                self.options.stuck_after,
            )
        });
        match rebuilt {
            Ok(engine) => {
                self.state = State::Working(engine);
                let file = self.files.database().join("db");
                let rebuilt_bytes = file.metadata().map_or(0, |metadata| metadata.len());
                self.compact_above_bytes = self.options.compact_above_bytes.max(2 * rebuilt_bytes);
            }
            Err(failure) => self.break_down(&failure, self.options.retry_min),
        }
    }

    fn close(self) {
        let limit = self.options.stuck_after;
        self.mirror.close(limit);
        if let State::Working(engine) = self.state
            && let Err(failure) = engine.close(limit)
        {
            tracing::warn!(
                reason = failure.reason,
                "the lease store did not close cleanly"
            );
        }
        drop(self.lock);
    }
}
