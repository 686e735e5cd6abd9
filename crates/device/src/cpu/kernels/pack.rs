//! How the CPU device stores a weight matrix: panels of 64 output columns, each panel k-major, so that a
//! matrix kernel reads every weight once, in order, a vector of columns at a time.
//!
//! Only the last panel may be narrower; its width is rounded up to a whole vector and padded with zeros.
//! Elements keep their type: bfloat16 is widened when it is loaded.

use super::simd::LANES;
use crate::{BufferSpec, DType, Device, DeviceError, Matrix, MatrixSpec, Place, Result};

/// Columns of a full panel.
pub(crate) const PANEL: usize = 4 * LANES;

/// Elements of a packed `[n, k]` matrix.
pub(crate) fn packed_len(n: usize, k: usize) -> usize {
    n.next_multiple_of(LANES) * k
}

/// Pack `spec` into device memory.
///
/// # Errors
/// [`DeviceError::BadOperation`] for a type other than f32 or bfloat16 or data of the wrong length;
/// [`DeviceError::OutOfMemory`].
pub(crate) fn pack_matrix(device: &dyn Device, spec: MatrixSpec<'_>) -> Result<Matrix> {
    let (n, k) = (spec.n, spec.k);
    let bad = |problem: String| DeviceError::BadOperation {
        op: "pack_matrix",
        problem,
    };
    if !matches!(spec.dtype, DType::F32 | DType::Bf16) {
        return Err(bad(format!(
            "{}: weights are F32 or Bf16, not {:?}",
            spec.name, spec.dtype
        )));
    }
    let bytes = n * k * spec.dtype.size();
    if spec.data.len() != bytes {
        return Err(bad(format!(
            "{}: [{n}, {k}] {:?} takes {bytes} bytes, {} given",
            spec.name,
            spec.dtype,
            spec.data.len()
        )));
    }
    let packed = match spec.dtype.size() {
        2 => pack::<2>(spec.data, n, k),
        _ => pack::<4>(spec.data, n, k),
    };
    let buffer = device.alloc_with(
        BufferSpec {
            name: spec.name.to_owned(),
            dtype: spec.dtype,
            len: packed_len(n, k),
            place: Place::Device,
        },
        &packed,
    )?;
    Ok(Matrix { packed: buffer, n, k })
}

/// The packed bytes of row-major `[n, k]` elements of `SIZE` bytes.
pub(crate) fn pack<const SIZE: usize>(data: &[u8], n: usize, k: usize) -> Vec<u8> {
    let (rows, _) = data.as_chunks::<SIZE>();
    let mut out = vec![0u8; packed_len(n, k) * SIZE];
    let (cells, _) = out.as_chunks_mut::<SIZE>();
    for first in (0..n).step_by(PANEL) {
        let columns = PANEL.min(n - first);
        let width = columns.next_multiple_of(LANES);
        let panel = &mut cells[first * k..][..width * k];
        for c in 0..columns {
            let row = &rows[(first + c) * k..][..k];
            for (i, value) in row.iter().enumerate() {
                panel[i * width + c] = *value;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_are_k_major_and_padded() {
        let (n, k) = (70, 3);
        let data: Vec<u8> = (0..n * k).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let packed = pack::<4>(&data, n, k);
        let packed: Vec<f32> = packed
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        assert_eq!(packed.len(), packed_len(n, k));
        assert_eq!(packed[2 * 64 + 5], (5 * k + 2) as f32);
        let last = &packed[64 * k..];
        assert_eq!(last[16 + 3], (67 * k + 1) as f32);
        assert_eq!(last[16 + 6], 0.0);
    }
}
