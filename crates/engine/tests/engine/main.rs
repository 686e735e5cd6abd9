//! The engine as its callers and its nodes see it, on the CPU device under the stream sanitizer.
#![allow(clippy::unwrap_used)] // Tests.

mod arms;
mod behaviour;
mod invariants;
mod random;
mod support;
mod windows;
