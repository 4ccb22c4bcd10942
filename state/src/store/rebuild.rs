//! A fresh database from what is in memory, put in place of the old one in one step.
//!
//! This is how the store heals. Reopening the old files would not do: after a failed fdatasync the
//! kernel drops the pages it could not write, yet reads show them.

use std::time::Duration;

use super::contents::Contents;
use super::database::{Barrier, Loaded};
use super::engine::{Engine, Failure};
use super::files::Files;

/// What becomes of the database that is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Old {
    Remove,
    /// Kept in `corrupt-TIMESTAMP/`: somebody may want to know what happened.
    SetAside,
}

/// Until this returns `Ok` the old database is in place, or the new one with the same values.
pub(super) fn rebuild(
    files: &Files,
    contents: &Contents,
    old: Old,
    limit: Duration,
) -> Result<Engine, Failure> {
    let rebuilt = rebuild_beside(files, contents, limit).and_then(|()| {
        files.exchange()?;
        match old {
            Old::SetAside if files.new_database().exists() => {
                files.set_aside(&[files.new_database()])?;
            }
            _ => files.remove_new_database()?,
        }
        Ok(())
    });
    if let Err(failure) = rebuilt {
        // On a full disk a half-built database would stand in the way of the next attempt.
        let _ = files.remove_new_database();
        return Err(failure);
    }
    let (engine, loaded) = Engine::open(&files.database(), limit)?;
    if loaded.contents.records != contents.records {
        return Err(Failure::damaged(
            "the rebuilt database reads back otherwise",
        ));
    }
    Ok(engine)
}

fn rebuild_beside(files: &Files, contents: &Contents, limit: Duration) -> Result<(), Failure> {
    files.remove_new_database()?;
    let (engine, Loaded { .. }) = Engine::open(&files.new_database(), limit)?;
    let barrier = Barrier {
        sequence: contents.sequence,
        digest: contents.digest(),
    };
    engine.apply(contents.as_changes(), barrier, limit)?;
    engine.close(limit)
}
