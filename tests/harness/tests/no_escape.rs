//! No pod escapes: a required plugin that is late, dead, half back or not itself, on every
//! containerd. What DESIGN section 4 promises, seen from the kubelet's side.

#[path = "no_escape/away.rs"]
mod away;
#[path = "no_escape/connections.rs"]
mod connections;
#[path = "no_escape/first.rs"]
mod first;
#[path = "no_escape/node.rs"]
mod node;
#[path = "no_escape/order.rs"]
mod order;
#[path = "no_escape/restarts.rs"]
mod restarts;

use std::process::ExitCode;

use nri_lease_harness::Result;
use nri_lease_harness::containerd::Version;
use nri_lease_harness::runner::{self, Test};

type Run = fn(Version) -> Result<()>;

fn main() -> ExitCode {
    let all: Vec<(&str, Run)> = [
        away::TESTS,
        connections::TESTS,
        order::TESTS,
        restarts::TESTS,
    ]
    .concat();
    let mut tests = vec![];
    for version in Version::ALL {
        for (name, run) in &all {
            let run = *run;
            tests.push(Test::new(
                format!("{}::{name}", version.folder()),
                move |_| run(version),
            ));
        }
    }
    for (name, run) in first::TESTS {
        let run = *run;
        tests.push(Test::new(*name, move |_| run(Version::V2_3)));
    }
    runner::main(1, tests)
}
