//! The runtime: its socket, its accept loop, its list of plugins.

use crate::fault::Fault;
use crate::journal::{Entry, Journal};
use crate::options::Options;
use crate::world::World;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A plugin in the runtime's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginInfo {
    /// Base name, without the index.
    pub name: String,
    pub index: String,
    /// As the kernel says of the socket's other end.
    pub pid: i32,
    /// Events it is called for.
    pub events: i32,
    /// Its connection has ended, but no request has cleaned the list since.
    pub closed: bool,
}

/// A simulated NRI runtime.
pub struct Runtime {
    journal: Arc<Journal>,
}

impl Runtime {
    /// Starts on `socket` with an empty node. An old socket file is removed first, as containerd
    /// does, so a runtime can be started again on the same path.
    pub async fn start(socket: &Path, options: Options) -> io::Result<Runtime> {
        Runtime::start_with(socket, options, World::default()).await
    }

    /// Starts with pods and containers that are already there.
    pub async fn start_with(
        _socket: &Path,
        _options: Options,
        _world: World,
    ) -> io::Result<Runtime> {
        unimplemented!()
    }

    /// Stops: closes the listener and every connection, and gives back pods and containers so that
    /// the next start can present them in Synchronize. The socket file goes.
    pub async fn stop(self) -> World {
        unimplemented!()
    }

    /// The list, in the order of calls.
    pub fn plugins(&self) -> Vec<PluginInfo> {
        unimplemented!()
    }

    /// Waits until a plugin of that base name is in the list and its connection open.
    pub async fn wait_for_plugin(&self, _name: &str, _limit: Duration) -> Option<PluginInfo> {
        unimplemented!()
    }

    /// Waits until no open connection of that base name is in the list.
    pub async fn wait_for_plugin_gone(&self, _name: &str, _limit: Duration) -> bool {
        unimplemented!()
    }

    /// Commits a fault. Errors when the plugin that it is for is not connected.
    pub async fn inject(&self, _fault: Fault) -> io::Result<()> {
        unimplemented!()
    }

    /// What happened so far, oldest first.
    pub fn journal(&self) -> Vec<Entry> {
        self.journal.entries()
    }

    /// Waits until an entry satisfies `wanted`, those of the past included.
    pub async fn wait_for_entry(
        &self,
        limit: Duration,
        wanted: impl Fn(&Entry) -> bool,
    ) -> Option<Entry> {
        self.journal
            .wait_for(limit, || {
                self.journal
                    .entries()
                    .into_iter()
                    .find(|entry| wanted(entry))
            })
            .await
    }

    /// A copy of the pods and containers that exist.
    pub fn world(&self) -> World {
        unimplemented!()
    }
}
