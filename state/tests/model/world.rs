//! The crate and the reference model side by side, with a clock and a disk that tests turn at will.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nri_lease_state::record::{self, Mode, Record, RecordKey, Settings, Tree};
use nri_lease_state::rules::{
    Change, Command, Durability, EventKind, Limits, PresentSandbox, Recovery, Reply, SandboxPod,
    State,
};
use nri_lease_state::scope::{Scope, ScopeRule};
use nri_lease_state::time::Deadline;
use nri_lease_state::{
    BootId, Boottime, HolderFacts, Now, PluginIndex, PluginName, PodIdentity, PodUid, ProcessKey,
    Ttl, WallTime,
};

use crate::reference::{self as plain, Clock, Cmd, Reference, Stored, Written};

/// One step of a sequence. It holds all its parameters, so that any part of a sequence can be
/// left out when the shortest one is looked for.
#[derive(Debug, Clone)]
pub enum Step {
    /// A command whose barrier, if it needs one, succeeds.
    Do(Cmd),
    /// A command whose barrier fails.
    FailedWrite(Cmd),
    /// CLOCK_BOOTTIME and the wall clock go on, as they do in suspend too.
    Advance(u64),
    /// To this long before (or, negative, after) the next deadline.
    ToDeadline(i64),
    /// Someone sets the wall clock.
    SetWall(i64),
    /// What was to be written soon is written.
    Flush,
    /// The daemon is killed and started again; `flushed`: what was to be written soon had been.
    Crash { flushed: bool, mirror: bool },
    /// The node is down for a while. `uptime`: of the new boot, when the daemon loads.
    Reboot {
        flushed: bool,
        down: i64,
        uptime: u64,
    },
}

pub struct World {
    clock: Clock,
    state: State,
    reference: Reference,
    limits: Limits,
    disk: BTreeMap<RecordKey, Vec<u8>>,
    soon: BTreeMap<RecordKey, Option<Vec<u8>>>,
    plain_disk: Stored,
    plain_soon: BTreeSet<PlainKey>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum PlainKey {
    Lease(String),
    Pin((String, String)),
    Ban(String),
    Pause,
    Sandbox(String),
    Contacted,
}

impl World {
    pub fn new() -> Self {
        let ns = Duration::from_nanos;
        Self {
            clock: Clock {
                boot: 1,
                boottime: 1_000 * plain::SECOND,
                wall: 1_700_000_000 * plain::SECOND as i64,
            },
            state: State::new(),
            reference: Reference::default(),
            limits: Limits {
                default_ttl: ns(plain::DEFAULT_TTL),
                min_ttl: ns(plain::MIN_TTL),
                max_ttl: ns(plain::MAX_TTL),
                default_pin_ttl: ns(plain::DEFAULT_PIN_TTL),
                max_leases: plain::MAX_LEASES,
                max_holders_per_lease: plain::MAX_HOLDERS,
                max_pins: plain::MAX_PINS,
                max_bans: plain::MAX_BANS,
                max_sandboxes: plain::MAX_SANDBOXES,
                reboot_grace: ns(plain::GRACE),
                max_expired_per_tick: 2,
                ..Limits::default()
            },
            disk: BTreeMap::new(),
            soon: BTreeMap::new(),
            plain_disk: Stored::default(),
            plain_soon: BTreeSet::new(),
        }
    }

    fn now(&self) -> Now {
        Now {
            boottime: Boottime(self.clock.boottime),
            wall: WallTime(self.clock.wall),
            boot_id: boot_id(self.clock.boot),
        }
    }

