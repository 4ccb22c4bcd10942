//! The tracker's thread.
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{broadcast, oneshot};

use super::proc::ProcessKey;
use super::tracker::{BindingRecord, Event, HolderSpec, OwnFence, OwnSocket, RuntimeId, Settled};
use super::view::View;

#[allow(dead_code)]
pub(super) enum Command {
    RuntimeAdded {
        runtime: RuntimeId,
        socket_path: PathBuf,
    },
    BeforeOwnConnect {
        runtime: RuntimeId,
        reply: oneshot::Sender<OwnFence>,
    },
    OwnSynchronized {
        runtime: RuntimeId,
        fence: OwnFence,
        own: OwnSocket,
    },
    RuntimeLost {
        runtime: RuntimeId,
    },
    SetHolders {
        holders: Vec<HolderSpec>,
    },
    Settle {
        process: ProcessKey,
        deadline: Duration,
        reply: oneshot::Sender<Settled>,
    },
    Rescan {
        process: ProcessKey,
        reply: oneshot::Sender<()>,
    },
    ForgetBroken {
        process: ProcessKey,
        runtime: RuntimeId,
    },
    Export {
        reply: oneshot::Sender<Vec<BindingRecord>>,
    },
    Import {
        records: Vec<BindingRecord>,
    },
}

#[derive(Clone)]
pub(super) struct Mailbox {
    sender: mpsc::Sender<Command>,
}

impl Mailbox {
    pub(super) fn send(&self, command: Command) {
        let _ = self.sender.send(command);
    }
}

pub(super) struct Shared {
    pub evidence: Result<(), String>,
    pub view: Arc<ArcSwap<View>>,
    pub events: broadcast::Sender<Event>,
    pub fences_opened: AtomicU64,
}

pub(super) fn start() -> io::Result<(Mailbox, Arc<Shared>)> {
    let (sender, _receiver) = mpsc::channel();
    Ok((
        Mailbox { sender },
        Arc::new(Shared {
            evidence: Ok(()),
            view: Arc::default(),
            events: broadcast::channel(1024).0,
            fences_opened: AtomicU64::new(0),
        }),
    ))
}

pub(super) fn find_connection_owner(_shared: &Shared, _pid: u32) -> Option<ProcessKey> {
    None
}
