//! The store: a small set of named JSON values that survives kill -9, a power cut and a full disk.
//!
//! It moves opaque bytes and must not know what a lease is. Callers never wait for the disk: they
//! queue, and a writer thread groups what is queued into one barrier. Rooms:
//! `queue` (what callers leave), `writer` (the loop), `engine` and `database` (sled, isolated),
//! `contents` (the copy in memory, which is the truth), `mirror` (`leases.json`), `open` (recovery).

mod contents;
mod database;
mod digest;
mod engine;
mod error;
mod files;
mod health;
mod lock;
mod mirror;
mod open;
mod queue;
mod rebuild;
mod salvage;
mod ticket;
mod writer;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use files::Files;
use health::Status;
use lock::Lock;
use queue::Queue;
use writer::Writer;

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

impl Tree {
    /// In the order of their positions in a database.
    pub const ALL: [Tree; 6] = [
        Tree::Leases,
        Tree::Pins,
        Tree::Bans,
        Tree::Control,
        Tree::Sandboxes,
        Tree::Meta,
    ];

    /// Its name in the database and in the mirror.
    pub fn name(self) -> &'static str {
        match self {
            Tree::Leases => "leases",
            Tree::Pins => "pins",
            Tree::Bans => "bans",
            Tree::Control => "control",
            Tree::Sandboxes => "sandboxes",
            Tree::Meta => "meta",
        }
    }

    fn position(self) -> usize {
        self as usize
    }

    fn is_mirrored(self) -> bool {
        !matches!(self, Tree::Sandboxes | Tree::Meta)
    }
}

/// Bytes one value may have; a lease with 64 rules and 16 holders is far below.
pub const VALUE_MAX_BYTES: usize = 64 << 10;

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

/// Handle to the open store. Methods only queue, under a lock that is never held during I/O; none
/// waits for the disk except [`Store::close`], and dropping, which closes too.
#[derive(Debug)]
pub struct Store {
    queue: Arc<Queue>,
    status: Arc<Status>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl Store {
    /// Opens or creates the store in `dir` (created with mode 0700). Blocking: reads everything,
    /// and recovers from `leases.json` if the database is damaged.
    ///
    /// # Errors
    /// Another process has the directory (the error names its pid), or the directory cannot be
    /// used at all. Damage is no error: see [`Opened::source`] and [`Opened::problems`].
    pub fn open(dir: &Path, options: Options) -> Result<Opened, OpenError> {
        let directory_error = |source| OpenError::Directory {
            path: dir.to_path_buf(),
            source,
        };
        let files = Files::create(dir).map_err(directory_error)?;
        let lock = Lock::take(&files)?;
        let recovered = open::recover(&files, &options)?;
        let records = recovered
            .contents
            .records
            .iter()
            .map(|((tree, key), value)| (*tree, key.to_string(), value.to_vec()))
            .collect();

        let queue = Arc::new(Queue::new());
        let status = Arc::new(Status::new(files.database(), options.stall_after));
        if let (Some(failure), writer::State::Broken { retry_at, .. }) =
            (&recovered.failure, &recovered.state)
        {
            status.fails(&failure.reason, *retry_at);
        }
        let writer = Writer {
            mirror: mirror::Mirror::start(files.clone(), Arc::clone(&status))
                .map_err(directory_error)?,
            compact_above_bytes: options.compact_above_bytes,
            queue: Arc::clone(&queue),
            status: Arc::clone(&status),
            contents: recovered.contents,
            state: recovered.state,
            files,
            options,
            lock,
        };
        let writer = thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || {
                let _abandon = AbandonOnEnd(Arc::clone(&writer.queue));
                writer.run();
            })
            .map_err(directory_error)?;
        let store = Store {
            queue,
            status,
            writer: Mutex::new(Some(writer)),
        };
        if recovered.source != Source::Database || !recovered.problems.is_empty() {
            store.mirror_soon();
        }
        Ok(Opened {
            store,
            records,
            source: recovered.source,
            problems: recovered.problems,
        })
    }

    /// Queues `writes` as one group: all of them or none. They are durable once the ticket is `Ok`.
    /// One barrier serves all groups that are queued meanwhile. Fails fast, through the ticket,
    /// while the store is failing, when the disk hangs and when the queue is full.
    ///
    /// After an error the group is not in memory and will not be written again; a crash before the
    /// store has healed may still show it.
    pub fn commit(&self, writes: Vec<Write>) -> Ticket {
        let unfit = writes.iter().find_map(|write| unfit(write).err());
        if let Some(error) = unfit.or_else(|| self.status.refusal()) {
            return Ticket::failed(error);
        }
        let (promise, ticket) = Ticket::pair();
        self.queue.push_group(writes, promise);
        ticket
    }

    /// Queues `writes` to be written soon, coalesced per key. A crash may lose them. For one key the
    /// order with commits before and after is kept. Nothing is lost to a failing disk: what cannot
    /// be written now is written once the store has healed. A value that no commit would accept is
    /// left out and logged.
    pub fn write_soon(&self, mut writes: Vec<Write>) {
        writes.retain(|write| match unfit(write) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(%error, "a value is not stored");
                false
            }
        });
        self.queue.push_soon(writes);
    }

    /// Asks for `leases.json` to be written soon: call it after a structural change was answered.
    pub fn mirror_soon(&self) {
        self.queue.want_mirror();
    }

    /// Can the store write? Never blocks on the disk.
    pub fn health(&self) -> Health {
        self.status.health()
    }

    /// What was done since the start.
    pub fn counters(&self) -> Counters {
        self.status.counters()
    }

    /// Writes what is queued, with a barrier and the mirror, closes the database and gives the
    /// directory free. Blocking, for as long as a hanging disk hangs: not for async code, and a
    /// daemon that has to go exits without it. Dropping the store does the same. Later commits
    /// fail; closing twice does nothing.
    pub fn close(&self) {
        self.queue.close();
        let writer = self
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(writer) = writer
            && writer.join().is_err()
        {
            tracing::error!("the store's writer ended by a panic");
        }
    }
}

/// Should the writer ever panic, nobody waits for it in vain.
struct AbandonOnEnd(Arc<Queue>);

impl Drop for AbandonOnEnd {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

/// Values go into the mirror as they are, so they have to be JSON.
fn unfit(write: &Write) -> Result<(), CommitError> {
    let Some(value) = &write.value else {
        return Ok(());
    };
    if value.len() > VALUE_MAX_BYTES {
        return Err(CommitError::TooLarge {
            key: write.key.clone(),
            bytes: value.len(),
            limit: VALUE_MAX_BYTES,
        });
    }
    let not_json = |reason: String| CommitError::NotJson {
        key: write.key.clone(),
        reason,
    };
    // The JSON parser does not look inside the strings that it skips.
    let text = std::str::from_utf8(value).map_err(|error| not_json(error.to_string()))?;
    match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Ok(_) => Ok(()),
        Err(error) => Err(not_json(error.to_string())),
    }
}
