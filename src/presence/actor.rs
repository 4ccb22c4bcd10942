//! The tracker's thread: one loop that takes messages, watches processes, and moves connections
//! from accepted to bound.
//!
//! A thread and not a task, because all it does is short blocking calls (/proc, netlink), and
//! because a fence wants looks 0.2 ms apart. It sleeps in one ppoll(2) on its wake-up socket and
//! the pidfds of the holders. What it knows is in the structs here, what it does in the files below
//! `actor/`; how a connection moves on is in [`super::binding`].

mod records;
mod runtimes;
mod settling;
mod watching;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use tokio::sync::{broadcast, oneshot};

use super::binding::{Presence, ProcessBindings, SocketId};
use super::fence::Fence;
use super::mailbox::{self, Inbox, Mailbox, WeakMailbox};
use super::netns::NetnsCache;
use super::proc::{self, ProcessKey};
use super::process::WatchedProcess;
use super::scan::Handle;
use super::tracker::{BindingRecord, Event, HolderSpec, OwnFence, OwnSocket, RuntimeId, Settled};
use super::unix_diag::{self, VfsId};
use super::view::{HookBinding, Unwatched, View, ViewProcess, ViewRuntime};

/// How often holders without a bound connection are scanned just after a runtime came or went.
const FAST_SWEEP: Duration = Duration::from_millis(20);
/// How often bound connections are looked at for the sake of events; hooks ask for themselves.
const VERIFY: Duration = Duration::from_secs(1);
/// Binding records taken from the store: 256 leases of 16 holders with two connections each.
const MAX_IMPORTED: usize = 8192;

pub(super) enum Command {
    RuntimeAdded {
        runtime: RuntimeId,
        socket_path: PathBuf,
    },
    OwnSynchronized {
        runtime: RuntimeId,
        fence: OwnFence,
        own: OwnSocket,
    },
    RuntimeLost {
        runtime: RuntimeId,
    },
    SetHolders {
        holders: Vec<HolderSpec>,
    },
    Settle {
        process: ProcessKey,
        deadline: Duration,
        reply: oneshot::Sender<Settled>,
    },
    Rescan {
        process: ProcessKey,
        reply: oneshot::Sender<()>,
    },
    ForgetBroken {
        process: ProcessKey,
        runtime: RuntimeId,
    },
    Export {
        reply: oneshot::Sender<Vec<BindingRecord>>,
    },
    Import {
        records: Vec<BindingRecord>,
    },
    /// A hook has found a bound connection closed.
    Verify {
        process: ProcessKey,
    },
    /// A hook has fenced a connection by itself.
    HookBound(HookBinding),
}

/// What the handles share with the thread.
pub(super) struct Shared {
    pub evidence: Result<(), String>,
    pub view: Arc<ArcSwap<View>>,
    pub events: broadcast::Sender<Event>,
    pub fences_opened: AtomicU64,
    /// Counts up with every scan and every fence: the order that binding rests on.
    sequence: AtomicU64,
}

impl Shared {
    /// The next number of the order in which scans end and fences begin. Sequentially
    /// consistent: a number taken after a connection was seen accepted is larger than one taken
    /// before the fence was opened, on whichever thread, or the fence does not bind it.
    pub(super) fn tick(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::SeqCst)
    }
}

struct Runtime {
    socket_path: PathBuf,
    listener: Option<VfsId>,
    /// The process that listens, if it is visible from here.
    process: Option<Arc<WatchedProcess>>,
    fence: Option<OpenFence>,
    /// Failed fences in a row, and when to try again.
    failures: u32,
    retry_at: Instant,
}

struct OpenFence {
    fence: Fence,
    opened: u64,
    next_look: Instant,
}

struct Tracked {
    process: Result<Arc<WatchedProcess>, Unwatched>,
    bindings: Arc<ProcessBindings<Handle>>,
    foreign: Arc<HashSet<u64>>,
    /// What it had when it ended: another process that has it too did not make it.
    had: Vec<SocketId>,
    /// In a live lease, by the last `set_holders`.
    is_holder: bool,
    keep_until: Instant,
    /// Runtimes for which `Connected` was the last event sent.
    present: BTreeSet<RuntimeId>,
    gone_sent: bool,
}

struct Settling {
    process: ProcessKey,
    deadline: Instant,
    next_scan: Instant,
    reply: oneshot::Sender<Settled>,
}

struct Actor {
    inbox: Inbox,
    mailbox: WeakMailbox,
    shared: Arc<Shared>,
    /// `None` where the kernel has no unix_diag; then only processes are watched.
    netns: Option<Arc<NetnsCache>>,
    boot_id: String,
    runtimes: BTreeMap<RuntimeId, Runtime>,
    processes: HashMap<ProcessKey, Tracked>,
    settling: Vec<Settling>,
    /// Answered once the view that has the result is published.
    scanned: Vec<oneshot::Sender<()>>,
    imported: Vec<BindingRecord>,
    /// Something came back from there, and its other end is still to be looked up.
    is_restored: bool,
    next_sweep: Instant,
    next_verify: Instant,
    fast_until: Instant,
    is_dirty: bool,
}