    /// Err: how the two differ.
    pub fn step(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Do(cmd) => self.command(cmd, false)?,
            Step::FailedWrite(cmd) => self.command(cmd, true)?,
            Step::Advance(ns) => self.advance(*ns),
            Step::ToDeadline(before) => {
                if let Some(end) = self.reference.next_end() {
                    let at = end.saturating_add_signed(-before);
                    self.advance(at.saturating_sub(self.clock.boottime));
                }
            }
            Step::SetWall(by) => self.clock.wall += by,
            Step::Flush => self.flush(),
            Step::Crash { flushed, mirror } => self.restart(*flushed, *mirror)?,
            Step::Reboot {
                flushed,
                down,
                uptime,
            } => {
                self.clock.boot += 1;
                self.clock.boottime = *uptime;
                self.clock.wall += down;
                self.restart(*flushed, false)?;
            }
        }
        self.compare()
    }

    fn advance(&mut self, ns: u64) {
        self.clock.boottime += ns;
        self.clock.wall += ns as i64;
    }

    fn command(&mut self, cmd: &Cmd, fail: bool) -> Result<(), String> {
        let before = self.reference.now.clone();
        let expected = self.reference.apply(cmd, &self.clock);
        let now = self.now();
        let records_before = self.state.records();
        let (reply, mut events) = match self.state.apply(command(cmd), &now, &self.limits) {
            Err(refusal) => {
                if refusal.to_string().is_empty() || self.state.records() != records_before {
                    return Err(format!("a refusal changed the state: {refusal}"));
                }
                return same(&expected.map(drop), &Err(kind_name(&refusal)), "refusal");
            }
            Ok(applied) => {
                let barrier = applied.durability == Durability::Barrier;
                if barrier && Reference::written(cmd) == Written::Soon {
                    return Err("a barrier that nobody asked for".to_owned());
                }
                if barrier && fail {
                    self.state.undo(&applied.changes);
                    self.reference.now = before;
                    same(&self.state.records(), &records_before, "records after undo")?;
                    return Ok(());
                }
                self.write(&applied.changes, applied.durability);
                let events: Vec<String> = applied.events.iter().map(event_name).collect();
                (reply_text(&applied.reply), events)
            }
        };
        if matches!(cmd, Cmd::Tick) {
            self.tick_on(&now, &mut events)?;
        }
        self.plain_write(cmd, &before);
        let (reply_expected, mut events_expected) =
            expected.map_err(|kind| format!("carried out, expected {kind}"))?;
        events.sort();
        events_expected.sort();
        same(&reply, &reply_expected, "reply")?;
        same(&events, &events_expected, "events")
    }

    /// Ticks are bounded: the engine ticks until nothing is left.
    fn tick_on(&mut self, now: &Now, events: &mut Vec<String>) -> Result<(), String> {
        for _ in 0..100 {
            if self
                .state
                .next_deadline()
                .is_none_or(|at| at > now.boottime)
            {
                return Ok(());
            }
            let applied = self
                .state
                .apply(Command::Tick, now, &self.limits)
                .map_err(|refusal| format!("a tick was refused: {refusal}"))?;
            events.extend(applied.events.iter().map(event_name));
            self.write(&applied.changes, applied.durability);
        }
        Err("ticks do not end".to_owned())
    }

    fn write(&mut self, changes: &[Change], durability: Durability) {
        for Change { key, after, .. } in changes {
            let value = after.as_ref().map(Record::encode);
            if durability == Durability::Barrier {
                self.soon.remove(key);
                put(&mut self.disk, key, value);
            } else {
                self.soon.insert(key.clone(), value);
            }
        }
    }

    fn plain_write(&mut self, cmd: &Cmd, before: &Stored) {
        for key in keys(before, &self.reference.now) {
            if one(before, &key) == one(&self.reference.now, &key) {
                continue;
            }
            match Reference::written(cmd) {
                Written::Barrier => {
                    self.plain_soon.remove(&key);
                    copy(&self.reference.now, &mut self.plain_disk, &key);
                }
                Written::Soon => {
                    self.plain_soon.insert(key);
                }
            }
        }
    }

