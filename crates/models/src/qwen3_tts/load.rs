//! From checkpoint tensors to device weights: packing, widening and re-laying for time-major convolutions.

use laneway_device::{BufferSpec, DType, Device, DeviceError, Matrix, Place, View};

use crate::checkpoint::parallel::fill;
use crate::checkpoint::{CheckpointError, Tensor, Weights};

/// Why a part of a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint lacks something.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Reads tensors of one set of weights under a name prefix and puts them on a device.
#[derive(Debug, Clone)]
pub(super) struct Loader<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) weights: &'a Weights,
    pub(super) prefix: String,
}

impl<'a> Loader<'a> {
    pub(super) fn new(device: &'a dyn Device, weights: &'a Weights, prefix: &str) -> Self {
        Self {
            device,
            weights,
            prefix: prefix.to_owned(),
        }
    }

    /// The loader of a deeper prefix.
    pub(super) fn under(&self, prefix: &str) -> Self {
        Self {
            prefix: format!("{}{prefix}", self.prefix),
            ..*self
        }
    }

    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        Ok(self.weights.expect(&format!("{}{name}", self.prefix), shape)?)
    }

    /// A tensor as f32 on the device: vectors and lookup tables.
    pub(super) fn floats(&self, name: &str, shape: &[usize]) -> Result<View, LoadError> {
        let tensor = self.tensor(name, shape)?;
        self.upload(&tensor.name, &tensor.to_f32())
    }

    /// A lookup table on the device in the checkpoint's own element type.
    pub(super) fn table(&self, name: &str, shape: &[usize]) -> Result<View, LoadError> {
        let tensor = self.tensor(name, shape)?;
        let spec = BufferSpec {
            name: tensor.name,
            dtype: tensor.dtype,
            len: shape.iter().product(),
            place: Place::Device,
        };
        Ok(self.device.alloc_with(spec, &tensor.data)?.view())
    }

    /// Computed values on the device.
    pub(super) fn upload(&self, name: &str, values: &[f32]) -> Result<View, LoadError> {
        let spec = BufferSpec {
            name: name.to_owned(),
            dtype: DType::F32,
            len: values.len(),
            place: Place::Device,
        };
        Ok(self.device.alloc_with(spec, bytemuck::cast_slice(values))?.view())
    }

    pub(super) fn pack(&self, tensor: &Tensor) -> Result<Matrix, LoadError> {
        Ok(self.device.pack_matrix(tensor.matrix())?)
    }

    /// A weight matrix; dimensions behind the first are one input dimension.
    pub(super) fn matrix(&self, name: &str, shape: &[usize]) -> Result<Matrix, LoadError> {
        self.pack(&self.tensor(name, shape)?)
    }

    /// A convolution `{name}.weight` `[c_out, c_in, taps]` as a tap-major matrix.
    pub(super) fn conv(&self, name: &str, shape: [usize; 3]) -> Result<Matrix, LoadError> {
        self.pack(&tap_major(&self.tensor(&format!("{name}.weight"), &shape)?))
    }

    /// Quantizer entries: each row of `sum` divided by how often the entry was used.
    pub(super) fn codebook(&self, sum: &str, entries: usize, width: usize) -> Result<View, LoadError> {
        let usage = self.tensor("cluster_usage", &[entries])?.to_f32();
        let sum = self.tensor(sum, &[entries, width])?;
        let mut values = sum.to_f32();
        for (row, usage) in values.chunks_exact_mut(width).zip(usage) {
            let usage = usage.max(MIN_USAGE);
            row.iter_mut().for_each(|value| *value /= usage);
        }
        self.upload(&sum.name, &values)
    }

    /// Rotary frequencies `theta^(-2i / head_dim)`, `[head_dim / 2]`.
    pub(super) fn inv_freq(&self, theta: f64, head_dim: usize) -> Result<View, LoadError> {
        let values: Vec<f32> = (0..head_dim / 2)
            .map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64) as f32)
            .collect();
        self.upload(&format!("{}inv_freq", self.prefix), &values)
    }
}

/// The reference's lower bound on an entry's usage count.
const MIN_USAGE: f32 = 1e-5;

