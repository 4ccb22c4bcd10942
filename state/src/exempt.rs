//! Which requests pass although a required plugin is missing, so that a node never locks itself
//! out.
//!
//! Pure predicates in the order of the decision (DESIGN "Exemptions"): pause and audit mode are
//! before all of them and are read from the state; then static pods, provider pods, the node's own
//! exemptions, the toleration annotation.

use std::fmt;
use std::sync::Arc;

use crate::annotation::effective_annotation;
use crate::glob::Globs;
use crate::name::PluginName;
use crate::rules::{Lease, PinMap};
use crate::scope::PodView;
use crate::selector::Selector;
use crate::time::Boottime;

/// Where the kubelet says where it got a pod from: `api`, `file` or `http`.
pub const CONFIG_SOURCE_ANNOTATION: &str = "kubernetes.io/config.source";
/// Default key of the toleration annotation: that of NRI's default validator, as is usual.
pub const TOLERATION_ANNOTATION: &str = "tolerate-missing-plugins.noderesource.dev";

/// Exemptions as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExemptConfig {
    pub static_pods: bool,
    /// Globs.
    pub namespaces: Vec<String>,
    /// A Kubernetes label selector; empty: none.
    pub pod_labels: String,
    /// Globs.
    pub runtime_handlers: Vec<String>,
    /// Empty: never honoured.
    pub toleration_annotation: String,
    /// Globs; where the toleration annotation is honoured.
    pub toleration_namespaces: Vec<String>,
}

impl Default for ExemptConfig {
    fn default() -> Self {
        Self {
            static_pods: true,
            namespaces: Vec::new(),
            pod_labels: String::new(),
            runtime_handlers: Vec::new(),
            toleration_annotation: TOLERATION_ANNOTATION.to_owned(),
            toleration_namespaces: vec!["kube-system".to_owned()],
        }
    }
}

/// Why a request passes; `Display` is the text for the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exemption {
    StaticPod { source: String },
    ProviderPod { plugin: PluginName },
    Namespace { pattern: String },
    PodLabels { selector: String },
    RuntimeHandler { pattern: String },
    Toleration { annotation: String },
}

impl Exemption {
    /// A short stable name, for counters.
    pub fn name(&self) -> &'static str {
        match self {
            Exemption::StaticPod { .. } => "static_pod",
            Exemption::ProviderPod { .. } => "provider_pod",
            Exemption::Namespace { .. } => "namespace",
            Exemption::PodLabels { .. } => "pod_labels",
            Exemption::RuntimeHandler { .. } => "runtime_handler",
            Exemption::Toleration { .. } => "toleration",
        }
    }
}

impl fmt::Display for Exemption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exemption::StaticPod { source } => {
                write!(f, "static pod ({CONFIG_SOURCE_ANNOTATION}={source:?})")
            }
            Exemption::ProviderPod { plugin } => write!(f, "pod of the plugin \"{plugin}\""),
            Exemption::Namespace { pattern } => {
                write!(f, "namespace exempt in the configuration ({pattern:?})")
            }
            Exemption::PodLabels { selector } => {
                write!(f, "pod labels exempt in the configuration ({selector:?})")
            }
            Exemption::RuntimeHandler { pattern } => {
                write!(
                    f,
                    "runtime handler exempt in the configuration ({pattern:?})"
                )
            }
            Exemption::Toleration { annotation } => write!(f, "annotation {annotation}"),
        }
    }
}

/// Why the configured exemptions cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("exempt.{field}: {problem}")]
pub struct ExemptError {
    pub field: &'static str,
    pub problem: String,
}

/// The configured exemptions, compiled once.
#[derive(Debug)]
pub struct Exemptions {
    static_pods: bool,
    namespaces: Globs,
    pod_labels: Option<(String, Selector)>,
    runtime_handlers: Globs,
    toleration_annotation: String,
    toleration_namespaces: Globs,
}

