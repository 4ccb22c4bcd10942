//! What is known: leases, pins, bans, the pause, sandboxes, and when the next of them ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Change;
use super::lease::Lease;
use crate::name::{PluginName, PodUid};
use crate::record::{
    BanRecord, LeaseRecord, MetaRecord, PauseRecord, PinRecord, Record, RecordKey, SandboxRecord,
    Tree,
};
use crate::scope::{CompiledScope, Scope};
use crate::time::Boottime;

pub type LeaseMap = BTreeMap<PluginName, Arc<Lease>>;
pub type PinsOfPod = BTreeMap<PluginName, Arc<PinRecord>>;
/// Pods share what did not change between snapshots.
pub type PinMap = BTreeMap<PodUid, Arc<PinsOfPod>>;
pub type BanMap = BTreeMap<PluginName, Arc<BanRecord>>;
pub type SandboxMap = BTreeMap<String, Arc<SandboxRecord>>;

/// Everything the rules decide about.
///
/// The maps are behind `Arc`s that are copied on write: a snapshot for the hooks is a handful of
/// reference counts, and costs a copy of only the map that changes next.
#[derive(Debug, Clone, Default)]
pub struct State {
    leases: Arc<LeaseMap>,
    pins: Arc<PinMap>,
    pin_count: usize,
    bans: Arc<BanMap>,
    pause: Option<Arc<PauseRecord>>,
    sandboxes: Arc<SandboxMap>,
    meta: Arc<MetaRecord>,
    /// When each record ends, in order: with thousands of pins the next end is the first entry
    /// and not a search.
    deadlines: BTreeSet<(Boottime, RecordKey)>,
    /// End of this boot's reboot grace, from the first Synchronize on. It is no record, so that no
    /// failed write takes it back; leases that wait for their grace get it when they are next set,
    /// and so also when a failed write is undone.
    pub(super) grace_until: Option<Boottime>,
}

impl State {
    /// Nothing registered.
    pub fn new() -> Self {
        Self::default()
    }

    /// All leases, by name; ask [`Lease::counts_at`] of each.
    pub fn leases(&self) -> &Arc<LeaseMap> {
        &self.leases
    }

    /// The lease of a plugin; ask [`Lease::counts_at`].
    pub fn lease(&self, plugin: &str) -> Option<&Arc<Lease>> {
        self.leases.get(plugin)
    }

    /// All pins, by pod; ask [`PinRecord::counts_at`] of each.
    pub fn pins(&self) -> &Arc<PinMap> {
        &self.pins
    }

    /// Number of pins.
    pub fn pin_count(&self) -> usize {
        self.pin_count
    }

    /// All bans; ask [`BanRecord::counts_at`] of each.
    pub fn bans(&self) -> &Arc<BanMap> {
        &self.bans
    }

    /// The pause; ask [`PauseRecord::counts_at`].
    pub fn pause(&self) -> Option<&Arc<PauseRecord>> {
        self.pause.as_ref()
    }

    /// Known sandboxes, by the runtime's id.
    pub fn sandboxes(&self) -> &Arc<SandboxMap> {
        &self.sandboxes
    }

    /// What the daemon remembers about itself.
    pub fn meta(&self) -> &Arc<MetaRecord> {
        &self.meta
    }

    /// When the next lease, pin, ban or pause ends: time to [`super::Command::Tick`].
    pub fn next_deadline(&self) -> Option<Boottime> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Takes changes back whose write failed, newest first. Changes of later commands that failed
    /// too must have been taken back before; what others did to the same lease meanwhile without a
    /// barrier (a renewal, a lost holder) stays.
    pub fn undo(&mut self, changes: &[Change]) {
        for change in changes.iter().rev() {
            let restored = match (&change.before, &change.after, self.record(&change.key)) {
                (
                    Some(Record::Lease(before)),
                    Some(Record::Lease(after)),
                    Some(Record::Lease(current)),
                ) if *after != current => Some(Record::Lease(without(before, after, &current))),
                (before, _, _) => before.clone(),
            };
            self.set(&change.key, restored);
        }
    }

    /// Every record, as it would be stored now: for a new database or a backup.
    pub fn records(&self) -> Vec<Record> {
        let leases = self
            .leases
            .values()
            .map(|l| Record::Lease(l.record.clone()));
        let pins = self.pins.values().flat_map(|pod| pod.values());
        let mut records: Vec<Record> = leases.collect();
        records.extend(pins.cloned().map(Record::Pin));
        records.extend(self.bans.values().cloned().map(Record::Ban));
        records.extend(self.pause.clone().map(Record::Pause));
        records.extend(self.sandboxes.values().cloned().map(Record::Sandbox));
        if **self.meta() != MetaRecord::default() {
            records.push(Record::Meta(self.meta.clone()));
        }
        records
    }

    /// The record under a key.
    pub fn record(&self, key: &RecordKey) -> Option<Record> {
        match key.tree {
            Tree::Leases => self
                .lease(&key.key)
                .map(|l| Record::Lease(l.record.clone())),
            Tree::Pins => {
                let (pod, plugin) = key.key.split_once('/')?;
                let pin = self.pins.get(pod)?.get(plugin)?;
                Some(Record::Pin(pin.clone()))
            }
            Tree::Bans => self.bans.get(key.key.as_str()).cloned().map(Record::Ban),
            Tree::Control => self.pause.clone().map(Record::Pause),
            Tree::Sandboxes => self.sandboxes.get(&key.key).cloned().map(Record::Sandbox),
            Tree::Meta => {
                (**self.meta() != MetaRecord::default()).then(|| Record::Meta(self.meta.clone()))
            }
        }
    }

