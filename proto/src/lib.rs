//! What nri-lease speaks: generated code, no logic.
//!
//! - [`lease`]: `nri.lease.v1`, the services of the daemon. The `.proto` files under
//!   `proto/nri/lease/v1` are the documentation, field by field.
//! - [`nri`]: the part of `nri.pkg.api.v1alpha1` that the daemon reads or answers. Field numbers
//!   are those of NRI v0.12; fields we do not read are left out and skipped when decoding.

#![allow(clippy::all, missing_docs, unsafe_code, unused)]

/// `nri.lease.v1`: Registry (plugins) and Admin (admins).
pub mod lease {
    include!(concat!(env!("OUT_DIR"), "/lease/mod.rs"));
}

/// `nri.pkg.api.v1alpha1`: Plugin (served by us) and Runtime (served by the runtime).
pub mod nri {
    include!(concat!(env!("OUT_DIR"), "/nri/mod.rs"));
}

pub use protobuf;
pub use ttrpc;
