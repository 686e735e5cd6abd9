//! Products with a weight matrix.
//!
//! bf16 weights: with few rows one warp accumulates each of eight segments of k; with many the segments are
//! spread over a cluster, or, on 9.0, over warpgroups that take the inputs in blocks of rows (see [`Kept`]). All add
//! the segments in the same order, so the number of rows, which picks the kernel here, changes no bit.

use laneway_device::{DType, View, op};

use super::Target;
use super::kept::{Kept, block_rows, blocked_at};
use super::rows::silu_mul;
use crate::launch::{Args, Launch};

mod warpgroup;

/// Rows of a batch that `gemm_few` takes: the columns of one matrix instruction.
const FEW_ROWS: usize = 8;
/// Outputs of a block of `gemm_many`.
const BLOCK_OUTPUTS: usize = 128;
/// Threads of every kernel here.
const THREADS: u32 = 256;

pub(super) fn gemm(op: &op::Gemm, target: Target, out: &mut Vec<Launch>) {
    if op.rows == 0 {
        return;
    }
    product(op, target, out);
    // The product behind counts on it.
    if let Some(next) = op.next.as_ref().filter(|_| leaves_norm(op, target))
        && !out.last().is_some_and(|launch| warpgroup::is_one(launch.kernel))
    {
        let narrow = Narrow::of(op.w.packed.dtype()).expect("only 16-bit weights have split norms");
        out.push(prepare(&op.out, next, op.rows, op.w.n, narrow));
    }
}

fn product(op: &op::Gemm, target: Target, out: &mut Vec<Launch>) {
    let (n, k) = (op.w.n, op.w.k);
    let whole_tiles = k.is_multiple_of(16) && (op.gated.is_none() || n.is_multiple_of(32));
    let Some(narrow) = Narrow::of(op.w.packed.dtype()).filter(|_| whole_tiles) else {
        return in_parts(op, target, out);
    };
    let splits = split_norm(op, target);
    let x_kept = Kept::of_view(&op.x, op.rows, k, target);
    let out_kept = Kept::of_view(&op.out, op.rows, op.out_width(), target);
    // Even one row is faster by warpgroups, where its inputs lie for them or are normed in two parts.
    if op.rows <= FEW_ROWS && x_kept != Kept::Blocked && !splits {
        return out.push(few(op, (x_kept, 0), out_kept, narrow));
    }
    // A whole block's worth of gates must be followed by whole blocks.
    if op.gated.is_some() && !n.is_multiple_of(BLOCK_OUTPUTS) {
        return few_at_a_time(op, (x_kept, out_kept), narrow, out);
    }
    let mut x = (op.x.clone(), x_kept);
    if let Some(norm) = &op.norm {
        // The scratch has room for f32; 16 bits take half of it.
        x = (
            norm.scratch.clone(),
            Kept::of(op.w.packed.dtype(), op.rows, k, target.arch),
        );
        if !splits {
            out.push(norm_ahead(op, norm, x.1, narrow));
        } else if !norm.prepared {
            out.push(prepare(&op.x, norm, op.rows, k, narrow));
        }
    }
    let next = op.next.as_ref().filter(|_| leaves_norm(op, target));
    let normed = op.norm.as_ref().filter(|_| splits);
    if let Some(launch) = warpgroup::warpgroup(op, (&x.0, x.1), (normed, next), out_kept, narrow, target) {
        return out.push(launch);
    }
    assert!(!splits, "a split norm is one of warpgroup products: {op:?}");
    let even = k.is_multiple_of(8 * 64);
    // Without clusters to spread the levels of sums over, the widest tile is too much shared memory.
    let widest = match (even, target.arch) {
        (true, 90..) => 64,
        (true, _) | (false, 90..) => 32,
        (false, _) => 16,
    };
    let fits = |columns| many_shared(columns, 1) as usize <= target.shared_memory().1;
    let columns = match even {
        true => [16, 32, 64]
            .into_iter()
            .find(|&columns| columns == widest || op.rows <= columns || !fits(2 * columns))
            .unwrap_or(widest),
        false => widest,
    };
    let blocks = n.div_ceil(BLOCK_OUTPUTS);
    let row_blocks = op.rows.div_ceil(columns);
    let split = match target.arch {
        90.. if even => split(blocks * row_blocks, target.sms),
        90.. => 8,
        _ => 1,
    };
    out.push(Launch {
        kernel: match (even, narrow, split) {
            (true, ..) => many_kernel(columns, split, narrow),
            (false, Narrow::Bf16, 1) => "gemm_odd_1_bf16",
            (false, Narrow::F16, 1) => "gemm_odd_1_f16",
            (false, Narrow::Bf16, _) => "gemm_odd_8_bf16",
            (false, Narrow::F16, _) => "gemm_odd_8_f16",
        },
        grid: [(blocks * split) as u32, row_blocks as u32, 1],
        block: THREADS,
        shared: many_shared(columns, split),
        cluster: split as u32,
        args: Args::new()
            .view(&x.0)
            .int(x.1 as usize)
            .view(&op.w.packed.view())
            .int(n)
            .int(k)
            .int(op.rows)
            .int(usize::from(op.gated.is_some()))
            .optional(op.bias.as_ref())
            .optional(op.scale.as_ref())
            .view(&op.out)
            .int(op.activation as usize)
            .int(usize::from(op.accumulate))
            .int(out_kept as usize),
    });
}

