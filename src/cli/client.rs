//! The way to the daemon: connects to one of its two sockets, calls it with a time limit, and
//! turns what goes wrong into an error with the matching exit code.

use std::future::Future;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nri_lease_proto::lease::admin_ttrpc::AdminClient;
use nri_lease_proto::lease::registry_ttrpc::RegistryClient;
use nri_lease_proto::ttrpc;
use tokio::net::UnixStream;
use ttrpc::Code;
use ttrpc::asynchronous::transport::Socket;

use super::error::{CliError, Complaint};
use super::render::escape;

/// Where the daemon is and how long an answer may take.
#[derive(Debug, Clone)]
pub struct Daemon {
    /// Directory of `registry.sock` and `admin.sock`.
    pub run_dir: PathBuf,
    /// Limit for connecting and for each call.
    pub timeout: Duration,
}

impl Daemon {
    /// The socket for plugins.
    pub fn registry_socket(&self) -> PathBuf {
        self.run_dir.join("registry.sock")
    }

    /// The socket for admins.
    pub fn admin_socket(&self) -> PathBuf {
        self.run_dir.join("admin.sock")
    }

    /// Connects to the socket for plugins.
    ///
    /// # Errors
    /// [`CliError::Unreachable`] or [`CliError::NotPermitted`], naming the socket.
    pub async fn registry(&self) -> Result<RegistryClient, CliError> {
        Ok(RegistryClient::new(
            self.connect(&self.registry_socket()).await?,
        ))
    }

    /// Connects to the socket for admins. Errors as for [`Daemon::registry`].
    pub async fn admin(&self) -> Result<AdminClient, CliError> {
        Ok(AdminClient::new(self.connect(&self.admin_socket()).await?))
    }

    /// The context of one call: it carries the time limit to the daemon.
    pub fn limit(&self) -> ttrpc::context::Context {
        ttrpc::context::with_duration(self.timeout)
    }

    /// Waits for a call's answer. `attempt` completes "cannot …".
    ///
    /// # Errors
    /// By the status code of the answer, see [`from_rpc`]; [`CliError::Unreachable`] when there is
    /// none within the time limit.
    pub async fn call<T>(
        &self,
        attempt: &str,
        answer: impl Future<Output = ttrpc::Result<T>>,
    ) -> Result<T, CliError> {
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(from_rpc(attempt, &error, self)),
            Err(_) => Err(no_answer(attempt, self)),
        }
    }

    async fn connect(&self, socket: &Path) -> Result<ttrpc::asynchronous::Client, CliError> {
        match tokio::time::timeout(self.timeout, UnixStream::connect(socket)).await {
            Ok(Ok(stream)) => Ok(ttrpc::asynchronous::Client::new(Socket::from(stream))),
            Ok(Err(error)) => Err(not_connected(socket, &error)),
            Err(_) => Err(no_answer(
                &format!("reach the daemon at {}", socket.display()),
                self,
            )),
        }
    }
}

fn not_connected(socket: &Path, error: &std::io::Error) -> CliError {
    let attempt = format!("reach the daemon at {}", socket.display());
    match error.kind() {
        ErrorKind::PermissionDenied => CliError::NotPermitted(Complaint::new(
            attempt,
            "permission denied",
            match socket.file_name().is_some_and(|name| name == "admin.sock") {
                true => "Run it as root: sudo nri-lease …",
                false => "Run it as root, or as a member of the group nri-lease.",
            },
        )),
        ErrorKind::NotFound => CliError::Unreachable(Complaint::new(
            attempt,
            "there is no such socket",
            "Is nri-leased running? systemctl status nri-leased; with another run directory: \
             nri-lease --run-dir DIR …",
        )),
        ErrorKind::ConnectionRefused => CliError::Unreachable(Complaint::new(
            attempt,
            "nobody listens on the socket, a daemon that ended left it behind",
            "Start nri-leased: systemctl start nri-leased",
        )),
        ErrorKind::WouldBlock => CliError::Unreachable(Complaint::new(
            attempt,
            "the daemon does not take new connections",
            "Try again; if it stays so: systemctl restart nri-leased",
        )),
        _ => CliError::Unreachable(Complaint::new(
            attempt,
            error.to_string(),
            "Look at the daemon: systemctl status nri-leased",
        )),
    }
}

fn no_answer(attempt: &str, daemon: &Daemon) -> CliError {
    CliError::Unreachable(Complaint::new(
        attempt,
        format!(
            "no answer from the daemon within {}",
            humantime::format_duration(daemon.timeout)
        ),
        "Wait longer with --timeout DUR, or look at the daemon: systemctl status nri-leased",
    ))
}

/// Turns a failed call into an error with the exit code that fits its status code.
///
/// INVALID_ARGUMENT counts as wrong usage: the value came from the command line.
pub fn from_rpc(attempt: &str, error: &ttrpc::Error, daemon: &Daemon) -> CliError {
    let ttrpc::Error::RpcStatus(status) = error else {
        // ttrpc-rust reports an elapsed deadline as text only (asynchronous/connection.rs).
        if matches!(error, ttrpc::Error::Others(text) if text.contains("deadline elapsed")) {
            return no_answer(attempt, daemon);
        }
        return CliError::Unreachable(Complaint::new(
            attempt,
            "the daemon closed the connection",
            "It may be restarting. Try again, or look at it: systemctl status nri-leased",
        ));
    };
    let problem = match status.message().is_empty() {
        true => format!("the daemon answered {:?}", status.code()),
        false => escape(status.message()),
    };
    // What the generated code answers for a method that the daemon does not have.
    let unknown_method = status.code() == Code::UNIMPLEMENTED
        || (status.code() == Code::NOT_FOUND && problem.ends_with("is not supported"));
    if unknown_method {
        return CliError::Failed(Complaint::new(
            attempt,
            problem,
            "The daemon is older than this command. Compare: nri-lease --version; nri-lease status",
        ));
    }
    let complaint = |remedy: &str| Complaint::new(attempt, problem.clone(), remedy);
    match status.code() {
        Code::NOT_FOUND => CliError::NotFound(complaint(match problem.starts_with("no lease") {
            true => "See what there is: nri-lease list",
            false => "",
        })),
        Code::PERMISSION_DENIED | Code::UNAUTHENTICATED => CliError::NotPermitted(complaint("")),
        Code::INVALID_ARGUMENT => CliError::Usage(complaint("")),
        Code::DEADLINE_EXCEEDED => no_answer(attempt, daemon),
        Code::UNAVAILABLE => CliError::Failed(complaint("See what is wrong: nri-lease doctor")),
        _ => CliError::Failed(complaint("")),
    }
}
