//! The hook path: what the runtime asks, answered from the published snapshot. No disk, no lock
//! that anything slow holds, no call back into the runtime.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use nri_lease_proto::nri::nri::{
    self as api, PluginInstance, PodSandbox, ValidateContainerAdjustmentRequest,
};
use nri_lease_state::{ContainerView, PluginName, PodView};
use tokio::sync::mpsc;

use super::decision::{self, Decision, Request, Verdict};
use super::evidence::Live;
use super::record::{Decided, Totals, Trace};
use super::snapshot::{Published, Snapshot};
use crate::clock::SystemClock;
use crate::config::SandboxEnforcement;
use crate::nri::events::{Generation, RuntimeIdentity};
use crate::nri::status::RuntimeStatus;
use crate::presence::View;

/// Of the runtime's request timeout, after which it would drop us.
const BUDGET_SHARE: u32 = 2;
/// When the runtime does not say: its default is 2 s.
const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// A request that must not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub text: String,
}

/// What all sessions share.
pub struct Hooks {
    pub published: Published,
    pub view: Arc<ArcSwap<View>>,
    pub clock: SystemClock,
    pub totals: Arc<Totals>,
    pub traces: mpsc::Sender<Trace>,
}

impl Hooks {
    /// For one connection to a runtime.
    pub fn session(self: &Arc<Self>, status: Arc<RuntimeStatus>) -> Arc<HookSession> {
        Arc::new(HookSession {
            hooks: self.clone(),
            status,
            facts: OnceLock::new(),
            started: Mutex::default(),
        })
    }

