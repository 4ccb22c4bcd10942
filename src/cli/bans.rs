//! `ban`, `unban`, `bans`: names that may not be registered for some time.

use std::time::Duration;

use nri_lease_proto::lease::admin::{ListBansRequest, SetBanRequest};
use serde::Serialize;

use super::Session;
use super::arguments;
use super::error::{CliError, Complaint};
use super::render::Output;
use super::view::decision::BanView;
use super::view::values;

/// Arguments of `ban`.
#[derive(Debug, clap::Args)]
pub struct BanArgs {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
    /// How long: 1 s to 365 days.
    #[arg(value_name = "DUR", value_parser = arguments::duration)]
    duration: Duration,
    /// Shown to whoever tries to register.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    reason: String,
}

/// Arguments of `unban`.
#[derive(Debug, clap::Args)]
pub struct UnbanArgs {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
}

#[derive(Serialize)]
struct Bans {
    bans: Vec<BanView>,
}

#[derive(Serialize)]
struct BanSet {
    plugin: String,
    ban: Option<BanView>,
    existed: bool,
}

pub async fn ban(args: BanArgs, session: &Session) -> Result<(), CliError> {
    let attempt = format!("ban {}", args.plugin);
    let request = SetBanRequest {
        plugin: args.plugin,
        duration: values::to_proto(args.duration),
        reason: args.reason,
        ..Default::default()
    };
    let set = set(session, &attempt, request).await?;
    let until = set.ban.as_ref().and_then(|ban| ban.expires_at.clone());
    session.out.show(
        &set,
        |_| {
            format!(
                "{} is banned until {}; a lease that lives stays, end it with: nri-lease revoke {}\n",
                set.plugin,
                until.unwrap_or_else(|| "?".to_string()),
                set.plugin
            )
        },
        || vec![set.plugin.clone()],
    )
}

pub async fn unban(args: UnbanArgs, session: &Session) -> Result<(), CliError> {
    let attempt = format!("lift the ban of {}", args.plugin);
    let request = SetBanRequest {
        plugin: args.plugin,
        ..Default::default()
    };
    let set = set(session, &attempt, request).await?;
    if !set.existed {
        return Err(CliError::NotFound(Complaint::new(
            attempt,
            "it is not banned",
            "See the bans: nri-lease bans",
        )));
    }
    session.out.show(
        &set,
        |_| format!("{} may be registered again\n", set.plugin),
        || vec![set.plugin.clone()],
    )
}

async fn set(session: &Session, attempt: &str, request: SetBanRequest) -> Result<BanSet, CliError> {
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let answer = admin.set_ban(daemon.limit(), &request);
    let answer = daemon.call(attempt, answer).await?;
    Ok(BanSet {
        ban: answer.ban.as_ref().map(BanView::from),
        existed: answer.existed,
        plugin: request.plugin,
    })
}

pub async fn list(session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let request = ListBansRequest::new();
    let answer = admin.list_bans(daemon.limit(), &request);
    let answer = daemon.call("list the bans", answer).await?;
    let bans = Bans {
        bans: answer.bans.iter().map(BanView::from).collect(),
    };
    session.out.show(
        &bans,
        |out| text(out, &bans.bans),
        || bans.bans.iter().map(|ban| ban.plugin.clone()).collect(),
    )
}

fn text(out: &Output, bans: &[BanView]) -> String {
    if bans.is_empty() {
        return "No bans.\n".to_string();
    }
    let mut table = out.table(&["PLUGIN", "EXPIRES IN", "EXPIRES AT", "SET BY UID", "REASON"]);
    for ban in bans {
        table.row([
            ban.plugin.clone(),
            values::short(&ban.expires_in_seconds),
            ban.expires_at.clone().unwrap_or_default(),
            ban.set_by_uid.to_string(),
            ban.reason.clone(),
        ]);
    }
    table.text()
}
