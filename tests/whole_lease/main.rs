//! The whole lease, by whole programs: the daemon and the command line as they are installed,
//! plugins as processes in pods' cgroups, a simulated runtime, short TTLs.

mod cgroup;
mod holders;
mod node;
mod pins;
mod providers;
mod reboots;
mod scopes;
mod switches;
mod time;

/// Not a test of its own: a plugin's process is this program once more.
#[tokio::test]
async fn plugin_process() {
    node::be_a_plugin_if_asked().await;
}
