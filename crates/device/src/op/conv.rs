//! Convolutions: causal ones over streams with carried state, and one-shot ones over whole clips.

use super::{Activation, StateSlice};
use crate::{Matrix, View};

/// How packed rows divide into streams. Window i covers time rows
/// `first * rate .. (first + frames) * rate` of every operand, with `first` and `frames` read from
/// `windows[i] = (first, frames, slot)`.
#[derive(Debug, Clone)]
pub struct Windows {
    /// `[count, 3]` i32; a window of 0 frames is skipped.
    pub windows: View,
    /// Number of windows.
    pub count: usize,
    /// Time rows a frame at this depth.
    pub rate: usize,
}

/// SnakeBeta: `x + sin²(x · alpha) · inv_beta`, per channel, both precomputed (`e^alpha`, `1/(e^beta+1e-9)`).
#[derive(Debug, Clone)]
pub struct Snake {
    /// `[channels]`
    pub alpha: View,
    /// `[channels]`
    pub inv_beta: View,
}

/// A convolution of one tap over what another one gives, `bias[o] + Σ_c snake(y)[t, c] · w[o, c]`: with the two and
/// what is added to them as one operation a device may keep `y` to itself.
#[derive(Debug, Clone)]
pub struct Pointwise {
    /// Applied to `y` first.
    pub snake: Snake,
    /// Weight `[n, c_out]`.
    pub w: Matrix,
    /// Bias `[n]`.
    pub bias: Option<View>,
}

/// Causal dilated convolution over streams with carried state:
/// `out[t] = bias + Σ_tap Σ_c snake(x)[t - (taps-1-tap)·dilation, c] · w[o, tap·c_in + c]` (+ residual, then
/// clamp to ±1 if asked). With a `pointwise` this is `y`, and what is added and clamped is the pointwise one's result.
/// What lies before a window comes from the slot's state (the last
/// `(taps-1)·dilation` *activated* inputs, `[time, c_in]`), which is updated. A causal transposed convolution
/// of stride s and kernel 2s (or s) is this with `taps` 2 (1) and `c_out = s · channels`: time-major
/// `[t, s·channels]` is `[t·s, channels]`.
#[derive(Debug, Clone)]
pub struct Conv {
    /// Input `[time, c_in]`.
    pub x: View,
    /// Time rows in all windows together.
    pub rows: usize,
    /// Weight `[c_out, taps · c_in]`, tap-major.
    pub w: Matrix,
    /// Bias `[c_out]`.
    pub bias: Option<View>,
    /// Input channels.
    pub c_in: usize,
    /// Kernel taps.
    pub taps: usize,
    /// Dilation.
    pub dilation: usize,
    /// Applied to the input first.
    pub snake: Option<Snake>,
    /// Carried inputs; `None` when `taps` is 1.
    pub state: Option<StateSlice>,
    /// Streams.
    pub windows: Windows,
    /// A second convolution of one tap behind this one.
    pub pointwise: Option<Pointwise>,
    /// At least [`Conv::scratch_len`] elements, of no use afterwards. With a `pointwise` there is one; else a device may be
    /// faster for it.
    pub scratch: Option<View>,
    /// Added to the result, `[time, outputs]`; may be `out`, or `x`.
    pub residual: Option<View>,
    /// Clamp the result to ±1.
    pub clamp: bool,
    /// Output `[time, outputs]` (see [`Conv::outputs`]); not `x`.
    pub out: View,
}

impl Conv {
    /// Channels of the output.
    pub fn outputs(&self) -> usize {
        self.pointwise
            .as_ref()
            .map_or(self.w.n, |pointwise| pointwise.w.n)
    }

    /// f32 elements of a scratch: room for what lies between the two convolutions, `[time, c_out]`, or, in 16 bits, for that
    /// and all inputs with every window's carried ones ahead of its own.
    pub fn scratch_len(&self) -> usize {
        let carried = self.windows.count * (self.taps - 1) * self.dilation;
        let between = self.pointwise.as_ref().map_or(0, |_| self.w.n);
        let staged = (self.rows + carried) * (self.c_in + between);
        staged.div_ceil(2).max(self.rows * between)
    }

    /// The two convolutions of which one with a `pointwise` consists, by way of its scratch; one without as it is.
    pub fn parts(&self) -> (Conv, Option<Conv>) {
        let Some(pointwise) = &self.pointwise else {
            return (self.clone(), None);
        };
        let scratch = self
            .scratch
            .as_ref()
            .expect("a second convolution without a scratch is refused where operations are checked");
        let between = scratch.slice(0, self.rows * self.w.n);
        let first = Conv {
            pointwise: None,
            scratch: None,
            residual: None,
            clamp: false,
            out: between.clone(),
            ..self.clone()
        };
        let second = Conv {
            x: between,
            scratch: None,
            w: pointwise.w.clone(),
            bias: pointwise.bias.clone(),
            c_in: self.w.n,
            taps: 1,
            dilation: 1,
            snake: Some(pointwise.snake.clone()),
            state: None,
            pointwise: None,
            ..self.clone()
        };
        (first, Some(second))
    }
}

/// Depthwise causal convolution with carried state: `out[t, c] = bias[c] + Σ_tap x[t-(taps-1-tap), c] · w[tap, c]`.
#[derive(Debug, Clone)]
pub struct DepthwiseConv {
    /// Input `[time, channels]`.
    pub x: View,
    /// Time rows in all windows together.
    pub rows: usize,
    /// Weight `[taps, channels]` f32.
    pub w: View,
    /// Bias `[channels]`.
    pub bias: View,
    /// Channels.
    pub channels: usize,
    /// Kernel taps.
    pub taps: usize,
    /// Carried inputs `[taps - 1, channels]`.
    pub state: StateSlice,
    /// Streams.
    pub windows: Windows,
    /// Output `[time, channels]`; not `x`.
    pub out: View,
}

/// How a one-shot convolution fills what lies outside its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// Zeros.
    Zero,
    /// Mirror without repeating the edge.
    Reflect,
    /// Repeat the edge.
    Replicate,
}

/// One-shot convolution of a whole clip (reference encoders):
/// `out[t] = act(bias + Σ_tap Σ_c in_act(x)[t·stride + tap·dilation - pad_left, c] · w[o, tap·c_in+c])` (+ residual).
#[derive(Debug, Clone)]
pub struct Conv1d {
    /// Input `[rows_in, c_in]`.
    pub x: View,
    /// Input time rows.
    pub rows_in: usize,
    /// Output time rows.
    pub rows_out: usize,
    /// Weight `[c_out, taps · c_in]`, tap-major.
    pub w: Matrix,
    /// Bias `[c_out]`.
    pub bias: Option<View>,
    /// Input channels.
    pub c_in: usize,
    /// Kernel taps.
    pub taps: usize,
    /// Stride.
    pub stride: usize,
    /// Dilation.
    pub dilation: usize,
    /// Rows before the input.
    pub pad_left: usize,
    /// How they (and those behind it) are filled.
    pub padding: Padding,
    /// Applied to the input first.
    pub input_activation: Activation,
    /// Applied after the bias.
    pub activation: Activation,
    /// Added last, `[rows_out, c_out]`; may be `out`.
    pub residual: Option<View>,
    /// Output `[rows_out, c_out]`; not `x`.
    pub out: View,
}
