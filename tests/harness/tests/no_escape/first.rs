//! Being there first, and answering in time whatever else is going on. On the newest containerd.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nri_lease_harness::containerd::{Containerd, Options, Version};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::registry::register_storm;
use nri_lease_harness::{Context, Result, ensure};
use nri_lease_proto::lease::registry::RegisterRequest;
use nri_lease_proto::lease::types::{Scope, ScopeRule, Subject};
use nri_lease_proto::protobuf::well_known_types::duration::Duration as ProtoDuration;

use super::Run;
use super::node::Node;

pub const TESTS: &[(&str, Run)] = &[
    (
        "synchronised_before_cri_answers_in_every_restart",
        before_cri,
    ),
    ("hooks_answer_while_everything_else_is_stuck", hooks_in_time),
];

/// Restarts in a test run; `NRI_LEASE_RESTARTS=50` for the figure.
const RESTARTS: usize = 10;
const PODS: usize = 10;

fn before_cri(version: Version) -> Result<()> {
    let restarts = match std::env::var("NRI_LEASE_RESTARTS") {
        Ok(count) => count.parse().context("NRI_LEASE_RESTARTS")?,
        Err(_) => RESTARTS,
    };
    let mut node = Node::start(version, "")?;
    let _plugin = node.leased_plugin()?;
    for pod in 0..PODS {
        node.pod_starts(&format!("pod-{pod}"))?;
    }
    let mut ahead_ms = vec![];
    for _ in 0..restarts {
        let seen = synchronisations(&node.daemon.log()).len();
        node.containerd.stop()?;
        node.containerd.spawn()?;
        let ready_boottime = Duration::from_nanos(node.containerd.wait_ready()?);
        let ready = SystemTime::now() - (nri_lease_harness::pressure::boottime()? - ready_boottime);
        node.daemon.wait_connected()?;
        let synchronised = synchronisations(&node.daemon.log());
        let first = *synchronised.get(seen).context("no synchronisation")?;
        ahead_ms.push(match ready.duration_since(first) {
            Ok(ahead) => ahead.as_secs_f64() * 1e3,
            Err(behind) => -behind.duration().as_secs_f64() * 1e3,
        });
    }
    ahead_ms.sort_by(f64::total_cmp);
    let late = ahead_ms.iter().filter(|ahead| **ahead < 0.0).count();
    println!(
        "{restarts} restarts with {PODS} pods: synchronised before CRI was seen to answer in {}; \
         ahead by {:.1} ms at least, {:.1} ms in the median, {:.1} ms at most",
        restarts - late,
        ahead_ms[0],
        ahead_ms[ahead_ms.len() / 2],
        ahead_ms[ahead_ms.len() - 1]
    );
    ensure!(late == 0, "too late {late} times: {ahead_ms:?}");
    Ok(())
}

/// When the daemon was synchronised, by its log, oldest first.
fn synchronisations(log: &str) -> Vec<SystemTime> {
    log.lines()
        .filter(|line| line.contains("synchronised with the runtime"))
        .filter_map(|line| parse_time(line.split_whitespace().next()?))
        .collect()
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
/// Half of the runtime's 2 s: no pod may take that long, and so no hook has.
const BUDGET: Duration = Duration::from_secs(1);

/// The state directory is full, standard error is a pipe that nobody reads, every change is
/// logged, and 256 clients register all the time.
fn hooks_in_time(version: Version) -> Result<()> {
    let containerd = Containerd::start(version, &Options::default())?;
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
        let durations = pod_durations(&containerd, "busy", 20);
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
    // The runtime has not dropped us, and so it never waited for its timeout.
    let worst = durations.iter().max().context("pods")?;
    ensure!(*worst < BUDGET, "a pod took {worst:?}");
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
    nri_lease_harness::pressure::fill_pipe(&filler)?;
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
        nri_lease_harness::pressure::mount_tmpfs(dir, "size=8m")?;
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
