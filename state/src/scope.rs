//! Which pods and containers a lease covers.
//!
//! A [`Scope`] is what is given and stored; [`CompiledScope`] is what a hook asks. It is compiled
//! once per registration.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// Rules in a scope, at most.
pub const MAX_RULES: usize = 64;
/// Entries in one list of a rule, at most.
pub const MAX_ENTRIES: usize = 64;
/// Length of one pattern, key or value, in bytes, at most.
pub const MAX_PATTERN_BYTES: usize = 512;
/// All text of a scope together, in bytes, at most.
pub const MAX_SCOPE_BYTES: usize = 16 << 10;

/// Which pods and containers are covered. No rules: all of them; otherwise those that any rule
/// matches.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    #[serde(default)]
    pub rules: Vec<ScopeRule>,
}

/// Matches when every field that is given matches.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScopeRule {
    /// Globs on the pod's namespace; any of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
    /// A Kubernetes label selector: `app=db,tier in (a,b),!legacy`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod_labels: String,
    /// `key` or `key=value`; all of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pod_annotations: Vec<String>,
    /// Globs on the runtime handler; any of them. The default handler is the empty name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub runtime_handlers: Vec<String>,
    /// Globs on the fully qualified CDI device name (`dra.net/*=*`); any of them. Containers only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cdi_devices: Vec<String>,
    /// Globs on the container's name; any of them. Containers only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<String>,
    /// Which operations the rule is for; none means both.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<Operation>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// RunPodSandbox.
    Sandbox,
    /// CreateContainer.
    Container,
}

/// What a hook knows about a pod, borrowed from the request.
#[derive(Debug, Clone, Copy)]
pub struct PodView<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    pub uid: &'a str,
    pub labels: &'a HashMap<String, String>,
    pub annotations: &'a HashMap<String, String>,
    pub runtime_handler: &'a str,
}

/// What a hook knows about a container, borrowed from the request.
#[derive(Debug, Clone, Copy)]
pub struct ContainerView<'a> {
    pub name: &'a str,
    /// Fully qualified names.
    pub cdi_devices: &'a [&'a str],
}

/// Why a scope is refused; the message names the rule (from 1) and the field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScopeError {
    #[error("scope has {found} rules, at most {limit} are allowed: merge some")]
    TooManyRules { found: usize, limit: usize },
    #[error("scope.rules[{rule}].{field}: {problem}")]
    Field {
        /// From 1.
        rule: usize,
        field: &'static str,
        problem: String,
    },
}

/// A scope that hooks can ask.
#[derive(Debug)]
pub struct CompiledScope {}

impl Scope {
    /// Everything.
    pub fn all() -> Self {
        Self::default()
    }

    /// # Errors
    /// A rule that is empty, malformed, too large or can never match.
    pub fn compile(&self) -> Result<CompiledScope, ScopeError> {
        Ok(CompiledScope {})
    }
}

impl CompiledScope {
    /// Everything.
    pub fn all() -> Self {
        Self {}
    }

    /// Whether starting this pod's sandbox is covered.
    pub fn covers_sandbox(&self, _pod: &PodView<'_>) -> bool {
        true
    }

    /// Whether creating this container is covered.
    pub fn covers_container(&self, _pod: &PodView<'_>, _container: &ContainerView<'_>) -> bool {
        true
    }
}
