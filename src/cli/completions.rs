//! `completions`, `man`: made from the same definition that parses the command line.

use std::path::PathBuf;

use clap_complete::Shell;

use super::error::{CliError, Complaint};
use super::{Session, command};

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub struct Args {
    shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Write nri-lease.1 and a page for each command into this directory.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub fn completions(args: Args, session: &Session) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "nri-lease", &mut script);
    session.out.write(&String::from_utf8_lossy(&script))
}

pub fn man(args: ManArgs, session: &Session) -> Result<(), CliError> {
    let failed = |error: std::io::Error| {
        CliError::Failed(Complaint::new(
            "write the manual pages",
            error.to_string(),
            "Name a directory that exists and that you may write to.",
        ))
    };
    match args.dir {
        Some(dir) => clap_mangen::generate_to(command(), dir).map_err(failed),
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command())
                .render(&mut page)
                .map_err(failed)?;
            session.out.write(&String::from_utf8_lossy(&page))
        }
    }
}
