//! The published state: what a hook reads.
use super::binding::{ConnectionInfo, Presence};
use super::proc::ProcessKey;
use super::tracker::RuntimeId;
use std::time::Duration;

/// An immutable picture of all tracked processes and their connections.
#[derive(Default)]
pub struct View {}

impl View {
    /// Is the process present for the runtime, at this moment, by the kernel's word? A few
    /// system calls; takes no lock that anything slow holds. With `inode`, only that connection
    /// of the process counts.
    pub fn check(
        &self,
        _process: &ProcessKey,
        _runtime: RuntimeId,
        _inode: Option<u64>,
    ) -> Presence {
        Presence::NeverConnected
    }

    /// [`View::check`] for a hook that would otherwise refuse: looks for a connection that is
    /// accepted and not yet bound, and fences it on the spot, waiting at most `budget` (capped
    /// at 10 ms). Only valid inside a hook of that runtime, which holds the plugin list still.
    pub fn bind_in_hook(
        &self,
        process: &ProcessKey,
        runtime: RuntimeId,
        inode: Option<u64>,
        _budget: Duration,
    ) -> Presence {
        self.check(process, runtime, inode)
    }

    /// The connections of a process as last seen, for `inspect`.
    pub fn connections(&self, _process: &ProcessKey) -> Vec<ConnectionInfo> {
        Vec::new()
    }
}
