//! Storage behind a CUDA buffer.

use laneway_device::Buffer;

/// What a buffer's storage is: where it lies, and what frees it.
#[derive(Debug)]
pub(crate) struct CudaStorage {
    /// Device address; for pinned memory the host address, which the device can use too.
    pub(crate) base: u64,
}

/// Device address of a buffer's first byte.
pub(crate) fn base(buffer: &Buffer) -> u64 {
    buffer
        .storage()
        .downcast_ref::<CudaStorage>()
        .expect("a CUDA operation only meets CUDA buffers")
        .base
}
