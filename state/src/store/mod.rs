//! The store: a small set of named JSON values that survives kill -9, a power cut and a full disk.
//!
//! It moves opaque bytes and must not know what a lease is. Callers never wait for the disk: they
//! queue, and a writer thread groups what is queued into one barrier. Rooms:
//! `queue` (what callers leave), `writer` (the loop), `engine` and `database` (sled, isolated),
//! `contents` (the copy in memory, which is the truth), `mirror` (`leases.json`), `open` (recovery).

mod error;
mod health;
mod ticket;

use std::path::Path;
use std::time::Duration;

pub use error::{CommitError, OpenError};
pub use health::{Counters, Health};
pub use ticket::Ticket;

/// A named set of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tree {
    Leases,
    Pins,
    Bans,
    Control,
    /// Vetting marks. Not in the mirror.
    Sandboxes,
    /// Bindings and the like, good for this boot. Not in the mirror.
    Meta,
}

/// One change: the value is JSON text; `None` removes the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    pub tree: Tree,
    pub key: String,
    pub value: Option<Vec<u8>>,
}

/// Where the records of an [`Opened`] store came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The database was readable and complete.
    Database,
    /// The database was damaged or missing; these are the records of `leases.json`. Renewals since
    /// the last structural change and everything outside the mirror are gone.
    Mirror,
    /// Nothing was there. `lost`: there had been a store, and neither its database nor its mirror
    /// could be read.
    Empty { lost: bool },
}

/// An open store and what was in it.
#[derive(Debug)]
pub struct Opened {
    pub store: Store,
    pub records: Vec<(Tree, String, Vec<u8>)>,
    pub source: Source,
    /// What was wrong and what was done about it, for the log; empty on a clean start.
    pub problems: Vec<String>,
}

/// Delays and limits. The defaults are what the daemon uses; tests shorten them.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a `write_soon` may wait for company.
    pub soon_delay: Duration,
    /// How long a `mirror_soon` may wait for company.
    pub mirror_delay: Duration,
    /// After this long without an answer of the disk `commit` fails fast and `health` says so.
    pub stall_after: Duration,
    /// After this long without an answer the database is given up and rebuilt beside it.
    pub stuck_after: Duration,
    /// First pause between two attempts to reopen; doubles, with jitter, to `retry_max`.
    pub retry_min: Duration,
    pub retry_max: Duration,
    /// Above this size on disk, in bytes, the database is rebuilt.
    pub compact_above_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            soon_delay: Duration::from_millis(250),
            mirror_delay: Duration::from_millis(250),
            stall_after: Duration::from_secs(5),
            stuck_after: Duration::from_secs(30),
            retry_min: Duration::from_millis(250),
            retry_max: Duration::from_secs(30),
            compact_above_bytes: 64 << 20,
        }
    }
}

/// Handle to the open store. Methods only queue; none waits for the disk except [`Store::close`].
#[derive(Debug)]
pub struct Store {}

impl Store {
    /// Opens or creates the store in `dir` (created with mode 0700). Blocking: reads everything,
    /// and recovers from `leases.json` if the database is damaged.
    ///
    /// # Errors
    /// Another process has the directory (the error names its pid), or the directory cannot be
    /// written at all. Damage is no error: see [`Opened::source`] and [`Opened::problems`].
    pub fn open(dir: &Path, _options: Options) -> Result<Opened, OpenError> {
        Err(OpenError::Directory {
            path: dir.to_path_buf(),
            source: std::io::ErrorKind::Unsupported.into(),
        })
    }

    /// Queues `writes` as one group: all of them or none. They are durable once the ticket is `Ok`.
    /// One barrier serves all groups that are queued meanwhile. Fails fast, through the ticket,
    /// while the store is failing, when the disk hangs and when the queue is full.
    pub fn commit(&self, _writes: Vec<Write>) -> Ticket {
        Ticket::failed(CommitError::Closed)
    }

    /// Queues `writes` to be written soon, coalesced per key. A crash may lose them. For one key the
    /// order with commits before and after is kept. Nothing is lost to a failing disk: what cannot
    /// be written now is written once the store has healed.
    pub fn write_soon(&self, _writes: Vec<Write>) {}

    /// Asks for `leases.json` to be written soon: call it after a structural change was answered.
    pub fn mirror_soon(&self) {}

    /// Can the store write? Never blocks on the disk.
    pub fn health(&self) -> Health {
        Health::Healthy
    }

    /// What was done since the start.
    pub fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Writes what is queued, with a barrier and the mirror, closes the database and gives the
    /// directory free. Blocking; returns after at most about `stuck_after` when the disk hangs.
    pub fn close(self) {}
}
