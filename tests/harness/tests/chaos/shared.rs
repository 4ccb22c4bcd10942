//! What workers and injector have in common, and the judgement of every single call.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use nri_lease_harness::containerd::{Containerd, Version};
use nri_lease_harness::cri::{Cri, Status};
use nri_lease_harness::daemon;
use nri_lease_harness::wait::wait_until;
use nri_lease_harness::{Error, Result};

use super::PLUGIN;
use super::journal::{Journal, MILLISECOND, Record, SECOND, Time, lock, now, short};
use super::ledger::Ledger;

/// What protects the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// The daemon; the default validator requires it.
    Lease,
    /// The same with `unvetted_sandboxes = "reject"`.
    LeaseReject,
    /// Only the default validator, which requires the plugin.
    ValidatorOnly,
    /// Nothing: NRI as it comes.
    Nothing,
}

impl Variant {
    pub fn name(self) -> &'static str {
        match self {
            Self::Lease => "nri-lease",
            Self::LeaseReject => "nri-lease reject",
            Self::ValidatorOnly => "validator only",
            Self::Nothing => "nothing",
        }
    }

    /// The daemon's configuration file; `None`: no daemon.
    pub fn config(self) -> Option<&'static str> {
        match self {
            Self::Lease => Some(""),
            Self::LeaseReject => Some("[enforcement]\nunvetted_sandboxes = \"reject\"\n"),
            Self::ValidatorOnly | Self::Nothing => None,
        }
    }
}

/// What a call was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Sandbox,
    Container,
}

#[derive(Default)]
pub struct Counts {
    pub sandboxes: AtomicU32,
    pub containers: AtomicU32,
    /// Admitted while no live lease covered them.
    pub uncovered: AtomicU32,
    /// Found ready although their call had failed: as the kubelet, we take those.
    pub found_ready: AtomicU32,
    pub refusals_in_windows: AtomicU32,
    pub sandbox_escapes: AtomicU32,
    pub container_escapes: AtomicU32,
    pub wrong_rejections: AtomicU32,
    /// Sandboxes that had to be listed by `audit`, and were.
    pub listed: AtomicU32,
    /// Of those: not processed by the plugin either.
    pub listed_unprocessed: AtomicU32,
    /// Containers refused because their sandbox had started without the daemon.
    pub refused_unvetted: AtomicU32,
    /// Runtimes without validation let containers pass while the daemon is away.
    pub no_validator: AtomicU32,
    /// Failures that are no refusals (the runtime is down, a leftover it could not remove).
    pub failures_in_windows: AtomicU32,
    pub failures_outside: AtomicU32,
}

pub fn add(count: &AtomicU32) {
    count.fetch_add(1, Ordering::Relaxed);
}

pub fn read(count: &AtomicU32) -> u32 {
    count.load(Ordering::Relaxed)
}

struct Violation {
    what: String,
    pod: String,
    begin: Time,
    end: Time,
}

pub struct Shared {
    pub variant: Variant,
    pub version: Version,
    pub journal: Journal,
    pub ledger: Ledger,
    pub counts: Counts,
    pub cri: Cri,
    pub stop: AtomicBool,
    record: Mutex<Record>,
    run_dir: PathBuf,
    pub dir: PathBuf,
    /// When and what was admitted; uncovered ones too.
    admitted: Mutex<Vec<(Time, Kind)>>,
    known: Mutex<HashSet<String>>,
    violations: Mutex<Vec<Violation>>,
    samples: Mutex<Vec<String>>,
}

/// Around a violation, this much is shown.
const BEFORE: Time = 3 * SECOND;
const AFTER: Time = 500 * MILLISECOND;
const SHOWN: usize = 3;
/// So many are said at once.
const SAID: usize = 10;

impl Shared {
    pub fn new(variant: Variant, containerd: &Containerd) -> Result<Self> {
        let dir = containerd.dir();
        let name = dir.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        Ok(Self {
            variant,
            version: containerd.version(),
            journal: Journal::default(),
            ledger: Ledger::default(),
            counts: Counts::default(),
            cri: Cri::start(
                &dir.join("c.sock"),
                &format!("/{name}"),
                &dir.join("workers.log"),
            )?,
            stop: AtomicBool::new(false),
            record: Mutex::new(Record::at(&dir.join(format!("{PLUGIN}.record")))),
            run_dir: Self::daemon_dir(dir).join("run"),
            dir: dir.to_owned(),
            admitted: Mutex::default(),
            known: Mutex::default(),
            violations: Mutex::default(),
            samples: Mutex::default(),
        })
    }

