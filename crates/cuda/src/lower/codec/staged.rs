//! Convolutions by Hopper's warpgroup products from inputs that are staged in memory first, in the operation's scratch:
//! one launch activates them, each once, and puts each window's rows behind those that it carries. So a block of the
//! products has nothing to do but multiply. A residual unit is a third launch; what lies between its convolutions is kept
//! as it would be staged.
//!
//! Which shapes come here is the shape's own; rows pick tile and warpgroups, which change no bit.

use laneway_device::op;
use laneway_device::{DType, View};

use super::{aligned, aligned_operands, kind};
use crate::launch::{Args, Launch};
use crate::lower::{Target, address};

/// Outputs of a warpgroup.
const OUTPUTS: usize = 64;
const MOST_WARPGROUPS: usize = 2;
const THREADS: usize = 128;
/// Places of a block that stages, the channels that it takes at a time, and how often it does so, about.
const STAGE: (usize, usize) = (64, 64);
const STAGE_ROUNDS: usize = 3;
/// With fewer channels more time goes into staging than products save by it.
const LEAST_CHANNELS: usize = 256;
/// Sets of inputs, at most.
const MOST_BUFFERS: usize = 8;
/// Rows of history with which the widest tile fits.
const MOST_PAST: usize = 64;
/// Windows whose table fits beside that: a pass has fewer, and which kernel runs must not depend on them.
const MOST_WINDOWS: usize = 2048;
/// Bytes of a window in that table.
const PLACE_BYTES: usize = 12;
/// Frames of a window, about, where there are several.
const FRAMES_OF_WINDOW: usize = 6;
/// Barriers.
const FIXED_BYTES: usize = 256;
/// From the results of one row to those of the next.
const PITCH_BYTES: usize = MOST_WARPGROUPS * OUTPUTS * 4 + 16;

/// A kernel of one number of taps.
struct Tile {
    places: usize,
    /// Channels of a set, and sets with registers for their weights, which divide the sets of an item.
    set: usize,
    depth: usize,
    kernel: &'static str,
}

const fn tile(places: usize, set: usize, depth: usize, kernel: &'static str) -> Tile {
    Tile {
        places,
        set,
        depth,
        kernel,
    }
}

const SEVEN: &[Tile] = &[
    tile(64, 16, 4, "conv_staged_7_64"),
    tile(128, 16, 4, "conv_staged_7_128"),
];
/// What a residual unit begins with.
const INNER: &[Tile] = &[
    tile(64, 16, 4, "conv_staged_inner_7_64"),
    tile(128, 16, 4, "conv_staged_inner_7_128"),
    tile(256, 16, 2, "conv_staged_inner_7_256"),
];
const TWO: &[Tile] = &[
    tile(64, 32, 3, "conv_staged_2_64"),
    tile(128, 32, 3, "conv_staged_2_128"),
    tile(256, 16, 3, "conv_staged_2_256"),
];
/// The second convolution of a residual unit.
const ONE: &[Tile] = &[
    tile(64, 32, 3, "conv_staged_1_64"),
    tile(128, 32, 3, "conv_staged_1_128"),
    tile(256, 32, 3, "conv_staged_1_256"),
];

fn tiles(taps: usize) -> &'static [Tile] {
    match taps {
        7 => SEVEN,
        2 => TWO,
        _ => &[],
    }
}

fn past(op: &op::Conv) -> usize {
    (op.taps - 1) * op.dilation
}

/// Places of staged rows.
fn places(op: &op::Conv) -> usize {
    op.rows + op.windows.count * past(op)
}

