//! `demo`: the whole story in a scratch directory. The runtime and the plugin are simulated
//! (`tests/sim`), the daemon is the real one.
//!
//! Each step of [`tell`] does something, says what it saw, and fails when that is not what the
//! daemon promises. What it takes to do so is on the [`stage`].

mod stage;

use std::io::Stdout;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nri_lease_sim::PodId;
use nri_lease_sim::plugin;
use nri_lease_sim::story::Teller;
use tokio::signal::unix::{SignalKind, signal};

use super::error::{CliError, Complaint};
use super::interrupt::Interrupt;
use super::{list, render::Output};
use stage::{PLUGIN, Registered, Stage, failed};

/// Short enough to watch it run out, and longer than everything that happens before.
const SHORT_TTL: Duration = Duration::from_secs(4);
/// Outlives the demo.
const LONG_TTL: Duration = Duration::from_secs(60);
/// A lease that has run out stops counting within this time (docs/protocol.md).
const LATE_AT_MOST: Duration = Duration::from_secs(1);
/// Between two attempts of the same pod. The kubelet's are seconds apart.
const RETRY: Duration = Duration::from_millis(100);

/// Arguments of `sim-plugin`, which the demo starts as the plugin's process.
#[derive(Debug, clap::Args)]
pub struct SimPluginArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs the simulated plugin until it is told to stop.
pub async fn sim_plugin(args: SimPluginArgs) -> Result<(), CliError> {
    let command = plugin::Command::parse(args.args).map_err(|error| {
        CliError::Usage(Complaint::new("run the plugin", error.to_string(), ""))
    })?;
    match command.run().await {
        ExitCode::SUCCESS => Ok(()),
        _ => Err(CliError::ProblemsFound),
    }
}

/// Tells the story. Whatever its end, the stage is cleared: processes first, files last.
pub async fn run(out: &Output) -> Result<(), CliError> {
    let mut interrupt = Interrupt::listen()?;
    let mut hangup = signal(SignalKind::hangup())
        .map_err(|error| failed("listen for signals", error.to_string()))?;
    let interrupted = |signal| failed("finish the demo", format!("{signal} came; nothing is left"));
    tokio::select! {
        biased;
        signal = interrupt.received() => Err(interrupted(signal)),
        _ = hangup.recv() => Err(interrupted("SIGHUP")),
        told = tell(out) => told,
    }
}

async fn tell(out: &Output) -> Result<(), CliError> {
    let mut teller = Teller::new(std::io::stdout());
    let mut stage = Stage::set().await?;
    let told = story(&mut stage, &mut Say(&mut teller, out)).await;
    match told {
        Ok(()) => stage.clear().await?,
        Err(CliError::Failed(complaint)) => {
            return Err(CliError::Failed(stage.with_evidence(complaint)));
        }
        other => return other,
    }
    Ok(teller.step("The end: all processes are stopped, all files removed")?)
}

async fn story(stage: &mut Stage, say: &mut Say<'_>) -> Result<(), CliError> {
    say.step("A container runtime starts (simulated: containerd 2.3.4), and nri-leased (real)")?;
    let pid = stage.start_daemon().await?;
    say.detail(format!(
        "nri-leased, pid {pid}, is connected to the runtime"
    ))?;
    say.detail(format!("everything is in {}", stage.directory()))?;

    say.step(format!(
        "Plugin \"{PLUGIN}\" starts and registers as required, for 4 s"
    ))?;
    let lease = register(stage, say, SHORT_TTL).await?;
    say.leases(stage, "present").await?;

    say.step("A pod is created")?;
    let web = accepted(stage, say, "web").await?;

    say.step("The plugin is killed (SIGKILL). It cannot tell anyone")?;
    stage.kill_plugin().await?;
    say.step("Another pod is created")?;
    refused(say, stage.run_pod("api").await)?;
    say.step("Another container is created, in the pod that runs")?;
    refused(say, stage.create_container(&web, "sidecar").await)?;
    say.leases(stage, "missing").await?;

    say.step("The plugin stays away: its lease runs out, and the node heals by itself")?;
    runs_out(stage, say, &lease).await?;

    say.step("The plugin is back, and registers again, for 60 s")?;
    register(stage, say, LONG_TTL).await?;
    accepted(stage, say, "db").await?;

    say.step("nri-leased is killed (SIGKILL), and the plugin with it")?;
    stage.kill_daemon().await?;
    stage.kill_plugin().await?;
    say.detail("Until nri-leased is back, only the runtime itself can refuse: docs/operations.md")?;

    say.step("nri-leased starts again: the lease is still there, and enforced")?;
    let pid = stage.start_daemon().await?;
    say.detail(format!(
        "nri-leased, pid {pid}, is connected to the runtime"
    ))?;
    say.leases(stage, "missing").await?;
    refused(say, stage.run_pod("cache").await)?;

    say.step("The plugin is back, and registers again: pods start")?;
    register(stage, say, LONG_TTL).await?;
    accepted(stage, say, "cache").await?;
    Ok(())
}

