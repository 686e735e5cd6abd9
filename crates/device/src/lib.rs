//! Streams, events, buffers and operations: everything the engine and the models know of a machine.
//!
//! Owns: the [`Device`] and [`Stream`] traits, the closed set of operations ([`Op`]) with the buffers that
//! each one reads and writes, the CPU device (streams are in-order executors on threads, and every operation
//! has its reference implementation here), and the stream sanitizer.
//!
//! Must not know: models, nodes, requests, lanes, CUDA, the wire. A lane is just a [`Stream`] to this crate.
//! The CUDA device implements the same traits in its own crate.
//!
//! Two streams, one event between them, under the sanitizer:
//!
//! ```
//! use laneway_device::op::Copy;
//! use laneway_device::{BufferSpec, DType, Place, Priority, StreamConfig, Touches, testing};
//! use std::time::Duration;
//!
//! # fn main() -> laneway_device::Result<()> {
//! let (device, sanitizer) = testing::cpu();
//! let stream = |name: &str| {
//!     device.create_stream(StreamConfig {
//!         name: name.to_owned(),
//!         priority: Priority::Normal,
//!         partition_sms: None,
//!     })
//! };
//! let buffer = |name: &str, place| {
//!     device.alloc(BufferSpec { name: name.to_owned(), dtype: DType::I32, len: 2, place })
//! };
//! let (chain, lane) = (stream("chain")?, stream("lane1")?);
//! let (staging, frames) = (buffer("staging", Place::Pinned)?, buffer("frames", Place::Device)?);
//! let result = buffer("result", Place::Pinned)?;
//!
//! device.host_write(&staging.view(), &[7, 0, 0, 0, 9, 0, 0, 0])?;
//! let upload = Copy { src: staging.view(), dst: frames.view() };
//! chain.launch(&upload.into(), &Touches::none())?;
//! let uploaded = chain.record()?;
//!
//! // Without this wait the next launch is a race, and refused.
//! lane.wait(&uploaded)?;
//! let download = Copy { src: frames.view(), dst: result.view() };
//! lane.launch(&download.into(), &Touches::none())?;
//! let done = lane.record()?;
//!
//! done.synchronize(Duration::from_secs(10))?;
//! let mut bytes = [0; 8];
//! device.host_read(&result.view(), &mut bytes)?;
//! assert_eq!(bytes, [7, 0, 0, 0, 9, 0, 0, 0]);
//! sanitizer.assert_clean();
//! # Ok(())
//! # }
//! ```

mod account;
mod buffer;
mod cpu;
mod error;
pub mod op;
pub mod sanitize;
mod stream;
pub mod testing;

pub use account::{MemoryAccount, MemoryLease};
pub use buffer::{Buffer, BufferSpec, DType, Matrix, MatrixSpec, Place, View};
pub use cpu::{CpuConfig, CpuDevice, open_cpu};
pub use error::{DeviceError, Result};
pub use op::Op;
pub use stream::{
    Device, DeviceFacts, Event, EventImpl, Graph, Launcher, Priority, Stream, StreamConfig, Touch, TouchKind,
    Touches,
};
