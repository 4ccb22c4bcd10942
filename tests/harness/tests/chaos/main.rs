//! Chaos on a real containerd: pods are created without pause while one thing after the other goes
//! wrong. No pod that a live lease covers may start without its plugin having processed it, and
//! outside of the faults nothing may be refused. The same is run without nri-lease, to compare.
//!
//! `CHAOS_SECONDS` (30), `CHAOS_COMPARE_SECONDS` (a third; of the variants beside the first),
//! `CHAOS_SEED` (or `--seed`), `CHAOS_CONTAINERD` (2.3, 2.2, 1.7), `CHAOS_WORKERS` (3),
//! `CHAOS_FAULTS` (only kinds that contain this), `CHAOS_VARIANTS` (lease,reject,validator,nothing; by default the first and the third in a short
//! run, all in one of two minutes and more).

mod faults;
mod journal;
mod ledger;
mod node;
mod shared;
mod workload;

use std::io::{BufRead, BufReader};
use std::process::{Child, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use nri_lease_harness::containerd::Version;
use nri_lease_harness::process;
use nri_lease_harness::runner::{self, Test};
use nri_lease_harness::wait::{PATIENCE, wait_until};
use nri_lease_harness::{Context, Result, bail, ensure};

use journal::{SECOND, lock, now};
use node::Node;
use shared::{Counts, Shared, Variant, read};

const PLUGIN: &str = "demo";

fn main() -> ExitCode {
    let test = Test::new("no_pod_escapes_and_none_is_refused_without_reason", |ctx| {
        chaos(&Settings::from_env(ctx.seed)?)
    });
    runner::main(1, vec![test])
}

struct Settings {
    seed: u64,
    seconds: u64,
    compare_seconds: u64,
    version: Version,
    workers: usize,
    variants: Vec<Variant>,
}

impl Settings {
    fn from_env(seed: u64) -> Result<Self> {
        let seconds = number("CHAOS_SECONDS", 30)?;
        let version = match text("CHAOS_CONTAINERD").as_deref() {
            None | Some("2.3") => Version::V2_3,
            Some("2.2") => Version::V2_2,
            Some("1.7") => Version::V1_7,
            Some(other) => bail!("CHAOS_CONTAINERD={other}: use 2.3, 2.2 or 1.7"),
        };
        let by_default = if seconds < 120 {
            "lease,validator"
        } else {
            "lease,reject,validator,nothing"
        };
        let wanted = text("CHAOS_VARIANTS").unwrap_or_else(|| by_default.to_owned());
        Ok(Self {
            seed: number("CHAOS_SEED", seed)?,
            seconds,
            compare_seconds: number("CHAOS_COMPARE_SECONDS", seconds / 3)?,
            version,
            workers: usize::try_from(number("CHAOS_WORKERS", 3)?)?,
            variants: wanted.split(',').map(variant).collect::<Result<_>>()?,
        })
    }
}

fn text(key: &str) -> Option<String> {
    std::env::var(key).ok().filter(|value| !value.is_empty())
}

fn number(key: &str, otherwise: u64) -> Result<u64> {
    text(key).map_or(Ok(otherwise), |value| {
        value.parse().with_context(|| format!("{key}={value}"))
    })
}

fn variant(name: &str) -> Result<Variant> {
    Ok(match name {
        "lease" => Variant::Lease,
        "reject" => Variant::LeaseReject,
        "validator" => Variant::ValidatorOnly,
        "nothing" => Variant::Nothing,
        other => bail!("no variant {other}: use lease, reject, validator, nothing"),
    })
}

fn chaos(settings: &Settings) -> Result<()> {
    println!(
        "chaos on {}, seed {}, {} workers, {} s and {} s for each other variant",
        settings.version.told(),
        settings.seed,
        settings.workers,
        settings.seconds,
        settings.compare_seconds
    );
    let mut runs = vec![];
    for (place, variant) in settings.variants.iter().enumerate() {
        let seconds = if place == 0 {
            settings.seconds
        } else {
            settings.compare_seconds
        };
        runs.push(run(settings, *variant, seconds)?);
    }
    print_table(&runs);
    for run in &runs {
        ensure!(
            run.shared.variant.config().is_none() || run.shared.violations() == 0,
            "{}: {} violations, seed {}",
            run.shared.variant.name(),
            run.shared.violations(),
            settings.seed
        );
        // What the faults do to pods that nobody protects: without it they would prove nothing.
        let escapes = read(&run.shared.counts.sandbox_escapes);
        ensure!(
            run.shared.variant.config().is_some() || run.seconds < 60 || escapes > 0,
            "{}: no escapes: the faults are harmless",
            run.shared.variant.name()
        );
    }
    Ok(())
}

struct Run {
    shared: Arc<Shared>,
    seconds: u64,
}

fn run(settings: &Settings, variant: Variant, seconds: u64) -> Result<Run> {
    let containerd = Node::containerd(variant, settings.version)?;
    let shared = Arc::new(Shared::new(variant, &containerd)?);
    let mut node = Node::start(containerd, shared.clone())?;
    let watched = Watch::start(&shared);
    let began = now();
    let outcome = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..settings.workers)
            .map(|number| {
                let shared = &shared;
                scope.spawn(move || workload::work(shared, number, settings.seed))
            })
            .collect();
        let injected = inject(&mut node, settings.seed, began + seconds * SECOND);
        shared.stop.store(true, Ordering::Relaxed);
        let mut outcome = injected;
        for worker in workers {
            let worked = worker.join().unwrap_or_else(|_| bail!("a worker panicked"));
            outcome = outcome.and(worked);
        }
        outcome
    });
    let run = Run {
        seconds: shared.since(began) / SECOND,
        shared: shared.clone(),
    };
    drop(watched);
    println!("{}: {} faults", variant.name(), shared.ledger.faults());
    print!("{}", shared.ledger.kinds());
    print!("{}", shared.timelines()?);
    outcome.with_context(|| {
        let end = now();
        let record = shared.timeline_of_all(end).unwrap_or_default();
        format!(
            "{}, seed {}; the last seconds:\n{record}",
            variant.name(),
            settings.seed
        )
    })?;
    let unknown = node.unknown_sandboxes()?;
    ensure!(unknown.is_empty(), "sandboxes nobody knows: {unknown:?}");
    Ok(run)
}