    pub fn daemon_dir(containerd: &Path) -> PathBuf {
        containerd.join("d")
    }

    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The injector's note.
    pub fn say(&self, text: String) {
        self.journal.note("injector", "", text);
    }

    /// `nri-lease ARGS`, as an admin.
    pub fn cli(&self, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(daemon::binary("nri-lease")?);
        command.arg("--run-dir").arg(&self.run_dir).args(args);
        command.stdin(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }

    /// A CRI call came back with a sandbox or container. True: `audit` must list the sandbox
    /// before it may go.
    pub fn admitted(
        &self,
        kind: Kind,
        pod: &str,
        id: &str,
        (begin, end): (Time, Time),
        unvetted: bool,
    ) -> Result<bool> {
        lock(&self.admitted).push((end, kind));
        lock(&self.known).insert(id.to_owned());
        add(match kind {
            Kind::Sandbox => &self.counts.sandboxes,
            Kind::Container => &self.counts.containers,
        });
        let text = format!(
            "{kind:?} {} admitted after {} ms",
            short(id),
            (end - begin) / MILLISECOND
        );
        self.journal.note("cri", pod, text);
        let processed = lock(&self.record).has(id, begin, end)?;
        if !self.ledger.covers(begin, end) {
            add(&self.counts.uncovered);
            return Ok(false);
        }
        let has_daemon = self.variant.config().is_some();
        let away = has_daemon && self.ledger.daemon_may_be_away(begin, end);
        match kind {
            Kind::Sandbox if processed => Ok(has_daemon && self.ledger.daemon_was_dead(begin, end)),
            // Old runtimes cannot be refused sandboxes: those start unvetted by design.
            Kind::Sandbox if away || (has_daemon && !self.version.validates()) => {
                add(&self.counts.listed_unprocessed);
                Ok(true)
            }
            Kind::Sandbox => {
                add(&self.counts.sandbox_escapes);
                let what = format!("escape: the plugin has not processed sandbox {id}");
                self.violated(what, pod, begin, end);
                Ok(false)
            }
            Kind::Container if processed => {
                if unvetted && self.variant == Variant::LeaseReject {
                    add(&self.counts.container_escapes);
                    let what = format!("escape: container {id} started in an unvetted sandbox");
                    self.violated(what, pod, begin, end);
                }
                Ok(false)
            }
            Kind::Container if away && !self.version.validates() => {
                add(&self.counts.no_validator);
                Ok(false)
            }
            Kind::Container => {
                add(&self.counts.container_escapes);
                let what = format!("escape: the plugin has not processed container {id}");
                self.violated(what, pod, begin, end);
                Ok(false)
            }
        }
    }

    /// A CRI call failed: was that right?
    pub fn failed(&self, kind: Kind, pod: &str, begin: Time, end: Time, error: &Error) -> String {
        let text = error
            .downcast_ref::<Status>()
            .map_or_else(|| format!("{error:#}"), ToString::to_string);
        self.journal
            .note("cri", pod, format!("{kind:?} failed: {text}"));
        let refusal = text.contains("required NRI plugin")
            || text.contains("required plugin")
            || text.contains("nri-lease");
        if refusal && self.ledger.may_refuse(begin, end) {
            add(&self.counts.refusals_in_windows);
        } else if refusal {
            add(&self.counts.wrong_rejections);
            self.violated(format!("wrong rejection: {text}"), pod, begin, end);
        } else if self.ledger.is_disturbed(begin, end) {
            add(&self.counts.failures_in_windows);
        } else {
            add(&self.counts.failures_outside);
            let mut samples = lock(&self.samples);
            if samples.len() < SHOWN {
                samples.push(text.clone());
            }
        }
        text
    }

    /// The daemon was away when the sandbox started, or ended so soon after that its record of the
    /// sandbox may not have been written yet: then it counts as unvetted, rightly.
    pub fn may_be_unvetted(&self, (begin, end): (Time, Time)) -> bool {
        self.ledger.daemon_may_be_away(begin, end + SECOND)
    }

    /// The refusal of a container because its sandbox is unvetted, where that is configured.
    pub fn is_right_about_unvetted(&self, error: &Error) -> bool {
        let right = self.variant == Variant::LeaseReject
            && error
                .downcast_ref::<Status>()
                .is_some_and(|status| status.message.contains("has missed the start"));
        if right {
            add(&self.counts.refused_unvetted);
        }
        right
    }

    /// Before a sandbox goes: `audit` must list its pod. While the daemon is away we wait for it.
    pub fn must_be_listed(&self, pod: &str, uid: &str, begin: Time, end: Time) {
        let patience = Duration::from_secs(20);
        let found = wait_until("audit", patience, || self.audit_lists(uid).unwrap_or(false));
        if found.is_ok() {
            add(&self.counts.listed);
            self.journal.note("cri", pod, "listed by audit");
            return;
        }
        add(&self.counts.sandbox_escapes);
        let what = format!("escape: pod {uid}, admitted without the daemon, is not in audit");
        self.violated(what, pod, begin, end);
    }

    fn audit_lists(&self, uid: &str) -> Result<bool> {
        let output = self.cli(&["-o", "json", "audit"])?.output()?;
        let audit: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        Ok(audit["sandboxes"].as_array().is_some_and(|sandboxes| {
            sandboxes.iter().any(|s| {
                s["pod"]["uid"] == uid
                    && s["plugins"]
                        .as_array()
                        .is_some_and(|plugins| plugins.iter().any(|p| p == PLUGIN))
            })
        }))
    }

    pub fn violated(&self, what: String, pod: &str, begin: Time, end: Time) {
        let mut violations = lock(&self.violations);
        if self.variant.config().is_some() && violations.len() < SAID {
            println!("VIOLATION ({}) {what}, pod {pod}", self.variant.name());
        }
        violations.push(Violation {
            what,
            pod: pod.to_owned(),
            begin,
            end,
        });
    }

    /// How many sandboxes and containers were admitted at or after a time, and the first of all.
    pub fn admitted_since(&self, since: Time) -> (usize, usize, Option<Time>) {
        let admitted = lock(&self.admitted);
        let later = admitted.iter().filter(|(at, _)| *at >= since);
        let sandboxes = later.clone().filter(|(_, k)| *k == Kind::Sandbox).count();
        let first = later.clone().map(|(at, _)| *at).min();
        (sandboxes, later.count() - sandboxes, first)
    }

    pub fn knows(&self, id: &str) -> bool {
        lock(&self.known).contains(id)
    }

    /// The first violations with what happened around them; not those of the variants that are there
    /// for comparison, which have many by nature.
    pub fn timelines(&self) -> Result<String> {
        let mut text = String::new();
        for sample in lock(&self.samples).iter() {
            text.push_str(&format!("  failure outside of windows: {sample}\n"));
        }
        if self.variant.config().is_none() {
            return Ok(text);
        }
        let record = lock(&self.record).entries()?.to_vec();
        for violation in lock(&self.violations).iter().take(SHOWN) {
            let Violation {
                what,
                pod,
                begin,
                end,
            } = violation;
            text.push_str(&format!(
                "  {what}\n  pod {pod}; the call took from {} to {} ms; 0 is {} ns of CLOCK_BOOTTIME\n",
                BEFORE / MILLISECOND,
                (end - begin + BEFORE) / MILLISECOND,
                begin - BEFORE
            ));
            text.push_str(
                &self
                    .journal
                    .timeline(pod, begin - BEFORE, end + AFTER, &record),
            );
        }
        Ok(text)
    }

    /// For a run that could not go on.
    pub fn timeline_of_all(&self, end: Time) -> Result<String> {
        let record = lock(&self.record).entries()?.to_vec();
        Ok(self.journal.timeline("", end - BEFORE * 10, end, &record))
    }

    pub fn violations(&self) -> usize {
        lock(&self.violations).len()
    }

    pub fn since(&self, at: Time) -> Time {
        now().saturating_sub(at)
    }
}
