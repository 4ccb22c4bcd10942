//! Building blocks for a demonstration, and for whole-program tests: a scratch directory, child
//! processes whose output can be waited for, steps that are told while they happen.
//!
//! It knows nothing of the daemon: what to start is a command line given by the caller.

use crate::runtime::lock;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Lines kept of a child's output; the oldest go first.
const MAX_LINES: usize = 4096;
/// A longer line is cut into several.
const MAX_LINE_BYTES: u64 = 8 << 10;
/// How often a child is asked whether it still runs while somebody waits for its end.
const POLL: Duration = Duration::from_millis(5);

/// A directory of one's own, removed at the end. Its path is short: it has to hold unix sockets,
/// whose paths may have 107 bytes.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes `TMPDIR/PREFIX-XXXXXX`, accessible to this user only.
    pub fn new(prefix: &str) -> io::Result<Scratch> {
        let template = std::env::temp_dir().join(format!("{prefix}-XXXXXX"));
        let path = nix::unistd::mkdtemp(&template)?;
        Ok(Scratch { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path inside, which need not exist.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Makes a directory inside.
    pub fn directory(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // It is in the directory for temporary files: leaving something there is no failure.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// A command line to start.
#[derive(Clone, Debug)]
pub struct CommandLine {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    pub env: Vec<(OsString, OsString)>,
    /// It becomes the leader of a process group: Ctrl-C on the terminal does not reach it, so that
    /// its parent can end it in order.
    pub own_group: bool,
}

impl CommandLine {
    pub fn new(program: impl Into<PathBuf>) -> Self {
        CommandLine {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            own_group: false,
        }
    }

    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    pub fn own_group(mut self) -> Self {
        self.own_group = true;
        self
    }

    /// Starts it, with its output kept. Must be called inside a tokio runtime.
    pub fn start(&self) -> io::Result<Process> {
        let mut command = std::process::Command::new(&self.program);
        if self.own_group {
            command.process_group(0);
        }
        let mut child = command
            .args(&self.args)
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let output = Arc::new(Output::default());
        if let Some(stdout) = child.stdout.take() {
            output.clone().follow(stdout)?;
        }
        if let Some(stderr) = child.stderr.take() {
            output.clone().follow(stderr)?;
        }
        Ok(Process { child, output })
    }
}

/// A running child process. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    output: Arc<Output>,
}

impl Process {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The last lines of its stdout and stderr, in the order they came.
    pub fn output(&self) -> Vec<String> {
        lock(&self.output.lines).iter().cloned().collect()
    }

    /// Waits for a line that is wanted, those of the past included.
    pub async fn wait_for_line(
        &self,
        limit: Duration,
        wanted: impl Fn(&str) -> bool,
    ) -> Option<String> {
        let mut changed = self.output.changed.subscribe();
        let wait = async {
            loop {
                let found = lock(&self.output.lines)
                    .iter()
                    .find(|line| wanted(line))
                    .cloned();
                if found.is_some() {
                    return found;
                }
                changed.changed().await.ok()?;
            }
        };
        tokio::time::timeout(limit, wait).await.ok().flatten()
    }

    /// Sends a signal. Its pid cannot be another's: only this handle can reap it.
    pub fn signal(&mut self, signal: Signal) -> io::Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        let pid = i32::try_from(self.child.id()).map_err(io::Error::other)?;
        kill(Pid::from_raw(pid), signal).map_err(io::Error::from)
    }

    /// Waits until it has ended; None after `limit`.
    pub async fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// SIGTERM, and SIGKILL when it does not end within `limit`.
    pub async fn terminate(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        match self.wait(limit).await? {
            Some(status) => Ok(status),
            None => self.kill(),
        }
    }

    /// SIGKILL; on return it is gone.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a child has written.
#[derive(Debug)]
struct Output {
    lines: Mutex<VecDeque<String>>,
    changed: watch::Sender<()>,
}

impl Default for Output {
    fn default() -> Self {
        Output {
            lines: Mutex::default(),
            changed: watch::Sender::new(()),
        }
    }
}

impl Output {
    /// Reads in a thread of its own, which ends with the stream.
    fn follow(self: Arc<Self>, stream: impl Read + Send + 'static) -> io::Result<()> {
        std::thread::Builder::new()
            .name("child output".into())
            .spawn(move || {
                let mut reader = BufReader::new(stream);
                let mut bytes = Vec::new();
                loop {
                    bytes.clear();
                    let mut line = reader.by_ref().take(MAX_LINE_BYTES);
                    match line.read_until(b'\n', &mut bytes) {
                        Ok(0) | Err(_) => return,
                        Ok(_) => self.push(String::from_utf8_lossy(bytes.trim_ascii_end()).into()),
                    }
                }
            })?;
        Ok(())
    }

    fn push(&self, line: String) {
        {
            let mut lines = lock(&self.lines);
            if lines.len() == MAX_LINES {
                lines.pop_front();
            }
            lines.push_back(line);
        }
        self.changed.send_replace(());
    }
}

/// Tells a story step by step, with the time since its beginning.
#[derive(Debug)]
pub struct Teller<W> {
    out: W,
    began: Instant,
    step: usize,
}

impl<W: Write> Teller<W> {
    pub fn new(out: W) -> Self {
        Teller {
            out,
            began: Instant::now(),
            step: 0,
        }
    }

    /// A new step: what is about to happen.
    pub fn step(&mut self, what: impl fmt::Display) -> io::Result<()> {
        self.step += 1;
        let seconds = self.began.elapsed().as_secs_f64();
        writeln!(self.out, "\n{:>2}. [{seconds:6.3} s] {what}", self.step)?;
        self.out.flush()
    }

    /// What came of it; several lines are each indented.
    pub fn detail(&mut self, what: impl fmt::Display) -> io::Result<()> {
        for line in what.to_string().lines() {
            writeln!(self.out, "      {line}")?;
        }
        self.out.flush()
    }

    /// Steps told so far.
    pub fn steps(&self) -> usize {
        self.step
    }

    pub fn into_inner(self) -> W {
        self.out
    }
}
