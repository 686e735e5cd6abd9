//! Products with a weight matrix.
//!
//! bf16 weights: with few rows one warp accumulates each of eight segments of k; with many the segments are
//! spread over a cluster. Both add the segments in the same order, so the number of rows, which picks the
//! kernel here, changes no bit.

use laneway_device::{DType, op};

use super::Target;
use super::rows::silu_mul;
use crate::launch::{Args, Launch};

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
    let (n, k) = (op.w.n, op.w.k);
    let whole_tiles = k.is_multiple_of(16) && (op.gated.is_none() || n.is_multiple_of(32));
    if op.w.packed.dtype() != DType::Bf16 || !whole_tiles {
        return in_parts(op, out);
    }
    if op.rows <= FEW_ROWS {
        return out.push(few(op));
    }
    // A whole block's worth of gates must be followed by whole blocks.
    if op.gated.is_some() && !n.is_multiple_of(BLOCK_OUTPUTS) {
        return few_at_a_time(op, out);
    }
    let mut x = (op.x.clone(), false);
    if let Some(norm) = &op.norm {
        // The scratch has room for f32; bf16 takes half of it.
        out.push(Launch {
            kernel: "rms_norm_bf16",
            grid: [op.rows.div_ceil(8) as u32, 1, 1],
            block: THREADS,
            shared: 0,
            cluster: 1,
            args: Args::new()
                .view(&op.x)
                .view(&norm.weight)
                .float(norm.eps)
                .view(&norm.scratch)
                .int(op.rows)
                .int(k),
        });
        x = (norm.scratch.clone(), true);
    }
    // Without clusters to spread the levels of sums over, the widest tile is too much for some devices.
    let fits = |columns| many_shared(columns, 1) as usize <= target.shared_memory().1;
    let columns = [16, 32, 64]
        .into_iter()
        .find(|&columns| op.rows <= columns || !fits(2 * columns))
        .unwrap_or(64);
    let blocks = n.div_ceil(BLOCK_OUTPUTS);
    let row_blocks = op.rows.div_ceil(columns);
    let split = match target.arch {
        90.. => split(blocks * row_blocks, target.sms),
        _ => 1,
    };
    out.push(Launch {
        kernel: many_kernel(columns, split),
        grid: [(blocks * split) as u32, row_blocks as u32, 1],
        block: THREADS,
        shared: many_shared(columns, split),
        cluster: split as u32,
        args: Args::new()
            .view(&x.0)
            .int(usize::from(x.1))
            .view(&op.w.packed.view())
            .int(n)
            .int(k)
            .int(op.rows)
            .int(usize::from(op.gated.is_some()))
            .optional(op.bias.as_ref())
            .optional(op.scale.as_ref())
            .view(&op.out)
            .int(op.activation as usize)
            .int(usize::from(op.accumulate)),
    });
}

/// At most eight rows, norm and gate folded in.
fn few(op: &op::Gemm) -> Launch {
    let tiles = op.w.n.div_ceil(16);
    let (kernel, blocks) = match (op.gated.is_some(), op.norm.is_some()) {
        (false, false) => ("gemm_few", tiles),
        (false, true) => ("gemm_few_norm", tiles),
        (true, false) => ("gemm_few_gated", tiles / 2),
        (true, true) => ("gemm_few_gated_norm", tiles / 2),
    };
    Launch {
        kernel,
        grid: [blocks as u32, 1, 1],
        block: THREADS,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(&op.x)
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
            .int(usize::from(op.accumulate)),
    }
}

/// Eight rows a launch: shapes that only small test models have.
fn few_at_a_time(op: &op::Gemm, out: &mut Vec<Launch>) {
    let (k, width) = (op.w.k, op.out_width());
    for first in (0..op.rows).step_by(FEW_ROWS) {
        let rows = FEW_ROWS.min(op.rows - first);
        out.push(few(&op::Gemm {
            x: op.x.slice(first * k, rows * k),
            rows,
            out: op.out.slice(first * width, rows * width),
            ..op.clone()
        }));
    }
}

/// Norm, product and gate one after the other: f32 weights, and shapes that do not divide into tiles.
fn in_parts(op: &op::Gemm, out: &mut Vec<Launch>) {
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
            .view(&op.w.packed.view())
            .int(usize::from(op.w.packed.dtype() == DType::Bf16))
            .int(n)
            .int(k)
            .int(op.rows)
            .optional(op.bias.as_ref())
            .optional(op.scale.as_ref())
            .view(product)
            .int(op.activation as usize)
            .int(usize::from(op.accumulate)),
    });
    if let Some(scratch) = &op.gated {
        silu_mul(
            &op::SiluMul {
                x: scratch.clone(),
                rows: op.rows,
                width: n / 2,
                out: op.out.clone(),
            },
            out,
        );
    }
}

/// Blocks of a cluster that share the eight segments: as many as the device has room for, two blocks to
/// a multiprocessor.
fn split(blocks: usize, sms: u32) -> usize {
    [8, 4, 2]
        .into_iter()
        .find(|split| blocks * split <= 2 * sms as usize)
        .unwrap_or(1)
}

fn many_kernel(columns: usize, split: usize) -> &'static str {
    match (columns, split) {
        (16, 1) => "gemm_many_16_1",
        (16, 2) => "gemm_many_16_2",
        (16, 4) => "gemm_many_16_4",
        (16, _) => "gemm_many_16_8",
        (32, 1) => "gemm_many_32_1",
        (32, 2) => "gemm_many_32_2",
        (32, 4) => "gemm_many_32_4",
        (32, _) => "gemm_many_32_8",
        (_, 1) => "gemm_many_64_1",
        (_, 2) => "gemm_many_64_2",
        (_, 4) => "gemm_many_64_4",
        (_, _) => "gemm_many_64_8",
    }
}

/// Two staged chunks of `[columns, 64 + 8]` bf16 with the levels of a block's tree of sums behind them, or, at the
/// end, the block's sums `[columns, 128 + 4]` f32.
fn many_shared(columns: usize, split: usize) -> u32 {
    let levels = (8 / split).ilog2() as usize;
    let (staged, level) = (2 * columns * 72 * 2, columns * BLOCK_OUTPUTS * 4);
    let sums = columns * (BLOCK_OUTPUTS + 4) * 4;
    (staged + levels * level).max(sums) as u32
}
