//! The pods that the runtimes have told us of: to name a holder's pod, and for `explain`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use nri_lease_proto::nri::nri::PodSandbox;
use nri_lease_state::{PodIdentity, PodUid};

use crate::presence::RuntimeId;

/// Known sandboxes.
#[derive(Debug, Default)]
pub struct Pods {
    known: Mutex<Known>,
}

/// By runtime and id, with the order in which they became known.
#[derive(Debug, Default)]
struct Known {
    sandboxes: HashMap<(RuntimeId, String), (u64, PodSandbox)>,
    next: u64,
}

impl Known {
    fn insert(&mut self, runtime: RuntimeId, pod: PodSandbox) {
        self.next += 1;
        self.sandboxes
            .insert((runtime, pod.id.clone()), (self.next, pod));
    }
}

/// Pods beyond this are not remembered; a node runs a few hundred.
const MAX_PODS: usize = 8192;

impl Pods {
    /// All pods of a runtime, at its synchronisation.
    pub fn replace(&self, runtime: RuntimeId, pods: &[PodSandbox]) {
        let mut known = self.lock();
        known.sandboxes.retain(|(of, _), _| *of != runtime);
        for pod in pods.iter().take(MAX_PODS) {
            known.insert(runtime, pod.clone());
        }
    }

    /// A sandbox has started.
    pub fn add(&self, runtime: RuntimeId, pod: PodSandbox) {
        let mut known = self.lock();
        if known.sandboxes.len() < MAX_PODS {
            known.insert(runtime, pod);
        }
    }

    /// A sandbox is gone.
    pub fn remove(&self, sandbox_id: &str) {
        self.lock().sandboxes.retain(|(_, id), _| id != sandbox_id);
    }

    /// Of the sandboxes that are wanted, the one that became known last: a pod that lost its
    /// sandbox has two until the old one is removed.
    pub fn find(&self, wanted: impl Fn(&PodSandbox) -> bool) -> Option<(RuntimeId, PodSandbox)> {
        self.lock()
            .sandboxes
            .iter()
            .filter(|(_, (_, pod))| wanted(pod))
            .max_by_key(|(_, (order, _))| *order)
            .map(|((runtime, _), (_, pod))| (*runtime, pod.clone()))
    }

    /// Number of sandboxes of a runtime.
    pub fn count(&self, runtime: RuntimeId) -> usize {
        let known = self.lock();
        known
            .sandboxes
            .keys()
            .filter(|(of, _)| *of == runtime)
            .count()
    }

    /// What is known of the pod with this uid, at least the uid.
    pub fn identity(&self, uid: PodUid) -> PodIdentity {
        match self.find(|pod| pod.uid == uid.as_str()) {
            Some((_, pod)) => identity(&pod, uid),
            None => PodIdentity {
                uid,
                namespace: None,
                name: None,
                labels: Default::default(),
            },
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pod of the runtime as the rules know pods.
pub fn identity(pod: &PodSandbox, uid: PodUid) -> PodIdentity {
    PodIdentity {
        uid,
        namespace: Some(pod.namespace.clone()),
        name: Some(pod.name.clone()),
        labels: pod
            .labels
            .iter()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, uid: &str) -> PodSandbox {
        PodSandbox {
            id: id.to_owned(),
            uid: uid.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn a_pod_with_two_sandboxes_is_found_by_the_newer_one() {
        let pods = Pods::default();
        let runtime = RuntimeId(0);
        for round in 0..20 {
            pods.add(runtime, sandbox(&format!("s{round}"), "u"));
            let (_, found) = pods.find(|pod| pod.uid == "u").unwrap();
            assert_eq!(found.id, format!("s{round}"));
        }
        pods.remove("s19");
        assert_eq!(pods.find(|pod| pod.uid == "u").unwrap().1.id, "s18");
    }
}
