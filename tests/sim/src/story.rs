//! Building blocks for a demonstration: a scratch directory, processes, steps that are told.
