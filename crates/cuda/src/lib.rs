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

mod detect;
mod launch;
mod lower;
mod memory;

pub use detect::{Gpu, gpus};
