//! What a lease is.
