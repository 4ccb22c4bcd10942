//! `nri-leased`: starts everything in order, and ends it in order.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use arc_swap::ArcSwap;
use clap::{CommandFactory, Parser};
use nri_lease_proto::lease::types::EventKind;
use nri_lease_proto::lease::{admin_ttrpc, registry_ttrpc};
use nri_lease_state::rules::Limits;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tracing::{debug, error, info, warn};

use crate::clock::SystemClock;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::enforce::hooks::{Hooks, PublishedListings};
use crate::enforce::policy::Policy;
use crate::enforce::record::{Ring, Totals};
use crate::enforce::snapshot::{Published, Snapshot};
use crate::engine::{Engine, Parts};
use crate::events::{Event, Events};
use crate::nri::status::RuntimeStatus;
use crate::nri::supervisor::{self, RuntimeContext};
use crate::presence::{RuntimeId, Tracker};
use crate::rpc::admin::AdminService;
use crate::rpc::registry::RegistryService;
use crate::rpc::{listen, server};
use crate::{startup, traces};

const DEFAULT_CONFIG: &str = "/etc/nri-lease/config.toml";
/// Traces of hooks that may wait to be taken; further ones are dropped and counted.
const TRACES: usize = 8192;
/// What is acknowledged is durable already, so a hanging disk is not waited for at the end.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// Keeps pods from starting without their required NRI plugins.
#[derive(Debug, Parser)]
#[command(name = "nri-leased", version)]
struct Arguments {
    /// Configuration file (TOML). The default one may be missing.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where leases are kept.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/nri-lease")]
    state_dir: PathBuf,
    /// Where registry.sock and admin.sock are made.
    #[arg(long, value_name = "DIR", default_value = "/run/nri-lease")]
    run_dir: PathBuf,
    /// NRI socket of a runtime, in place of the configured ones. May be given several times.
    #[arg(long, value_name = "PATH")]
    nri_socket: Vec<PathBuf>,
    /// Check the configuration and end: 0 when it is good.
    #[arg(long)]
    check_config: bool,
}

/// The definition of the daemon's command line, for its manual page.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the daemon until SIGTERM or SIGINT.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may read it; that is no reason to panic.
            let _ = writeln!(io::stderr(), "nri-leased: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let config = load_config(arguments)?;
    let policy = compile(arguments, &config)?;
    if arguments.check_config {
        println!("the configuration is good");
        return Ok(());
    }
    let _log = crate::logging::start(&config.log).map_err(anyhow::Error::msg)?;
    // Two workers: registrations and listings are few, and hooks have a thread of their own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(serve(arguments, config, policy));
    runtime.shutdown_background();
    outcome
}

fn config_path(arguments: &Arguments) -> &Path {
    let given = arguments.config.as_deref();
    given.unwrap_or(Path::new(DEFAULT_CONFIG))
}

fn load_config(arguments: &Arguments) -> anyhow::Result<Config> {
    let mut config = Config::load(config_path(arguments), arguments.config.is_some())?;
    if !arguments.nri_socket.is_empty() {
        config.runtime.nri_sockets = arguments.nri_socket.clone();
    }
    Ok(config)
}

fn compile(arguments: &Arguments, config: &Config) -> anyhow::Result<Arc<Policy>> {
    let policy = Policy::compile(config);
    let policy = policy.with_context(|| config_path(arguments).display().to_string())?;
    Ok(Arc::new(policy))
}

async fn serve(arguments: &Arguments, config: Config, policy: Arc<Policy>) -> anyhow::Result<()> {
    // First: systemd may reload or stop the daemon as soon as it is ready.
    let signals = Signals::listen().context("cannot listen for signals")?;
    let clock = SystemClock::new().context("cannot read the boot id")?;
    let limits = limits(&config);
    let opened = startup::open_store(&arguments.state_dir).await?;
    let loaded = startup::load_state(opened, &clock, &limits).await?;
    let tracker = Tracker::start().context("cannot start watching connections")?;
    let runtimes: Vec<Arc<RuntimeStatus>> = config
        .runtime
        .distinct_sockets()
        .iter()
        .enumerate()
        .map(|(number, socket)| Arc::new(RuntimeStatus::new(RuntimeId(number as u32), socket)))
        .collect();
    for runtime in &runtimes {
        tracker.runtime_added(runtime.id, runtime.socket.clone());
    }
    tracker.import(loaded.bindings);

    let published: Published = Arc::new(ArcSwap::from_pointee(Snapshot {
        state: loaded.state.clone(),
        policy: policy.clone(),
        hold_until: loaded.hold_until,
    }));
    let events = Events::default();
    let store = Arc::new(loaded.store);
    let engine = Engine::start(Parts {
        state: loaded.state,
        store: store.clone(),
        policy,
        limits,
        clock: clock.clone(),
        tracker: tracker.clone(),
        events: events.clone(),
        published: published.clone(),
    })?;

    let (trace_sender, trace_queue) = mpsc::channel(TRACES);
    let totals = Arc::new(Totals::default());
    let listings = PublishedListings::default();
    let hooks = Arc::new(Hooks {
        published,
        view: tracker.view_cell(),
        clock: clock.clone(),
        totals: totals.clone(),
        traces: trace_sender,
        listings: listings.clone(),
    });
    let daemon = Arc::new(Daemon {
        engine,
        store,
        loaded_from: loaded.source,
        state_dir: arguments.state_dir.clone(),
        tracker,
        runtimes,
        pods: Arc::default(),
        events,
        ring: Arc::new(Ring::default()),
        totals,
        listings,
        clock,
        config: ArcSwap::from_pointee(config),
        started_at: SystemTime::now(),
    });
    tokio::spawn(traces::take(daemon.clone(), trace_queue));
    tokio::spawn(startup::store_bindings(daemon.clone()));

    // The runtime first: it may be creating pods already.
    start_nri_thread(&daemon, hooks)?;
    let sockets = listen::listen(&arguments.run_dir)?;
    serve_sockets(&daemon, sockets);
    sd_notify::notify(&[sd_notify::NotifyState::Ready])
        .unwrap_or_else(|error| warn!(%error, "cannot tell systemd that the daemon is ready"));
    info!(
        version = env!("CARGO_PKG_VERSION"),
        state_dir = %arguments.state_dir.display(),
        run_dir = %arguments.run_dir.display(),
        leases = daemon.engine.snapshot().state.leases().len(),
        "ready"
    );
    until_terminated(arguments, &daemon, signals).await;
    shut_down(&daemon).await;
    Ok(())
}

