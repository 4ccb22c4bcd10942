//! A test runner for `harness = false` targets that knows a third outcome:
//! *skipped*. libtest would report a test that could not run as passed.
//!
//! Arguments as libtest's where they exist: name filters, `--list`, `--exact`,
//! `--skip NAME`, `--test-threads N`; and `--seed N` (default: random, printed).
//! With `CI=true` a skipped test is a failed one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::Result;

/// The error of a test that cannot run here. Return it with `?`.
#[derive(Debug)]
pub struct Skip(String);

impl Skip {
    /// `reason` says what is missing.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// What a test is given.
#[derive(Debug, Clone, Copy)]
pub struct Ctx {
    /// Same seed, same random choices.
    pub seed: u64,
}

/// One test.
pub struct Test {
    name: String,
    run: Box<dyn Fn(Ctx) -> Result<()> + Send + Sync>,
}

impl Test {
    /// Names are behaviours, as in `container_is_refused_while_plugin_is_missing`.
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(Ctx) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }
}

enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

struct Args {
    filters: Vec<String>,
    skips: Vec<String>,
    exact: bool,
    list: bool,
    threads: usize,
    seed: u64,
}

impl Args {
    fn parse(default_threads: usize) -> Result<Self, String> {
        let mut parsed = Self {
            filters: vec![],
            skips: vec![],
            exact: false,
            list: false,
            threads: default_threads,
            seed: fastrand::u64(..),
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let (key, inline) = match arg.split_once('=') {
                Some((key, value)) if key.starts_with("--") => {
                    (key.to_owned(), Some(value.to_owned()))
                }
                _ => (arg, None),
            };
            let mut value = || {
                inline
                    .clone()
                    .or_else(|| args.next())
                    .ok_or(format!("{key} needs a value"))
            };
            let number = |text: String| text.parse::<u64>().map_err(|e| format!("{text}: {e}"));
            match key.as_str() {
                "--list" => parsed.list = true,
                "--exact" => parsed.exact = true,
                "--skip" => parsed.skips.push(value()?),
                "--test-threads" => {
                    parsed.threads = usize::try_from(number(value()?)?).unwrap_or(1).max(1);
                }
                "--seed" => parsed.seed = number(value()?)?,
                "--format" | "--color" | "--logfile" | "-Z" => drop(value()?),
                _ if key.starts_with('-') => {} // libtest's other switches mean nothing here
                _ => parsed.filters.push(key),
            }
        }
        Ok(parsed)
    }

    fn wants(&self, name: &str) -> bool {
        let matches = |filter: &String| {
            if self.exact {
                name == filter
            } else {
                name.contains(filter.as_str())
            }
        };
        (self.filters.is_empty() || self.filters.iter().any(matches))
            && !self.skips.iter().any(matches)
    }
}

/// Runs the tests that the command line asks for, `threads` at a time unless it
/// says otherwise, and prints one line each and a closing line with three counts.
pub fn main(threads: usize, tests: Vec<Test>) -> ExitCode {
    let args = match Args::parse(threads) {
        Ok(args) => args,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let tests: VecDeque<Test> = tests.into_iter().filter(|t| args.wants(&t.name)).collect();
    if args.list {
        for test in &tests {
            println!("{}: test", test.name);
        }
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests, seed {}", tests.len(), args.seed);
    let ctx = Ctx { seed: args.seed };
    let queue = Mutex::new(tests);
    let counts = Mutex::new([0_usize; 3]);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                loop {
                    let next = lock(&queue).pop_front();
                    let Some(test) = next else { break };
                    let began = Instant::now();
                    let outcome = run(&test, ctx);
                    report(&test.name, began, &outcome);
                    lock(&counts)[match outcome {
                        Outcome::Passed => 0,
                        Outcome::Failed(_) => 1,
                        Outcome::Skipped(_) => 2,
                    }] += 1;
                }
            });
        }
    });
    let [passed, failed, skipped] = *lock(&counts);
    let skips_count = std::env::var("CI").is_ok_and(|ci| ci == "true");
    let ok = failed == 0 && (skipped == 0 || !skips_count);
    println!(
        "\ntest result: {}. {passed} passed, {failed} failed, {skipped} skipped; finished in {:.2}s",
        if ok { "ok" } else { "FAILED" },
        begin.elapsed().as_secs_f64()
    );
    if !ok {
        println!("run again with: --seed {}", args.seed);
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Lines of a log worth printing when a test fails.
const EVIDENCE_LINES: usize = 40;

thread_local! {
    static EVIDENCE: RefCell<Vec<String>> = const { RefCell::new(vec![]) };
}

/// Keeps the end of a log in case the test on this thread fails. The programs a
/// test starts call it when they are dropped, which is before the runner knows.
pub fn evidence(of: &str, log: &str) {
    let lines: Vec<&str> = log.lines().collect();
    let tail = &lines[lines.len().saturating_sub(EVIDENCE_LINES)..];
    if !tail.is_empty() {
        let text = format!("-- end of the log of {of} --\n{}\n", tail.join("\n"));
        EVIDENCE.with_borrow_mut(|kept| kept.push(text));
    }
}

fn run(test: &Test, ctx: Ctx) -> Outcome {
    EVIDENCE.take();
    match catch_unwind(AssertUnwindSafe(|| (test.run)(ctx))) {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(error)) => match error.downcast_ref::<Skip>() {
            Some(Skip(reason)) => Outcome::Skipped(reason.clone()),
            None => Outcome::Failed(format!("{error:#}{}", places(&error))),
        },
        Err(panic) => Outcome::Failed(
            panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_else(|| "panicked".to_owned()),
        ),
    }
}

/// Where in our own sources the error was made: the frames of a backtrace
/// (`RUST_BACKTRACE=1`) that are neither the standard library's nor the runner's.
fn places(error: &anyhow::Error) -> String {
    let backtrace = error.backtrace().to_string();
    backtrace
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("at ./") && line.contains(".rs:"))
        .take_while(|line| !line.contains("src/runner.rs"))
        .map(|line| format!("\n  {line}"))
        .collect()
}

fn report(name: &str, began: Instant, outcome: &Outcome) {
    let seconds = began.elapsed().as_secs_f64();
    match outcome {
        Outcome::Passed => println!("test {name} ... ok <{seconds:.2}s>"),
        Outcome::Skipped(reason) => println!("test {name} ... skipped: {reason}"),
        Outcome::Failed(reason) => {
            let logs = EVIDENCE.take().concat();
            println!("test {name} ... FAILED <{seconds:.2}s>\n---- {name}: {reason}\n{logs}");
        }
    }
}

/// A poisoned lock means that a thread of the runner panicked; the data is counts and a queue.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_neither_passed_nor_failed_even_with_context() {
        let skipped = Test::new("s", |_| {
            Err(anyhow::Error::from(Skip::new("no runc")).context("starting containerd"))
        });
        let ctx = Ctx { seed: 0 };
        assert!(matches!(run(&skipped, ctx), Outcome::Skipped(reason) if reason == "no runc"));
    }

    #[test]
    fn a_panic_is_a_failure_with_its_message() {
        let panics = Test::new("p", |_| panic!("{} left", 2));
        let ctx = Ctx { seed: 0 };
        assert!(matches!(run(&panics, ctx), Outcome::Failed(reason) if reason == "2 left"));
    }
}
