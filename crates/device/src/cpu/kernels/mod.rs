//! Reference implementations of the operations.

pub(crate) mod pack;
