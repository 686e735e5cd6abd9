//! The CPU device: streams are in-order executors on threads, operations their reference implementations.

pub(crate) mod storage;
