//! A lease, its holders and pins, as JSON and YAML show them. Field names are stable
//! (docs: "JSON field names"); they are only ever added.

use nri_lease_proto::lease::types::{self, Lease};
use serde::Serialize;

use super::values::{self, Seconds};

/// One lease.
#[derive(Debug, Serialize)]
pub struct LeaseView {
    pub plugin: String,
    pub state: String,
    pub state_reason: String,
    pub mode: String,
    pub generation: u64,
    pub ttl_seconds: Option<Seconds>,
    pub expires_at: Option<String>,
    pub expires_in_seconds: Option<Seconds>,
    pub registered_at: Option<String>,
    pub renewed_at: Option<String>,
    pub scope: ScopeView,
    pub index: Option<String>,
    pub events_mask: Option<i32>,
    pub holders: Vec<HolderView>,
    pub last_holder: Option<GoneHolderView>,
    pub pins: Vec<PinView>,
}

/// `"all"`, or the rules.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum ScopeView {
    All(&'static str),
    Rules(Vec<RuleView>),
}

#[derive(Debug, Serialize)]
pub struct RuleView {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod_labels: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pod_annotations: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub runtime_handlers: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cdi_devices: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<String>,
}

/// A process that holds the lease. `connected` means: all its connections are bound.
#[derive(Debug, Serialize)]
pub struct HolderView {
    pub pid: u32,
    pub uid: u32,
    pub start_time: u64,
    pub connected: bool,
    pub detail: String,
    pub pod: Option<PodView>,
    pub registered_at: Option<String>,
    pub registered_by_pid: Option<u32>,
    pub connections: Vec<ConnectionView>,
}

#[derive(Debug, Serialize)]
pub struct ConnectionView {
    pub socket: String,
    pub inode: u64,
    pub state: String,
}

#[derive(Debug, Serialize)]
pub struct GoneHolderView {
    pub pid: u32,
    pub gone_at: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct PodView {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

#[derive(Debug, Serialize)]
pub struct PinView {
    pub plugin: String,
    pub pod_uid: String,
    pub expires_at: Option<String>,
    pub expires_in_seconds: Option<Seconds>,
    pub pinned_at: Option<String>,
}

impl From<&Lease> for LeaseView {
    fn from(lease: &Lease) -> Self {
        LeaseView {
            plugin: lease.plugin.clone(),
            state: values::plugin_state(lease.state),
            state_reason: lease.state_reason.clone(),
            mode: values::mode(lease.mode),
            generation: lease.generation,
            ttl_seconds: values::seconds(&lease.ttl),
            expires_at: values::time(&lease.expires_at),
            expires_in_seconds: values::seconds(&lease.expires_in),
            registered_at: values::time(&lease.registered_at),
            renewed_at: values::time(&lease.renewed_at),
            scope: ScopeView::from(lease.scope.as_ref()),
            index: Some(lease.index.clone()).filter(|index| !index.is_empty()),
            events_mask: lease.events.as_ref().map(|events| events.mask),
            holders: lease.holders.iter().map(HolderView::from).collect(),
            last_holder: lease.last_holder.as_ref().map(|gone| GoneHolderView {
                pid: gone.pid,
                gone_at: values::time(&gone.gone_at),
            }),
            pins: lease.pins.iter().map(PinView::from).collect(),
        }
    }
}

impl From<Option<&types::Scope>> for ScopeView {
    fn from(scope: Option<&types::Scope>) -> Self {
        match scope {
            Some(scope) if !scope.rules.is_empty() => {
                ScopeView::Rules(scope.rules.iter().map(RuleView::from).collect())
            }
            _ => ScopeView::All("all"),
        }
    }
}

impl From<&types::ScopeRule> for RuleView {
    fn from(rule: &types::ScopeRule) -> Self {
        RuleView {
            namespaces: rule.namespaces.clone(),
            pod_labels: rule.pod_labels.clone(),
            pod_annotations: rule.pod_annotations.clone(),
            runtime_handlers: rule.runtime_handlers.clone(),
            cdi_devices: rule.cdi_devices.clone(),
            containers: rule.containers.clone(),
            operations: rule
                .operations
                .iter()
                .map(|operation| values::operation(*operation))
                .collect(),
        }
    }
}

impl RuleView {
    /// One line: the fields that are given.
    pub fn line(&self) -> String {
        let mut parts = Vec::new();
        let lists = [
            ("namespaces", &self.namespaces),
            ("pod_annotations", &self.pod_annotations),
            ("runtime_handlers", &self.runtime_handlers),
            ("cdi_devices", &self.cdi_devices),
            ("containers", &self.containers),
            ("operations", &self.operations),
        ];
        if !self.pod_labels.is_empty() {
            parts.push(format!("pod_labels=[{}]", self.pod_labels));
        }
        for (name, list) in lists.iter().filter(|(_, list)| !list.is_empty()) {
            parts.push(format!("{name}=[{}]", list.join(",")));
        }
        parts.join(" ")
    }
}

impl ScopeView {
    /// For a table cell: `all`, the rule when there is one that is short, or how many there are.
    pub fn short(&self) -> String {
        match self {
            ScopeView::All(all) => all.to_string(),
            ScopeView::Rules(rules) => match rules.as_slice() {
                [rule] if rule.line().chars().count() <= 48 => rule.line(),
                [_] => "1 rule".to_string(),
                rules => format!("{} rules", rules.len()),
            },
        }
    }
}

impl From<&types::Holder> for HolderView {
    fn from(holder: &types::Holder) -> Self {
        let connection = |connection: &types::Connection| ConnectionView {
            socket: connection.socket.clone(),
            inode: connection.inode,
            state: connection.state.clone(),
        };
        HolderView {
            pid: holder.pid,
            uid: holder.uid,
            start_time: holder.start_time,
            connected: holder.connected,
            detail: holder.detail.clone(),
            pod: holder.pod.as_ref().map(PodView::from),
            registered_at: values::time(&holder.registered_at),
            registered_by_pid: Some(holder.registered_by_pid).filter(|pid| *pid != 0),
            connections: holder.connections.iter().map(connection).collect(),
        }
    }
}

impl From<&types::Pod> for PodView {
    fn from(pod: &types::Pod) -> Self {
        PodView {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        }
    }
}

impl PodView {
    /// `NAMESPACE/NAME`, or the uid when there is no name.
    pub fn label(&self) -> String {
        match self.name.is_empty() {
            true => self.uid.clone(),
            false => format!("{}/{}", self.namespace, self.name),
        }
    }
}

impl From<&types::Pin> for PinView {
    fn from(pin: &types::Pin) -> Self {
        PinView {
            plugin: pin.plugin.clone(),
            pod_uid: pin.pod_uid.clone(),
            expires_at: values::time(&pin.expires_at),
            expires_in_seconds: values::seconds(&pin.expires_in),
            pinned_at: values::time(&pin.pinned_at),
        }
    }
}
