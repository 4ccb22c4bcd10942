//! What callers leave for the writer. The lock is held to push and to take, never during I/O.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Write;
use super::contents::{Changes, Key, Value};
use super::database::SEGMENT_BYTES;
use super::error::CommitError;
use super::ticket::Promise;

/// Groups that may wait; with more the disk is too slow and callers had better hear of it.
pub(super) const GROUPS_MAX: usize = 4096;
/// Bytes of groups made durable together. A quarter of a sled segment: sled may write over a freed
/// segment two segments later, so barriers must come more often than segments.
const BATCH_BYTES: usize = SEGMENT_BYTES / 4;

#[derive(Debug)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Gives writes of both kinds one order.
    next_position: u64,
    groups: VecDeque<Group>,
    soon: HashMap<Key, (u64, Option<Value>)>,
    soon_since: Option<Instant>,
    mirror_since: Option<Instant>,
    closing: bool,
}

#[derive(Debug)]
struct Group {
    position: u64,
    writes: Vec<(Key, Option<Value>)>,
    promise: Promise,
}

/// What the writer has to do next.
#[derive(Debug)]
pub(super) struct Taken {
    /// What results from all writes taken, in their order.
    pub all: Changes,
    /// What results from the `write_soon` among them: applied in memory even when the disk fails.
    pub soon: Changes,
    pub promises: Vec<Promise>,
    pub mirror: bool,
    /// Closing, and nothing is left.
    pub last: bool,
}

/// When the writer wants to be woken if no group arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wake {
    pub soon_delay: Duration,
    pub mirror_delay: Duration,
    /// Next attempt to heal.
    pub at: Option<Instant>,
}

fn shared(writes: Vec<Write>) -> impl Iterator<Item = (Key, Option<Value>)> {
    writes
        .into_iter()
        .map(|write| ((write.tree, write.key.into()), write.value.map(Value::from)))
}

impl Queue {
    pub fn new() -> Self {
        Self {
            waiting: Mutex::new(Waiting::default()),
            wake: Condvar::new(),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // Nothing that holds this lock can panic half way through a change that matters.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push_group(&self, writes: Vec<Write>, promise: Promise) {
        let mut waiting = self.waiting();
        let refusal = if waiting.closing {
            Some(CommitError::Closed)
        } else if waiting.groups.len() >= GROUPS_MAX {
            Some(CommitError::QueueFull { limit: GROUPS_MAX })
        } else {
            None
        };
        if let Some(refusal) = refusal {
            drop(waiting);
            return promise.answer(Err(refusal));
        }
        let position = waiting.position();
        waiting.groups.push_back(Group {
            position,
            writes: shared(writes).collect(),
            promise,
        });
        drop(waiting);
        self.wake.notify_one();
    }

    pub fn push_soon(&self, writes: Vec<Write>) {
        let mut waiting = self.waiting();
        for (key, value) in shared(writes) {
            let position = waiting.position();
            waiting.soon.insert(key, (position, value));
        }
        if !waiting.soon.is_empty() && waiting.soon_since.is_none() {
            waiting.soon_since = Some(Instant::now());
            drop(waiting);
            self.wake.notify_one();
        }
    }

    pub fn want_mirror(&self) {
        let mut waiting = self.waiting();
        if waiting.mirror_since.is_none() {
            waiting.mirror_since = Some(Instant::now());
            drop(waiting);
            self.wake.notify_one();
        }
    }

    pub fn close(&self) {
        self.waiting().closing = true;
        self.wake.notify_one();
    }

    /// Nobody takes anything any more: what waits is refused, and so is what comes.
    pub fn abandon(&self) {
        let mut waiting = self.waiting();
        waiting.closing = true;
        let groups = std::mem::take(&mut waiting.groups);
        drop(waiting);
        // Their promises answer as they are dropped.
        drop(groups);
    }

    /// Waits until there is something to do, and takes it.
    pub fn next(&self, wake: Wake) -> Taken {
        let mut waiting = self.waiting();
        loop {
            let now = Instant::now();
            let due = |since: Option<Instant>, delay| since.map(|since| since + delay);
            let next = [
                due(waiting.soon_since, wake.soon_delay),
                due(waiting.mirror_since, wake.mirror_delay),
                wake.at,
            ]
            .into_iter()
            .flatten()
            .min();
            if waiting.closing || !waiting.groups.is_empty() || next.is_some_and(|at| at <= now) {
                let mirror_due = due(waiting.mirror_since, wake.mirror_delay);
                let mirror = waiting.closing || mirror_due.is_some_and(|at| at <= now);
                return waiting.take(mirror);
            }
            waiting = match next {
                Some(at) => {
                    self.wake
                        .wait_timeout(waiting, at - now)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
                None => self
                    .wake
                    .wait(waiting)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl Waiting {
    fn position(&mut self) -> u64 {
        self.next_position += 1;
        self.next_position
    }

    /// Takes all `soon` writes (a later group for the same key must not overtake them) and groups
    /// up to [`BATCH_BYTES`].
    fn take(&mut self, mirror: bool) -> Taken {
        self.soon_since = None;
        if mirror {
            self.mirror_since = None;
        }
        let mut soon = Changes::new();
        let mut newest: HashMap<Key, u64> = HashMap::new();
        let mut all = Changes::new();
        for (key, (position, value)) in self.soon.drain() {
            newest.insert(key.clone(), position);
            soon.insert(key.clone(), value.clone());
            all.insert(key, value);
        }
        let mut promises = Vec::new();
        let mut bytes = 0;
        while bytes < BATCH_BYTES
            && let Some(group) = self.groups.pop_front()
        {
            for (key, value) in group.writes {
                bytes += key.1.len() + value.as_ref().map_or(0, |value| value.len());
                if newest.get(&key).is_none_or(|at| *at < group.position) {
                    all.insert(key, value);
                }
            }
            promises.push(group.promise);
        }
        Taken {
            all,
            soon,
            promises,
            mirror,
            last: self.closing && self.groups.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Ticket;
    use super::*;

    #[test]
    fn groups_beyond_the_limit_are_refused_at_once_and_abandoned_ones_answered() {
        let queue = Queue::new();
        let push = || {
            let (promise, ticket) = Ticket::pair();
            queue.push_group(Vec::new(), promise);
            ticket
        };
        let waiting: Vec<_> = (0..GROUPS_MAX).map(|_| push()).collect();
        assert_eq!(
            push().wait(),
            Err(CommitError::QueueFull { limit: GROUPS_MAX })
        );
        queue.abandon();
        for ticket in waiting {
            assert_eq!(ticket.wait(), Err(CommitError::Closed));
        }
        assert_eq!(push().wait(), Err(CommitError::Closed));
    }
}
