//! `renew`: extends a lease once, to now + TTL.

use nri_lease_proto::lease::registry::RenewRequest;
use serde::Serialize;

use super::Session;
use super::arguments;
use super::error::CliError;
use super::process;
use super::view::values::{self, Seconds};

/// Arguments of `renew`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
    /// Renew for this holder only [default: any live holder that you may speak for].
    #[arg(long, value_parser = arguments::pid)]
    pid: Option<i32>,
}

#[derive(Serialize)]
struct Renewed {
    plugin: String,
    ttl_seconds: Option<Seconds>,
    expires_at: Option<String>,
    renew_every_seconds: Option<Seconds>,
    generation: u64,
}

pub async fn run(args: Args, session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    let registry = daemon.registry().await?;
    let attempt = format!("renew the lease of {}", args.plugin);
    let request = RenewRequest {
        plugin: args.plugin,
        subject: args.pid.map(process::subject).unwrap_or_default(),
        ..Default::default()
    };
    let answer = registry.renew(daemon.limit(), &request);
    let answer = daemon.call(&attempt, answer).await?;
    let renewed = Renewed {
        plugin: request.plugin,
        ttl_seconds: values::seconds(&answer.ttl),
        expires_at: values::time(&answer.expires_at),
        renew_every_seconds: values::seconds(&answer.renew_every),
        generation: answer.generation,
    };
    session.out.show(
        &renewed,
        |_| {
            format!(
                "renewed {} until {} (TTL {})\n",
                renewed.plugin,
                renewed.expires_at.as_deref().unwrap_or("?"),
                values::short(&renewed.ttl_seconds)
            )
        },
        || vec![renewed.plugin.clone()],
    )
}
