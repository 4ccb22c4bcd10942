//! Is a plugin really there for this request? The two sources put together: the runtime's list and
//! the kernel's word on the holders' connections.

use std::cell::Cell;
use std::time::{Duration, Instant};

use nri_lease_proto::nri::nri::PluginInstance;
use nri_lease_state::record::Holder;
use nri_lease_state::rules::Lease;
use nri_lease_state::{PluginName, ProcessKey};

use crate::presence::{Presence, RuntimeId, View};

/// Why a plugin counts as missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// A pin or an annotation names it and it has no lease.
    NoLease,
    /// Its lease has no holder any more.
    NoHolder,
    /// None of its holders is connected; this one is closest to it.
    Holder { pid: u32, presence: Presence },
    /// The kernel sees it connected, but the runtime has not called it for this request.
    NotListed,
    /// The runtime knows a plugin of that name at another index than the lease says.
    OtherIndex { listed: String, registered: String },
    /// The runtime calls it after us, or in an undefined order.
    CalledAfterUs { index: u8, ours: u8 },
}

/// Where a decision learns whether a plugin is there.
pub trait Evidence {
    /// `lease` is the plugin's live lease, if it has one.
    ///
    /// # Errors
    /// Why the plugin counts as missing.
    fn present(&self, plugin: &PluginName, lease: Option<&Lease>) -> Result<(), Missing>;

    /// Whether the runtime's list names the plugin; `None` when there is no list.
    fn listed(&self, plugin: &PluginName) -> Option<bool>;
}

/// Time that all on-the-spot fences of one hook may take together.
const BIND_BUDGET: Duration = Duration::from_millis(10);

/// Evidence for one request of one runtime.
pub struct Live<'a> {
    view: &'a View,
    runtime: RuntimeId,
    /// `None` for sandboxes, for runtimes without validation, and outside of hooks.
    list: Option<&'a [PluginInstance]>,
    /// Set for sandboxes: plugins that are not called before this index count as missing.
    only_below: Option<u8>,
    /// Inside a hook, a connection that is not yet bound may be fenced on the spot.
    bind_until: Option<Instant>,
    /// Fences were tried; the time is used up once.
    tried: Cell<u32>,
}

impl<'a> Live<'a> {
    /// For `explain`: what the kernel says now.
    pub fn outside_hooks(view: &'a View, runtime: RuntimeId) -> Self {
        Self {
            view,
            runtime,
            list: None,
            only_below: None,
            bind_until: None,
            tried: Cell::new(0),
        }
    }

    /// For a hook of `runtime` that is running now.
    pub fn in_hook(view: &'a View, runtime: RuntimeId) -> Self {
        Self {
            bind_until: Some(Instant::now() + BIND_BUDGET),
            ..Self::outside_hooks(view, runtime)
        }
    }

    /// The plugins that the runtime says it called.
    pub fn with_list(self, list: &'a [PluginInstance]) -> Self {
        Self {
            list: Some(list),
            ..self
        }
    }

    /// Only plugins called before the index `ours` can have been seen to answer.
    pub fn only_below(self, ours: u8) -> Self {
        Self {
            only_below: Some(ours),
            ..self
        }
    }

    fn holder(&self, holder: &Holder) -> Result<(), Missing> {
        let process = holder.facts.process;
        if let (Some(ours), Some(index)) = (self.only_below, holder.settings.index)
            && index.number() >= ours
        {
            return Err(Missing::CalledAfterUs {
                index: index.number(),
                ours,
            });
        }
        match self.connection(&process, holder.facts.connection_inode) {
            Presence::Bound => Ok(()),
            // Where the kernel cannot be asked at all, the runtime's list decides alone; `status`
            // says so. One process that cannot be looked at is no evidence for it.
            Presence::Unknown { .. } if self.view.kernel_evidence().is_err() => Ok(()),
            presence => Err(Missing::Holder {
                pid: process.pid,
                presence,
            }),
        }
    }

    fn connection(&self, process: &ProcessKey, inode: Option<u64>) -> Presence {
        let seen = self.view.check(process, self.runtime, inode);
        let may_have_reconnected = !matches!(
            seen,
            Presence::Bound | Presence::Unknown { .. } | Presence::ProcessGone
        );
        let budget = self.bind_until.map_or(Duration::ZERO, |end| {
            end.saturating_duration_since(Instant::now())
        });
        if may_have_reconnected && !budget.is_zero() {
            self.tried.set(self.tried.get() + 1);
            return self.view.bind_in_hook(process, self.runtime, inode, budget);
        }
        seen
    }

    fn in_list(&self, plugin: &PluginName, holder: &Holder) -> Result<(), Missing> {
        let Some(list) = self.list else {
            return Ok(());
        };
        let mut named = list.iter().filter(|one| one.name == plugin.as_str());
        let Some(first) = named.clone().next() else {
            return Err(Missing::NotListed);
        };
        match holder.settings.index {
            Some(index) if !named.any(|one| one.index == index.to_string()) => {
                Err(Missing::OtherIndex {
                    listed: first.index.clone(),
                    registered: index.to_string(),
                })
            }
            _ => Ok(()),
        }
    }
}

impl Evidence for Live<'_> {
    fn present(&self, plugin: &PluginName, lease: Option<&Lease>) -> Result<(), Missing> {
        let lease = lease.ok_or(Missing::NoLease)?;
        let mut closest = Missing::NoHolder;
        for holder in &lease.holders {
            match self
                .holder(holder)
                .and_then(|()| self.in_list(plugin, holder))
            {
                Ok(()) => return Ok(()),
                Err(missing) => {
                    if nearness(&missing) >= nearness(&closest) {
                        closest = missing;
                    }
                }
            }
        }
        Err(closest)
    }

    fn listed(&self, plugin: &PluginName) -> Option<bool> {
        self.list
            .map(|list| list.iter().any(|one| one.name == plugin.as_str()))
    }
}

/// Of several holders, the one that is closest to being present explains best.
fn nearness(missing: &Missing) -> u8 {
    match missing {
        Missing::NoLease => 0,
        Missing::NoHolder => 1,
        Missing::Holder { presence, .. } => match presence {
            Presence::ProcessGone => 2,
            Presence::NeverConnected => 3,
            Presence::Broken => 4,
            Presence::Pending => 5,
            Presence::NotSynchronised => 6,
            Presence::Bound | Presence::Unknown { .. } => 7,
        },
        Missing::CalledAfterUs { .. } => 8,
        Missing::OtherIndex { .. } => 9,
        Missing::NotListed => 10,
    }
}