    fn flush(&mut self) {
        for (key, value) in std::mem::take(&mut self.soon) {
            put(&mut self.disk, &key, value);
        }
        for key in std::mem::take(&mut self.plain_soon) {
            copy(&self.reference.now, &mut self.plain_disk, &key);
        }
    }

    fn restart(&mut self, flushed: bool, mirror: bool) -> Result<(), String> {
        if flushed {
            self.flush();
        }
        self.soon.clear();
        self.plain_soon.clear();
        let recovery = if mirror {
            Recovery::Mirror
        } else {
            Recovery::Database
        };
        let loaded = State::load(self.disk.clone(), recovery, &self.now(), &self.limits);
        if !loaded.issues.is_empty() {
            return Err(format!("issues at load: {:?}", loaded.issues));
        }
        self.state = loaded.state;
        self.write(&loaded.changes, Durability::Barrier);
        self.reference = Reference::load(&self.plain_disk, mirror, &self.clock);
        self.plain_disk = self.reference.now.clone();
        Ok(())
    }

    fn compare(&self) -> Result<(), String> {
        same(&project(&self.state), &self.reference.now, "state")?;
        let next = self.state.next_deadline().map(|at| at.0);
        same(&next, &self.reference.next_end(), "next deadline")?;
        let at = Boottime(self.clock.boottime);
        for (name, lease) in &self.reference.now.leases {
            let real = self.state.lease(name).ok_or("no such lease")?;
            let end = real.ends_at().map(|at| at.0);
            same(&end, &self.reference.end_of(lease), "end of a lease")?;
            let lives = self.reference.lives(lease, &self.clock);
            same(&real.counts_at(at), &lives, "whether a lease counts")?;
        }
        let pins = self.reference.now.pins.len();
        same(&self.state.pin_count(), &pins, "number of pins")
    }
}

fn same<T: PartialEq + std::fmt::Debug>(real: &T, expected: &T, what: &str) -> Result<(), String> {
    if real == expected {
        Ok(())
    } else {
        Err(format!(
            "{what}:\n  is       {real:?}\n  expected {expected:?}"
        ))
    }
}

fn put(disk: &mut BTreeMap<RecordKey, Vec<u8>>, key: &RecordKey, value: Option<Vec<u8>>) {
    match value {
        Some(value) => disk.insert(key.clone(), value),
        None => disk.remove(key),
    };
}

fn keys(one: &Stored, other: &Stored) -> BTreeSet<PlainKey> {
    let mut keys = BTreeSet::from([PlainKey::Pause, PlainKey::Contacted]);
    for stored in [one, other] {
        keys.extend(stored.leases.keys().cloned().map(PlainKey::Lease));
        keys.extend(stored.pins.keys().cloned().map(PlainKey::Pin));
        keys.extend(stored.bans.keys().cloned().map(PlainKey::Ban));
        keys.extend(stored.sandboxes.keys().cloned().map(PlainKey::Sandbox));
    }
    keys
}

/// A copy of the state with only one record in it.
fn one(stored: &Stored, key: &PlainKey) -> Stored {
    let mut only = Stored::default();
    copy(stored, &mut only, key);
    only
}

fn copy(from: &Stored, to: &mut Stored, key: &PlainKey) {
    fn one<K: Ord + Clone, V: Clone>(from: &BTreeMap<K, V>, to: &mut BTreeMap<K, V>, key: &K) {
        match from.get(key) {
            Some(value) => to.insert(key.clone(), value.clone()),
            None => to.remove(key),
        };
    }
    match key {
        PlainKey::Lease(key) => one(&from.leases, &mut to.leases, key),
        PlainKey::Pin(key) => one(&from.pins, &mut to.pins, key),
        PlainKey::Ban(key) => one(&from.bans, &mut to.bans, key),
        PlainKey::Sandbox(key) => one(&from.sandboxes, &mut to.sandboxes, key),
        PlainKey::Pause => to.pause.clone_from(&from.pause),
        PlainKey::Contacted => to.contacted.clone_from(&from.contacted),
    }
}

