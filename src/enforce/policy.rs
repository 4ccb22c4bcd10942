//! The part of the configuration that decisions depend on, compiled.

use nri_lease_state::exempt::{ExemptConfig, ExemptError, Exemptions};

use crate::config::{Config, Mode, SandboxEnforcement, UnvettedSandboxes};

/// Compiled once per (re)load of the configuration.
#[derive(Debug)]
pub struct Policy {
    pub mode: Mode,
    pub sandbox: SandboxEnforcement,
    pub unvetted_sandboxes: UnvettedSandboxes,
    pub required_plugins_annotation: bool,
    pub exemptions: Exemptions,
    /// Our own index: a plugin at this or a later one is not called before us.
    pub own_index: u8,
}

impl Policy {
    /// # Errors
    /// Names the exemption that cannot be used.
    pub fn compile(config: &Config) -> Result<Self, ExemptError> {
        let exempt = &config.exempt;
        Ok(Self {
            mode: config.enforcement.mode,
            sandbox: config.enforcement.sandbox,
            unvetted_sandboxes: config.enforcement.unvetted_sandboxes,
            required_plugins_annotation: config.enforcement.required_plugins_annotation,
            exemptions: Exemptions::compile(&ExemptConfig {
                static_pods: exempt.static_pods,
                namespaces: exempt.namespaces.clone(),
                pod_labels: exempt.pod_labels.clone(),
                runtime_handlers: exempt.runtime_handlers.clone(),
                toleration_annotation: exempt.toleration_annotation.clone(),
                toleration_namespaces: exempt.toleration_namespaces.clone(),
            })?,
            own_index: config.runtime.plugin_index.number(),
        })
    }
}
