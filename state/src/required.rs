//! The annotation by which a pod requires plugins, as NRI's default validator reads it.

use crate::annotation::effective_annotation;
use crate::name::PluginName;
use crate::scope::PodView;

/// The annotation of NRI's default validator (`RequiredPluginsAnnotation`).
pub const REQUIRED_PLUGINS_ANNOTATION: &str = "required-plugins.noderesource.dev";

/// Longest value that is parsed, in bytes.
pub const MAX_VALUE_BYTES: usize = 4096;

/// The annotation's value is no list of plugin names; the message is for the rejection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation} is not a YAML list of plugin names like [dra.net]: {problem}")]
pub struct RequiredError {
    /// The full key.
    pub annotation: String,
    pub problem: String,
}

/// Plugins that the pod's annotations require for a container (`Some(name)`), or for the sandbox
/// (`None`: the pod-scoped forms), each once. Empty when there is no such annotation, or an empty
/// one.
///
/// # Errors
/// The value that applies is malformed.
pub fn required_plugins(
    pod: &PodView<'_>,
    container: Option<&str>,
) -> Result<Vec<PluginName>, RequiredError> {
    let Some((annotation, value)) =
        effective_annotation(pod, REQUIRED_PLUGINS_ANNOTATION, container)
    else {
        return Ok(Vec::new());
    };
    parse(value).map_err(|problem| RequiredError {
        annotation: annotation.to_owned(),
        problem,
    })
}

fn parse(value: &str) -> Result<Vec<PluginName>, String> {
    if value.len() > MAX_VALUE_BYTES {
        return Err(format!(
            "it has {} bytes, at most {MAX_VALUE_BYTES} are read",
            value.len()
        ));
    }
    // yaml.v3 makes no list of an empty document or of null, and no error of it.
    let names: Option<Vec<String>> =
        serde_yaml_ng::from_str(value).map_err(|error| one_line(&error.to_string()))?;
    let mut plugins: Vec<PluginName> = Vec::new();
    for name in names.unwrap_or_default() {
        let plugin = PluginName::try_from(name).map_err(|error| error.to_string())?;
        if !plugins.contains(&plugin) {
            plugins.push(plugin);
        }
    }
    Ok(plugins)
}

/// The message goes into a rejection of at most 512 bytes, and quotes what others wrote.
fn one_line(text: &str) -> String {
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(200).map(printable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn required(
        annotations: &[(&str, &str)],
        container: Option<&str>,
    ) -> Result<Vec<String>, RequiredError> {
        let labels = HashMap::new();
        let key = |suffix: &str| format!("{REQUIRED_PLUGINS_ANNOTATION}{suffix}");
        let annotations: HashMap<_, _> = annotations
            .iter()
            .map(|(suffix, value)| (key(suffix), (*value).to_owned()))
            .collect();
        let pod = PodView {
            namespace: "default",
            name: "web",
            uid: "u",
            labels: &labels,
            annotations: &annotations,
            runtime_handler: "",
        };
        let names = required_plugins(&pod, container)?;
        Ok(names.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_narrowest_annotation_counts() {
        let all = [("", "[bare]"), ("/pod", "[pod]"), ("/container.c0", "[c0]")];
        assert_eq!(required(&all, Some("c0")).unwrap(), ["c0"]);
        assert_eq!(required(&all, Some("c1")).unwrap(), ["pod"]);
        assert_eq!(required(&all, None).unwrap(), ["pod"]);
        assert_eq!(required(&all[..1], Some("c0")).unwrap(), ["bare"]);
        assert_eq!(required(&all[2..], None).unwrap(), [""; 0]);
        assert_eq!(required(&[], Some("c0")).unwrap(), [""; 0]);
    }

    #[test]
    fn lists_in_both_styles_of_yaml_are_read() {
        assert_eq!(
            required(&[("", "- a\n- b.c\n- a\n")], None).unwrap(),
            ["a", "b.c"]
        );
        assert_eq!(required(&[("", r#"["a","b"]"#)], None).unwrap(), ["a", "b"]);
    }

    #[test]
    fn an_empty_value_requires_nothing_and_hides_wider_ones() {
        for empty in ["", "[]", "null", "~"] {
            let annotations = [("", "[a]"), ("/pod", empty)];
            assert_eq!(required(&annotations, None).unwrap(), [""; 0], "{empty:?}");
        }
    }

    #[test]
    fn a_malformed_value_is_an_error_that_names_the_annotation() {
        let long = format!("[{}]", "a,".repeat(MAX_VALUE_BYTES));
        let deep = "[".repeat(4000);
        for bad in [
            "a", "{a: b}", "[a", "[[a]]", "[a b]", "[a/b]", "\u{1}", &long, &deep,
        ] {
            let error = required(&[("/pod", bad)], None).unwrap_err().to_string();
            assert!(
                error.contains("required-plugins.noderesource.dev/pod"),
                "{error}"
            );
            assert!(error.len() < 400, "{error}");
        }
    }
}
