//! The decision: may this sandbox or container start?
//!
//! ```text
//! hook:  NRI request → the few fields we need → published snapshot → presence → decision → reply
//! ```
//! [`decision`] is a plain function of those. [`hooks`] feeds it from the runtime's requests and
//! `explain` from an admin's, both as a [`question`]. [`evidence`] asks the kernel and the runtime's list, [`text`] words
//! the refusals, [`record`] carries what was decided off the hook path.

pub mod decision;
pub mod evidence;
pub mod hooks;
pub mod listings;
pub mod policy;
pub mod question;
pub mod record;
pub mod snapshot;
#[cfg(test)]
mod tests;
pub mod text;
