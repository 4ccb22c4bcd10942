//! The daemon's two listening sockets: bound here, or handed over by systemd.

use std::path::Path;

use anyhow::Context;
use tokio::net::UnixListener;
use tracing::warn;

use super::server::{Endpoint, SocketPaths};

/// The mode of the sockets: plugins of the group may register, admins are root.
const REGISTRY_MODE: u32 = 0o660;
const ADMIN_MODE: u32 = 0o600;
const REGISTRY_GROUP: &str = "nri-lease";

/// Both sockets, listening.
pub struct Sockets {
    pub registry: Endpoint,
    pub admin: Endpoint,
}

/// From systemd, by name, or bound here.
pub fn listen(run_dir: &Path) -> anyhow::Result<Sockets> {
    if let Some(sockets) = from_systemd()? {
        return Ok(sockets);
    }
    std::fs::create_dir_all(run_dir)
        .with_context(|| format!("cannot make the run directory {}", run_dir.display()))?;
    let paths = SocketPaths::in_dir(run_dir);
    let group = nix::unistd::Group::from_name(REGISTRY_GROUP)
        .ok()
        .flatten()
        .map(|group| group.gid);
    Ok(Sockets {
        registry: Endpoint::bind(&paths.registry, REGISTRY_MODE, group)
            .context("cannot serve plugins")?,
        admin: Endpoint::bind(&paths.admin, ADMIN_MODE, None).context("cannot serve admins")?,
    })
}

fn from_systemd() -> anyhow::Result<Option<Sockets>> {
    let (mut registry, mut admin) = (None, None);
    for (fd, name) in handed_over() {
        let listener = std::os::unix::net::UnixListener::from(fd);
        listener.set_nonblocking(true)?;
        let listener = Endpoint::handed_over(UnixListener::from_std(listener)?);
        match name.as_str() {
            "registry" => registry = Some(listener),
            "admin" => admin = Some(listener),
            other => warn!(name = other, "systemd handed over a socket of another name"),
        }
    }
    match (registry, admin) {
        (None, None) => Ok(None),
        (Some(registry), Some(admin)) => Ok(Some(Sockets { registry, admin })),
        _ => anyhow::bail!(
            "systemd handed over only one socket: name two, with FileDescriptorName=registry and \
             FileDescriptorName=admin"
        ),
    }
}

/// Descriptors that systemd passed to this process, with their names.
#[allow(unsafe_code)]
fn handed_over() -> Vec<(std::os::fd::OwnedFd, String)> {
    use std::os::fd::{FromRawFd, OwnedFd};
    sd_notify::listen_fds_with_names()
        .map(|fds| {
            fds.map(|(fd, name)| {
                // SAFETY: systemd passes these descriptors to this process alone (LISTEN_PID was
                // checked), and the environment is read once.
                (unsafe { OwnedFd::from_raw_fd(fd) }, name)
            })
            .collect()
        })
        .unwrap_or_default()
}
