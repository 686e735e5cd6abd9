//! Operations over sequences of positions, and the choice of their next token.

use laneway_device::op::{self, KvCache};
use laneway_device::{DType, View};

use super::Target;
use super::kept::Kept;
use crate::launch::{Args, Launch};

mod plan;

use plan::Plan;

/// Threads of a block of the kernels that handle one value or one head after the other.
const THREADS: u32 = 256;
/// Heads that one block of `qkv_rope` handles, a warp each.
const HEADS_IN_BLOCK: usize = THREADS as usize / 32;
/// The widest head that the kernels hold.
const MAX_HEAD_DIM: usize = 256;
/// Threads of the sampling kernel, and the sort keys that it has room for at least: the bins of its radix select lie
/// in their place.
const SAMPLE_THREADS: u32 = 512;
const MIN_SORT_KEYS: usize = 5 * 1024 / 2;

pub(super) fn rope_table(op: &op::RopeTable, out: &mut Vec<Launch>) {
    let args = Args::new()
        .view(&op.positions)
        .view(&op.inv_freq)
        .int(op.rows)
        .int(op.head_dim)
        .view(&op.out);
    let blocks = (op.rows * (op.head_dim / 2)).div_ceil(THREADS as usize);
    launch("rope_table", blocks, THREADS, 0, 1, args, out);
}

pub(super) fn qkv_rope(op: &op::QkvRope, out: &mut Vec<Launch>) {
    check_head(&op.cache);
    let kernel = match op.cache.pool.buffer.dtype() {
        DType::Bf16 => "qkv_rope_bf16",
        DType::F16 => "qkv_rope_f16",
        _ => "qkv_rope_f32",
    };
    let args = Args::new()
        .view(&op.qkv)
        .int(op.rows)
        .int(op.heads)
        .optional(op.q_norm.as_ref())
        .optional(op.k_norm.as_ref())
        .float(op.eps)
        .view(&op.cos_sin)
        .view(&op.sequences)
        .view(&op.positions);
    let args = cache_args(args, &op.cache).view(&op.q_out);
    let heads = op.rows * (op.heads + 2 * op.cache.kv_heads);
    launch(kernel, heads.div_ceil(HEADS_IN_BLOCK), THREADS, 0, 1, args, out);
}

pub(super) fn attention(op: &op::Attention, target: Target, out: &mut Vec<Launch>) {
    let plan = Plan::new(&op.cache, op.heads, op.window, op.rows, target);
    let args = Args::new()
        .view(&op.q)
        .int(op.heads)
        .view(&op.sequences)
        .view(&op.positions);
    let args = cache_args(args, &op.cache).int(window_arg(op.window));
    let width = op.heads * op.cache.head_dim;
    let args = output_args(plan.args(args), &op.out, op.rows, width, target);
    plan.launch(plan.form.attention, args, out);
}

pub(super) fn decode_attention(op: &op::DecodeAttention, target: Target, out: &mut Vec<Launch>) {
    let qkv = &op.qkv;
    if overwrites_visible(&qkv.cache, op.window) {
        qkv_rope(qkv, out);
        let attended = op::Attention {
            q: qkv.q_out.clone(),
            rows: qkv.rows,
            heads: qkv.heads,
            sequences: qkv.sequences.clone(),
            positions: qkv.positions.clone(),
            cache: qkv.cache.clone(),
            window: op.window,
            out: op.out.clone(),
        };
        return attention(&attended, target, out);
    }
    let plan = Plan::new(&qkv.cache, qkv.heads, op.window, qkv.rows, target);
    let args = Args::new()
        .view(&qkv.qkv)
        .int(qkv.heads)
        .optional(qkv.q_norm.as_ref())
        .optional(qkv.k_norm.as_ref())
        .float(qkv.eps)
        .view(&qkv.cos_sin)
        .view(&qkv.sequences)
        .view(&qkv.positions);
    let args = cache_args(args, &qkv.cache).int(window_arg(op.window));
    let width = qkv.heads * qkv.cache.head_dim;
    let args = output_args(plan.args(args), &op.out, qkv.rows, width, target);
    plan.launch(plan.form.decode, args, out);
}

/// Whether a row's own key may lie where an older visible one does: then all keys must be stored before any
/// is read, which one pass cannot do.
fn overwrites_visible(cache: &KvCache, window: Option<usize>) -> bool {
    cache.ring && window.is_none_or(|window| window > capacity(cache))
}

/// Positions of a sequence that the cache holds.
fn capacity(cache: &KvCache) -> usize {
    cache.blocks_per_sequence * cache.page_size
}

/// A window past any position is no window.
fn window_arg(window: Option<usize>) -> usize {
    window.map_or(0, |window| window.min(i32::MAX as usize))
}

/// Attention's output `[rows, width]`: where, of which type, and in blocks of how many rows in all (0: by rows).
fn output_args(args: Args, out: &View, rows: usize, width: usize, target: Target) -> Args {
    let dtype = match out.buffer.dtype() {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    };
    // The kernels count elements in 32 bits.
    assert!(
        i32::try_from(rows * width).is_ok(),
        "attention's output of {rows} rows of {width} has 2^31 elements or more"
    );
    let blocked = Kept::of_view(out, rows, width, target) == Kept::Blocked;
    args.view(out).int(dtype).int(if blocked { rows } else { 0 })
}

fn check_head(cache: &KvCache) {
    assert!(
        cache.head_dim <= MAX_HEAD_DIM,
        "head_dim {} is above {MAX_HEAD_DIM}",
        cache.head_dim
    );
}

/// The cache, as every kernel takes it.
fn cache_args(args: Args, cache: &KvCache) -> Args {
    args.view(&cache.pool)
        .long(cache.page_stride)
        .long(cache.k_offset)
        .long(cache.v_offset)
        .long(cache.pool.len)
        .view(&cache.table)
        .int(cache.table.len)
        .int(cache.blocks_per_sequence)
        .int(cache.page_size)
        .int(cache.kv_heads)
        .int(cache.head_dim)
        .int(cache.ring.into())
}

pub(super) fn sample(op: &op::Sample, out: &mut Vec<Launch>) {
    let sort_keys = op.vocab.next_power_of_two().max(MIN_SORT_KEYS);
    let seen: Option<&View> = op.seen.as_ref().map(|seen| &seen.pool);
    let (slot_stride, offset) = op
        .seen
        .as_ref()
        .map_or((0, 0), |seen| (seen.slot_stride, seen.offset));
    let args = Args::new()
        .view(&op.logits)
        .int(op.vocab)
        .int(op.live)
        .signed(op.extra_live)
        .view(&op.params)
        .int(op.group as usize)
        .optional(seen)
        .long(slot_stride)
        .long(offset)
        .long(seen.map_or(0, |pool| pool.len))
        .view(&op.tokens)
        .int(op.token_stride)
        .int(op.token_offset)
        .optional(op.scores.as_ref())
        .int(sort_keys);
    let shared = 8 * sort_keys + 4 * op.vocab;
    launch("sample", op.rows, SAMPLE_THREADS, shared as u32, 1, args, out);
}

/// One launch along x; nothing at all when there are no blocks.
fn launch(
    kernel: &'static str,
    blocks: usize,
    block: u32,
    shared: u32,
    cluster: u32,
    args: Args,
    out: &mut Vec<Launch>,
) {
    if blocks == 0 {
        return;
    }
    let blocks = u32::try_from(blocks).expect("grids are below 2^31: the device checked the buffers");
    out.push(Launch {
        kernel,
        grid: [blocks, 1, 1],
        block,
        shared,
        cluster,
        args,
    });
}

#[cfg(test)]
mod tests;