/// Whether `op` is made this way: its shape decides, whatever its rows.
pub(super) fn takes(op: &op::Conv, target: Target) -> bool {
    let whole = |channels: usize, tiles: &[Tile]| {
        tiles
            .iter()
            .all(|tile| channels.is_multiple_of(tile.set * tile.depth))
    };
    let second = op.pointwise.as_ref().is_none_or(|pointwise| {
        let views = [&pointwise.snake.alpha, &pointwise.snake.inv_beta];
        op.taps == 7
            && op.bias.is_some()
            && op.w.n.is_multiple_of(OUTPUTS)
            && whole(op.w.n, ONE)
            && pointwise.w.n.is_multiple_of(16)
            && pointwise.w.packed.dtype() == DType::F16
            && views.into_iter().chain(&pointwise.bias).all(aligned)
    });
    target.arch == 90
        && op.w.packed.dtype() == DType::F16
        && !tiles(op.taps).is_empty()
        && whole(op.c_in, tiles(op.taps))
        && op.c_in.is_multiple_of(STAGE.1)
        && op.c_in >= LEAST_CHANNELS
        && op.w.n.is_multiple_of(16)
        && op.w.n >= OUTPUTS
        && second
        && !op.clamp
        && past(op) <= MOST_PAST
        && op.scratch.as_ref().is_some_and(aligned)
        && aligned_operands(op)
}

/// The launches, without that of the state.
pub(super) fn conv(op: &op::Conv, target: Target, out: &mut Vec<Launch>) -> bool {
    let Some(scratch) = op.scratch.as_ref().filter(|_| takes(op, target)) else {
        return false;
    };
    debug_assert!(op.windows.count <= MOST_WINDOWS, "{} windows", op.windows.count);
    let staged = address(scratch);
    out.push(stage(op, staged));
    let first = Products {
        op,
        staged,
        c_in: op.c_in,
        outputs: op.w.n,
        reach: past(op),
    };
    let w = op.w.packed.view();
    let Some(pointwise) = &op.pointwise else {
        out.push(first.launch(tiles(op.taps), &w, false, target, |args| {
            let args = args.optional(op.bias.as_ref()).address(0).address(0);
            args.optional(op.residual.as_ref()).view(&op.out)
        }));
        return true;
    };
    let inner = staged + (places(op) * op.c_in * 2) as u64;
    let snake = &pointwise.snake;
    out.push(first.launch(INNER, &w, true, target, |args| {
        let args = args.optional(op.bias.as_ref()).view(&snake.alpha);
        args.view(&snake.inv_beta).address(0).address(inner)
    }));
    let second = Products {
        staged: inner,
        c_in: op.w.n,
        outputs: pointwise.w.n,
        reach: 0,
        ..first
    };
    let w = pointwise.w.packed.view();
    out.push(second.launch(ONE, &w, false, target, |args| {
        let args = args.optional(pointwise.bias.as_ref()).address(0).address(0);
        args.optional(op.residual.as_ref()).view(&op.out)
    }));
    true
}

/// `windows, count, rate, rows, slots, state`: what decides which windows there are.
fn windows(args: Args, op: &op::Conv) -> Args {
    let (slots, state) = match &op.state {
        Some(state) => {
            let carried = past(op) * op.c_in;
            let slots = (state.pool.len - state.offset - carried) / state.slot_stride.max(1) + 1;
            (slots, carried_at(state))
        }
        None => (0, 0),
    };
    args.view(&op.windows.windows)
        .int(op.windows.count)
        .int(op.windows.rate)
        .int(op.rows)
        .int(slots)
        .address(state)
}

fn carried_at(state: &op::StateSlice) -> u64 {
    address(&state.pool) + (state.offset * state.pool.buffer.dtype().size()) as u64
}

fn stage(op: &op::Conv, staged: u64) -> Launch {
    let snake = op.snake.as_ref();
    let args = Args::new()
        .view(&op.x)
        .optional(snake.map(|snake| &snake.alpha))
        .optional(snake.map(|snake| &snake.inv_beta));
    let (state_as, stride) = match &op.state {
        Some(state) => (kind(state.pool.buffer.dtype()), state.slot_stride),
        None => (0, 0),
    };
    Launch {
        kernel: "conv_stage",
        grid: [
            places(op).div_ceil(STAGE.0) as u32,
            (op.c_in / STAGE.1).div_ceil(STAGE_ROUNDS) as u32,
            1,
        ],
        block: 256,
        shared: (op.windows.count * PLACE_BYTES) as u32,
        cluster: 1,
        args: windows(args, op)
            .int(state_as)
            .long(stride)
            .int(op.c_in)
            .int(past(op))
            .int(places(op))
            .address(staged),
    }
}

