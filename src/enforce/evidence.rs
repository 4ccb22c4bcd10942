//! Is a plugin really there for this request? The two sources put together: the runtime's list and
//! the kernel's word on the holders' connections.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nri_lease_proto::nri::nri::PluginInstance;
use nri_lease_state::record::Holder;
use nri_lease_state::rules::Lease;
use nri_lease_state::{PluginName, ProcessKey};

use super::listings::Listings;
use crate::presence::{BoundConnections, Presence, RuntimeId, SocketId, View};

/// Why a plugin counts as missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// A pin or an annotation names it and it has no lease.
    NoLease,
    /// Its lease has no holder any more.
    NoHolder,
    /// None of its holders is connected; this one is closest to it.
    Holder {
        pid: u32,
        presence: Presence,
        /// When, inside of hooks, for a connection that was lost.
        lost: Option<LostWhen>,
    },
    /// The holder hosts several plugins, has lost a connection, and it is not known whose.
    InDoubt { pid: u32 },
    /// The kernel sees it connected, but the runtime has not called it for this request.
    NotListed,
    /// The runtime knows a plugin of that name at another index than the lease says.
    OtherIndex { listed: String, registered: String },
    /// The runtime calls it after us, or in an undefined order.
    CalledAfterUs { index: u8, ours: u8 },
}

/// When a connection was lost, as far as can be told: it is looked at every second and in hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LostWhen {
    /// It was seen open after the sandbox of this request had started.
    DuringCall,
    /// It was seen open so short a time ago.
    Recently { at_most: Duration },
    /// About so long ago.
    Before { about: Duration },
    /// This daemon has never seen it open.
    Unknown,
}

/// Past this, a connection that is lost was found so by an earlier look.
const LOOKED_AT_EVERY: Duration = Duration::from_millis(1500);

/// Connections that stood for a plugin when a sandbox started, to be looked at again at its first
/// container: whether the plugin was called before us was not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Voucher {
    pub plugin: PluginName,
    pub process: ProcessKey,
    pub connections: Vec<SocketId>,
    /// It was in doubt whether they were the plugin's at all.
    pub in_doubt: bool,
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
    /// What earlier lists of this session have told; outside of hooks a copy of it.
    listings: Option<&'a Mutex<Listings>>,
    /// CLOCK_BOOTTIME nanoseconds by when the request under way had begun for sure.
    begun_by_ns: Option<u64>,
    /// CLOCK_BOOTTIME nanoseconds; bound later than this is not bound yet, where it is not known
    /// that the runtime accepts one plugin at a time.
    bound_before_ns: Option<u64>,
    /// Inside a hook, a connection that is not yet bound may be fenced on the spot.
    bind_until: Option<Instant>,
    vouchers: RefCell<Vec<Voucher>>,
}

impl<'a> Live<'a> {
    /// For listings and `explain`: what the kernel says now, and what lists have told so far.
    pub fn outside_hooks(
        view: &'a View,
        runtime: RuntimeId,
        listings: Option<&'a Mutex<Listings>>,
    ) -> Self {
        Self {
            view,
            runtime,
            list: None,
            only_below: None,
            listings,
            begun_by_ns: None,
            bound_before_ns: None,
            bind_until: None,
            vouchers: RefCell::default(),
        }
    }

