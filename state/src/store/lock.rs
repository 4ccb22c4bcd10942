//! One process per state directory. A lock of our own beside sled's, because ours can say who has it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::error::OpenError;
use super::files::Files;

/// Held until dropped, or until the process ends however it ends.
#[derive(Debug)]
pub(super) struct Lock {
    _file: Flock<File>,
}

impl Lock {
    pub fn take(files: &Files) -> Result<Lock, OpenError> {
        let path = &files.dir;
        let failed = |source| OpenError::Directory {
            path: path.clone(),
            source,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(files.lock())
            .map_err(failed)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut file) => {
                leave_name(&mut file).map_err(failed)?;
                Ok(Lock { _file: file })
            }
            Err((mut file, Errno::EWOULDBLOCK)) => Err(OpenError::InUse {
                path: path.clone(),
                pid: read_name(&mut file),
            }),
            Err((_, errno)) => Err(failed(errno.into())),
        }
    }
}

/// A full disk must not keep the daemon from starting: the name is a courtesy, the lock is not.
fn leave_name(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    match writeln!(file, "{}", std::process::id()) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Ok(()),
        written => written,
    }
}

fn read_name(file: &mut File) -> u32 {
    let mut text = String::new();
    match file.take(16).read_to_string(&mut text) {
        Ok(_) => text.trim().parse().unwrap_or(0),
        Err(_) => 0,
    }
}

/// Which process has sled's lock on `path`, from /proc/locks; 0 when it cannot be told.
pub(super) fn holder_of(path: &Path) -> u32 {
    let (Ok(metadata), Ok(locks)) = (path.metadata(), std::fs::read_to_string("/proc/locks"))
    else {
        return 0;
    };
    // "1: FLOCK  ADVISORY  WRITE 708 fe:00:263 0 EOF": pid, then device and inode.
    let inode = format!(":{}", metadata.ino());
    locks
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.get(1) == Some(&"FLOCK"))
        .find(|fields| fields.get(5).is_some_and(|file| file.ends_with(&inode)))
        .and_then(|fields| fields.get(4)?.parse().ok())
        .unwrap_or(0)
}
