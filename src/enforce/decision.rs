//! May this request pass? A plain function of the published state, the policy, the request and the
//! evidence; used by hooks and by `explain` alike.

use nri_lease_state::exempt::Exemption;
use nri_lease_state::record::Mode as LeaseMode;
use nri_lease_state::required::required_plugins;
use nri_lease_state::rules::Lease;
use nri_lease_state::time::Now;
use nri_lease_state::{ContainerView, PluginName, PodView};

use super::evidence::{Evidence, Missing};
use super::snapshot::Snapshot;
use super::text;
use crate::config::{Mode, UnvettedSandboxes};

/// What is to be decided.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub pod: PodView<'a>,
    /// None: the sandbox itself.
    pub container: Option<ContainerView<'a>>,
    /// For a container: plugins that may have missed its sandbox, and why.
    pub unvetted: &'a [(PluginName, String)],
    /// For a sandbox: whether this runtime cleans up after a refused one. Otherwise it starts and
    /// its containers wait.
    pub may_refuse_sandbox: bool,
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Admit,
    Reject,
    /// Would be rejected, but enforcement is paused or the mode is audit.
    WouldReject,
    /// Would be rejected, but an exemption applies.
    Exempt,
    /// A sandbox that starts although a plugin is missing.
    Unvetted,
}

/// Why a plugin is required for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its lease covers the request.
    Scope,
    /// The pod is pinned.
    Pin { pod_uid: String, left: String },
    /// The pod's annotation names it.
    Annotation { key: &'static str },
}

impl Cause {
    /// For a refusal; None where it goes without saying.
    pub fn describe(&self) -> Option<String> {
        match self {
            Self::Scope => None,
            Self::Pin { left, .. } => Some(format!("the pod is pinned to it for {left}")),
            Self::Annotation { key } => Some(format!("required by the pod's annotation {key}")),
        }
    }
}

/// The answer to a request.
#[derive(Clone, Debug)]
pub struct Decision {
    pub verdict: Verdict,
    /// The plugin that decided it; None when nothing was missing.
    pub plugin: Option<PluginName>,
    /// The refusal, or why the request passes.
    pub text: String,
    /// Anything covered the request.
    pub covered: bool,
    /// Every plugin that was missing, and why: they have not processed the request if it passes.
    pub missing: Vec<(PluginName, String)>,
}

/// A requirement that is not met.
struct Unmet<'a> {
    plugin: PluginName,
    lease: Option<&'a Lease>,
    cause: Cause,
    missing: Missing,
}

/// What was looked at, for people; nothing is written where nobody reads.
struct Notes<'a>(Option<&'a mut Vec<String>>);

impl Notes<'_> {
    fn add(&mut self, step: impl FnOnce() -> String) {
        if let Some(steps) = &mut self.0 {
            steps.push(step());
        }
    }
}

/// Decides. `steps` collects, for people, what was looked at.
pub fn decide(
    snapshot: &Snapshot,
    request: &Request<'_>,
    evidence: &dyn Evidence,
    now: &Now,
    steps: Option<&mut Vec<String>>,
) -> Decision {
    let mut notes = Notes(steps);
    let listed = |plugin: &PluginName| evidence.listed(plugin);
    let (required, malformed) = match requirements(snapshot, request, &listed, now, &mut notes) {
        Ok(required) => (required, None),
        Err(problem) => (Vec::new(), Some(problem)),
    };
    let covered = !required.is_empty() || malformed.is_some();
    let unmet = unmet(required, evidence, now, &mut notes);
    let missing = unmet
        .iter()
        .map(|one| {
            let reason = text::missed(&one.missing, one.lease, now);
            (one.plugin.clone(), reason)
        })
        .collect();
    let objections = objections(snapshot, request, malformed, &unmet, now, &mut notes);
    // One that is enforced speaks for all, and rather one that is sure.
    let enforced = |one: &Objection| !one.audit_only;
    let strongest = objections
        .iter()
        .position(|one| enforced(one) && !one.in_doubt)
        .or_else(|| objections.iter().position(enforced));
    let Some(objection) = objections.into_iter().nth(strongest.unwrap_or(0)) else {
        notes.add(|| "nothing is missing: admitted".to_owned());
        let text = match covered {
            true => "every required plugin is present",
            false => "no lease covers it",
        };
        return Decision {
            verdict: Verdict::Admit,
            plugin: None,
            text: text.to_owned(),
            covered,
            missing,
        };
    };
    let (verdict, text) = judge(snapshot, request, &objection, now, &mut notes);
    Decision {
        verdict,
        plugin: objection.plugin,
        text,
        covered: true,
        missing,
    }
}

/// The plugins that a sandbox needs, by lease, pin or annotation, whether they are there or not.
pub fn required_for_sandbox(snapshot: &Snapshot, pod: PodView<'_>, now: &Now) -> Vec<PluginName> {
    let request = Request {
        pod,
        container: None,
        unvetted: &[],
        may_refuse_sandbox: true,
    };
    // A malformed annotation requires nobody in particular.
    let required = requirements(snapshot, &request, &|_| None, now, &mut Notes(None));
    let plugins = required.unwrap_or_default().into_iter();
    plugins.map(|(plugin, ..)| plugin).collect()
}

