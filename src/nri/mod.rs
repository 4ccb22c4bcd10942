//! The daemon as an NRI plugin: one session per runtime, on a thread of its own.
//!
//! ```text
//! supervisor  waits for the runtime's socket, connects, starts again when the session ends
//!   session   one connection: register, configure, synchronise, then hooks until end of file
//!     mux     two byte streams over the one socket
//!     service NRI's Plugin service: reads the few fields we need and asks crate::enforce
//!     events  which events to subscribe to, by the runtime's version
//! ```
//!
//! The thread runs nothing else, so that a hook never waits for the store, for registrations or
//! for a log.

pub mod events;
pub mod mux;
mod service;
mod session;
pub mod status;
pub mod supervisor;
