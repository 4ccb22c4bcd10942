//! The daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    nri_lease::main_daemon::main()
}
