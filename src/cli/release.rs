//! `release`: a holder leaves for good; the lease ends with its last holder.

use nri_lease_proto::lease::registry::{ReleaseRequest, ReleaseResponse};
use nri_lease_proto::lease::registry_ttrpc::RegistryClient;
use nri_lease_proto::lease::types::Subject;
use nri_lease_proto::protobuf::MessageField;
use serde::Serialize;

use super::Session;
use super::arguments;
use super::client::Daemon;
use super::error::CliError;
use super::process;

/// Arguments of `release`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plugin's NRI base name, without the index.
    #[arg(value_parser = arguments::plugin)]
    plugin: String,
    /// Release this holder only [default: every holder that you may speak for].
    #[arg(long, value_parser = arguments::pid)]
    pid: Option<i32>,
}

#[derive(Serialize)]
struct Released {
    plugin: String,
    lease_ended: bool,
    holders_left: u32,
}

pub async fn run(args: Args, session: &Session) -> Result<(), CliError> {
    let registry = session.daemon.registry().await?;
    let subject = args.pid.map(process::subject).unwrap_or_default();
    let answer = release(&session.daemon, &registry, &args.plugin, subject).await?;
    let released = Released {
        plugin: args.plugin,
        lease_ended: answer.lease_ended,
        holders_left: answer.holders_left,
    };
    session.out.show(
        &released,
        |_| text(&released),
        || vec![released.plugin.clone()],
    )
}

/// One Release call; also what `register --release-on-exit` ends with.
pub async fn release(
    daemon: &Daemon,
    registry: &RegistryClient,
    plugin: &str,
    subject: MessageField<Subject>,
) -> Result<ReleaseResponse, CliError> {
    let request = ReleaseRequest {
        plugin: plugin.to_string(),
        subject,
        ..Default::default()
    };
    let answer = registry.release(daemon.limit(), &request);
    let attempt = format!("release the lease of {plugin}");
    daemon.call(&attempt, answer).await
}

fn text(released: &Released) -> String {
    match released.lease_ended {
        true => format!(
            "released {}: it is no longer required here\n",
            released.plugin
        ),
        false => format!(
            "released {}: {} holders left, the lease lives on\n",
            released.plugin, released.holders_left
        ),
    }
}
