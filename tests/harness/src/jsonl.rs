//! A child process that is spoken to in JSON lines: one order per line on its
//! stdin, one answer per line on its stdout, matched by `id`, any number in flight.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use crate::process;

type Waiting = Arc<Mutex<Option<HashMap<u64, Sender<Value>>>>>;

/// The process; killed and reaped on drop.
pub struct JsonProcess {
    child: Child,
    stdin: Mutex<ChildStdin>,
    waiting: Waiting,
    next_id: AtomicU64,
    name: String,
}

impl JsonProcess {
    /// Starts `command` with piped stdin and stdout; stderr is left as set.
    pub fn start(name: &str, command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let stdin = child.stdin.take().context("stdin was piped")?;
        let stdout = child.stdout.take().context("stdout was piped")?;
        let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let answers = Arc::clone(&waiting);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                let Ok(answer) = serde_json::from_str::<Value>(&line) else {
                    continue;
                };
                let id = answer["id"].as_u64().unwrap_or(0);
                let mut waiting = answers.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(sender) = waiting.as_mut().and_then(|w| w.remove(&id)) {
                    // The caller may have given up waiting.
                    let _ = sender.send(answer);
                }
            }
            // Dropping the senders wakes everyone who still waits.
            answers
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
        });
        Ok(Self {
            child,
            stdin: Mutex::new(stdin),
            waiting,
            next_id: AtomicU64::new(1),
            name: name.to_owned(),
        })
    }

    /// Sends an order and returns at once; the answer arrives on the receiver,
    /// which is disconnected when the process ends first.
    pub fn send(&self, mut order: Value) -> Result<Receiver<Value>> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        order["id"] = id.into();
        let (sender, receiver) = channel();
        self.waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
            .ok_or_else(|| anyhow!("{} has ended", self.name))?
            .insert(id, sender);
        let mut line = serde_json::to_vec(&order)?;
        line.push(b'\n');
        self.stdin
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write_all(&line)
            .with_context(|| format!("writing to {}", self.name))?;
        Ok(receiver)
    }

    /// Sends an order and waits for its answer.
    pub fn call(&self, order: Value, deadline: Duration) -> Result<Value> {
        let text = order.to_string();
        self.send(order)?
            .recv_timeout(deadline)
            .map_err(|e| anyhow!("{}: no answer to {text}: {e}", self.name))
    }

    /// Pid of the process started (with a wrapper: of the wrapper).
    pub fn pid(&self) -> i32 {
        process::pid_of(&self.child)
    }

    /// True until the process started has ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// SIGKILL, and reaped.
    pub fn kill(&mut self) {
        process::kill_and_reap(&mut self.child);
    }
}

impl Drop for JsonProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
