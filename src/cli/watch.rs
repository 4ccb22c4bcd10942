//! `watch`: events as they happen, one a line, until interrupted, until the reader leaves or until
//! the daemon ends.

use std::os::fd::AsFd;
use std::pin::pin;

use nix::poll::PollFlags;
use nri_lease_proto::lease::admin::WatchRequest;
use nri_lease_proto::lease::types::Event;
use nri_lease_proto::ttrpc;

use super::client::from_rpc;
use super::error::CliError;
use super::interrupt::Interrupt;
use super::polled;
use super::render::{self, Format, escape};
use super::view::decision::EventView;
use super::{Session, arguments, complain};

/// Arguments of `watch`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only events of these plugins.
    #[arg(value_parser = arguments::plugin)]
    plugin: Vec<String>,
}

pub async fn run(args: Args, session: &Session) -> Result<(), CliError> {
    let mut interrupt = Interrupt::listen()?;
    let daemon = &session.daemon;
    let admin = daemon.admin().await?;
    let request = WatchRequest {
        plugins: args.plugin,
        ..Default::default()
    };
    // No time limit: events come when they come.
    let stream = admin.watch(ttrpc::context::with_timeout(0), &request);
    let mut events = daemon.call("watch events", stream).await?;
    let mut reader_left = pin!(reader_left());
    loop {
        let received = tokio::select! {
            received = events.recv() => received,
            _ = interrupt.received() => return Ok(()),
            () = &mut reader_left => return Ok(()),
        };
        match received {
            Ok(Some(event)) => print(session, &event)?,
            Ok(None) => break,
            Err(error @ ttrpc::Error::RpcStatus(_)) => {
                return Err(from_rpc("watch events", &error, daemon));
            }
            Err(_) => break,
        }
    }
    complain("the daemon has ended the stream of events");
    Ok(())
}

fn print(session: &Session, event: &Event) -> Result<(), CliError> {
    let view = EventView::from(event);
    session.out.write(&match session.out.format {
        Format::Json => render::json(&view, false)?,
        Format::Yaml => format!("---\n{}", render::yaml(&view)?),
        Format::Name => format!("{}\n", escape(view.plugin.as_deref().unwrap_or("-"))),
        Format::Table | Format::Wide => line(&view),
    })
}

fn line(event: &EventView) -> String {
    let mut parts = vec![
        event.time.clone().unwrap_or_else(|| "-".to_string()),
        format!("{:<20}", event.kind),
        format!("{:<20}", event.plugin.as_deref().unwrap_or("-")),
    ];
    if let Some(pod) = &event.pod {
        parts.push(format!("pod={}", pod.label()));
    }
    if let Some(container) = &event.container {
        parts.push(format!("container={container}"));
    }
    if let Some(pid) = event.pid {
        parts.push(format!("pid={pid}"));
    }
    if let Some(dropped) = event.dropped {
        parts.push(format!("dropped={dropped}"));
    }
    parts.push(event.message.clone());
    format!("{}\n", escape(parts.join("  ").trim_end()))
}

/// Returns when stdout is a pipe or socket whose other end is closed: without it a quiet watch
/// would outlive its reader until the next event. Never returns for a file.
async fn reader_left() {
    match std::io::stdout().as_fd().try_clone_to_owned() {
        // poll(2) reports errors without being asked for them.
        Ok(stdout) => polled::ready(stdout, PollFlags::empty()).await,
        Err(_) => std::future::pending().await,
    }
}
