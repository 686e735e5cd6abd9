//! The matrix product behind `Gemm`, `Conv` and `Conv1d`.
//!
//! Every output element is one chain of fused multiply-adds over k ascending, in one lane of one accumulator.
//! Which rows and columns share a tile decides only how fast it is, so a row has the same bits alone and in
//! any batch. (A large product may later be split over threads by panels or rows for the same reason.)

use super::math::activate;
use super::pack::PANEL;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Kernel, LANES, Portable, Simd};
use crate::op::Activation;

/// Most rows of a tile.
const MAX_ROWS: usize = 16;

/// A packed weight matrix, see `pack`.
#[derive(Clone, Copy)]
pub(crate) enum Weights<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

/// Where one row of a product comes from and goes to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowRef {
    /// First element in the input.
    pub(crate) input: usize,
    /// Row of the output.
    pub(crate) output: usize,
}

/// How the k elements of a row lie in the input: `count` runs of `len` elements, `stride` apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Runs {
    pub(crate) count: usize,
    pub(crate) len: usize,
    pub(crate) stride: usize,
}

impl Runs {
    /// k elements side by side.
    pub(crate) fn contiguous(k: usize) -> Self {
        Self {
            count: 1,
            len: k,
            stride: 0,
        }
    }

    /// The taps of a convolution over time-major rows of `c_in` channels.
    pub(crate) fn taps(taps: usize, c_in: usize, dilation: usize) -> Self {
        if dilation == 1 || taps == 1 {
            return Self::contiguous(taps * c_in);
        }
        Self {
            count: taps,
            len: c_in,
            stride: dilation * c_in,
        }
    }

    fn k(self) -> usize {
        self.count * self.len
    }

    /// Elements from the first to behind the last.
    fn span(self) -> usize {
        (self.count - 1) * self.stride + self.len
    }
}

/// What is added to a result.
#[derive(Clone, Copy)]
pub(crate) enum Residual<'a> {
    None,
    /// What the output holds.
    Output,
    /// Another operand of the output's shape.
    Other(&'a [f32]),
}

/// What happens to a sum before it is stored: bias, activation, scale, residual, clamp, in this order.
pub(crate) struct Epilogue<'a> {
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) activation: Activation,
    pub(crate) scale: Option<&'a [f32]>,
    pub(crate) residual: Residual<'a>,
    pub(crate) clamp: bool,
}

/// `out[row.output] = epilogue(x[row.input ..] · wᵀ)` for every row.
pub(crate) struct Product<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) rows: &'a [RowRef],
    pub(crate) runs: Runs,
    pub(crate) w: Weights<'a>,
    pub(crate) n: usize,
    pub(crate) epilogue: Epilogue<'a>,
    /// `[any, n]`
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Tiles>(self, s: S) {
        match self.w {
            Weights::F32(w) => self.columns(s, w),
            Weights::Bf16(w) => self.columns(s, w),
        }
    }
}

impl Product<'_> {
    #[inline(always)]
    fn columns<S: Tiles, W: Weight>(mut self, s: S, w: &[W]) {
        let k = self.runs.k();
        if self.rows.is_empty() || k == 0 {
            return;
        }
        for row in self.rows {
            assert!(
                row.input + self.runs.span() <= self.x.len(),
                "row {row:?} leaves the input"
            );
        }
        for first in (0..self.n).step_by(PANEL) {
            let width = PANEL.min((self.n - first).next_multiple_of(W::UNITS * LANES));
            let panel = &w[first * k..][..width * k];
            let mut column = 0;
            while column < width {
                let units = S::units::<W>(self.rows.len(), (width - column) / LANES);
                self.strip(s, panel, width, first, column, units);
                column += units * LANES;
            }
        }
    }

    /// All rows of one strip of `units` vectors of columns.
    #[inline(always)]
    fn strip<S: Tiles, W: Weight>(
        &mut self,
        s: S,
        panel: &[W],
        width: usize,
        first: usize,
        column: usize,
        units: usize,
    ) {
        let mut tile = [[0.0; PANEL]; MAX_ROWS];
        let mut rest = self.rows;
        while !rest.is_empty() {
            let (rows, behind) = rest.split_at(S::rows(rest.len(), units));
            rest = behind;
            let operands = TileOperands {
                x: self.x,
                rows,
                runs: self.runs,
                w: &panel[column..],
                width,
            };
            W::multiply(s, &operands, units, &mut tile);
            let (epilogue, n, out) = (&self.epilogue, self.n, &mut *self.out);
            s.vectorize(
                #[inline(always)]
                || epilogue.apply(s, &tile, rows, first + column, units, n, out),
            );
        }
    }
}

