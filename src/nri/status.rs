//! What is known of each runtime, for `status` and for decisions: written by its session, read by
//! everyone without waiting.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;

use super::events::{Generation, RuntimeIdentity};
use crate::presence::RuntimeId;

/// A runtime of the configuration and its current session.
#[derive(Debug)]
pub struct RuntimeStatus {
    /// The daemon's number for it.
    pub id: RuntimeId,
    /// Its NRI socket.
    pub socket: PathBuf,
    session: ArcSwap<Session>,
}

/// One moment of a session.
#[derive(Clone, Debug)]
pub enum Session {
    /// Not synchronised, and why.
    Disconnected {
        detail: String,
    },
    Connected(Connected),
}

/// A synchronised session.
#[derive(Clone, Debug)]
pub struct Connected {
    pub identity: RuntimeIdentity,
    pub generation: Generation,
    pub since: SystemTime,
    /// After which the runtime gives up on an answer and drops us.
    pub request_timeout: Duration,
    pub registration_timeout: Duration,
    /// Pods at the last synchronisation.
    pub pods: usize,
}

impl RuntimeStatus {
    pub fn new(id: RuntimeId, socket: &Path) -> Self {
        Self {
            id,
            socket: socket.to_owned(),
            session: ArcSwap::from_pointee(Session::Disconnected {
                detail: "not tried yet".to_owned(),
            }),
        }
    }

    /// The session now.
    pub fn session(&self) -> Arc<Session> {
        self.session.load_full()
    }

    /// The session's facts when it is synchronised.
    pub fn connected(&self) -> Option<Connected> {
        match &**self.session.load() {
            Session::Connected(connected) => Some(connected.clone()),
            Session::Disconnected { .. } => None,
        }
    }

    pub(crate) fn set_connected(&self, connected: Connected) {
        self.session.store(Arc::new(Session::Connected(connected)));
    }

    pub(crate) fn set_disconnected(&self, detail: String) {
        self.session
            .store(Arc::new(Session::Disconnected { detail }));
    }
}
