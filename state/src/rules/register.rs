//! Register: rules 1, 7 and 9.

use std::sync::Arc;
use std::time::Duration;

use super::event::EventKind;
use super::lease::Lease;
use super::refusal::Refusal;
use super::transition::Transition;
use super::{Durability, Reply};
use crate::name::{PluginIndex, PluginName};
use crate::process::{HolderFacts, PodIdentity};
use crate::record::{Grace, Holder, LeaseRecord, Mode, Record, Settings};
use crate::scope::{Scope, ScopeError};
use crate::time::{Deadline, Ttl};

/// NRI's mask has bit `1 << (event - 1)`; RUN_POD_SANDBOX is event 1, CREATE_CONTAINER event 4.
const RUN_POD_SANDBOX: i32 = 1;
const CREATE_CONTAINER: i32 = 1 << 3;

pub(super) struct Registration {
    pub plugin: PluginName,
    pub ttl: Option<Ttl>,
    pub scope: Scope,
    pub mode: Mode,
    pub index: Option<PluginIndex>,
    pub events: Option<i32>,
    pub holder: HolderFacts,
}

pub(super) fn register(
    t: &mut Transition<'_>,
    registration: Registration,
) -> Result<Reply, Refusal> {
    let plugin = registration.plugin.clone();
    refuse_banned(t, &plugin)?;
    let settings = settings(t, &registration)?;
    let old = t.live_lease(&plugin);
    let record = match &old {
        Some(lease) => joined(t, &lease.record, registration.holder, settings)?,
        None => created(t, &plugin, registration.holder, settings)?,
    };
    let again = old.is_some_and(|old| old.generation == record.generation);
    let pid = record.holders.last().map_or(0, |h| h.facts.process.pid);
    // Written even when nothing but the deadline has changed: what is acknowledged is durable.
    t.put(Record::Lease(Arc::new(record)), Durability::Barrier);
    t.need(Durability::Barrier);
    let lease = t
        .live_lease(&plugin)
        .expect("its deadline is a positive TTL from now");
    let message = format!(
        "pid {pid} registered{}, generation {}",
        if again { " again" } else { "" },
        lease.generation
    );
    t.event(EventKind::Registered, message)
        .plugin(&plugin)
        .pid(pid);
    Ok(Reply::Registered { lease })
}

fn refuse_banned(t: &Transition<'_>, plugin: &PluginName) -> Result<(), Refusal> {
    match t.state.bans().get(plugin) {
        Some(ban) if ban.counts_at(t.now.boottime) => Err(Refusal::Banned {
            plugin: plugin.clone(),
            left: t.now.until(ban.deadline.boottime),
            reason: ban.reason.clone(),
        }),
        _ => Ok(()),
    }
}

/// What is asked for, within the limits of this node.
fn settings(t: &Transition<'_>, asked: &Registration) -> Result<Settings, Refusal> {
    let ttl = ttl_within(t, "ttl", asked.ttl, t.limits.default_ttl)?;
    if asked.scope.rules.len() > t.limits.max_rules_per_scope {
        return Err(Refusal::Scope(ScopeError::TooManyRules {
            found: asked.scope.rules.len(),
            limit: t.limits.max_rules_per_scope,
        }));
    }
    // For its errors; once more when the lease is put. Not for the scope that the lease has, unless
    // that one was stored by another release and could not be compiled.
    let compiled = |lease: &Arc<Lease>| {
        *lease.settings.scope == asked.scope
            && (!lease.scope.is_all() || asked.scope.rules.is_empty())
    };
    let known = t.state.lease(asked.plugin.as_str());
    if !known.is_some_and(compiled) {
        asked.scope.compile()?;
    }
    if let Some(mask) = asked.events
        && mask != 0
        && mask & (RUN_POD_SANDBOX | CREATE_CONTAINER) == 0
    {
        return Err(Refusal::Deaf {
            plugin: asked.plugin.clone(),
            mask,
        });
    }
    Ok(Settings {
        ttl,
        scope: Arc::new(asked.scope.clone()),
        mode: asked.mode,
        index: asked.index,
        events: asked.events,
    })
}

/// The TTL that is asked for, or the default within the bounds.
pub(super) fn ttl_within(
    t: &Transition<'_>,
    field: &'static str,
    asked: Option<Ttl>,
    default: Duration,
) -> Result<Ttl, Refusal> {
    let (min, max) = (t.limits.min_ttl, t.limits.max_ttl);
    match asked {
        None => Ok(Ttl::clamped(default.max(min).min(max))),
        Some(ttl) if ttl.get() < min || ttl.get() > max => Err(Refusal::Range {
            field,
            given: ttl.get(),
            min,
            max,
        }),
        Some(ttl) => Ok(ttl),
    }
}

fn created(
    t: &mut Transition<'_>,
    plugin: &PluginName,
    facts: HolderFacts,
    settings: Settings,
) -> Result<LeaseRecord, Refusal> {
    let live = |t: &Transition<'_>| {
        let leases = t.state.leases().values();
        leases.filter(|l| l.counts_at(t.now.boottime)).count()
    };
    if t.state.leases().len() >= t.limits.max_leases && live(t) >= t.limits.max_leases {
        return Err(Refusal::Limit {
            what: "leases.max_leases",
            limit: t.limits.max_leases,
            remedy: "revoke a lease that is no longer needed, or raise it in the configuration",
        });
    }
    if t.state.lease(plugin.as_str()).is_some() {
        // It ended, and no tick has come by: this is a new lease and not the old one prolonged.
        super::tick::expire_lease(t, plugin);
    }
    let mut record = LeaseRecord {
        plugin: plugin.clone(),
        generation: 1,
        deadline: Deadline::after(t.now, settings.ttl.get()),
        settings: settings.clone(),
        registered_at: t.now.wall,
        renewed_at: t.now.wall,
        holders: Vec::new(),
        last_holder: None,
        providers: Vec::new(),
        grace: Grace::Unused,
    };
    add_holder(t, &mut record, facts, settings);
    Ok(record)
}

