//! What the protocol says, in the shape in which it is printed. Plain data: nothing here talks to
//! the daemon or writes to the terminal.

pub mod decision;
pub mod lease;
pub mod status;
pub mod values;
