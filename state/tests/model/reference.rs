//! The rules once more, as plainly as possible: one struct, vectors and maps, numbers in seconds
//! and nanoseconds, whole-state copies. Shares no code with the crate; slow and easy to read.

use std::collections::{BTreeMap, BTreeSet};

pub const SECOND: u64 = 1_000_000_000;

/// Small limits, so that random sequences meet them.
pub const MIN_TTL: u64 = 5 * SECOND;
pub const MAX_TTL: u64 = 100 * SECOND;
pub const DEFAULT_TTL: u64 = 20 * SECOND;
pub const DEFAULT_PIN_TTL: u64 = 40 * SECOND;
pub const GRACE: u64 = 30 * SECOND;
pub const MAX_LEASES: usize = 3;
pub const MAX_HOLDERS: usize = 2;
pub const MAX_PINS: usize = 4;
pub const MAX_BANS: usize = 2;
pub const MAX_SANDBOXES: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    pub boot: u32,
    pub boottime: u64,
    pub wall: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub boot: u32,
    pub boottime: u64,
    pub wall: i64,
}

impl End {
    fn after(clock: &Clock, ns: u64) -> Self {
        End {
            boot: clock.boot,
            boottime: clock.boottime + ns,
            wall: clock.wall + ns as i64,
        }
    }

