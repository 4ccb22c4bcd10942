//! One command being carried out: the state, the time, and what has changed so far.

use std::sync::Arc;

use super::event::{Event, EventKind};
use super::lease::Lease;
use super::limits::Limits;
use super::state::State;
use super::{Applied, Change, Durability, Reply};
use crate::name::{PluginName, PodUid};
use crate::record::{Record, RecordKey};
use crate::time::Now;

pub(super) struct Transition<'a> {
    pub state: &'a mut State,
    pub now: &'a Now,
    pub limits: &'a Limits,
    changes: Vec<Change>,
    events: Vec<Event>,
    durability: Durability,
}

impl<'a> Transition<'a> {
    pub fn new(state: &'a mut State, now: &'a Now, limits: &'a Limits) -> Self {
        Self {
            state,
            now,
            limits,
            changes: Vec::new(),
            events: Vec::new(),
            durability: Durability::None,
        }
    }

    /// The lease of a plugin, when it still counts. One whose deadline has passed is as good as
    /// removed, whether or not a tick has come by.
    pub fn live_lease(&self, plugin: &PluginName) -> Option<Arc<Lease>> {
        let lease = self.state.lease(plugin.as_str())?;
        lease.counts_at(self.now.boottime).then(|| lease.clone())
    }

    /// Replaces or adds a record; nothing happens when it is the same as before.
    pub fn put(&mut self, record: Record, durability: Durability) {
        let key = record.key();
        self.change(key, Some(record), durability);
    }

    pub fn remove(&mut self, key: RecordKey, durability: Durability) {
        self.change(key, None, durability);
    }

    fn change(&mut self, key: RecordKey, after: Option<Record>, durability: Durability) {
        let before = self.state.record(&key);
        if before == after {
            return;
        }
        self.state.set(&key, after.clone());
        self.changes.push(Change { key, before, after });
        self.durability = self.durability.max(durability);
    }

    /// The reply may only be given after a barrier, even when nothing has changed since another
    /// command wrote it.
    pub fn need(&mut self, durability: Durability) {
        self.durability = self.durability.max(durability);
    }

    pub fn event(&mut self, kind: EventKind, message: impl Into<String>) -> &mut Event {
        self.events.push(Event {
            kind,
            plugin: None,
            pid: None,
            pod_uid: None,
            message: message.into(),
        });
        self.events
            .last_mut()
            .expect("an event was pushed in the statement before")
    }

    pub fn finish(self, reply: Reply) -> Applied {
        Applied {
            reply,
            changes: self.changes,
            events: self.events,
            durability: self.durability,
        }
    }

    /// Leaves the state as it was.
    pub fn abandon(self) {
        self.state.undo(&self.changes);
    }
}

impl Event {
    pub(super) fn plugin(&mut self, plugin: &PluginName) -> &mut Self {
        self.plugin = Some(plugin.clone());
        self
    }

    pub(super) fn pid(&mut self, pid: u32) -> &mut Self {
        self.pid = Some(pid);
        self
    }

    pub(super) fn pod(&mut self, pod_uid: &PodUid) -> &mut Self {
        self.pod_uid = Some(pod_uid.clone());
        self
    }
}
