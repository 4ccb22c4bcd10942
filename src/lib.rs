//! nri-lease: keeps pods from starting without their required NRI plugins.

pub mod cli;
pub mod presence;