/// `[c_out, c_in, taps]` to `[c_out, taps * c_in]`: how time-major rows lie one behind the other.
pub(super) fn tap_major(tensor: &Tensor) -> Tensor {
    let [c_out, c_in, taps] = dimensions(tensor);
    permuted(tensor, vec![c_out, taps * c_in], |o, column| {
        let (tap, i) = (column / c_in, column % c_in);
        (o * c_in + i) * taps + tap
    })
}

/// A transposed convolution `[c_in, c_out, kernel]` of stride s as a causal convolution over its inputs,
/// `[s * c_out, kernel / s * c_in]`: output sample `t * s + j` is `Σ x[t - back] · w[.., j + back * s]`, and
/// the oldest input comes first.
///
/// # Panics
/// When the kernel is no multiple of the stride: the caller checked the shape.
pub(super) fn transposed_as_conv(tensor: &Tensor, stride: usize) -> Tensor {
    let [c_in, c_out, kernel] = dimensions(tensor);
    assert!(
        kernel % stride == 0,
        "{}: kernel {kernel}, stride {stride}",
        tensor.name
    );
    let taps = kernel / stride;
    permuted(tensor, vec![stride * c_out, taps * c_in], |row, column| {
        let (j, o) = (row / c_out, row % c_out);
        let (tap, i) = (column / c_in, column % c_in);
        (i * c_out + o) * kernel + j + (taps - 1 - tap) * stride
    })
}

fn dimensions(tensor: &Tensor) -> [usize; 3] {
    tensor
        .shape
        .as_slice()
        .try_into()
        .expect("the caller asked for a tensor of three dimensions")
}

/// A matrix whose element `(row, column)` is the tensor's element `source(row, column)`.
fn permuted(tensor: &Tensor, shape: Vec<usize>, source: impl Fn(usize, usize) -> usize + Sync) -> Tensor {
    let (len, width) = (shape.iter().product(), shape[1]);
    let at = |i: usize| source(i / width, i % width);
    let data = match tensor.dtype.size() {
        2 => permuted_elements::<2>(&tensor.data, len, at),
        _ => permuted_elements::<4>(&tensor.data, len, at),
    };
    Tensor {
        name: tensor.name.clone(),
        shape,
        dtype: tensor.dtype,
        data,
    }
}

fn permuted_elements<const N: usize>(
    data: &[u8],
    len: usize,
    source: impl Fn(usize) -> usize + Sync,
) -> Vec<u8> {
    let elements = data.as_chunks::<N>().0;
    fill(len, |i| elements[source(i)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(shape: [usize; 3]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| i as f32).collect();
        Tensor {
            name: "w".into(),
            shape: shape.to_vec(),
            dtype: DType::F32,
            data: bytemuck::cast_slice(&values).to_vec(),
        }
    }

    #[test]
    fn a_convolution_becomes_tap_major() {
        // w[o, c, tap] = 6 o + 3 c + tap
        let matrix = tap_major(&numbered([2, 2, 3]));
        assert_eq!(matrix.shape, [2, 6]);
        assert_eq!(
            matrix.to_f32(),
            [0., 3., 1., 4., 2., 5., 6., 9., 7., 10., 8., 11.]
        );
    }

    #[test]
    fn a_transposed_convolution_equals_its_definition() {
        let (c_in, c_out, stride) = (2, 3, 2);
        let kernel = 2 * stride;
        let w = numbered([c_in, c_out, kernel]);
        let values = w.to_f32();
        let x = [[1., -2.], [0.5, 3.], [4., -1.]];
        // By definition every input adds its kernel to the output at t * stride.
        let mut expected = vec![0.0; (x.len() + 1) * stride * c_out];
        for (t, column) in x.iter().enumerate() {
            for (i, value) in column.iter().enumerate() {
                for o in 0..c_out {
                    for k in 0..kernel {
                        expected[(t * stride + k) * c_out + o] +=
                            value * values[(i * c_out + o) * kernel + k];
                    }
                }
            }
        }
        let matrix = transposed_as_conv(&w, stride);
        let rows = matrix.to_f32();
        let k = matrix.shape[1];
        for t in 0..x.len() {
            let before = if t == 0 { [0., 0.] } else { x[t - 1] };
            let window = [before, x[t]].concat();
            for n in 0..matrix.shape[0] {
                let sum: f32 = (0..k).map(|c| window[c] * rows[n * k + c]).sum();
                assert_eq!(sum, expected[t * stride * c_out + n], "t {t} output {n}");
            }
        }
    }
}
