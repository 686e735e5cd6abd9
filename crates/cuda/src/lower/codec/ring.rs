//! Residual units of 192 channels by Hopper's warpgroup products, with weights that come through shared memory. (Units of
//! 384, which two blocks share, and upsampling were slower this way than with weights from memory.)
//!
//! A block has one warpgroup that brings weights and inputs, and three that make 64 outputs each of all rows of its tile.
//! Blocks of a cluster share what they read: those of other rows the weights, and those of other outputs of a residual
//! unit what lies between its convolutions. Which shapes come here is the shape's own; rows pick tile and cluster, which
//! change no bit.

use laneway_device::DType;
use laneway_device::op;

use super::{aligned, aligned_operands, conv_args};
use crate::launch::Launch;
use crate::lower::Target;

/// Outputs of a block.
const OUTPUTS: usize = 192;
/// Channels staged at a time.
const CHUNK: usize = 48;
/// Weights of a chunk and a tap, for a block's outputs.
const STAGE_BYTES: usize = OUTPUTS * CHUNK * 2;
/// Barriers and tables.
const FIXED_BYTES: usize = 1024;
const THREADS: u32 = 512;
/// Fewest and most stages of weights, and chunks of inputs, that there is room for.
const STAGES: (usize, usize) = (3, 6);
const INPUTS: (usize, usize) = (2, 4);
const UNIT_TAPS: usize = 7;
/// Rows of history with which the smallest tile fits.
const MOST_PAST: usize = 64;

/// A tile: a run of rows within one window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    rows: usize,
    kernel: &'static str,
}

/// The first one takes every rate that comes here; of two that cost the same the earlier one is taken.
const TILES: [Tile; 2] = [
    Tile {
        rows: 32,
        kernel: "unit_ring_1x32",
    },
    Tile {
        rows: 160,
        kernel: "unit_ring_1x160",
    },
];

/// Whether one kernel makes `op`: its shape decides, whatever its rows.
pub(super) fn takes(op: &op::Conv, target: Target) -> bool {
    let past = (op.taps - 1) * op.dilation;
    let Some(pointwise) = &op.pointwise else {
        return false;
    };
    let snake = &pointwise.snake;
    let views = [&snake.alpha, &snake.inv_beta];
    [op.c_in, op.w.n, pointwise.w.n] == [OUTPUTS; 3]
        && op.taps == UNIT_TAPS
        && op.residual.is_some()
        && pointwise.w.packed.dtype() == DType::F16
        && views.into_iter().chain(&pointwise.bias).all(aligned)
        && target.arch == 90
        && op.w.packed.dtype() == DType::F16
        && !op.clamp
        && op.windows.rate.is_multiple_of(TILES[0].rows)
        && past <= MOST_PAST
        && aligned_operands(op)
}

/// How one launch divides the work.
#[derive(Debug, Clone, Copy)]
struct Plan {
    kernel: &'static str,
    items: usize,
    wide: usize,
    across: usize,
    down: usize,
    inputs: usize,
    stages: usize,
    shared: usize,
    clusters: usize,
    /// Estimated, in cycles.
    cost: usize,
}

pub(super) fn conv(op: &op::Conv, target: Target) -> Option<Launch> {
    if !takes(op, target) {
        return None;
    }
    let plans = TILES.iter().filter_map(|tile| plan(op, *tile, target));
    let plan = plans.min_by_key(|plan| plan.cost)?;
    let mut args = conv_args(op);
    if let Some(pointwise) = &op.pointwise {
        args = args
            .view(&pointwise.w.packed.view())
            .optional(pointwise.bias.as_ref())
            .view(&pointwise.snake.alpha)
            .view(&pointwise.snake.inv_beta);
    }
    let cluster = plan.across * plan.down;
    Some(Launch {
        kernel: plan.kernel,
        grid: [(plan.clusters * cluster) as u32, 1, 1],
        block: THREADS,
        shared: plan.shared as u32,
        cluster: cluster as u32,
        args: args
            .int(plan.items)
            .int(plan.wide)
            .int(plan.across.ilog2() as usize)
            .int(plan.down.ilog2() as usize)
            .int(plan.inputs)
            .int(plan.stages),
    })
}

/// What becomes of a tile; `None` when windows do not divide into it, or it does not fit a multiprocessor.
fn plan(op: &op::Conv, tile: Tile, target: Target) -> Option<Plan> {
    let Tile { rows, kernel } = tile;
    if !op.windows.rate.is_multiple_of(rows) {
        return None;
    }
    let staged = rows + (op.taps - 1) * op.dilation;
    // Odd counts of rows, see the kernel.
    let input_bytes = CHUNK * 2 * (staged | 1);
    let inner_bytes = op.w.n * 2 * (rows | 1);
    let needed = |stages: usize, inputs: usize| {
        FIXED_BYTES + stages * STAGE_BYTES + inputs * input_bytes + inner_bytes
    };
    let (_, most) = target.shared_memory();
    let (mut stages, mut inputs) = (STAGES.0, INPUTS.0);
    if needed(stages, inputs) > most {
        return None;
    }
    loop {
        if stages < STAGES.1 && stages <= inputs + 1 && needed(stages + 1, inputs) <= most {
            stages += 1;
        } else if inputs < INPUTS.1 && needed(stages, inputs + 1) <= most {
            inputs += 1;
        } else if stages < STAGES.1 && needed(stages + 1, inputs) <= most {
            stages += 1;
        } else {
            break;
        }
    }

    let blocks = op.w.n.div_ceil(OUTPUTS);
    let across = blocks;
    let tiles = op.rows.div_ceil(rows);
    let down = tiles.min(2);
    let (wide, room) = (blocks / across, (target.sms as usize / (across * down)).max(1));
    let items = tiles.div_ceil(down) * wide;
    let clusters = items.min(room);
    // Products, or weights on their way to a multiprocessor.
    let steps = (op.taps + 1) * op.c_in / 16;
    let each = steps * (3 * rows / 2).max(160) + 3000 + 25 * rows;
    Some(Plan {
        kernel,
        items,
        wide,
        across,
        down,
        inputs,
        stages,
        shared: needed(stages, inputs),
        clusters,
        cost: items.div_ceil(clusters) * each,
    })
}
