//! The CUDA device: the same [`laneway_device::Device`] on an NVIDIA GPU.
//!
//! Owns: the driver's context, streams with priority and partition, events, memory, graph capture and replay; the
//! kernels (`kernels/*.cu`, compiled by NVRTC and cached on disk); and the lowering of each operation to
//! kernel launches.
//!
//! Must not know: models, nodes, requests, lanes, the wire.
//!
//! Nothing here links against CUDA: driver and compiler are loaded when a device is opened, and a machine
//! without them gets an error that says so.

pub mod bench;
mod cache;
pub mod check;
mod context;
mod cubin;
mod detect;
mod device;
mod error;
mod event;
mod graph;
mod kernels;
mod launch;
mod lower;
mod memory;
mod nvrtc;
mod partition;
mod stream;
#[cfg(test)]
mod tests;
mod upload;

pub use detect::{Gpu, gpus};
pub use device::{CudaConfig, CudaDevice, OVERLAP_VARIABLE, Precision, SERIALIZE_VARIABLE, open_cuda};
pub use event::TimedEvent;
pub use memory::{GuardDamage, GuardSide};
pub use nvrtc::NVRTC_DIR_VARIABLE;
