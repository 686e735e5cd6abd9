//! How the CPU device stores a weight matrix: panels of 64 output columns, each panel k-major, so that a
//! matrix kernel reads every weight once, in order, a vector of columns at a time.
//!
//! Only the last panel may be narrower; its width is rounded up to a whole vector (a pair of vectors for
//! bfloat16) and padded with zeros. Elements keep their type: bfloat16 is widened when it is loaded. For that
//! two vectors lie interleaved, so that one is the low and the other the high half of the same words.

use super::simd::LANES;
use crate::{BufferSpec, DType, Device, DeviceError, Matrix, MatrixSpec, Place, Result};

/// Columns of a full panel.
pub(crate) const PANEL: usize = 4 * LANES;

/// Elements of a packed `[n, k]` matrix.
pub(crate) fn packed_len(n: usize, k: usize, dtype: DType) -> usize {
    n.next_multiple_of(columns_together(dtype.size())) * k
}

/// Columns that a panel's width is a multiple of.
fn columns_together(element_size: usize) -> usize {
    if element_size == 2 { 2 * LANES } else { LANES }
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
            len: packed_len(n, k, spec.dtype),
            place: Place::Device,
        },
        &packed,
    )?;
    Ok(Matrix { packed: buffer, n, k })
}

/// The packed bytes of row-major `[n, k]` elements of `SIZE` bytes.
pub(crate) fn pack<const SIZE: usize>(data: &[u8], n: usize, k: usize) -> Vec<u8> {
    let (rows, _) = data.as_chunks::<SIZE>();
    let together = columns_together(SIZE);
    let mut out = vec![0u8; n.next_multiple_of(together) * k * SIZE];
    let (cells, _) = out.as_chunks_mut::<SIZE>();
    for first in (0..n).step_by(PANEL) {
        let columns = PANEL.min(n - first);
        let width = columns.next_multiple_of(together);
        let panel = &mut cells[first * k..][..width * k];
        for c in 0..columns {
            let row = &rows[(first + c) * k..][..k];
            let place = match SIZE {
                2 => c / together * together + c % LANES * 2 + c % together / LANES,
                _ => c,
            };
            for (i, value) in row.iter().enumerate() {
                panel[i * width + place] = *value;
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
        assert_eq!(packed.len(), packed_len(n, k, DType::F32));
        assert_eq!(packed[2 * 64 + 5], (5 * k + 2) as f32);
        let last = &packed[64 * k..];
        assert_eq!(last[16 + 3], (67 * k + 1) as f32);
        assert_eq!(last[16 + 6], 0.0);
    }

    #[test]
    fn bfloat16_columns_lie_in_interleaved_pairs_of_vectors() {
        let (n, k) = (70, 2);
        let data: Vec<u8> = (0..(n * k) as u16).flat_map(u16::to_le_bytes).collect();
        let packed = pack::<2>(&data, n, k);
        let packed: Vec<u16> = packed
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| u16::from_le_bytes(*b))
            .collect();
        assert_eq!(packed.len(), packed_len(n, k, DType::Bf16));
        assert_eq!(
            packed[64..68],
            [1, 16 * 2 + 1, 3, 17 * 2 + 1],
            "columns 0, 16, 1, 17 of k = 1"
        );
        assert_eq!(packed[32], 32 * 2, "column 32 of k = 0");
        assert_eq!(
            packed[64 * k..][..4],
            [64 * 2, 0, 65 * 2, 0],
            "the last panel is padded"
        );
    }
}