    fn carried(&self, clock: &Clock, most: u64) -> Self {
        if self.boot == clock.boot {
            return self.clone();
        }
        let left = (self.wall - clock.wall).clamp(0, most as i64);
        End::after(clock, left as u64)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    pub ttl: u64,
    pub scope: u8,
    pub audit: bool,
    pub index: Option<u8>,
    pub events: Option<i32>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pod {
    pub uid: String,
    pub namespace: Option<String>,
    pub name: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    pub start: u64,
    pub uid: u32,
    pub pod: Option<Pod>,
    pub since: i64,
    pub asked: Asked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grace {
    Unused,
    Pending,
    Used,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub generation: u64,
    pub asked: Asked,
    pub end: End,
    pub registered: i64,
    pub renewed: i64,
    /// By pid and start time.
    pub holders: BTreeMap<(u32, u64), Holder>,
    pub last: Option<(u32, i64)>,
    pub providers: BTreeSet<(String, String)>,
    pub grace: Grace,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    pub ttl: u64,
    pub end: End,
    pub since: i64,
    pub seen_on: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timed {
    pub duration: u64,
    pub end: End,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    pub runtime: String,
    pub pod: Option<String>,
    pub since: i64,
    pub unvetted: BTreeSet<String>,
}

/// Everything that is stored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stored {
    pub leases: BTreeMap<String, Lease>,
    pub pins: BTreeMap<(String, String), Pin>,
    pub bans: BTreeMap<String, Timed>,
    pub pause: Option<Timed>,
    pub sandboxes: BTreeMap<String, Sandbox>,
    pub contacted: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    Barrier,
    Soon,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    pub start: u64,
    pub uid: u32,
    pub pod: Option<Pod>,
}

/// As the crate's commands, in plain words.
#[derive(Debug, Clone)]
pub enum Cmd {
    Register {
        plugin: String,
        process: Process,
        ttl: Option<u64>,
        scope: u8,
        audit: bool,
        index: Option<u8>,
        events: Option<i32>,
    },
    Renew(String, Vec<(u32, u64)>),
    Release(String, Vec<(u32, u64)>),
    HolderLost(u32, u64),
    Revoke(String, Option<u64>),
    SetBan(String, u64),
    LiftBan(String),
    Pin(String, String, Option<u64>),
    Unpin(String, String),
    PodGone(String),
    PodsSeen(String, BTreeSet<String>),
    Pause(u64),
    Resume,
    RuntimeSynchronized,
    LearnPods(Vec<Pod>),
    SandboxAppeared(String, String, Option<String>, BTreeSet<String>),
    SandboxGone(String),
    SandboxVetting(String, BTreeSet<String>, BTreeSet<String>),
    SandboxesSynchronized(String, Vec<(String, Option<String>, BTreeSet<String>)>),
    Tick,
}

/// The scopes of the generator: 0 and 1 are good, 2 is malformed, 3 has too many rules.
pub const SCOPES: u8 = 4;

#[derive(Debug, Clone, Default)]
pub struct Reference {
    pub now: Stored,
    pub grace_until: Option<u64>,
}

type Events = Vec<String>;

impl Reference {
    /// None: the end is not known yet.
    pub fn end_of(&self, lease: &Lease) -> Option<u64> {
        if lease.grace == Grace::Pending {
            self.grace_until.map(|until| until.max(lease.end.boottime))
        } else {
            Some(lease.end.boottime)
        }
    }

    pub fn lives(&self, lease: &Lease, clock: &Clock) -> bool {
        self.end_of(lease).is_none_or(|end| clock.boottime < end)
    }

    fn live(&self, plugin: &str, clock: &Clock) -> Option<&Lease> {
        let lease = self.now.leases.get(plugin)?;
        self.lives(lease, clock).then_some(lease)
    }

    pub fn next_end(&self) -> Option<u64> {
        let leases = self.now.leases.values().filter_map(|l| self.end_of(l));
        let pins = self.now.pins.values().map(|p| p.end.boottime);
        let timed = self.now.bans.values().chain(&self.now.pause);
        leases
            .chain(pins)
            .chain(timed.map(|t| t.end.boottime))
            .min()
    }

    /// Ok: what is answered, what happened; Err: the kind of refusal.
    pub fn apply(&mut self, cmd: &Cmd, clock: &Clock) -> Result<(String, Events), &'static str> {
        let before = self.now.clone();
        let result = self.carry_out(cmd, clock);
        if result.is_err() {
            self.now = before;
        }
        result
    }

    fn carry_out(&mut self, cmd: &Cmd, clock: &Clock) -> Result<(String, Events), &'static str> {
        let mut events = Events::new();
        let reply = match cmd {
            Cmd::Register {
                plugin,
                process,
                ttl,
                scope,
                audit,
                index,
                events: mask,
            } => {
                let asked = Asked {
                    ttl: ttl.unwrap_or(DEFAULT_TTL),
                    scope: *scope,
                    audit: *audit,
                    index: *index,
                    events: *mask,
                };
                self.register(plugin, process, asked, clock, &mut events)?
            }
            Cmd::Renew(plugin, who) => {
                self.held(plugin, who, clock)?;
                let lease = self.now.leases.get_mut(plugin).expect("it is held");
                renew(lease, clock);
                events.push(format!("renewed {plugin}"));
                format!("ends {}", lease.end.boottime)
            }
            Cmd::Release(plugin, who) => {
                self.held(plugin, who, clock)?;
                let lease = self.now.leases.get_mut(plugin).expect("it is held");
                let had = lease.holders.len();
                lease.holders.retain(|process, _| !who.contains(process));
                let left = lease.holders.len();
                for _ in left..had {
                    events.push(format!("released {plugin}"));
                }
                if left == 0 {
                    self.now.leases.remove(plugin);
                } else {
                    lease.generation += 1;
                    newest_counts(lease);
                }
                format!("left {left}")
            }
            Cmd::HolderLost(pid, start) => {
                let mut names: Vec<_> = self.now.leases.keys().cloned().collect();
                names.retain(|name| self.live(name, clock).is_some());
                for name in names {
                    let lease = self.now.leases.get_mut(&name).expect("it lives");
                    if lease.holders.remove(&(*pid, *start)).is_some() {
                        lease.last = Some((*pid, clock.wall));
                        lease.generation += 1;
                        newest_counts(lease);
                        events.push(format!("lost {name}"));
                    }
                }
                "done".to_owned()
            }
            Cmd::Revoke(plugin, ban) => {
                self.live(plugin, clock).ok_or("NotFound")?;
                self.now.leases.remove(plugin);
                events.push(format!("revoked {plugin}"));
                if let Some(duration) = ban {
                    self.ban(plugin, *duration, clock)?;
                    events.push(format!("banned {plugin}"));
                }
                "revoked".to_owned()
            }
            Cmd::SetBan(plugin, duration) => {
                let existed = self.banned(plugin, clock);
                self.ban(plugin, *duration, clock)?;
                events.push(format!("banned {plugin}"));
                format!("existed {existed}")
            }
            Cmd::LiftBan(plugin) => {
                let existed = self.banned(plugin, clock);
                if existed {
                    self.now.bans.remove(plugin);
                    events.push(format!("unbanned {plugin}"));
                }
                format!("existed {existed}")
            }
            Cmd::Pin(plugin, pod, ttl) => {
                let ttl = ttl.unwrap_or(DEFAULT_PIN_TTL);
                if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
                    return Err("InvalidArgument");
                }
                let key = (pod.clone(), plugin.clone());
                let lives = |pin: &&Pin| clock.boottime < pin.end.boottime;
                let old = self.now.pins.get(&key).filter(lives).cloned();
                if old.is_none() && self.now.pins.values().filter(lives).count() >= MAX_PINS {
                    return Err("ResourceExhausted");
                }
                let mut sandboxes = self.now.sandboxes.values();
                let host = sandboxes.find(|s| s.pod.as_ref() == Some(pod));
                let pin = Pin {
                    ttl,
                    end: End::after(clock, ttl),
                    since: old.as_ref().map_or(clock.wall, |old| old.since),
                    seen_on: match old {
                        Some(old) => old.seen_on,
                        None => host.map(|s| s.runtime.clone()),
                    },
                };
                self.now.pins.insert(key, pin);
                events.push(format!("pinned {plugin}"));
                "pinned".to_owned()
            }
            Cmd::Unpin(plugin, pod) => {
                let key = (pod.clone(), plugin.clone());
                let pin = self.now.pins.get(&key);
                let existed = pin.is_some_and(|pin| clock.boottime < pin.end.boottime);
                if existed {
                    self.now.pins.remove(&key);
                    events.push(format!("unpinned {plugin}"));
                }
                format!("existed {existed}")
            }
            Cmd::PodGone(pod) => {
                self.pod_gone(pod, &mut events);
                "done".to_owned()
            }
            Cmd::PodsSeen(runtime, present) => {
                self.now.pins.retain(|(pod, plugin), pin| {
                    if present.contains(pod) {
                        pin.seen_on = Some(runtime.clone());
                        return true;
                    }
                    let gone = pin.seen_on.as_ref() == Some(runtime);
                    if gone {
                        events.push(format!("unpinned {plugin}"));
                    }
                    !gone
                });
                "done".to_owned()
            }
            Cmd::Pause(duration) => {
                let pause = &self.now.pause;
                let was = pause
                    .as_ref()
                    .is_some_and(|p| clock.boottime < p.end.boottime);
                self.now.pause = Some(Timed {
                    duration: *duration,
                    end: End::after(clock, *duration),
                });
                events.push("paused".to_owned());
                format!("was {was}")
            }
            Cmd::Resume => {
                let pause = &self.now.pause;
                let was = pause
                    .as_ref()
                    .is_some_and(|p| clock.boottime < p.end.boottime);
                if was {
                    self.now.pause = None;
                    events.push("resumed".to_owned());
                }
                format!("was {was}")
            }
            Cmd::RuntimeSynchronized => {
                let until = self.grace_until.unwrap_or(clock.boottime + GRACE);
                self.grace_until = Some(until);
                self.record_grace(clock);
                "done".to_owned()
            }
            Cmd::LearnPods(pods) => {
                for lease in self.now.leases.values_mut() {
                    for holder in lease.holders.values_mut() {
                        let Some(pod) = &mut holder.pod else { continue };
                        if let Some(known) = pods.iter().find(|p| p.uid == pod.uid) {
                            *pod = known.clone();
                            provide(&mut lease.providers, known);
                        }
                    }
                }
                "done".to_owned()
            }
            Cmd::SandboxAppeared(id, runtime, pod, unvetted) => {
                let known = self.now.sandboxes.contains_key(id);
                if !known && self.now.sandboxes.len() >= MAX_SANDBOXES {
                    return Err("ResourceExhausted");
                }
                self.sandbox(id, runtime, pod, unvetted.clone(), clock);
                "done".to_owned()
            }
            Cmd::SandboxGone(id) => {
                if let Some(sandbox) = self.now.sandboxes.remove(id)
                    && let Some(pod) = sandbox.pod
                    && !self
                        .now
                        .sandboxes
                        .values()
                        .any(|s| s.pod.as_ref() == Some(&pod))
                {
                    self.pod_gone(&pod, &mut events);
                }
                "done".to_owned()
            }
            Cmd::SandboxVetting(id, vetted, unvetted) => {
                if let Some(sandbox) = self.now.sandboxes.get_mut(id) {
                    sandbox.unvetted.retain(|plugin| !vetted.contains(plugin));
                    sandbox.unvetted.extend(unvetted.iter().cloned());
                }
                "done".to_owned()
            }
            Cmd::SandboxesSynchronized(runtime, present) => {
                self.now.sandboxes.retain(|id, sandbox| {
                    sandbox.runtime != *runtime || present.iter().any(|(p, _, _)| p == id)
                });
                let first = self.now.contacted.insert(runtime.clone());
                for (id, pod, covered) in present {
                    if !self.now.sandboxes.contains_key(id)
                        && self.now.sandboxes.len() < MAX_SANDBOXES
                    {
                        let unvetted = if first {
                            BTreeSet::new()
                        } else {
                            covered.clone()
                        };
                        self.sandbox(id, runtime, pod, unvetted, clock);
                    }
                }
                "done".to_owned()
            }
            Cmd::Tick => {
                self.tick(clock, &mut events);
                "done".to_owned()
            }
        };
        Ok((reply, events))
    }

