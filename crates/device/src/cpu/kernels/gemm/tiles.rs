//! Tiles of a matrix product: how many rows and columns are summed at once, and the loop that does it.

use super::{MAX_ROWS, RowRef, Runs};
use crate::cpu::kernels::pack::PANEL;
#[cfg(target_arch = "x86_64")]
use crate::cpu::kernels::simd::{Avx2, Avx512};
use crate::cpu::kernels::simd::{LANES, Portable, Simd};

/// A weight element.
pub(crate) trait Weight: Copy {
    /// Vectors of columns that lie together.
    const UNITS: usize;
    /// `UNITS` vectors of columns of one k.
    fn load<S: Simd, const UNITS: usize>(s: S, x: &[Self]) -> [S::V; UNITS];
    /// The level's tile function for this type.
    fn multiply<S: Tiles>(s: S, operands: &TileOperands<'_, Self>, units: usize, tile: &mut Tile);
}

impl Weight for f32 {
    const UNITS: usize = 1;

    #[inline(always)]
    fn multiply<S: Tiles>(s: S, operands: &TileOperands<'_, f32>, units: usize, tile: &mut Tile) {
        s.multiply_f32(operands, units, tile);
    }

    #[inline(always)]
    fn load<S: Simd, const UNITS: usize>(s: S, x: &[f32]) -> [S::V; UNITS] {
        let mut v = [s.splat(0.0); UNITS];
        for (v, x) in v.iter_mut().zip(x.chunks_exact(LANES)) {
            *v = s.load(x);
        }
        v
    }
}

impl Weight for u16 {
    const UNITS: usize = 2;

    #[inline(always)]
    fn multiply<S: Tiles>(s: S, operands: &TileOperands<'_, u16>, units: usize, tile: &mut Tile) {
        s.multiply_bf16(operands, units, tile);
    }

    #[inline(always)]
    fn load<S: Simd, const UNITS: usize>(s: S, x: &[u16]) -> [S::V; UNITS] {
        const {
            assert!(
                UNITS.is_multiple_of(2),
                "bfloat16 columns are packed in pairs of vectors"
            )
        };
        let mut v = [s.splat(0.0); UNITS];
        for (v, x) in v.chunks_exact_mut(2).zip(x.chunks_exact(2 * LANES)) {
            (v[0], v[1]) = s.load_bf16_pair(x);
        }
        v
    }
}

/// What one tile is computed from.
pub(crate) struct TileOperands<'a, W> {
    pub(super) x: &'a [f32],
    pub(super) rows: &'a [RowRef],
    pub(super) runs: Runs,
    /// The panel from the strip's first column on.
    pub(super) w: &'a [W],
    /// Columns of the panel.
    pub(super) width: usize,
}

impl<W> TileOperands<'_, W> {
    /// Whether each row starts `spacing` elements behind the one before.
    fn spaced(&self, spacing: usize) -> bool {
        self.rows
            .windows(2)
            .all(|pair| pair[0].input + spacing == pair[1].input)
    }
}

/// Sums of a tile, before the epilogue.
pub(crate) type Tile = [[f32; PANEL]; MAX_ROWS];

