//! The simulated plugin's command line, so that a test or a demonstration can start it as a process
//! of its own. Words, not a parser: it has few options and only programs write them.

use super::{Behaviour, Options};
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

/// A plugin to run.
#[derive(Clone, Debug)]
pub struct Command {
    pub socket: PathBuf,
    pub name: String,
    pub index: String,
    pub options: Options,
}

/// What is wrong with a command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    #[error("unknown option {0:?}")]
    UnknownOption(String),
    #[error("option {0} needs a value")]
    NoValue(String),
    #[error("{option} {value:?}: {expected} expected")]
    BadValue {
        option: String,
        value: String,
        expected: &'static str,
    },
}

const BEHAVIOUR: &str = "answer, delay:MS, hang, refuse:TEXT, exit:CODE or disconnect";

impl Command {
    pub fn new(socket: impl Into<PathBuf>, name: &str, index: &str) -> Self {
        Command {
            socket: socket.into(),
            name: name.into(),
            index: index.into(),
            options: Options::default(),
        }
    }

    /// Reads `SOCKET NAME INDEX [--OPTION VALUE]…`: `--events MASK`, `--in-configure`,
    /// `--in-synchronize`, `--in-run-pod-sandbox`, `--in-create-container`, `--in-validate` with a
    /// behaviour, `--cdi-device NAME` (repeatable), `--reconnect MS`, `--state-change-only`.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Command, CommandError> {
        let mut args = args.into_iter();
        let mut next = |what: &str| args.next().ok_or(CommandError::NoValue(what.into()));
        let (socket, name, index) = (next("SOCKET")?, next("NAME")?, next("INDEX")?);
        let mut command = Command::new(socket, &name, &index);
        while let Some(option) = args.next() {
            if option == "--state-change-only" {
                command.options.state_change_only = true;
                continue;
            }
            let value = args.next().ok_or(CommandError::NoValue(option.clone()))?;
            command.options.set(option, value)?;
        }
        Ok(command)
    }

    /// The arguments that [`Command::parse`] reads.
    pub fn to_args(&self) -> Vec<String> {
        let options = &self.options;
        let mut args = vec![
            self.socket.display().to_string(),
            self.name.clone(),
            self.index.clone(),
        ];
        let mut add = |option: &str, value: String| args.extend([option.into(), value]);
        add("--events", options.events.to_string());
        add("--in-configure", options.in_configure.to_string());
        add("--in-synchronize", options.in_synchronize.to_string());
        add(
            "--in-run-pod-sandbox",
            options.in_run_pod_sandbox.to_string(),
        );
        add(
            "--in-create-container",
            options.in_create_container.to_string(),
        );
        add("--in-validate", options.in_validate.to_string());
        for device in &options.cdi_devices {
            add("--cdi-device", device.clone());
        }
        if let Some(pause) = options.reconnect {
            add("--reconnect", pause.as_millis().to_string());
        }
        if options.state_change_only {
            args.push("--state-change-only".into());
        }
        args
    }

    /// Runs the plugin until it is told to stop, see [`super::run`].
    pub async fn run(self) -> ExitCode {
        super::run(&self.socket, &self.name, &self.index, self.options).await
    }
}

impl Options {
    fn set(&mut self, option: String, value: String) -> Result<(), CommandError> {
        match option.as_str() {
            "--events" => self.events = number(option, value)?,
            "--in-configure" => self.in_configure = behaviour(option, value)?,
            "--in-synchronize" => self.in_synchronize = behaviour(option, value)?,
            "--in-run-pod-sandbox" => self.in_run_pod_sandbox = behaviour(option, value)?,
            "--in-create-container" => self.in_create_container = behaviour(option, value)?,
            "--in-validate" => self.in_validate = behaviour(option, value)?,
            "--cdi-device" => self.cdi_devices.push(value),
            "--reconnect" => self.reconnect = Some(Duration::from_millis(number(option, value)?)),
            _ => return Err(CommandError::UnknownOption(option)),
        }
        Ok(())
    }
}

fn number<T: FromStr>(option: String, value: String) -> Result<T, CommandError> {
    value.parse().map_err(|_| CommandError::BadValue {
        option,
        value,
        expected: "a number",
    })
}

fn behaviour(option: String, value: String) -> Result<Behaviour, CommandError> {
    value.parse().map_err(|()| CommandError::BadValue {
        option,
        value,
        expected: BEHAVIOUR,
    })
}

impl fmt::Display for Behaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Behaviour::Answer => write!(f, "answer"),
            Behaviour::Delay(delay) => write!(f, "delay:{}", delay.as_millis()),
            Behaviour::Hang => write!(f, "hang"),
            Behaviour::Refuse(text) => write!(f, "refuse:{text}"),
            Behaviour::Exit(code) => write!(f, "exit:{code}"),
            Behaviour::Disconnect => write!(f, "disconnect"),
        }
    }
}

impl FromStr for Behaviour {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (word, value) = text.split_once(':').unwrap_or((text, ""));
        Ok(match word {
            "answer" => Behaviour::Answer,
            "delay" => Behaviour::Delay(Duration::from_millis(value.parse().map_err(drop)?)),
            "hang" => Behaviour::Hang,
            "refuse" => Behaviour::Refuse(value.into()),
            "exit" => Behaviour::Exit(value.parse().map_err(drop)?),
            "disconnect" => Behaviour::Disconnect,
            _ => return Err(()),
        })
    }
}
