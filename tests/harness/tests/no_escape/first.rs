//! Being there first, and answering in time whatever else is going on. On the newest containerd.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nri_lease_harness::containerd::{Containerd, Options, Version};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::pressure::{boottime, fill_pipe, mount_tmpfs};
use nri_lease_harness::registry::register_storm;
use nri_lease_harness::{Context, Result, ensure};
use nri_lease_proto::lease::registry::RegisterRequest;
use nri_lease_proto::lease::types::{Scope, ScopeRule, Subject};
use nri_lease_proto::protobuf::well_known_types::duration::Duration as ProtoDuration;

use super::Run;
use super::node::{Node, message};

pub const TESTS: &[(&str, Run)] = &[
    (
        "nothing_passes_in_the_gap_after_a_restart_of_the_runtime",
        after_restarts,
    ),
    ("hooks_answer_while_everything_else_is_stuck", hooks_in_time),
];

/// Restarts in a test run; `NRI_LEASE_RESTARTS=50` for the figure.
const RESTARTS: usize = 10;
const PODS: usize = 10;

/// The plugin does not come back. Containers are refused at once, by the default validator until the
/// daemon is there; a sandbox that starts before that is listed.
fn after_restarts(version: Version) -> Result<()> {
    let restarts = match std::env::var("NRI_LEASE_RESTARTS") {
        Ok(count) => count.parse().context("NRI_LEASE_RESTARTS")?,
        Err(_) => RESTARTS,
    };
    let options = Options {
        default_validator: Some(vec!["nri-lease".to_owned()]),
        ..Options::default()
    };
    let config = "[log]\nlevel = \"info,nri_lease::nri=debug\"\n";
    let mut node = Node::start_with(version, &options, config)?;
    let _plugin = node.leased_plugin()?;
    for pod in 0..PODS {
        node.pod_starts(&format!("pod-{pod}"))?;
    }
    let (present, _) = node.pod_starts("present")?;
    let (mut starts, mut by_validator, mut marked) = (vec![], 0, 0);
    for round in 0..restarts {
        let seen = node.daemon.log().len();
        node.containerd.stop()?;
        node.containerd.spawn()?;
        let cri_answered = Duration::from_nanos(node.containerd.wait_ready()?);
        let gap = format!("gap-{round}");
        let sandbox = node.containerd.cri().run_pod_pending(&node.pod(&gap))?;
        let refusal = node.container(&present, &gap);
        let refusal = message(&refusal.err().context("a container escaped")?);
        by_validator += u32::from(!refusal.contains("required NRI plugin"));
        if sandbox.wait().is_ok() {
            node.wait_audited(&gap)?;
            marked += 1;
        }
        let cri_answered = SystemTime::now() - (boottime()? - cri_answered);
        node.daemon.wait_connected()?;
        let log = node.daemon.log();
        let when = |what| time_of(&log[seen..], what).with_context(|| format!("no line {what:?}"));
        let socket = std::fs::metadata(node.containerd.nri_socket())?;
        let since_socket = |at: SystemTime| milliseconds(socket.modified()?, at);
        starts.push(Start {
            connected: time_of(&log[seen..], "connected at once")
                .map(since_socket)
                .transpose()?,
            configured: since_socket(when("has configured us")?)?,
            synchronised: since_socket(when("synchronised with the runtime")?)?,
            cri_answered: since_socket(cri_answered)?,
        });
    }
    for start in &starts {
        println!("{start:.1?}");
    }
    let late = starts
        .iter()
        .filter(|start| start.synchronised > start.cri_answered)
        .count();
    println!(
        "{restarts} restarts with {PODS} pods: synchronised before CRI was seen to answer in {}",
        restarts - late
    );
    println!(
        "containers created at once: all refused, {by_validator} by the default validator; \
         sandboxes: {} refused, {marked} listed by audit",
        restarts - marked
    );
    Ok(())
}

/// Milliseconds from the making of the NRI socket.
#[derive(Debug)]
#[allow(dead_code)] // printed
struct Start {
    /// None: not at the first try.
    connected: Option<f64>,
    configured: f64,
    synchronised: f64,
    cri_answered: f64,
}

fn milliseconds(from: SystemTime, to: SystemTime) -> Result<f64> {
    Ok(match to.duration_since(from) {
        Ok(after) => after.as_secs_f64() * 1e3,
        Err(before) => -before.duration().as_secs_f64() * 1e3,
    })
}

/// The time of the first line that says so, in the daemon's log.
fn time_of(log: &str, what: &str) -> Option<SystemTime> {
    let line = log.lines().find(|line| line.contains(what))?;
    parse_time(line.split_whitespace().next()?)
}

