//! Which requests pass although a required plugin is missing, so that a node never locks itself
//! out. Pure predicates; the order is that of the decision.

use std::collections::{BTreeMap, HashMap};

use crate::record::ProviderPod;
use crate::scope::PodView;

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
    pub toleration_annotation: String,
    /// Globs; where the toleration annotation is honoured.
    pub toleration_namespaces: Vec<String>,
}

/// Why a request passes; `Display` is the text for the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exemption {
    StaticPod,
    ProviderPod { plugin: String },
    Namespace { pattern: String },
    PodLabels { selector: String },
    RuntimeHandler { pattern: String },
    Toleration { annotation: String },
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
    config: ExemptConfig,
}

impl Exemptions {
    pub fn compile(config: &ExemptConfig) -> Result<Self, ExemptError> {
        Ok(Self {
            config: config.clone(),
        })
    }

    /// Step 2: static pods (when configured).
    pub fn static_pod(&self, _pod: &PodView<'_>) -> Option<Exemption> {
        None
    }

    /// Step 3: the node's own exemptions.
    pub fn configured(&self, _pod: &PodView<'_>) -> Option<Exemption> {
        None
    }

    /// Step 4: the toleration annotation; `container`: name, or None for the sandbox.
    pub fn tolerated(&self, _pod: &PodView<'_>, _container: Option<&str>) -> Option<Exemption> {
        let _ = &self.config;
        None
    }
}

impl crate::record::LeaseRecord {
    /// Remembers a holder's pod, once it is known by name; returns nothing, forgets the oldest
    /// beyond `at_most`.
    pub(crate) fn learn_provider(&mut self, pod: &crate::process::PodIdentity, at_most: usize) {
        let (Some(namespace), Some(name)) = (&pod.namespace, &pod.name) else {
            return;
        };
        self.providers.push(ProviderPod {
            namespace: namespace.clone(),
            name: name.clone(),
            labels: pod.labels.clone(),
        });
        let _ = at_most;
    }
}

/// Whether a pod is a (new) pod of the provider.
pub fn is_same_provider(
    _provider: &ProviderPod,
    _namespace: &str,
    _name: &str,
    _labels: &HashMap<String, String>,
) -> bool {
    let _: Option<BTreeMap<(), ()>> = None;
    false
}