    /// For a hook of `runtime` that is running now.
    pub fn in_hook(view: &'a View, runtime: RuntimeId, listings: &'a Mutex<Listings>) -> Self {
        Self {
            bind_until: Some(Instant::now() + BIND_BUDGET),
            ..Self::outside_hooks(view, runtime, Some(listings))
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

    /// The request had begun by then (CLOCK_BOOTTIME nanoseconds).
    pub fn begun_by(self, begun_by_ns: Option<u64>) -> Self {
        Self {
            begun_by_ns,
            ..self
        }
    }

    /// Without a list, only what was bound so long ago counts.
    pub fn settled_for(self, time: Option<Duration>) -> Self {
        let bound_before_ns = time.map(|time| {
            let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            crate::presence::boottime_ns().saturating_sub(time)
        });
        Self {
            bound_before_ns,
            ..self
        }
    }

    /// What the decision rests on and is to be looked at again.
    pub fn into_vouchers(self) -> Vec<Voucher> {
        self.vouchers.into_inner()
    }

    fn listings(&self) -> Option<MutexGuard<'a, Listings>> {
        let listings = self.listings?;
        Some(listings.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn holder(&self, plugin: &PluginName, holder: &Holder) -> Result<(), Missing> {
        let process = holder.facts.process;
        let told = holder.settings.index.map(|index| index.number());
        let index = told.or_else(|| self.listings()?.index(plugin));
        if let (Some(ours), Some(index)) = (self.only_below, index)
            && index >= ours
        {
            return Err(Missing::CalledAfterUs { index, ours });
        }
        let inode = holder.facts.connection_inode;
        match self.connection(plugin, &process, inode) {
            Presence::Bound => self.is_called(plugin, &process)?,
            // Where the kernel cannot be asked at all, the runtime's list decides alone; `status`
            // says so. One process that cannot be looked at is no evidence for it.
            Presence::Unknown { .. } if self.view.kernel_evidence().is_err() => return Ok(()),
            Presence::Broken => return Err(self.lost(plugin, &process, inode)),
            presence => {
                return Err(Missing::Holder {
                    pid: process.pid,
                    presence,
                    lost: None,
                });
            }
        }
        if self.only_below.is_some() && self.list.is_none() && index.is_none() {
            self.vouch(plugin, &process, false);
        }
        Ok(())
    }

    /// What speaks against a bound connection that no list of this request can vouch for.
    fn is_called(&self, plugin: &PluginName, process: &ProcessKey) -> Result<(), Missing> {
        if self.list.is_some() {
            return Ok(());
        }
        if let Some(before) = self.bound_before_ns
            && self.view.bound(process, self.runtime).youngest_ns >= before
        {
            return Err(Missing::Holder {
                pid: process.pid,
                presence: Presence::NotSynchronised,
                lost: None,
            });
        }
        let Some(listings) = self.listings() else {
            return Ok(());
        };
        if listings.any_uncalled() {
            let open = self.view.bound(process, self.runtime).open;
            if listings.is_uncalled(plugin, *process, &open) {
                return Err(Missing::NotListed);
            }
        }
        Ok(())
    }

    /// Why a holder with a lost connection counts as missing.
    fn lost(&self, plugin: &PluginName, process: &ProcessKey, inode: Option<u64>) -> Missing {
        let mut lost = None;
        if let Some(mut listings) = self.listings() {
            let bound = self.view.bound(process, self.runtime);
            listings.note_lost(*process, &bound.lost);
            let is_sandbox = self.list.is_none() && self.only_below.is_some();
            if is_sandbox && inode.is_none() && listings.is_in_doubt(plugin, process, &bound) {
                drop(listings);
                self.vouch(plugin, process, true);
                return Missing::InDoubt { pid: process.pid };
            }
            // Outside of hooks there is no call that it could have been lost in.
            lost = self.bind_until.map(|_| self.when(&bound));
        }
        Missing::Holder {
            pid: process.pid,
            presence: Presence::Broken,
            lost,
        }
    }

    fn when(&self, bound: &BoundConnections) -> LostWhen {
        let open_at = bound.lost.iter().map(|lost| lost.open_at_ns).max();
        let open_at = open_at.unwrap_or(0);
        if open_at == 0 {
            return LostWhen::Unknown;
        }
        if self.begun_by_ns.is_some_and(|begun| open_at >= begun) {
            return LostWhen::DuringCall;
        }
        let ago = Duration::from_nanos(crate::presence::boottime_ns().saturating_sub(open_at));
        match ago < LOOKED_AT_EVERY {
            true => LostWhen::Recently { at_most: ago },
            false => LostWhen::Before { about: ago },
        }
    }

    fn vouch(&self, plugin: &PluginName, process: &ProcessKey, in_doubt: bool) {
        self.vouchers.borrow_mut().push(Voucher {
            plugin: plugin.clone(),
            process: *process,
            connections: self.view.bound(process, self.runtime).open,
            in_doubt,
        });
    }

    fn connection(
        &self,
        plugin: &PluginName,
        process: &ProcessKey,
        inode: Option<u64>,
    ) -> Presence {
        let seen = {
            let listings = self.listings();
            let verdicts = listings.as_ref().map(|l| l.verdicts());
            let is_pardoned = |lost| verdicts.is_some_and(|v| v.is_pardoned(plugin, process, lost));
            self.view
                .check_pardoning(process, self.runtime, inode, is_pardoned)
        };
        let may_have_reconnected = !matches!(
            seen,
            Presence::Bound | Presence::Unknown { .. } | Presence::ProcessGone
        );
        let budget = self.bind_until.map_or(Duration::ZERO, |end| {
            end.saturating_duration_since(Instant::now())
        });
        if may_have_reconnected && !budget.is_zero() {
            return self.view.bind_in_hook(process, self.runtime, inode, budget);
        }
        seen
    }

    fn in_list(&self, plugin: &PluginName, holder: &Holder) -> Result<(), Missing> {
        let Some(list) = self.list else {
            return self.in_last_list(plugin);
        };
        let process = holder.facts.process;
        let mut named = list.iter().filter(|one| one.name == plugin.as_str());
        let Some(first) = named.clone().next() else {
            if self.bound_before_ns.is_none()
                && let Some(mut listings) = self.listings()
            {
                let open = self.view.bound(&process, self.runtime).open;
                listings.note_uncalled(plugin, process, open);
            }
            return Err(Missing::NotListed);
        };
        if let Some(mut listings) = self.listings() {
            listings.note_called(plugin, process);
        }
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

    /// For `explain`, where the kernel cannot be asked: the list decides alone, and the last one is
    /// what there is. Sandboxes have none.
    fn in_last_list(&self, plugin: &PluginName) -> Result<(), Missing> {
        let decides = self.only_below.is_none() && self.view.kernel_evidence().is_err();
        match decides.then(|| self.last_listed(plugin)).flatten() {
            Some(false) => Err(Missing::NotListed),
            Some(true) | None => Ok(()),
        }
    }

    /// Whether the last list of the session named the plugin.
    fn last_listed(&self, plugin: &PluginName) -> Option<bool> {
        self.listings()?.last_listed(plugin)
    }
}

impl Evidence for Live<'_> {
    fn present(&self, plugin: &PluginName, lease: Option<&Lease>) -> Result<(), Missing> {
        let lease = lease.ok_or(Missing::NoLease)?;
        let mut closest = Missing::NoHolder;
        for holder in &lease.holders {
            match self
                .holder(plugin, holder)
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
        match (self.list, self.only_below) {
            (Some(list), _) => Some(list.iter().any(|one| one.name == plugin.as_str())),
            (None, None) => self.last_listed(plugin),
            // A sandbox has no list, nor has a container on a runtime without validation.
            (None, Some(_)) => None,
        }
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
        Missing::InDoubt { .. } => 8,
        Missing::CalledAfterUs { .. } => 9,
        Missing::OtherIndex { .. } => 10,
        Missing::NotListed => 11,
    }
}
