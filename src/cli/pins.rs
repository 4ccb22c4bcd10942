//! `pin`, `unpin`: "this pod requires this plugin".

use std::time::Duration;

use nri_lease_proto::lease::registry::{PinRequest, UnpinRequest};
use serde::Serialize;

use super::Session;
use super::arguments;
use super::error::{CliError, Complaint};
use super::view::lease::PinView;
use super::view::values;

/// Arguments of `pin`.
#[derive(Debug, clap::Args)]
pub struct PinArgs {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
    /// Kubernetes' uid of the pod.
    #[arg(value_parser = arguments::pod_uid)]
    pod_uid: String,
    /// How long the pin holds [default: 1h].
    #[arg(long, value_name = "DUR", value_parser = arguments::duration)]
    ttl: Option<Duration>,
}

/// Arguments of `unpin`.
#[derive(Debug, clap::Args)]
pub struct UnpinArgs {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
    /// Kubernetes' uid of the pod.
    #[arg(value_parser = arguments::pod_uid)]
    pod_uid: String,
}

#[derive(Serialize)]
struct Unpinned {
    plugin: String,
    pod_uid: String,
    existed: bool,
}

pub async fn pin(args: PinArgs, session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    let registry = daemon.registry().await?;
    let attempt = format!("pin pod {} to {}", args.pod_uid, args.plugin);
    let request = PinRequest {
        plugin: args.plugin,
        pod_uid: args.pod_uid,
        ttl: args.ttl.map(values::to_proto).unwrap_or_default(),
        ..Default::default()
    };
    let answer = registry.pin(daemon.limit(), &request);
    let answer = daemon.call(&attempt, answer).await?;
    let Some(pin) = answer.pin.as_ref().map(PinView::from) else {
        return Err(CliError::Failed(Complaint::new(
            attempt,
            "the daemon's answer has no pin",
            "Compare versions: nri-lease --version; nri-lease status",
        )));
    };
    session.out.show(
        &pin,
        |_| {
            format!(
                "pod {} requires {} until {}\n",
                request.pod_uid,
                request.plugin,
                pin.expires_at.as_deref().unwrap_or("?")
            )
        },
        || vec![pin.pod_uid.clone()],
    )
}

pub async fn unpin(args: UnpinArgs, session: &Session) -> Result<(), CliError> {
    let daemon = &session.daemon;
    let registry = daemon.registry().await?;
    let attempt = format!("unpin pod {} from {}", args.pod_uid, args.plugin);
    let request = UnpinRequest {
        plugin: args.plugin,
        pod_uid: args.pod_uid,
        ..Default::default()
    };
    let answer = registry.unpin(daemon.limit(), &request);
    let answer = daemon.call(&attempt, answer).await?;
    let unpinned = Unpinned {
        plugin: request.plugin,
        pod_uid: request.pod_uid,
        existed: answer.existed,
    };
    session.out.show(
        &unpinned,
        |_| match unpinned.existed {
            true => format!(
                "pod {} no longer requires {}\n",
                unpinned.pod_uid, unpinned.plugin
            ),
            false => format!(
                "pod {} was not pinned to {}\n",
                unpinned.pod_uid, unpinned.plugin
            ),
        },
        || vec![unpinned.pod_uid.clone()],
    )
}