/// The tile sizes of a level: what its registers hold. Only these are compiled.
pub(crate) trait Tiles: Simd {
    /// Vectors of columns of the next strip, of `left` in the panel.
    fn units<W: Weight>(rows: usize, left: usize) -> usize;
    /// Rows of the next tile, of `left` in the strip.
    fn rows(left: usize, units: usize) -> usize;
    /// Sums of `rows` × `units` vectors of columns into `tile`.
    fn multiply_f32(self, operands: &TileOperands<'_, f32>, units: usize, tile: &mut Tile);
    /// As [`Tiles::multiply_f32`].
    fn multiply_bf16(self, operands: &TileOperands<'_, u16>, units: usize, tile: &mut Tile);
}

/// The two `multiply` functions with their tile sizes as (rows, units).
macro_rules! multiply {
    (f32: $($f32:tt),*; bf16: $($bf16:tt),* $(,)?) => {
        multiply!(@function multiply_f32, f32, $($f32),*);
        multiply!(@function multiply_bf16, u16, $($bf16),*);
    };
    (@function $name:ident, $weight:ty, $(($rows:literal, $units:literal)),*) => {
        #[inline(always)]
        fn $name(self, operands: &TileOperands<'_, $weight>, units: usize, tile: &mut Tile) {
            match (operands.rows.len(), units) {
                $(($rows, $units) => {
                    // Many rows have no register each for their address: spaced evenly by a known number they
                    // need only one.
                    if $rows > 8 && operands.spaced(16) {
                        self.vectorize(
                            #[inline(always)]
                            || multiply_tile::<Self, _, $rows, $units, 16>(self, operands, tile),
                        );
                    } else {
                        self.vectorize(
                            #[inline(always)]
                            || multiply_tile::<Self, _, $rows, $units, 0>(self, operands, tile),
                        );
                    }
                })*
                (rows, units) => unreachable!("no tile of {rows} rows and {units} vectors"),
            }
        }
    };
}

/// The largest of `sizes` (descending) that fits.
#[inline(always)]
fn largest(sizes: &[usize], left: usize) -> usize {
    sizes.iter().copied().find(|&size| size <= left).unwrap_or(1)
}

// 16 registers hold 2 vectors of sums, or a row of 4 with nothing to spare for a second row.
impl Tiles for Portable {
    #[inline(always)]
    fn units<W: Weight>(_rows: usize, _left: usize) -> usize {
        W::UNITS
    }
    #[inline(always)]
    fn rows(left: usize, units: usize) -> usize {
        if units == 1 { left.min(2) } else { 1 }
    }
    multiply!(f32: (1, 1), (2, 1); bf16: (1, 2));
}

// 16 registers, two to a vector: a single row keeps four vectors of sums in flight, more rows share one or two.
#[cfg(target_arch = "x86_64")]
impl Tiles for Avx2 {
    #[inline(always)]
    fn units<W: Weight>(rows: usize, left: usize) -> usize {
        if rows == 1 {
            largest(&[4, 2, 1], left)
        } else {
            W::UNITS
        }
    }
    #[inline(always)]
    fn rows(left: usize, units: usize) -> usize {
        match units {
            1 => largest(&[6, 4, 2, 1], left),
            2 => left.min(2),
            _ => 1,
        }
    }
    multiply!(
        f32: (1, 4), (1, 2), (2, 2), (1, 1), (2, 1), (4, 1), (6, 1);
        bf16: (1, 4), (1, 2), (2, 2)
    );
}

// 32 registers: 16 to 24 vectors of sums hide the latency of the additions. Whole panels are read in one stream
// and 6 rows use each weight; bfloat16 takes 8 rows at a time, because widening a weight costs as much as using
// it twice.
#[cfg(target_arch = "x86_64")]
impl Tiles for Avx512 {
    #[inline(always)]
    fn units<W: Weight>(rows: usize, left: usize) -> usize {
        largest(
            if W::UNITS == 1 || rows <= 6 {
                &[4, 2, 1]
            } else {
                &[2]
            },
            left,
        )
    }
    #[inline(always)]
    fn rows(left: usize, units: usize) -> usize {
        // Two tiles of the same height rather than a full one and a low one.
        match (units, left) {
            (4, 7..12) | (2, 9..16) => left.div_ceil(2),
            (4, _) => left.min(6),
            (2, _) => left.min(8),
            _ => largest(&[16, 8, 4, 2, 1], left),
        }
    }
    multiply!(
        f32: (1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (6, 4),
            (1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2), (8, 2),
            (1, 1), (2, 1), (4, 1), (8, 1), (16, 1);
        bf16: (1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (6, 4),
            (1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2), (8, 2)
    );
}

/// One tile. `SPACING`: elements from one row's input to the next, 0 when it is not known.
#[inline(always)]
fn multiply_tile<S: Simd, W: Weight, const ROWS: usize, const UNITS: usize, const SPACING: usize>(
    s: S,
    operands: &TileOperands<'_, W>,
    tile: &mut Tile,
) {
    let TileOperands {
        x,
        rows,
        runs,
        w,
        width,
    } = *operands;
    assert!(w.len() >= (runs.k() - 1) * width + UNITS * LANES);
    let mut acc = [[s.splat(0.0); UNITS]; ROWS];
    let mut w_at = 0;
    for run in 0..runs.count {
        let mut inputs = [&x[..0]; ROWS];
        if SPACING > 0 {
            let spread = (ROWS - 1) * SPACING;
            let all = &x[rows[0].input + run * runs.stride..][..spread + runs.len];
            for (r, input) in inputs.iter_mut().enumerate() {
                *input = &all[r * SPACING..];
            }
        } else {
            for (input, row) in inputs.iter_mut().zip(rows) {
                *input = &x[row.input + run * runs.stride..][..runs.len];
            }
        }
        for i in 0..runs.len {
            // SAFETY: ends at (k - 1) · width + UNITS · LANES or before, asserted above.
            let weights = W::load::<S, UNITS>(s, unsafe { w.get_unchecked(w_at..w_at + UNITS * LANES) });
            for (acc, input) in acc.iter_mut().zip(&inputs) {
                // SAFETY: every input slice has at least runs.len elements.
                let a = s.splat(unsafe { *input.get_unchecked(i) });
                for (acc, weights) in acc.iter_mut().zip(&weights) {
                    *acc = s.fma(a, *weights, *acc);
                }
            }
            w_at += width;
        }
    }
    for (acc, sums) in acc.iter().zip(tile) {
        for (u, acc) in acc.iter().enumerate() {
            s.store(*acc, &mut sums[u * LANES..]);
        }
    }
}
