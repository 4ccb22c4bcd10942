//! The simulated plugin as a process: `nri-lease-sim-plugin SOCKET NAME INDEX [--OPTION VALUE]…`.

use nri_lease_sim::plugin::Command;
use std::process::ExitCode;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match Command::parse(std::env::args().skip(1)) {
        Ok(command) => command.run().await,
        Err(error) => {
            eprintln!("nri-lease-sim-plugin: {error}");
            ExitCode::from(2)
        }
    }
}
