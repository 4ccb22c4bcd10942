//! What a runtime's lists of plugins have said, over the requests of one session.
//!
//! A list is per request, and says less than it seems: it is made before any plugin is called, and
//! a plugin that has died since the last request is in it still. What it does say, and no kernel
//! can, is which *plugin* of a process is connected. So the lists of several requests together
//! tell three things:
//!
//! - **whose a lost connection was**, in a process that hosts several plugins. A runtime drops a
//!   closed plugin from its list at the end of a request (NRI 0.8 to 0.12, `removeClosedPlugins`).
//!   A list made in a later request than the one in which the runtime was seen to have let go of
//!   the connection is therefore free of its plugin. Who is in it has not lost it, and is
//!   *pardoned* for it; who is not, is *blamed*. As long as neither is known, it is in doubt.
//! - **at which index** a plugin is called, where its lease does not say.
//! - **who is connected and not called**: a connection whose registration the runtime refused can
//!   stay open, and passes for a bound one. It stays suspect until the process has another.

use std::collections::{BTreeMap, HashMap};

use nri_lease_proto::nri::nri::PluginInstance;
use nri_lease_state::rules::State;
use nri_lease_state::{PluginName, ProcessKey};

use crate::presence::{BoundConnections, Lost, RuntimeId, SocketId, View};

/// Lost connections and suspects remembered; there is one each for a few processes at most.
const MOST: usize = 1024;

/// The verdicts on lost connections: who may be present although a connection of its process was
/// lost, because that was another plugin's.
#[derive(Clone, Debug, Default)]
pub struct Verdicts(HashMap<(ProcessKey, SocketId), BTreeMap<PluginName, Verdict>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pardoned,
    Blamed,
}

impl Verdicts {
    pub fn is_pardoned(&self, plugin: &PluginName, process: &ProcessKey, lost: SocketId) -> bool {
        self.on(plugin, process, lost) == Some(Verdict::Pardoned)
    }

    fn on(&self, plugin: &PluginName, process: &ProcessKey, lost: SocketId) -> Option<Verdict> {
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&(*process, lost))?.get(plugin).copied()
    }
}

/// The memory of one session with a runtime.
#[derive(Clone, Debug, Default)]
pub struct Listings {
    /// Something has changed that others should know (`list`, `explain`).
    news: bool,
    /// Names in the last list; None: there was none yet.
    last: Option<Vec<String>>,
    /// The number of the request under way.
    request: u64,
    /// Connections that the runtime has let go of, with the request in which that was seen first.
    lost: HashMap<(ProcessKey, SocketId), u64>,
    verdicts: Verdicts,
    /// The highest index at which the runtime lists a leased plugin.
    indexes: HashMap<PluginName, u8>,
    /// Bound connections of holders whose plugin was not in the list.
    uncalled: HashMap<(PluginName, ProcessKey), Vec<SocketId>>,
}

impl Listings {
    /// A request has come: plugins are called one request after the other, so what was seen in
    /// earlier ones was before its list was made.
    pub fn begin(&mut self) {
        self.request += 1;
    }

    /// A copy for others, when it would differ from the one before.
    pub fn news(&mut self) -> Option<Listings> {
        std::mem::take(&mut self.news).then(|| self.clone())
    }

    /// The list of the request under way.
    pub fn heard(
        &mut self,
        list: &[PluginInstance],
        state: &State,
        view: &View,
        runtime: RuntimeId,
    ) {
        let is_last = |last: &Vec<String>| last.iter().eq(list.iter().map(|one| &one.name));
        if !self.last.as_ref().is_some_and(is_last) {
            self.last = Some(list.iter().map(|one| one.name.clone()).collect());
            self.news = true;
        }
        for one in list {
            let Some(lease) = state.lease(&one.name) else {
                continue;
            };
            let Ok(index) = one.index.parse::<u8>() else {
                continue;
            };
            // Only the highest counts, and only of this list: the plugin may have moved.
            let same_name = list.iter().filter(|other| other.name == one.name);
            let highest = same_name
                .filter_map(|other| other.index.parse().ok())
                .max()
                .unwrap_or(index);
            if self.indexes.get(&lease.plugin) != Some(&highest) {
                self.indexes.insert(lease.plugin.clone(), highest);
                self.news = true;
            }
        }
        if !self.lost.is_empty() {
            self.news |= self.judge(list, state, view, runtime);
        }
    }

