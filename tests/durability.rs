//! What an acknowledgement of the real daemon is worth: barriers seen from its system calls,
//! SIGKILL right after an answer, and a full disk. Needs root, strace and mount.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

mod node;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use node::{Node, limit, refusal, registration, until};
use nri_lease_proto::lease::admin::RevokeLeaseRequest;
use nri_lease_proto::lease::registry::{ReleaseRequest, RenewRequest};
use nri_lease_proto::ttrpc::Code;
use nri_lease_sim::story::Scratch;
use nri_lease_sim::{Options, PodSpec, Runtime};

fn revocation(plugin: &str) -> RevokeLeaseRequest {
    RevokeLeaseRequest {
        plugin: plugin.into(),
        ..Default::default()
    }
}

fn release(plugin: &str) -> ReleaseRequest {
    ReleaseRequest {
        plugin: plugin.into(),
        ..Default::default()
    }
}

/// A daemon whose barriers can be counted.
struct Traced {
    node: Node,
    trace: PathBuf,
    database: String,
}

impl Traced {
    async fn start() -> Traced {
        let dir = Scratch::new("nlt").unwrap();
        let trace = dir.join("trace");
        let state = dir.join("state");
        let calls = "trace=fsync,fdatasync,msync,sync,syncfs,sync_file_range";
        // With -D the process started is the daemon, and strace its child.
        let wrapper = ["strace", "-D", "-f", "-y", "-qq", "-e", calls, "-o"];
        let wrapper = [&wrapper[..], &[trace.to_str().unwrap()]].concat();
        let node = Node::start_in(dir, state.clone(), "", &["nri.sock"], &wrapper).await;
        Traced {
            node,
            trace,
            database: format!("{}>", state.join("db/db").display()),
        }
    }

    /// fsync and fdatasync of the database that have returned. strace writes the line before the
    /// call returns in the daemon.
    fn barriers(&self) -> usize {
        let trace = std::fs::read_to_string(&self.trace).unwrap();
        let mut under_way = BTreeSet::new();
        let mut count = 0;
        for line in trace.lines() {
            let (thread, call) = line.split_once(' ').unwrap_or((line, ""));
            if call.contains("sync resumed") {
                count += usize::from(under_way.remove(thread));
            } else if call.contains("sync(") && call.contains(&self.database) {
                if call.contains("<unfinished") {
                    under_way.insert(thread.to_owned());
                } else {
                    count += 1;
                }
            }
        }
        count
    }

    /// Waits until nothing is written any more.
    async fn quiet(&self) {
        until("the store to be quiet", async || {
            let before = self.barriers();
            tokio::time::sleep(Duration::from_millis(1500)).await;
            self.barriers() == before
        })
        .await;
    }
}

#[tokio::test]
async fn each_acknowledged_registration_has_one_barrier_and_there_are_none_in_between() {
    let traced = Traced::start().await;
    let registry = traced.node.registry().await;
    traced.quiet().await;
    let mut exactly_one = 0;
    for number in 0..20 {
        let before = traced.barriers();
        let request = registration(&format!("p{number}"), 3600);
        registry.register(limit(), &request).await.unwrap();
        let barriers = traced.barriers() - before;
        assert!(barriers >= 1, "registration {number} was not durable");
        exactly_one += usize::from(barriers == 1);
    }
    println!("{exactly_one} of 20 registrations had exactly one barrier");
    assert_eq!(exactly_one, 20);

    // No registration, no barrier: not by sled's own timer (500 ms) either.
    traced.quiet().await;
    let before = traced.barriers();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(traced.barriers(), before, "idle");

    let renew = RenewRequest {
        plugin: "p0".into(),
        ..Default::default()
    };
    for _ in 0..200 {
        registry.renew(limit(), &renew).await.unwrap();
    }
    let during = traced.barriers() - before;
    traced.quiet().await;
    let after = traced.barriers() - before;
    println!("200 renewals: {during} barriers meanwhile, {after} with those after");
    assert!(during < 20, "{during} barriers for 200 renewals");
    assert!(
        (1..20).contains(&after),
        "{after} barriers for 200 renewals"
    );
}

#[tokio::test]
async fn sixty_four_concurrent_registrations_share_barriers() {
    let traced = Traced::start().await;
    let mut clients = Vec::new();
    for _ in 0..64 {
        clients.push(traced.node.registry().await);
    }
    // Once before, so that every connection is served.
    let describe = nri_lease_proto::lease::registry::DescribeRequest::new();
    join_all(
        clients
            .iter()
            .map(|client| client.describe(limit(), &describe)),
    )
    .await;
    traced.quiet().await;
    let before = traced.barriers();
    let registrations = clients.iter().enumerate().map(async |(number, client)| {
        let request = registration(&format!("p{number}"), 3600);
        client.register(limit(), &request).await.unwrap()
    });
    join_all(registrations).await;
    let barriers = traced.barriers() - before;
    println!("64 concurrent registrations: {barriers} barriers");
    assert!((1..=32).contains(&barriers), "{barriers}");
    assert_eq!(traced.node.leases().await.len(), 64);
}