impl Epilogue<'_> {
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // One call site; a struct would only rename the list.
    fn apply<S: Simd>(
        &self,
        s: S,
        tile: &[[f32; PANEL]; MAX_ROWS],
        rows: &[RowRef],
        column: usize,
        units: usize,
        n: usize,
        out: &mut [f32],
    ) {
        for unit in 0..units {
            let c = column + unit * LANES;
            if c >= n {
                break;
            }
            let lanes = LANES.min(n - c);
            let bias = self.bias.map(
                #[inline(always)]
                |bias| s.load_part(&bias[c..], lanes, 0.0),
            );
            let scale = self.scale.map(
                #[inline(always)]
                |scale| s.load_part(&scale[c..], lanes, 0.0),
            );
            for (sums, row) in tile.iter().zip(rows) {
                let at = row.output * n + c;
                let mut v = s.load(&sums[unit * LANES..]);
                if let Some(bias) = bias {
                    v = s.add(v, bias);
                }
                v = activate(s, self.activation, v);
                if let Some(scale) = scale {
                    v = s.mul(v, scale);
                }
                match self.residual {
                    Residual::None => {}
                    Residual::Output => v = s.add(s.load_part(&out[at..], lanes, 0.0), v),
                    Residual::Other(x) => v = s.add(s.load_part(&x[at..], lanes, 0.0), v),
                }
                if self.clamp {
                    v = s.max(s.min(v, s.splat(1.0)), s.splat(-1.0));
                }
                s.store_part(v, &mut out[at..], lanes);
            }
        }
    }
}

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
    x: &'a [f32],
    rows: &'a [RowRef],
    runs: Runs,
    /// The panel from the strip's first column on.
    w: &'a [W],
    /// Columns of the panel.
    width: usize,
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
type Tile = [[f32; PANEL]; MAX_ROWS];

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::simd::Level;
    use crate::cpu::kernels::testing::{Packed, Random, as_bf16, bits, error};

    struct Case {
        n: usize,
        k: usize,
        w: Vec<f32>,
        packed: Packed,
        bias: Vec<f32>,
        scale: Vec<f32>,
    }

    impl Case {
        fn new(random: &mut Random, n: usize, k: usize, bf16: bool) -> Self {
            let w = as_bf16(&random.vec(n * k));
            Self {
                n,
                k,
                packed: Packed::new(&w, n, k, bf16),
                w,
                bias: random.vec(n),
                scale: random.vec(n),
            }
        }

        fn run(&self, level: Level, x: &[f32], out: &mut [f32], residual: Residual<'_>) {
            let rows: Vec<RowRef> = (0..x.len() / self.k)
                .map(|r| RowRef {
                    input: r * self.k,
                    output: r,
                })
                .collect();
            level.run(Product {
                x,
                rows: &rows,
                runs: Runs::contiguous(self.k),
                w: self.packed.weights(),
                n: self.n,
                epilogue: Epilogue {
                    bias: Some(&self.bias),
                    activation: Activation::Relu,
                    scale: Some(&self.scale),
                    residual,
                    clamp: false,
                },
                out,
            });
        }

        fn want(&self, x: &[f32], before: &[f32]) -> Vec<f64> {
            let mut want = Vec::new();
            for (r, x) in x.chunks_exact(self.k).enumerate() {
                for o in 0..self.n {
                    let w = &self.w[o * self.k..][..self.k];
                    let sum: f64 = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    let v = (sum + f64::from(self.bias[o])).max(0.0) * f64::from(self.scale[o]);
                    want.push(v + f64::from(before[r * self.n + o]));
                }
            }
            want
        }
    }

    #[test]
    fn matches_f64_and_does_not_depend_on_the_batch() {
        let mut random = Random::new(1);
        for (n, k) in [
            (1, 7),
            (16, 16),
            (40, 33),
            (64, 20),
            (96, 50),
            (200, 112),
            (300, 5),
        ] {
            for bf16 in [false, true] {
                let case = Case::new(&mut random, n, k, bf16);
                for level in Level::available() {
                    let x = random.vec(23 * k);
                    let before = random.vec(23 * n);
                    let mut all = before.clone();
                    case.run(level, &x, &mut all, Residual::Output);
                    let error = error(&all, &case.want(&x, &before));
                    assert!(error < 2e-6, "[{n}, {k}] {level:?}: {error:e}");

                    let mut other = vec![f32::NAN; all.len()];
                    case.run(level, &x, &mut other, Residual::Other(&before));
                    assert_eq!(
                        bits(&other),
                        bits(&all),
                        "[{n}, {k}] {level:?} residual elsewhere"
                    );

                    for batch in 1..=17 {
                        let mut split = before.clone();
                        for (x, out) in x.chunks(batch * k).zip(split.chunks_mut(batch * n)) {
                            case.run(level, x, out, Residual::Output);
                        }
                        assert_eq!(
                            bits(&split),
                            bits(&all),
                            "[{n}, {k}] {level:?} in batches of {batch}"
                        );
                    }
                }
            }
        }
    }
}
