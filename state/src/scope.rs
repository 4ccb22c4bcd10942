//! Which pods and containers a lease covers.
//!
//! A [`Scope`] is what is given and stored; [`CompiledScope`] is what a hook asks. It is compiled
//! once per registration.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::glob::Globs;
use crate::selector::Selector;

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
    #[error(
        "scope has {found} bytes of text, at most {MAX_SCOPE_BYTES} are allowed: merge patterns"
    )]
    TooLarge { found: usize },
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
pub struct CompiledScope {
    /// None: everything.
    rules: Option<Vec<CompiledRule>>,
}

/// One rule; a field that was not given is None and always matches.
#[derive(Debug)]
struct CompiledRule {
    namespaces: Option<Globs>,
    pod_labels: Option<Selector>,
    /// Key, and the value when one was given.
    pod_annotations: Vec<(String, Option<String>)>,
    runtime_handlers: Option<Globs>,
    cdi_devices: Option<Globs>,
    containers: Option<Globs>,
    sandboxes_too: bool,
    containers_too: bool,
}

impl Scope {
    /// Everything.
    pub fn all() -> Self {
        Self::default()
    }

    /// # Errors
    /// A rule that is empty, malformed, too large or can never match.
    pub fn compile(&self) -> Result<CompiledScope, ScopeError> {
        if self.rules.len() > MAX_RULES {
            return Err(ScopeError::TooManyRules {
                found: self.rules.len(),
                limit: MAX_RULES,
            });
        }
        let bytes: usize = self.rules.iter().map(ScopeRule::text_bytes).sum();
        if bytes > MAX_SCOPE_BYTES {
            return Err(ScopeError::TooLarge { found: bytes });
        }
        if self.rules.is_empty() {
            return Ok(CompiledScope::all());
        }
        let rules = self.rules.iter().enumerate().map(|(index, rule)| {
            rule.compile()
                .map_err(|(field, problem)| ScopeError::Field {
                    rule: index + 1,
                    field,
                    problem,
                })
        });
        Ok(CompiledScope {
            rules: Some(rules.collect::<Result<_, _>>()?),
        })
    }
}