/// Admissions between two faults, at least: outside of windows there must be something to refuse.
const BETWEEN: usize = 4;

fn inject(node: &mut Node, seed: u64, until: journal::Time) -> Result<()> {
    let mut rng = Rng::with_seed(seed);
    let shared = node.shared.clone();
    let ledger = &shared.ledger;
    let mut deck = vec![];
    loop {
        quiet(&shared, &mut rng)?;
        if now() >= until {
            return Ok(());
        }
        let kind = match deck.pop() {
            Some(kind) => kind,
            None => {
                deck = faults::deck(node.has_daemon(), &mut rng);
                let only = text("CHAOS_FAULTS").unwrap_or_default();
                deck.retain(|kind| kind.name.contains(&only));
                ensure!(!deck.is_empty(), "CHAOS_FAULTS={only}: no such fault");
                continue;
            }
        };
        let faults::Kind { name, .. } = kind;
        shared.say(format!("FAULT {name}"));
        ledger.open_window(name, now(), kind.may_refuse, kind.daemon_away);
        let healed = (kind.inject)(node, &mut rng).context(name)?;
        node.wait_recovered()
            .inspect_err(|_| node.dump_containerd())
            .with_context(|| format!("no recovery from: {name}"))?;
        ledger.recovered(name, shared.since(healed));
        ledger.close_window(now());
        shared.say(format!("recovered from {name}"));
    }
}

/// Nothing is wrong for a moment, and pods start in it.
fn quiet(shared: &Shared, rng: &mut Rng) -> Result<()> {
    let since = now();
    let length = Duration::from_millis(rng.u64(300..1_500));
    wait_until("pods to start while nothing is wrong", PATIENCE, || {
        let (sandboxes, containers, _) = shared.admitted_since(since);
        Duration::from_nanos(shared.since(since)) >= length && sandboxes + containers >= BETWEEN
    })
}

/// `nri-lease watch`, started again whenever the daemon goes.
struct Watch {
    shared: Arc<Shared>,
    child: Arc<Mutex<Option<Child>>>,
}

impl Watch {
    fn start(shared: &Arc<Shared>) -> Self {
        let this = Self {
            shared: shared.clone(),
            child: Arc::default(),
        };
        if shared.variant.config().is_some() {
            let (shared, child) = (shared.clone(), this.child.clone());
            std::thread::spawn(move || {
                while !shared.is_over() {
                    let _ = watch_once(&shared, &child);
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
        }
        this
    }
}

fn watch_once(shared: &Shared, place: &Mutex<Option<Child>>) -> Result<()> {
    let mut command = shared.cli(&["-o", "json", "watch"])?;
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let out = child.stdout.take().context("stdout")?;
    *lock(place) = Some(child);
    for line in BufReader::new(out).lines() {
        let event: serde_json::Value = serde_json::from_str(&line?)?;
        let part = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        let pod = event["pod"]["name"].as_str().unwrap_or_default();
        let text = format!("{} {} {}", part("kind"), part("container"), part("message"));
        shared.journal.note("daemon", pod, text);
    }
    if let Some(mut child) = lock(place).take() {
        process::kill_and_reap(&mut child);
    }
    Ok(())
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(mut child) = lock(&self.child).take() {
            process::kill_and_reap(&mut child);
        }
    }
}

type Row = (&'static str, fn(&Counts) -> u32);

const ROWS: [Row; 14] = [
    ("sandboxes admitted", |c| read(&c.sandboxes)),
    ("containers admitted", |c| read(&c.containers)),
    ("  of both, while no lease lived", |c| read(&c.uncovered)),
    ("  found ready after a failed call", |c| {
        read(&c.found_ready)
    }),
    ("refused in fault windows", |c| read(&c.refusals_in_windows)),
    ("refused: sandbox unvetted", |c| read(&c.refused_unvetted)),
    ("other failures in fault windows", |c| {
        read(&c.failures_in_windows)
    }),
    ("other failures outside", |c| read(&c.failures_outside)),
    ("unvetted sandboxes, listed by audit", |c| read(&c.listed)),
    ("  of them not processed by the plugin", |c| {
        read(&c.listed_unprocessed)
    }),
    ("containers while daemon away (1.7)", |c| {
        read(&c.no_validator)
    }),
    ("ESCAPED sandboxes", |c| read(&c.sandbox_escapes)),
    ("ESCAPED containers", |c| read(&c.container_escapes)),
    ("WRONG rejections", |c| read(&c.wrong_rejections)),
];

fn print_table(runs: &[Run]) {
    let mut line = format!("{:<40}", "");
    for run in runs {
        line.push_str(&format!("{:>18}", run.shared.variant.name()));
    }
    println!("{line}");
    let row = |name: &str, value: &dyn Fn(&Run) -> String| {
        let cells: String = runs.iter().map(|r| format!("{:>18}", value(r))).collect();
        println!("{name:<40}{cells}");
    };
    row("seconds", &|run| run.seconds.to_string());
    row("faults", &|run| run.shared.ledger.faults().to_string());
    for (name, count) in ROWS {
        row(name, &|run| count(&run.shared.counts).to_string());
    }
}
