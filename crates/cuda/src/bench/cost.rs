//! What an operation must at least move and compute.

use laneway_device::{Op, View, op};

/// Bytes per second that memory delivers, and bf16 operations per second: an H200, as measured.
pub(crate) const BYTES_PER_S: f64 = 4.3e12;
pub(crate) const FLOP_PER_S: f64 = 790e12;

/// Activations below this stay in the cache between two operations.
const CACHED_BYTES: f64 = 24e6;

/// Bytes from memory and floating-point operations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Weights, caches, carried state, and activations too large for the cache.
    pub bytes: f64,
    /// A multiplication and an addition are two.
    pub flops: f64,
}

impl Cost {
    /// Seconds that it takes at least.
    pub fn floor_s(&self) -> f64 {
        (self.bytes / BYTES_PER_S).max(self.flops / FLOP_PER_S)
    }
}

impl std::ops::Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            bytes: self.bytes + other.bytes,
            flops: self.flops + other.flops,
        }
    }
}

/// Bytes of `len` elements of the view's type.
fn bytes(view: &View, len: usize) -> f64 {
    (len * view.buffer.dtype().size()) as f64
}

/// 4-byte activations.
fn activations(elements: usize) -> f64 {
    let bytes = 4.0 * elements as f64;
    if bytes > CACHED_BYTES { bytes } else { 0.0 }
}

fn weights(w: &laneway_device::Matrix) -> f64 {
    (w.n * w.k * w.packed.dtype().size()) as f64
}

/// Times that a row of outputs goes to or from memory: a residual that is the input comes with it.
fn added(op: &op::Conv) -> usize {
    let apart = |residual: &View| residual.buffer.id() != op.x.buffer.id() || residual.start != op.x.start;
    1 + usize::from(op.residual.as_ref().is_some_and(apart))
}

/// `positions`: keys that a row of an attention sees.
pub(crate) fn cost(op: &Op, positions: usize) -> Cost {
    match op {
        Op::Gemm(op) => Cost {
            bytes: weights(&op.w) + activations(op.rows * (op.w.k + op.out_width())),
            flops: 2.0 * (op.rows * op.w.n * op.w.k) as f64,
        },
        Op::Conv(op) => Cost {
            bytes: weights(&op.w)
                + op.pointwise
                    .as_ref()
                    .map_or(0.0, |pointwise| weights(&pointwise.w))
                + activations(op.rows * (op.c_in + op.outputs() * added(op)))
                + op.state.as_ref().map_or(0.0, |state| {
                    2.0 * bytes(
                        &state.pool,
                        op.windows.count * (op.taps - 1) * op.dilation * op.c_in,
                    )
                }),
            flops: 2.0
                * (op.rows
                    * (op.w.n * op.w.k + op.pointwise.as_ref().map_or(0, |second| second.w.n * second.w.k)))
                    as f64,
        },
        Op::DepthwiseConv(op) => Cost {
            bytes: activations(2 * op.rows * op.channels)
                + 2.0 * bytes(&op.state.pool, op.windows.count * (op.taps - 1) * op.channels),
            flops: 2.0 * (op.rows * op.channels * op.taps) as f64,
        },
        Op::Attention(op) => attention(&op.cache, op.rows, op.heads, positions),
        Op::DecodeAttention(op) => attention(&op.qkv.cache, op.qkv.rows, op.qkv.heads, positions),
        Op::Embed(op) => Cost {
            bytes: op
                .tables
                .iter()
                .map(|table| bytes(table, op.rows * op.width))
                .sum(),
            flops: 0.0,
        },
        _ => Cost::default(),
    }
}

fn attention(cache: &op::KvCache, rows: usize, heads: usize, positions: usize) -> Cost {
    Cost {
        bytes: 2.0 * bytes(&cache.pool, rows * positions * cache.kv_heads * cache.head_dim),
        flops: 4.0 * (rows * positions * heads * cache.head_dim) as f64,
    }
}
