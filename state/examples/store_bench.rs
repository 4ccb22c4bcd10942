//! What the store costs on this disk: prints figures side by side, judges nothing.
//!
//! `store_bench DIR` (DIR is created, and left behind).

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nri_lease_state::store::{Options, Store, Tree, Write};

const ROUNDS: usize = 500;
const CLIENTS: usize = 64;
const CONCURRENT_FOR: Duration = Duration::from_secs(3);

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let dir = PathBuf::from(std::env::args().nth(1).ok_or("usage: store_bench DIR")?);
    fs::create_dir_all(&dir)?;
    let before = resident_kib()?;
    let opened = Store::open(&dir.join("state"), Options::default())?;
    let store = opened.store;
    store.commit(Vec::new()).wait()?;
    println!(
        "resident memory: {before} KiB before, {} KiB with the store open",
        resident_kib()?
    );
    for first in (0..4096).step_by(64) {
        let pins = (first..first + 64).map(|n| pin(n, 0)).collect();
        store.commit(pins).wait()?;
    }
    store
        .commit((0..256).map(|n| lease(n, 0)).collect())
        .wait()?;
    println!(
        "resident memory: {} KiB with 256 leases and 4096 pins",
        resident_kib()?
    );

    // Alternating, so that both see the same disk.
    let mut plain = Vec::new();
    let mut one = Vec::new();
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(dir.join("plain"))?;
    let record = lease(0, 0).value.unwrap_or_default();
    for round in 0..ROUNDS {
        let begin = Instant::now();
        file.write_all(&record)?;
        file.sync_data()?;
        plain.push(begin.elapsed());
        let begin = Instant::now();
        store.commit(vec![lease(round % 256, round)]).wait()?;
        one.push(begin.elapsed());
    }
    println!("plain append and fdatasync: {}", spread(&mut plain));
    println!("one client, one commit:     {}", spread(&mut one));

    let barriers = store.counters().barriers;
    let begin = Instant::now();
    let done: usize = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                scope.spawn({
                    let store = &store;
                    move || commit_until(store, client, begin)
                })
            })
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap_or(0))
            .sum()
    });
    let seconds = begin.elapsed().as_secs_f64();
    let barriers = store.counters().barriers - barriers;
    println!(
        "{CLIENTS} clients: {:.0} commits/s, {:.1} commits a barrier",
        done as f64 / seconds,
        done as f64 / barriers as f64
    );
    println!("resident memory after that: {} KiB", resident_kib()?);
    println!("{:?}", store.counters());
    let begin = Instant::now();
    store.close();
    println!("close with mirror: {:?}", begin.elapsed());
    println!(
        "database file: {} KiB",
        fs::metadata(dir.join("state/db/db"))?.len() / 1024
    );
    let begin = Instant::now();
    let opened = Store::open(&dir.join("state"), Options::default())?;
    println!(
        "open: {:?}, {} records, {:?}",
        begin.elapsed(),
        opened.records.len(),
        opened.source
    );
    println!("resident memory after reopening: {} KiB", resident_kib()?);
    Ok(())
}

fn commit_until(store: &Store, client: usize, begin: Instant) -> usize {
    let mut done = 0;
    while begin.elapsed() < CONCURRENT_FOR {
        match store.commit(vec![lease(client, done)]).wait() {
            Ok(()) => done += 1,
            Err(error) => {
                eprintln!("{error}");
                break;
            }
        }
    }
    done
}

/// About as long as a real record.
fn lease(number: usize, round: usize) -> Write {
    let value = format!(
        "{{\"version\":1,\"plugin\":\"plugin-{number}\",\"generation\":{round},\"ttl_seconds\":60,\
         \"boot_id\":\"5ca1ab1e-0000-4000-8000-000000000000\",\"deadline_boottime_ns\":123456789012345,\
         \"deadline_wall\":\"2026-12-01T12:00:00Z\",\"scope\":\"all\",\"mode\":\"enforce\",\
         \"holders\":[{{\"pid\":4711,\"start_time\":123456,\"uid\":0,\"cgroup\":\"/kubepods.slice/kubepods-besteffort.slice/x\"}}]}}"
    );
    Write {
        tree: Tree::Leases,
        key: format!("plugin-{number}"),
        value: Some(value.into_bytes()),
    }
}

fn pin(number: usize, round: usize) -> Write {
    let value = format!(
        "{{\"version\":1,\"plugin\":\"plugin-{}\",\"pod_uid\":\"00000000-0000-4000-8000-{number:012}\",\
         \"ttl_seconds\":600,\"round\":{round},\"deadline_boottime_ns\":123456789012345}}",
        number % 256
    );
    Write {
        tree: Tree::Pins,
        key: format!(
            "00000000-0000-4000-8000-{number:012}/plugin-{}",
            number % 256
        ),
        value: Some(value.into_bytes()),
    }
}

fn spread(times: &mut [Duration]) -> String {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    format!("p50 {:?}, p90 {:?}, p99 {:?}", at(0.5), at(0.9), at(0.99))
}

fn resident_kib() -> Outcome<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .ok_or("no VmRSS")?;
    Ok(line.split_whitespace().nth(1).ok_or("no figure")?.parse()?)
}