#[tokio::test]
async fn sigkill_after_an_answer_loses_and_resurrects_nothing() {
    const ROUNDS: u64 = 25;
    let mut node = Node::start("").await;
    let mut leases: BTreeSet<String> = BTreeSet::new();
    for seed in 0..ROUNDS {
        let mut random = fastrand::Rng::with_seed(seed);
        let (registry, admin) = (node.registry().await, node.admin().await);
        for _ in 0..random.usize(1..8) {
            let plugin = format!("p{}", random.u8(..6));
            match random.u8(..4) {
                0 if leases.remove(&plugin) => {
                    registry.release(limit(), &release(&plugin)).await.unwrap();
                }
                1 if leases.remove(&plugin) => {
                    admin
                        .revoke_lease(limit(), &revocation(&plugin))
                        .await
                        .unwrap();
                }
                _ => {
                    let request = registration(&plugin, 3600);
                    registry.register(limit(), &request).await.unwrap();
                    leases.insert(plugin);
                }
            }
        }
        // One more may be on its way: it either happened or it did not.
        let under_way = (random.bool()).then(|| format!("p{}", random.u8(..6)));
        if let Some(plugin) = under_way.clone() {
            let (gone, delay) = (leases.contains(&plugin), random.u64(..3000));
            tokio::spawn(async move {
                if gone {
                    let _ = admin.revoke_lease(limit(), &revocation(&plugin)).await;
                } else {
                    let _ = registry
                        .register(limit(), &registration(&plugin, 3600))
                        .await;
                }
            });
            tokio::time::sleep(Duration::from_micros(delay)).await;
        }
        node.kill();
        node.start_again().await;
        let mut found: BTreeSet<String> = node.lease_names().await.into_iter().collect();
        if let Some(plugin) = under_way {
            match found.contains(&plugin) {
                true => leases.insert(plugin),
                false => leases.remove(&plugin),
            };
        }
        assert_eq!(found, leases, "seed {seed}: {:#?}", node.daemon.output());
        found.clear();
    }
}

/// A tmpfs, unmounted on drop.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn at(path: &Path) -> SmallDisk {
        std::fs::create_dir_all(path).unwrap();
        run(
            "mount",
            &[
                "-t",
                "tmpfs",
                "-o",
                "size=24m",
                "small",
                path.to_str().unwrap(),
            ],
        );
        SmallDisk(path.to_owned())
    }

    fn fill(&self) {
        let mut file = std::fs::File::create(self.filler()).unwrap();
        for size in [1 << 16, 4096, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        run("umount", &["-l", self.0.to_str().unwrap()]);
    }
}

fn run(program: &str, args: &[&str]) {
    let status = std::process::Command::new(program).args(args).status();
    assert!(status.unwrap().success(), "{program} {args:?}");
}

#[tokio::test]
async fn a_full_disk_refuses_registrations_keeps_leases_enforced_and_heals_by_itself() {
    let dir = Scratch::new("nlt").unwrap();
    let disk = SmallDisk::at(&dir.join("disk"));
    let socket = dir.join("nri.sock");
    let runtime = Runtime::start(&socket, Options::default());
    let runtime = runtime.await.unwrap();
    let state = disk.0.join("state");
    let mut node = Node::start_in(dir, state, "", &["nri.sock"], &[]).await;
    node.connected().await;
    node.registers("old").await;
    disk.fill();

    let registry = node.registry().await;
    let mut acknowledged = vec!["old".to_owned()];
    let refused = loop {
        let name = format!("new{}", acknowledged.len());
        // What is left of the last block may do for some.
        match registry.register(limit(), &registration(&name, 3600)).await {
            Ok(_) => acknowledged.push(name),
            Err(refused) => break refused,
        }
        assert!(acknowledged.len() < 250, "the disk never fills");
    };
    let (code, text) = refusal::<()>(Err(refused));
    println!("after {} more: {code:?}: {text}", acknowledged.len() - 1);
    assert_eq!(code, Code::UNAVAILABLE);
    for part in [
        "No space left on device",
        "free space",
        "leases that exist stay enforced",
    ] {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }

    // What exists is enforced, renewable and listed, and the status says what is wrong.
    let renew = RenewRequest {
        plugin: "old".into(),
        ..Default::default()
    };
    registry.renew(limit(), &renew).await.unwrap();
    let refused = runtime.run_pod_sandbox(PodSpec::new("default", "a")).await;
    assert!(refused.unwrap_err().message.contains("required NRI plugin"));
    let mut names = node.lease_names().await;
    names.sort();
    acknowledged.sort();
    assert_eq!(names, acknowledged);
    let store = node.status().await.store;
    assert!(
        !store.healthy && store.error.contains("No space left"),
        "{store:?}"
    );

    std::fs::remove_file(disk.filler()).unwrap();
    until("the store to heal", async || {
        let request = registration("healed", 3600);
        registry.register(limit(), &request).await.is_ok()
    })
    .await;
    assert!(node.status().await.store.healthy);
    acknowledged.push("healed".into());
    acknowledged.sort();

    node.kill();
    node.start_again().await;
    let mut names = node.lease_names().await;
    names.sort();
    assert_eq!(names, acknowledged);
    node.kill();
    // Before the directory that it is in.
    drop(disk);
}
