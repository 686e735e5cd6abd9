//! What a deployment is and whether it may run: pure data and rules, no device, no network.
//!
//! Owns: the deployment configuration (raw and checked), model declarations, the node-to-lane validator with
//! every refusal, memory budgets, and the worker plan that the engine-manager hands out.
//!
//! Must not know: any particular model (declarations come from `models-decl`), devices, gRPC.

pub mod budget;
mod check;
pub mod declaration;
pub mod deployment;
pub mod inventory;
pub mod load;
mod placement;
pub mod raw;
#[cfg(test)]
mod test_support;
pub mod violation;
pub mod worker_plan;

pub use deployment::Deployment;
pub use inventory::{DeviceInventory, DeviceSpec};
pub use load::{Loaded, Sources, load};
pub use violation::{Location, Reason, Violation, render};
pub use worker_plan::WorkerPlan;
