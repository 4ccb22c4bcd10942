//! `explain`: would this pod be admitted now, and why, rule by rule.

use std::path::{Path, PathBuf};

use nri_lease_proto::lease::admin::{ContainerDescription, ExplainRequest, PodDescription};
use nri_lease_proto::protobuf::MessageField;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};

use super::Session;
use super::error::{CliError, Complaint};
use super::input;
use super::render::{Output, escape};
use super::view::decision::DecisionView;

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["pod", "file"]))]
pub struct Args {
    /// A pod that the runtime knows.
    #[arg(long, value_name = "UID|NAMESPACE/NAME", value_parser = pod)]
    pod: Option<PodRef>,
    /// A pod in JSON or YAML, as kubectl get pod -o json prints it; - for stdin.
    #[arg(long, value_name = "POD.json")]
    file: Option<PathBuf>,
    /// Only this container.
    #[arg(long, value_name = "NAME")]
    container: Option<String>,
}

/// How `--pod` names a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum PodRef {
    Uid(String),
    Name { namespace: String, name: String },
}

fn pod(text: &str) -> Result<PodRef, String> {
    match text.split_once('/') {
        None => super::arguments::pod_uid(text).map(PodRef::Uid),
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(PodRef::Name {
            namespace: namespace.to_string(),
            name: name.to_string(),
        }),
        Some(_) => Err("write it as UID or NAMESPACE/NAME".to_string()),
    }
}

#[derive(Serialize)]
struct Explained {
    decisions: Vec<DecisionView>,
}

pub async fn run(args: Args, session: &Session) -> Result<(), CliError> {
    let mut request = ExplainRequest {
        container: args.container.unwrap_or_default(),
        ..Default::default()
    };
    match (args.pod, &args.file) {
        (Some(PodRef::Uid(uid)), _) => request.pod_uid = uid,
        (Some(PodRef::Name { namespace, name }), _) => {
            request.pod_namespace = namespace;
            request.pod_name = name;
        }
        (None, Some(file)) => request.described = MessageField::some(described(file)?),
        (None, None) => unreachable!("clap requires one of the two"),
    }
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let answer = admin.explain(daemon.limit(), &request);
    let answer = daemon.call("explain the pod", answer).await?;
    let explained = Explained {
        decisions: answer.decisions.iter().map(DecisionView::from).collect(),
    };
    session.out.show(
        &explained,
        |out| text(out, &explained.decisions),
        || {
            explained
                .decisions
                .iter()
                .map(|d| d.verdict.clone())
                .collect()
        },
    )
}

fn text(out: &Output, decisions: &[DecisionView]) -> String {
    if decisions.is_empty() {
        return "Nothing to decide: no sandbox and no container matched.\n".to_string();
    }
    let mut table = out.table(&["VERDICT", "REQUEST", "PLUGIN"]);
    for decision in decisions {
        table.row([
            decision.verdict.clone(),
            decision.subject(),
            decision.plugin.clone().unwrap_or_default(),
        ]);
    }
    let mut text = table.text();
    for decision in decisions {
        text.push_str(&format!(
            "\n{}: {}\n",
            escape(&decision.subject()),
            escape(&decision.reason)
        ));
        for (number, step) in decision.steps.iter().enumerate() {
            text.push_str(&format!("  {}. {}\n", number + 1, escape(step)));
        }
    }
    text
}

/// What `kubectl get pod -o json` prints, as far as a decision depends on it. Other fields are
/// Kubernetes' and skipped.
#[derive(Debug, Deserialize)]
struct KubernetesPod {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
struct Metadata {
    namespace: String,
    name: String,
    uid: String,
    labels: HashMap<String, String>,
    annotations: HashMap<String, String>,
}

impl Default for Metadata {
    fn default() -> Self {
        Metadata {
            namespace: "default".to_string(),
            name: String::new(),
            uid: String::new(),
            labels: HashMap::new(),
            annotations: HashMap::new(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    runtime_class_name: String,
    init_containers: Vec<Named>,
    containers: Vec<Named>,
}

#[derive(Debug, Deserialize)]
struct Named {
    name: String,
}

fn described(path: &Path) -> Result<PodDescription, CliError> {
    let text = input::read("pod", path)?;
    // JSON is read as YAML, which it is a part of.
    let pod: KubernetesPod = serde_yaml_ng::from_str(&text).map_err(|error| {
        CliError::Usage(Complaint::new(
            format!("read the pod {}", path.display()),
            error.to_string(),
            "Make it with: kubectl get pod NAME -o json",
        ))
    })?;
    let devices = cdi_devices(&pod.metadata.annotations);
    let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let containers = containers.map(|container| ContainerDescription {
        name: container.name.clone(),
        cdi_devices: devices.clone(),
        ..Default::default()
    });
    Ok(PodDescription {
        containers: containers.collect(),
        namespace: pod.metadata.namespace,
        name: pod.metadata.name,
        uid: pod.metadata.uid,
        labels: pod.metadata.labels,
        annotations: pod.metadata.annotations,
        // The handler has the name of the RuntimeClass unless the class says otherwise.
        runtime_handler: pod.spec.runtime_class_name,
        ..Default::default()
    })
}

/// Devices that the pod asks for by annotation (`cdi.k8s.io/*`, a comma-separated list: CDI
/// specification, "annotations"). Those that a DRA driver adds later are not in the pod.
fn cdi_devices(annotations: &HashMap<String, String>) -> Vec<String> {
    let asked = annotations
        .iter()
        .filter(|(key, _)| key.starts_with("cdi.k8s.io/"))
        .flat_map(|(_, value)| value.split(','));
    let devices: BTreeSet<String> = asked.map(|device| device.trim().to_string()).collect();
    devices
        .into_iter()
        .filter(|device| !device.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_named_by_uid_or_by_namespace_and_name() {
        assert_eq!(pod("u-1"), Ok(PodRef::Uid("u-1".to_string())));
        assert!(matches!(pod("a/b"), Ok(PodRef::Name { .. })));
        assert!(pod("/b").is_err() && pod("a/").is_err() && pod("").is_err());
    }
}
