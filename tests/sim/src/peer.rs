//! A connected plugin, seen from the runtime.
