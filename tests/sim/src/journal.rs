//! What the simulated runtime did, in order, for tests to assert on and to wait for.

use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The journal keeps this many entries and drops the oldest half when it is full.
const MAX_ENTRIES: usize = 1 << 16;

/// One thing that happened.
#[derive(Clone, Debug)]
pub struct Entry {
    pub at: Instant,
    /// `INDEX-NAME`; empty before the plugin has registered.
    pub plugin: String,
    pub what: What,
}

/// What happened to a plugin or to a call to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// The connection was accepted; the peer's pid as the kernel says.
    Accepted {
        pid: i32,
    },
    /// The connection was given up before it was in the list, and why.
    NotStarted {
        reason: String,
    },
    Registered,
    Configured {
        events: i32,
    },
    /// It has to wait for requests in progress before it is synchronised, and later ones for it.
    WaitsForRequests,
    /// After so many messages.
    Synchronized {
        messages: usize,
    },
    /// In the list: called from now on.
    Listed,
    /// The call was answered; the id is that of the pod, or of the container if there is one.
    Called {
        rpc: &'static str,
        id: String,
    },
    /// The call was answered with an error, or the validator said no.
    Refused {
        rpc: &'static str,
        id: String,
        message: String,
    },
    /// The call was late or the connection broke: the plugin was closed and skipped.
    Skipped {
        rpc: &'static str,
        id: String,
        reason: String,
    },
    /// It called UpdateContainers.
    AskedForUpdates,
    /// The connection is closed, in the kernel too.
    Closed,
}

#[derive(Debug)]
pub(crate) struct Journal {
    entries: Mutex<Vec<Entry>>,
    changed: watch::Sender<()>,
}

impl Journal {
    pub fn new() -> Self {
        Journal {
            entries: Mutex::new(Vec::new()),
            changed: watch::Sender::new(()),
        }
    }

    pub fn note(&self, plugin: &str, what: What) {
        tracing::debug!(plugin, ?what, "simulated runtime");
        {
            let mut entries = self.entries.lock().expect("no holder of this lock panics");
            if entries.len() >= MAX_ENTRIES {
                entries.drain(..MAX_ENTRIES / 2);
            }
            entries.push(Entry {
                at: Instant::now(),
                plugin: plugin.into(),
                what,
            });
        }
        self.changed.send_replace(());
    }

    /// The oldest entry that is wanted.
    pub fn find(&self, wanted: impl Fn(&Entry) -> bool) -> Option<Entry> {
        let entries = self.entries.lock().expect("no holder of this lock panics");
        entries.iter().find(|entry| wanted(entry)).cloned()
    }

    pub fn entries(&self) -> Vec<Entry> {
        self.entries
            .lock()
            .expect("no holder of this lock panics")
            .clone()
    }

    /// Waits until `look` finds something; looks again after every entry.
    pub async fn wait_for<T>(
        &self,
        limit: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let mut changed = self.changed.subscribe();
        let wait = async {
            loop {
                if let Some(found) = look() {
                    return Some(found);
                }
                // The sender lives as long as self.
                changed.changed().await.ok()?;
            }
        };
        tokio::time::timeout(limit, wait).await.ok().flatten()
    }
}
