//! The engine-manager: owns the deployment, hands each worker its plan, and keeps the topology that gateways watch.
//!
//! Must not know: devices (it judges a deployment from what nodes, resources and workers report).

pub mod registry;
