//! Opening: what is on the disk, what of it can be trusted, and what to do if it cannot.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::contents::Contents;
use super::engine::{Engine, Failure, FailureKind};
use super::error::OpenError;
use super::files::Files;
use super::lock::holder_of;
use super::mirror::{self, Found};
use super::rebuild::{Old, rebuild};
use super::writer::State;
use super::{Options, Source};

/// A slow disk may take its time at boot; a hanging one must not look like patience for ever.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

pub(super) struct Recovered {
    pub contents: Contents,
    pub state: State,
    pub source: Source,
    pub problems: Vec<String>,
    /// Set when the records are known but cannot be written: the store starts failing.
    pub failure: Option<Failure>,
}

/// Reads everything there is. The directory is locked by us.
pub(super) fn recover(files: &Files, options: &Options) -> Result<Recovered, OpenError> {
    let directory_error = |source| OpenError::Directory {
        path: files.dir.clone(),
        source,
    };
    files.tidy().map_err(directory_error)?;
    let existed = files.database().exists();
    let found = mirror::read(files);
    let mut problems = Vec::new();
    if let Found::Unreadable(reason) = &found {
        problems.push(format!(
            "{} cannot be read: {reason}",
            files.mirror().display()
        ));
    }
    let mirror_sequence = match &found {
        Found::Contents(mirror) => mirror.sequence,
        _ => 0,
    };
    let damage = match Engine::open(&files.database(), OPEN_LIMIT) {
        Ok((engine, loaded)) => {
            let fresh = !existed && matches!(found, Found::Missing);
            if fresh || loaded.sequence.is_some_and(|own| own >= mirror_sequence) {
                return Ok(opened(engine, loaded.contents, fresh, problems));
            }
            // Whatever else it holds, acknowledged writes are missing from it.
            let own = loaded.sequence.unwrap_or(0);
            // Closed so that sled's lock does not outlive the move.
            let _ = engine.close(options.stuck_after);
            format!("it ends at barrier {own}, its mirror at {mirror_sequence}")
        }
        Err(failure) => match failure.kind {
            FailureKind::Locked => {
                return Err(OpenError::InUse {
                    path: files.dir.clone(),
                    pid: holder_of(&files.database().join("db")),
                });
            }
            FailureKind::Refused => return read_only(files, failure, problems),
            FailureKind::Damaged | FailureKind::Stuck => failure.reason,
        },
    };
    from_mirror(files, options, found, &damage, existed, problems).map_err(directory_error)
}

fn opened(engine: Engine, contents: Contents, fresh: bool, problems: Vec<String>) -> Recovered {
    Recovered {
        contents,
        state: State::Working(engine),
        source: if fresh {
            Source::Empty { lost: false }
        } else {
            Source::Database
        },
        problems,
        failure: None,
    }
}

/// The database is given up: set it aside and build another one from the mirror.
fn from_mirror(
    files: &Files,
    options: &Options,
    found: Found,
    damage: &str,
    existed: bool,
    mut problems: Vec<String>,
) -> std::io::Result<Recovered> {
    let mut aside: Vec<PathBuf> = vec![files.database()];
    let (contents, source) = match found {
        Found::Contents(contents) => (contents, Source::Mirror),
        Found::Missing => (Contents::default(), Source::Empty { lost: true }),
        Found::Unreadable(_) => {
            aside.push(files.mirror());
            (Contents::default(), Source::Empty { lost: true })
        }
    };
    if existed {
        let folder = files.set_aside(&aside)?;
        problems.push(format!(
            "the database {} was not usable and is now in {}: {damage}",
            files.database().display(),
            folder.display(),
        ));
    } else {
        problems.push(format!(
            "the database {} was missing",
            files.database().display()
        ));
        files.set_aside(&aside)?;
    }
    problems.push(match source {
        Source::Mirror => format!("rebuilt from {}", files.mirror().display()),
        _ => "nothing could be recovered: all leases are lost".to_owned(),
    });
    let (state, failure) = match rebuild(files, &contents, Old::Remove, options.stuck_after) {
        Ok(engine) => (State::Working(engine), None),
        Err(failure) => (broken(options), Some(failure)),
    };
    Ok(Recovered {
        contents,
        state,
        source,
        problems,
        failure,
    })
}

fn broken(options: &Options) -> State {
    State::Broken {
        old: Old::Remove,
        retry_at: Instant::now() + options.retry_min,
        pause: options.retry_min,
    }
}

fn read_only(
    files: &Files,
    failure: Failure,
    _problems: Vec<String>,
) -> Result<Recovered, OpenError> {
    Err(OpenError::Database {
        path: files.database(),
        reason: failure.reason,
    })
}