    fn trace(&self, trace: Trace) {
        if self.traces.try_send(trace).is_err() {
            self.totals.traces_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What Configure told us.
#[derive(Debug)]
struct Facts {
    cleans_up_refused_sandboxes: bool,
    has_validation: bool,
    budget: Duration,
}

type Unvetted = Vec<(PluginName, String)>;

/// The hooks of one connection to a runtime. All calls come from the NRI thread.
pub struct HookSession {
    hooks: Arc<Hooks>,
    status: Arc<RuntimeStatus>,
    facts: OnceLock<Facts>,
    /// Sandboxes that started in this session, by id, with the plugins that have missed them: the
    /// published state learns of them a moment later. Only the NRI thread takes the lock.
    started: Mutex<HashMap<String, Unvetted>>,
}

impl HookSession {
    /// The runtime has introduced itself.
    pub fn configured(
        &self,
        identity: &RuntimeIdentity,
        generation: Generation,
        request_timeout: Duration,
    ) {
        let timeout = if request_timeout.is_zero() {
            DEFAULT_REQUEST_TIMEOUT
        } else {
            request_timeout
        };
        // A runtime configures a plugin once per connection.
        let _ = self.facts.set(Facts {
            cleans_up_refused_sandboxes: identity.cleans_up_refused_sandboxes(),
            has_validation: generation == Generation::WithValidation,
            budget: timeout / BUDGET_SHARE,
        });
    }

    /// The runtime has listed its pods. Waits for room among the traces, so that nothing of what
    /// follows can overtake it; the next hook comes only after the answer to this.
    pub async fn synchronized(&self, pods: Vec<PodSandbox>) {
        let runtime = self.status.id;
        // The daemon is shutting down when nobody takes traces any more.
        let _ = self
            .hooks
            .traces
            .send(Trace::Synchronized { runtime, pods })
            .await;
    }

    /// A sandbox is about to become ready.
    ///
    /// # Errors
    /// It must not.
    pub fn run_pod_sandbox(&self, pod: &PodSandbox) -> Result<(), Refusal> {
        let began = Instant::now();
        let snapshot = self.hooks.published.load();
        let view = self.hooks.view.load();
        let ours = snapshot.policy.own_index;
        let evidence = Live::in_hook(&view, self.status.id).only_below(ours);
        let request = Request {
            pod: pod_view(pod),
            container: None,
            unvetted: &[],
            may_refuse_sandbox: self.may_refuse_sandbox(&snapshot),
        };
        let now = self.hooks.clock.now();
        let decision = decision::decide(&snapshot, &request, &evidence, &now, None);
        let decision = self.within_budget(began, decision);
        let outcome = self.answer(pod, None, &decision);
        if outcome.is_ok() {
            self.sandbox_started(pod, decision.missing);
        }
        outcome
    }

    /// A sandbox is gone.
    pub fn remove_pod_sandbox(&self, pod: &PodSandbox) {
        self.started().remove(&pod.id);
        self.hooks.trace(Trace::SandboxRemoved {
            sandbox_id: pod.id.clone(),
        });
    }

    /// A container is being created, on a runtime without validation: we are called last, so by
    /// now every other plugin has answered, timed out or died.
    ///
    /// # Errors
    /// It must not be created.
    pub fn create_container(
        &self,
        pod: &PodSandbox,
        container: &api::Container,
    ) -> Result<(), Refusal> {
        if self.facts.get().is_some_and(|facts| facts.has_validation) {
            return Ok(());
        }
        self.container(pod, container, &[], None)
    }

    /// A container was adjusted by the plugins and is to be validated.
    ///
    /// # Errors
    /// It must not be created.
    pub fn validate_container(
        &self,
        request: &ValidateContainerAdjustmentRequest,
    ) -> Result<(), Refusal> {
        let (Some(pod), Some(container)) = (request.pod.as_ref(), request.container.as_ref())
        else {
            return Err(Refusal {
                text: "the runtime's validation request has no pod or no container".to_owned(),
            });
        };
        let injected = request
            .adjust
            .as_ref()
            .map_or(&[][..], |adjust| &adjust.CDI_devices);
        self.container(pod, container, injected, Some(&request.plugins))
    }

    fn container(
        &self,
        pod: &PodSandbox,
        container: &api::Container,
        injected: &[api::CDIDevice],
        list: Option<&[PluginInstance]>,
    ) -> Result<(), Refusal> {
        let began = Instant::now();
        let snapshot = self.hooks.published.load();
        let view = self.hooks.view.load();
        let mut evidence = Live::in_hook(&view, self.status.id);
        if let Some(list) = list {
            evidence = evidence.with_list(list);
        }
        let devices: Vec<&str> = container
            .CDI_devices
            .iter()
            .chain(injected)
            .map(|device| device.name.as_str())
            .collect();
        let unvetted = self.unvetted(&snapshot, &pod.id);
        let request = Request {
            pod: pod_view(pod),
            container: Some(ContainerView {
                name: &container.name,
                cdi_devices: &devices,
            }),
            unvetted: &unvetted,
            may_refuse_sandbox: true,
        };
        let now = self.hooks.clock.now();
        let decision = decision::decide(&snapshot, &request, &evidence, &now, None);
        let decision = self.within_budget(began, decision);
        self.answer(pod, Some(&container.name), &decision)
    }

    fn may_refuse_sandbox(&self, snapshot: &Snapshot) -> bool {
        match snapshot.policy.sandbox {
            SandboxEnforcement::Always => true,
            SandboxEnforcement::Never => false,
            SandboxEnforcement::Auto => self
                .facts
                .get()
                .is_some_and(|facts| facts.cleans_up_refused_sandboxes),
        }
    }

    /// The plugins that have missed a sandbox: as this session saw it start, else as published.
    fn unvetted(&self, snapshot: &Snapshot, sandbox_id: &str) -> Unvetted {
        if let Some(unvetted) = self.started().get(sandbox_id) {
            return unvetted.clone();
        }
        snapshot
            .state
            .sandboxes()
            .get(sandbox_id)
            .map_or_else(Vec::new, |sandbox| {
                sandbox
                    .unvetted
                    .iter()
                    .map(|(plugin, reason)| (plugin.clone(), reason.clone()))
                    .collect()
            })
    }

    fn sandbox_started(&self, pod: &PodSandbox, unvetted: Unvetted) {
        self.started().insert(pod.id.clone(), unvetted.clone());
        self.hooks.trace(Trace::SandboxStarted {
            runtime: self.status.id,
            pod: Box::new(pod.clone()),
            unvetted,
        });
    }

    /// What was seen so long ago says nothing any more, and soon the runtime would drop us: refuse.
    fn within_budget(&self, began: Instant, decision: Decision) -> Decision {
        let budget = self
            .facts
            .get()
            .map_or(DEFAULT_REQUEST_TIMEOUT / BUDGET_SHARE, |facts| facts.budget);
        let took = began.elapsed();
        if took <= budget || decision.verdict == Verdict::Reject {
            return decision;
        }
        self.hooks
            .totals
            .over_budget
            .fetch_add(1, Ordering::Relaxed);
        Decision {
            verdict: Verdict::Reject,
            text: format!(
                "nri-lease needed {} ms to decide, more than half of the runtime's request timeout: \
                 the node is overloaded. The pod is retried. See: nri-lease status",
                took.as_millis()
            ),
            ..decision
        }
    }

    fn answer(
        &self,
        pod: &PodSandbox,
        container: Option<&str>,
        decision: &Decision,
    ) -> Result<(), Refusal> {
        self.hooks.totals.count(decision.verdict);
        if decision.covered {
            let decided = Decided::new(self.status.id, pod, container, decision);
            self.hooks.trace(Trace::Decided(decided));
        }
        if decision.verdict == Verdict::Reject {
            return Err(Refusal {
                text: decision.text.clone(),
            });
        }
        Ok(())
    }

    fn started(&self) -> std::sync::MutexGuard<'_, HashMap<String, Unvetted>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