/// "2026-12-01T14:40:35.123456Z" of a day whose date is the same as today's or yesterday's.
fn parse_time(text: &str) -> Option<SystemTime> {
    let (date, time) = text.trim_end_matches('Z').split_once('T')?;
    let mut parts = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    // Days since 1970 (Howard Hinnant, "chrono-compatible low-level date algorithms").
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year - era * 400;
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = era * 146_097 + day_of_era - 719_468;
    let mut parts = time.split(':').map(|part| part.parse::<f64>().ok());
    let (hour, minute, second) = (parts.next()??, parts.next()??, parts.next()??);
    let seconds = hour.mul_add(3600.0, minute * 60.0) + second;
    let midnight = Duration::from_secs(u64::try_from(days * 86_400).ok()?);
    Some(SystemTime::UNIX_EPOCH + midnight + Duration::from_secs_f64(seconds))
}

const CLIENTS: usize = 256;
/// A quarter of the usual: a plugin that takes longer is dropped.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(500);

/// The state directory is full, standard error is a pipe that nobody reads, every change is
/// logged, and 256 clients register all the time.
fn hooks_in_time(version: Version) -> Result<()> {
    let options = Options {
        request_timeout: REQUEST_TIMEOUT,
        ..Options::default()
    };
    let containerd = Containerd::start(version, &options)?;
    let dir = containerd.dir().join("d");
    let config = "[log]\nlevel = \"trace\"\n[leases]\nmax_leases = 512\n";
    let mut daemon = Daemon::prepare(&dir, &containerd.nri_socket(), config)?;
    let disk = SmallDisk::mount(&daemon.state_dir())?;
    let (stderr, _unread) = full_pipe()?;
    daemon.spawn_with_stderr(stderr)?;
    daemon.wait_connected()?;
    let baseline = pod_durations(&containerd, "calm", 5)?;
    disk.fill()?;

    let over = AtomicBool::new(false);
    let requests = (0..CLIENTS).map(elsewhere).collect();
    let run_dir = daemon.run_dir();
    let (storm, durations) = std::thread::scope(|scope| {
        let storm = scope.spawn(|| register_storm(&run_dir, requests, &over));
        let durations = pod_durations(&containerd, "busy", 10);
        over.store(true, Ordering::Relaxed);
        (storm.join().expect("it returns its errors"), durations)
    });
    let (acknowledged, refused) = storm?;
    let durations = durations?;
    let status = daemon.cli(&["-o", "json", "status"])?.ok()?.json()?;
    println!(
        "{CLIENTS} clients on a full disk: {acknowledged} registrations acknowledged, {refused} \
         refused; a pod with its container took {:?} at most, {:?} before; the store: {}",
        durations.iter().max().context("pods")?,
        baseline.iter().max().context("pods")?,
        status["store"],
    );
    ensure!(acknowledged + refused > 0);
    ensure!(status["over_budget_total"] == 0, "{status}");
    ensure!(status["rejected_total"] == 0, "{status}");
    // The runtime has never dropped us, and so no answer took longer than that.
    let log = containerd.log();
    let connections = log.matches("99-nri-lease\\\" connected").count();
    ensure!(connections == 1, "connected {connections} times");
    ensure!(!log.contains("closing plugin 99-nri-lease"));
    ensure!(status["runtimes"][0]["connected"] == true, "{status}");
    Ok(())
}

/// A registration of the test itself that covers no pod of the test.
fn elsewhere(number: usize) -> RegisterRequest {
    RegisterRequest {
        plugin: format!("plugin-{number}"),
        ttl: Some(ProtoDuration {
            seconds: 600,
            ..Default::default()
        })
        .into(),
        scope: Some(Scope {
            rules: vec![ScopeRule {
                namespaces: vec!["elsewhere".to_owned()],
                ..Default::default()
            }],
            ..Default::default()
        })
        .into(),
        subject: Some(Subject {
            pid: std::process::id(),
            ..Default::default()
        })
        .into(),
        ..Default::default()
    }
}

fn pod_durations(containerd: &Containerd, name: &str, count: usize) -> Result<Vec<Duration>> {
    let mut durations = vec![];
    for number in 0..count {
        let pod = nri_lease_harness::cri::Pod::named(&format!("{name}-{number}"));
        let began = Instant::now();
        let sandbox = containerd.cri().run_pod(&pod)?;
        containerd.cri().create_container(&sandbox, "main")?;
        durations.push(began.elapsed());
        containerd.cri().stop_pod(&sandbox)?;
        containerd.cri().remove_pod(&sandbox)?;
    }
    Ok(durations)
}

/// A pipe with no room, and its other end.
fn full_pipe() -> Result<(std::process::Stdio, std::io::PipeReader)> {
    let (reader, mut writer) = std::io::pipe()?;
    let filler = writer.try_clone()?;
    fill_pipe(&filler)?;
    writer.flush()?;
    Ok((writer.into(), reader))
}

/// A file system of 8 MiB at the state directory; unmounted with the scratch directory.
struct SmallDisk {
    dir: std::path::PathBuf,
}

impl SmallDisk {
    fn mount(dir: &std::path::Path) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        mount_tmpfs(dir, "size=8m")?;
        Ok(Self {
            dir: dir.to_owned(),
        })
    }

    fn fill(&self) -> Result<()> {
        let mut file = std::fs::File::create(self.dir.join("filler"))?;
        let zeros = [0_u8; 1 << 16];
        loop {
            match file.write_all(&zeros) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