    fn judge(
        &mut self,
        list: &[PluginInstance],
        state: &State,
        view: &View,
        runtime: RuntimeId,
    ) -> bool {
        let mut changed = false;
        let lost: Vec<_> = self.lost.iter().map(|(key, seen)| (*key, *seen)).collect();
        for ((process, id), seen) in lost {
            let bound = view.bound(&process, runtime);
            if !bound.lost.iter().any(|lost| lost.id == id) {
                // Another has taken its place, or the process is gone.
                self.lost.remove(&(process, id));
                changed |= self.verdicts.0.remove(&(process, id)).is_some();
                continue;
            }
            if seen >= self.request {
                continue;
            }
            let hosted: Vec<&PluginName> = state
                .leases()
                .values()
                .filter(|lease| lease.holders.iter().any(|h| h.facts.process == process))
                .map(|lease| &lease.plugin)
                .collect();
            let is_listed =
                |plugin: &PluginName| list.iter().any(|one| one.name == plugin.as_str());
            let listed = hosted.iter().filter(|plugin| is_listed(plugin)).count();
            // More plugins than connections: one of them was lost just now, or another process
            // uses its name. The next list will tell.
            if listed > bound.open.len() {
                continue;
            }
            let verdicts = self.verdicts.0.entry((process, id)).or_default();
            for plugin in hosted {
                let verdict = match is_listed(plugin) {
                    true => Verdict::Pardoned,
                    false => Verdict::Blamed,
                };
                changed |= verdicts.insert(plugin.clone(), verdict) != Some(verdict);
            }
        }
        changed
    }

    /// Connections of a holder were found lost in the request under way.
    pub fn note_lost(&mut self, process: ProcessKey, lost: &[Lost]) {
        if self.lost.len() >= MOST {
            self.lost.clear();
            self.verdicts.0.clear();
        }
        for lost in lost.iter().filter(|lost| lost.released) {
            let request = self.request;
            self.lost.entry((process, lost.id)).or_insert_with(|| {
                self.news = true;
                request
            });
        }
    }

    /// A holder was bound, and its plugin not in the list of the request under way. The runtime
    /// enters a plugin into its list before it accepts the next connection, and not during a
    /// request: so this is not the plugin that it calls.
    pub fn note_uncalled(&mut self, plugin: &PluginName, process: ProcessKey, open: Vec<SocketId>) {
        if self.uncalled.len() >= MOST {
            self.uncalled.clear();
        }
        let before = self
            .uncalled
            .insert((plugin.clone(), process), open.clone());
        self.news |= before.is_none_or(|before| before != open);
    }

    /// The plugin was in the list.
    pub fn note_called(&mut self, plugin: &PluginName, process: ProcessKey) {
        if !self.uncalled.is_empty() {
            self.news |= self.uncalled.remove(&(plugin.clone(), process)).is_some();
        }
    }

    /// Whether the last list that could have named the plugin did not, although the holder had
    /// just the connections that it has now.
    pub fn is_uncalled(&self, plugin: &PluginName, process: ProcessKey, open: &[SocketId]) -> bool {
        self.uncalled
            .get(&(plugin.clone(), process))
            .is_some_and(|then| then == open)
    }

    pub fn any_uncalled(&self) -> bool {
        !self.uncalled.is_empty()
    }

    /// Whether the lost connections of a process may have been another plugin's: something of it
    /// is connected still, and no list has said whose they were.
    pub fn is_in_doubt(
        &self,
        plugin: &PluginName,
        process: &ProcessKey,
        bound: &BoundConnections,
    ) -> bool {
        let verdict = |lost: &Lost| self.verdicts.on(plugin, process, lost.id);
        let seen_before = |lost: &Lost| {
            let seen = self.lost.get(&(*process, lost.id));
            seen.is_some_and(|request| *request < self.request)
        };
        !bound.open.is_empty()
            && bound.lost.iter().all(seen_before)
            && bound.lost.iter().any(|lost| verdict(lost).is_none())
            && !bound
                .lost
                .iter()
                .any(|lost| verdict(lost) == Some(Verdict::Blamed))
    }

    /// Whether the last list named the plugin; None when there was none yet.
    pub fn last_listed(&self, plugin: &PluginName) -> Option<bool> {
        let last = self.last.as_ref()?;
        Some(last.iter().any(|name| name == plugin.as_str()))
    }

    /// The highest index at which the runtime has last listed the plugin.
    pub fn index(&self, plugin: &PluginName) -> Option<u8> {
        self.indexes.get(plugin).copied()
    }

    pub fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }
}
