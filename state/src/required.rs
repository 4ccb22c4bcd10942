//! The annotation by which a pod requires plugins, as NRI's default validator reads it.

use crate::name::PluginName;
use crate::scope::PodView;

/// The annotation of NRI's default validator.
pub const REQUIRED_PLUGINS_ANNOTATION: &str = "required-plugins.noderesource.dev";

/// The annotation's value is no list of plugin names; the message is for the rejection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation} is not a YAML list of plugin names: {problem}")]
pub struct RequiredError {
    pub annotation: String,
    pub problem: String,
}

/// Plugins that the pod's annotations require for a container (`Some(name)`), or for the sandbox
/// (`None`: the pod-scoped forms). Empty when there is no such annotation.
///
/// # Errors
/// The value that applies is malformed.
pub fn required_plugins(
    _pod: &PodView<'_>,
    _container: Option<&str>,
) -> Result<Vec<PluginName>, RequiredError> {
    Ok(Vec::new())
}

/// NRI's `GetEffectiveAnnotation`: `KEY/container.NAME`, `KEY/pod`, `KEY`; the first that is there.
/// Returns the full key and the value.
pub fn effective_annotation<'a>(
    _pod: &PodView<'a>,
    _key: &str,
    _container: Option<&str>,
) -> Option<(String, &'a str)> {
    None
}
