//! Bindings on their way to the store and back.

use std::sync::Arc;

use super::super::binding::{Connection, ConnectionState, FarEnd, SocketId};
use super::super::netns::Netns;
use super::super::proc::ProcessKey;
use super::super::scan::Handle;
use super::super::sys;
use super::super::tracker::BindingRecord;
use super::Actor;

impl Actor {
    pub(super) fn export(&self) -> Vec<BindingRecord> {
        let mut records = Vec::new();
        for (key, tracked) in &self.processes {
            for connection in tracked.bindings.connections() {
                let broken = match connection.state {
                    ConnectionState::Bound => false,
                    ConnectionState::Broken => true,
                    _ => continue,
                };
                let Some(runtime) = connection.runtime.and_then(|r| self.runtimes.get(&r)) else {
                    continue;
                };
                records.push(BindingRecord {
                    boot_id: self.boot_id.clone(),
                    process: *key,
                    runtime_socket: runtime.socket_path.clone(),
                    inode: connection.id.inode,
                    cookie: connection.id.cookie,
                    netns_inode: connection.handle.netns.inode,
                    listener: match connection.far {
                        FarEnd::Listener(file) => Some(file),
                        FarEnd::Launched(_) | FarEnd::Unaccepted => None,
                    },
                    broken,
                    bound_boottime_ns: connection.bound_boottime_ns.unwrap_or(0),
                });
            }
        }
        records
    }

    /// Puts back what the store remembers of this process. With a connection that was found: that
    /// one, if it is recorded just like that. With `None`, after a scan: the rest, as broken.
    pub(super) fn mend_from_store(
        &mut self,
        key: ProcessKey,
        found: Option<(SocketId, FarEnd, &Handle)>,
    ) {
        let Some(own) = self.netns.as_ref().map(|n| n.own().clone()) else {
            return;
        };
        if self.imported.is_empty() {
            return;
        }
        let Some(tracked) = self.processes.get_mut(&key) else {
            return;
        };
        let runtimes = &self.runtimes;
        let is_match = |r: &mut BindingRecord| {
            r.process == key
                && found.is_none_or(|(id, far, handle)| {
                    let listener = match far {
                        FarEnd::Listener(file) => Some(file),
                        FarEnd::Launched(_) | FarEnd::Unaccepted => None,
                    };
                    !r.broken
                        && (r.inode, r.cookie) == (id.inode, id.cookie)
                        && r.netns_inode == handle.netns.inode
                        && r.listener == listener
                        && far != FarEnd::Unaccepted
                })
        };
        let records: Vec<BindingRecord> = self.imported.extract_if(.., is_match).collect();
        for record in records {
            let configured = runtimes
                .iter()
                .find(|(_, r)| r.socket_path == record.runtime_socket);
            let Some((runtime, _)) = configured else {
                continue;
            };
            let now_ns = sys::boottime_ns();
            let id = SocketId {
                inode: record.inode,
                cookie: record.cookie,
            };
            let (far, handle) = match (found, record.listener) {
                (Some((_, far, handle)), _) => (far, handle.clone()),
                // A broken connection is never asked about again.
                (None, Some(file)) => (FarEnd::Listener(file), unused_handle(&own)),
                (None, None) => (FarEnd::Launched(*runtime), unused_handle(&own)),
            };
            let connection = Connection {
                id,
                far,
                state: ConnectionState::Bound,
                runtime: Some(*runtime),
                seen_boottime_ns: now_ns,
                bound_boottime_ns: Some(record.bound_boottime_ns),
                handle,
            };
            let bindings = Arc::make_mut(&mut tracked.bindings);
            bindings.restore(connection, *runtime, found.is_none());
            self.is_restored |= found.is_some();
            self.is_dirty = true;
        }
    }
}

fn unused_handle(own: &Arc<Netns>) -> Handle {
    Handle {
        netns: own.clone(),
        fd: u32::MAX,
        peer: 0,
        runtime_end: None,
        open_at_ns: Arc::default(),
    }
}
