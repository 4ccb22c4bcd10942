//! The command line `nri-lease`: what can be typed, and which file does it.
//!
//! Each command is a file with its arguments and a `run`. They share the way to the daemon
//! ([`client`]), the way to the terminal ([`render`]), the printed shapes ([`view`]) and the
//! errors with their exit codes ([`error`]).

pub mod arguments;
pub mod audit;
pub mod bans;
pub mod client;
pub mod completions;
pub mod demo;
pub mod doctor;
pub mod error;
pub mod explain;
pub mod input;
pub mod inspect;
pub mod interrupt;
pub mod list;
pub mod pause;
pub mod pins;
pub mod polled;
pub mod process;
pub mod register;
pub mod release;
pub mod render;
pub mod renew;
pub mod renewal;
pub mod revoke;
pub mod scope_file;
pub mod status;
pub mod view;
pub mod watch;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};

use client::Daemon;
use error::{CliError, Complaint};
use render::{Format, Output};

/// Keeps pods from starting without their required NRI plugins.
///
/// A plugin registers itself as required on this node, with a lease that it renews. While the
/// lease lives and the plugin is not really connected to the container runtime, the daemon
/// nri-leased makes the runtime refuse the pods and containers that the lease covers.
#[derive(Debug, Parser)]
#[command(name = "nri-lease", version, max_term_width = 100, after_help = EXIT_CODES)]
pub struct Cli {
    /// Directory of the daemon's sockets.
    #[arg(
        long,
        global = true,
        help_heading = "Global options",
        value_name = "DIR",
        default_value = "/run/nri-lease"
    )]
    pub run_dir: PathBuf,

    /// Output format.
    #[arg(
        short,
        long,
        global = true,
        help_heading = "Global options",
        value_name = "FORMAT",
        default_value = "table"
    )]
    pub output: Format,

    /// How long to wait for the daemon, per connection and call.
    #[arg(long, global = true, help_heading = "Global options", value_name = "DUR", default_value = "10s", value_parser = arguments::duration)]
    pub timeout: Duration,

    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Durations: 90s, 5m, 1h 30m.\n\
Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 daemon unreachable, 5 not permitted.";

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the live leases.
    #[command(visible_alias = "ls")]
    List,
    /// Show everything about one lease: holders, connections, pins, last decisions.
    Inspect(inspect::Args),
    /// End a lease now, optionally with a ban.
    Revoke(revoke::Args),
    /// Refuse registrations of a plugin for some time. A lease that lives stays.
    Ban(bans::BanArgs),
    /// Lift a ban.
    Unban(bans::UnbanArgs),
    /// Show the bans.
    Bans,
    /// Register a plugin as required and keep renewing until interrupted.
    Register(register::Args),
    /// Renew a lease once.
    Renew(renew::Args),
    /// Stop being a holder of a lease; it ends with its last holder. Means uninstall.
    Release(release::Args),
    /// Make one pod require a plugin, whatever the scope of its lease.
    Pin(pins::PinArgs),
    /// Take a pin back.
    Unpin(pins::UnpinArgs),
    /// Show the daemon, its runtimes, what the evidence is worth here, and counts.
    Status,
    /// Print events as they happen, until interrupted.
    Watch(watch::Args),
    /// Say whether a pod would be admitted now, and why, rule by rule.
    Explain(explain::Args),
    /// Show sandboxes that started without a required plugin, and would-be rejections.
    Audit,
    /// Suspend enforcement for some time (break-glass).
    Pause(pause::PauseArgs),
    /// End a pause.
    Resume,
    /// Check the node and say what to fix. Exits with 1 when something is wrong.
    Doctor,
    /// Show the whole story in a scratch directory with a simulated runtime. Needs no root.
    Demo,
    /// The plugin of the demo.
    #[command(hide = true)]
    SimPlugin(demo::SimPluginArgs),
    /// Print a completion script for a shell.
    Completions(completions::Args),
    /// Print the manual page, or write one for each command into a directory.
    Man(completions::ManArgs),
}

/// What every command gets: the daemon and the terminal.
#[derive(Debug, Clone)]
pub struct Session {
    pub daemon: Daemon,
    pub out: Output,
}

/// The definition of the command line, for completions and manual pages.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(help_or_usage) => {
            // Fails only when nobody reads: then there is no one to tell.
            let _ = help_or_usage.print();
            return ExitCode::from(help_or_usage.exit_code() as u8);
        }
    };
    match start(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(message) = error.message() {
                complain(&message);
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn start(cli: Cli) -> Result<(), CliError> {
    let session = Session {
        daemon: Daemon {
            run_dir: cli.run_dir,
            timeout: cli.timeout,
        },
        out: Output::new(cli.output),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::Failed(Complaint::new("start", error.to_string(), "")))?;
    runtime.block_on(dispatch(cli.command, &session))
}

async fn dispatch(command: Command, session: &Session) -> Result<(), CliError> {
    match command {
        Command::List => list::run(session).await,
        Command::Inspect(args) => inspect::run(args, session).await,
        Command::Revoke(args) => revoke::run(args, session).await,
        Command::Ban(args) => bans::ban(args, session).await,
        Command::Unban(args) => bans::unban(args, session).await,
        Command::Bans => bans::list(session).await,
        Command::Register(args) => register::run(args, session).await,
        Command::Renew(args) => renew::run(args, session).await,
        Command::Release(args) => release::run(args, session).await,
        Command::Pin(args) => pins::pin(args, session).await,
        Command::Unpin(args) => pins::unpin(args, session).await,
        Command::Status => status::run(session).await,
        Command::Watch(args) => watch::run(args, session).await,
        Command::Explain(args) => explain::run(args, session).await,
        Command::Audit => audit::run(session).await,
        Command::Pause(args) => pause::pause(args, session).await,
        Command::Resume => pause::resume(session).await,
        Command::Doctor => doctor::run(session).await,
        Command::Demo => demo::run(&session.out).await,
        Command::SimPlugin(args) => demo::sim_plugin(args).await,
        Command::Completions(args) => completions::completions(args, session),
        Command::Man(args) => completions::man(args, session),
    }
}

/// Writes to stderr, where the first line says who speaks. Text of others is escaped, line by line.
pub fn complain(message: &str) {
    use std::io::Write;
    let lines: Vec<String> = message.lines().map(render::escape).collect();
    // Without a reader there is no one to tell.
    let _ = writeln!(std::io::stderr(), "nri-lease: {}", lines.join("\n"));
}
