//! Processes by pid: signals, `/proc`, who started whom.

use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::wait::wait_for;

/// A child's pid as the kernel's signed type.
pub fn pid_of(child: &Child) -> i32 {
    i32::try_from(child.id()).expect("pids are positive i32 on Linux")
}

/// Sends a signal; a process that is gone already is no error.
pub fn signal(pid: i32, signal: Signal) {
    // ESRCH only: we are root, and the signal is valid.
    let _ = kill(Pid::from_raw(pid), signal);
}

/// SIGKILL, and waits for the end.
pub fn kill_and_reap(child: &mut Child) {
    if let Ok(None) = child.try_wait() {
        let _ = child.kill();
    }
    let _ = child.wait();
}

/// True while the process exists and is not a zombie.
pub fn is_alive(pid: i32) -> bool {
    state(pid).is_some_and(|s| s != 'Z' && s != 'X')
}

/// The state letter of `/proc/PID/stat`.
pub fn state(pid: i32) -> Option<char> {
    stat_fields(pid)?.first()?.chars().next()
}

fn stat_fields(pid: i32) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command is in parentheses and may contain anything.
    let (_, rest) = stat.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

fn all_pids() -> Vec<i32> {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Direct children of a process.
pub fn children(pid: i32) -> Vec<i32> {
    all_pids()
        .into_iter()
        .filter(|&candidate| {
            stat_fields(candidate).and_then(|f| f.get(1)?.parse::<i32>().ok()) == Some(pid)
        })
        .collect()
}

/// Waits for a wrapper (`unshare`) to have started its one child.
pub fn only_child(pid: i32) -> Result<i32> {
    wait_for("a wrapper's child", Duration::from_secs(10), || {
        children(pid).first().copied()
    })
    .with_context(|| format!("child of pid {pid}"))
}

/// Processes with an argument that `matches`.
pub fn with_argument(matches: impl Fn(&str) -> bool) -> Vec<i32> {
    all_pids()
        .into_iter()
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|cmdline| String::from_utf8_lossy(&cmdline).split('\0').any(&matches))
        })
        .collect()
}

/// Identifies a process for as long as the machine runs: its start time, in
/// clock ticks since boot. `None` when there is no such process.
pub fn start_ticks(pid: i32) -> Option<u64> {
    // Field 22 of proc(5), the 20th after the command.
    stat_fields(pid)?.get(19)?.parse().ok()
}
