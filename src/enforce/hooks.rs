//! The hook path: what the runtime asks, answered from the published snapshot. No disk, no lock
//! that anything slow holds, no call back into the runtime.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use nri_lease_proto::nri::nri::{
    self as api, PluginInstance, PodSandbox, ValidateContainerAdjustmentRequest,
};
use tokio::sync::{mpsc, oneshot};

use super::decision::{Decision, Verdict, required_for_sandbox};
use super::evidence::{Live, Voucher};
use super::listings::Listings;
use super::question::{self, Question, Unvetted, pod_view};
use super::record::{Decided, Totals, Trace};
use super::snapshot::{Published, Snapshot};
use crate::clock::SystemClock;
use crate::nri::events::{Generation, RuntimeIdentity};
use crate::nri::status::RuntimeStatus;
use crate::presence::proc::started_by_ns;
use crate::presence::{RuntimeId, View};

/// Of the runtime's request timeout, after which it would drop us.
const BUDGET_SHARE: u32 = 2;
/// When the runtime does not say: its default is 2 s.
const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// NRI's default registration timeout.
const DEFAULT_REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);

const UNTOLD: &str = "nobody told nri-lease of its start";
const LOST_SINCE: &str =
    "it may have been called after nri-lease, and has lost its connection since";
const NOT_LOOKED_AT: &str =
    "its index is not known, so it is looked at again when the first container is created";

/// Where it is not verified that a runtime accepts plugins one at a time, a plugin counts for
/// sandboxes so long after its connection was seen accepted.
pub fn settling_time(registration_timeout: Duration) -> Duration {
    match registration_timeout.is_zero() {
        true => DEFAULT_REGISTRATION_TIMEOUT,
        false => registration_timeout,
    }
}

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
    /// What the lists of each runtime have told, for `list` and `explain`.
    pub listings: PublishedListings,
}

/// Listings by runtime, replaced as a whole.
pub type PublishedListings = Arc<ArcSwap<HashMap<RuntimeId, Arc<Listings>>>>;

