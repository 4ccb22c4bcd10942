//! Where the Go programs of `tests/go` are, and what else a test may need.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::runner::Skip;

/// `target/go-bin` of this workspace, or `NRI_LEASE_GO_BIN`.
pub fn dir() -> PathBuf {
    std::env::var_os("NRI_LEASE_GO_BIN").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/go-bin"),
        PathBuf::from,
    )
}

/// A program (or file) in [`dir`]; a test without it is skipped.
pub fn need(name: &str) -> Result<PathBuf> {
    let path = dir().join(name);
    if path.exists() {
        return Ok(path.canonicalize()?);
    }
    Err(Skip::new(format!("{name} is not built (make -C tests/go all)")).into())
}

/// Skips unless the effective uid is 0.
pub fn need_root() -> Result<()> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    Err(Skip::new("needs root").into())
}

/// A program on `PATH`; a test without it is skipped.
pub fn need_tool(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| Skip::new(format!("{name} is not installed")).into())
}
