//! The daemon's two services: registry.sock for plugins, admin.sock for admins.
//!
//! A connection goes through [`listen`] and [`server`] (accept, limits), [`guard`] (its bytes) and [`peer`] (who
//! it is) to [`registry`] or [`admin`]; [`convert`] is the only place that knows both the protocol
//! and the rules' types.

pub mod admin;
pub mod convert;
pub mod guard;
pub mod listen;
pub mod peer;
pub mod registry;
pub mod server;
