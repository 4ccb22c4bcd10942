//! sled 0.34, as it has to be used to be durable. Runs on the engine thread only.
//!
//! What its documentation does not say (read in its source, version 0.34.7):
//! - `flush` ends in `sync_file_range` (`pagecache/iobuf.rs`), which leaves the device's cache and
//!   the file's size alone: fdatasync of the file makes the barrier.
//! - Pages above a quarter of a segment become files in `blobs/`, written without any sync
//!   (`pagecache/blob_io.rs`): new ones are synced here.
//! - A crash while a snapshot is written leaves `snap.N.generating`. The next start reads it as the
//!   newest snapshot and reports corruption (`config.rs`, `get_snapshot_files`): removed first.
//! - Once a write has failed every operation fails; a panic on one of its I/O threads makes `flush`
//!   wait for ever. The engine gives such a database up.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use sled::transaction::{ConflictableTransactionError, TransactionError, Transactional};

use super::Tree;
use super::contents::{Changes, Contents};
use super::digest::Digest;
use super::engine::Failure;
use super::files::sync_dir;

/// sled keeps what it reads under this many bytes; our values are in memory anyway.
const CACHE_BYTES: u64 = 1 << 20;
/// sled's unit of the log and size of its write buffers. A quarter of its default takes 2 to 4 MiB
/// less memory, measured with 4,096 pins, and is no slower.
pub(super) const SEGMENT_BYTES: usize = 128 << 10;
/// Our own tree and key beside the six.
const OWN_TREE: &str = "store";
const BARRIER_KEY: &str = "barrier";

/// What is written with every group: with it a database can be checked against itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Barrier {
    /// Counts up by one; see [`Contents::sequence`].
    pub sequence: u64,
    /// Of all values after the group.
    pub digest: Digest,
}

#[derive(Debug)]
pub(super) struct Database {
    db: sled::Db,
    /// The six of [`Tree::ALL`], then our own.
    trees: Vec<sled::Tree>,
    file: File,
    dir: PathBuf,
    blobs_synced: BTreeSet<OsString>,
}

/// What a database held when it was opened, and what its last barrier says of that.
#[derive(Debug)]
pub(super) struct Loaded {
    pub contents: Contents,
    pub barrier: Option<Barrier>,
}

impl Database {
    /// Opens or creates the database in `dir` and reads all of it.
    pub fn open(dir: &Path) -> Result<(Database, Loaded), Failure> {
        remove_unfinished_snapshots(dir)?;
        let db = sled::Config::new()
            .path(dir)
            .segment_size(SEGMENT_BYTES)
            .cache_capacity(CACHE_BYTES)
            .mode(sled::Mode::LowSpace)
            .flush_every_ms(None)
            .open()?;
        let names = Tree::ALL.iter().map(|tree| tree.name()).chain([OWN_TREE]);
        let trees = names
            .map(|name| db.open_tree(name))
            .collect::<Result<Vec<_>, _>>()?;
        let mut records = Vec::new();
        for (tree, stored) in Tree::ALL.iter().zip(&trees) {
            for record in stored.iter() {
                let (key, value) = record?;
                let key = std::str::from_utf8(&key)
                    .map_err(|_| Failure::damaged("a key is not UTF-8"))?;
                records.push(((*tree, key.into()), value.as_ref().into()));
            }
        }
        let barrier = match trees[Tree::ALL.len()].get(BARRIER_KEY)? {
            Some(bytes) => Some(Barrier::from_bytes(&bytes)?),
            None => None,
        };
        let sequence = barrier.map_or(0, |barrier| barrier.sequence);
        let contents = Contents::new(sequence, records);
        let mut database = Database {
            file: File::open(dir.join("db"))?,
            db,
            trees,
            dir: dir.to_path_buf(),
            blobs_synced: BTreeSet::new(),
        };
        database.sync_names()?;
        Ok((database, Loaded { contents, barrier }))
    }

    /// Writes `changes` and `barrier`, all or nothing, and makes them durable. Answers
    /// the size of the database file in bytes.
    pub fn apply(&mut self, changes: &Changes, barrier: Barrier) -> Result<u64, Failure> {
        self.trees
            .as_slice()
            .transaction(|trees| {
                for ((tree, key), value) in changes {
                    let stored = &trees[tree.position()];
                    match value {
                        Some(value) => stored.insert(key.as_bytes(), value.as_ref())?,
                        None => stored.remove(key.as_bytes())?,
                    };
                }
                trees[Tree::ALL.len()].insert(BARRIER_KEY, &barrier.to_bytes()[..])?;
                Ok::<(), ConflictableTransactionError<()>>(())
            })
            .map_err(|error| match error {
                TransactionError::Storage(error) => error.into(),
                TransactionError::Abort(()) => Failure::damaged("a transaction was aborted"),
            })?;
        self.db.flush()?;
        self.sync_blobs()?;
        self.file.sync_data()?;
        Ok(self.file.metadata()?.len())
    }

    /// Makes the files that opening created, and their names, survive a power cut.
    fn sync_names(&mut self) -> io::Result<()> {
        File::open(self.dir.join("conf"))?.sync_all()?;
        self.sync_blobs()?;
        sync_dir(&self.dir.join("blobs"))?;
        sync_dir(&self.dir)?;
        if let Some(parent) = self.dir.parent() {
            sync_dir(parent)?;
        }
        Ok(())
    }

    fn sync_blobs(&mut self) -> io::Result<()> {
        let blobs = self.dir.join("blobs");
        let mut present = BTreeSet::new();
        let mut created = false;
        for entry in fs::read_dir(&blobs)? {
            let name = entry?.file_name();
            if !self.blobs_synced.contains(&name) {
                match File::open(blobs.join(&name)) {
                    Ok(file) => file.sync_data()?,
                    // sled removes a blob as soon as nothing refers to it.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                }
                created = true;
            }
            present.insert(name);
        }
        self.blobs_synced = present;
        if created {
            sync_dir(&blobs)?;
        }
        Ok(())
    }
}

impl Barrier {
    fn to_bytes(self) -> [u8; 16] {
        let both = u128::from(self.digest.0) << 64 | u128::from(self.sequence);
        both.to_le_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Result<Barrier, Failure> {
        let bytes = bytes
            .try_into()
            .map_err(|_| Failure::damaged("its barrier has a wrong length"))?;
        let both = u128::from_le_bytes(bytes);
        Ok(Barrier {
            sequence: both as u64,
            digest: Digest((both >> 64) as u64),
        })
    }
}

fn remove_unfinished_snapshots(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "generating") {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}
