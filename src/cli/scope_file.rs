//! `--scope FILE`: which pods and containers a lease covers, written down in TOML, YAML or JSON.
//!
//! `all`, a list of rules, or `rules:` with the list; the fields of a rule are those of the
//! protocol. Only the form is checked here: globs and selectors are the daemon's to judge.

use std::fmt;
use std::path::Path;

use nri_lease_proto::lease::types::{self, Scope, ScopeRule};
use nri_lease_proto::protobuf::{EnumOrUnknown, MessageField};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::error::{CliError, Complaint};
use super::input;

/// The forms that a scope file may have.
#[derive(Debug, PartialEq)]
enum ScopeFile {
    All,
    Rules(Vec<Rule>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WithRules {
    rules: Vec<Rule>,
}

#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
struct Rule {
    namespaces: Vec<String>,
    pod_labels: String,
    pod_annotations: Vec<String>,
    runtime_handlers: Vec<String>,
    cdi_devices: Vec<String>,
    containers: Vec<String>,
    operations: Vec<Operation>,
}

#[derive(Debug, Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Operation {
    Sandbox,
    Container,
}

/// Reads the scope; unset means everything.
///
/// # Errors
/// [`CliError::Usage`] when the file cannot be read or parsed, or has no rule.
pub fn read(path: &Path) -> Result<MessageField<Scope>, CliError> {
    let text = input::read("scope", path)?;
    let wrong = |problem: String, remedy: &str| {
        let attempt = format!("read the scope {}", path.display());
        CliError::Usage(Complaint::new(attempt, problem.trim_end(), remedy))
    };
    let fields = "A rule has namespaces, pod_labels, pod_annotations, runtime_handlers, \
                  cdi_devices, containers, operations.";
    match parse(&text, path).map_err(|problem| wrong(problem, fields))? {
        ScopeFile::All => Ok(MessageField::none()),
        ScopeFile::Rules(rules) if rules.is_empty() => Err(wrong(
            "it has no rule".to_string(),
            "To cover everything, leave out --scope.",
        )),
        ScopeFile::Rules(rules) => Ok(MessageField::some(Scope {
            rules: rules.into_iter().map(ScopeRule::from).collect(),
            ..Default::default()
        })),
    }
}

/// By extension. Without one, and from stdin: YAML, of which JSON is a part, or else TOML.
fn parse(text: &str, path: &Path) -> Result<ScopeFile, String> {
    let yaml = || serde_yaml_ng::from_str(text).map_err(|error| error.to_string());
    let toml = || toml::from_str(text).map_err(|error| error.to_string());
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("toml") => toml(),
        Some("yaml" | "yml") => yaml(),
        Some("json") => serde_json::from_str(text).map_err(|error| error.to_string()),
        _ => yaml().or_else(|problem| toml().map_err(|_: String| problem)),
    }
}

/// By hand instead of `untagged`, so that errors keep the field and the line.
impl<'de> Deserialize<'de> for ScopeFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScopeVisitor)
    }
}

struct ScopeVisitor;

impl<'de> Visitor<'de> for ScopeVisitor {
    type Value = ScopeFile;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"all\", a list of rules, or rules: with a list")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ScopeFile, E> {
        match text {
            "all" => Ok(ScopeFile::All),
            _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, rules: A) -> Result<ScopeFile, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(rules)).map(ScopeFile::Rules)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ScopeFile, A::Error> {
        WithRules::deserialize(MapAccessDeserializer::new(map))
            .map(|with_rules| ScopeFile::Rules(with_rules.rules))
    }
}

impl From<Rule> for ScopeRule {
    fn from(rule: Rule) -> Self {
        let operation = |operation| {
            EnumOrUnknown::new(match operation {
                Operation::Sandbox => types::Operation::OPERATION_SANDBOX,
                Operation::Container => types::Operation::OPERATION_CONTAINER,
            })
        };
        ScopeRule {
            namespaces: rule.namespaces,
            pod_labels: rule.pod_labels,
            pod_annotations: rule.pod_annotations,
            runtime_handlers: rule.runtime_handlers,
            cdi_devices: rule.cdi_devices,
            containers: rule.containers,
            operations: rule.operations.into_iter().map(operation).collect(),
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected() -> ScopeFile {
        ScopeFile::Rules(vec![Rule {
            namespaces: vec!["prod-*".to_string()],
            operations: vec![Operation::Container],
            ..Default::default()
        }])
    }

    #[test]
    fn every_language_says_the_same() {
        let toml = "[[rules]]\nnamespaces = ['prod-*']\noperations = ['container']\n";
        let yaml = "rules:\n- namespaces: [prod-*]\n  operations: [container]\n";
        let json = r#"[{"namespaces": ["prod-*"], "operations": ["container"]}]"#;
        assert_eq!(parse(toml, Path::new("a.toml")), Ok(expected()));
        assert_eq!(parse(yaml, Path::new("a.yaml")), Ok(expected()));
        assert_eq!(parse(json, Path::new("a.json")), Ok(expected()));
        for text in [toml, yaml, json] {
            assert_eq!(parse(text, Path::new("-")), Ok(expected()), "{text}");
        }
    }

    #[test]
    fn all_covers_everything() {
        assert_eq!(parse("all", Path::new("-")), Ok(ScopeFile::All));
        assert_eq!(parse("\"all\"", Path::new("a.json")), Ok(ScopeFile::All));
        assert!(parse("none", Path::new("-")).is_err());
    }

    #[test]
    fn an_unknown_field_is_named() {
        let problem = parse("rules:\n- namespace: [a]\n", Path::new("a.yaml")).unwrap_err();
        assert!(
            problem.contains("namespace") && problem.contains("line 2"),
            "{problem}"
        );
        let problem = parse("[[rules]]\nnamespace = ['a']\n", Path::new("a.toml")).unwrap_err();
        assert!(problem.contains("namespace"), "{problem}");
    }
}
