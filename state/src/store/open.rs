//! Opening: what is on the disk, what of it can be trusted, and what to do if it cannot.

use std::io;
use std::time::{Duration, Instant};

use super::contents::Contents;
use super::database::Loaded;
use super::engine::{Engine, Failure, FailureKind};
use super::error::OpenError;
use super::files::Files;
use super::lock::holder_of;
use super::mirror::{self, Found};
use super::rebuild::{Old, rebuild};
use super::salvage::salvage;
use super::writer::State;
use super::{Options, Source};

/// A slow disk may take its time at boot; a hanging one must not hold the daemon up for ever.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

pub(super) struct Recovered {
    pub contents: Contents,
    pub state: State,
    /// Set when the records are known but cannot be written: the store starts failing.
    pub failure: Option<Failure>,
    pub source: Source,
    pub problems: Vec<String>,
}

/// Reads everything there is. The directory is locked by us.
pub(super) fn recover(files: &Files, options: &Options) -> Result<Recovered, OpenError> {
    let directory_error = |source| OpenError::Directory {
        path: files.dir.clone(),
        source,
    };
    let tidied = files.tidy();
    let mirror = mirror::read(files);
    let mut problems = Vec::new();
    if let Found::Unreadable(reason) = &mirror {
        let path = files.mirror();
        problems.push(format!("{} cannot be read: {reason}", path.display()));
    }
    if !files.database().exists() {
        tidied.map_err(directory_error)?;
        return match mirror {
            Found::Missing => Ok(begin(files, options)),
            _ => from_mirror(files, options, mirror, "it is missing", problems)
                .map_err(directory_error),
        };
    }
    let damage = match read_database(files, options) {
        Ok(read) => match disbelief(&read.loaded, &mirror) {
            None => return Ok(read.recovered(options, problems)),
            Some(damage) => {
                read.close(options);
                damage
            }
        },
        Err(failure) => match failure.kind {
            FailureKind::Locked => {
                return Err(OpenError::InUse {
                    path: files.dir.clone(),
                    pid: holder_of(&files.database().join("db")),
                });
            }
            FailureKind::Refused => {
                return Err(OpenError::Database {
                    path: files.database(),
                    reason: failure.reason,
                });
            }
            FailureKind::Damaged | FailureKind::Stuck => failure.reason,
        },
    };
    from_mirror(files, options, mirror, &damage, problems).map_err(directory_error)
}

/// A database that could be read, and the engine or why there is none.
struct Read {
    loaded: Loaded,
    engine: Result<Engine, Failure>,
}

fn read_database(files: &Files, options: &Options) -> Result<Read, Failure> {
    match Engine::open(&files.database(), OPEN_LIMIT) {
        Ok((engine, loaded)) => Ok(Read {
            loaded,
            engine: Ok(engine),
        }),
        Err(refused) if refused.kind == FailureKind::Refused => Ok(Read {
            loaded: salvage(&files.database(), options.stuck_after)?,
            engine: Err(refused),
        }),
        Err(failure) => Err(failure),
    }
}

impl Read {
    fn recovered(self, options: &Options, mut problems: Vec<String>) -> Recovered {
        let (state, failure) = state_of(self.engine, options);
        if let Some(failure) = &failure {
            problems.push(format!(
                "the database was read from a copy in memory, it cannot be written: {}",
                failure.reason
            ));
        }
        Recovered {
            contents: self.loaded.contents,
            state,
            failure,
            source: Source::Database,
            problems,
        }
    }

    /// So that sled's lock does not outlive the move.
    fn close(self, options: &Options) {
        if let Ok(Err(failure)) = self.engine.map(|engine| engine.close(options.stuck_after)) {
            tracing::warn!(reason = failure.reason, "a damaged database did not close");
        }
    }
}

/// Why a database that opened is still not to be believed. sled reads a shortened log, or none, as a
/// database with less in it, and a page whose newest part is gone as it was before. But a database
/// of ours is born with a barrier, and the mirror is only written of barriers that are durable.
fn disbelief(loaded: &Loaded, mirror: &Found) -> Option<String> {
    let Some(barrier) = loaded.barrier else {
        return Some("it has lost its first record".to_owned());
    };
    if barrier.digest != loaded.contents.digest() {
        return Some("its records are not those of its last barrier".to_owned());
    }
    match mirror {
        Found::Contents(mirror) if barrier.sequence < mirror.sequence => Some(format!(
            "it ends at barrier {}, the mirror at {}",
            barrier.sequence, mirror.sequence
        )),
        _ => None,
    }
}

/// The first start in this directory.
fn begin(files: &Files, options: &Options) -> Recovered {
    let contents = Contents::new(1, []);
    let engine = rebuild(files, &contents, Old::Remove, options.stuck_after);
    let (state, failure) = state_of(engine, options);
    Recovered {
        contents,
        state,
        failure,
        source: Source::Empty { lost: false },
        problems: Vec::new(),
    }
}

/// The database is given up: set it aside and build another one from the mirror.
fn from_mirror(
    files: &Files,
    options: &Options,
    mirror: Found,
    damage: &str,
    mut problems: Vec<String>,
) -> io::Result<Recovered> {
    let mut aside = vec![files.database()];
    let lost = Contents::new(1, []);
    let (contents, source) = match mirror {
        Found::Contents(contents) => (contents, Source::Mirror),
        Found::Missing => (lost, Source::Empty { lost: true }),
        Found::Unreadable(_) => {
            aside.push(files.mirror());
            (lost, Source::Empty { lost: true })
        }
    };
    let database = files.database();
    let mut problem = format!("{} cannot be used: {damage}", database.display());
    aside.retain(|path| path.exists());
    if !aside.is_empty() {
        let folder = files.set_aside(&aside)?;
        problem.push_str(&format!("; set aside in {}", folder.display()));
    }
    problems.push(problem);
    problems.push(match source {
        Source::Mirror => format!("rebuilt from {}", files.mirror().display()),
        _ => "nothing could be recovered: all leases are lost".to_owned(),
    });
    let engine = rebuild(files, &contents, Old::Remove, options.stuck_after);
    let (state, failure) = state_of(engine, options);
    Ok(Recovered {
        contents,
        state,
        failure,
        source,
        problems,
    })
}

fn state_of(engine: Result<Engine, Failure>, options: &Options) -> (State, Option<Failure>) {
    match engine {
        Ok(engine) => (State::Working(engine), None),
        Err(failure) => {
            let state = State::Broken {
                old: Old::Remove,
                retry_at: Instant::now() + options.retry_min,
                pause: options.retry_min,
            };
            (state, Some(failure))
        }
    }
}
