//! Operands for tests that lower operations and run nothing.

use laneway_device::{Buffer, BufferSpec, DType, Place, View};

use crate::memory::CudaStorage;

/// A buffer of `len` elements at an address that the driver could have given.
pub(super) fn view(dtype: DType, len: usize) -> View {
    let id = Buffer::next_id();
    let spec = BufferSpec {
        name: format!("operand {id}"),
        dtype,
        len,
        place: Place::Device,
    };
    let storage = CudaStorage::fake(id << 32);
    Buffer::from_storage(id, spec, Box::new(storage)).view()
}