// The crate's words for the reference's.

fn boot_id(boot: u32) -> BootId {
    BootId::from(format!("boot-{boot}"))
}

fn name(text: &str) -> PluginName {
    PluginName::try_from(text).expect("the generator makes valid ones")
}

fn uid(text: &str) -> PodUid {
    PodUid::try_from(text).expect("the generator makes valid ones")
}

fn ttl(ns: u64) -> Ttl {
    Ttl::new(Duration::from_nanos(ns)).expect("the generator makes valid ones")
}

fn scope(tag: u8) -> Scope {
    let rule = |namespace: &str| ScopeRule {
        namespaces: vec![namespace.to_owned()],
        ..ScopeRule::default()
    };
    let rules = match tag {
        0 => vec![],
        1 => vec![rule("team-*")],
        2 => vec![rule("[a")],
        _ => vec![rule("x"); 65],
    };
    Scope { rules }
}

fn identity(pod: &plain::Pod) -> PodIdentity {
    PodIdentity {
        uid: uid(&pod.uid),
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        labels: BTreeMap::new(),
    }
}

fn processes(keys: &[(u32, u64)]) -> Vec<ProcessKey> {
    let key = |(pid, start_time): &(u32, u64)| ProcessKey {
        pid: *pid,
        start_time: *start_time,
    };
    keys.iter().map(key).collect()
}

fn sandbox(id: &str, runtime: &str, pod: &Option<String>) -> SandboxPod {
    SandboxPod {
        sandbox_id: id.to_owned(),
        runtime: runtime.to_owned(),
        pod_namespace: "default".to_owned(),
        pod_name: "web".to_owned(),
        pod_uid: pod.as_deref().map(uid),
    }
}

fn reasons(plugins: &BTreeSet<String>) -> Vec<(PluginName, String)> {
    plugins
        .iter()
        .map(|p| (name(p), "why".to_owned()))
        .collect()
}

fn command(cmd: &Cmd) -> Command {
    let ns = Duration::from_nanos;
    match cmd {
        Cmd::Register {
            plugin,
            process,
            ttl: asked,
            scope: tag,
            audit,
            index,
            events,
        } => Command::Register {
            plugin: name(plugin),
            ttl: asked.map(ttl),
            scope: scope(*tag),
            mode: if *audit { Mode::Audit } else { Mode::Enforce },
            index: index.map(|i| {
                PluginIndex::try_from(format!("{i:02}")).expect("the generator makes valid ones")
            }),
            events: *events,
            holder: HolderFacts {
                process: ProcessKey {
                    pid: process.pid,
                    start_time: process.start,
                },
                uid: process.uid,
                cgroup: String::new(),
                pod: process.pod.as_ref().map(identity),
                connection_inode: None,
                registered_by: None,
                subject: None,
            },
        },
        Cmd::Renew(plugin, who) => Command::Renew {
            plugin: name(plugin),
            holders: processes(who),
        },
        Cmd::Release(plugin, who) => Command::Release {
            plugin: name(plugin),
            processes: processes(who),
        },
        Cmd::HolderLost(pid, start_time) => Command::HolderLost {
            process: ProcessKey {
                pid: *pid,
                start_time: *start_time,
            },
        },
        Cmd::Revoke(plugin, ban) => Command::Revoke {
            plugin: name(plugin),
            ban: ban.map(ns),
            reason: "why".to_owned(),
            by_uid: 0,
        },
        Cmd::SetBan(plugin, duration) => Command::SetBan {
            plugin: name(plugin),
            duration: ns(*duration),
            reason: "why".to_owned(),
            by_uid: 0,
        },
        Cmd::LiftBan(plugin) => Command::LiftBan {
            plugin: name(plugin),
        },
        Cmd::Pin(plugin, pod, asked) => Command::Pin {
            plugin: name(plugin),
            pod_uid: uid(pod),
            ttl: asked.map(ttl),
        },
        Cmd::Unpin(plugin, pod) => Command::Unpin {
            plugin: name(plugin),
            pod_uid: uid(pod),
        },
        Cmd::PodGone(pod) => Command::PodGone { pod_uid: uid(pod) },
        Cmd::PodsSeen(runtime, present) => Command::PodsSeen {
            runtime: runtime.clone(),
            present: present.iter().map(|pod| uid(pod)).collect(),
        },
        Cmd::Pause(duration) => Command::Pause {
            duration: ns(*duration),
            reason: "why".to_owned(),
            by_uid: 0,
        },
        Cmd::Resume => Command::Resume,
        Cmd::RuntimeSynchronized => Command::RuntimeSynchronized,
        Cmd::LearnPods(pods) => Command::LearnPods {
            pods: pods.iter().map(identity).collect(),
        },
        Cmd::SandboxAppeared(id, runtime, pod, unvetted) => Command::SandboxAppeared {
            sandbox: sandbox(id, runtime, pod),
            unvetted: reasons(unvetted),
        },
        Cmd::SandboxGone(id) => Command::SandboxGone {
            sandbox_id: id.clone(),
        },
        Cmd::SandboxVetting(id, vetted, unvetted) => Command::SandboxVetting {
            sandbox_id: id.clone(),
            vetted: vetted.iter().map(|p| name(p)).collect(),
            unvetted: reasons(unvetted),
        },
        Cmd::SandboxesSynchronized(runtime, present) => Command::SandboxesSynchronized {
            runtime: runtime.clone(),
            present: present
                .iter()
                .map(|(id, pod, covered)| PresentSandbox {
                    sandbox: sandbox(id, runtime, pod),
                    covered_by: covered.iter().map(|p| name(p)).collect(),
                })
                .collect(),
        },
        Cmd::Tick => Command::Tick,
    }
}