async fn register(
    stage: &mut Stage,
    say: &mut Say<'_>,
    ttl: Duration,
) -> Result<Registered, CliError> {
    let pid = stage.start_plugin().await?;
    let registered = stage.register(pid, ttl).await?;
    say.detail(format!(
        "registered: required on this node, holder pid {pid}"
    ))?;
    Ok(registered)
}

async fn accepted(stage: &Stage, say: &mut Say<'_>, name: &str) -> Result<PodId, CliError> {
    let not = |what: &str, error: String| {
        failed(
            format!("start pod {name}"),
            format!("its {what} was refused: {error}"),
        )
    };
    let pod = stage.run_pod(name).await.map_err(|e| not("sandbox", e))?;
    stage
        .create_container(&pod, "main")
        .await
        .map_err(|e| not("container", e))?;
    say.detail(format!("accepted: sandbox and container of pod {name}"))?;
    Ok(pod)
}

/// The runtime's error has to name the plugin and say what can be done.
fn refused<T>(say: &mut Say<'_>, outcome: Result<T, String>) -> Result<(), CliError> {
    let attempt = "hold the pod up while its plugin is away";
    let Err(text) = outcome else {
        return Err(failed(attempt, "it was accepted"));
    };
    for part in [
        format!("required NRI plugin \"{PLUGIN}\" is not connected"),
        format!("nri-lease revoke {PLUGIN}"),
    ] {
        if !text.contains(&part) {
            return Err(failed(
                attempt,
                format!("{part:?} is not in its refusal {text:?}"),
            ));
        }
    }
    say.detail("refused, and this is what kubectl describe pod shows:")?;
    say.detail(format!("  {text}"))
}

/// As the kubelet does: the same pod again and again, until it is accepted.
async fn runs_out(stage: &Stage, say: &mut Say<'_>, lease: &Registered) -> Result<(), CliError> {
    let attempt = "see the lease run out";
    let mut refusals = 0;
    let accepted_at = loop {
        let began = Instant::now();
        match stage.run_pod("api").await {
            Ok(_) => break Instant::now(),
            Err(_) if began < lease.ends_until + LATE_AT_MOST => refusals += 1,
            Err(text) => return Err(failed(attempt, format!("1 s after it ended: {text}"))),
        }
        tokio::time::sleep(RETRY).await;
    };
    if accepted_at < lease.ends_from {
        let early = lease.ends_from - accepted_at;
        return Err(failed(
            attempt,
            format!("a pod was accepted {early:?} before its end"),
        ));
    }
    let late = accepted_at.saturating_duration_since(lease.ends_from);
    say.detail(format!(
        "refused {refusals} more times while the lease lived"
    ))?;
    say.detail(format!("accepted {} ms after its end", late.as_millis()))?;
    if !stage.leases().await?.is_empty() {
        return Err(failed(attempt, "it is still listed"));
    }
    Ok(())
}

/// Tells what happens, on the terminal.
struct Say<'a>(&'a mut Teller<Stdout>, &'a Output);

impl Say<'_> {
    fn step(&mut self, what: impl std::fmt::Display) -> Result<(), CliError> {
        Ok(self.0.step(what)?)
    }

    fn detail(&mut self, what: impl std::fmt::Display) -> Result<(), CliError> {
        Ok(self.0.detail(super::render::escape(&what.to_string()))?)
    }

    /// Shows the leases as `nri-lease list` does, once the one of the plugin is in `state`.
    async fn leases(&mut self, stage: &Stage, state: &str) -> Result<(), CliError> {
        let leases = stage.wait_state(state).await?;
        self.0.detail("$ nri-lease list")?;
        Ok(self.0.detail(list::text(self.1, &leases))?)
    }
}
