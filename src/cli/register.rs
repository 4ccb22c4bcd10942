//! `register`: makes a plugin required on this node and keeps its lease alive until interrupted.
//!
//! It does not release at its end: the lease then protects pods until it runs out. That is what
//! leases are for (a plugin that is gone during a rollout), so it takes `--release-on-exit` to end
//! it at once.

use std::path::PathBuf;
use std::time::Duration;

use nri_lease_proto::lease::registry::{RegisterRequest, RegisterResponse};
use nri_lease_proto::lease::types::Lease;
use nri_lease_proto::protobuf::EnumOrUnknown;

use super::client::Daemon;
use super::error::CliError;
use super::interrupt::Interrupt;
use super::process::{self, Watched};
use super::release::release;
use super::renewal::{self, Renewal};
use super::view::lease::LeaseView;
use super::view::values;
use super::{Session, arguments, complain, scope_file};

/// Arguments of `register`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
    /// How long the plugin stays required without a renewal [default: the daemon's, 60s].
    #[arg(long, value_name = "DUR", value_parser = arguments::duration)]
    ttl: Option<Duration>,
    /// Which pods and containers the lease covers: a TOML, YAML or JSON file, - for stdin
    /// [default: all].
    #[arg(long, value_name = "FILE")]
    scope: Option<PathBuf>,
    /// What to do with covered requests while the plugin is missing [default: enforce].
    #[arg(long)]
    mode: Option<arguments::Mode>,
    /// The index the plugin registers with at the runtime, two digits.
    #[arg(long, value_name = "NN", value_parser = arguments::index)]
    index: Option<String>,
    /// The plugin's process, in the host's pid namespace [default: this command]. When it ends,
    /// renewing ends too.
    #[arg(long, value_parser = arguments::pid)]
    pid: Option<i32>,
    /// Register and return, without renewing.
    #[arg(long, requires = "pid", conflicts_with = "release_on_exit")]
    once: bool,
    /// Release the lease when interrupted, instead of letting it run out.
    #[arg(long)]
    release_on_exit: bool,
}

pub async fn run(args: Args, session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    // Both before the registration: neither a signal nor the end of the process may be missed.
    let mut interrupt = Interrupt::listen()?;
    let process = args.pid.map(Watched::open).transpose()?;
    let request = request(&args)?;

    let registry = daemon.registry().await?;
    let answer = tokio::select! {
        answer = renewal::register(daemon, &registry, &request) => answer?,
        signal = interrupt.received() => return stop(&args, &request, daemon, signal).await,
    };
    match announce(session, &request, &answer, args.once) {
        // The lease is there; that nobody reads about it is no reason to stop renewing it.
        Ok(()) | Err(CliError::BrokenPipe) => {}
        Err(error) => return Err(error),
    }
    if args.once {
        return Ok(());
    }

    let renewal = Renewal::new(daemon, &request, &answer);
    tokio::select! {
        refused = renewal.keep(registry) => Err(refused),
        () = ended(process) => {
            complain(&format!(
                "the process {} of {} has ended; its lease runs out unless it registers again",
                args.pid.unwrap_or_default(), request.plugin,
            ));
            Ok(())
        }
        signal = interrupt.received() => stop(&args, &request, daemon, signal).await,
    }
}

fn request(args: &Args) -> Result<RegisterRequest, CliError> {
    Ok(RegisterRequest {
        plugin: args.plugin.clone(),
        ttl: args.ttl.map(values::to_proto).unwrap_or_default(),
        scope: match &args.scope {
            Some(path) => scope_file::read(path)?,
            None => Default::default(),
        },
        mode: args
            .mode
            .map(|mode| EnumOrUnknown::new(mode.into()))
            .unwrap_or_default(),
        index: args.index.clone().unwrap_or_default(),
        subject: args.pid.map(process::subject).unwrap_or_default(),
        ..Default::default()
    })
}

/// One line, or the lease in the chosen format.
fn announce(
    session: &Session,
    request: &RegisterRequest,
    answer: &RegisterResponse,
    once: bool,
) -> Result<(), CliError> {
    let none = Lease::new();
    let lease = LeaseView::from(answer.lease.as_ref().unwrap_or(&none));
    let every = values::short(&values::seconds(&answer.renew_every));
    let next = match once {
        true => format!("to be renewed every {every}"),
        false => format!("renewing every {every} until interrupted"),
    };
    session.out.show(
        &lease,
        |_| {
            format!(
                "registered {}: required here with TTL {}, generation {}; {next}\n",
                request.plugin,
                values::short(&lease.ttl_seconds),
                lease.generation,
            )
        },
        || vec![request.plugin.clone()],
    )
}

async fn ended(process: Option<Watched>) {
    match process {
        Some(process) => process.ended().await,
        None => std::future::pending().await,
    }
}

async fn stop(
    args: &Args,
    request: &RegisterRequest,
    daemon: &Daemon,
    signal: &str,
) -> Result<(), CliError> {
    let plugin = &request.plugin;
    if !args.release_on_exit {
        complain(&format!(
            "{signal}: no longer renewing {plugin}; its lease runs out by itself, or ends with: \
             nri-lease revoke {plugin}"
        ));
        return Ok(());
    }
    let registry = daemon.registry().await?;
    match release(daemon, &registry, plugin, request.subject.clone()).await {
        Ok(_) => complain(&format!("{signal}: released {plugin}")),
        // Revoked or expired before: then there is nothing left to release.
        Err(CliError::NotFound(_)) => complain(&format!("{signal}: {plugin} had no lease left")),
        Err(error) => return Err(error),
    }
    Ok(())
}
