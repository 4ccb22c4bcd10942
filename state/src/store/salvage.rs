//! Reading a database that cannot be written to: sled writes while it opens, so on a full or
//! read-only disk a copy in memory is opened instead.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::database::Loaded;
use super::engine::{Engine, Failure};
use super::files::remove_dir;

/// What the database in `dir` holds.
pub(super) fn salvage(dir: &Path, limit: Duration) -> Result<Loaded, Failure> {
    let copy = Copy::of(dir)?;
    let (engine, loaded) = Engine::open(&copy.0, limit)?;
    engine.close(limit)?;
    Ok(loaded)
}

/// Removed when dropped.
struct Copy(PathBuf);

impl Copy {
    fn of(dir: &Path) -> io::Result<Copy> {
        let shared_memory = Path::new("/dev/shm");
        let parent = if shared_memory.is_dir() {
            shared_memory.to_path_buf()
        } else {
            std::env::temp_dir()
        };
        // A name that nobody can have taken; creating it fails if somebody has.
        let target = parent.join(format!("nri-lease-{:016x}", fastrand::u64(..)));
        DirBuilder::new().mode(0o700).create(&target)?;
        let copy = Copy(target);
        copy_files(dir, &copy.0)?;
        Ok(copy)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Err(error) = remove_dir(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "a copy of the database stays behind");
        }
    }
}

/// A database's files, and those of its one folder.
fn copy_files(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            fs::create_dir(&target)?;
            copy_files(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
