//! Causal convolutions with carried state.
//!
//! 16-bit weights go through tensor cores. Early layers have few rows and much weight (a step of one stream has 32 rows
//! against 8 MB), late ones many rows and little weight, so the sum over k is cut into slices that the blocks of a
//! cluster share: weights then stream through every multiprocessor, and no block stages more inputs than those of
//! its slice. The weight's shape alone says how many slices; the rows pick the tile, which changes no bit.

mod ring;
mod staged;
mod unit;
mod warpgroup;

use laneway_device::op::{self, StateSlice, Windows};
use laneway_device::{DType, View};

use super::{Target, address};
use crate::launch::{Args, Launch};

/// What `conv_mma_*` makes of one size of tile.
struct Tile {
    bf16: &'static str,
    f16: &'static str,
    outputs: usize,
    rows: usize,
    threads: usize,
}

/// The tile for few rows.
const FEW: Tile = Tile {
    bf16: "conv_mma_bf16_64x32",
    f16: "conv_mma_f16_64x32",
    outputs: 64,
    rows: 32,
    threads: 256,
};
/// Tiles for more, widest first: a wide tile reads weights and inputs less often, but there must be enough of them.
const WIDE: [Tile; 3] = [
    Tile {
        bf16: "conv_mma_bf16_128x128",
        f16: "conv_mma_f16_128x128",
        outputs: 128,
        rows: 128,
        threads: 256,
    },
    Tile {
        bf16: "conv_mma_bf16_128x64",
        f16: "conv_mma_f16_128x64",
        outputs: 128,
        rows: 64,
        threads: 256,
    },
    FEW,
];
/// As [`WIDE`] for outputs that divide into 96, not into 128: 96, 192 and 288 of the released codec.
const NARROW: [Tile; 3] = [
    Tile {
        bf16: "conv_mma_bf16_96x128",
        f16: "conv_mma_f16_96x128",
        outputs: 96,
        rows: 128,
        threads: 192,
    },
    Tile {
        bf16: "conv_mma_bf16_96x64",
        f16: "conv_mma_f16_96x64",
        outputs: 96,
        rows: 64,
        threads: 192,
    },
    FEW,
];

/// Blocks of `conv_state`, about: two rounds of those that run at once.
const STATE_BLOCKS: usize = 1056;
/// Rows and outputs of a block of `conv_any_*`.
const ANY_TILE: usize = 64;
/// Rows of a block of `conv_to_one_*`.
const TO_ONE_ROWS: usize = 128;
const TO_ONE_TAPS: usize = 7;
/// Channels of a block of `conv_to_one_*` of 16-bit weights.
const TO_ONE_MOST_CHANNELS: usize = 96;

/// Slices of the sum over k. About 40 to 50 tensor core steps of 16 each at the codec's large shapes: fewer would leave
/// multiprocessors idle when there are few rows, more would cost more additions than they save.
fn slices(c_in: usize, k: usize) -> usize {
    let steps = c_in / 16;
    match k {
        4096.. if steps.is_multiple_of(8) => 8,
        1536.. if steps.is_multiple_of(4) => 4,
        _ => 1,
    }
}

pub(super) fn conv(op: &op::Conv, target: Target, out: &mut Vec<Launch>) {
    if op.rows == 0 || op.windows.count == 0 {
        return;
    }
    let unit = unit::conv(op, target).or_else(|| ring::conv(op, target));
    let staged = unit.is_none() && staged::conv(op, target, out);
    if op.pointwise.is_some() && unit.is_none() && !staged {
        let (first, second) = op.parts();
        conv(&first, target, out);
        second.iter().for_each(|second| conv(second, target, out));
        return;
    }
    let samples = to_one(op);
    let quick = staged
        || unit.is_some()
        || warpgroup::takes(op, target)
        || samples.is_some() && to_one_by_products(op);
    if !staged {
        out.push(
            unit.or(samples)
                .or_else(|| warpgroup::conv(op, target))
                .or_else(|| tensor_cores(op, target))
                .unwrap_or_else(|| any(op)),
        );
    }
    // The convolution's blocks read the old state in no particular order, so it is replaced behind them.
    if let Some(state) = &op.state {
        let past = (op.taps - 1) * op.dilation;
        let snake = op.snake.as_ref();
        let args = Args::new()
            .view(&op.x)
            .optional(snake.map(|snake| &snake.alpha))
            .optional(snake.map(|snake| &snake.inv_beta));
        let args = streams(args, Some(state), past * op.c_in, &op.windows, op.rows);
        let across = op.c_in.div_ceil(32);
        let windows = (across * op.windows.count).div_ceil(STATE_BLOCKS);
        out.push(Launch {
            kernel: "conv_state",
            grid: [across as u32, op.windows.count.div_ceil(windows) as u32, 1],
            block: 256,
            shared: 0,
            cluster: 1,
            args: args.int(op.c_in).int(past).int(usize::from(quick)),
        });
    }
}

