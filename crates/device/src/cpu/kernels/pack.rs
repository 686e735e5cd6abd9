//! How the CPU device stores a weight matrix.

use crate::cpu::CpuDevice;
use crate::{BufferSpec, Device, Matrix, MatrixSpec, Place, Result};

/// Store `spec` row-major, as the checkpoint has it.
pub(crate) fn pack_matrix(device: &CpuDevice, spec: MatrixSpec<'_>) -> Result<Matrix> {
    let packed = device.alloc_with(
        BufferSpec {
            name: spec.name.to_owned(),
            dtype: spec.dtype,
            len: spec.n * spec.k,
            place: Place::Device,
        },
        spec.data,
    )?;
    Ok(Matrix {
        packed,
        n: spec.n,
        k: spec.k,
    })
}
