//! What the daemon starts with: the store opened, the state rebuilt from it, the bindings of the
//! daemon before it; and how bindings get there.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nri_lease_state::record::RecordKey;
use nri_lease_state::rules::{Limits, LoadProblem, Recovery, State};
use nri_lease_state::store::{self, Opened, Source, Store, Tree, Write};
use nri_lease_state::time::Boottime;
use tracing::{error, warn};

use crate::clock::SystemClock;
use crate::daemon::Daemon;
use crate::engine;
use crate::presence::BindingRecord;

/// After the leases were lost, new pods wait this long for plugins to register again.
const HOLD_AFTER_LOSS: Duration = Duration::from_secs(30);
/// How often bindings are looked at and, when they have changed, stored.
const STORE_BINDINGS_EVERY: Duration = Duration::from_secs(1);
const BINDINGS_KEY: &str = "bindings";

/// Opens the store and tells of what was wrong with it.
pub async fn open_store(state_dir: &Path) -> anyhow::Result<Opened> {
    let dir = state_dir.to_owned();
    let opened = tokio::task::spawn_blocking(move || Store::open(&dir, store::Options::default()))
        .await
        .context("opening the lease store ended unexpectedly")??;
    for problem in &opened.problems {
        error!(problem, "the lease store was damaged");
    }
    Ok(opened)
}

/// What was stored, as it counts now.
pub struct LoadedState {
    pub store: Store,
    pub state: State,
    pub bindings: Vec<BindingRecord>,
    pub hold_until: Option<Boottime>,
    pub source: &'static str,
}

/// Rebuilds the state; what another boot has made of it is durable before it counts.
pub async fn load_state(
    opened: Opened,
    clock: &SystemClock,
    limits: &Limits,
) -> anyhow::Result<LoadedState> {
    let (source, recovery) = match opened.source {
        Source::Database => ("database", Recovery::Database),
        Source::Mirror => ("mirror", Recovery::Mirror),
        Source::Empty { .. } => ("empty", Recovery::Database),
    };
    let mut bindings = Vec::new();
    let mut records = Vec::new();
    for (tree, key, value) in opened.records {
        if tree == Tree::Meta && key == BINDINGS_KEY {
            // Only a hint: what cannot be read is fenced again.
            bindings = serde_json::from_slice(&value).unwrap_or_default();
        } else {
            records.push((RecordKey { tree, key }, value));
        }
    }
    let now = clock.now();
    let loaded = State::load(records, recovery, &now, limits);
    for issue in &loaded.issues {
        error!(key = %issue.key, problem = %issue.problem, "a stored record cannot be used");
    }
    if !loaded.changes.is_empty()
        && let Err(error) = opened.store.commit(engine::writes(&loaded.changes)).await
    {
        // The grace after a reboot is not used up twice: it counts only when it is recorded.
        error!(%error, "what this boot has made of the leases is not durable yet");
    }
    // In leases.json a record that cannot be read is a lease that nobody knows of any more.
    let lost_some = recovery == Recovery::Mirror
        && loaded.issues.iter().any(|issue| {
            issue.key.tree == Tree::Leases && matches!(issue.problem, LoadProblem::Unreadable(_))
        });
    let hold_until = match opened.source {
        Source::Mirror if lost_some => {
            error!(
                "leases are lost: new pods wait {} s for plugins to register again",
                HOLD_AFTER_LOSS.as_secs()
            );
            Some(now.boottime.plus(HOLD_AFTER_LOSS))
        }
        Source::Empty { lost: true } => {
            error!(
                "the lease store is lost: new pods wait {} s for plugins to register again",
                HOLD_AFTER_LOSS.as_secs()
            );
            Some(now.boottime.plus(HOLD_AFTER_LOSS))
        }
        _ => None,
    };
    Ok(LoadedState {
        store: opened.store,
        state: loaded.state,
        bindings,
        hold_until,
        source,
    })
}

/// Keeps the bindings in the store, so that a restarted daemon knows at once who is connected.
pub async fn store_bindings(daemon: Arc<Daemon>) {
    let mut stored = Vec::new();
    let mut events = daemon.tracker.events();
    loop {
        // At once after a change, and now and then in case one was missed.
        let _ = tokio::time::timeout(STORE_BINDINGS_EVERY, events.recv()).await;
        let bindings = daemon.tracker.export().await;
        if bindings == stored {
            continue;
        }
        match serde_json::to_vec(&bindings) {
            Ok(value) => daemon.store.write_soon(vec![Write {
                tree: Tree::Meta,
                key: BINDINGS_KEY.to_owned(),
                value: Some(value),
            }]),
            Err(error) => warn!(%error, "bindings cannot be encoded"),
        }
        stored = bindings;
    }
}
