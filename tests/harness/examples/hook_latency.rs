//! What a validation costs, seen by NRI's own runtime library: nothing, the same check as a Go
//! plugin on NRI's stub, and nri-leased with one and with 256 leases; side by side in one run, in
//! turn, so that a noisy machine is noisy for all of them.
//!
//! `make bench` runs it with release builds. Prints medians of the rounds; it judges nothing.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nri_lease_harness::adaptation::{Adaptation, AdaptationOptions};
use nri_lease_harness::daemon::Daemon;
use nri_lease_harness::plugin::{Nri, Plugin, PluginOptions};
use nri_lease_harness::scratch::Scratch;
use nri_lease_harness::wait::{PATIENCE, wait_until};
use nri_lease_harness::{Context, Result};

const ROUNDS: usize = 7;
const CALLS: u32 = 2000;
const PLUGIN: &str = "demo";

fn main() -> Result<()> {
    let scratch = Scratch::new()?;
    let socket = scratch.join("nri.sock");
    let runtime = Adaptation::start(&AdaptationOptions::new(Nri::V0_12), &socket)?;
    let plugin =
        Plugin::start_synchronized(&PluginOptions::named(PLUGIN), &socket, scratch.path())?;
    runtime.run_pod("bench")?;

    let mut nothing = Row::new("no validator");
    let mut go = Row::new("the check as a Go plugin");
    let mut one = Row::new("nri-leased, 1 lease");
    let mut many = Row::new("nri-leased, 256 leases");
    let mut echo = Row::new("bare echo, unix socket, 512 bytes");
    for _ in 0..ROUNDS {
        settle(&runtime)?;
        nothing.add(runtime.bench_create_container("bench", CALLS)?);
        {
            let options = PluginOptions {
                index: "99".into(),
                events: "validate_container_adjustment".into(),
                require: vec![PLUGIN.into()],
                ..PluginOptions::named("go-check")
            };
            let _check = Plugin::start_synchronized(&options, &socket, scratch.path())?;
            go.add(runtime.bench_create_container("bench", CALLS)?);
        }
        for (row, leases) in [(&mut one, 1), (&mut many, 256)] {
            settle(&runtime)?;
            let _daemon = daemon(&scratch, &socket, &plugin, leases)?;
            row.add(runtime.bench_create_container("bench", CALLS)?);
        }
        echo.add(round_trips()?);
    }

    println!(
        "{ROUNDS} rounds of {CALLS} CreateContainer each, NRI 0.12; medians of the rounds, µs"
    );
    println!(
        "{:<36} {:>8} {:>8} {:>12} {:>12}",
        "", "p50", "p99", "added p50", "added p99"
    );
    for row in [&nothing, &go, &one, &many, &echo] {
        let (p50, p99) = (row.median(0), row.median(1));
        let added = |n: usize, value: f64| value - nothing.median(n);
        if std::ptr::eq(row, &nothing) || std::ptr::eq(row, &echo) {
            println!("{:<36} {p50:>8.1} {p99:>8.1}", row.name);
        } else {
            println!(
                "{:<36} {p50:>8.1} {p99:>8.1} {:>12.1} {:>12.1}",
                row.name,
                added(0, p50),
                added(1, p99)
            );
        }
    }
    Ok(())
}

fn daemon(
    scratch: &Scratch,
    socket: &std::path::Path,
    plugin: &Plugin,
    leases: usize,
) -> Result<Daemon> {
    let dir = scratch.join(&format!("d{leases}"));
    let daemon = Daemon::start(&dir, socket, "")?;
    let pid = plugin.pid().to_string();
    let elsewhere = dir.join("elsewhere.toml");
    std::fs::write(&elsewhere, "[[rules]]\nnamespaces = [\"elsewhere-*\"]\n")?;
    daemon
        .cli(&["register", PLUGIN, "--ttl", "1h", "--pid", &pid, "--once"])?
        .ok()?;
    for number in 1..leases {
        let name = format!("other-{number}");
        let scope = elsewhere.to_str().context("a path in UTF-8")?;
        daemon
            .cli(&[
                "register", &name, "--ttl", "1h", "--pid", &pid, "--once", "--scope", scope,
            ])?
            .ok()?;
    }
    wait_until("the plugin to be present", PATIENCE, || {
        daemon
            .cli(&["-o", "json", "inspect", PLUGIN])
            .ok()
            .and_then(|output| output.json().ok())
            .is_some_and(|lease| lease["state"] == "present")
    })?;
    Ok(daemon)
}

/// A validator that has gone is still asked by the next request, and fails it.
fn settle(runtime: &Adaptation) -> Result<()> {
    wait_until("validators that are gone to be forgotten", PATIENCE, || {
        runtime.create_container("bench", "settle").is_ok()
    })
}

/// The least that asking another process can cost here.
fn round_trips() -> Result<Vec<Duration>> {
    const BYTES: usize = 512;
    let (mut ours, mut theirs) = UnixStream::pair()?;
    let echo = std::thread::spawn(move || {
        let mut buf = [0; BYTES];
        while theirs.read_exact(&mut buf).is_ok() && theirs.write_all(&buf).is_ok() {}
    });
    let mut buf = [0; BYTES];
    let mut all = Vec::new();
    for _ in 0..CALLS {
        let began = Instant::now();
        ours.write_all(&buf)?;
        ours.read_exact(&mut buf)?;
        all.push(began.elapsed());
    }
    drop(ours);
    let _ = echo.join();
    Ok(all)
}

struct Row {
    name: &'static str,
    /// p50 and p99 of each round, in µs.
    rounds: [Vec<f64>; 2],
}

impl Row {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            rounds: [Vec::new(), Vec::new()],
        }
    }

    fn add(&mut self, mut all: Vec<Duration>) {
        all.sort();
        for (rounds, percent) in self.rounds.iter_mut().zip([50, 99]) {
            let at = (all.len() - 1) * percent / 100;
            rounds.push(all[at].as_secs_f64() * 1e6);
        }
    }

    fn median(&self, which: usize) -> f64 {
        let mut rounds = self.rounds[which].clone();
        rounds.sort_by(f64::total_cmp);
        rounds[rounds.len() / 2]
    }
}
