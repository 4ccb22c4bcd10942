//! The rules against a reference model: random sequences by seed, with a simulated clock, steps of
//! the wall clock, suspend, failing writes, crashes and reboots. A divergence prints the shortest
//! sequence that shows it.
//!
//! `NRI_LEASE_MODEL_SEED` runs one seed, `NRI_LEASE_MODEL_RUNS` that many.

#[path = "model/generate.rs"]
mod generate;
#[path = "model/reference.rs"]
mod reference;
#[path = "model/world.rs"]
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use world::{Step, World};

const STEPS: usize = 250;
const RUNS: u64 = 420;

/// Runs a sequence from nothing; Err: how and after which step it diverges.
fn run(steps: &[Step]) -> Result<(), String> {
    let all = || {
        let mut world = World::new();
        for (index, step) in steps.iter().enumerate() {
            world
                .step(step)
                .map_err(|problem| format!("after step {index}: {problem}"))?;
        }
        Ok(())
    };
    catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|_| Err("a panic".to_owned()))
}

/// Leaves out what is not needed for a divergence: halves first, then single steps.
fn shortest(mut steps: Vec<Step>) -> Vec<Step> {
    let mut chunk = steps.len().div_ceil(2);
    loop {
        let mut start = 0;
        let mut shrunk = false;
        while start < steps.len() {
            let mut fewer = steps.clone();
            fewer.drain(start..(start + chunk).min(steps.len()));
            if run(&fewer).is_err() {
                steps = fewer;
                shrunk = true;
            } else {
                start += chunk;
            }
        }
        if chunk == 1 && !shrunk {
            return steps;
        }
        chunk = (chunk / 2).max(1);
    }
}

#[test]
fn the_rules_agree_with_the_reference_model() {
    let env = |name: &str| std::env::var(name).ok().map(|v| v.parse().expect(name));
    let seeds: Vec<u64> = match env("NRI_LEASE_MODEL_SEED") {
        Some(seed) => vec![seed],
        None => (0..env("NRI_LEASE_MODEL_RUNS").unwrap_or(RUNS)).collect(),
    };
    for seed in seeds {
        let steps = generate::sequence(seed, STEPS);
        if let Err(problem) = run(&steps) {
            let steps = shortest(steps);
            let problem = run(&steps).err().unwrap_or(problem);
            let listed: Vec<String> = steps.iter().map(|step| format!("  {step:?}")).collect();
            panic!(
                "seed {seed} diverges with {} steps:\n{}\n{problem}",
                steps.len(),
                listed.join("\n")
            );
        }
    }
}
