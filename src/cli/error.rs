//! How a command ends when it does not succeed: what was attempted, what is wrong, what to do,
//! and the exit code that scripts rely on (docs: "Exit codes").

use std::fmt;

/// What a person is told: "cannot ATTEMPT: PROBLEM" and, on a second line, the next step.
#[derive(Debug)]
pub struct Complaint {
    /// Completes "cannot …", such as `list the leases`.
    pub attempt: String,
    /// What is wrong.
    pub problem: String,
    /// What the person can do; empty when the problem says it already.
    pub remedy: String,
}

impl Complaint {
    pub fn new(
        attempt: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Complaint {
            attempt: attempt.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: {}", self.attempt, self.problem)?;
        if !self.remedy.is_empty() {
            write!(f, "\n  {}", self.remedy)?;
        }
        Ok(())
    }
}

/// The ways a command fails, one for each exit code.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Exit code 1.
    #[error("{0}")]
    Failed(Complaint),
    /// Exit code 2: what was typed, or a file that was named, is not valid.
    #[error("{0}")]
    Usage(Complaint),
    /// Exit code 3.
    #[error("{0}")]
    NotFound(Complaint),
    /// Exit code 4: no daemon, or none that answers in time.
    #[error("{0}")]
    Unreachable(Complaint),
    /// Exit code 5.
    #[error("{0}")]
    NotPermitted(Complaint),
    /// The reader of our output left (`| head`): no error to anyone. Exit code 0, no message.
    #[error("the reader of the output is gone")]
    BrokenPipe,
    /// The output has already said what is wrong (`doctor`). Exit code 1, no message.
    #[error("problems were found")]
    ProblemsFound,
}

impl CliError {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::BrokenPipe => 0,
            CliError::Failed(_) | CliError::ProblemsFound => 1,
            CliError::Usage(_) => 2,
            CliError::NotFound(_) => 3,
            CliError::Unreachable(_) => 4,
            CliError::NotPermitted(_) => 5,
        }
    }

    /// What goes to stderr; `None` where nothing is left to say.
    pub fn message(&self) -> Option<String> {
        match self {
            CliError::BrokenPipe | CliError::ProblemsFound => None,
            other => Some(other.to_string()),
        }
    }
}

/// Writing the output failed.
impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => CliError::BrokenPipe,
            _ => CliError::Failed(Complaint::new("write the output", error.to_string(), "")),
        }
    }
}
