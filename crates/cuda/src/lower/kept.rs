//! How the kernels keep what products take and make: the rule, in one place.
//!
//! What goes into a product and nowhere else (see [`laneway_device::Device::activation_dtype`]) may lie as its reader
//! likes best. The warpgroup products of 9.0 fetch their inputs as they lie, so these lie in blocks of rows there:
//! within a block, eight columns of all its rows lie together. Whoever writes such a view and whoever reads it have the
//! same rows and width, so both come to the same answer here.

use laneway_device::{DType, View};

use super::Target;

/// As the kernels number it (`KEPT_*` in `kernels/common.cuh`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    /// f32, by rows.
    F32 = 0,
    /// 16 bits, by rows.
    Rows = 1,
    /// 16 bits, in blocks of rows: see [`blocked_at`].
    Blocked = 2,
}

/// Rows of a block; the last one of a view has as many as there are.
pub(super) const ROW_BLOCK: usize = 64;
/// Widths of which the warpgroup products take any multiple: each of the eight segments is a whole number of fetches.
const BLOCKED_WIDTH: usize = 1024;

impl Kept {
    /// Of `[rows, width]` of `dtype` that goes into a product, or comes out of one.
    pub(crate) fn of(dtype: DType, rows: usize, width: usize, arch: u32) -> Self {
        match dtype {
            DType::Bf16 | DType::F16 if blocked(rows, width, arch) => Self::Blocked,
            DType::Bf16 | DType::F16 => Self::Rows,
            _ => Self::F32,
        }
    }

    pub(super) fn of_view(view: &View, rows: usize, width: usize, target: Target) -> Self {
        Self::of(view.buffer.dtype(), rows, width, target.arch)
    }
}

/// Whether `[rows, width]` of 16 bits lies in blocks of rows.
fn blocked(rows: usize, width: usize, arch: u32) -> bool {
    arch == 90 && rows > 0 && width.is_multiple_of(BLOCKED_WIDTH)
}

/// Rows of the block that has `row`.
pub(super) fn block_rows(row: usize, rows: usize) -> usize {
    ROW_BLOCK.min(rows - row / ROW_BLOCK * ROW_BLOCK)
}

/// Where an element of [`Kept::Blocked`] lies; `width` is a multiple of eight.
pub(crate) fn blocked_at(row: usize, rows: usize, column: usize, width: usize) -> usize {
    let first = row / ROW_BLOCK * ROW_BLOCK;
    first * width + (column / 8 * block_rows(row, rows) + row - first) * 8 + column % 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_wide_16_bit_views_lie_in_blocks_and_only_on_hopper() {
        for (dtype, rows, width, arch, kept) in [
            (DType::Bf16, 9, 1024, 90, Kept::Blocked),
            (DType::F16, 300, 6144, 90, Kept::Blocked),
            (DType::Bf16, 1, 1024, 90, Kept::Blocked),
            (DType::Bf16, 9, 1536, 90, Kept::Rows),
            (DType::Bf16, 9, 1024, 89, Kept::Rows),
            // Warpgroup products of 9.0 are in no later architecture.
            (DType::Bf16, 9, 1024, 100, Kept::Rows),
            (DType::F32, 9, 1024, 90, Kept::F32),
        ] {
            assert_eq!(
                Kept::of(dtype, rows, width, arch),
                kept,
                "{dtype:?} {rows}x{width} on {arch}"
            );
        }
    }

    #[test]
    fn blocks_fill_a_view_and_eight_columns_of_their_rows_lie_together() {
        for rows in [9, 64, 65, 130] {
            let width = 1024;
            let mut places: Vec<usize> = (0..rows * width)
                .map(|i| blocked_at(i / width, rows, i % width, width))
                .collect();
            assert_eq!(places[..8], [0, 1, 2, 3, 4, 5, 6, 7], "{rows} rows");
            // The next row's eight columns are next, the next eight columns of a row behind those of all rows.
            assert_eq!(places[width], 8, "{rows} rows");
            assert_eq!(places[8], 8 * rows.min(64), "{rows} rows");
            if rows > 64 {
                assert_eq!(places[64 * width], 64 * width, "{rows} rows");
                assert_eq!(
                    places[64 * width + 8],
                    64 * width + 8 * (rows % 64).max(rows - 64).min(64)
                );
            }
            places.sort_unstable();
            assert!(places.iter().enumerate().all(|(i, at)| i == *at), "{rows} rows");
        }
    }
}