pub(super) fn start() -> io::Result<(Mailbox, Arc<Shared>)> {
    let (mailbox, inbox) = mailbox::open()?;
    let netns = unix_diag::probe()
        .map_err(|e| e.to_string())
        .and_then(|()| NetnsCache::new().map_err(|e| e.to_string()));
    let shared = Arc::new(Shared {
        evidence: netns.as_ref().map(|_| ()).map_err(Clone::clone),
        view: Arc::default(),
        events: broadcast::channel(1024).0,
        fences_opened: AtomicU64::new(0),
        sequence: AtomicU64::new(1),
    });
    let now = Instant::now();
    let mut actor = Actor {
        inbox,
        mailbox: mailbox.downgrade(),
        shared: shared.clone(),
        netns: netns.ok().map(Arc::new),
        boot_id: proc::boot_id()?,
        runtimes: BTreeMap::new(),
        processes: HashMap::new(),
        settling: Vec::new(),
        scanned: Vec::new(),
        imported: Vec::new(),
        is_restored: false,
        next_sweep: now,
        next_verify: now + VERIFY,
        fast_until: now,
        is_dirty: true,
    };
    actor.publish();
    std::thread::Builder::new()
        .name("presence".into())
        .stack_size(512 * 1024)
        .spawn(move || actor.run())?;
    Ok((mailbox, shared))
}

impl Actor {
    fn run(mut self) {
        loop {
            self.sleep();
            self.inbox.drain_wake();
            loop {
                match self.inbox.next() {
                    Ok(Some(command)) => self.handle(command),
                    Ok(None) => break,
                    Err(()) => return,
                }
            }
            self.reap();
            self.look_at_fences();
            let now = Instant::now();
            if now >= self.next_sweep {
                self.sweep();
            }
            if now >= self.next_verify {
                self.verify_all(|_| true);
                self.drop_unwanted();
                self.next_verify = now + VERIFY;
            }
            self.scan_settling();
            if std::mem::take(&mut self.is_restored) {
                for identity in self.identities() {
                    self.find_runtime_ends(identity.runtime);
                }
            }
            self.start_fences();
            self.publish();
            self.answer();
        }
    }

    /// Sleeps until a message, the end of a process, or the next thing due.
    fn sleep(&self) {
        let fences = self.runtimes.values().filter_map(|r| r.fence.as_ref());
        let settling = self.settling.iter();
        let due = fences
            .map(|f| f.next_look)
            .chain(settling.map(|s| s.deadline.min(s.next_scan)))
            .chain([self.next_sweep, self.next_verify])
            .min()
            .unwrap_or(self.next_verify);
        let timeout = due.saturating_duration_since(Instant::now());
        let living = self
            .processes
            .values()
            .filter_map(|t| t.process.as_ref().ok());
        let mut fds = vec![PollFd::new(self.inbox.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(living.map(|p| PollFd::new(p.pidfd(), PollFlags::POLLIN)));
        // EINTR and everything else: the loop looks at everything anyway.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(timeout)), None);
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::RuntimeAdded {
                runtime,
                socket_path,
            } => self.runtime_added(runtime, socket_path),
            Command::OwnSynchronized {
                runtime,
                fence,
                own,
            } => self.own_synchronized(runtime, fence, own),
            Command::RuntimeLost { runtime } => self.runtime_lost(runtime),
            Command::SetHolders { holders } => self.set_holders(&holders),
            Command::Settle {
                process,
                deadline,
                reply,
            } => self.settle(process, deadline, reply),
            Command::Rescan { process, reply } => {
                if self.processes.contains_key(&process) {
                    self.verify_process(process);
                    self.scan_process(process);
                }
                self.scanned.push(reply);
            }
            Command::ForgetBroken { process, runtime } => {
                if let Some(tracked) = self.processes.get_mut(&process)
                    && Arc::make_mut(&mut tracked.bindings).forget_broken(runtime)
                {
                    self.is_dirty = true;
                }
            }
            Command::Export { reply } => {
                let _ = reply.send(self.export());
            }
            Command::Import { mut records } => {
                records.retain(|r| r.boot_id == self.boot_id);
                records.truncate(MAX_IMPORTED);
                self.imported = records;
            }
            Command::Verify { process } => self.verify_process(process),
            Command::HookBound(proof) => self.hook_bound(proof),
        }
    }

    fn publish(&mut self) {
        if !std::mem::take(&mut self.is_dirty) {
            return;
        }
        let processes = self.processes.iter().map(|(key, t)| {
            let seen = ViewProcess {
                process: t.process.clone(),
                bindings: t.bindings.clone(),
                foreign: t.foreign.clone(),
                had: t.had.clone(),
            };
            (*key, seen)
        });
        let runtimes = self.runtimes.iter().map(|(id, r)| {
            let seen = ViewRuntime {
                socket_path: r.socket_path.clone(),
                identity: self.identity(*id),
                pid: r.process.as_ref().map(|p| p.key.pid),
            };
            (*id, seen)
        });
        self.shared.view.store(Arc::new(View {
            processes: processes.collect(),
            runtimes: runtimes.collect(),
            no_evidence: self.shared.evidence.clone().err(),
            netns: self.netns.clone(),
            mailbox: self.mailbox.clone(),
        }));
        self.send_events();
    }

    /// Compares what is with what was last told. After the view is published, so that who hears
    /// of it finds it there.
    fn send_events(&mut self) {
        let identities = self.identities();
        let send = |event| {
            // Nobody listening is fine.
            let _ = self.shared.events.send(event);
        };
        for (key, tracked) in &mut self.processes {
            let process = *key;
            for identity in &identities {
                let runtime = identity.runtime;
                let presence = tracked.bindings.presence(identity, None, |_| Ok(true));
                let is_present = tracked.process.is_ok() && presence == Presence::Bound;
                if is_present && tracked.present.insert(runtime) {
                    send(Event::Connected { process, runtime });
                } else if !is_present && tracked.present.remove(&runtime) {
                    send(Event::Disconnected { process, runtime });
                }
            }
            if matches!(tracked.process, Err(Unwatched::Gone)) && !tracked.gone_sent {
                tracked.gone_sent = true;
                send(Event::ProcessGone { process });
            }
        }
    }
}
