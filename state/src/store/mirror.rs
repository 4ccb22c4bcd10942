//! `leases.json`: everything worth keeping, for people to read and for recovery.
//!
//! `{"format":1,"written_at":…,"sequence":…,"records":{"leases":{KEY:VALUE,…},…}}`, one record a
//! line. Written by its own thread, so that its syncs delay no commit.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Tree;
use super::contents::Contents;
use super::files::{Files, sync_dir};
use super::health::Status;

const FORMAT: u64 = 1;
/// Larger than any mirror the daemon's limits allow; what is larger is not ours.
const READ_MAX_BYTES: u64 = 256 << 20;
const RETRY: Duration = Duration::from_secs(10);

/// What was found in place of the mirror.
#[derive(Debug)]
pub(super) enum Found {
    Missing,
    Unreadable(String),
    Contents(Contents),
}

#[derive(Deserialize)]
struct Document {
    format: u64,
    #[serde(default)]
    sequence: u64,
    records: BTreeMap<String, BTreeMap<String, Box<RawValue>>>,
}

pub(super) fn read(files: &Files) -> Found {
    let text = match read_text(files) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Found::Missing,
        Err(error) => return Found::Unreadable(error.to_string()),
    };
    let document: Document = match serde_json::from_slice(&text) {
        Ok(document) => document,
        Err(error) => return Found::Unreadable(error.to_string()),
    };
    if document.format != FORMAT {
        return Found::Unreadable(format!(
            "its format is {}, this version reads {FORMAT}",
            document.format
        ));
    }
    let mut all = Vec::new();
    for (name, records) in document.records {
        let Some(tree) = Tree::ALL.into_iter().find(|tree| tree.name() == name) else {
            return Found::Unreadable(format!("it has an unknown section {name:?}"));
        };
        for (key, value) in records {
            all.push(((tree, key.into()), value.get().as_bytes().into()));
        }
    }
    Found::Contents(Contents::new(document.sequence, all))
}

fn read_text(files: &Files) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(files.mirror())?
        .take(READ_MAX_BYTES)
        .read_to_end(&mut text)?;
    Ok(text)
}

/// Replaces the mirror, atomically and durably.
pub(super) fn write(files: &Files, contents: &Contents) -> io::Result<()> {
    let new = files.new_mirror();
    let written = write_text(files, contents).and_then(|()| fs::rename(&new, files.mirror()));
    if written.is_err() {
        // On a full disk every block counts. The error that matters is the first one.
        let _ = fs::remove_file(&new);
    }
    written?;
    sync_dir(&files.dir)
}

fn write_text(files: &Files, contents: &Contents) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(files.new_mirror())?;
    let mut out = BufWriter::new(file);
    let written_at = humantime::format_rfc3339_seconds(SystemTime::now());
    write!(
        out,
        "{{\"format\":{FORMAT},\"written_at\":\"{written_at}\",\"sequence\":{},\n\"records\":{{",
        contents.sequence
    )?;
    let mut previous = None;
    for ((tree, key), value) in &contents.records {
        if previous == Some(*tree) {
            out.write_all(b",\n")?;
        } else {
            let end = if previous.is_some() { "\n},\n" } else { "\n" };
            writeln!(out, "{end}\"{}\":{{", tree.name())?;
        }
        previous = Some(*tree);
        serde_json::to_writer(&mut out, &**key)?;
        out.write_all(b":")?;
        out.write_all(value)?;
    }
    let end = if previous.is_some() {
        "\n}\n}}\n"
    } else {
        "}}\n"
    };
    out.write_all(end.as_bytes())?;
    out.into_inner()?.sync_all()
}

/// The thread that writes mirrors. Of several wanted meanwhile only the newest is written.
#[derive(Debug)]
pub(super) struct Mirror {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Desk {
    wanted: Mutex<Wanted>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Wanted {
    contents: Option<Contents>,
    closing: bool,
}

impl Desk {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mirror {
    pub fn start(files: Files, status: Arc<Status>) -> io::Result<Mirror> {
        let desk = Arc::new(Desk::default());
        let thread = thread::Builder::new().name("store-mirror".into()).spawn({
            let desk = Arc::clone(&desk);
            move || run(&desk, &files, &status)
        })?;
        Ok(Mirror {
            desk,
            thread: Some(thread),
        })
    }

    pub fn want(&self, contents: Contents) {
        self.desk.wanted().contents = Some(contents);
        self.desk.wake.notify_one();
    }

    /// Writes what is wanted, once, and ends. Waits for at most `limit`.
    pub fn close(mut self, limit: Duration) {
        self.desk.wanted().closing = true;
        self.desk.wake.notify_one();
        let Some(thread) = self.thread.take() else {
            return;
        };
        let deadline = std::time::Instant::now() + limit;
        while !thread.is_finished() && std::time::Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn run(desk: &Desk, files: &Files, status: &Status) {
    let mut wanted = desk.wanted();
    loop {
        let Some(contents) = wanted.contents.take() else {
            if wanted.closing {
                return;
            }
            wanted = desk
                .wake
                .wait(wanted)
                .unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(wanted);
        let written = write(files, &contents);
        wanted = desk.wanted();
        let Err(error) = written else {
            status
                .count(|counts| &counts.mirror_writes)
                .fetch_add(1, Ordering::Relaxed);
            continue;
        };
        status
            .count(|counts| &counts.mirror_failures)
            .fetch_add(1, Ordering::Relaxed);
        tracing::warn!(path = %files.mirror().display(), %error, "the mirror cannot be written; tried again");
        if wanted.closing {
            return;
        }
        wanted = desk
            .wake
            .wait_timeout(wanted, RETRY)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        // Newer contents may have come in meanwhile.
        wanted.contents.get_or_insert(contents);
    }
}
