//! The matrix product behind `Gemm`, `Conv` and `Conv1d`.
//!
//! Every output element is one chain of fused multiply-adds over k ascending, in one lane of one accumulator.
//! Which rows and columns share a tile decides only how fast it is, so a row has the same bits alone and in
//! any batch. (A large product may later be split over threads by panels or rows for the same reason.)

use super::math::activate;
use super::pack::PANEL;
use super::simd::{Kernel, LANES, Simd};
use crate::op::Activation;

mod tiles;

pub(crate) use tiles::Tiles;
use tiles::{Tile, TileOperands, Weight};

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
        tile: &Tile,
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

#[cfg(test)]
mod tests;
