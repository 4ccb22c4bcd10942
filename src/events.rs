//! What happens, for those who watch: a broadcast that never holds up who speaks.

use std::time::SystemTime;

use nri_lease_proto::lease::types::EventKind;
use nri_lease_state::{PluginName, ProcessKey, rules};
use tokio::sync::broadcast;

use crate::enforce::record::PodRef;

/// Events a slow reader may fall behind before it loses the oldest.
const BACKLOG: usize = 1024;

/// One event, as it is shown.
#[derive(Clone, Debug)]
pub struct Event {
    pub at: SystemTime,
    pub kind: EventKind,
    pub plugin: Option<String>,
    pub pid: Option<u32>,
    pub pod: Option<PodRef>,
    pub container: Option<String>,
    /// One line.
    pub message: String,
}

impl Event {
    /// An event that is about nothing but its message.
    pub fn new(kind: EventKind, message: String) -> Self {
        Self {
            at: SystemTime::now(),
            kind,
            plugin: None,
            pid: None,
            pod: None,
            container: None,
            message,
        }
    }

    /// A holder of `plugin` is bound to a runtime.
    pub fn holder_connected(plugin: &PluginName, holder: ProcessKey) -> Self {
        let what = "is connected to the runtime and synchronised";
        Self::of_holder(EventKind::EVENT_KIND_CONNECTED, plugin, holder, what)
    }

    /// A holder of `plugin` has lost its connection.
    pub fn holder_disconnected(plugin: &PluginName, holder: ProcessKey) -> Self {
        let what = "is not connected to the runtime any more";
        Self::of_holder(EventKind::EVENT_KIND_DISCONNECTED, plugin, holder, what)
    }

    fn of_holder(kind: EventKind, plugin: &PluginName, holder: ProcessKey, what: &str) -> Self {
        Self {
            plugin: Some(plugin.to_string()),
            pid: Some(holder.pid),
            ..Self::new(kind, format!("holder pid {} {what}", holder.pid))
        }
    }
}

impl From<rules::Event> for Event {
    fn from(event: rules::Event) -> Self {
        let kind = match event.kind {
            rules::EventKind::Registered => EventKind::EVENT_KIND_REGISTERED,
            rules::EventKind::Renewed => EventKind::EVENT_KIND_RENEWED,
            rules::EventKind::HolderLost => EventKind::EVENT_KIND_HOLDER_LOST,
            rules::EventKind::Released => EventKind::EVENT_KIND_RELEASED,
            rules::EventKind::Expired => EventKind::EVENT_KIND_EXPIRED,
            rules::EventKind::Revoked => EventKind::EVENT_KIND_REVOKED,
            rules::EventKind::Pinned => EventKind::EVENT_KIND_PINNED,
            rules::EventKind::Unpinned => EventKind::EVENT_KIND_UNPINNED,
            rules::EventKind::Banned => EventKind::EVENT_KIND_BANNED,
            rules::EventKind::Unbanned => EventKind::EVENT_KIND_UNBANNED,
            rules::EventKind::Paused => EventKind::EVENT_KIND_PAUSED,
            rules::EventKind::Resumed => EventKind::EVENT_KIND_RESUMED,
        };
        Self {
            plugin: event.plugin.map(String::from),
            pid: event.pid,
            pod: event.pod_uid.map(|uid| PodRef {
                uid: uid.to_string(),
                ..PodRef::default()
            }),
            ..Self::new(kind, event.message)
        }
    }
}

/// Where events are told and watched.
#[derive(Clone, Debug)]
pub struct Events {
    sender: broadcast::Sender<Event>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            sender: broadcast::channel(BACKLOG).0,
        }
    }
}

impl Events {
    /// Logs the event and passes it on to whoever watches.
    pub fn tell(&self, event: Event) {
        let plugin = event.plugin.as_deref().unwrap_or_default();
        match event.kind {
            EventKind::EVENT_KIND_RENEWED => {
                tracing::debug!(kind = ?event.kind, plugin, "{}", event.message);
            }
            EventKind::EVENT_KIND_REJECTED
            | EventKind::EVENT_KIND_WOULD_REJECT
            | EventKind::EVENT_KIND_HOLDER_LOST
            | EventKind::EVENT_KIND_DISCONNECTED
            | EventKind::EVENT_KIND_EXPIRED => {
                tracing::warn!(kind = ?event.kind, plugin, "{}", event.message);
            }
            _ => tracing::info!(kind = ?event.kind, plugin, "{}", event.message),
        }
        // Nobody watching is no error.
        let _ = self.sender.send(event);
    }

    /// Events from now on.
    pub fn watch(&self) -> broadcast::Receiver<Event> {
        self.sender.subscribe()
    }
}