/// Most columns of a row whose norm is split: `MOST_SQUARES` parts of [`SQUARES`].
const MOST_SPLIT: usize = 2048;
/// Columns of a part of a row's sum of squares.
const SQUARES: usize = 64;

/// Whether the norm in front is split over two products (see product.cuh). The number of rows does not decide it: it
/// changes bits. Warpgroup products take all of these.
fn split_norm(op: &op::Gemm, target: Target) -> bool {
    op.norm.is_some()
        && splits_norm(
            op.w.packed.dtype(),
            (op.w.n, op.w.k),
            op.gated.is_some(),
            target.arch,
        )
}

/// As [`split_norm`], of a normed product with `[n, k]` of `dtype`.
pub(crate) fn splits_norm(dtype: DType, (n, k): (usize, usize), gated: bool, arch: u32) -> bool {
    normed_in_parts(dtype, k, arch) && n.is_multiple_of(if gated { BLOCK_OUTPUTS } else { 4 })
}

fn normed_in_parts(dtype: DType, width: usize, arch: u32) -> bool {
    arch == 90
        && matches!(dtype, DType::Bf16 | DType::F16)
        && width.is_multiple_of(1024)
        && width <= MOST_SPLIT
}

/// Whether this product leaves what the split norm of the one behind begins with. All products of a stack have weights of
/// one type.
fn leaves_norm(op: &op::Gemm, target: Target) -> bool {
    op.next.is_some() && normed_in_parts(op.w.packed.dtype(), op.w.n, target.arch)
}

/// Where a split norm's sums of squares lie in its scratch: behind the rounded rows, which take half of it.
fn squares(norm: &op::InputNorm, rows: usize, width: usize) -> View {
    norm.scratch.slice(rows * width / 2, rows * width / SQUARES)
}

/// A norm of its own in front of a product.
fn norm_ahead(op: &op::Gemm, norm: &op::InputNorm, kept: Kept, narrow: Narrow) -> Launch {
    Launch {
        kernel: match narrow {
            Narrow::Bf16 => "rms_norm_bf16",
            Narrow::F16 => "rms_norm_f16",
        },
        grid: [op.rows.div_ceil(2) as u32, 1, 1],
        block: 64,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(&op.x)
            .view(&norm.weight)
            .float(norm.eps)
            .view(&norm.scratch)
            .int(op.rows)
            .int(op.w.k)
            .int(kept as usize),
    }
}

/// The first part of a split norm, where no product leaves it.
fn prepare(x: &View, norm: &op::InputNorm, rows: usize, width: usize, narrow: Narrow) -> Launch {
    Launch {
        kernel: match narrow {
            Narrow::Bf16 => "prepare_norm_bf16",
            Narrow::F16 => "prepare_norm_f16",
        },
        grid: [rows.div_ceil(2) as u32, 1, 1],
        block: 64,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(x)
            .view(&norm.weight)
            .view(&norm.scratch)
            .view(&squares(norm, rows, width))
            .int(rows)
            .int(width),
    }
}

