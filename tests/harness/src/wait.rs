//! Waiting for a condition, with a deadline: the only way tests here wait.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(5);

/// Long enough for anything that is not broken, on a machine shared with builds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Looks until `condition` gives a value; fails after `deadline`, naming `what`.
pub fn wait_for<T>(
    what: &str,
    deadline: Duration,
    mut condition: impl FnMut() -> Option<T>,
) -> Result<T> {
    let begin = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if begin.elapsed() > deadline {
            bail!("waited {deadline:?} in vain for {what}");
        }
        std::thread::sleep(POLL);
    }
}

/// [`wait_for`] a truth.
pub fn wait_until(
    what: &str,
    deadline: Duration,
    mut condition: impl FnMut() -> bool,
) -> Result<()> {
    wait_for(what, deadline, || condition().then_some(()))
}