impl Hooks {
    /// For one connection to a runtime.
    pub fn session(self: &Arc<Self>, status: Arc<RuntimeStatus>) -> Arc<HookSession> {
        Arc::new(HookSession {
            hooks: self.clone(),
            status,
            facts: OnceLock::new(),
            started: Mutex::default(),
            listings: Mutex::default(),
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
    /// Set where it is not verified that the runtime accepts one plugin at a time: a fence that
    /// passes says little there, and a plugin counts so long after it was bound.
    settles_in: Option<Duration>,
    budget: Duration,
}

/// The hooks of one connection to a runtime. All calls come from the NRI thread.
pub struct HookSession {
    hooks: Arc<Hooks>,
    status: Arc<RuntimeStatus>,
    facts: OnceLock<Facts>,
    /// Sandboxes that this session knows, by id: the published state learns of them a moment later.
    /// Only the NRI thread takes the locks.
    started: Mutex<HashMap<String, Started>>,
    listings: Mutex<Listings>,
}

/// A sandbox as this session knows it.
#[derive(Debug)]
enum Started {
    /// It was there when the session began: the published state says who has missed it.
    Before,
    /// It started in this session.
    Here {
        /// Who has missed it, and why.
        missed: Unvetted,
        /// Who may have, to be looked at again at its first container.
        vouchers: Vec<Voucher>,
    },
}

impl HookSession {
    /// The runtime has introduced itself.
    pub fn configured(
        &self,
        identity: &RuntimeIdentity,
        generation: Generation,
        request_timeout: Duration,
        registration_timeout: Duration,
    ) {
        let timeout = if request_timeout.is_zero() {
            DEFAULT_REQUEST_TIMEOUT
        } else {
            request_timeout
        };
        let settles_in = settling_time(registration_timeout);
        // A runtime configures a plugin once per connection.
        let _ = self.facts.set(Facts {
            cleans_up_refused_sandboxes: identity.cleans_up_refused_sandboxes(),
            has_validation: generation == Generation::WithValidation,
            settles_in: (!identity.accepts_serially()).then_some(settles_in),
            budget: timeout / BUDGET_SHARE,
        });
        // What an earlier session was told says nothing of this one.
        self.publish(Listings::default());
    }

    /// The runtime has listed its pods. Waits for room among the traces, so that nothing of what
    /// follows can overtake it, and until hooks see who has missed those pods: the first container
    /// may be asked for right after the answer to this.
    pub async fn synchronized(&self, pods: Vec<PodSandbox>) {
        self.started()
            .extend(pods.iter().map(|pod| (pod.id.clone(), Started::Before)));
        let (done, noted) = oneshot::channel();
        let trace = Trace::Synchronized {
            runtime: self.status.id,
            pods,
            done,
        };
        let note = async {
            // The daemon is shutting down when nobody takes traces any more.
            let _ = self.hooks.traces.send(trace).await;
            let _ = noted.await;
        };
        // Only a disk that hangs while very many register holds that up. Were we dropped for it,
        // nothing at all would be enforced.
        if tokio::time::timeout(self.budget(), note).await.is_err() {
            tracing::error!("the runtime's pods could not be compared in time");
        }
    }

    /// A sandbox is about to become ready.
    ///
    /// # Errors
    /// It must not.
    pub fn run_pod_sandbox(&self, pod: &PodSandbox) -> Result<(), Refusal> {
        let began = Instant::now();
        let snapshot = self.hooks.published.load();
        let view = self.hooks.view.load();
        self.listings().begin();
        let facts = self.facts.get();
        let cleans_up = facts.is_some_and(|facts| facts.cleans_up_refused_sandboxes);
        let question = Question::sandbox(&snapshot, pod, cleans_up);
        let evidence = self.evidence(&view).begun_by(started_by_ns(pod.pid));
        let now = self.hooks.clock.now();
        let (decision, vouchers) = question.decide(&snapshot, evidence, &now, None);
        let passes = || question.passes_anyway(&snapshot, &now);
        let decision = self.within_budget(began, decision, passes);
        let outcome = self.answer(pod, None, &decision);
        if outcome.is_ok() {
            self.sandbox_started(pod, decision.missing, vouchers);
        }
        self.tell_news();
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
        self.listings().begin();
        let mut evidence = self.evidence(&view);
        if let Some(list) = list {
            let state = &snapshot.state;
            self.listings().heard(list, state, &view, self.status.id);
            evidence = evidence.with_list(list);
        }
        let devices: Vec<&str> = container
            .CDI_devices
            .iter()
            .chain(injected)
            .map(|device| device.name.as_str())
            .collect();
        let unvetted = self.unvetted(&snapshot, &view, pod);
        let question = Question::container(pod, &container.name, devices, unvetted, list.is_some());
        let now = self.hooks.clock.now();
        let (decision, _) = question.decide(&snapshot, evidence, &now, None);
        self.tell_news();
        let passes = || question.passes_anyway(&snapshot, &now);
        let decision = self.within_budget(began, decision, passes);
        self.answer(pod, Some(&container.name), &decision)
    }

    fn evidence<'a>(&'a self, view: &'a View) -> Live<'a> {
        let settles_in = self.facts.get().and_then(|facts| facts.settles_in);
        Live::in_hook(view, self.status.id, &self.listings).settled_for(settles_in)
    }

    /// Publishes what this request has told of connections and plugins, if anything.
    fn tell_news(&self) {
        let news = self.listings().news();
        if let Some(listings) = news {
            self.publish(listings);
        }
    }

    fn publish(&self, listings: Listings) {
        let mut published = HashMap::clone(&self.hooks.listings.load());
        published.insert(self.status.id, Arc::new(listings));
        self.hooks.listings.store(Arc::new(published));
    }

    /// The plugins that have missed a sandbox: as this session saw it start, else as published.
    fn unvetted(&self, snapshot: &Snapshot, view: &View, pod: &PodSandbox) -> Unvetted {
        if let Some(known) = self.started().get_mut(&pod.id)
            && let Started::Here { missed, vouchers } = known
        {
            if !vouchers.is_empty() {
                *vouchers =
                    self.look_again(snapshot, view, &pod.id, missed, std::mem::take(vouchers));
            }
            return missed.clone();
        }
        let is_published = snapshot.state.sandboxes().contains_key(&pod.id);
        if !is_published && !self.started().contains_key(&pod.id) {
            // Neither listed nor started here: CRI-O lets requests pass between the end of our
            // Synchronize and our place in its list.
            let now = self.hooks.clock.now();
            let missed: Unvetted = required_for_sandbox(snapshot, pod_view(pod), &now)
                .into_iter()
                .map(|plugin| (plugin, UNTOLD.to_owned()))
                .collect();
            self.sandbox_started(pod, missed.clone(), Vec::new());
            return missed;
        }
        question::published_unvetted(snapshot, &pod.id)
    }

    /// At the first container of a sandbox: were the connections that stood for a plugin good for
    /// the whole of its start? Returns what cannot be told yet.
    fn look_again(
        &self,
        snapshot: &Snapshot,
        view: &View,
        sandbox_id: &str,
        missed: &mut Unvetted,
        vouchers: Vec<Voucher>,
    ) -> Vec<Voucher> {
        let listings = self.listings();
        let ours = snapshot.policy.own_index;
        let mut vetted = Vec::new();
        let mut unvetted = Vec::new();
        let mut undecided = Vec::new();
        for voucher in vouchers {
            let bound = view.bound(&voucher.process, self.status.id);
            let is_open = voucher.connections.iter().all(|id| bound.open.contains(id));
            let plugin = voucher.plugin.clone();
            // Should it be lost, an index in the list now is its successor's.
            let is_vetted = is_open
                && (!voucher.in_doubt || {
                    let verdicts = listings.verdicts();
                    let is_others = |id| verdicts.is_pardoned(&plugin, &voucher.process, id);
                    listings.index(&plugin).is_some_and(|index| index < ours)
                        && bound.lost.iter().all(|lost| is_others(lost.id))
                });
            if is_vetted {
                missed.retain(|(other, _)| *other != plugin);
                vetted.push(plugin);
            } else if voucher.in_doubt && is_open {
                undecided.push(voucher);
            } else if !voucher.in_doubt {
                missed.push((plugin.clone(), LOST_SINCE.to_owned()));
                unvetted.push((plugin, LOST_SINCE.to_owned()));
            }
        }
        if !vetted.is_empty() || !unvetted.is_empty() {
            self.hooks.trace(Trace::SandboxVetted {
                sandbox_id: sandbox_id.to_owned(),
                vetted,
                unvetted,
            });
        }
        undecided
    }

    fn sandbox_started(&self, pod: &PodSandbox, missed: Unvetted, vouchers: Vec<Voucher>) {
        // Until they are looked at again, they are stored as missed: should the daemon end before.
        let waiting = vouchers
            .iter()
            .filter(|voucher| !voucher.in_doubt)
            .map(|voucher| (voucher.plugin.clone(), NOT_LOOKED_AT.to_owned()));
        let stored = missed.iter().cloned().chain(waiting).collect();
        let known = Started::Here { missed, vouchers };
        self.started().insert(pod.id.clone(), known);
        self.hooks.trace(Trace::SandboxStarted {
            runtime: self.status.id,
            pod: Box::new(pod.clone()),
            unvetted: stored,
        });
    }

    fn budget(&self) -> Duration {
        self.facts
            .get()
            .map_or(DEFAULT_REQUEST_TIMEOUT / BUDGET_SHARE, |facts| facts.budget)
    }

    /// What was seen so long ago says nothing any more, and soon the runtime would drop us: refuse,
    /// unless nothing rests on what was seen.
    fn within_budget(
        &self,
        began: Instant,
        decision: Decision,
        passes_anyway: impl FnOnce() -> bool,
    ) -> Decision {
        let budget = self.budget();
        let took = began.elapsed();
        if took <= budget || decision.verdict == Verdict::Reject {
            return decision;
        }
        if !decision.covered || passes_anyway() {
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
                 the node is overloaded. The pod is retried. Override: nri-lease pause --for 10m \
                 --reason TEXT",
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

    fn started(&self) -> MutexGuard<'_, HashMap<String, Started>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listings(&self) -> MutexGuard<'_, Listings> {
        self.listings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
