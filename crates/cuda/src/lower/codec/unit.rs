//! Residual units by Hopper's warpgroup products: both convolutions in one kernel whose blocks keep all weights.

use laneway_device::DType;
use laneway_device::op;

use super::{aligned, aligned_operands, conv_args};
use crate::launch::Launch;
use crate::lower::Target;

/// Channels, inputs and outputs of both convolutions alike.
const CHANNELS: usize = 96;
const TAPS: usize = 7;
/// Rows of a tile, which lies in one window.
const ROWS: usize = 128;
/// Tiles staged at once.
const BUFFERS: usize = 2;
const THREADS: u32 = 512;

/// Barriers, four vectors of the channels, and the weights of both convolutions.
const FIXED: usize =
    (128 + 4 * CHANNELS * 4_usize).next_multiple_of(128) + (TAPS + 1) * CHANNELS * CHANNELS * 2;

fn shared(op: &op::Conv) -> usize {
    // An odd count of rows, see the kernel.
    let rows = (ROWS + (TAPS - 1) * op.dilation) | 1;
    FIXED + BUFFERS * rows * CHANNELS * 2
}

/// Whether one kernel makes `op`: its shape decides, whatever its rows.
pub(super) fn takes(op: &op::Conv, target: Target) -> bool {
    let Some(pointwise) = &op.pointwise else {
        return false;
    };
    let views = [&pointwise.snake.alpha, &pointwise.snake.inv_beta];
    let (_, most) = target.shared_memory();
    target.arch == 90
        && op.w.packed.dtype() == DType::F16
        && pointwise.w.packed.dtype() == DType::F16
        && [op.c_in, op.w.n, pointwise.w.n] == [CHANNELS; 3]
        && op.taps == TAPS
        && op.snake.is_some()
        && op.residual.is_some()
        && !op.clamp
        && op.windows.rate.is_multiple_of(ROWS)
        && shared(op) <= most
        && aligned_operands(op)
        && views.into_iter().chain(&pointwise.bias).all(aligned)
}

pub(super) fn conv(op: &op::Conv, target: Target) -> Option<Launch> {
    let pointwise = op.pointwise.as_ref().filter(|_| takes(op, target))?;
    Some(Launch {
        kernel: "unit_warpgroup_96",
        grid: [op.rows.div_ceil(ROWS).min(target.sms as usize) as u32, 1, 1],
        block: THREADS,
        shared: shared(op) as u32,
        cluster: 1,
        args: conv_args(op)
            .view(&pointwise.w.packed.view())
            .optional(pointwise.bias.as_ref())
            .view(&pointwise.snake.alpha)
            .view(&pointwise.snake.inv_beta),
    })
}
