//! Operations on a whole clip, as the reference encoders use them: time along the rows, nothing carried.

use laneway_device::op::{Activation, Conv1d, CopyColumns, Gemm, Padding};
use laneway_device::{Launcher, Matrix, Result, View};

use super::load::{LoadError, Loader};

/// A convolution's or a linear layer's weights.
#[derive(Debug)]
pub(super) struct ClipLayer {
    pub(super) w: Matrix,
    pub(super) bias: Option<View>,
}

impl ClipLayer {
    /// `{name}.weight` `[c_out, c_in, taps]` and `{name}.bias`.
    pub(super) fn conv(load: &Loader<'_>, name: &str, shape: [usize; 3]) -> Result<Self, LoadError> {
        Ok(Self {
            bias: Some(load.floats(&format!("{name}.bias"), &shape[..1])?),
            ..Self::conv_without_bias(load, name, shape)?
        })
    }

    /// `{name}.weight` `[c_out, c_in, taps]`.
    pub(super) fn conv_without_bias(
        load: &Loader<'_>,
        name: &str,
        shape: [usize; 3],
    ) -> Result<Self, LoadError> {
        Ok(Self {
            w: load.conv(name, shape)?,
            bias: None,
        })
    }
}

/// How a convolution walks over its clip.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvShape {
    pub(super) taps: usize,
    pub(super) stride: usize,
    pub(super) dilation: usize,
    pub(super) pad_left: usize,
    pub(super) padding: Padding,
}

impl ConvShape {
    /// As many rows out as in, padded alike on both sides by mirroring.
    pub(super) fn same(taps: usize, dilation: usize) -> Self {
        Self {
            taps,
            stride: 1,
            dilation,
            pad_left: (taps - 1) * dilation / 2,
            padding: Padding::Reflect,
        }
    }

    /// No look-ahead beyond the stride; the last output may look behind the clip.
    pub(super) fn causal(taps: usize, stride: usize, dilation: usize, padding: Padding) -> Self {
        Self {
            taps,
            stride,
            dilation,
            pad_left: (taps - 1) * dilation + 1 - stride,
            padding,
        }
    }
}

/// Launches the operations of an encoder.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClipOps<'a>(pub(super) &'a Launcher<'a>);

/// Input and output activation of a convolution, and what is added to its result.
#[derive(Debug, Clone, Default)]
pub(super) struct ConvExtras {
    pub(super) input_activation: Activation,
    pub(super) activation: Activation,
    pub(super) residual: Option<View>,
}

impl ClipOps<'_> {
    /// Convolve `rows_in` rows; hands out the number of rows out.
    pub(super) fn conv(
        self,
        x: &View,
        rows_in: usize,
        layer: &ClipLayer,
        shape: ConvShape,
        extras: ConvExtras,
        out: &View,
    ) -> Result<usize> {
        let c_in = layer.w.k / shape.taps;
        let rows_out = rows_in.div_ceil(shape.stride);
        self.0.run(Conv1d {
            x: x.slice(0, rows_in * c_in),
            rows_in,
            rows_out,
            w: layer.w.clone(),
            bias: layer.bias.clone(),
            c_in,
            taps: shape.taps,
            stride: shape.stride,
            dilation: shape.dilation,
            pad_left: shape.pad_left,
            padding: shape.padding,
            input_activation: extras.input_activation,
            activation: extras.activation,
            residual: extras.residual,
            out: out.slice(0, rows_out * layer.w.n),
        })?;
        Ok(rows_out)
    }

    /// `out = activation(x · wᵀ + bias)`.
    pub(super) fn linear(
        self,
        x: &View,
        rows: usize,
        layer: &ClipLayer,
        activation: Activation,
        out: &View,
    ) -> Result<()> {
        self.0.run(Gemm {
            norm: None,
            gated: None,
            x: x.slice(0, rows * layer.w.k),
            rows,
            w: layer.w.clone(),
            bias: layer.bias.clone(),
            activation,
            scale: None,
            accumulate: false,
            out: out.slice(0, rows * layer.w.n),
            next: None,
        })
    }

    /// `out += scale · (x · wᵀ)`.
    pub(super) fn add_scaled(
        self,
        x: &View,
        rows: usize,
        w: &Matrix,
        scale: &View,
        out: &View,
    ) -> Result<()> {
        self.0.run(Gemm {
            norm: None,
            gated: None,
            x: x.slice(0, rows * w.k),
            rows,
            w: w.clone(),
            bias: None,
            activation: Activation::None,
            scale: Some(scale.clone()),
            accumulate: true,
            out: out.slice(0, rows * w.n),
            next: None,
        })
    }

    /// Copy `columns` columns between row layouts `(view, row length, first column)`, adding `add`'s.
    pub(super) fn columns(
        self,
        src: (&View, usize, usize),
        add: Option<(View, usize, usize)>,
        dst: (&View, usize, usize),
        rows: usize,
        columns: usize,
    ) -> Result<()> {
        self.0.run(CopyColumns {
            src: src.0.slice(0, rows * src.1),
            src_stride: src.1,
            src_first: src.2,
            add: add.map(|(view, stride, first)| (view.slice(0, rows * stride), stride, first)),
            rows,
            columns,
            dst: dst.0.slice(0, rows * dst.1),
            dst_stride: dst.1,
            dst_first: dst.2,
        })
    }
}
