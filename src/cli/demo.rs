//! `demo`: the whole story in a scratch directory with a simulated runtime.
//!
//! The place for it. It needs the daemon and the simulated runtime of `tests/sim`, so it is put
//! together where both are; until then the command is hidden and says so.

use super::Session;
use super::error::{CliError, Complaint};

pub async fn run(_session: &Session) -> Result<(), CliError> {
    Err(CliError::Failed(Complaint::new(
        "run the demo",
        "this build has none",
        "Try a real daemon: nri-leased --help",
    )))
}
