//! `pause`, `resume`: break-glass. A pause always has an end.

use std::time::Duration;

use nri_lease_proto::lease::admin::SetPauseRequest;
use serde::Serialize;

use super::Session;
use super::arguments;
use super::error::CliError;
use super::view::decision::PauseView;
use super::view::values;

/// Arguments of `pause`.
#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// How long: 1 s to 24 h.
    #[arg(long = "for", value_name = "DUR", value_parser = arguments::duration)]
    duration: Duration,
    /// Why; shown by status, doctor and watch.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reason: String,
}

#[derive(Serialize)]
struct PauseSet {
    pause: Option<PauseView>,
    was_paused: bool,
}

pub async fn pause(args: PauseArgs, session: &Session) -> Result<(), CliError> {
    let request = SetPauseRequest {
        duration: values::to_proto(args.duration),
        reason: args.reason,
        ..Default::default()
    };
    let set = set(session, "pause enforcement", request).await?;
    let until = set
        .pause
        .as_ref()
        .and_then(|pause| pause.expires_at.clone());
    session.out.show(
        &set,
        |_| {
            format!(
                "enforcement is paused until {}; end it earlier with: nri-lease resume\n",
                until.as_deref().unwrap_or("?")
            )
        },
        || vec!["paused".to_string()],
    )
}

pub async fn resume(session: &Session) -> Result<(), CliError> {
    let set = set(session, "resume enforcement", SetPauseRequest::new()).await?;
    session.out.show(
        &set,
        |_| match set.was_paused {
            true => "enforcement is on again\n".to_string(),
            false => "enforcement was not paused\n".to_string(),
        },
        || vec!["resumed".to_string()],
    )
}

async fn set(
    session: &Session,
    attempt: &str,
    request: SetPauseRequest,
) -> Result<PauseSet, CliError> {
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let answer = admin.set_pause(daemon.limit(), &request);
    let answer = daemon.call(attempt, answer).await?;
    Ok(PauseSet {
        pause: answer.pause.as_ref().map(PauseView::from),
        was_paused: answer.was_paused,
    })
}
