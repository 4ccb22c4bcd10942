//! Registrations that wait until what they find is bound.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::super::binding::Presence;
use super::super::proc::ProcessKey;
use super::super::tracker::{RuntimeId, Settled};
use super::super::view::Unwatched;
use super::{Actor, Runtime, Settling};

/// How often a process is scanned while its registration waits for it.
const SETTLE_SCAN: Duration = Duration::from_millis(5);
/// How long a process is kept that has been settled but is in no lease yet.
const KEEP_SETTLED: Duration = Duration::from_secs(10);

impl Actor {
    pub(super) fn settle(
        &mut self,
        key: ProcessKey,
        deadline: Duration,
        reply: oneshot::Sender<Settled>,
    ) {
        self.track(key);
        let now = Instant::now();
        if let Some(tracked) = self.processes.get_mut(&key) {
            tracked.keep_until = now + KEEP_SETTLED;
        }
        self.verify_process(key);
        self.settling.push(Settling {
            process: key,
            deadline: now + deadline,
            next_scan: now,
            reply,
        });
    }

    pub(super) fn scan_settling(&mut self) {
        let now = Instant::now();
        let due: Vec<ProcessKey> = self
            .settling
            .iter_mut()
            .filter(|s| s.next_scan <= now)
            .map(|s| {
                s.next_scan = now + SETTLE_SCAN;
                s.process
            })
            .collect();
        for key in due {
            self.scan_process(key);
        }
    }

    pub(super) fn answer(&mut self) {
        for reply in self.scanned.drain(..) {
            let _ = reply.send(());
        }
        let now = Instant::now();
        for settling in std::mem::take(&mut self.settling) {
            match self.how_settled(settling.process, now >= settling.deadline) {
                Some(settled) => {
                    let _ = settling.reply.send(settled);
                }
                None if settling.reply.is_closed() => {}
                None => self.settling.push(settling),
            }
        }
    }

    /// `None`: wait on.
    pub(super) fn how_settled(&self, key: ProcessKey, is_late: bool) -> Option<Settled> {
        let Some(tracked) = self.processes.get(&key) else {
            return Some(Settled::NothingToBind);
        };
        match tracked.process {
            Err(Unwatched::Gone) => return Some(Settled::ProcessGone),
            Err(Unwatched::Failed(_)) => return Some(Settled::NoEvidence),
            Ok(_) => {}
        }
        if self.netns.is_none() {
            return Some(Settled::NoEvidence);
        }
        // A runtime whose socket refuses fences binds nothing soon, and is not waited for.
        let waits = |(id, r): (&RuntimeId, &Runtime)| {
            (r.failures == 0 || r.fence.is_some())
                && tracked.bindings.wants_fence(&self.identity(*id))
        };
        let is_waiting = tracked.bindings.has_pending() || self.runtimes.iter().any(waits);
        let is_bound = self
            .identities()
            .iter()
            .any(|i| tracked.bindings.presence(i, None, |_| Ok(true)) == Presence::Bound);
        match (is_waiting, is_bound) {
            (true, _) if is_late => Some(Settled::Deadline),
            (true, _) => None,
            (false, true) => Some(Settled::Bound),
            (false, false) => Some(Settled::NothingToBind),
        }
    }
}
