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

/// Decides. `steps` collects, for people, what was looked at.
pub fn decide(
    snapshot: &Snapshot,
    request: &Request<'_>,
    evidence: &dyn Evidence,
    now: &Now,
    mut steps: Option<&mut Vec<String>>,
) -> Decision {
    let mut note = |step: &dyn Fn() -> String| {
        if let Some(steps) = steps.as_deref_mut() {
            steps.push(step());
        }
    };

    let required = match requirements(snapshot, request, evidence, now, &mut note) {
        Ok(required) => required,
        Err(problem) => return malformed(snapshot, request, now, problem, &mut note),
    };
    let covered = !required.is_empty();
    let mut unmet = Vec::new();
    for (plugin, lease, cause) in required {
        match evidence_for(evidence, &plugin, lease, &cause) {
            Ok(()) => note(&|| format!("plugin {plugin}: required ({}), present", why(&cause))),
            Err(missing) => {
                note(&|| {
                    format!(
                        "plugin {plugin}: required ({}), missing: {}",
                        why(&cause),
                        text::missing_briefly(&missing, lease, now)
                    )
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
    let missing = unmet
        .iter()
        .map(|one| {
            let why = text::missing_briefly(&one.missing, one.lease, now);
            (one.plugin.clone(), why)
        })
        .collect::<Vec<_>>();
    let objection = objection(snapshot, request, &unmet, now, &mut note);
    let Some(objection) = objection else {
        note(&|| "nothing is missing: admitted".to_owned());
        return Decision {
            verdict: Verdict::Admit,
            plugin: None,
            text: if covered {
                "every required plugin is present".to_owned()
            } else {
                "no lease covers it".to_owned()
            },
            covered,
            missing,
        };
    };
    let verdict = judge(snapshot, request, &objection, now, &mut note);
    Decision {
        verdict: verdict.0,
        plugin: objection.plugin,
        text: verdict.1.unwrap_or(objection.text),
        covered: true,
        missing,
    }
}

/// What speaks against a request.
struct Objection {
    /// None: the leases are lost, so it is not known who is missing.
    plugin: Option<PluginName>,
    text: String,
    /// None of the leases concerned is in enforce mode.
    audit_only: bool,
    /// It is about this sandbox having been missed, not about the plugin being away.
    unvetted: bool,
    /// Whose connection was lost is not known yet, and only a container can show it: refusing
    /// sandboxes until then could be for ever.
    in_doubt: bool,
}

type Required<'a> = Vec<(PluginName, Option<&'a Lease>, Cause)>;

/// Every plugin that this request needs: by a lease's scope, by a pin, by annotation.
fn requirements<'a>(
    snapshot: &'a Snapshot,
    request: &Request<'_>,
    evidence: &dyn Evidence,
    now: &Now,
    note: &mut dyn FnMut(&dyn Fn() -> String),
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
            note(&|| format!("plugin {}: its scope does not cover this", lease.plugin));
        }
    }
    if snapshot.policy.required_plugins_annotation {
        let container = request.container.map(|container| container.name);
        for plugin in required_plugins(&request.pod, container).map_err(|e| e.to_string())? {
            let lease = live(plugin.as_str());
            // Without a lease there is nobody to ask the kernel about: the runtime's list decides,
            // and where it has none (sandboxes, old runtimes) nothing can be said.
            let decidable = lease.is_some() || evidence.listed(&plugin).is_some();
            if decidable && !required.iter().any(|(p, ..)| *p == plugin) {
                let cause = Cause::Annotation {
                    key: nri_lease_state::required::REQUIRED_PLUGINS_ANNOTATION,
                };
                required.push((plugin, lease, cause));
            }
        }
    }
    Ok(required)
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

fn why(cause: &Cause) -> String {
    cause
        .describe()
        .unwrap_or_else(|| "its lease covers this".to_owned())
}

fn refusal(unmet: &Unmet<'_>, others: usize, now: &Now) -> String {
    text::missing(
        &unmet.plugin,
        unmet.lease,
        &unmet.cause,
        &unmet.missing,
        others,
        now,
    )
}

/// The strongest thing against the request, if there is any.
fn objection(
    snapshot: &Snapshot,
    request: &Request<'_>,
    unmet: &[Unmet<'_>],
    now: &Now,
    note: &mut dyn FnMut(&dyn Fn() -> String),
) -> Option<Objection> {
    let is_audit = |one: &Unmet<'_>| {
        one.lease
            .is_some_and(|l| l.settings.mode == LeaseMode::Audit)
    };
    // One that is enforced speaks for all.
    let in_doubt = |one: &Unmet<'_>| matches!(one.missing, Missing::InDoubt { .. });
    let mut enforced = unmet.iter().filter(|one| !is_audit(one));
    let first = enforced
        .clone()
        .find(|one| !in_doubt(one))
        .or_else(|| enforced.next())
        .or(unmet.first());
    if let Some(first) = first {
        return Some(Objection {
            plugin: Some(first.plugin.clone()),
            text: refusal(first, unmet.len() - 1, now),
            audit_only: is_audit(first),
            unvetted: false,
            in_doubt: in_doubt(first),
        });
    }
    if let Some(end) = snapshot.hold_until.filter(|end| now.boottime < *end) {
        note(&|| {
            "the lease store was lost: new pods wait for plugins to register again".to_owned()
        });
        return Some(Objection {
            plugin: None,
            text: text::store_lost(now.until(end)),
            audit_only: false,
            unvetted: false,
            in_doubt: false,
        });
    }
    if request.container.is_none() || snapshot.policy.unvetted_sandboxes == UnvettedSandboxes::Allow
    {
        return None;
    }
    let (plugin, reason) = request.unvetted.iter().find(|(plugin, _)| {
        snapshot
            .state
            .lease(plugin.as_str())
            .is_some_and(|lease| lease.counts_at(now.boottime))
    })?;
    note(&|| format!("plugin {plugin}: has missed the sandbox ({reason})"));
    Some(Objection {
        plugin: Some(plugin.clone()),
        text: text::unvetted(plugin, reason),
        audit_only: false,
        unvetted: true,
        in_doubt: false,
    })
}

/// What becomes of a request that something speaks against: DESIGN's exemptions, in their order.
/// A text replaces the objection's.
fn judge(
    snapshot: &Snapshot,
    request: &Request<'_>,
    objection: &Objection,
    now: &Now,
    note: &mut dyn FnMut(&dyn Fn() -> String),
) -> (Verdict, Option<String>) {
    if let Some(pause) = snapshot
        .state
        .pause()
        .filter(|pause| pause.counts_at(now.boottime))
    {
        let text = format!(
            "enforcement is paused ({}): {}",
            pause.reason, objection.text
        );
        note(&|| "exemption: enforcement is paused".to_owned());
        return (Verdict::WouldReject, Some(text));
    }
    if snapshot.policy.mode == Mode::Audit || objection.audit_only {
        let text = format!("audit mode: {}", objection.text);
        note(&|| "exemption: audit mode".to_owned());
        return (Verdict::WouldReject, Some(text));
    }
    if let Some(exemption) = exemption(snapshot, request, now) {
        note(&|| format!("exemption: {exemption}"));
        return (Verdict::Exempt, Some(exemption.to_string()));
    }
    let is_sandbox = request.container.is_none();
    if is_sandbox && (!request.may_refuse_sandbox || objection.in_doubt) {
        note(&|| "the sandbox starts unvetted; its containers wait".to_owned());
        let text = format!("starts unvetted: {}", objection.text);
        return (Verdict::Unvetted, Some(text));
    }
    debug_assert!(!(is_sandbox && objection.unvetted));
    note(&|| "rejected".to_owned());
    (Verdict::Reject, None)
}

/// The exemption that applies, in DESIGN's order: static and provider pods, the node's own, the
/// toleration. A pinned pod is no provider pod.
fn exemption(snapshot: &Snapshot, request: &Request<'_>, now: &Now) -> Option<Exemption> {
    snapshot.policy.exemptions.first(
        &request.pod,
        request.container.map(|container| container.name),
        snapshot.state.leases().values(),
        snapshot.state.pins(),
        now.boottime,
    )
}

fn malformed(
    snapshot: &Snapshot,
    request: &Request<'_>,
    now: &Now,
    problem: String,
    note: &mut dyn FnMut(&dyn Fn() -> String),
) -> Decision {
    note(&|| problem.clone());
    let paused = snapshot
        .state
        .pause()
        .is_some_and(|pause| pause.counts_at(now.boottime));
    let text = text::malformed_annotation(&problem);
    let verdict = if paused || snapshot.policy.mode == Mode::Audit {
        Verdict::WouldReject
    } else if exemption(snapshot, request, now).is_some() {
        Verdict::Exempt
    } else if request.container.is_none() && !request.may_refuse_sandbox {
        Verdict::Unvetted
    } else {
        Verdict::Reject
    };
    Decision {
        verdict,
        plugin: None,
        text,
        covered: true,
        missing: Vec::new(),
    }
}
