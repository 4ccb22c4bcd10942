//! The pods that the runtimes have told us of: to name a holder's pod, and for `explain`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use nri_lease_proto::nri::nri::PodSandbox;
use nri_lease_state::{PodIdentity, PodUid};

use crate::presence::RuntimeId;

/// Known sandboxes by runtime and id.
#[derive(Debug, Default)]
pub struct Pods {
    known: Mutex<HashMap<(RuntimeId, String), PodSandbox>>,
}

/// Pods beyond this are not remembered; a node runs a few hundred.
const MAX_PODS: usize = 8192;

impl Pods {
    /// All pods of a runtime, at its synchronisation.
    pub fn replace(&self, runtime: RuntimeId, pods: &[PodSandbox]) {
        let mut known = self.lock();
        known.retain(|(of, _), _| *of != runtime);
        for pod in pods.iter().take(MAX_PODS) {
            known.insert((runtime, pod.id.clone()), pod.clone());
        }
    }

    /// A sandbox has started.
    pub fn add(&self, runtime: RuntimeId, pod: PodSandbox) {
        let mut known = self.lock();
        if known.len() < MAX_PODS {
            known.insert((runtime, pod.id.clone()), pod);
        }
    }

    /// A sandbox is gone.
    pub fn remove(&self, sandbox_id: &str) {
        self.lock().retain(|(_, id), _| id != sandbox_id);
    }

    /// The newest known sandbox of a pod.
    pub fn find(&self, wanted: impl Fn(&PodSandbox) -> bool) -> Option<(RuntimeId, PodSandbox)> {
        self.lock()
            .iter()
            .find(|(_, pod)| wanted(pod))
            .map(|((runtime, _), pod)| (*runtime, pod.clone()))
    }

    /// Number of sandboxes of a runtime.
    pub fn count(&self, runtime: RuntimeId) -> usize {
        self.lock().keys().filter(|(of, _)| *of == runtime).count()
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

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(RuntimeId, String), PodSandbox>> {
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
