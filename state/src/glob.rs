//! Globs.
