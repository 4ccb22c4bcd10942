//! `revoke`: ends a lease now, optionally with a ban.

use std::time::Duration;

use nri_lease_proto::lease::admin::RevokeLeaseRequest;
use serde::Serialize;

use super::Session;
use super::arguments;
use super::error::CliError;
use super::render::escape;
use super::view::decision::BanView;
use super::view::lease::LeaseView;
use super::view::values;

/// Arguments of `revoke`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
    /// Refuse registrations of the name for this long.
    #[arg(long, value_name = "DUR", value_parser = arguments::duration)]
    ban: Option<Duration>,
    /// Shown in events and, with a ban, to whoever tries to register.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    reason: String,
}

#[derive(Serialize)]
struct Revoked {
    plugin: String,
    lease: Option<LeaseView>,
    ban: Option<BanView>,
}

pub async fn run(args: Args, session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let request = RevokeLeaseRequest {
        plugin: args.plugin.clone(),
        ban: args.ban.map(values::to_proto).unwrap_or_default(),
        reason: args.reason,
        ..Default::default()
    };
    let attempt = format!("revoke the lease of {}", args.plugin);
    let answer = admin.revoke_lease(daemon.limit(), &request);
    let answer = daemon.call(&attempt, answer).await?;
    let revoked = Revoked {
        plugin: args.plugin,
        lease: answer.lease.as_ref().map(LeaseView::from),
        ban: answer.ban.as_ref().map(BanView::from),
    };
    let plugin = revoked.plugin.clone();
    session
        .out
        .show(&revoked, |_| text(&revoked), || vec![plugin])
}

fn text(revoked: &Revoked) -> String {
    let until = revoked.ban.as_ref().and_then(|ban| ban.expires_at.clone());
    let next = match until {
        Some(until) => format!("registrations are refused until {}", escape(&until)),
        None => "a plugin that runs may register again; prevent it with --ban DUR".to_string(),
    };
    format!("{} is no longer required here; {next}\n", revoked.plugin)
}
