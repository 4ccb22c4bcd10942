//! Pods that host holders, and how their successors are recognised.
//!
//! After a reboot or in a rollout the plugin's new pod must start before the plugin can be there.
//! It is the same provider when the namespace is the same and either the name without what a
//! controller generated, or the labels without those that a new revision changes.

use std::collections::{BTreeMap, HashMap};

use crate::process::PodIdentity;
use crate::record::{LeaseRecord, ProviderPod};

/// Labels that differ between revisions of one workload, or between its pods.
pub const REVISION_LABELS: [&str; 7] = [
    "pod-template-hash",
    "controller-revision-hash",
    "pod-template-generation",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "helm.sh/chart",
    "app.kubernetes.io/version",
];

const TEMPLATE_HASH: &str = "pod-template-hash";
const STATEFUL_NAME: &str = "statefulset.kubernetes.io/pod-name";

/// What apimachinery's `rand.String` draws from: no vowels, nothing that looks like another.
const GENERATED: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Length of what `generateName` appends, and of the longest pod name it makes.
const SUFFIX_BYTES: usize = 5;
const LONGEST_GENERATED_NAME: usize = 63;

/// Labels in either of the maps they come in.
trait Labels {
    fn value(&self, key: &str) -> Option<&str>;
}

impl Labels for BTreeMap<String, String> {
    fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl Labels for HashMap<String, String> {
    fn value(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl ProviderPod {
    /// Whether a pod is one of this provider.
    pub fn is_same(&self, namespace: &str, name: &str, labels: &HashMap<String, String>) -> bool {
        self.namespace == namespace
            && (stem(&self.name, &self.labels) == stem(name, labels)
                || same_labels(&self.labels, labels))
    }

    fn is_same_as(&self, other: &ProviderPod) -> bool {
        self.namespace == other.namespace
            && stem(&self.name, &self.labels) == stem(&other.name, &other.labels)
    }
}

/// The name without what its controller appended: `-NUMBER` (StatefulSet), `-xxxxx` (DaemonSet,
/// Job), `-HASH-xxxxx` (Deployment).
fn stem<'a>(name: &'a str, labels: &impl Labels) -> &'a str {
    if labels.value(STATEFUL_NAME) == Some(name) {
        return match name.rsplit_once('-') {
            Some((stem, ordinal)) if ordinal.bytes().all(|b| b.is_ascii_digit()) => stem,
            _ => name,
        };
    }
    let Some(stem) = without_generated_suffix(name) else {
        return name;
    };
    let hash = labels.value(TEMPLATE_HASH).filter(|hash| !hash.is_empty());
    hash.and_then(|hash| stem.strip_suffix(hash)?.strip_suffix('-'))
        .unwrap_or(stem)
}

fn without_generated_suffix(name: &str) -> Option<&str> {
    let at = name.len().checked_sub(SUFFIX_BYTES)?;
    let (stem, suffix) = (name.get(..at)?, name.get(at..)?);
    if !suffix.bytes().all(|b| GENERATED.contains(&b)) {
        return None;
    }
    match stem.strip_suffix('-') {
        Some(stem) if !stem.is_empty() => Some(stem),
        // The generator cuts a long base, and its dash with it.
        _ if name.len() == LONGEST_GENERATED_NAME => Some(stem),
        _ => None,
    }
}

/// Without labels nothing is the same: two pods that have none have nothing in common.
fn same_labels(known: &BTreeMap<String, String>, labels: &HashMap<String, String>) -> bool {
    let lasting = |key: &str| !REVISION_LABELS.contains(&key);
    let lasting_known = known.iter().filter(|(key, _)| lasting(key));
    let mut common = 0;
    for (key, value) in lasting_known {
        if labels.get(key) != Some(value) {
            return false;
        }
        common += 1;
    }
    common > 0 && labels.keys().filter(|key| lasting(key)).count() == common
}

impl LeaseRecord {
    /// Remembers a holder's pod, once it is known by name, in place of the one it succeeds;
    /// forgets the oldest beyond `at_most`.
    pub(crate) fn learn_provider(&mut self, pod: &PodIdentity, at_most: usize) {
        let (Some(namespace), Some(name)) = (&pod.namespace, &pod.name) else {
            return;
        };
        let new = ProviderPod {
            namespace: namespace.clone(),
            name: name.clone(),
            labels: pod.labels.clone(),
        };
        if self.providers.contains(&new) {
            return;
        }
        self.providers.retain(|known| !known.is_same_as(&new));
        self.providers.push(new);
        let excess = self.providers.len().saturating_sub(at_most.max(1));
        self.providers.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(name: &str, labels: &[(&str, &str)]) -> ProviderPod {
        ProviderPod {
            namespace: "kube-system".to_owned(),
            name: name.to_owned(),
            labels: map(labels),
        }
    }

    fn map<M: FromIterator<(String, String)>>(pairs: &[(&str, &str)]) -> M {
        let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(owned).collect()
    }

    fn same(known: &ProviderPod, name: &str, labels: &[(&str, &str)]) -> bool {
        known.is_same("kube-system", name, &map(labels))
    }

    #[test]
    fn a_daemonsets_next_pod_is_the_same_provider_by_name() {
        let known = provider("dranet-x7k2p", &[]);
        assert!(same(&known, "dranet-b9wzq", &[("other", "labels")]));
        assert!(!same(&known, "dranet-probe", &[]));
        assert!(!same(&known, "cpu-b9wzq", &[]));
        assert!(!known.is_same("default", "dranet-b9wzq", &HashMap::new()));
    }

    #[test]
    fn a_deployments_next_revision_is_the_same_provider() {
        let known = provider(
            "cpu-6d4cf56db6-x7k2p",
            &[("pod-template-hash", "6d4cf56db6")],
        );
        let next = [("pod-template-hash", "7f9")];
        assert!(same(&known, "cpu-7f9-b9wzq", &next));
        assert!(!same(&known, "cpu-agent-7f9-b9wzq", &next));
    }

    #[test]
    fn a_statefulsets_pods_are_the_same_provider() {
        let known = provider("db-0", &[(STATEFUL_NAME, "db-0")]);
        assert!(same(&known, "db-12", &[(STATEFUL_NAME, "db-12")]));
        assert!(!same(&known, "db-12", &[]));
    }

    #[test]
    fn a_long_generated_name_has_lost_its_dash() {
        let base = "n".repeat(58);
        let known = provider(&format!("{base}x7k2p"), &[]);
        assert!(same(&known, &format!("{base}b9wzq"), &[]));
        let short = "n".repeat(57);
        let known = provider(&format!("{short}x7k2p"), &[]);
        assert!(!same(&known, &format!("{short}b9wzq"), &[]));
    }

    #[test]
    fn labels_recognise_a_renamed_workload_after_a_chart_upgrade() {
        let known = provider(
            "old-name",
            &[
                ("app", "dranet"),
                ("helm.sh/chart", "dranet-1"),
                ("controller-revision-hash", "aa"),
                ("pod-template-generation", "1"),
                ("app.kubernetes.io/version", "1"),
            ],
        );
        let next = [
            ("app", "dranet"),
            ("helm.sh/chart", "dranet-2"),
            ("controller-revision-hash", "bb"),
            ("app.kubernetes.io/version", "2"),
        ];
        assert!(same(&known, "new-name", &next));
        assert!(!same(&known, "new-name", &[("app", "other")]));
        assert!(!same(
            &known,
            "new-name",
            &[("app", "dranet"), ("more", "1")]
        ));
        assert!(!same(&known, "new-name", &[]));
    }

    #[test]
    fn pods_without_lasting_labels_have_nothing_in_common() {
        let revision = [("pod-template-hash", "x")];
        assert!(!same(&provider("a", &[]), "b", &[]));
        assert!(!same(&provider("a", &revision), "b", &revision));
    }
}