/// What speaks against a request.
struct Objection {
    /// None: it is not known, or does not matter, who is missing.
    plugin: Option<PluginName>,
    text: String,
    /// The lease concerned is in audit mode.
    audit_only: bool,
    /// Whose connection was lost is not known yet, and only a container can show it: refusing
    /// sandboxes until then could be for ever.
    in_doubt: bool,
}

type Required<'a> = Vec<(PluginName, Option<&'a Lease>, Cause)>;

/// Every plugin that this request needs: by a lease's scope, by a pin, by annotation.
fn requirements<'a>(
    snapshot: &'a Snapshot,
    request: &Request<'_>,
    listed: &dyn Fn(&PluginName) -> Option<bool>,
    now: &Now,
    notes: &mut Notes<'_>,
) -> Result<Required<'a>, String> {
    let mut required: Required<'a> = Vec::new();
    let live = |plugin: &str| {
        snapshot
            .state
            .lease(plugin)
            .map(|lease| &**lease)
            .filter(|lease| lease.counts_at(now.boottime))
    };
    if let Some(pins) = snapshot.state.pins().get(request.pod.uid) {
        for pin in pins.values() {
            if pin.counts_at(now.boottime) {
                let cause = Cause::Pin {
                    pod_uid: request.pod.uid.to_owned(),
                    left: text::whole_seconds(now.until(pin.deadline.boottime)),
                };
                required.push((pin.plugin.clone(), live(pin.plugin.as_str()), cause));
            }
        }
    }
    for lease in snapshot.state.leases().values() {
        if !lease.counts_at(now.boottime) || required.iter().any(|(p, ..)| *p == lease.plugin) {
            continue;
        }
        let covers = match &request.container {
            None => lease.scope.covers_sandbox(&request.pod),
            Some(container) => lease.scope.covers_container(&request.pod, container),
        };
        if covers {
            required.push((lease.plugin.clone(), Some(&**lease), Cause::Scope));
        } else {
            notes.add(|| format!("plugin {}: its scope does not cover this", lease.plugin));
        }
    }
    if snapshot.policy.required_plugins_annotation {
        let container = request.container.map(|container| container.name);
        for plugin in required_plugins(&request.pod, container).map_err(|e| e.to_string())? {
            let lease = live(plugin.as_str());
            // Without a lease there is nobody to ask the kernel about: the runtime's list decides,
            // and where it has none (sandboxes, old runtimes) nothing can be said.
            let decidable = lease.is_some() || listed(&plugin).is_some();
            if !decidable {
                notes.add(|| {
                    format!("plugin {plugin}: annotated, but it has no lease to go by here")
                });
            } else if !required.iter().any(|(p, ..)| *p == plugin) {
                let cause = Cause::Annotation {
                    key: nri_lease_state::required::REQUIRED_PLUGINS_ANNOTATION,
                };
                required.push((plugin, lease, cause));
            }
        }
    }
    Ok(required)
}

fn unmet<'a>(
    required: Required<'a>,
    evidence: &dyn Evidence,
    now: &Now,
    notes: &mut Notes<'_>,
) -> Vec<Unmet<'a>> {
    let mut unmet = Vec::new();
    for (plugin, lease, cause) in required {
        let why = || match cause.describe() {
            Some(cause) => cause,
            None => "its lease covers this".to_owned(),
        };
        match evidence_for(evidence, &plugin, lease, &cause) {
            Ok(()) => notes.add(|| format!("plugin {plugin}: required ({}), present", why())),
            Err(missing) => {
                notes.add(|| {
                    let missing = text::missing_briefly(&missing, lease, now);
                    format!("plugin {plugin}: required ({}), missing: {missing}", why())
                });
                unmet.push(Unmet {
                    plugin,
                    lease,
                    cause,
                    missing,
                });
            }
        }
    }
    unmet
}

fn evidence_for(
    evidence: &dyn Evidence,
    plugin: &PluginName,
    lease: Option<&Lease>,
    cause: &Cause,
) -> Result<(), Missing> {
    match (cause, lease, evidence.listed(plugin)) {
        (Cause::Annotation { .. }, None, Some(true)) => Ok(()),
        (Cause::Annotation { .. }, None, Some(false)) => Err(Missing::NotListed),
        _ => evidence.present(plugin, lease),
    }
}

