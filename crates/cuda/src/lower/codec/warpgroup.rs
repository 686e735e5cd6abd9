//! Convolutions by Hopper's warpgroup products.
//!
//! A block has one warpgroup that stages inputs, and one to three that make 64 outputs each of all rows of its tile. Which
//! shapes come here, and into how many slices their sum is cut, is the shape's own; rows pick the tile, which changes no bit.

use laneway_device::DType;
use laneway_device::op;

use super::{aligned_operands, conv_args, slices};
use crate::launch::Launch;
use crate::lower::Target;

/// Outputs of a warpgroup.
const OUTPUTS: usize = 64;
/// Warpgroups that multiply, at most.
const MOST_WARPGROUPS: usize = 3;
/// Threads of a warpgroup.
const THREADS: usize = 128;
/// Buffers for chunks, at most.
const MOST_BUFFERS: usize = 4;
/// Rows of history with which the smallest tile fits: which kernel runs must not depend on rows.
const MOST_PAST: usize = 128;
/// Widest chunk of channels worth staging at once: more would only be waited for.
const WIDEST_CHUNK: usize = 96;

/// A tile of `conv_warpgroup_*`: runs of rows, each within one window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    units: usize,
    unit: usize,
}

impl Tile {
    const fn rows(self) -> usize {
        self.units * self.unit
    }
}

const FEW: Tile = Tile { units: 1, unit: 32 };
/// Rates that 160 divides.
const RUN: Tile = Tile { units: 1, unit: 160 };

/// Kernels by taps and tile, and what channels they take at a time.
const KERNELS: &[(usize, Tile, usize, &str)] = &[
    (2, FEW, 64, "conv_warpgroup_2_1x32"),
    (2, RUN, 32, "conv_warpgroup_2_1x160"),
];

/// How one launch divides the work.
#[derive(Debug, Clone, Copy)]
struct Plan {
    kernel: &'static str,
    warpgroups: usize,
    /// Blocks of a cluster, which share the slices.
    cluster: usize,
    chunk: usize,
    buffers: usize,
    staged: usize,
    pitch: usize,
    shared: usize,
    grid: [usize; 2],
    /// Estimated, in cycles.
    cost: usize,
}

/// Whether warpgroups make `op`: its shape decides, whatever its rows.
pub(super) fn takes(op: &op::Conv, target: Target) -> bool {
    let past = (op.taps - 1) * op.dilation;
    let slice = op.c_in / slices(op.c_in, op.w.k);
    let passes = KERNELS
        .iter()
        .filter(|(taps, ..)| *taps == op.taps)
        .all(|(_, _, channels, _)| slice.is_multiple_of(*channels));
    target.arch == 90
        && op.w.packed.dtype() == DType::F16
        && KERNELS.iter().any(|(taps, ..)| *taps == op.taps)
        && passes
        && op.w.n >= OUTPUTS
        && op.w.n.is_multiple_of(16)
        && op.windows.rate.is_multiple_of(FEW.unit)
        && past <= MOST_PAST
        && aligned_operands(op)
}

pub(super) fn conv(op: &op::Conv, target: Target) -> Option<Launch> {
    if !takes(op, target) {
        return None;
    }
    let slices = slices(op.c_in, op.w.k);
    // Blocks of a cluster each take one slice, or four, or there is one with all.
    let clusters: &[usize] = match slices {
        1 => &[1],
        8 => &[8, 2],
        _ => &[slices, 1],
    };
    let mut best: Option<Plan> = None;
    for &(taps, tile, pass, kernel) in KERNELS {
        if taps != op.taps || !op.windows.rate.is_multiple_of(tile.unit) {
            continue;
        }
        for &cluster in clusters {
            for warpgroups in 1..=MOST_WARPGROUPS {
                let cut = Cut {
                    kernel,
                    tile,
                    pass,
                    slices,
                    cluster,
                    warpgroups,
                };
                if let Some(plan) = cut.plan(op, target)
                    && best.is_none_or(|best| plan.cost < best.cost)
                {
                    best = Some(plan);
                }
            }
        }
    }
    let plan = best?;
    Some(Launch {
        kernel: plan.kernel,
        grid: [plan.grid[0] as u32, plan.grid[1] as u32, 1],
        block: ((plan.warpgroups + 1) * THREADS) as u32,
        shared: plan.shared as u32,
        cluster: plan.cluster as u32,
        args: conv_args(op)
            .int(slices)
            .int(plan.cluster)
            .int(plan.chunk)
            .int(plan.buffers)
            .int(plan.staged)
            .int(plan.pitch),
    })
}

