//! A simulated NRI runtime, and a small NRI plugin to go with it.
//!
//! [`Runtime`] does what containerd does with NRI's runtime library, over a real unix socket: it
//! accepts plugins one at a time, calls them in index order under one lock, closes and skips those
//! that are late, and asks validators before a container is created. [`plugin::run`] is the other
//! side. Whole-program tests and `nri-lease demo` are built on both; neither knows anything of the
//! daemon.
//!
//! The behaviour is that of containerd/nri `pkg/adaptation` and `pkg/net/multiplex` v0.8.0, v0.11.0
//! and v0.12.0, and of containerd 2.3.4 `internal/nri` and `internal/cri`. The code is written
//! independently of the daemon's own NRI code on purpose: a mistake in one does not hide in the
//! other.

mod event;
pub mod fault;
mod journal;
mod mux;
mod options;
mod peer;
pub mod plugin;
mod requests;
mod runtime;
pub mod story;
mod world;

pub use fault::Fault;
pub use journal::{Entry, What};
pub use options::{NriVersion, Options, SyncBlock};
pub use requests::{Rejected, RequestError};
pub use runtime::{PluginInfo, Runtime};
pub use world::{ContainerId, ContainerSpec, ContainerState, PodId, PodSpec, World};
