//! Logs to standard error through a thread of its own: a log sink that blocks (a full pipe, a slow
//! journal) costs lines, never a hook's answer.

use std::io::IsTerminal;

use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};

/// Lines that may wait for the sink; further ones are dropped.
const QUEUED_LINES: usize = 8192;

/// Starts logging. Lines are written out when the guard is dropped.
///
/// # Errors
/// The level is no tracing filter.
pub fn start(log: &Log) -> Result<WorkerGuard, String> {
    let filter = EnvFilter::try_new(&log.level)
        .map_err(|error| format!("log.level: {:?} is no filter: {error}", log.level))?;
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(QUEUED_LINES)
        .lossy(true)
        .finish(std::io::stderr());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(std::io::stderr().is_terminal());
    match log.format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(guard)
}
