//! Starts the real things for tests: containerd in several versions, NRI's own
//! plugin stub and runtime side, and our own binaries, each in a scratch
//! directory, side by side, with nothing left behind.
//!
//! This library knows nothing about leases. The Go programs it starts are built
//! by `make -C tests/go`; where one is missing, or root is, a test is *skipped*
//! ([`runner::Skip`]), which counts as a failure with `CI=true`.
//!
//! Everything here is blocking: a test is a thread that does one thing after the other.

pub mod adaptation;
pub mod containerd;
pub mod cri;
pub mod daemon;
pub mod gobin;
pub mod jsonl;
pub mod plugin;
pub mod pressure;
pub mod process;
pub mod registry;
pub mod runner;
pub mod scratch;
pub mod wait;

pub use anyhow::{Context, Error, Result, anyhow, bail, ensure};
pub use nix::sys::signal::Signal;
