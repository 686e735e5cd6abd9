//! Kernels of the reference encoders: whole clips, once a request.

use super::gemm::{Epilogue, Product, Residual, RowRef, Runs, Weights};
use super::math::{activate, chunks, exp};
use super::norm::Input;
use super::scratch::{Scratch, sized};
use super::simd::{Kernel, Level, Simd};
use crate::op::{Activation, Padding};

/// See [`crate::op::Conv1d`].
pub(crate) struct Conv1d<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) rows_in: usize,
    pub(crate) rows_out: usize,
    pub(crate) w: Weights<'a>,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) c_in: usize,
    pub(crate) c_out: usize,
    pub(crate) taps: usize,
    pub(crate) stride: usize,
    pub(crate) dilation: usize,
    pub(crate) pad_left: usize,
    pub(crate) padding: Padding,
    pub(crate) input_activation: Activation,
    pub(crate) activation: Activation,
    pub(crate) residual: Residual<'a>,
    pub(crate) out: &'a mut [f32],
}

/// Run a one-shot convolution: pad and activate into a scratch, then one matrix product.
///
/// # Errors
/// When the clip is too short to be mirrored or repeated.
pub(crate) fn conv1d(level: Level, op: Conv1d<'_>, scratch: &mut Scratch) -> Result<(), String> {
    if op.rows_out == 0 {
        return Ok(());
    }
    let c_in = op.c_in;
    let rows = (op.rows_out - 1) * op.stride + (op.taps - 1) * op.dilation + 1;
    let data = sized(&mut scratch.data, rows * c_in);
    let row_refs = &mut scratch.rows;
    row_refs.clear();
    for (i, to) in data.chunks_exact_mut(c_in).enumerate() {
        let t = i as isize - op.pad_left as isize;
        match source_row(t, op.rows_in, op.padding)? {
            Some(t) => to.copy_from_slice(&op.x[t * c_in..][..c_in]),
            None => to.fill(0.0),
        }
    }
    if op.input_activation != Activation::None {
        level.run(Activate {
            activation: op.input_activation,
            x: data,
        });
    }
    row_refs.extend((0..op.rows_out).map(|t| RowRef {
        input: t * op.stride * c_in,
        output: t,
    }));
    level.run(Product {
        x: data,
        rows: row_refs,
        runs: Runs::taps(op.taps, c_in, op.dilation),
        w: op.w,
        n: op.c_out,
        epilogue: Epilogue {
            bias: op.bias,
            activation: op.activation,
            scale: None,
            residual: op.residual,
            clamp: false,
        },
        out: op.out,
    });
    Ok(())
}

/// The row that stands at time `t` of a clip of `rows`; `None`: zeros.
fn source_row(t: isize, rows: usize, padding: Padding) -> Result<Option<usize>, String> {
    let last = rows as isize - 1;
    if (0..=last).contains(&t) {
        return Ok(Some(t as usize));
    }
    let t = match padding {
        Padding::Zero => return Ok(None),
        Padding::Reflect => {
            if t < 0 {
                -t
            } else {
                2 * last - t
            }
        }
        Padding::Replicate => t.clamp(0, last.max(0)),
    };
    if (0..=last).contains(&t) {
        return Ok(Some(t as usize));
    }
    Err(format!(
        "a clip of {rows} rows is too short for {padding:?} padding"
    ))
}

struct Activate<'a> {
    activation: Activation,
    x: &'a mut [f32],
}

impl Kernel for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (i, n) in chunks(self.x.len()) {
            let y = activate(s, self.activation, s.load_part(&self.x[i..], n, 0.0));
            s.store_part(y, &mut self.x[i..], n);
        }
    }
}

/// See [`crate::op::TimeStats`]; the number of channels is the mean's.
pub(crate) struct TimeStats<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weights: Option<&'a [f32]>,
    pub(crate) mean: &'a mut [f32],
    pub(crate) std: Option<&'a mut [f32]>,
}

/// Weights of `n` channels from element `at` on.
#[inline(always)]
fn weight<S: Simd>(s: S, weights: Option<&[f32]>, at: usize, n: usize, uniform: S::V) -> S::V {
    match weights {
        Some(weights) => s.load_part(&weights[at..], n, 0.0),
        None => uniform,
    }
}

