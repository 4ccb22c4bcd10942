//! What a simulated plugin has seen, for tests to look at and processes to print.

use crate::runtime::lock;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::watch;

/// Each list of a record keeps this many entries, the newest.
const MAX_SEEN: usize = 1 << 14;

/// A pod or container in a hook that the plugin has processed: it is entered before the answer, and
/// not at all when the plugin hangs, exits or disconnects instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// For example `CreateContainer`, whether it came as that or as StateChange.
    pub rpc: String,
    /// It came as StateChange.
    pub state_change: bool,
    pub namespace: String,
    pub pod: String,
    pub pod_id: String,
    /// Empty for pod events.
    pub container: String,
    pub container_id: String,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.rpc, self.namespace, self.pod)?;
        if !self.container.is_empty() {
            write!(f, " {}", self.container)?;
        }
        Ok(())
    }
}

/// One validation request, as the plugin saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validated {
    pub container_id: String,
    /// Name and index of each plugin in the runtime's list.
    pub plugins: Vec<(String, String)>,
    /// Devices in the adjustment.
    pub cdi_devices: Vec<String>,
}

/// What a plugin has seen on its connection.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// From Configure: name, version, NRI version of the runtime.
    pub runtime: (String, String, String),
    /// From Configure, in ms: registration and request timeout.
    pub timeouts_ms: (i64, i64),
    /// Complete synchronisations.
    pub synchronized: usize,
    /// Messages of all synchronisations.
    pub synchronize_messages: usize,
    pub synchronized_pods: usize,
    pub synchronized_containers: usize,
    pub seen: VecDeque<Seen>,
    pub validated: VecDeque<Validated>,
}

impl Record {
    /// It has processed this RPC for this pod or container.
    pub fn has(&self, rpc: &str, id: &str) -> bool {
        self.seen
            .iter()
            .any(|seen| seen.rpc == rpc && (seen.pod_id == id || seen.container_id == id))
    }

    /// Names of the RPCs it has processed, in order.
    pub fn rpcs(&self) -> Vec<&str> {
        self.seen.iter().map(|seen| seen.rpc.as_str()).collect()
    }
}

/// Where a plugin's service writes its record.
#[derive(Debug)]
pub(crate) struct Recorder {
    record: Mutex<Record>,
    changed: watch::Sender<()>,
    /// Also tells each line to someone, for processes.
    tell: Mutex<Option<fn(&str)>>,
}

impl Default for Recorder {
    fn default() -> Self {
        Recorder {
            record: Mutex::default(),
            changed: watch::Sender::new(()),
            tell: Mutex::default(),
        }
    }
}

impl Recorder {
    pub fn update(&self, change: impl FnOnce(&mut Record)) {
        change(&mut lock(&self.record));
        self.changed.send_replace(());
    }

    pub fn seen(&self, seen: Seen) {
        self.say(&seen.to_string());
        self.update(|record| push(&mut record.seen, seen));
    }

    pub fn validated(&self, validated: Validated) {
        self.update(|record| push(&mut record.validated, validated));
    }

    /// Says every line from now on.
    pub fn tell(&self, to: fn(&str)) {
        *lock(&self.tell) = Some(to);
    }

    pub fn say(&self, line: &str) {
        if let Some(tell) = *lock(&self.tell) {
            tell(line);
        }
    }

    pub fn copy(&self) -> Record {
        lock(&self.record).clone()
    }

    pub async fn wait_until(&self, limit: Duration, wanted: impl Fn(&Record) -> bool) -> bool {
        let mut changed = self.changed.subscribe();
        let wait = async {
            while !wanted(&lock(&self.record)) {
                if changed.changed().await.is_err() {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(limit, wait).await.unwrap_or(false)
    }
}

fn push<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() == MAX_SEEN {
        list.pop_front();
    }
    list.push_back(item);
}