pub(super) fn depthwise(op: &op::DepthwiseConv, out: &mut Vec<Launch>) {
    if op.rows == 0 || op.windows.count == 0 || op.channels == 0 {
        return;
    }
    let args = Args::new().view(&op.x).view(&op.w).view(&op.bias);
    let carried = (op.taps - 1) * op.channels;
    out.push(Launch {
        kernel: "depthwise_conv",
        grid: [op.channels.div_ceil(128) as u32, op.windows.count as u32, 1],
        block: 128,
        shared: 0,
        cluster: 1,
        args: streams(args, Some(&op.state), carried, &op.windows, op.rows)
            .view(&op.out)
            .int(op.channels)
            .int(op.taps),
    });
}

/// What the kernels call an element type.
fn kind(dtype: DType) -> usize {
    match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// `state, state_as, slot_stride, slots, windows, count, rate, rows`; a slot carries `carried` elements.
fn streams(args: Args, state: Option<&StateSlice>, carried: usize, windows: &Windows, rows: usize) -> Args {
    let args = match state {
        Some(state) => {
            let pool = &state.pool;
            let slots = (pool.len - state.offset - carried) / state.slot_stride.max(1) + 1;
            let dtype = pool.buffer.dtype();
            args.address(address(pool) + (state.offset * dtype.size()) as u64)
                .int(kind(dtype))
                .long(state.slot_stride)
                .int(slots)
        }
        None => args.address(0).int(0).long(0).int(0),
    };
    args.view(&windows.windows)
        .int(windows.count)
        .int(windows.rate)
        .int(rows)
}

/// The arguments that every convolution begins with.
fn conv_args(op: &op::Conv) -> Args {
    let snake = op.snake.as_ref();
    let args = Args::new()
        .view(&op.x)
        .view(&op.w.packed.view())
        .optional(op.bias.as_ref())
        .optional(snake.map(|snake| &snake.alpha))
        .optional(snake.map(|snake| &snake.inv_beta));
    let carried = (op.taps - 1) * op.dilation * op.c_in;
    streams(args, op.state.as_ref(), carried, &op.windows, op.rows)
        .optional(op.residual.as_ref())
        .view(&op.out)
        .int(usize::from(op.clamp))
        .int(op.c_in)
        .int(op.w.n)
        .int(op.taps)
        .int(op.dilation)
}

fn any(op: &op::Conv) -> Launch {
    Launch {
        kernel: match op.w.packed.dtype() {
            DType::Bf16 => "conv_any_bf16",
            DType::F16 => "conv_any_f16",
            _ => "conv_any_f32",
        },
        grid: [
            op.w.n.div_ceil(ANY_TILE) as u32,
            op.rows.div_ceil(ANY_TILE) as u32,
            1,
        ],
        block: 256,
        shared: 0,
        cluster: 1,
        args: conv_args(op),
    }
}

/// The convolution that makes samples: one output, and tiles that lie in one window each.
fn to_one(op: &op::Conv) -> Option<Launch> {
    let fits = op.w.n == 1
        && op.taps == TO_ONE_TAPS
        && op.dilation == 1
        && op.windows.rate.is_multiple_of(TO_ONE_ROWS);
    if !fits {
        return None;
    }
    let blocks = [op.rows.div_ceil(TO_ONE_ROWS) as u32, 1, 1];
    let launch = |kernel, threads, shared| Launch {
        kernel,
        grid: blocks,
        block: threads,
        shared,
        cluster: 1,
        args: conv_args(op),
    };
    if to_one_by_products(op) {
        let kernel = match op.w.packed.dtype() {
            DType::F16 => "conv_to_one_f16",
            _ => "conv_to_one_bf16",
        };
        // A warp for each 16 rows, and one for what lies ahead of them.
        return Some(launch(kernel, (TO_ONE_ROWS as u32 / 16 + 1) * 32, 0));
    }
    let shared = 4 * (TO_ONE_TAPS * op.c_in + (TO_ONE_ROWS + TO_ONE_TAPS - 1) * (op.c_in + 1));
    (op.w.packed.dtype() == DType::F32 && op.c_in <= 128)
        .then(|| launch("conv_to_one_f32", TO_ONE_ROWS as u32, shared as u32))
}

/// Whether the convolution that makes samples goes through tensor cores, if it is one.
fn to_one_by_products(op: &op::Conv) -> bool {
    op.c_in.is_multiple_of(16) && op.c_in <= TO_ONE_MOST_CHANNELS && aligned_operands(op)
}

/// Whether `conv_mma` reads and writes `view` 16 bytes at a time.
fn aligned(view: &View) -> bool {
    address(view).is_multiple_of(16)
}

/// Whether weights have 16 bits, and everything else is read as they need it.
fn aligned_operands(op: &op::Conv) -> bool {
    let dtype = op.w.packed.dtype();
    // A state of the other 16-bit type would need inputs rounded twice.
    let state_fits = op.state.as_ref().is_none_or(|state| {
        [DType::F32, dtype].contains(&state.pool.buffer.dtype())
            && (state.pool.start + state.offset).is_multiple_of(4)
            && state.slot_stride.is_multiple_of(4)
    });
    let views = [Some(&op.x), Some(&op.out), op.bias.as_ref(), op.residual.as_ref()];
    let snake = op.snake.iter().flat_map(|snake| [&snake.alpha, &snake.inv_beta]);
    matches!(dtype, DType::Bf16 | DType::F16)
        && state_fits
        && views.into_iter().flatten().chain(snake).all(aligned)
}

fn tensor_cores(op: &op::Conv, target: Target) -> Option<Launch> {
    let fits = op.c_in.is_multiple_of(16) && op.w.n.is_multiple_of(4) && aligned_operands(op);
    if !fits {
        return None;
    }
    let slices = slices(op.c_in, op.taps * op.c_in);
    // Clusters came with 9.0; before them each block sums all slices.
    let share = if target.arch >= 90 { 1 } else { slices };
    // The narrowest tile must fit whatever the windows are, or which kernel runs would depend on them.
    Staging::new(op, &FEW, slices, share, usize::MAX, target)?;

    let tiles = match op.w.n.is_multiple_of(128) || !op.w.n.is_multiple_of(96) {
        true => &WIDE,
        false => &NARROW,
    };
    let blocks = |tile: &Tile| op.w.n.div_ceil(tile.outputs) * op.rows.div_ceil(tile.rows) * (slices / share);
    let (tile, staging) = tiles.iter().find_map(|tile| {
        let full = op.rows >= tile.rows && blocks(tile) * 4 >= target.sms as usize * 3;
        let enough = full || tile.bf16 == FEW.bf16;
        let staging = Staging::new(op, tile, slices, share, op.windows.count, target)?;
        enough.then_some((tile, staging))
    })?;
    let cluster = slices / share;
    Some(Launch {
        kernel: if op.w.packed.dtype() == DType::F16 {
            tile.f16
        } else {
            tile.bf16
        },
        grid: [
            (op.w.n.div_ceil(tile.outputs) * cluster) as u32,
            op.rows.div_ceil(tile.rows) as u32,
            1,
        ],
        block: tile.threads as u32,
        shared: staging.shared as u32,
        cluster: cluster as u32,
        args: conv_args(op)
            .int(slices)
            .int(cluster)
            .int(share)
            .int(staging.chunk)
            .int(staging.capacity),
    })
}

/// Shared memory of a block of `conv_mma`.
#[derive(Debug, PartialEq)]
struct Staging {
    chunk: usize,
    capacity: usize,
    shared: usize,
}

impl Staging {
    /// The widest chunk of channels with which two blocks, or else one, fit a multiprocessor.
    fn new(
        op: &op::Conv,
        tile: &Tile,
        slices: usize,
        share: usize,
        windows: usize,
        target: Target,
    ) -> Option<Self> {
        let rate = op.windows.rate;
        // Windows begin at multiples of the rate.
        let most_windows = if tile.rows.is_multiple_of(rate) {
            tile.rows / rate
        } else if rate.is_multiple_of(tile.rows) {
            1
        } else {
            (tile.rows - 2) / rate + 2
        };
        let capacity = tile.rows + most_windows.min(windows) * (op.taps - 1) * op.dilation;
        // Counts, staged row of each row, segments, and source of each staged row.
        let fixed = 16 + tile.rows * (4 + 32) + capacity.next_multiple_of(2) * 8;
        let sums = tile.rows * (tile.outputs + 4) * 4;
        let needed = |chunk: usize| {
            let inputs = capacity * (chunk + 8) * 2;
            match share {
                1 => fixed + inputs.max(sums),
                share => fixed + inputs + share.div_ceil(4) * sums,
            }
        };
        let slice = op.c_in / slices;
        let chunks = || {
            (1..=slice / 16)
                .map(|parts| (slice / 16, parts))
                .filter(|(all, parts)| all.is_multiple_of(*parts))
                .map(|(all, parts)| all / parts * 16)
        };
        let (processor, block) = target.shared_memory();
        [processor / 2 - 1024, block]
            .into_iter()
            .find_map(|budget| chunks().find(|&chunk| chunk <= tile.threads * 4 && needed(chunk) <= budget))
            .map(|chunk| Self {
                chunk,
                capacity,
                shared: needed(chunk),
            })
    }
}

#[cfg(test)]
mod tests;
