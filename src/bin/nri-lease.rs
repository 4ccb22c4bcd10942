//! The command line. Everything is in `nri_lease::cli`, so that man pages and completions can be
//! made from the same definitions.

use std::process::ExitCode;

fn main() -> ExitCode {
    nri_lease::cli::main()
}
