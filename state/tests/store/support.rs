//! What several of these tests need.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nri_lease_state::store::{Opened, Options, Store, Tree, Write};

/// Long enough for a loaded machine, short enough to notice a hang.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn options() -> Options {
    Options {
        soon_delay: Duration::from_millis(5),
        mirror_delay: Duration::from_millis(5),
        retry_min: Duration::from_millis(20),
        retry_max: Duration::from_millis(200),
        ..Options::default()
    }
}

pub fn open(dir: &Path) -> Opened {
    Store::open(dir, options()).expect("the store opens")
}

pub fn set(tree: Tree, key: &str, value: impl ToString) -> Write {
    Write {
        tree,
        key: key.to_owned(),
        value: Some(value.to_string().into_bytes()),
    }
}

pub fn remove(tree: Tree, key: &str) -> Write {
    Write {
        tree,
        key: key.to_owned(),
        value: None,
    }
}

/// The records of one tree, as text.
pub fn tree(opened: &Opened, wanted: Tree) -> BTreeMap<String, String> {
    opened
        .records
        .iter()
        .filter(|(tree, _, _)| *tree == wanted)
        .map(|(_, key, value)| (key.clone(), String::from_utf8_lossy(value).into_owned()))
        .collect()
}

pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// This test binary again, running the one ignored test `name` as a process of its own.
pub fn child(name: &str, dir: &Path, wrapper: &[&str]) -> Command {
    let own = std::env::current_exe().expect("the path of the running test");
    let mut command = match wrapper {
        [] => Command::new(&own),
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).arg(&own);
            command
        }
    };
    command
        .args([
            "--exact",
            name,
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("STORE_TEST_DIR", dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

/// The directory a child was given; `None` when somebody runs the ignored tests by hand.
pub fn child_dir() -> Option<std::path::PathBuf> {
    std::env::var_os("STORE_TEST_DIR").map(Into::into)
}
