//! The state directory: names of its files, and moving databases in and out of the way.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::{RenameFlags, renameat2};

/// Damaged databases that are kept for whoever wants to look into them.
const CORRUPT_KEPT: usize = 3;

/// Paths in one state directory.
#[derive(Clone, Debug)]
pub(super) struct Files {
    pub dir: PathBuf,
}

impl Files {
    /// Creates the directory if needed.
    pub fn create(dir: &Path) -> io::Result<Files> {
        if !dir.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            if let Some(parent) = dir.parent()
                && !parent.as_os_str().is_empty()
            {
                sync_dir(parent)?;
            }
        }
        Ok(Files {
            dir: dir.to_path_buf(),
        })
    }

    pub fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }
    pub fn database(&self) -> PathBuf {
        self.dir.join("db")
    }
    /// A database that is being built; becomes `db` in one step.
    pub fn new_database(&self) -> PathBuf {
        self.dir.join("db.new")
    }
    fn old_database(&self) -> PathBuf {
        self.dir.join("db.old")
    }
    pub fn mirror(&self) -> PathBuf {
        self.dir.join("leases.json")
    }
    pub fn new_mirror(&self) -> PathBuf {
        self.dir.join("leases.json.new")
    }

    /// Finishes or undoes what a crash interrupted.
    pub fn tidy(&self) -> io::Result<()> {
        if !self.database().exists() && self.old_database().exists() {
            fs::rename(self.old_database(), self.database())?;
        }
        remove_dir(&self.new_database())?;
        remove_dir(&self.old_database())
    }

    /// Puts `db.new` in the place of `db`, in one step where the file system can. The former `db`
    /// is then `db.new`.
    pub fn exchange(&self) -> io::Result<()> {
        let (new, current, old) = (self.new_database(), self.database(), self.old_database());
        if !current.exists() {
            fs::rename(&new, &current)?;
        } else if renameat2(
            nix::fcntl::AT_FDCWD,
            &new,
            nix::fcntl::AT_FDCWD,
            &current,
            RenameFlags::RENAME_EXCHANGE,
        )
        .is_err()
        {
            // Not every file system exchanges. `tidy` undoes a crash between the two steps.
            remove_dir(&old)?;
            fs::rename(&current, &old)?;
            fs::rename(&new, &current)?;
            fs::rename(&old, &new)?;
        }
        sync_dir(&self.dir)
    }

    pub fn remove_new_database(&self) -> io::Result<()> {
        remove_dir(&self.new_database())
    }

    /// Moves files out of the way into `corrupt-TIMESTAMP/` and removes the oldest such folders.
    pub fn set_aside(&self, paths: &[PathBuf]) -> io::Result<PathBuf> {
        let stamp = humantime::format_rfc3339_millis(SystemTime::now())
            .to_string()
            .replace([':', '.'], "-");
        let folder = self.dir.join(format!("corrupt-{stamp}"));
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        for path in paths {
            let name = path.file_name().unwrap_or(path.as_os_str());
            fs::rename(path, folder.join(name))?;
        }
        sync_dir(&self.dir)?;
        self.prune()?;
        Ok(folder)
    }

    fn prune(&self) -> io::Result<()> {
        let mut folders = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("corrupt-") {
                folders.push(entry.path());
            }
        }
        // The names sort by time.
        folders.sort();
        let surplus = folders.len().saturating_sub(CORRUPT_KEPT);
        folders[..surplus]
            .iter()
            .try_for_each(|path| remove_dir(path))
    }
}

/// Makes creations, removals and renames in `dir` durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

pub(super) fn remove_dir(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
