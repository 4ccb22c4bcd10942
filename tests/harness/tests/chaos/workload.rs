//! The kubelet's part: pods with containers, created, retried with a new attempt, and deleted.

use std::collections::VecDeque;
use std::time::Duration;

use fastrand::Rng;
use nri_lease_harness::Result;
use nri_lease_harness::cri::Pod;

use super::journal::{Time, now};
use super::shared::{Kind, Shared, add};

/// Pods that a worker keeps before it deletes the oldest.
const KEPT: usize = 3;
/// The kubelet's backoff, made short.
const BACKOFF_MS: std::ops::Range<u64> = 30..150;
const COMMAND: [&str; 2] = ["/bin/sleep", "2147483647"];

struct Running {
    pod: Pod,
    sandbox: String,
    call: (Time, Time),
    /// `audit` must list it before it goes.
    to_be_listed: bool,
    containers: u32,
}

struct Worker<'a> {
    shared: &'a Shared,
    number: usize,
    rng: Rng,
    running: VecDeque<Running>,
}

/// Until the run is over.
pub fn work(shared: &Shared, number: usize, seed: u64) -> Result<()> {
    let mut worker = Worker {
        shared,
        number,
        rng: Rng::with_seed(seed.wrapping_add(number as u64)),
        running: VecDeque::new(),
    };
    let mut count = 0;
    while !shared.is_over() {
        count += 1;
        worker.round(count)?;
    }
    for running in &worker.running {
        worker.check_listed(running);
    }
    Ok(())
}

impl Worker<'_> {
    fn round(&mut self, count: u32) -> Result<()> {
        let name = format!("w{}-{count}", self.number);
        if let Some(running) = self.start_pod(&name)? {
            self.running.push_back(running);
            let newest = self.running.len() - 1;
            if self.add_container(newest)? && self.rng.bool() {
                self.add_container(newest)?;
            }
        }
        if self.running.len() > 1 && self.rng.bool() {
            // A restarted container in a pod that has seen other times.
            let older = self.rng.usize(..self.running.len() - 1);
            self.add_container(older)?;
        }
        while self.running.len() > KEPT {
            if let Some(oldest) = self.running.pop_front() {
                self.delete(&oldest);
            }
        }
        Ok(())
    }

    fn pause(&mut self) {
        std::thread::sleep(Duration::from_millis(self.rng.u64(BACKOFF_MS)));
    }

    fn start_pod(&mut self, name: &str) -> Result<Option<Running>> {
        let mut pod = Pod::named(name);
        while !self.shared.is_over() {
            let begin = now();
            let outcome = self.shared.cri.run_pod(&pod);
            let end = now();
            let error = match outcome {
                Ok(sandbox) => {
                    let call = (begin, end);
                    let to_be_listed =
                        self.shared
                            .admitted(Kind::Sandbox, name, &sandbox, call, false)?;
                    return Ok(Some(Running {
                        pod,
                        sandbox,
                        call,
                        to_be_listed,
                        containers: 0,
                    }));
                }
                Err(error) => error,
            };
            self.shared.failed(Kind::Sandbox, name, begin, end, &error);
            self.clear_leftovers(&pod, begin)?;
            pod.attempt += 1;
            self.pause();
        }
        Ok(None)
    }

    /// After a failed RunPodSandbox the kubelet looks what is there. A ready sandbox is used,
    /// whatever the call had answered: it counts as admitted. Everything else is removed.
    fn clear_leftovers(&mut self, pod: &Pod, begin: Time) -> Result<()> {
        let mut pods = self.shared.cri.pods();
        while pods.is_err() {
            if self.shared.is_over() {
                return Ok(());
            }
            self.pause();
            pods = self.shared.cri.pods();
        }
        for item in pods?.into_iter().filter(|item| item.uid == pod.uid) {
            if item.state == "SANDBOX_READY" {
                add(&self.shared.counts.found_ready);
                let call = (begin, now());
                let found = Running {
                    to_be_listed: self.shared.admitted(
                        Kind::Sandbox,
                        &pod.name,
                        &item.id,
                        call,
                        false,
                    )?,
                    pod: pod.clone(),
                    sandbox: item.id,
                    call,
                    containers: 0,
                };
                self.delete(&found);
            } else {
                let _ = self.remove(&item.id);
            }
        }
        Ok(())
    }

    /// One more container in a pod, tried until it is there. A pod that `reject` holds up for good
    /// is deleted, as its refusal says; then false.
    fn add_container(&mut self, place: usize) -> Result<bool> {
        let running = &mut self.running[place];
        let name = format!("c{}", running.containers);
        running.containers += 1;
        let (sandbox, pod) = (running.sandbox.clone(), running.pod.name.clone());
        let unvetted = running.to_be_listed;
        let may_be_unvetted = unvetted || self.shared.may_be_unvetted(running.call);
        let mut attempt = 0;
        while !self.shared.is_over() {
            let begin = now();
            let cri = &self.shared.cri;
            let outcome = cri.create_container_with(&sandbox, &name, attempt, &COMMAND);
            let end = now();
            let error = match outcome {
                Ok(id) => {
                    let call = (begin, end);
                    self.shared
                        .admitted(Kind::Container, &pod, &id, call, unvetted)?;
                    if self.rng.u8(..3) == 0 {
                        // It may fail: the runtime may be away by now.
                        let _ = cri.start_container(&id);
                    }
                    return Ok(true);
                }
                Err(error) => error,
            };
            if may_be_unvetted && self.shared.is_right_about_unvetted(&error) {
                self.shared.journal.note("cri", &pod, "refused: unvetted");
                self.delete_at(place);
                return Ok(false);
            }
            let text = self
                .shared
                .failed(Kind::Container, &pod, begin, end, &error);
            if text.contains("delete the pod") || text.contains("not found") {
                self.delete_at(place);
                return Ok(false);
            }
            attempt += 1;
            self.pause();
        }
        Ok(true)
    }

    fn delete_at(&mut self, place: usize) {
        if let Some(running) = self.running.remove(place) {
            self.delete(&running);
        }
    }

    fn check_listed(&self, running: &Running) {
        if running.to_be_listed {
            let (begin, end) = running.call;
            self.shared
                .must_be_listed(&running.pod.name, &running.pod.uid, begin, end);
        }
    }

    /// In the kubelet's order. A sandbox that still has containers must not be removed: containerd
    /// (1.7.30, 2.2.7 and 2.3.4) takes the lock that holds plugins back once for RemovePodSandbox
    /// and, inside, once more for RemoveContainer, and hangs for good when a plugin connects
    /// between the two.
    fn remove(&self, sandbox: &str) -> Result<()> {
        let cri = &self.shared.cri;
        let containers = cri.containers()?;
        let inside = || containers.iter().filter(|c| c.pod == sandbox);
        for container in inside().filter(|c| c.state == "CONTAINER_RUNNING") {
            cri.stop_container(&container.id, 0)?;
        }
        cri.stop_pod(sandbox)?;
        for container in inside() {
            cri.remove_container(&container.id)?;
        }
        cri.remove_pod(sandbox)
    }

    fn delete(&mut self, running: &Running) {
        self.check_listed(running);
        for _ in 0..50 {
            let Err(error) = self.remove(&running.sandbox) else {
                return;
            };
            if self.shared.is_over() {
                return;
            }
            let text = format!("deleting failed: {error:#}");
            self.shared.journal.note("cri", &running.pod.name, text);
            self.pause();
        }
    }
}