    fn register(
        &mut self,
        plugin: &str,
        process: &Process,
        asked: Asked,
        clock: &Clock,
        events: &mut Events,
    ) -> Result<String, &'static str> {
        if self.banned(plugin, clock) {
            return Err("FailedPrecondition");
        }
        if !(MIN_TTL..=MAX_TTL).contains(&asked.ttl) || asked.scope == 2 {
            return Err("InvalidArgument");
        }
        if asked.scope == 3 {
            return Err("ResourceExhausted");
        }
        // RunPodSandbox is bit 0, CreateContainer bit 3.
        if asked
            .events
            .is_some_and(|mask| mask != 0 && mask & 0b1001 == 0)
        {
            return Err("FailedPrecondition");
        }
        let key = (process.pid, process.start);
        let old = self.live(plugin, clock).cloned();
        let mut lease = match &old {
            None => {
                let leases = self.now.leases.values();
                if leases.filter(|l| self.lives(l, clock)).count() >= MAX_LEASES {
                    return Err("ResourceExhausted");
                }
                if self.now.leases.contains_key(plugin) {
                    events.push(format!("expired {plugin}"));
                }
                Lease {
                    generation: 0,
                    asked: asked.clone(),
                    end: End::after(clock, 0),
                    registered: clock.wall,
                    renewed: clock.wall,
                    holders: BTreeMap::new(),
                    last: None,
                    providers: BTreeSet::new(),
                    grace: Grace::Unused,
                }
            }
            Some(old) => old.clone(),
        };
        // A pod that is known by its uid only may host a holder that is known better.
        let mut process = process.clone();
        for known in lease.holders.values().filter_map(|h| h.pod.as_ref()) {
            if let Some(pod) = &mut process.pod
                && pod.name.is_none()
                && pod.uid == known.uid
            {
                *pod = known.clone();
            }
        }
        let pod = process.pod.clone();
        // The pid was given to another process.
        lease
            .holders
            .retain(|(pid, start), _| *pid != process.pid || *start == process.start);
        if !lease.holders.contains_key(&key) {
            for other in lease.holders.values() {
                let pods = (&other.pod, &process.pod);
                let same_place = match pods {
                    (None, None) => true,
                    (Some(a), Some(b)) => a.uid == b.uid || a.namespace == b.namespace,
                    _ => false,
                };
                if other.uid != process.uid || !same_place {
                    return Err("FailedPrecondition");
                }
            }
            if lease.holders.len() >= MAX_HOLDERS {
                return Err("ResourceExhausted");
            }
        }
        let known = lease.holders.get(&key).cloned();
        if let Some(pod) = &pod {
            provide(&mut lease.providers, pod);
        }
        let holder = Holder {
            pid: process.pid,
            start: process.start,
            uid: process.uid,
            pod,
            since: known.map_or(clock.wall, |known| known.since),
            asked,
        };
        lease.holders.insert(key, holder);
        newest_counts(&mut lease);
        lease.last = None;
        renew(&mut lease, clock);
        let changed =
            old.is_none_or(|old| old.asked != lease.asked || old.holders != lease.holders);
        lease.generation += u64::from(changed);
        let reply = format!(
            "generation {} ends {}",
            lease.generation, lease.end.boottime
        );
        self.now.leases.insert(plugin.to_owned(), lease);
        events.push(format!("registered {plugin}"));
        Ok(reply)
    }

    fn held(&self, plugin: &str, who: &[(u32, u64)], clock: &Clock) -> Result<(), &'static str> {
        let lease = self.live(plugin, clock).ok_or("NotFound")?;
        if lease.holders.is_empty() {
            return Err("FailedPrecondition");
        }
        let mine = lease.holders.keys().any(|process| who.contains(process));
        mine.then_some(()).ok_or("PermissionDenied")
    }

    fn banned(&self, plugin: &str, clock: &Clock) -> bool {
        let ban = self.now.bans.get(plugin);
        ban.is_some_and(|ban| clock.boottime < ban.end.boottime)
    }

    fn ban(&mut self, plugin: &str, duration: u64, clock: &Clock) -> Result<(), &'static str> {
        let live = self
            .now
            .bans
            .keys()
            .filter(|name| self.banned(name, clock))
            .count();
        if !self.banned(plugin, clock) && live >= MAX_BANS {
            return Err("ResourceExhausted");
        }
        let end = End::after(clock, duration);
        self.now
            .bans
            .insert(plugin.to_owned(), Timed { duration, end });
        Ok(())
    }

    fn pod_gone(&mut self, gone: &str, events: &mut Events) {
        self.now.pins.retain(|(pod, plugin), _| {
            if pod == gone {
                events.push(format!("unpinned {plugin}"));
            }
            pod != gone
        });
    }

    fn sandbox(
        &mut self,
        id: &str,
        runtime: &str,
        pod: &Option<String>,
        unvetted: BTreeSet<String>,
        clock: &Clock,
    ) {
        for ((pinned, _), pin) in &mut self.now.pins {
            if pod.as_ref() == Some(pinned) {
                pin.seen_on = Some(runtime.to_owned());
            }
        }
        let sandbox = Sandbox {
            runtime: runtime.to_owned(),
            pod: pod.clone(),
            since: clock.wall,
            unvetted,
        };
        self.now.sandboxes.insert(id.to_owned(), sandbox);
    }

    fn record_grace(&mut self, clock: &Clock) {
        let Some(until) = self.grace_until else {
            return;
        };
        for lease in self.now.leases.values_mut() {
            if lease.grace != Grace::Pending {
                continue;
            }
            if lease.end.boottime >= until {
                lease.grace = Grace::Unused;
                continue;
            }
            lease.grace = Grace::Used;
            lease.end = End {
                boot: clock.boot,
                boottime: until,
                wall: clock.wall + (until as i64 - clock.boottime as i64),
            };
        }
    }

    fn tick(&mut self, clock: &Clock, events: &mut Events) {
        let names: Vec<_> = self.now.leases.keys().cloned().collect();
        for name in names {
            if self.live(&name, clock).is_none() {
                self.now.leases.remove(&name);
                events.push(format!("expired {name}"));
            }
        }
        let passed = |end: &End| end.boottime <= clock.boottime;
        self.now.pins.retain(|(_, plugin), pin| {
            if passed(&pin.end) {
                events.push(format!("unpinned {plugin}"));
            }
            !passed(&pin.end)
        });
        self.now.bans.retain(|plugin, ban| {
            if passed(&ban.end) {
                events.push(format!("unbanned {plugin}"));
            }
            !passed(&ban.end)
        });
        if self
            .now
            .pause
            .as_ref()
            .is_some_and(|pause| passed(&pause.end))
        {
            self.now.pause = None;
            events.push("resumed".to_owned());
        }
        self.record_grace(clock);
    }

    /// A daemon starts with what is on the disk.
    pub fn load(disk: &Stored, mirror: bool, clock: &Clock) -> Self {
        let mut now = disk.clone();
        for lease in now.leases.values_mut() {
            if lease.end.boot != clock.boot {
                lease.end = lease.end.carried(clock, lease.asked.ttl);
                if lease.grace != Grace::Used {
                    lease.grace = Grace::Pending;
                }
                if let Some(newest) = lease.holders.values().max_by_key(|h| (h.start, h.pid)) {
                    lease.last = Some((newest.pid, clock.wall));
                    lease.generation += 1;
                    lease.holders.clear();
                }
            }
            if mirror {
                let at_least = End::after(clock, lease.asked.ttl.min(GRACE));
                if lease.end.boottime < at_least.boottime {
                    lease.end = at_least;
                }
            }
        }
        for pin in now.pins.values_mut() {
            if pin.end.boot != clock.boot {
                pin.seen_on = None;
            }
            pin.end = pin.end.carried(clock, pin.ttl);
        }
        for timed in now.bans.values_mut().chain(&mut now.pause) {
            timed.end = timed.end.carried(clock, timed.duration);
        }
        Reference {
            now,
            grace_until: None,
        }
    }

    /// How a command's changes are written.
    pub fn written(cmd: &Cmd) -> Written {
        match cmd {
            Cmd::Register { .. }
            | Cmd::Release(..)
            | Cmd::Revoke(..)
            | Cmd::SetBan(..)
            | Cmd::LiftBan(_)
            | Cmd::Pin(..)
            | Cmd::Unpin(..)
            | Cmd::Pause(_)
            | Cmd::Resume
            | Cmd::RuntimeSynchronized
            | Cmd::Tick => Written::Barrier,
            _ => Written::Soon,
        }
    }
}

fn renew(lease: &mut Lease, clock: &Clock) {
    lease.end = End::after(clock, lease.asked.ttl);
    lease.renewed = clock.wall;
    lease.grace = Grace::Unused;
}

fn newest_counts(lease: &mut Lease) {
    if let Some(newest) = lease.holders.values().max_by_key(|h| (h.start, h.pid)) {
        lease.asked = newest.asked.clone();
    }
}

fn provide(providers: &mut BTreeSet<(String, String)>, pod: &Pod) {
    if let (Some(namespace), Some(name)) = (&pod.namespace, &pod.name) {
        providers.insert((namespace.clone(), name.clone()));
    }
}
