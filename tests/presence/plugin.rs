//! Plugin processes: this very test program, started again, doing what it reads on stdin.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nri_lease::presence::{ProcessKey, proc};

const ROLE: &str = "NRI_LEASE_TEST_ROLE";

/// Where the plugin process runs.
#[derive(Clone, Copy, PartialEq)]
pub enum Place {
    Host,
    /// A network and a pid namespace of its own, under a wrapper in the host's.
    OwnNamespaces,
}

pub struct Plugin {
    /// The process started: the plugin, or the wrapper around it.
    child: Child,
    pub pid: u32,
    stdin: ChildStdin,
    answers: mpsc::Receiver<String>,
}

impl Plugin {
    pub fn start() -> Self {
        Self::start_in(Place::Host)
    }

    pub fn start_in(place: Place) -> Self {
        Self::spawn(place, Stdio::inherit())
    }

    /// A plugin as a runtime launches it: with a connected, unnamed socket (at descriptor 2).
    pub fn launched(socket: UnixStream) -> Self {
        Self::spawn(Place::Host, OwnedFd::from(socket).into())
    }

    fn spawn(place: Place, stderr: Stdio) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut command = match place {
            Place::Host => Command::new(program),
            Place::OwnNamespaces => {
                let mut unshare = Command::new("unshare");
                unshare.args(["--net", "--pid", "--fork", "--kill-child"]);
                unshare.arg(program);
                unshare
            }
        };
        command.args(["--exact", "plugin::plugin_process", "--nocapture"]);
        command.env(ROLE, "plugin");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(stderr).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            // The test harness prints lines of its own, and does not end the first one.
            for line in stdout.lines().map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once('@') {
                    let _ = sender.send(answer.to_owned());
                }
            }
        });
        let mut plugin = Self {
            pid: child.id(),
            child,
            stdin,
            answers,
        };
        plugin.ask("ready");
        if place == Place::OwnNamespaces {
            plugin.pid = proc::descendants(plugin.child.id(), 16)[0];
        }
        plugin
    }

    pub fn key(&self) -> ProcessKey {
        nri_lease::presence::proc::key_of(self.pid).unwrap()
    }

    /// The wrapper around it, if there is one.
    pub fn wrapper_pid(&self) -> u32 {
        self.child.id()
    }

    fn ask(&mut self, command: &str) -> u64 {
        writeln!(self.stdin, "{command}").unwrap();
        let answer = self.answers.recv_timeout(Duration::from_secs(20)).unwrap();
        answer.parse().unwrap()
    }

    /// Connects; returns the inode of its socket, which is also its name in this protocol.
    pub fn connect(&mut self, path: &Path) -> u64 {
        self.ask(&format!("connect {}", path.display()))
    }

    /// Connects with a socket that a thread in another network namespace has made.
    pub fn connect_from_another_netns(&mut self, path: &Path) -> u64 {
        self.ask(&format!("connect-elsewhere {}", path.display()))
    }

    pub fn close(&mut self, inode: u64) {
        self.ask(&format!("close {inode}"));
    }

    /// Starts a child that keeps the socket open; returns its pid. It ends with `end`.
    pub fn share_with_child(&mut self, inode: u64) -> ChildOfPlugin {
        ChildOfPlugin(self.ask(&format!("share {inode}")) as u32)
    }

    /// SIGKILL, and waits until it has been torn down. Does not reap it before that: a zombie
    /// must not count either.
    pub fn kill(&mut self) {
        let key = self.key();
        kill(Pid::from_raw(self.pid as i32), Signal::SIGKILL).unwrap();
        super::eventually("the plugin to be torn down", || {
            nri_lease::presence::proc::key_of(self.pid).ok() != Some(key)
                || proc::socket_inodes(self.pid).is_err()
                || std::fs::read_dir(format!("/proc/{}/fd", self.pid))
                    .map_or(true, |mut fds| fds.next().is_none())
        });
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct ChildOfPlugin(pub u32);

impl Drop for ChildOfPlugin {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0 as i32), Signal::SIGKILL);
    }
}

/// The other side of the protocol. Does nothing in an ordinary test run.
#[test]
fn plugin_process() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let mut sockets: HashMap<u64, UnixStream> = HashMap::new();
    let mut children = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match command {
            "ready" => 0,
            "connect" => keep(&mut sockets, UnixStream::connect(argument).unwrap()),
            "connect-elsewhere" => {
                let path = argument.to_owned();
                let elsewhere = std::thread::spawn(move || {
                    unshare(CloneFlags::CLONE_NEWNET).unwrap();
                    UnixStream::connect(path).unwrap()
                });
                keep(&mut sockets, elsewhere.join().unwrap())
            }
            "close" => {
                sockets.remove(&argument.parse().unwrap()).unwrap();
                0
            }
            "share" => {
                let socket = &sockets[&argument.parse().unwrap()];
                let flags = FcntlArg::F_SETFD(FdFlag::empty());
                fcntl(socket.as_fd(), flags).unwrap();
                let child = Command::new("sleep").arg("120").spawn().unwrap();
                assert!(socket.as_raw_fd() > 2);
                let pid = child.id();
                children.push(child);
                u64::from(pid)
            }
            other => panic!("unknown command {other}"),
        };
        println!("@{answer}");
    }
    // The parent has closed stdin: nothing of the harness needs to run.
    std::process::exit(0);
}

fn keep(sockets: &mut HashMap<u64, UnixStream>, socket: UnixStream) -> u64 {
    let inode = nix::sys::stat::fstat(&socket).unwrap().st_ino;
    sockets.insert(inode, socket);
    inode
}
