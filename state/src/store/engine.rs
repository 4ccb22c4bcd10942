//! The thread that calls sled, and nothing else does. A panic in sled ends this thread, a hang
//! leaves it behind; in both cases the writer goes on with another one.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::contents::Changes;
use super::database::{Barrier, Database, Loaded};

/// sled's I/O threads hold the file, and with it the lock, for a while after the handle is gone.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Why the database did not do what it was asked. It is not used any more afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub kind: FailureKind,
    /// The cause and, where there is one, the remedy.
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// Full, read-only or not permitted: what is on the disk is fine.
    Refused,
    /// Another process has it.
    Locked,
    /// Unreadable, contradictory, or sled panicked.
    Damaged,
    /// No answer in time.
    Stuck,
}

impl Failure {
    pub fn damaged(reason: impl Into<String>) -> Failure {
        Failure {
            kind: FailureKind::Damaged,
            reason: reason.into(),
        }
    }

    fn stuck(limit: Duration) -> Failure {
        Failure {
            kind: FailureKind::Stuck,
            reason: format!(
                "no answer from the disk in {} s; check the disk",
                limit.as_secs()
            ),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind;
        // sled clones errors as text; the number in it leads back to the words people know.
        let text = error.to_string();
        let number = error.raw_os_error().or_else(|| {
            let digits = text.split("code: ").nth(1)?;
            digits.split(',').next()?.parse().ok()
        });
        let cause = number.map_or(text, |number| Errno::from_raw(number).desc().to_owned());
        let (kind, remedy) = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                (FailureKind::Refused, "free space")
            }
            ErrorKind::ReadOnlyFilesystem => (FailureKind::Refused, "mount it read-write"),
            ErrorKind::PermissionDenied => (FailureKind::Refused, "check owner and mode"),
            _ if number == Some(Errno::EMFILE as i32) => (FailureKind::Refused, "raise the limit"),
            _ => (FailureKind::Damaged, "check the disk"),
        };
        Failure {
            kind,
            reason: format!("{cause}; {remedy}"),
        }
    }
}

impl From<sled::Error> for Failure {
    fn from(error: sled::Error) -> Self {
        match error {
            sled::Error::Io(error) if error.to_string().contains("could not acquire lock") => {
                Failure {
                    kind: FailureKind::Locked,
                    reason: "another process has the database open".into(),
                }
            }
            sled::Error::Io(error) => error.into(),
            error => Failure::damaged(error.to_string()),
        }
    }
}

enum Request {
    Apply(Changes, Barrier),
    Close,
}

/// Changes that were made durable, and the size of the database file in bytes after that.
pub(super) struct Applied {
    pub changes: Changes,
    pub file_bytes: u64,
}

/// A running database. Dropped without `close`, its thread closes it in the background.
#[derive(Debug)]
pub(super) struct Engine {
    requests: Sender<Request>,
    answers: Receiver<Result<Applied, Failure>>,
}

impl Engine {
    /// Opens or creates the database in `dir`. Gives up after `limit`.
    pub fn open(dir: &Path, limit: Duration) -> Result<(Engine, Loaded), Failure> {
        let (requests, inbox) = mpsc::channel();
        let (outbox, answers) = mpsc::channel();
        let (opened, opening) = mpsc::channel();
        let dir = dir.to_path_buf();
        thread::Builder::new()
            .name("store-engine".into())
            .spawn(move || {
                match isolated(|| open_when_free(&dir)) {
                    Ok((database, loaded)) => {
                        // If opening took too long nobody listens: `serve` then only closes.
                        let _ = opened.send(Ok(loaded));
                        serve(database, &inbox, &outbox);
                    }
                    Err(failure) => drop(opened.send(Err(failure))),
                }
            })
            .map_err(Failure::from)?;
        let loaded = opening.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => Failure::stuck(limit),
            RecvTimeoutError::Disconnected => Failure::damaged("the database's thread ended"),
        })??;
        Ok((Engine { requests, answers }, loaded))
    }

    /// One barrier. After an error drop the engine: whether the changes are there is unknown.
    pub fn apply(
        &self,
        changes: Changes,
        barrier: Barrier,
        limit: Duration,
    ) -> Result<Applied, Failure> {
        self.ask(Request::Apply(changes, barrier), limit)
    }

    /// Closes the database. sled frees its lock a little later; `open` waits for that.
    pub fn close(self, limit: Duration) -> Result<(), Failure> {
        self.ask(Request::Close, limit).map(|_| ())
    }

    fn ask(&self, request: Request, limit: Duration) -> Result<Applied, Failure> {
        let ended = || Failure::damaged("the database's thread ended");
        self.requests.send(request).map_err(|_| ended())?;
        self.answers
            .recv_timeout(limit)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => Failure::stuck(limit),
                RecvTimeoutError::Disconnected => ended(),
            })?
    }
}

/// Answers requests until the first failure, or until the engine is closed or dropped.
fn serve(
    mut database: Database,
    inbox: &Receiver<Request>,
    outbox: &Sender<Result<Applied, Failure>>,
) {
    let mut last_answer = None;
    while let Ok(request) = inbox.recv() {
        match request {
            Request::Apply(changes, barrier) => {
                let applied = isolated(|| database.apply(&changes, barrier));
                let failed = applied.is_err();
                // A lost answer means that the writer has given this engine up.
                let _ = outbox.send(applied.map(|file_bytes| Applied {
                    changes,
                    file_bytes,
                }));
                if failed {
                    break;
                }
            }
            Request::Close => {
                last_answer = Some(Applied {
                    changes: Changes::new(),
                    file_bytes: 0,
                });
                break;
            }
        }
    }
    // Dropping flushes, and sled unwraps the result.
    let closed = isolated(|| {
        drop(database);
        Ok(())
    });
    if let Some(answer) = last_answer {
        let _ = outbox.send(closed.map(|()| answer));
    }
}

fn isolated<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no text");
        let first_line = text.lines().next().unwrap_or_default();
        Err(Failure::damaged(format!("sled panicked: {first_line}")))
    })
}

fn open_when_free(dir: &Path) -> Result<(Database, Loaded), Failure> {
    let give_up = Instant::now() + LOCK_PATIENCE;
    loop {
        match Database::open(dir) {
            Err(failure) if failure.kind == FailureKind::Locked && Instant::now() < give_up => {
                thread::sleep(LOCK_RETRY);
            }
            opened => return opened,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_failure_with_its_text() {
        let failure = isolated::<()>(|| panic!("page {} is gone", 7)).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Damaged);
        assert_eq!(failure.reason, "sled panicked: page 7 is gone");
    }

    #[test]
    fn an_error_that_sled_has_cloned_still_says_what_the_kernel_said() {
        let error = io::Error::from_raw_os_error(Errno::ENOSPC as i32);
        let cloned = io::Error::new(error.kind(), format!("{error:?}"));
        let failure = Failure::from(cloned);
        assert_eq!(failure.kind, FailureKind::Refused);
        assert_eq!(failure.reason, "No space left on device; free space");
    }
}
