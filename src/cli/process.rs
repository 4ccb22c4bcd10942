//! The process that `--pid` names: who it is, and when it ends.

use std::os::fd::OwnedFd;

use nix::poll::PollFlags;
use nri_lease_proto::lease::types::Subject;
use nri_lease_proto::protobuf::MessageField;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::error::{CliError, Complaint};
use super::polled;

/// A handle on a process that cannot come to mean another one.
pub struct Watched(OwnedFd);

impl Watched {
    /// Opens the process.
    ///
    /// # Errors
    /// [`CliError::NotFound`] when there is none with this pid, [`CliError::Failed`] when the
    /// kernel has no pidfd (before Linux 5.3).
    pub fn open(pid: i32) -> Result<Watched, CliError> {
        let opened = Pid::from_raw(pid)
            .ok_or(Errno::SRCH)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let attempt = format!("watch the process {pid}");
        match opened {
            Ok(fd) => Ok(Watched(fd)),
            Err(Errno::SRCH) => Err(CliError::NotFound(Complaint::new(
                attempt,
                "there is no such process",
                "Is it the pid in this pid namespace? ps -e",
            ))),
            Err(error) => Err(CliError::Failed(Complaint::new(
                attempt,
                error.to_string(),
                "",
            ))),
        }
    }

    /// Returns when the process has ended (a pidfd becomes readable then, pidfd_open(2)).
    pub async fn ended(self) {
        polled::ready(self.0, PollFlags::POLLIN).await;
    }
}

/// The process for the protocol. Its start time goes along where /proc shows it, so that a pid
/// that is reused before the daemon looks does not become the holder.
pub fn subject(pid: i32) -> MessageField<Subject> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    MessageField::some(Subject {
        pid: pid.unsigned_abs(),
        start_time: start_time(&stat).unwrap_or(0),
        ..Default::default()
    })
}

/// Field 22 of /proc/PID/stat. The name in field 2 may have spaces and brackets, so fields are
/// counted after the last bracket, where field 3 begins (proc(5)).
fn start_time(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_is_found_behind_a_name_with_brackets() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 1 2";
        assert_eq!(start_time(stat), Some(4711));
        assert_eq!(start_time("7 (cut"), None);
        assert_eq!(start_time(""), None);
    }
}
