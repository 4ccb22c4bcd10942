//! The accept side of an NRI runtime: a listening socket and a loop that takes one connection at
//! a time, as far as the test allows. Says and reads nothing.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

pub struct Runtime {
    pub path: PathBuf,
    state: Arc<Mutex<State>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    /// How many more connections may be accepted.
    permits: u64,
    accepted: Vec<(u32, UnixStream)>,
    total: u64,
}

impl Runtime {
    /// Listens at `path`; accepts without limit until told otherwise.
    pub fn start(path: &Path) -> Self {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let state = Arc::new(Mutex::new(State {
            permits: u64::MAX,
            accepted: Vec::new(),
            total: 0,
        }));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (state, stop) = (state.clone(), stop.clone());
            move || accept_loop(&listener, &state, &stop)
        });
        Self {
            path: path.to_owned(),
            state,
            stop,
            thread: Some(thread),
        }
    }

    /// Accepts `count` more connections and then no others, as a loop that is busy.
    pub fn allow(&self, count: u64) {
        self.state.lock().unwrap().permits = count;
    }

    pub fn allow_all(&self) {
        self.allow(u64::MAX);
    }

    /// Connections accepted from this process and not closed here.
    pub fn connections_of(&self, pid: u32) -> usize {
        let state = self.state.lock().unwrap();
        state.accepted.iter().filter(|(p, _)| *p == pid).count()
    }

    pub fn accepted_in_all(&self) -> u64 {
        self.state.lock().unwrap().total
    }

    /// Closes the oldest connection of a process, as after a timeout.
    pub fn close_oldest_of(&self, pid: u32) {
        drop(self.take_oldest_of(pid));
    }

    /// The same while a child of the runtime has a copy of its end, as between fork and exec.
    pub fn close_oldest_of_during_a_fork(&self, pid: u32) -> Child {
        let connection = self.take_oldest_of(pid);
        let flags = FcntlArg::F_SETFD(FdFlag::empty());
        fcntl(connection.as_fd(), flags).unwrap();
        let child = Command::new("sleep").arg("120").spawn().unwrap();
        drop(connection);
        child
    }

    /// shutdown(2) without close(2).
    pub fn shut_down_oldest_of(&self, pid: u32) {
        let state = self.state.lock().unwrap();
        let found = state.accepted.iter().find(|(p, _)| *p == pid);
        let (_, connection) = found.expect("a connection to shut down");
        connection.shutdown(Shutdown::Both).unwrap();
    }

    fn take_oldest_of(&self, pid: u32) -> UnixStream {
        let mut state = self.state.lock().unwrap();
        let at = state.accepted.iter().position(|(p, _)| *p == pid);
        state.accepted.remove(at.expect("a connection to close")).1
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn accept_loop(listener: &UnixListener, state: &Mutex<State>, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut fds, PollTimeout::from(2u8));
        let mut state = state.lock().unwrap();
        if state.permits == 0 {
            drop(state);
            // Busy: look again a little later, as often as the poll above would.
            std::thread::park_timeout(Duration::from_millis(1));
            continue;
        }
        match listener.accept() {
            Ok((stream, _)) => {
                let pid = getsockopt(&stream, PeerCredentials).unwrap().pid();
                state.permits -= 1;
                state.total += 1;
                state.accepted.push((pid as u32, stream));
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => panic!("accept: {e}"),
        }
    }
}