// The reference's words for the crate's.

fn kind_name(refusal: &nri_lease_state::Refusal) -> &'static str {
    use nri_lease_state::rules::RefusalKind;
    match refusal.kind() {
        RefusalKind::InvalidArgument => "InvalidArgument",
        RefusalKind::ResourceExhausted => "ResourceExhausted",
        RefusalKind::PermissionDenied => "PermissionDenied",
        RefusalKind::FailedPrecondition => "FailedPrecondition",
        RefusalKind::NotFound => "NotFound",
    }
}

fn event_name(event: &nri_lease_state::Event) -> String {
    let word = match event.kind {
        EventKind::Registered => "registered",
        EventKind::Renewed => "renewed",
        EventKind::HolderLost => "lost",
        EventKind::Released => "released",
        EventKind::Expired => "expired",
        EventKind::Revoked => "revoked",
        EventKind::Pinned => "pinned",
        EventKind::Unpinned => "unpinned",
        EventKind::Banned => "banned",
        EventKind::Unbanned => "unbanned",
        EventKind::Paused => "paused",
        EventKind::Resumed => "resumed",
    };
    match &event.plugin {
        Some(plugin) => format!("{word} {plugin}"),
        None => word.to_owned(),
    }
}

fn reply_text(reply: &Reply) -> String {
    match reply {
        Reply::Registered { lease } => format!(
            "generation {} ends {}",
            lease.generation, lease.deadline.boottime.0
        ),
        Reply::Renewed { lease } => format!("ends {}", lease.deadline.boottime.0),
        Reply::Released {
            ended,
            holders_left,
        } => {
            assert_eq!(*ended, *holders_left == 0);
            format!("left {holders_left}")
        }
        Reply::Revoked { .. } => "revoked".to_owned(),
        Reply::Ban { existed, .. } | Reply::Unpinned { existed } => format!("existed {existed}"),
        Reply::Pinned { .. } => "pinned".to_owned(),
        Reply::Pause { was_paused, .. } => format!("was {was_paused}"),
        Reply::Done => "done".to_owned(),
    }
}

