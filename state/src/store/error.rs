//! What can go wrong, in words an operator can act on.

use std::io;
use std::path::PathBuf;

/// Why a store did not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// `pid` is 0 when the other process did not leave its name.
    #[error(
        "state directory {} is in use by process {pid}; stop it or choose another --state-dir",
        path.display()
    )]
    InUse { path: PathBuf, pid: u32 },
    #[error("state directory {} cannot be used: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The database neither opened nor could be rebuilt, e.g. because the disk is full.
    #[error("lease store at {} cannot be opened: {reason}", path.display())]
    Database { path: PathBuf, reason: String },
}

/// Why a commit is not durable. The writes of its group are not applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// `reason` is the cause and the remedy, `retry_in_seconds` when the store tries to heal next.
    #[error(
        "lease store at {} cannot write: {reason}; retried in {retry_in_seconds} s",
        path.display()
    )]
    CannotWrite {
        path: PathBuf,
        reason: String,
        retry_in_seconds: u64,
    },
    /// The disk hangs. Unlike every other error, a group that was already queued may still be written.
    #[error(
        "lease store at {} has had no answer from the disk for {for_seconds} s; check the disk",
        path.display()
    )]
    Stalled { path: PathBuf, for_seconds: u64 },
    #[error("lease store has {limit} groups of writes waiting; try again")]
    QueueFull { limit: usize },
    #[error("value of {key:?} has {bytes} bytes, more than the store's limit of {limit}")]
    TooLarge {
        key: String,
        bytes: usize,
        limit: usize,
    },
    #[error("value of {key:?} is not JSON: {reason}")]
    NotJson { key: String, reason: String },
    #[error("lease store is closed")]
    Closed,
}