/// The field and what is wrong with it.
type FieldError = (&'static str, String);

impl ScopeRule {
    fn lists(&self) -> [(&'static str, &[String]); 5] {
        [
            ("namespaces", &self.namespaces),
            ("pod_annotations", &self.pod_annotations),
            ("runtime_handlers", &self.runtime_handlers),
            ("cdi_devices", &self.cdi_devices),
            ("containers", &self.containers),
        ]
    }

    fn text_bytes(&self) -> usize {
        let lists = self.lists();
        let texts = lists.iter().flat_map(|(_, list)| list.iter());
        // One for the entry itself: empty entries are not free.
        texts.map(|text| text.len() + 1).sum::<usize>() + self.pod_labels.len()
    }

    fn compile(&self) -> Result<CompiledRule, FieldError> {
        self.check_sizes()?;
        if *self == Self::default() {
            return Err((
                "*",
                "the rule is empty: give a field, or no rules at all to cover everything".into(),
            ));
        }
        let operation = |wanted| self.operations.is_empty() || self.operations.contains(&wanted);
        let containers_only = !self.cdi_devices.is_empty() || !self.containers.is_empty();
        if containers_only && !operation(Operation::Container) {
            return Err((
                "operations",
                "cdi_devices and containers are only known for containers, so a rule with them \
                 that leaves out the operation container never matches"
                    .into(),
            ));
        }
        Ok(CompiledRule {
            namespaces: globs("namespaces", &self.namespaces)?,
            pod_labels: match self.pod_labels.as_str() {
                "" => None,
                text => Some(Selector::parse(text).map_err(|problem| ("pod_labels", problem))?),
            },
            pod_annotations: annotations(&self.pod_annotations)?,
            runtime_handlers: globs("runtime_handlers", &self.runtime_handlers)?,
            cdi_devices: globs("cdi_devices", &self.cdi_devices)?,
            containers: globs("containers", &self.containers)?,
            sandboxes_too: operation(Operation::Sandbox) && !containers_only,
            containers_too: operation(Operation::Container),
        })
    }

    fn check_sizes(&self) -> Result<(), FieldError> {
        let lists = self.lists();
        for (field, list) in lists {
            if list.len() > MAX_ENTRIES {
                let found = list.len();
                let problem = format!("{found} entries, at most {MAX_ENTRIES} are allowed");
                return Err((field, problem));
            }
            if let Some(long) = list.iter().find(|text| text.len() > MAX_PATTERN_BYTES) {
                let found = long.len();
                let problem =
                    format!("an entry has {found} bytes, at most {MAX_PATTERN_BYTES} are allowed");
                return Err((field, problem));
            }
            // Only the default runtime handler has an empty name.
            if field != "runtime_handlers" && list.iter().any(String::is_empty) {
                return Err((field, "an entry is empty: remove it, or write *".into()));
            }
        }
        Ok(())
    }
}

fn globs(field: &'static str, patterns: &[String]) -> Result<Option<Globs>, FieldError> {
    if patterns.is_empty() {
        return Ok(None);
    }
    let compiled = Globs::compile(patterns).map_err(|problem| (field, problem))?;
    Ok(Some(compiled))
}

fn annotations(entries: &[String]) -> Result<Vec<(String, Option<String>)>, FieldError> {
    let parse = |entry: &String| {
        let (key, value) = match entry.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (entry.as_str(), None),
        };
        if key.is_empty() {
            let problem = format!("{entry:?} has no key: give key or key=value");
            return Err(("pod_annotations", problem));
        }
        Ok((key.to_owned(), value))
    };
    entries.iter().map(parse).collect()
}

impl CompiledScope {
    /// Everything.
    pub fn all() -> Self {
        Self { rules: None }
    }

    /// Whether everything is covered, whatever it is.
    pub fn is_all(&self) -> bool {
        self.rules.is_none()
    }

    /// Whether starting this pod's sandbox is covered.
    pub fn covers_sandbox(&self, pod: &PodView<'_>) -> bool {
        let covers = |rule: &CompiledRule| rule.sandboxes_too && rule.matches_pod(pod);
        self.rules
            .as_ref()
            .is_none_or(|rules| rules.iter().any(covers))
    }

    /// Whether creating this container is covered.
    pub fn covers_container(&self, pod: &PodView<'_>, container: &ContainerView<'_>) -> bool {
        let covers = |rule: &CompiledRule| {
            rule.containers_too && rule.matches_pod(pod) && rule.matches_container(container)
        };
        self.rules
            .as_ref()
            .is_none_or(|rules| rules.iter().any(covers))
    }
}

impl CompiledRule {
    fn matches_pod(&self, pod: &PodView<'_>) -> bool {
        let any = |globs: &Option<Globs>, text| globs.as_ref().is_none_or(|g| g.matches(text));
        let annotated = |(key, value): &(String, Option<String>)| match pod.annotations.get(key) {
            Some(found) => value.as_ref().is_none_or(|value| value == found),
            None => false,
        };
        any(&self.namespaces, pod.namespace)
            && any(&self.runtime_handlers, pod.runtime_handler)
            && self
                .pod_labels
                .as_ref()
                .is_none_or(|s| s.matches(pod.labels))
            && self.pod_annotations.iter().all(annotated)
    }

    fn matches_container(&self, container: &ContainerView<'_>) -> bool {
        let named = |globs: &Globs| globs.matches(container.name);
        let has_device = |globs: &Globs| container.cdi_devices.iter().any(|d| globs.matches(d));
        self.containers.as_ref().is_none_or(named)
            && self.cdi_devices.as_ref().is_none_or(has_device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Map = HashMap<String, String>;

    fn map(pairs: &[(&str, &str)]) -> Map {
        let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(owned).collect()
    }

    fn pod<'a>(namespace: &'a str, labels: &'a Map, annotations: &'a Map) -> PodView<'a> {
        PodView {
            namespace,
            name: "web",
            uid: "u1",
            labels,
            annotations,
            runtime_handler: "",
        }
    }

    fn rule(text: &str) -> CompiledScope {
        let rule: ScopeRule = serde_json::from_str(text).unwrap();
        Scope { rules: vec![rule] }.compile().unwrap()
    }

    const BARE: ContainerView<'static> = ContainerView {
        name: "main",
        cdi_devices: &[],
    };

    #[test]
    fn no_rules_cover_everything() {
        let empty = Map::new();
        let scope = Scope::all().compile().unwrap();
        assert!(scope.covers_sandbox(&pod("any", &empty, &empty)));
        assert!(scope.covers_container(&pod("any", &empty, &empty), &BARE));
    }

    #[test]
    fn every_given_field_must_match() {
        let empty = Map::new();
        let scope = rule(
            r#"{"namespaces":["team-*"],"pod_labels":"app=db","pod_annotations":["a","b=1"]}"#,
        );
        let labels = map(&[("app", "db")]);
        let annotations = map(&[("a", "x"), ("b", "1")]);
        assert!(scope.covers_sandbox(&pod("team-x", &labels, &annotations)));
        assert!(scope.covers_container(&pod("team-x", &labels, &annotations), &BARE));
        assert!(!scope.covers_sandbox(&pod("other", &labels, &annotations)));
        assert!(!scope.covers_sandbox(&pod("team-x", &empty, &annotations)));
        assert!(!scope.covers_sandbox(&pod("team-x", &labels, &map(&[("a", ""), ("b", "2")]))));
        assert!(!scope.covers_sandbox(&pod("team-x", &labels, &map(&[("b", "1")]))));
    }

    #[test]
    fn any_rule_is_enough() {
        let empty = Map::new();
        let scope: Scope =
            serde_json::from_str(r#"{"rules":[{"namespaces":["a"]},{"namespaces":["b"]}]}"#)
                .unwrap();
        let scope = scope.compile().unwrap();
        assert!(scope.covers_sandbox(&pod("b", &empty, &empty)));
        assert!(!scope.covers_sandbox(&pod("c", &empty, &empty)));
    }

    #[test]
    fn a_device_scope_covers_only_containers_with_such_a_device() {
        let empty = Map::new();
        let scope = rule(r#"{"cdi_devices":["dra.net/*=*"]}"#);
        let view = pod("x", &empty, &empty);
        let with = |device| ContainerView {
            name: "main",
            cdi_devices: device,
        };
        assert!(scope.covers_container(&view, &with(&["vendor/a=1", "dra.net/nic=eth1"])));
        assert!(!scope.covers_container(&view, &with(&["vendor/a=1"])));
        assert!(!scope.covers_container(&view, &BARE));
        assert!(!scope.covers_sandbox(&view));
    }

    #[test]
    fn container_names_never_cover_a_sandbox() {
        let empty = Map::new();
        let scope = rule(r#"{"containers":["m*"],"namespaces":["x"]}"#);
        assert!(scope.covers_container(&pod("x", &empty, &empty), &BARE));
        assert!(!scope.covers_container(&pod("y", &empty, &empty), &BARE));
        assert!(!scope.covers_sandbox(&pod("x", &empty, &empty)));
    }

    #[test]
    fn operations_narrow_a_rule() {
        let empty = Map::new();
        let view = pod("x", &empty, &empty);
        let sandboxes = rule(r#"{"operations":["sandbox"]}"#);
        assert!(sandboxes.covers_sandbox(&view));
        assert!(!sandboxes.covers_container(&view, &BARE));
        let containers = rule(r#"{"operations":["container"]}"#);
        assert!(!containers.covers_sandbox(&view));
        assert!(containers.covers_container(&view, &BARE));
    }

    #[test]
    fn the_default_runtime_handler_is_the_empty_name() {
        let empty = Map::new();
        let mut view = pod("x", &empty, &empty);
        assert!(rule(r#"{"runtime_handlers":[""]}"#).covers_sandbox(&view));
        assert!(!rule(r#"{"runtime_handlers":["kata*"]}"#).covers_sandbox(&view));
        view.runtime_handler = "kata-qemu";
        assert!(rule(r#"{"runtime_handlers":["kata*"]}"#).covers_sandbox(&view));
        assert!(!rule(r#"{"runtime_handlers":[""]}"#).covers_sandbox(&view));
    }

    #[test]
    fn a_bad_scope_names_the_rule_and_the_field() {
        for (json, names) in [
            (r#"{}"#, "*"),
            (r#"{"namespaces":["[a"]}"#, "namespaces"),
            (r#"{"namespaces":[""]}"#, "namespaces"),
            (r#"{"pod_labels":"a in"}"#, "pod_labels"),
            (r#"{"pod_annotations":["=x"]}"#, "pod_annotations"),
            (r#"{"cdi_devices":["{a"]}"#, "cdi_devices"),
            (
                r#"{"containers":["a"],"operations":["sandbox"]}"#,
                "operations",
            ),
        ] {
            let good = serde_json::from_str(r#"{"namespaces":["x"]}"#).unwrap();
            let bad: ScopeRule = serde_json::from_str(json).unwrap();
            let scope = Scope {
                rules: vec![good, bad],
            };
            let error = scope.compile().unwrap_err().to_string();
            assert!(error.contains(&format!("rules[2].{names}")), "{error}");
        }
    }

    #[test]
    fn a_scope_is_bounded() {
        let many = |n: usize, text: &str| ScopeRule {
            namespaces: vec![text.to_owned(); n],
            ..ScopeRule::default()
        };
        let compile = |rules| Scope { rules }.compile();
        assert!(compile(vec![many(1, "x"); MAX_RULES]).is_ok());
        assert!(compile(vec![many(1, "x"); MAX_RULES + 1]).is_err());
        assert!(compile(vec![many(MAX_ENTRIES + 1, "x")]).is_err());
        assert!(compile(vec![many(1, &"x".repeat(MAX_PATTERN_BYTES + 1))]).is_err());
        assert!(compile(vec![many(60, &"x".repeat(300))]).is_err());
    }

    #[test]
    fn a_scope_file_with_an_unknown_field_is_refused() {
        assert!(serde_json::from_str::<Scope>(r#"{"rules":[{"namespace":["x"]}]}"#).is_err());
        assert!(serde_json::from_str::<Scope>(r#"{"rule":[]}"#).is_err());
    }
}
