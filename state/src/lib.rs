//! What a lease is.

pub mod store;