/// The lease with one holder more, or with one that registers again.
fn joined(
    t: &Transition<'_>,
    old: &LeaseRecord,
    mut facts: HolderFacts,
    settings: Settings,
) -> Result<LeaseRecord, Refusal> {
    let mut record = old.clone();
    facts.pod = facts.pod.map(|pod| what_is_known(pod, old));
    // Another start time: that process is gone, and its pid was given to this one.
    record
        .holders
        .retain(|h| h.facts.process.pid != facts.process.pid || h.facts.process == facts.process);
    // The subject held it as long as nobody knew which descendant of it is the plugin.
    if let Some(subject) = facts.subject.filter(|subject| *subject != facts.process) {
        let stands_in = |h: &Holder| h.facts.process == subject && h.facts.subject == Some(subject);
        record.holders.retain(|h| !stands_in(h));
    }
    let is_known = |h: &Holder| h.facts.process == facts.process;
    if !record.holders.iter().any(is_known) {
        refuse_other_holders(&record, &facts)?;
        if record.holders.len() >= t.limits.max_holders_per_lease {
            return Err(Refusal::Limit {
                what: "holders of one lease",
                limit: t.limits.max_holders_per_lease,
                remedy: "release or stop a process that holds it",
            });
        }
    }
    add_holder(t, &mut record, facts, settings);
    record.last_holder = None;
    record.renewed(t.now);
    if record.changed_since(old) {
        record.generation = old.generation.saturating_add(1);
    }
    Ok(record)
}

fn add_holder(
    t: &Transition<'_>,
    record: &mut LeaseRecord,
    facts: HolderFacts,
    settings: Settings,
) {
    let mut registered_at = t.now.wall;
    if let Some(position) = record
        .holders
        .iter()
        .position(|h| h.facts.process == facts.process)
    {
        registered_at = record.holders.remove(position).registered_at;
    }
    if let Some(pod) = &facts.pod {
        record.learn_provider(pod, t.limits.max_providers_per_lease);
    }
    record.holders.push(Holder {
        facts,
        registered_at,
        settings,
    });
    record.choose_settings();
}

/// The daemon may know a pod by its uid only, for a while after its own restart; a holder in the
/// same pod, or the process itself when it registers again, may have been known better.
pub(super) fn what_is_known(pod: PodIdentity, lease: &LeaseRecord) -> PodIdentity {
    if pod.namespace.is_some() && pod.name.is_some() {
        return pod;
    }
    let mut pods = lease.holders.iter().filter_map(|h| h.facts.pod.as_ref());
    let known = pods.find(|known| known.uid == pod.uid && known.name.is_some());
    known.cloned().unwrap_or(pod)
}

/// Rule 7, for a process that is no holder yet.
pub(super) fn refuse_other_holders(
    record: &LeaseRecord,
    joining: &HolderFacts,
) -> Result<(), Refusal> {
    let mut holders = record.holders.iter();
    match holders.find(|h| !may_join(&h.facts, joining)) {
        None => Ok(()),
        Some(other) => Err(Refusal::OtherHolder {
            plugin: record.plugin.clone(),
            pid: other.facts.process.pid,
            theirs: who(&other.facts),
            ours: who(joining),
        }),
    }
}

/// Rule 7. A pod whose namespace is not known yet is only known to be in the same one as itself.
fn may_join(holder: &HolderFacts, joining: &HolderFacts) -> bool {
    let same_namespace = match (&holder.pod, &joining.pod) {
        (None, None) => true,
        (Some(one), Some(other)) => one.uid == other.uid || one.namespace == other.namespace,
        _ => false,
    };
    holder.uid == joining.uid && same_namespace
}

fn who(facts: &HolderFacts) -> String {
    let place = match &facts.pod {
        None => "no pod".to_owned(),
        Some(PodIdentity {
            namespace: Some(namespace),
            ..
        }) => format!("namespace {namespace}"),
        Some(pod) => format!("pod {}, whose namespace is not known yet", pod.uid),
    };
    format!("uid {} and {place}", facts.uid)
}

impl LeaseRecord {
    /// Those of the holder whose process started last; without a holder, they stay.
    pub(super) fn choose_settings(&mut self) {
        let newest = self
            .holders
            .iter()
            .max_by_key(|h| (h.facts.process.start_time, h.facts.process.pid));
        if let Some(newest) = newest {
            self.settings = newest.settings.clone();
        }
    }

    /// A whole TTL from now, and the next reboot may grant its grace again.
    pub(super) fn renewed(&mut self, now: &crate::time::Now) {
        self.deadline = Deadline::after(now, self.settings.ttl.get());
        self.renewed_at = now.wall;
        self.grace = Grace::Unused;
    }

    /// More than a renewal.
    fn changed_since(&self, old: &LeaseRecord) -> bool {
        let mut holders: Vec<&Holder> = self.holders.iter().collect();
        let mut before: Vec<&Holder> = old.holders.iter().collect();
        holders.sort_by_key(|h| h.facts.process);
        before.sort_by_key(|h| h.facts.process);
        self.settings != old.settings || holders != before
    }
}