impl Exemptions {
    /// # Errors
    /// A pattern or the selector is malformed.
    pub fn compile(config: &ExemptConfig) -> Result<Self, ExemptError> {
        let globs = |field, patterns: &[String]| {
            Globs::compile(patterns).map_err(|problem| ExemptError { field, problem })
        };
        let pod_labels = match config.pod_labels.as_str() {
            "" => None,
            text => {
                let selector = Selector::parse(text).map_err(|problem| ExemptError {
                    field: "pod_labels",
                    problem,
                })?;
                Some((text.to_owned(), selector))
            }
        };
        Ok(Self {
            static_pods: config.static_pods,
            namespaces: globs("namespaces", &config.namespaces)?,
            pod_labels,
            runtime_handlers: globs("runtime_handlers", &config.runtime_handlers)?,
            toleration_annotation: config.toleration_annotation.clone(),
            toleration_namespaces: globs("toleration_namespaces", &config.toleration_namespaces)?,
        })
    }

    /// Steps 2 to 4 in order; the first that applies. `container`: its name, or None for the
    /// sandbox.
    pub fn first<'l>(
        &self,
        pod: &PodView<'_>,
        container: Option<&str>,
        leases: impl IntoIterator<Item = &'l Arc<Lease>>,
        pins: &PinMap,
        at: Boottime,
    ) -> Option<Exemption> {
        self.static_pod(pod)
            .or_else(|| provider_pod(pod, leases, pins, at))
            .or_else(|| self.configured(pod))
            .or_else(|| self.tolerated(pod, container))
    }

    /// Step 2: static pods. The control plane of a single-node cluster starts before any plugin.
    pub fn static_pod(&self, pod: &PodView<'_>) -> Option<Exemption> {
        let source = pod.annotations.get(CONFIG_SOURCE_ANNOTATION)?;
        (self.static_pods && source != "api").then(|| Exemption::StaticPod {
            source: source.clone(),
        })
    }

    /// Step 3: the node's own exemptions.
    pub fn configured(&self, pod: &PodView<'_>) -> Option<Exemption> {
        if let Some(pattern) = self.namespaces.matching(pod.namespace) {
            return Some(Exemption::Namespace {
                pattern: pattern.to_owned(),
            });
        }
        if let Some((text, selector)) = &self.pod_labels
            && selector.matches(pod.labels)
        {
            return Some(Exemption::PodLabels {
                selector: text.clone(),
            });
        }
        let pattern = self.runtime_handlers.matching(pod.runtime_handler)?;
        Some(Exemption::RuntimeHandler {
            pattern: pattern.to_owned(),
        })
    }

    /// Step 4: the toleration annotation, only in the namespaces where it is honoured. True is what
    /// Go's `strconv.ParseBool` takes for true.
    pub fn tolerated(&self, pod: &PodView<'_>, container: Option<&str>) -> Option<Exemption> {
        if self.toleration_annotation.is_empty()
            || !self.toleration_namespaces.matches(pod.namespace)
        {
            return None;
        }
        let (annotation, value) =
            effective_annotation(pod, &self.toleration_annotation, container)?;
        matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True").then(|| Exemption::Toleration {
            annotation: annotation.to_owned(),
        })
    }
}

/// Step 2: pods that host holders of live leases, and their successors, are exempt from every
/// lease; a pinned pod is not.
pub fn provider_pod<'l>(
    pod: &PodView<'_>,
    leases: impl IntoIterator<Item = &'l Arc<Lease>>,
    pins: &PinMap,
    at: Boottime,
) -> Option<Exemption> {
    let hosts = |lease: &&Arc<Lease>| {
        let by_uid = lease.holders.iter().any(|holder| {
            let host = holder.facts.pod.as_ref();
            host.is_some_and(|host| host.uid.as_str() == pod.uid)
        });
        let is_same = || {
            let mut providers = lease.providers.iter();
            providers.any(|provider| provider.is_same(pod.namespace, pod.name, pod.labels))
        };
        lease.counts_at(at) && (by_uid || is_same())
    };
    let lease = leases.into_iter().find(hosts)?;
    (!is_pinned(pins, pod.uid, at)).then(|| Exemption::ProviderPod {
        plugin: lease.plugin.clone(),
    })
}

/// Whether any live pin is on the pod.
pub fn is_pinned(pins: &PinMap, pod_uid: &str, at: Boottime) -> bool {
    let pins = pins.get(pod_uid);
    pins.is_some_and(|pins| pins.values().any(|pin| pin.counts_at(at)))
}
