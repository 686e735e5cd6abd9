//! A worker: one share of a device, with the nodes of its plan, behind `laneway.v1.Worker`.
//!
//! Owns: registration with the engine-manager, loading and warm-up, admission, health and drain, and the frames
//! that go from a Talker worker to a Codec worker. Prompts are built and requests are submitted off the async
//! threads; the engine has threads of its own.
//!
//! Must not know: how a step is scheduled, or what a node computes.

pub mod backend;
mod builders;
mod decode;
pub mod device;
pub mod engine_backend;
mod failure;
mod listen;
mod manager;
mod meter;
mod output;
mod peer;
mod relay;
mod report;
mod serve;
mod service;
mod share;
mod state;
#[cfg(test)]
mod tests;
mod trace;
mod warm_up;
mod wire;

pub use manager::RegisterError;
pub use serve::{Load, WorkerConfig, WorkerServer};
