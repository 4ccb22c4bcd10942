//! What hooks leave behind, carried to the ring, the log, the watchers and the store; off the hook
//! path and in the order in which it happened.

use std::sync::Arc;

use nri_lease_proto::lease::types::EventKind;
use nri_lease_proto::nri::nri::PodSandbox;
use nri_lease_state::PodUid;
use nri_lease_state::rules::{Command, PresentSandbox, SandboxPod};
use tokio::sync::mpsc;

use crate::daemon::Daemon;
use crate::enforce::decision::{Verdict, required_for_sandbox};
use crate::enforce::question::pod_view;
use crate::enforce::record::Trace;
use crate::events::Event;
use crate::pods;
use crate::presence::RuntimeId;

/// A runtime has told us its pods.
///
/// In the order of the queue, so that what hooks report after it is newer. The grace of a reboot
/// begins first; the pods of holders are learnt before it matters who is exempt; pins are compared
/// last, when the sandboxes are known.
async fn synchronized(daemon: &Daemon, runtime: RuntimeId, sandboxes: Vec<PodSandbox>) {
    let socket = daemon.socket_of(runtime);
    let now = daemon.clock.now();
    let snapshot = daemon.engine.snapshot();
    daemon.pods.replace(runtime, &sandboxes);
    let uid = |pod: &PodSandbox| PodUid::try_from(pod.uid.as_str()).ok();
    let learned = |pod| Some(pods::identity(pod, uid(pod)?));
    let present = |pod: &PodSandbox| PresentSandbox {
        sandbox: sandbox_pod(&socket, pod),
        covered_by: required_for_sandbox(&snapshot, pod_view(pod), &now),
    };
    let commands = [
        Command::RuntimeSynchronized,
        Command::LearnPods {
            pods: sandboxes.iter().filter_map(learned).collect(),
        },
        Command::SandboxesSynchronized {
            runtime: socket.clone(),
            present: sandboxes.iter().map(present).collect(),
        },
        Command::PodsSeen {
            runtime: socket.clone(),
            present: sandboxes.iter().filter_map(uid).collect(),
        },
    ];
    for command in commands {
        daemon.engine.tell(command).await;
    }
    daemon.events.tell(Event::new(
        EventKind::EVENT_KIND_RUNTIME_CONNECTED,
        format!("synchronised with {socket}, {} pods", sandboxes.len()),
    ));
}

fn sandbox_pod(socket: &str, pod: &PodSandbox) -> SandboxPod {
    SandboxPod {
        sandbox_id: pod.id.clone(),
        runtime: socket.to_owned(),
        pod_namespace: pod.namespace.clone(),
        pod_name: pod.name.clone(),
        pod_uid: PodUid::try_from(pod.uid.as_str()).ok(),
    }
}

/// Carries what hooks leave behind to the ring, the log, the watchers and the store.
pub async fn take(daemon: Arc<Daemon>, mut traces: mpsc::Receiver<Trace>) {
    while let Some(trace) = traces.recv().await {
        match trace {
            Trace::Synchronized {
                runtime,
                pods,
                done,
            } => {
                synchronized(&daemon, runtime, pods).await;
                daemon.engine.settled().await;
                // The session may have given up waiting, or ended.
                let _ = done.send(());
            }
            Trace::Decided(decided) => {
                let kind = match decided.verdict {
                    Verdict::Reject => Some(EventKind::EVENT_KIND_REJECTED),
                    Verdict::WouldReject => Some(EventKind::EVENT_KIND_WOULD_REJECT),
                    Verdict::Admit | Verdict::Exempt | Verdict::Unvetted => None,
                };
                if let Some(kind) = kind {
                    daemon.events.tell(Event {
                        at: decided.at,
                        plugin: decided.plugin.as_ref().map(ToString::to_string),
                        pod: Some(decided.pod.clone()),
                        container: decided.container.clone(),
                        ..Event::new(kind, decided.text.clone())
                    });
                }
                daemon.ring.push(decided);
            }
            Trace::SandboxStarted {
                runtime,
                pod,
                unvetted,
            } => {
                let socket = daemon.socket_of(runtime);
                daemon.pods.add(runtime, (*pod).clone());
                if let Ok(uid) = PodUid::try_from(pod.uid.as_str()) {
                    let pods = vec![pods::identity(&pod, uid)];
                    daemon.engine.tell(Command::LearnPods { pods }).await;
                }
                daemon
                    .engine
                    .tell(Command::SandboxAppeared {
                        sandbox: sandbox_pod(&socket, &pod),
                        unvetted,
                    })
                    .await;
            }
            Trace::SandboxVetted {
                sandbox_id,
                vetted,
                unvetted,
            } => {
                daemon
                    .engine
                    .tell(Command::SandboxVetting {
                        sandbox_id,
                        vetted,
                        unvetted,
                    })
                    .await;
            }
            Trace::SandboxRemoved { sandbox_id } => {
                daemon.pods.remove(&sandbox_id);
                daemon
                    .engine
                    .tell(Command::SandboxGone { sandbox_id })
                    .await;
            }
        }
    }
}
