//! Reads a file that was named on the command line; `-` is stdin.

use std::io::Read;
use std::path::Path;

use super::error::{CliError, Complaint};

/// Larger files are refused: a scope or a pod is a few kilobytes.
const MAX_BYTES: u64 = 1 << 20;

/// The file's text. `what` completes "cannot read …".
///
/// # Errors
/// [`CliError::Usage`] when it cannot be read, is not UTF-8 or is larger than 1 MiB.
pub fn read(what: &str, path: &Path) -> Result<String, CliError> {
    let wrong = |problem: String, remedy: &str| {
        let attempt = format!("read the {what} {}", path.display());
        Err(CliError::Usage(Complaint::new(attempt, problem, remedy)))
    };
    let mut text = String::new();
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin()
            .take(MAX_BYTES + 1)
            .read_to_string(&mut text),
        false => std::fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text)),
    };
    match read {
        Ok(bytes) if bytes as u64 > MAX_BYTES => wrong(
            "it is larger than 1 MiB".to_string(),
            "Is it the right file?",
        ),
        Ok(_) => Ok(text),
        Err(error) => wrong(error.to_string(), "Name a text file, or - for stdin."),
    }
}