    /// The keys of records whose deadline has passed, the longest ago first.
    pub(super) fn passed(&self, at: Boottime, at_most: usize) -> Vec<RecordKey> {
        self.deadlines
            .iter()
            .take_while(|(deadline, _)| *deadline <= at)
            .take(at_most)
            .map(|(_, key)| key.clone())
            .collect()
    }

    /// The one place where anything changes: replaces or removes one record and keeps the order of
    /// deadlines and the number of pins true. Returns what was there.
    pub(super) fn set(&mut self, key: &RecordKey, record: Option<Record>) -> Option<Record> {
        let before = self.record(key);
        if let Some(end) = self.end_of(key) {
            self.deadlines.remove(&(end, key.clone()));
        }
        match record {
            None => self.remove(key),
            Some(record) => self.insert(record),
        }
        if let Some(end) = self.end_of(key) {
            self.deadlines.insert((end, key.clone()));
        }
        before
    }

    fn insert(&mut self, record: Record) {
        match record {
            Record::Lease(record) => {
                let lease = Arc::new(self.lease_of(record));
                Arc::make_mut(&mut self.leases).insert(lease.plugin.clone(), lease);
            }
            Record::Pin(pin) => {
                let pod = Arc::make_mut(&mut self.pins)
                    .entry(pin.pod_uid.clone())
                    .or_default();
                if Arc::make_mut(pod).insert(pin.plugin.clone(), pin).is_none() {
                    self.pin_count += 1;
                }
            }
            Record::Ban(ban) => {
                Arc::make_mut(&mut self.bans).insert(ban.plugin.clone(), ban);
            }
            Record::Pause(pause) => self.pause = Some(pause),
            Record::Sandbox(sandbox) => {
                Arc::make_mut(&mut self.sandboxes).insert(sandbox.sandbox_id.clone(), sandbox);
            }
            Record::Meta(meta) => self.meta = meta,
        }
    }

    fn remove(&mut self, key: &RecordKey) {
        match key.tree {
            Tree::Leases => {
                Arc::make_mut(&mut self.leases).remove(key.key.as_str());
            }
            Tree::Pins => {
                let Some((pod_uid, plugin)) = key.key.split_once('/') else {
                    return;
                };
                let pins = Arc::make_mut(&mut self.pins);
                let Some(pod) = pins.get_mut(pod_uid) else {
                    return;
                };
                if Arc::make_mut(pod).remove(plugin).is_some() {
                    self.pin_count -= 1;
                }
                if pod.is_empty() {
                    pins.remove(pod_uid);
                }
            }
            Tree::Bans => {
                Arc::make_mut(&mut self.bans).remove(key.key.as_str());
            }
            Tree::Control => self.pause = None,
            Tree::Sandboxes => {
                Arc::make_mut(&mut self.sandboxes).remove(&key.key);
            }
            Tree::Meta => self.meta = Arc::default(),
        }
    }

    fn end_of(&self, key: &RecordKey) -> Option<Boottime> {
        match key.tree {
            Tree::Leases => self.lease(&key.key)?.ends_at(),
            Tree::Pins => {
                let (pod, plugin) = key.key.split_once('/')?;
                Some(self.pins.get(pod)?.get(plugin)?.deadline.boottime)
            }
            Tree::Bans => Some(self.bans.get(key.key.as_str())?.deadline.boottime),
            Tree::Control => Some(self.pause.as_ref()?.deadline.boottime),
            Tree::Sandboxes | Tree::Meta => None,
        }
    }

    /// A lease around a record; the compiled scope is taken over from the lease there is, when the
    /// scope is the same.
    fn lease_of(&self, record: Arc<LeaseRecord>) -> Lease {
        let scope = match self.lease(record.plugin.as_str()) {
            Some(old) if same_scope(&old.settings.scope, &record.settings.scope) => {
                old.scope.clone()
            }
            // Register refuses a scope that does not compile. A stored one that an older or newer
            // release took is enforced in the widest sense until the plugin registers again.
            _ => Arc::new(
                record
                    .settings
                    .scope
                    .compile()
                    .unwrap_or_else(|_| CompiledScope::all()),
            ),
        };
        Lease {
            record,
            scope,
            grace_until: self.grace_until,
        }
    }
}

/// The lease `before` a change, with what happened to it after the change.
fn without(
    before: &Arc<LeaseRecord>,
    after: &LeaseRecord,
    current: &LeaseRecord,
) -> Arc<LeaseRecord> {
    let mut record = (**before).clone();
    let has = |lease: &LeaseRecord, process| {
        let mut holders = lease.holders.iter();
        holders.any(|holder| holder.facts.process == process)
    };
    let lost = |process| has(after, process) && !has(current, process);
    if record.holders.iter().any(|h| lost(h.facts.process)) {
        record.holders.retain(|h| !lost(h.facts.process));
        record.last_holder = current.last_holder.clone();
        record.choose_settings();
    }
    if current.renewed_at != after.renewed_at
        && current.deadline.boottime > record.deadline.boottime
    {
        record.deadline = current.deadline.clone();
        record.renewed_at = current.renewed_at;
        record.grace = current.grace;
    }
    // Readers have seen the later generations.
    record.generation = current.generation.saturating_add(1);
    Arc::new(record)
}

fn same_scope(one: &Arc<Scope>, other: &Arc<Scope>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}

impl PinRecord {
    /// At the deadline itself it no longer counts.
    pub fn counts_at(&self, at: Boottime) -> bool {
        !self.deadline.passed(at)
    }
}

impl BanRecord {
    /// At the deadline itself it no longer counts.
    pub fn counts_at(&self, at: Boottime) -> bool {
        !self.deadline.passed(at)
    }
}

impl PauseRecord {
    /// At the deadline itself it no longer counts.
    pub fn counts_at(&self, at: Boottime) -> bool {
        !self.deadline.passed(at)
    }
}