/// Everything that speaks against the request, the strongest first.
fn objections(
    snapshot: &Snapshot,
    request: &Request<'_>,
    malformed: Option<String>,
    unmet: &[Unmet<'_>],
    now: &Now,
    notes: &mut Notes<'_>,
) -> Vec<Objection> {
    let is_audit = |lease: &Lease| lease.settings.mode == LeaseMode::Audit;
    let mut objections = Vec::new();
    if let Some(problem) = malformed {
        notes.add(|| problem.clone());
        objections.push(Objection {
            plugin: None,
            text: text::malformed_annotation(&problem),
            audit_only: false,
            in_doubt: false,
        });
    }
    for one in unmet {
        let others = unmet.iter().map(|other| &other.plugin);
        let others: Vec<_> = others.filter(|plugin| **plugin != one.plugin).collect();
        objections.push(Objection {
            plugin: Some(one.plugin.clone()),
            text: text::missing(
                &one.plugin,
                one.lease,
                &one.cause,
                &one.missing,
                &others,
                now,
            ),
            audit_only: one.lease.is_some_and(is_audit),
            in_doubt: matches!(one.missing, Missing::InDoubt { .. }),
        });
    }
    if let Some(end) = snapshot.hold_until.filter(|end| now.boottime < *end) {
        notes.add(|| {
            "the lease store was lost: new pods wait for plugins to register again".to_owned()
        });
        objections.push(Objection {
            plugin: None,
            text: text::store_lost(now.until(end)),
            audit_only: false,
            in_doubt: false,
        });
    }
    let reject_unvetted = snapshot.policy.unvetted_sandboxes == UnvettedSandboxes::Reject;
    if request.container.is_none() || !reject_unvetted {
        return objections;
    }
    for (plugin, reason) in request.unvetted {
        let lease = snapshot.state.lease(plugin.as_str());
        let Some(lease) = lease.filter(|lease| lease.counts_at(now.boottime)) else {
            continue;
        };
        notes.add(|| format!("plugin {plugin}: has missed the sandbox ({reason})"));
        objections.push(Objection {
            plugin: Some(plugin.clone()),
            text: text::unvetted(plugin, reason, &request.pod),
            audit_only: is_audit(lease),
            in_doubt: false,
        });
    }
    objections
}

/// What becomes of a request that something speaks against: DESIGN's exemptions, in their order.
///
/// A pause and audit mode are named first, but what passes for another reason as well is no
/// would-be rejection: `audit` lists what would be refused, no more and no less.
fn judge(
    snapshot: &Snapshot,
    request: &Request<'_>,
    objection: &Objection,
    now: &Now,
    notes: &mut Notes<'_>,
) -> (Verdict, String) {
    let suspended = suspended(snapshot, objection, now);
    if let Some(suspended) = &suspended {
        notes.add(|| format!("exemption: {suspended}"));
    }
    let is_sandbox = request.container.is_none();
    let passes = if let Some(exemption) = exemption(snapshot, request, now) {
        notes.add(|| format!("exemption: {exemption}"));
        Some((Verdict::Exempt, exemption.to_string()))
    } else if is_sandbox && (!request.may_refuse_sandbox || objection.in_doubt) {
        notes.add(|| "the sandbox starts unvetted; its containers wait".to_owned());
        let text = format!("starts unvetted: {}", objection.text);
        Some((Verdict::Unvetted, text))
    } else {
        None
    };
    match (suspended, passes) {
        (None, None) => {
            notes.add(|| "rejected".to_owned());
            (Verdict::Reject, objection.text.clone())
        }
        (None, Some(passes)) => passes,
        (Some(suspended), None) => {
            let text = format!("{suspended}: {}", objection.text);
            (Verdict::WouldReject, text)
        }
        (Some(suspended), Some((verdict, text))) => {
            (verdict, format!("{suspended}, and passes anyway: {text}"))
        }
    }
}

/// Whether a request would pass whatever speaks against it.
pub fn passes_anyway(snapshot: &Snapshot, request: &Request<'_>, now: &Now) -> bool {
    let is_sandbox = request.container.is_none();
    suspended_for_all(snapshot, now).is_some()
        || (is_sandbox && !request.may_refuse_sandbox)
        || exemption(snapshot, request, now).is_some()
}

/// Exemption 1: nothing is refused now, or not on account of this lease.
fn suspended(snapshot: &Snapshot, objection: &Objection, now: &Now) -> Option<String> {
    suspended_for_all(snapshot, now).or_else(|| {
        let audited = "audit mode of the lease".to_owned();
        objection.audit_only.then_some(audited)
    })
}

fn suspended_for_all(snapshot: &Snapshot, now: &Now) -> Option<String> {
    let pause = snapshot.state.pause();
    if let Some(pause) = pause.filter(|pause| pause.counts_at(now.boottime)) {
        return Some(format!(
            "enforcement is paused by uid {} ({})",
            pause.set_by_uid, pause.reason
        ));
    }
    (snapshot.policy.mode == Mode::Audit).then(|| "audit mode".to_owned())
}

/// Exemptions 2 to 4: static and provider pods, the node's own, the toleration. A pinned pod is no
/// provider pod.
fn exemption(snapshot: &Snapshot, request: &Request<'_>, now: &Now) -> Option<Exemption> {
    snapshot.policy.exemptions.first(
        &request.pod,
        request.container.map(|container| container.name),
        snapshot.state.leases().values(),
        snapshot.state.pins(),
        now.boottime,
    )
}