fn limits(config: &Config) -> Limits {
    let leases = &config.leases;
    Limits {
        default_ttl: leases.default_ttl,
        min_ttl: leases.min_ttl,
        max_ttl: leases.max_ttl,
        max_leases: leases.max_leases,
        max_holders_per_lease: leases.max_holders,
        max_pins: leases.max_pins,
        max_rules_per_scope: leases.max_scope_rules,
        reboot_grace: leases.reboot_grace,
        ..Limits::default()
    }
}

/// Hooks are answered on a thread that does nothing else.
fn start_nri_thread(daemon: &Arc<Daemon>, hooks: Arc<Hooks>) -> io::Result<()> {
    let main = tokio::runtime::Handle::current();
    let config = daemon.config.load();
    let contexts: Vec<RuntimeContext> = daemon
        .runtimes
        .iter()
        .map(|status| RuntimeContext {
            status: status.clone(),
            plugin_name: config.runtime.plugin_name.clone(),
            plugin_index: config.runtime.plugin_index.to_string(),
            hooks: hooks.clone(),
            tracker: daemon.tracker.clone(),
            lost: {
                let (daemon, main) = (daemon.clone(), main.clone());
                Box::new(move |runtime| {
                    let daemon = daemon.clone();
                    main.spawn(async move {
                        daemon.events.tell(Event::new(
                            EventKind::EVENT_KIND_RUNTIME_DISCONNECTED,
                            format!("not connected to {} any more", daemon.socket_of(runtime)),
                        ));
                    });
                })
            },
        })
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("nri".to_owned())
        .spawn(move || {
            // Every pod of the node waits for it, and a runtime that has just started does not.
            if let Err(error) = hurry() {
                debug!(%error, "hooks are answered at normal priority");
            }
            runtime.block_on(async {
                let sessions = contexts.into_iter().map(supervisor::run);
                futures::future::join_all(sessions).await;
            });
        })?;
    Ok(())
}

/// Raises the priority of this thread; needs CAP_SYS_NICE, or LimitNICE= in the unit.
fn hurry() -> io::Result<()> {
    const NICE: i32 = -10;
    let thread = rustix::thread::gettid();
    Ok(rustix::process::setpriority_process(Some(thread), NICE)?)
}

fn serve_sockets(daemon: &Arc<Daemon>, sockets: listen::Sockets) {
    let registry = daemon.clone();
    tokio::spawn(server::serve("registry", sockets.registry, move |caller| {
        registry_ttrpc::create_registry(Arc::new(RegistryService::new(registry.clone(), caller)))
    }));
    let admin = daemon.clone();
    tokio::spawn(server::serve("admin", sockets.admin, move |caller| {
        admin_ttrpc::create_admin(Arc::new(AdminService::new(admin.clone(), caller)))
    }));
}

/// From its making on, these signals are noted instead of ending the process.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

async fn until_terminated(arguments: &Arguments, daemon: &Arc<Daemon>, mut signals: Signals) {
    loop {
        tokio::select! {
            _ = signals.terminate.recv() => return,
            _ = signals.interrupt.recv() => return,
            _ = signals.hangup.recv() => reload(arguments, daemon).await,
        }
    }
}

/// SIGHUP: a configuration that cannot be used changes nothing.
async fn reload(arguments: &Arguments, daemon: &Arc<Daemon>) {
    let loaded = load_config(arguments).and_then(|mut config| {
        // Sessions go on under the name and index that they registered with.
        config.runtime = daemon.config.load().runtime.clone();
        Ok((compile(arguments, &config)?, config))
    });
    match loaded {
        Ok((policy, config)) => {
            daemon.engine.reload(policy, limits(&config)).await;
            daemon.config.store(Arc::new(config));
            info!("the configuration is reloaded; [runtime] and [log] need a restart");
        }
        Err(error) => error!("the configuration stays as it was: {error:#}"),
    }
}

async fn shut_down(daemon: &Arc<Daemon>) {
    info!("shutting down; leases stay");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    daemon.engine.stop().await;
    let store = daemon.store.clone();
    let closing = tokio::task::spawn_blocking(move || store.close());
    match tokio::time::timeout(CLOSE_TIME, closing).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => error!(%error, "closing the lease store ended unexpectedly"),
        Err(_) => error!("the disk hangs: ending without closing the lease store"),
    }
}
