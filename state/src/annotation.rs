//! NRI's way to annotate one container, or all of a pod.

use crate::scope::PodView;

/// NRI's `GetEffectiveAnnotation`: `KEY/container.NAME`, `KEY/pod`, `KEY`; the first that is there
/// counts, even with an empty value. For a sandbox (no container) only the latter two.
/// Returns the full key and the value.
pub fn effective_annotation<'a>(
    pod: &PodView<'a>,
    key: &str,
    container: Option<&str>,
) -> Option<(&'a str, &'a str)> {
    // Most pods have no such annotation: found out without building keys.
    if !pod.annotations.keys().any(|found| found.starts_with(key)) {
        return None;
    }
    let of_container = container.map(|name| format!("{key}/container.{name}"));
    let of_pod = format!("{key}/pod");
    let keys = [of_container.as_deref(), Some(of_pod.as_str()), Some(key)];
    keys.into_iter()
        .flatten()
        .find_map(|key| pod.annotations.get_key_value(key))
        .map(|(key, value)| (key.as_str(), value.as_str()))
}
