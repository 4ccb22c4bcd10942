//! Random sequences: a few plugins, processes, pods and sandboxes, so that they meet often.

use std::collections::BTreeSet;

use fastrand::Rng;

use crate::reference::{Cmd, Pod, Process, SCOPES, SECOND};
use crate::world::Step;

const PLUGINS: [&str; 5] = ["a", "b", "c", "d", "e"];
const PODS: [&str; 4] = ["p1", "p2", "p3", "p4"];
const SANDBOXES: [&str; 4] = ["s1", "s2", "s3", "s4"];
const RUNTIMES: [&str; 2] = ["/one.sock", "/two.sock"];
const DAY: i64 = 86_400 * SECOND as i64;

pub fn sequence(seed: u64, steps: usize) -> Vec<Step> {
    let mut rng = Rng::with_seed(seed);
    // Most sequences reboot seldom, or nothing would live long enough to be interesting.
    let restarts = rng.u32(1..12);
    (0..steps).map(|_| step(&mut rng, restarts)).collect()
}

fn step(rng: &mut Rng, restarts: u32) -> Step {
    match rng.u32(0..100) {
        n if n < restarts => match rng.u32(0..5) {
            0 | 1 => Step::Crash {
                flushed: rng.bool(),
                mirror: false,
            },
            2 => Step::Crash {
                flushed: true,
                mirror: true,
            },
            _ => Step::Reboot {
                flushed: rng.bool(),
                down: *pick(rng, &[0, 5 * SECOND as i64, 60 * SECOND as i64, DAY, -DAY]),
                uptime: rng.u64(1..20) * SECOND,
            },
        },
        12..24 => Step::Advance(rng.u64(0..8) * SECOND + rng.u64(0..2)),
        24..27 => Step::Advance(rng.u64(10..120) * SECOND),
        27..28 => Step::Advance(7200 * SECOND),
        28..38 => Step::ToDeadline(*pick(rng, &[1, 0, -1, SECOND as i64])),
        38..40 => Step::SetWall(*pick(rng, &[DAY, -DAY, 3 * SECOND as i64])),
        40..44 => Step::Flush,
        44..47 => Step::FailedWrite(match rng.u32(0..8) {
            0 => Cmd::RuntimeSynchronized,
            1 => Cmd::Tick,
            _ => command(rng),
        }),
        _ => Step::Do(command(rng)),
    }
}

fn pick<'a, T>(rng: &mut Rng, items: &'a [T]) -> &'a T {
    &items[rng.usize(..items.len())]
}

fn text(rng: &mut Rng, items: &[&str]) -> String {
    (*pick(rng, items)).to_owned()
}

fn some(rng: &mut Rng, items: &[&str]) -> BTreeSet<String> {
    let mut chosen = BTreeSet::new();
    for item in items {
        if rng.bool() {
            chosen.insert((*item).to_owned());
        }
    }
    chosen
}

fn full_pod(uid: &str) -> Pod {
    let namespace = if uid == "p3" { "b" } else { "a" };
    Pod {
        uid: uid.to_owned(),
        namespace: Some(namespace.to_owned()),
        name: Some(format!("name-{uid}")),
    }
}

fn process(rng: &mut Rng) -> Process {
    // Pids 1 and 2 are root's on the host, 3 a user's, the others are in pods.
    let pid = *pick(rng, &[1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6, 7]);
    let pod = (pid > 3).then(|| {
        let uid = PODS[pid as usize - 4];
        if rng.u32(0..4) == 0 {
            Pod {
                uid: uid.to_owned(),
                namespace: None,
                name: None,
            }
        } else {
            full_pod(uid)
        }
    });
    Process {
        pid,
        start: rng.u64(1..4),
        uid: if pid == 3 { 1000 } else { 0 },
        pod,
    }
}

fn who(rng: &mut Rng) -> Vec<(u32, u64)> {
    let mut keys = Vec::new();
    for pid in 1..8 {
        for start in 1..4 {
            if rng.u32(0..3) > 0 {
                keys.push((pid, start));
            }
        }
    }
    if rng.u32(0..3) == 0 {
        // One process speaks for itself.
        let pid = *pick(rng, &[1, 2, 4, 5]);
        keys.retain(|key| key.0 == pid);
    }
    keys
}

fn ttl(rng: &mut Rng) -> Option<u64> {
    match rng.u32(0..12) {
        0..3 => None,
        3 => Some(SECOND),
        4 => Some(101 * SECOND),
        5 => Some(100 * SECOND),
        _ => Some(rng.u64(5..60) * SECOND),
    }
}

fn command(rng: &mut Rng) -> Cmd {
    let plugin = text(rng, &PLUGINS);
    let pod = text(rng, &PODS);
    let id = text(rng, &SANDBOXES);
    let runtime = text(rng, &RUNTIMES);
    match rng.u32(0..64) {
        0..16 => Cmd::Register {
            plugin,
            process: process(rng),
            ttl: ttl(rng),
            scope: if rng.u32(0..8) == 0 {
                rng.u8(0..SCOPES)
            } else {
                rng.u8(0..2)
            },
            audit: rng.u32(0..4) == 0,
            index: rng.bool().then(|| rng.u8(0..100)),
            events: *pick(
                rng,
                &[None, None, Some(0), Some(1), Some(8), Some(2), Some(15)],
            ),
        },
        16..24 => Cmd::Renew(plugin, who(rng)),
        24..26 => Cmd::Release(plugin, who(rng)),
        26..31 => Cmd::HolderLost(rng.u32(1..8), rng.u64(1..4)),
        31 => Cmd::Revoke(plugin, rng.bool().then(|| rng.u64(1..60) * SECOND)),
        32 => Cmd::SetBan(plugin, rng.u64(1..60) * SECOND),
        33 => Cmd::LiftBan(plugin),
        34..40 => Cmd::Pin(plugin, pod, ttl(rng)),
        40 => Cmd::Unpin(plugin, pod),
        41 => Cmd::PodGone(pod),
        42 => Cmd::PodsSeen(runtime, some(rng, &PODS)),
        43 => Cmd::Pause(rng.u64(1..60) * SECOND),
        44 => Cmd::Resume,
        45..48 => Cmd::RuntimeSynchronized,
        48 => Cmd::LearnPods(some(rng, &PODS).iter().map(|uid| full_pod(uid)).collect()),
        49..52 => {
            let pod = rng.bool().then_some(pod);
            Cmd::SandboxAppeared(id, runtime, pod, some(rng, &PLUGINS))
        }
        52 => Cmd::SandboxGone(id),
        53 => Cmd::SandboxVetting(id, some(rng, &PLUGINS), some(rng, &PLUGINS)),
        54 => {
            let ids = some(rng, &SANDBOXES);
            let present = ids.into_iter().map(|id| {
                let pod = rng.bool().then(|| text(rng, &PODS));
                (id, pod, some(rng, &PLUGINS))
            });
            let present = present.collect();
            Cmd::SandboxesSynchronized(runtime, present)
        }
        _ => Cmd::Tick,
    }
}
