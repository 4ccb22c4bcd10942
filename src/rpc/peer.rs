//! Who is calling, as the kernel attests it. Nothing here comes from a request.

use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nri_lease_state::process::ProcessKey;

use crate::presence::proc::{self, ProcessFacts};

/// The process at the other end of a connection, as it was at accept.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Effective uid when it connected.
    pub uid: u32,
    /// The process itself and what /proc says of it.
    pub facts: ProcessFacts,
}

impl Peer {
    /// Reads SO_PEERCRED and /proc.
    ///
    /// # Errors
    /// A sentence for the caller: its pid cannot be seen from here, or it has ended already.
    pub fn of(socket: impl AsFd) -> Result<Self, String> {
        let credentials = getsockopt(&socket, PeerCredentials)
            .map_err(|error| format!("cannot read the caller's credentials: {error}"))?;
        if credentials.pid() <= 0 {
            return Err(
                "the caller's process cannot be seen from the daemon's pid namespace: run \
                 nri-leased in the host's pid namespace (hostPID)"
                    .to_owned(),
            );
        }
        let pid = credentials.pid() as u32;
        let facts = ProcessFacts::read(pid)
            .map_err(|error| format!("the caller, pid {pid}, cannot be identified: {error}"))?;
        Ok(Self {
            uid: credentials.uid(),
            facts,
        })
    }

    /// The caller's identity.
    pub fn process(&self) -> ProcessKey {
        self.facts.key()
    }

    /// uid 0 in the host's user namespace, outside of pods or in one.
    pub fn is_host_root(&self) -> bool {
        self.uid == 0 && self.facts.in_host_userns
    }

    /// May the caller register, renew or release for `subject`?
    ///
    /// Itself, a descendant, a process of the same pod; host root may speak for any process.
    pub fn may_speak_for(&self, subject: &ProcessFacts) -> bool {
        self.is_host_root()
            || subject.key() == self.process()
            || (self.facts.pod_uid.is_some() && self.facts.pod_uid == subject.pod_uid)
            || proc::is_descendant(subject.pid, self.facts.pid)
    }
}