/// The 16-bit type of a matrix, and so of its products' inputs.
#[derive(Debug, Clone, Copy)]
enum Narrow {
    Bf16,
    F16,
}

impl Narrow {
    fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Bf16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            _ => None,
        }
    }
}

/// At most eight rows, norm and gate folded in. Of [`Kept::Blocked`] they may be a part, of a block of `pitch` rows.
fn few(op: &op::Gemm, (x_kept, pitch): (Kept, usize), out_kept: Kept, narrow: Narrow) -> Launch {
    let tiles = op.w.n.div_ceil(16);
    let (gated, norm) = (op.gated.is_some(), op.norm.is_some());
    let kernel = match (gated, norm, narrow) {
        (false, false, Narrow::Bf16) => "gemm_few_bf16",
        (false, true, Narrow::Bf16) => "gemm_few_norm_bf16",
        (true, false, Narrow::Bf16) => "gemm_few_gated_bf16",
        (true, true, Narrow::Bf16) => "gemm_few_gated_norm_bf16",
        (false, false, Narrow::F16) => "gemm_few_f16",
        (false, true, Narrow::F16) => "gemm_few_norm_f16",
        (true, false, Narrow::F16) => "gemm_few_gated_f16",
        (true, true, Narrow::F16) => "gemm_few_gated_norm_f16",
    };
    let blocks = if gated { tiles / 2 } else { tiles };
    Launch {
        kernel,
        grid: [blocks as u32, 1, 1],
        block: THREADS,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(&op.x)
            .int(x_kept as usize)
            .int(pitch)
            .view(&op.w.packed.view())
            .int(op.w.n)
            .int(op.w.k)
            .int(op.rows)
            .optional(op.norm.as_ref().map(|norm| &norm.weight))
            .float(op.norm.as_ref().map_or(0.0, |norm| norm.eps))
            .optional(op.bias.as_ref())
            .optional(op.scale.as_ref())
            .view(&op.out)
            .int(op.activation as usize)
            .int(usize::from(op.accumulate))
            .int(out_kept as usize),
    }
}

/// Eight rows a launch: shapes that only small test models have.
fn few_at_a_time(op: &op::Gemm, (x_kept, out_kept): (Kept, Kept), narrow: Narrow, out: &mut Vec<Launch>) {
    let (k, width) = (op.w.k, op.out_width());
    // An output that is kept so has whole blocks of gates.
    assert_ne!(out_kept, Kept::Blocked, "{op:?}");
    for first in (0..op.rows).step_by(FEW_ROWS) {
        let rows = FEW_ROWS.min(op.rows - first);
        // Eight rows are of one block.
        let (x, pitch) = match x_kept {
            Kept::Blocked => {
                let at = blocked_at(first, op.rows, 0, k);
                (op.x.slice(at, op.rows * k - at), block_rows(first, op.rows))
            }
            Kept::F32 | Kept::Rows => (op.x.slice(first * k, rows * k), 0),
        };
        let part = op::Gemm {
            x,
            rows,
            out: op.out.slice(first * width, rows * width),
            ..op.clone()
        };
        out.push(few(&part, (x_kept, pitch), out_kept, narrow));
    }
}

