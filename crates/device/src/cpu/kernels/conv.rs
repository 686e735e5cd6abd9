//! Causal convolutions over streams with carried state.
//!
//! Each window is copied, activated, behind its slot's state into a scratch: an output row then is one row of
//! a matrix product whose k elements are runs of the scratch, whatever the window's width.

use super::gemm::{Epilogue, Product, Residual, RowRef, Runs, Weights};
use super::math::{chunks, sin_squared};
use super::scratch::{Scratch, sized};
use super::simd::{Kernel, Level, Simd};
use crate::op::Activation;

/// One stream's part of a step, in time rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) first: usize,
    pub(crate) rows: usize,
    /// First element of the slot's part of the state.
    pub(crate) state: usize,
}

/// SnakeBeta's factors.
#[derive(Clone, Copy)]
pub(crate) struct Snake<'a> {
    pub(crate) alpha: &'a [f32],
    pub(crate) inv_beta: &'a [f32],
}

/// See [`crate::op::Conv`].
pub(crate) struct Conv<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) w: Weights<'a>,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) c_in: usize,
    pub(crate) c_out: usize,
    pub(crate) taps: usize,
    pub(crate) dilation: usize,
    pub(crate) snake: Option<Snake<'a>>,
    /// The whole pool; empty when `taps` is 1.
    pub(crate) state: &'a mut [f32],
    pub(crate) residual: Residual<'a>,
    pub(crate) clamp: bool,
    pub(crate) out: &'a mut [f32],
}

/// Run a convolution over the windows in `scratch`.
pub(crate) fn conv(level: Level, op: Conv<'_>, scratch: &mut Scratch) {
    let (c_in, past) = (op.c_in, (op.taps - 1) * op.dilation);
    let Scratch {
        data, rows, windows, ..
    } = scratch;
    let total: usize = windows.iter().map(|w| past + w.rows).sum();
    let data = sized(data, total * c_in);
    rows.clear();
    let mut start = 0;
    for window in windows {
        let here = &mut data[start * c_in..][..(past + window.rows) * c_in];
        let (before, now) = here.split_at_mut(past * c_in);
        let x = &op.x[window.first * c_in..][..now.len()];
        match op.snake {
            Some(snake) => level.run(CopySnake { x, snake, out: now }),
            None => now.copy_from_slice(x),
        }
        if past > 0 {
            let state = &mut op.state[window.state..][..past * c_in];
            before.copy_from_slice(state);
            state.copy_from_slice(&here[window.rows * c_in..]);
        }
        rows.extend((0..window.rows).map(|t| RowRef {
            input: (start + t) * c_in,
            output: window.first + t,
        }));
        start += past + window.rows;
    }
    level.run(Product {
        x: data,
        rows,
        runs: Runs::taps(op.taps, c_in, op.dilation),
        w: op.w,
        n: op.c_out,
        epilogue: Epilogue {
            bias: op.bias,
            activation: Activation::None,
            scale: None,
            residual: op.residual,
            clamp: op.clamp,
        },
        out: op.out,
    });
}

struct CopySnake<'a> {
    x: &'a [f32],
    snake: Snake<'a>,
    out: &'a mut [f32],
}

impl Kernel for CopySnake<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let channels = self.snake.alpha.len();
        for (c, n) in chunks(channels) {
            let alpha = s.load_part(&self.snake.alpha[c..], n, 0.0);
            let inv_beta = s.load_part(&self.snake.inv_beta[c..], n, 0.0);
            let inputs = self.x.chunks_exact(channels);
            for (x, out) in inputs.zip(self.out.chunks_exact_mut(channels)) {
                let x = s.load_part(&x[c..], n, 0.0);
                let y = s.fma(sin_squared(s, s.mul(x, alpha)), inv_beta, x);
                s.store_part(y, &mut out[c..], n);
            }
        }
    }
}

/// See [`crate::op::DepthwiseConv`].
pub(crate) struct DepthwiseConv<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) w: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) channels: usize,
    pub(crate) taps: usize,
    pub(crate) state: &'a mut [f32],
    pub(crate) out: &'a mut [f32],
}

/// Run a depthwise convolution over the windows in `scratch`.
pub(crate) fn depthwise_conv(level: Level, op: DepthwiseConv<'_>, scratch: &mut Scratch) {
    let (channels, past) = (op.channels, op.taps - 1);
    for window in &scratch.windows {
        let data = sized(&mut scratch.data, (past + window.rows) * channels);
        let (before, now) = data.split_at_mut(past * channels);
        now.copy_from_slice(&op.x[window.first * channels..][..now.len()]);
        let state = &mut op.state[window.state..][..past * channels];
        before.copy_from_slice(state);
        state.copy_from_slice(&data[window.rows * channels..]);
        level.run(Depthwise {
            x: data,
            w: op.w,
            bias: op.bias,
            out: &mut op.out[window.first * channels..][..window.rows * channels],
        });
    }
}

struct Depthwise<'a> {
    x: &'a [f32],
    w: &'a [f32],
    bias: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Depthwise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let channels = self.bias.len();
        for (t, out) in self.out.chunks_exact_mut(channels).enumerate() {
            let inputs = &self.x[t * channels..];
            for (c, n) in chunks(channels) {
                let mut sum = s.splat(0.0);
                for (w, x) in self.w.chunks_exact(channels).zip(inputs.chunks_exact(channels)) {
                    sum = s.fma(s.load_part(&x[c..], n, 0.0), s.load_part(&w[c..], n, 0.0), sum);
                }
                let sum = s.add(sum, s.load_part(&self.bias[c..], n, 0.0));
                s.store_part(sum, &mut out[c..], n);
            }
        }
    }
}

#[cfg(test)]
mod tests;
