//! What presence costs: `View::check` with 1 and with 256 holders, the time from a connect to a
//! bound connection, and the tracker's idle load. Prints figures, asserts nothing.
//!
//! `cargo run --release --example presence_cost`

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nri_lease::presence::{HolderSpec, Presence, ProcessKey, RuntimeId, Tracker};

const R: RuntimeId = RuntimeId(0);
const ROUNDS: usize = 20_000;

fn main() {
    if let Some(path) = std::env::args().nth(1) {
        return plugin(&path);
    }
    let directory = std::env::temp_dir().join(format!("presence-cost-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a scratch directory");
    let path = directory.join("nri.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    std::thread::spawn(move || {
        // Fences end by themselves; plugins stay.
        let accepted: Vec<UnixStream> = listener.incoming().map_while(Result::ok).collect();
        drop(accepted);
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a tokio runtime");
    for holders in [1, 256] {
        runtime.block_on(measure(&path, holders));
    }
    let _ = std::fs::remove_dir_all(&directory);
}

async fn measure(path: &std::path::Path, count: usize) {
    let tracker = Tracker::start().expect("a tracker");
    tracker.runtime_added(R, path.to_owned());
    let mut plugins: Vec<Child> = (0..count).map(|_| start_plugin(path)).collect();
    let keys: Vec<ProcessKey> = plugins
        .iter()
        .map(|p| nri_lease::presence::proc::key_of(p.id()).expect("a live plugin"))
        .collect();
    let spec = |process: &ProcessKey| HolderSpec {
        process: *process,
        connection_inode: None,
    };
    let began = Instant::now();
    tracker.set_holders(keys.iter().map(spec).collect());
    tracker.rescan_now(keys[0]).await;
    println!("{count:4} holders: tracked in {:?}", began.elapsed());
    let mut settles = Vec::new();
    for key in &keys {
        let began = Instant::now();
        tracker.settle(*key, Duration::from_secs(10)).await;
        settles.push(began.elapsed());
    }
    let mut rescans = Vec::new();
    for key in &keys {
        let began = Instant::now();
        tracker.rescan_now(*key).await;
        rescans.push(began.elapsed());
    }
    let view = tracker.view();
    let mut checks = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS {
        let key = &keys[round % keys.len()];
        let began = Instant::now();
        let presence = view.check(key, R, None);
        checks.push(began.elapsed());
        assert_eq!(presence, Presence::Bound);
    }
    let began = Instant::now();
    for key in &keys {
        view.check(key, R, None);
    }
    let all = began.elapsed();
    let before = cpu_time();
    std::thread::sleep(Duration::from_secs(3));
    let idle = cpu_time().saturating_sub(before);
    println!(
        "{count:4} holders: check {}; all {all:?}",
        quantiles(checks)
    );
    println!("              rescan {}", quantiles(rescans));
    println!(
        "              settle {}; fences {}; idle CPU {:.2}%",
        quantiles(settles),
        tracker.fences_opened(),
        idle.as_secs_f64() / 3.0 * 100.0
    );
    for plugin in &mut plugins {
        let _ = plugin.kill();
        let _ = plugin.wait();
    }
}

fn start_plugin(path: &std::path::Path) -> Child {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command
        .arg(path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("a plugin");
    let mut ready = [0];
    let stdout = child.stdout.as_mut().expect("it is piped");
    stdout.read_exact(&mut ready).expect("a connected plugin");
    child
}

fn plugin(path: &str) {
    let _connection = UnixStream::connect(path).expect("a runtime");
    std::io::stdout().write_all(b"+").expect("a parent");
    let _ = std::io::stdout().flush();
    let _ = std::io::stdin().read(&mut [0]);
}

fn quantiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
    format!("p50 {:?} p99 {:?} max {:?}", at(0.5), at(0.99), at(1.0))
}

/// User and system time of this process.
fn cpu_time() -> Duration {
    use nix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)
        .map(Duration::from)
        .unwrap_or_default()
}
