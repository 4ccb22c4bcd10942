//! `completions`, `man`: made from the same definition that parses the command line.

use std::path::{Path, PathBuf};

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
    /// Write nri-lease.1, a page for each command, and nri-leased.8 into this directory.
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
        Some(dir) => clap_mangen::generate_to(command(), &dir)
            .and_then(|()| daemon_page(&dir.join("nri-leased.8")))
            .map_err(failed),
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command())
                .render(&mut page)
                .map_err(failed)?;
            session.out.write(&String::from_utf8_lossy(&page))
        }
    }
}

fn daemon_page(path: &Path) -> std::io::Result<()> {
    let mut page = Vec::new();
    clap_mangen::Man::new(crate::main_daemon::command())
        .section("8")
        .render(&mut page)?;
    std::fs::write(path, page)
}
