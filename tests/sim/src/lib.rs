//! A simulated NRI runtime.