/// Products over what is staged.
#[derive(Clone, Copy)]
struct Products<'a> {
    op: &'a op::Conv,
    staged: u64,
    c_in: usize,
    outputs: usize,
    /// Places from an output's first input to its last.
    reach: usize,
}

/// How one launch divides the work.
struct Plan {
    warpgroups: usize,
    /// Blocks' outputs that make a row.
    across: usize,
    buffers: usize,
    shared: usize,
    blocks: usize,
    /// Estimated, in cycles.
    cost: usize,
}

impl Products<'_> {
    /// `end` adds bias, Snake, residual and output. `inner`: results are left in 16 bits, as they would be staged.
    fn launch(
        &self,
        tiles: &[Tile],
        w: &View,
        inner: bool,
        target: Target,
        end: impl Fn(Args) -> Args,
    ) -> Launch {
        let plans = tiles.iter().flat_map(|tile| {
            (1..=MOST_WARPGROUPS).map(move |warpgroups| (tile, self.plan(tile, warpgroups, inner, target)))
        });
        let (tile, plan) = plans
            .min_by_key(|(_, plan)| plan.cost)
            .expect("every number of taps that comes here has tiles");
        let op = self.op;
        let args = windows(Args::new().address(self.staged).view(w), op)
            .int(self.c_in)
            .int(self.outputs)
            .int(op.dilation)
            .int(past(op))
            .int(places(op))
            .int(plan.across)
            .int(plan.buffers);
        Launch {
            kernel: tile.kernel,
            grid: [plan.blocks as u32, 1, 1],
            block: ((plan.warpgroups + 1) * THREADS) as u32,
            shared: plan.shared as u32,
            cluster: 1,
            args: end(args),
        }
    }

    fn plan(&self, tile: &Tile, warpgroups: usize, inner: bool, target: Target) -> Plan {
        let outputs = warpgroups * OUTPUTS;
        let buffer = tile.set * 2 * (tile.places + self.reach);
        let results = match inner {
            true => tile.places * outputs * 2,
            false => tile.places * PITCH_BYTES,
        };
        let table = tile.places * 4 + self.op.windows.count * PLACE_BYTES;
        let needed = |buffers: usize| FIXED_BYTES + results + buffers * buffer + table;
        let (_, most) = target.shared_memory();
        let buffers = (2..=MOST_BUFFERS).rev().find(|&buffers| needed(buffers) <= most);
        let buffers = buffers.unwrap_or(2);
        let across = self.outputs.div_ceil(outputs);
        let last = places(self.op).saturating_sub(past(self.op)).max(1);
        let items = across * last.div_ceil(tile.places);
        // A captured step has room for as many windows as frames; those that there are not make no items.
        let frames = self.op.rows.div_ceil(self.op.windows.rate);
        let windows = self.op.windows.count.min(frames.div_ceil(FRAMES_OF_WINDOW));
        let live = self.op.rows + windows.saturating_sub(1) * past(self.op);
        let rounds = (across * live.div_ceil(tile.places)).div_ceil(target.sms as usize);
        // What bounds an item: products, weights from the second cache, or the wait for them.
        let taps = self.reach / self.op.dilation + 1;
        let steps = self.c_in / 16 * taps;
        let multiply = steps * warpgroups * tile.places * 9 / 16;
        let weights = steps * warpgroups * 2048 / 24;
        let ahead = tile.set / 16 * taps * (tile.depth - 1);
        let latency = steps * 900 / ahead;
        // One warpgroup multiplies nothing while it hands in results.
        let each = multiply.max(weights).max(latency) + tile.places * if warpgroups == 1 { 24 } else { 12 };
        Plan {
            warpgroups,
            across,
            buffers,
            shared: needed(buffers),
            blocks: items.min(target.sms as usize),
            cost: rounds * each + 4000 + warpgroups * tile.places * 8,
        }
    }
}
