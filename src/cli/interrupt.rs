//! SIGINT and SIGTERM, for the commands that run until they are told to stop.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::error::{CliError, Complaint};

/// From its making on, both signals are noted instead of ending the process.
pub struct Interrupt {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupt {
    /// Takes over the signals.
    ///
    /// # Errors
    /// [`CliError::Failed`] when the kernel refuses the handlers.
    pub fn listen() -> Result<Interrupt, CliError> {
        let take = |kind| {
            signal(kind).map_err(|error| {
                CliError::Failed(Complaint::new("listen for signals", error.to_string(), ""))
            })
        };
        Ok(Interrupt {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
        })
    }

    /// Returns when one of them has come, and its name.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}
