//! The engine-manager: owns the deployment, hands each worker its plan, and keeps the topology that gateways watch.
//!
//! Must not know: devices. It judges a deployment from what nodes, resources and workers report.

mod deployment;
pub mod mps;
pub mod registry;
mod server;
mod service;

pub use deployment::Served;
pub use server::EngineManager;