fn project(state: &State) -> Stored {
    let mut stored = Stored::default();
    for record in state.records() {
        match record {
            Record::Lease(lease) => {
                stored
                    .leases
                    .insert(lease.plugin.to_string(), plain_lease(&lease));
            }
            Record::Pin(pin) => {
                let key = (pin.pod_uid.to_string(), pin.plugin.to_string());
                let plain = plain::Pin {
                    ttl: pin.ttl.into(),
                    end: end(&pin.deadline),
                    since: pin.pinned_at.0,
                    seen_on: pin.seen_on.clone(),
                };
                stored.pins.insert(key, plain);
            }
            Record::Ban(ban) => {
                let timed = timed(ban.duration, &ban.deadline);
                stored.bans.insert(ban.plugin.to_string(), timed);
            }
            Record::Pause(pause) => stored.pause = Some(timed(pause.duration, &pause.deadline)),
            Record::Sandbox(sandbox) => {
                let plain = plain::Sandbox {
                    runtime: sandbox.runtime.clone(),
                    pod: sandbox.pod_uid.as_ref().map(ToString::to_string),
                    since: sandbox.appeared_at.0,
                    unvetted: sandbox.unvetted.keys().map(ToString::to_string).collect(),
                };
                stored.sandboxes.insert(sandbox.sandbox_id.clone(), plain);
            }
            Record::Meta(meta) => stored.contacted.clone_from(&meta.contacted_runtimes),
        }
    }
    stored
}

fn plain_lease(lease: &record::LeaseRecord) -> plain::Lease {
    let holders = lease.holders.iter().map(|holder| {
        let facts = &holder.facts;
        let plain = plain::Holder {
            pid: facts.process.pid,
            start: facts.process.start_time,
            uid: facts.uid,
            pod: facts.pod.as_ref().map(|pod| plain::Pod {
                uid: pod.uid.to_string(),
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
            }),
            since: holder.registered_at.0,
            asked: asked(&holder.settings),
        };
        ((plain.pid, plain.start), plain)
    });
    let providers = lease.providers.iter();
    plain::Lease {
        generation: lease.generation,
        asked: asked(&lease.settings),
        end: end(&lease.deadline),
        registered: lease.registered_at.0,
        renewed: lease.renewed_at.0,
        holders: holders.collect(),
        last: lease.last_holder.as_ref().map(|l| (l.pid, l.gone_at.0)),
        providers: providers
            .map(|p| (p.namespace.clone(), p.name.clone()))
            .collect(),
        grace: match lease.grace {
            record::Grace::Unused => plain::Grace::Unused,
            record::Grace::Pending => plain::Grace::Pending,
            record::Grace::Used => plain::Grace::Used,
        },
    }
}

fn asked(settings: &Settings) -> plain::Asked {
    plain::Asked {
        ttl: settings.ttl.into(),
        scope: (0..2)
            .find(|tag| scope(*tag) == *settings.scope)
            .expect("only good scopes are taken"),
        audit: settings.mode == Mode::Audit,
        index: settings.index.map(PluginIndex::number),
        events: settings.events,
    }
}

fn timed(duration: Ttl, deadline: &Deadline) -> plain::Timed {
    plain::Timed {
        duration: duration.into(),
        end: end(deadline),
    }
}

fn end(deadline: &Deadline) -> plain::End {
    let boot = deadline.boot_id.as_str().trim_start_matches("boot-");
    plain::End {
        boot: boot.parse().expect("boot ids end in a number"),
        boottime: deadline.boottime.0,
        wall: deadline.wall.0,
    }
}

/// Every tree has a name of its own.
#[test]
fn trees_have_names_of_their_own() {
    let names: BTreeSet<_> = Tree::ALL.iter().map(|tree| tree.name()).collect();
    assert_eq!(names.len(), Tree::ALL.len());
}
