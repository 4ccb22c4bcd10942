//! What others may ask about the store at any time, without waiting for it.

use std::time::Instant;

/// Can the store write?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Healthy,
    /// Commits fail with `error`; records are served from memory. `since` is when it began.
    Failing {
        since: Instant,
        error: String,
    },
}

/// What was done since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Groups of writes made durable together, each with one fdatasync of the database file.
    pub barriers: u64,
    /// Values written or removed.
    pub writes: u64,
    /// Times `leases.json` was written.
    pub mirror_writes: u64,
    /// Times writing `leases.json` failed (it is tried again).
    pub mirror_failures: u64,
    /// Barriers that failed.
    pub write_failures: u64,
    /// Attempts to reopen the database after a failure.
    pub reopen_attempts: u64,
    /// Times the database was rebuilt because it had grown too large.
    pub compactions: u64,
}
