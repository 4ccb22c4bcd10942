//! nri-lease: keeps pods from starting without their required NRI plugins.
//!
//! The library behind `nri-leased` (the daemon) and `nri-lease` (the command line).
//! docs/architecture.md has the map.

pub mod cli;
pub mod clock;
pub mod config;
pub mod daemon;
pub mod enforce;
pub mod engine;
pub mod events;
pub mod logging;
pub mod main_daemon;
pub mod nri;
pub mod pods;
pub mod pollable;
pub mod presence;
pub mod rpc;
pub mod startup;
pub mod traces;