/// One way to divide the work.
#[derive(Debug, Clone, Copy)]
struct Cut {
    kernel: &'static str,
    tile: Tile,
    /// Channels that the kernel takes at a time.
    pass: usize,
    slices: usize,
    cluster: usize,
    warpgroups: usize,
}

impl Cut {
    /// What becomes of it; `None` when it does not fit a multiprocessor.
    fn plan(self, op: &op::Conv, target: Target) -> Option<Plan> {
        let past = (op.taps - 1) * op.dilation;
        let rows = self.tile.rows();
        let pitch = self.tile.unit + past;
        let staged = self.tile.units * pitch;
        let (share, slice) = (self.slices / self.cluster, op.c_in / self.slices);
        let channels = slice * share;
        let tables = (64 + (MOST_BUFFERS + 1) * rows * 4 + 16 + staged * 16).next_multiple_of(128);
        let sums = rows * (MOST_WARPGROUPS * OUTPUTS + 4) * 4;
        let group_rows = (staged + 6) / 8 * 8 + 1;
        let needed = |chunk: usize, buffers: usize| {
            let stage = buffers * chunk * group_rows * 2;
            tables
                + match (share, self.cluster) {
                    (1, 1) => stage,
                    (1, _) => stage.max(sums),
                    _ => stage + sums,
                }
        };
        let (processor, most) = target.shared_memory();
        // Two warpgroups that multiply take the registers of more than half a multiprocessor.
        let beside = if self.warpgroups == 1 { 2 } else { 1 };
        let budget = most.min(processor / beside - 1024);
        let (chunk, buffers) = (1..=slice / self.pass)
            .filter(|parts| (slice / self.pass).is_multiple_of(*parts))
            .map(|parts| slice / parts)
            .filter(|&chunk| chunk <= WIDEST_CHUNK)
            .find_map(|chunk| {
                let buffers = (2..=MOST_BUFFERS).rev();
                let fits = buffers
                    .into_iter()
                    .find(|&buffers| needed(chunk, buffers) <= budget);
                fits.map(|buffers| (chunk, buffers))
            })?;
        let row_tiles = op.rows.div_ceil(rows);
        let across = op.w.n.div_ceil(self.warpgroups * OUTPUTS) * self.cluster;
        let room = target.sms as usize * beside;
        // A cluster's blocks do one tile: their sums take the place of its inputs.
        let (down, rounds) = match self.cluster {
            1 => {
                let down = row_tiles.min((room / across).max(1));
                (down, row_tiles.div_ceil(down) * across.div_ceil(room))
            }
            _ => (row_tiles, (across * row_tiles).div_ceil(room)),
        };
        // What bounds a tile: products, weights from the second cache, or inputs made by one warp a scheduler.
        let steps = channels / 16 * op.taps;
        let multiply = steps * (self.warpgroups * rows / 2 * beside * 5 / 4).max(100);
        let weights = steps * self.warpgroups * beside * 2048 / 24;
        let stage = staged * channels * beside / 3;
        let each = multiply.max(weights).max(stage) + 5000 + usize::from(self.cluster > 1) * 3000;
        Some(Plan {
            kernel: self.kernel,
            warpgroups: self.warpgroups,
            cluster: self.cluster,
            chunk,
            buffers,
            staged,
            pitch,
            shared: needed(chunk, buffers),
            grid: [across, down],
            cost: rounds * each,
        })
    }
}
