//! What the tests of the simulated runtime share.
#![allow(dead_code)]

use nri_lease_sim::plugin::{Options as PluginOptions, Plugin};
use nri_lease_sim::{Options, Runtime};
use std::path::PathBuf;
use std::time::Duration;

/// Longer than anything takes on a busy machine: a test that needs it has failed.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A runtime in a directory of its own.
pub struct Node {
    pub runtime: Runtime,
    pub socket: PathBuf,
    _directory: tempfile::TempDir,
}

pub async fn node(options: Options) -> Node {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let socket = directory.path().join("nri.sock");
    let runtime = Runtime::start(&socket, options).await.expect("starts");
    Node {
        runtime,
        socket,
        _directory: directory,
    }
}

impl Node {
    /// Connects a plugin and waits until it is in the list.
    pub async fn plugin(&self, name: &str, index: &str, options: PluginOptions) -> Plugin {
        let plugin = Plugin::connect(&self.socket, name, index, options)
            .await
            .expect("registers");
        assert!(
            self.runtime.wait_for_plugin(name, LIMIT).await.is_some(),
            "{name} is listed: {:?}",
            self.runtime.journal()
        );
        plugin
    }
}

/// A request timeout that tests can wait for.
pub fn quick(options: Options) -> Options {
    Options {
        request_timeout: Duration::from_millis(300),
        registration_timeout: Duration::from_millis(500),
        ..options
    }
}

/// Waits until the plugin's connection has ended.
pub async fn ended(plugin: &Plugin) {
    tokio::time::timeout(LIMIT, plugin.closed())
        .await
        .expect("the connection ends");
}
