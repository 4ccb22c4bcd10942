//! Faults that the simulated runtime commits on demand, and clients that misbehave.
//!
//! What a *plugin* does wrong (a hook that never answers, an exit in a hook) is in
//! [`crate::plugin::Options`].

use crate::mux::{frame, header};
use crate::peer::Peer;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;

/// A fault of the runtime towards one plugin, named by its base name. Those that concern
/// connecting take effect the next time a plugin of that name connects, once; the others at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The next Synchronize comes in at least so many messages.
    SplitSynchronize { plugin: String, messages: usize },
    /// Nothing happens for so long between Configure and Synchronize.
    DelayBeforeSynchronize { plugin: String, delay: Duration },
    /// Nothing happens for so long between Synchronize and the entry in the list: requests pass
    /// the plugin by, without its knowing (with [`crate::SyncBlock::HooksOnly`]).
    DelayBeforeListEntry { plugin: String, delay: Duration },
    /// Configure is answered, and the connection closed, as for an event bit that is not known.
    RefuseMask { plugin: String },
    /// The connection is closed now.
    CloseConnection { plugin: String },
    /// A frame that is no ttrpc message, on connection 1.
    GarbageFrame { plugin: String },
    /// The first bytes of a frame's header, then nothing more; the connection stays open.
    HalfFrame { plugin: String },
    /// A header that announces a frame of almost 4 GiB.
    OversizedFrame { plugin: String },
    /// A header, half of its payload, then the end.
    EofInFrame { plugin: String },
    /// A call of a method that no NRI version has; the answer is discarded.
    UnknownRpc { plugin: String },
}

impl Fault {
    pub(crate) fn plugin(&self) -> &str {
        match self {
            Fault::SplitSynchronize { plugin, .. }
            | Fault::DelayBeforeSynchronize { plugin, .. }
            | Fault::DelayBeforeListEntry { plugin, .. }
            | Fault::RefuseMask { plugin }
            | Fault::CloseConnection { plugin }
            | Fault::GarbageFrame { plugin }
            | Fault::HalfFrame { plugin }
            | Fault::OversizedFrame { plugin }
            | Fault::EofInFrame { plugin }
            | Fault::UnknownRpc { plugin } => plugin,
        }
    }
}

/// Commits a fault that takes effect at once.
pub(crate) async fn commit(fault: &Fault, peer: &Peer) -> io::Result<()> {
    const NOISE: [u8; 64] = [0xff; 64];
    match fault {
        Fault::CloseConnection { .. } => {
            peer.mux.close().await;
            Ok(())
        }
        Fault::GarbageFrame { .. } => peer.mux.write_raw(frame(1, &NOISE)).await,
        Fault::HalfFrame { .. } => peer.mux.write_raw(header(1, 64)[..3].to_vec()).await,
        Fault::OversizedFrame { .. } => peer.mux.write_raw(header(1, u32::MAX - 1).to_vec()).await,
        Fault::EofInFrame { .. } => {
            let mut bytes = header(1, 64).to_vec();
            bytes.extend_from_slice(&NOISE[..32]);
            peer.mux.write_raw(bytes).await?;
            peer.mux.close().await;
            Ok(())
        }
        Fault::UnknownRpc { .. } => {
            peer.unknown_rpc().await;
            Ok(())
        }
        Fault::SplitSynchronize { .. }
        | Fault::DelayBeforeSynchronize { .. }
        | Fault::DelayBeforeListEntry { .. }
        | Fault::RefuseMask { .. } => Ok(()),
    }
}

/// Faults that wait for their plugin to connect.
#[derive(Debug, Default)]
pub(crate) struct Pending(Vec<Fault>);

/// What is to go wrong while one plugin connects.
#[derive(Debug, Default)]
pub(crate) struct WhileConnecting {
    pub messages: usize,
    pub delay_before_synchronize: Duration,
    pub delay_before_list_entry: Duration,
    pub refuse_mask: bool,
}

impl Pending {
    /// Keeps a fault that concerns connecting; hands others back.
    pub fn keep(&mut self, fault: Fault) -> Option<Fault> {
        match fault {
            Fault::SplitSynchronize { .. }
            | Fault::DelayBeforeSynchronize { .. }
            | Fault::DelayBeforeListEntry { .. }
            | Fault::RefuseMask { .. } => {
                self.0.push(fault);
                None
            }
            other => Some(other),
        }
    }

    /// Takes out what waits for this plugin.
    pub fn take(&mut self, plugin: &str) -> WhileConnecting {
        let mut taken = WhileConnecting {
            messages: 1,
            ..WhileConnecting::default()
        };
        self.0.retain(|fault| {
            if fault.plugin() != plugin {
                return true;
            }
            match fault {
                Fault::SplitSynchronize { messages, .. } => taken.messages = (*messages).max(1),
                Fault::DelayBeforeSynchronize { delay, .. } => {
                    taken.delay_before_synchronize = *delay;
                }
                Fault::DelayBeforeListEntry { delay, .. } => taken.delay_before_list_entry = *delay,
                _ => taken.refuse_mask = true,
            }
            false
        });
        taken
    }
}

/// A client that connects and says nothing: it holds up the runtime's accept loop for the
/// registration timeout, or until it is dropped.
pub async fn silent_client(socket: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(socket).await
}
