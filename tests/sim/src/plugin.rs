//! The other side: a small NRI plugin, to be run in a process of its own.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a plugin does in a hook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Behaviour {
    /// Answers at once.
    #[default]
    Answer,
    /// Answers after so long.
    Delay(Duration),
    /// Never answers.
    Hang,
    /// Answers with an error: the runtime rejects the request.
    Refuse(String),
    /// The process exits with this code, without an answer.
    Exit(i32),
    /// The connection is closed, the process lives on.
    Disconnect,
}

/// How a simulated plugin behaves.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Event mask as in Configure's answer; 0 is everything the runtime knows.
    pub events: i32,
    pub in_run_pod_sandbox: Behaviour,
    pub in_create_container: Behaviour,
    pub in_synchronize: Behaviour,
    /// In ValidateContainerAdjustment: `Refuse` is an answer with `reject` set.
    pub in_validate: Behaviour,
    /// CDI devices that it adds to every container it sees created.
    pub cdi_devices: Vec<String>,
    /// Answers UNIMPLEMENTED to the RPCs that NRI 0.12 added, as plugins built with older ones do.
    pub state_change_only: bool,
}

/// What a plugin has seen.
#[derive(Clone, Debug, Default)]
pub struct Record {
    pub pods: Vec<String>,
    pub containers: Vec<String>,
    pub validated: Vec<Validated>,
    pub synchronized: usize,
    pub synchronize_messages: usize,
    pub synchronized_pods: usize,
    pub synchronized_containers: usize,
    pub calls: Vec<String>,
}

/// One validation request, as the plugin saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validated {
    pub container: String,
    pub plugins: Vec<(String, String)>,
    pub cdi_devices: Vec<String>,
}

/// A connected plugin.
pub struct Plugin {
    record: Arc<Mutex<Record>>,
}

impl Plugin {
    /// Connects and registers; returns when the runtime has answered, before Synchronize.
    pub async fn connect(
        _socket: &Path,
        _name: &str,
        _index: &str,
        _options: Options,
    ) -> io::Result<Plugin> {
        unimplemented!()
    }

    /// A copy of what it has seen.
    pub fn record(&self) -> Record {
        self.record
            .lock()
            .expect("no holder of this lock panics")
            .clone()
    }

    /// Waits until the runtime has synchronised it.
    pub async fn wait_synchronized(&self, _limit: Duration) -> bool {
        unimplemented!()
    }

    /// Waits until the connection has ended.
    pub async fn closed(&self) {
        unimplemented!()
    }

    /// Closes the connection.
    pub async fn close(self) {
        unimplemented!()
    }
}

/// A whole plugin process: connects, serves until the runtime closes the connection, connects
/// again, until it is told to stop by SIGTERM or SIGINT. Prints one line per step on stdout.
pub async fn run(_socket: &Path, _name: &str, _index: &str, _options: Options) -> ExitCode {
    unimplemented!()
}
