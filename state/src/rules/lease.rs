//! A lease as hooks and listings see it: the record, its compiled scope, its deadline.

use std::ops::Deref;
use std::sync::Arc;

use crate::process::ProcessKey;
use crate::record::{Grace, LeaseRecord};
use crate::scope::CompiledScope;
use crate::time::{Boottime, Now};

/// A lease; never changes once published. Dereferences to its record.
#[derive(Debug, Clone)]
pub struct Lease {
    pub record: Arc<LeaseRecord>,
    /// Shared between renewals.
    pub scope: Arc<CompiledScope>,
    /// While the reboot grace is pending: until when it counts at least, once that is known.
    pub(super) grace_until: Option<Boottime>,
}

impl Deref for Lease {
    type Target = LeaseRecord;

    fn deref(&self) -> &LeaseRecord {
        &self.record
    }
}

impl Lease {
    /// When it stops counting. None: it has survived a reboot and no runtime is synchronised yet,
    /// so the end is not known.
    pub fn ends_at(&self) -> Option<Boottime> {
        let deadline = self.record.deadline.boottime;
        match self.record.grace {
            Grace::Pending => self.grace_until.map(|grace| grace.max(deadline)),
            Grace::Unused | Grace::Used => Some(deadline),
        }
    }

    /// Whether it counts. At the deadline itself it does not. Hooks ask this, so that a slow store
    /// neither shortens nor lengthens a lease.
    pub fn counts_at(&self, at: Boottime) -> bool {
        self.ends_at().is_none_or(|end| at < end)
    }

    /// Whether the process is one of its holders.
    pub fn is_held_by(&self, process: ProcessKey) -> bool {
        let mut holders = self.record.holders.iter();
        holders.any(|holder| holder.facts.process == process)
    }

    /// Time left; while the end is not known, what is left without grace.
    pub fn left(&self, now: &Now) -> std::time::Duration {
        now.until(self.ends_at().unwrap_or(self.record.deadline.boottime))
    }
}
