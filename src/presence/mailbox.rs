//! How the tracker's thread is told things: a queue, and a socket that wakes it from poll(2).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak, mpsc};

use super::actor::Command;

/// The sending side. The thread ends when the last clone is gone.
#[derive(Clone)]
pub(super) struct Mailbox(Arc<Inner>);

/// A sending side that does not keep the thread alive: for the view, which the thread owns.
#[derive(Clone, Default)]
pub(super) struct WeakMailbox(Weak<Inner>);

struct Inner {
    sender: mpsc::Sender<Command>,
    wake: UnixStream,
}

/// The thread's side.
pub(super) struct Inbox {
    receiver: mpsc::Receiver<Command>,
    pub wake: UnixStream,
}

pub(super) fn open() -> io::Result<(Mailbox, Inbox)> {
    let (sender, receiver) = mpsc::channel();
    let (wake, woken) = UnixStream::pair()?;
    wake.set_nonblocking(true)?;
    woken.set_nonblocking(true)?;
    let inner = Inner { sender, wake };
    let inbox = Inbox {
        receiver,
        wake: woken,
    };
    Ok((Mailbox(Arc::new(inner)), inbox))
}

impl Mailbox {
    /// Never blocks. A thread that is gone takes no messages; then its answers do not come.
    pub(super) fn send(&self, command: Command) {
        if self.0.sender.send(command).is_ok() {
            // A full socket has woken the thread already.
            let _ = (&self.0.wake).write(&[1]);
        }
    }

    pub(super) fn downgrade(&self) -> WeakMailbox {
        WeakMailbox(Arc::downgrade(&self.0))
    }
}

impl WeakMailbox {
    pub(super) fn send(&self, command: Command) {
        if let Some(inner) = self.0.upgrade() {
            Mailbox(inner).send(command);
        }
    }
}

impl Inbox {
    /// Empties the wake-up socket. Before the queue is read, or a message could be missed.
    pub(super) fn drain_wake(&mut self) {
        let mut buffer = [0; 256];
        while matches!(self.wake.read(&mut buffer), Ok(n) if n > 0) {}
    }

    /// The next message; `Err` when nobody can send any more.
    pub(super) fn next(&self) -> Result<Option<Command>, ()> {
        match self.receiver.try_recv() {
            Ok(command) => Ok(Some(command)),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => Err(()),
        }
    }
}
