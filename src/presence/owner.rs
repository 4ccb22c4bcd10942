//! Which process owns an NRI connection: the one a caller names, or a descendant of it.

use std::collections::{HashMap, HashSet};

use super::netns::Asker;
use super::proc::{self, ProcessKey};
use super::process::WatchedProcess;
use super::scan::{Far, scan};
use super::tracker::RuntimeId;
use super::view::View;

/// Descendants looked at.
const MAX_DESCENDANTS: usize = 4096;

/// See [`super::Tracker::find_connection_owner`].
pub(super) fn find_connection_owner(view: &View, pid: u32) -> Option<ProcessKey> {
    let netns = view.netns.as_ref()?;
    let mut launched: HashMap<RuntimeId, HashSet<u64>> = HashMap::new();
    for (id, runtime) in &view.runtimes {
        if let Some(pid) = runtime.pid {
            launched.insert(*id, proc::socket_inodes(pid).unwrap_or_default());
        }
    }
    let leads_to_runtime = |far: &Far, peer: u64| match far {
        Far::Unaccepted => false,
        Far::Listener { file, name } => view.runtimes.values().any(|r| match r.identity.listener {
            Some(listener) => listener == *file,
            None => {
                let path = r.socket_path.as_os_str().as_encoded_bytes();
                name.strip_suffix(&[0]).unwrap_or(name) == path
            }
        }),
        Far::Unnamed => launched.values().any(|sockets| sockets.contains(&peer)),
    };
    let candidates = std::iter::once(pid).chain(proc::descendants(pid, MAX_DESCENDANTS));
    let mut owners = candidates.filter_map(|pid| {
        let process = WatchedProcess::open(crate::presence::proc::key_of(pid).ok()?).ok()?;
        let found = scan(&process, netns, Asker::Tracker, |_| false).found;
        let owns = found
            .iter()
            .any(|f| leads_to_runtime(&f.far, f.handle.peer));
        owns.then_some(process.key)
    });
    owners.next()
}
