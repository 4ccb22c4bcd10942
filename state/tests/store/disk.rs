//! File systems of a test's own, which it may fill and freeze. Only root can have them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

/// Runs `test` on a thread that sees, at the path given to it, a tmpfs of `size`.
pub fn on_small_disk(size: &str, test: impl FnOnce(&Path) + Send) {
    on_own_disk(
        |disk| {
            let none = MsFlags::empty();
            Ok(mount(Some("small"), disk, Some("tmpfs"), none, Some(size))?)
        },
        test,
    );
}

/// The same with an ext4 in a file, which can be frozen.
pub fn on_freezable_disk(test: impl FnOnce(&Path) + Send) {
    on_own_disk(
        |disk| {
            let image = image_of(disk);
            std::fs::File::create(&image)?.set_len(64 << 20)?;
            run(Command::new("mkfs.ext4").arg("-q").arg(&image))?;
            mount_image(&image, disk)
        },
        test,
    );
}

/// What the device below `disk` holds.
pub fn image_of(disk: &Path) -> PathBuf {
    disk.with_extension("image")
}

pub fn mount_image(image: &Path, at: &Path) -> std::io::Result<()> {
    run(Command::new("mount")
        .args(["-o", "loop"])
        .arg(image)
        .arg(at))
}

fn run(command: &mut Command) -> std::io::Result<()> {
    let status = command.status()?;
    if status.success() {
        return Ok(());
    }
    Err(std::io::Error::other(format!("{command:?}: {status}")))
}

/// Every write to the file system waits until this is dropped.
pub struct Frozen<'a>(&'a Path);

impl<'a> Frozen<'a> {
    pub fn freeze(disk: &'a Path) -> Self {
        run(Command::new("fsfreeze").arg("-f").arg(disk)).unwrap();
        Frozen(disk)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let thawed = run(Command::new("fsfreeze").arg("-u").arg(self.0));
        assert!(thawed.is_ok() || thread::panicking(), "{thawed:?}");
    }
}

fn on_own_disk(
    mount_at: impl FnOnce(&Path) -> std::io::Result<()> + Send,
    test: impl FnOnce(&Path) + Send,
) {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: a file system of its own needs root");
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let disk = &scratch.path().join("disk");
    std::fs::create_dir(disk).unwrap();
    thread::scope(|scope| {
        let run = scope.spawn(|| {
            let none = None::<&str>;
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            let entered = unshare(CloneFlags::CLONE_NEWNS)
                .and_then(|()| mount(none, "/", none, private, none))
                .map_err(std::io::Error::from)
                .and_then(|()| mount_at(disk));
            if let Err(error) = entered {
                println!("skipped: no file system of its own: {error}");
                return;
            }
            // The namespace ends with its last thread; what sled's threads still see must be gone.
            let _unmount = Unmount(disk);
            test(disk);
        });
        if let Err(panic) = run.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

pub struct Unmount<'a>(pub &'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = umount2(self.0, MntFlags::MNT_DETACH);
    }
}
