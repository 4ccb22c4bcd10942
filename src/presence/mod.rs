//! Is a holder really connected to a runtime, right now, according to the kernel?
//!
//! The answer rests on two facts. The kernel says which unix sockets a process has and whether
//! their peers are still open ([`unix_diag`]); a fence says that the runtime has synchronised
//! them ([`fence`]). A connection that was seen accepted before a fence was opened, and is open
//! after the fence was accepted, is *bound*. Nothing else binds.
//!
//! The [`Tracker`] keeps the bindings on a thread of its own and publishes an immutable [`View`],
//! which hooks read without waiting for anyone. This module knows nothing of leases or of NRI's
//! messages: processes, sockets and runtimes only.

mod actor;
pub mod binding;
pub mod fence;
mod mailbox;
pub mod netns;
mod owner;
pub mod proc;
mod process;
mod scan;
mod sys;
mod tracker;
pub mod unix_diag;
mod view;

pub use binding::{ConnectionInfo, ConnectionState, Presence, SocketId};
pub use proc::{ProcessFacts, ProcessKey};
pub use sys::boottime_ns;
pub use tracker::{
    BindingRecord, Event, HolderSpec, OwnFence, OwnSocket, RuntimeId, Settled, Tracker,
};
pub use view::{BoundConnections, Lost, View};