impl Kernel for TimeStats<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let channels = self.mean.len();
        let rows = self.x.len() / channels;
        let uniform = s.splat(1.0 / rows as f32);
        let mut std = self.std;
        for (c, n) in chunks(channels) {
            let mut mean = s.splat(0.0);
            for r in 0..rows {
                mean = s.fma(
                    weight(s, self.weights, r * channels + c, n, uniform),
                    s.load_part(&self.x[r * channels + c..], n, 0.0),
                    mean,
                );
            }
            s.store_part(mean, &mut self.mean[c..], n);
            let Some(std) = std.as_deref_mut() else { continue };
            let mut variance = s.splat(0.0);
            for r in 0..rows {
                let d = s.sub(s.load_part(&self.x[r * channels + c..], n, 0.0), mean);
                variance = s.fma(
                    weight(s, self.weights, r * channels + c, n, uniform),
                    s.mul(d, d),
                    variance,
                );
            }
            let variance = s.lanes(variance);
            for (std, variance) in std[c..][..n].iter_mut().zip(variance) {
                *std = variance.max(1e-12).sqrt();
            }
        }
    }
}

/// See [`crate::op::TimeSoftmax`].
pub(crate) struct TimeSoftmax<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) channels: usize,
}

impl Kernel for TimeSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let channels = self.channels;
        let rows = self.x.len() / channels;
        for (c, n) in chunks(channels) {
            let mut max = s.splat(f32::NEG_INFINITY);
            for r in 0..rows {
                max = s.max(max, s.load_part(&self.x[r * channels + c..], n, 0.0));
            }
            let mut total = s.splat(0.0);
            for r in 0..rows {
                let x = &mut self.x[r * channels + c..];
                let e = exp(s, s.sub(s.load_part(x, n, 0.0), max));
                s.store_part(e, x, n);
                total = s.add(total, e);
            }
            let inverse = s.div(s.splat(1.0), total);
            for r in 0..rows {
                let x = &mut self.x[r * channels + c..];
                s.store_part(s.mul(s.load_part(x, n, 0.0), inverse), x, n);
            }
        }
    }
}

/// See [`crate::op::ChannelScale`]; the number of channels is the scale's.
pub(crate) struct ChannelScale<'a> {
    pub(crate) x: Input<'a>,
    pub(crate) scale: &'a [f32],
    pub(crate) add: Residual<'a>,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for ChannelScale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let channels = self.scale.len();
        for (r, out) in self.out.chunks_exact_mut(channels).enumerate() {
            for (c, n) in chunks(channels) {
                let before = s.load_part(&out[c..], n, 0.0);
                let x = match self.x {
                    Input::Output => before,
                    Input::Other(x) => s.load_part(&x[r * channels + c..], n, 0.0),
                };
                let mut y = s.mul(x, s.load_part(&self.scale[c..], n, 0.0));
                match self.add {
                    Residual::None => {}
                    Residual::Output => y = s.add(y, before),
                    Residual::Other(add) => {
                        y = s.add(y, s.load_part(&add[r * channels + c..], n, 0.0));
                    }
                }
                s.store_part(y, &mut out[c..], n);
            }
        }
    }
}

/// The nearest entry of `book` to `x`, which is subtracted from it. See [`crate::op::NearestCode`].
pub(crate) struct NearestCode<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) book: &'a [f32],
}

impl Kernel for NearestCode<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let width = self.x.len();
        let (mut best, mut nearest) = (0, f32::INFINITY);
        for (code, entry) in self.book.chunks_exact(width).enumerate() {
            let mut sum = s.splat(0.0);
            for (c, n) in chunks(width) {
                let d = s.sub(
                    s.load_part(&self.x[c..], n, 0.0),
                    s.load_part(&entry[c..], n, 0.0),
                );
                sum = s.fma(d, d, sum);
            }
            let distance = s.sum(sum);
            if distance < nearest {
                (best, nearest) = (code, distance);
            }
        }
        for (x, e) in self.x.iter_mut().zip(&self.book[best * width..]) {
            *x -= e;
        }
        best
    }
}

#[cfg(test)]
mod tests;
