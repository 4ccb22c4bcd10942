//! What happened when: everybody writes here, and a violation is shown with its surroundings.
//! All times are CLOCK_BOOTTIME nanoseconds, as in the plugins' record.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::time::{ClockId, clock_gettime};
use nri_lease_harness::plugin::Entry;
use nri_lease_harness::{Context, Result};

/// Nanoseconds of CLOCK_BOOTTIME.
pub type Time = u64;

pub const MILLISECOND: Time = 1_000_000;
pub const SECOND: Time = 1_000 * MILLISECOND;

pub fn now() -> Time {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has CLOCK_BOOTTIME");
    u64::try_from(time.tv_sec()).unwrap_or(0) * SECOND + u64::try_from(time.tv_nsec()).unwrap_or(0)
}

/// A panicking thread has failed the test already; what it held is lists and counts.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Note {
    at: Time,
    who: &'static str,
    /// Name of the pod it is about; empty: about all.
    pod: String,
    text: String,
}

/// The notes of one run.
#[derive(Default)]
pub struct Journal {
    notes: Mutex<Vec<Note>>,
}

impl Journal {
    pub fn note(&self, who: &'static str, pod: &str, text: impl Into<String>) {
        let (pod, text) = (pod.to_owned(), text.into());
        lock(&self.notes).push(Note {
            at: now(),
            who,
            pod,
            text,
        });
    }

    /// Everything about `pod`, and what is about all, between two times.
    pub fn timeline(&self, pod: &str, from: Time, to: Time, record: &[Entry]) -> String {
        let mut lines: Vec<(Time, String)> = lock(&self.notes)
            .iter()
            .filter(|n| (n.pod.is_empty() || n.pod == pod) && (from..=to).contains(&n.at))
            .map(|n| (n.at, format!("{:<8} {}", n.who, n.text)))
            .collect();
        lines.extend(
            record
                .iter()
                .filter(|e| e.end_ns >= from && e.begin_ns <= to)
                .filter(|e| e.pod_name.is_empty() || e.pod_name == pod)
                .map(|e| (e.end_ns, recorded(e))),
        );
        lines.sort();
        lines
            .iter()
            .map(|(at, text)| {
                let ms = (*at as f64 - from as f64) / MILLISECOND as f64;
                format!("    {ms:>9.1} ms  {text}\n")
            })
            .collect()
    }
}

fn recorded(entry: &Entry) -> String {
    let took = entry.end_ns.saturating_sub(entry.begin_ns) / MILLISECOND;
    format!(
        "plugin   {} pid {} connection {} {} {} took {took} ms{}{}",
        entry.event,
        entry.pid,
        entry.connection,
        short(&entry.pod),
        short(&entry.container),
        if entry.late { ", LATE" } else { "" },
        entry.error
    )
}

/// Enough of an id to tell it apart.
pub fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

/// The plugins' record, read as it grows.
pub struct Record {
    path: PathBuf,
    offset: u64,
    /// Sandbox or container id, to when a plugin completed it in time.
    done: HashMap<String, Vec<(Time, Time)>>,
    entries: Vec<Entry>,
}

impl Record {
    pub fn at(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            offset: 0,
            done: HashMap::new(),
            entries: vec![],
        }
    }

    fn read_on(&mut self) -> Result<()> {
        let mut file = match std::fs::File::open(&self.path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        file.seek(SeekFrom::Start(self.offset))?;
        let mut reader = BufReader::new(file);
        let mut line = String::new();
        while reader.read_line(&mut line)? > 0 && line.ends_with('\n') {
            self.offset += line.len() as u64;
            let entry: Entry =
                serde_json::from_str(&line).with_context(|| format!("record line {line}"))?;
            if entry.done() {
                let id = match entry.event.as_str() {
                    "run_pod_sandbox" => &entry.pod,
                    "create_container" => &entry.container,
                    _ => "",
                };
                if !id.is_empty() {
                    let times = (entry.begin_ns, entry.end_ns);
                    self.done.entry(id.to_owned()).or_default().push(times);
                }
            }
            self.entries.push(entry);
            line.clear();
        }
        Ok(())
    }

    /// Whether a plugin completed it, in time, within the call that admitted it. An answer that
    /// was completed after the call was over cannot have counted, whatever the plugin thinks.
    pub fn has(&mut self, id: &str, begin: Time, end: Time) -> Result<bool> {
        self.read_on()?;
        Ok(self
            .done
            .get(id)
            .is_some_and(|times| times.iter().any(|(b, e)| *b >= begin && *e <= end)))
    }

    pub fn entries(&mut self) -> Result<&[Entry]> {
        self.read_on()?;
        Ok(&self.entries)
    }
}
