//! What hooks read: an immutable picture, replaced as a whole.

use std::sync::Arc;

use arc_swap::ArcSwap;
use nri_lease_state::rules::State;
use nri_lease_state::time::Boottime;

use super::policy::Policy;

/// The state of all leases and the policy in force. Cheap to make: the state's maps are shared.
#[derive(Debug)]
pub struct Snapshot {
    pub state: State,
    pub policy: Arc<Policy>,
    /// The leases were lost with the store: new pods wait until then, so that plugins can register
    /// again.
    pub hold_until: Option<Boottime>,
}

/// Where the current snapshot is found, without a lock.
pub type Published = Arc<ArcSwap<Snapshot>>;
