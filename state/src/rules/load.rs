//! From stored records to the state: rule 6.

use std::sync::Arc;

use super::limits::Limits;
use super::state::State;
use super::{Change, Durability};
use crate::record::{GoneHolder, Grace, LeaseRecord, Record, RecordError, RecordKey};
use crate::time::{Deadline, Now};

/// Where the records come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// The database: deadlines are as fresh as the last write.
    Database,
    /// The mirror, which is not written at renewals: each lease gets at least min(TTL,
    /// reboot_grace) from now.
    Mirror,
}

/// A record that could not be used as it is.
#[derive(Debug)]
pub struct LoadIssue {
    pub key: RecordKey,
    pub problem: LoadProblem,
}

/// What is wrong with a stored record.
#[derive(Debug, thiserror::Error)]
pub enum LoadProblem {
    /// It is left out, and left in the store.
    #[error("left out: {0}")]
    Unreadable(#[from] RecordError),
    /// The lease counts, and covers everything, until the plugin registers again.
    #[error("the lease covers everything until its plugin registers again: {0}")]
    Scope(#[from] crate::scope::ScopeError),
}

/// What a daemon starts with.
#[derive(Debug)]
pub struct Loaded {
    pub state: State,
    /// What another boot, or the mirror, made of the records: to be written with a barrier.
    pub changes: Vec<Change>,
    pub issues: Vec<LoadIssue>,
}

impl Loaded {
    /// How durable the changes must be before the state counts.
    pub fn durability(&self) -> Durability {
        if self.changes.is_empty() {
            Durability::None
        } else {
            Durability::Barrier
        }
    }
}

impl State {
    /// Rebuilds the state. What has ended meanwhile is still in it, does not count, and goes with
    /// the first tick, which tells about it.
    pub fn load(
        records: impl IntoIterator<Item = (RecordKey, Vec<u8>)>,
        recovery: Recovery,
        now: &Now,
        limits: &Limits,
    ) -> Loaded {
        let mut loaded = Loaded {
            state: State::new(),
            changes: Vec::new(),
            issues: Vec::new(),
        };
        for (key, bytes) in records {
            match Record::decode(&key, &bytes) {
                Ok(record) => loaded.take(key, record, recovery, now, limits),
                Err(error) => loaded.issues.push(LoadIssue {
                    key,
                    problem: error.into(),
                }),
            }
        }
        loaded
    }
}

impl Loaded {
    fn take(
        &mut self,
        key: RecordKey,
        stored: Record,
        recovery: Recovery,
        now: &Now,
        limits: &Limits,
    ) {
        if let Record::Lease(lease) = &stored
            && let Err(error) = lease.settings.scope.compile()
        {
            self.issues.push(LoadIssue {
                key: key.clone(),
                problem: error.into(),
            });
        }
        let record = carried_over(stored.clone(), recovery, now, limits);
        self.state.set(&key, Some(record.clone()));
        if record != stored {
            self.changes.push(Change {
                key,
                before: Some(stored),
                after: Some(record),
            });
        }
    }
}

/// The record as it counts in this boot.
fn carried_over(record: Record, recovery: Recovery, now: &Now, limits: &Limits) -> Record {
    match record {
        Record::Lease(lease) => {
            let mut lease = Arc::unwrap_or_clone(lease);
            if lease.deadline.boot_id != now.boot_id {
                lease.rebooted(now);
            }
            if recovery == Recovery::Mirror {
                let at_least = lease.settings.ttl.get().min(limits.reboot_grace);
                if now.until(lease.deadline.boottime) < at_least {
                    lease.deadline = Deadline::after(now, at_least);
                }
            }
            Record::Lease(Arc::new(lease))
        }
        Record::Pin(pin) => {
            let mut pin = Arc::unwrap_or_clone(pin);
            if pin.deadline.boot_id != now.boot_id {
                // Its sandbox is gone, its pod may be started again with the same uid.
                pin.seen_on = None;
            }
            pin.deadline = pin.deadline.carried_to(now, pin.ttl.get());
            Record::Pin(Arc::new(pin))
        }
        Record::Ban(ban) => {
            let mut ban = Arc::unwrap_or_clone(ban);
            ban.deadline = ban.deadline.carried_to(now, ban.duration.get());
            Record::Ban(Arc::new(ban))
        }
        Record::Pause(pause) => {
            let mut pause = Arc::unwrap_or_clone(pause);
            pause.deadline = pause.deadline.carried_to(now, pause.duration.get());
            Record::Pause(Arc::new(pause))
        }
        record @ (Record::Sandbox(_) | Record::Meta(_)) => record,
    }
}

impl LeaseRecord {
    /// Another boot: what the wall clock says is left, no process lives, and the grace waits for
    /// the first Synchronize unless it was used since the last renewal.
    fn rebooted(&mut self, now: &Now) {
        self.deadline = self.deadline.carried_to(now, self.settings.ttl.get());
        if self.grace != Grace::Used {
            self.grace = Grace::Pending;
        }
        let newest = self
            .holders
            .iter()
            .max_by_key(|h| (h.facts.process.start_time, h.facts.process.pid));
        if let Some(newest) = newest {
            self.last_holder = Some(GoneHolder {
                pid: newest.facts.process.pid,
                gone_at: now.wall,
            });
            self.holders.clear();
            self.generation = self.generation.saturating_add(1);
        }
    }
}