/// Norm, product and gate one after the other: f32 weights, and shapes that do not divide into tiles.
fn in_parts(op: &op::Gemm, target: Target, out: &mut Vec<Launch>) {
    let (n, k) = (op.w.n, op.w.k);
    let mut x = op.x.clone();
    if let Some(norm) = &op.norm {
        super::rows::rms_norm(
            &op::RmsNorm {
                x,
                rows: op.rows,
                width: k,
                weight: norm.weight.clone(),
                eps: norm.eps,
                out: norm.scratch.clone(),
            },
            out,
        );
        x = norm.scratch.clone();
    }
    let product = op.gated.as_ref().unwrap_or(&op.out);
    out.push(Launch {
        kernel: "gemm_any",
        grid: [n.div_ceil(64) as u32, op.rows.div_ceil(16) as u32, 1],
        block: THREADS,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(&x)
            .int(Kept::of_view(&x, op.rows, k, target) as usize)
            .view(&op.w.packed.view())
            .int(match op.w.packed.dtype() {
                DType::Bf16 => 1,
                DType::F16 => 2,
                _ => 0,
            })
            .int(n)
            .int(k)
            .int(op.rows)
            .optional(op.bias.as_ref())
            .optional(op.scale.as_ref())
            .view(product)
            .int(op.activation as usize)
            .int(usize::from(op.accumulate))
            .int(Kept::of_view(product, op.rows, n, target) as usize),
    });
    let Some(scratch) = &op.gated else { return };
    let width = n / 2;
    let out_kept = Kept::of_view(&op.out, op.rows, width, target);
    if out_kept != Kept::F32 {
        return out.push(Launch {
            kernel: "silu_mul_narrow",
            grid: [(op.rows * width).div_ceil(THREADS as usize) as u32, 1, 1],
            block: THREADS,
            shared: 0,
            cluster: 1,
            args: Args::new()
                .view(scratch)
                .view(&op.out)
                .int(op.rows)
                .int(width)
                .int(usize::from(op.out.buffer.dtype() == DType::F16))
                .int(out_kept as usize),
        });
    }
    silu_mul(
        &op::SiluMul {
            x: scratch.clone(),
            rows: op.rows,
            width,
            out: op.out.clone(),
        },
        out,
    );
}

/// Blocks of a cluster that share the eight segments: four, or eight where four leave multiprocessors idle.
fn split(blocks: usize, sms: u32) -> usize {
    if 10 * blocks * 4 >= 9 * sms as usize { 4 } else { 8 }
}

fn many_kernel(columns: usize, split: usize, narrow: Narrow) -> &'static str {
    match (narrow, columns, split) {
        (Narrow::Bf16, 16, 1) => "gemm_many_16_1_bf16",
        (Narrow::Bf16, 16, 4) => "gemm_many_16_4_bf16",
        (Narrow::Bf16, 16, _) => "gemm_many_16_8_bf16",
        (Narrow::Bf16, _, 1) => "gemm_many_32_1_bf16",
        (Narrow::Bf16, 32, 4) => "gemm_many_32_4_bf16",
        (Narrow::Bf16, 32, _) => "gemm_many_32_8_bf16",
        (Narrow::Bf16, _, 4) => "gemm_many_64_4_bf16",
        (Narrow::Bf16, _, _) => "gemm_many_64_8_bf16",
        (Narrow::F16, 16, 1) => "gemm_many_16_1_f16",
        (Narrow::F16, 16, 4) => "gemm_many_16_4_f16",
        (Narrow::F16, 16, _) => "gemm_many_16_8_f16",
        (Narrow::F16, _, 1) => "gemm_many_32_1_f16",
        (Narrow::F16, 32, 4) => "gemm_many_32_4_f16",
        (Narrow::F16, 32, _) => "gemm_many_32_8_f16",
        (Narrow::F16, _, 4) => "gemm_many_64_4_f16",
        (Narrow::F16, _, _) => "gemm_many_64_8_f16",
    }
}

/// Staged chunks of `[8 warps, 4 tiles, 512 bytes]` weights and `[columns, 64 + 8]` inputs with the waiting levels of a
/// block's tree of sums behind them, or, at the end, the block's sums `[columns, 128 + 4]` f32.
fn many_shared(columns: usize, split: usize) -> u32 {
    let levels = (8 / split).ilog2() as usize;
    let stages = if levels == 0 { 4 } else { 3 };
    let (stage, level) = (8 * 4 * 512 + columns * 72 * 2, columns * BLOCK_OUTPUTS * 4);
    let sums = columns * (BLOCK_OUTPUTS + 4) * 4;
    (stages * stage + levels * level).max(sums) as u32
}

#[cfg(test)]
mod tests;
