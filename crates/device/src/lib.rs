//! Streams, events, buffers and operations: everything the engine and the models know of a machine.
//!
//! Owns: the [`Device`] and [`Stream`] traits, the closed set of operations ([`Op`]) with the buffers that
//! each one reads and writes, the CPU device (streams are in-order executors on threads, and every operation
//! has its reference implementation here), and the stream sanitizer.
//!
//! Must not know: models, nodes, requests, lanes, CUDA, the wire. A lane is just a [`Stream`] to this crate.
//! The CUDA device implements the same traits in its own crate.

mod buffer;
mod cpu;
mod error;
pub mod op;
pub mod sanitize;
mod stream;
pub mod testing;

pub use buffer::{Buffer, BufferSpec, DType, Matrix, MatrixSpec, Place, View};
pub use cpu::{CpuConfig, CpuDevice, open_cpu};
pub use error::{DeviceError, Result};
pub use op::Op;
pub use stream::{
    Device, DeviceFacts, Event, EventImpl, Graph, Launcher, Priority, Stream, StreamConfig, Touch, TouchKind,
    Touches,
};
