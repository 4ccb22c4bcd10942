//! What a lease is.
//!
//! Everything that decides about leases, pins, bans, pauses and sandbox marks is here as plain
//! functions: no I/O, no clock, no randomness. Time and facts about processes and pods are passed
//! in, so that all of it can be tested by seed with a simulated clock.
//!
//! - [`name`], [`time`], [`process`]: the words, as types that cannot hold an invalid value;
//! - [`scope`], [`selector`], [`glob`]: which pods and containers a lease covers;
//! - [`record`]: what is stored, versioned;
//! - [`rules`]: commands in, changes and events out;
//! - [`store`]: where the records are kept; the only part with I/O, and it knows no rules;
//! - [`exempt`], [`provider`], [`required`], [`annotation`]: pure predicates for the decision in a hook.

pub mod annotation;
pub mod exempt;
pub mod glob;
pub mod name;
pub mod process;
pub mod provider;
pub mod record;
pub mod required;
pub mod rules;
pub mod scope;
pub mod selector;
pub mod store;
pub mod time;

pub use name::{PluginIndex, PluginName, PodUid};
pub use process::{HolderFacts, PodIdentity, ProcessKey};
pub use record::{
    BanRecord, LeaseRecord, MetaRecord, PauseRecord, PinRecord, Record, RecordKey, SandboxRecord,
    Tree,
};
pub use rules::{Applied, Change, Command, Durability, Event, Limits, Refusal, Reply, State};
pub use scope::{CompiledScope, ContainerView, Operation, PodView, Scope};
pub use time::{BootId, Boottime, Now, Ttl, WallTime};
