//! What a deployment is and whether it may run: pure data and rules, no device, no network.
//!
//! Owns: the deployment configuration (raw and checked), model declarations, the node-to-lane validator with
//! every refusal, memory budgets, and the worker plan that the engine-manager hands out.
//!
//! Must not know: any particular model (declarations come from `models-decl`), devices, gRPC.
//!
//! # From a file to a worker
//!
//! ```text
//! Sources ──load──▶ Loaded ──check(declaration, inventory)──▶ Deployment ──for_rank──▶ WorkerPlan
//! file, environment,   raw values, their places,                 every rule passed
//! flags                violations so far
//! ```
//!
//! 1. [`load()`] reads every layer into one tree, remembering where each value was written, and turns the tree
//!    into [`raw::RawDeployment`]. An entry that does not fit is written down and taken out, and reading goes on.
//! 2. The caller finds the model's [`declaration::ModelDeclaration`] (`models-decl` does both steps in one
//!    call) and adds what it alone can find, such as a model that does not exist.
//! 3. [`Loaded::check`] is the only validator. It returns a [`Deployment`] or every [`Violation`] at once, each
//!    with its code, place and remedy; [`render`] prints them.
//! 4. [`WorkerPlan::for_rank`] cuts out what one worker needs.
//!
//! # To add a rule
//!
//! Give it a [`Reason`]; write it in `placement` if it decides what may live on a lane (and in that module's
//! oracle, in other words), else under `check`; add a case to `check/tests/refusals.rs`, which fails for a
//! reason without one. A rule reads what resources report; if it needs to know more, resources must report more.

pub mod budget;
mod check;
pub mod declaration;
pub mod deployment;
pub mod inventory;
pub mod load;
pub mod mps;
mod placement;
pub mod raw;
#[cfg(test)]
mod test_support;
pub mod violation;
pub mod worker_plan;

pub use deployment::Deployment;
pub use inventory::{DeviceInventory, DeviceSpec, Origin};
pub use load::{Loaded, Sources, load, stray_variables};
pub use violation::{Location, Reason, Violation, render};
pub use worker_plan::WorkerPlan;
