//! Faults that the simulated runtime commits on demand, and clients that misbehave.
//!
//! What a *plugin* does wrong (a hook that never answers, an exit in a hook) is in
//! [`crate::plugin::Options`].

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

/// A client that connects and says nothing: it holds up the runtime's accept loop for the
/// registration timeout, or until it is dropped.
pub async fn silent_client(socket: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(socket).await
}
