//! One question to [`decision::decide`]. Hooks and `explain` put it through here, so that they
//! cannot come to mean different things.

use nri_lease_proto::nri::nri::PodSandbox;
use nri_lease_state::time::Now;
use nri_lease_state::{ContainerView, PluginName, PodView};

use super::decision::{self, Decision, Request};
use super::evidence::{Live, Voucher};
use super::snapshot::Snapshot;
use crate::config::SandboxEnforcement;

/// The plugins that may have missed a sandbox, and why.
pub type Unvetted = Vec<(PluginName, String)>;

/// May this sandbox, or this container, start?
pub struct Question<'a> {
    pod: &'a PodSandbox,
    /// Name and CDI devices; None: the sandbox.
    container: Option<(&'a str, Vec<&'a str>)>,
    unvetted: Unvetted,
    may_refuse_sandbox: bool,
    /// The runtime lists the plugins it has called: not for sandboxes, nor where it does not
    /// validate. Then we are called like everybody else, in the order of the indexes.
    has_list: bool,
}

impl<'a> Question<'a> {
    /// `cleans_up`: whether the runtime removes a sandbox that is refused.
    pub fn sandbox(snapshot: &Snapshot, pod: &'a PodSandbox, cleans_up: bool) -> Self {
        Self {
            pod,
            container: None,
            unvetted: Vec::new(),
            may_refuse_sandbox: may_refuse_sandbox(snapshot, cleans_up),
            has_list: false,
        }
    }

    /// `unvetted`: who has missed its sandbox. `validates`: whether the runtime validates.
    pub fn container(
        pod: &'a PodSandbox,
        name: &'a str,
        cdi_devices: Vec<&'a str>,
        unvetted: Unvetted,
        validates: bool,
    ) -> Self {
        Self {
            pod,
            container: Some((name, cdi_devices)),
            unvetted,
            may_refuse_sandbox: true,
            has_list: validates,
        }
    }

    /// Decides it. `steps` collects, for people, what was looked at. The vouchers are what is to be
    /// looked at again at the first container of a sandbox.
    pub fn decide(
        &self,
        snapshot: &Snapshot,
        evidence: Live<'_>,
        now: &Now,
        steps: Option<&mut Vec<String>>,
    ) -> (Decision, Vec<Voucher>) {
        let evidence = match self.has_list {
            false => evidence.only_below(snapshot.policy.own_index),
            true => evidence,
        };
        let request = Request {
            pod: pod_view(self.pod),
            container: self
                .container
                .as_ref()
                .map(|(name, devices)| ContainerView {
                    name,
                    cdi_devices: devices,
                }),
            unvetted: &self.unvetted,
            may_refuse_sandbox: self.may_refuse_sandbox,
        };
        let decision = decision::decide(snapshot, &request, &evidence, now, steps);
        (decision, evidence.into_vouchers())
    }

    /// Whether it may start whatever speaks against it.
    pub fn passes_anyway(&self, snapshot: &Snapshot, now: &Now) -> bool {
        decision::passes_anyway(snapshot, &self.request(), now)
    }

    fn request(&self) -> Request<'_> {
        Request {
            pod: pod_view(self.pod),
            container: self
                .container
                .as_ref()
                .map(|(name, devices)| ContainerView {
                    name,
                    cdi_devices: devices,
                }),
            unvetted: &self.unvetted,
            may_refuse_sandbox: self.may_refuse_sandbox,
        }
    }
}

/// Whether sandboxes are refused, or marked and their containers refused.
pub fn may_refuse_sandbox(snapshot: &Snapshot, cleans_up: bool) -> bool {
    match snapshot.policy.sandbox {
        SandboxEnforcement::Always => true,
        SandboxEnforcement::Never => false,
        SandboxEnforcement::Auto => cleans_up,
    }
}

/// Who has missed a sandbox, as published.
pub fn published_unvetted(snapshot: &Snapshot, sandbox_id: &str) -> Unvetted {
    let Some(sandbox) = snapshot.state.sandboxes().get(sandbox_id) else {
        return Vec::new();
    };
    let unvetted = sandbox.unvetted.iter();
    unvetted
        .map(|(plugin, reason)| (plugin.clone(), reason.clone()))
        .collect()
}

/// The fields of a pod that decisions need, borrowed.
pub fn pod_view(pod: &PodSandbox) -> PodView<'_> {
    PodView {
        namespace: &pod.namespace,
        name: &pod.name,
        uid: &pod.uid,
        labels: &pod.labels,
        annotations: &pod.annotations,
        runtime_handler: &pod.runtime_handler,
    }
}
