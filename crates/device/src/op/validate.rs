//! Whether the operands of an operation fit each other. Both devices ask this at every launch and capture.

use super::operands::{Elements, Operand};
use super::{Activation, Gemm, KvCache, Op, StateSlice};
use crate::{DType, DeviceError, Result, TouchKind, View};

impl Op {
    /// Check lengths, element types and overlaps of the operands against the shape that the operation names.
    /// Contents (ids, block numbers, windows) are checked when it runs.
    ///
    /// # Errors
    /// [`DeviceError::BadOperation`] with the operand and the numbers.
    pub fn validate(&self) -> Result<()> {
        let operands = self.operands();
        let problem = self
            .shape_problem()
            .or_else(|| operands.iter().find_map(operand_problem))
            .or_else(|| overlap_problem(&operands));
        match problem {
            None => Ok(()),
            Some(problem) => Err(DeviceError::BadOperation {
                op: self.name(),
                problem,
            }),
        }
    }

    /// What the named shape itself gets wrong, before any operand is looked at.
    fn shape_problem(&self) -> Option<String> {
        match self {
            Op::QkvRope(op) => cache_problem(&op.cache, op.heads),
            Op::Attention(op) => cache_problem(&op.cache, op.heads).or_else(|| window_problem(op.window)),
            Op::DecodeAttention(op) => {
                cache_problem(&op.qkv.cache, op.qkv.heads).or_else(|| window_problem(op.window))
            }
            Op::Gemm(op) => product_problem(op),
            Op::RopeTable(op) => odd_head(op.head_dim),
            Op::Embed(op) => {
                let groups = op.tables.len();
                if op.first_id + groups > op.ids_stride {
                    return Some(format!(
                        "{groups} ids from column {} leave rows of {} ids",
                        op.first_id, op.ids_stride
                    ));
                }
                let table = op
                    .tables
                    .iter()
                    .find(|table| !table.len.is_multiple_of(op.width.max(1)))?;
                Some(format!(
                    "table {table:?} does not divide into rows of {}",
                    op.width
                ))
            }
            Op::Sample(op) => {
                if op.live > op.vocab {
                    return Some(format!("live {} is past the vocabulary of {}", op.live, op.vocab));
                }
                let seen = op.seen.as_ref()?;
                state_problem("seen", seen, op.vocab.div_ceil(32))
            }
            Op::GatherRows(op) => width_problem(op.width),
            Op::ScatterRows(op) => width_problem(op.width),
            Op::Conv(op) => {
                if op.w.k != op.taps * op.c_in {
                    return Some(taps_problem(op.w.k, op.taps, op.c_in));
                }
                if let Some(pointwise) = op.pointwise.as_ref().filter(|pointwise| pointwise.w.k != op.w.n) {
                    return Some(format!(
                        "pointwise.w has {} inputs, the convolution in front of it gives {}",
                        pointwise.w.k, op.w.n
                    ));
                }
                if op.pointwise.is_some() && op.scratch.is_none() {
                    return Some("a convolution with a second one needs a scratch".to_owned());
                }
                match (&op.state, op.taps) {
                    (None, 1) => None,
                    (Some(_), 1) => Some("a convolution of 1 tap carries no state: leave it out".to_owned()),
                    (None, taps) => Some(format!("a convolution of {taps} taps needs carried state")),
                    (Some(state), taps) => state_problem("state", state, (taps - 1) * op.dilation * op.c_in),
                }
            }
            Op::DepthwiseConv(op) => {
                state_problem("state", &op.state, op.taps.saturating_sub(1) * op.channels)
            }
            Op::Conv1d(op) => (op.w.k != op.taps * op.c_in).then(|| taps_problem(op.w.k, op.taps, op.c_in)),
            Op::NearestCode(op) => {
                (op.entries == 0).then(|| "a codebook of 0 entries has no nearest one".to_owned())
            }
            Op::Copy(op) => (op.src.len != op.dst.len || op.src.buffer.dtype() != op.dst.buffer.dtype())
                .then(|| {
                    format!(
                        "src {:?} is {} x {:?}, dst {:?} is {} x {:?}: they must be the same",
                        op.src,
                        op.src.len,
                        op.src.buffer.dtype(),
                        op.dst,
                        op.dst.len,
                        op.dst.buffer.dtype()
                    )
                }),
            Op::RmsNorm(_)
            | Op::LayerNorm(_)
            | Op::SiluMul(_)
            | Op::CopyColumns(_)
            | Op::TimeStats(_)
            | Op::TimeSoftmax(_)
            | Op::ChannelScale(_)
            | Op::TileRow(_)
            | Op::Zero(_) => None,
        }
    }
}

fn window_problem(window: Option<usize>) -> Option<String> {
    (window == Some(0)).then(|| "window 0 lets a row see no key, not even its own".to_owned())
}

fn product_problem(op: &Gemm) -> Option<String> {
    let narrow = |view: &View| view.buffer.dtype() != DType::F32;
    if narrow(&op.x) && op.norm.is_some() {
        return Some(format!("x {:?} is normed first: it must be F32", op.x));
    }
    if narrow(&op.out) && op.accumulate {
        return Some(format!("out {:?} is added to: it must be F32", op.out));
    }
    if op.next.is_some() && (narrow(&op.out) || op.gated.is_some()) {
        return Some(format!(
            "out {:?} is normed next: it must be F32 and not gated",
            op.out
        ));
    }
    op.gated.as_ref()?;
    if !op.w.n.is_multiple_of(2) {
        return Some(format!("{} outputs have no half that gates the other", op.w.n));
    }
    let plain = op.bias.is_none() && op.scale.is_none() && op.activation == Activation::None;
    (!plain || op.accumulate)
        .then(|| "a gated product takes no bias, scale or activation and does not accumulate".to_owned())
}

fn odd_head(head_dim: usize) -> Option<String> {
    (!head_dim.is_multiple_of(2)).then(|| format!("head_dim {head_dim} has no two halves to rotate"))
}

fn width_problem(width: usize) -> Option<String> {
    (width == 0).then(|| "rows of width 0".to_owned())
}

fn taps_problem(k: usize, taps: usize, c_in: usize) -> String {
    format!(
        "w has {k} inputs, {taps} taps of {c_in} channels are {}",
        taps * c_in
    )
}

fn cache_problem(cache: &KvCache, heads: usize) -> Option<String> {
    if cache.kv_heads == 0 || !heads.is_multiple_of(cache.kv_heads) {
        return Some(format!(
            "{heads} query heads do not divide into {} groups",
            cache.kv_heads
        ));
    }
    let page = cache.page_size * cache.kv_heads * cache.head_dim;
    let last = cache.k_offset.max(cache.v_offset) + page;
    if last > cache.page_stride || cache.page_stride > cache.pool.len {
        return Some(format!(
            "a block of {} positions ends at element {last}: it must fit page_stride {}, and that the pool {:?}",
            cache.page_size, cache.page_stride, cache.pool
        ));
    }
    if cache.page_size == 0
        || cache.blocks_per_sequence == 0
        || !cache.table.len.is_multiple_of(cache.blocks_per_sequence)
    {
        return Some(format!(
            "block table {:?} does not divide into rows of {} blocks of {} positions",
            cache.table, cache.blocks_per_sequence, cache.page_size
        ));
    }
    odd_head(cache.head_dim)
}

fn state_problem(role: &str, state: &StateSlice, needed: usize) -> Option<String> {
    let end = state.offset + needed;
    (end > state.slot_stride || end > state.pool.len).then(|| {
        format!(
            "{role}: {needed} elements at offset {} leave a slot of {} in {:?}",
            state.offset, state.slot_stride, state.pool
        )
    })
}

fn operand_problem(operand: &Operand<'_>) -> Option<String> {
    let Operand {
        role,
        buffer,
        start,
        len,
        ..
    } = *operand;
    if !operand.elements.allows(buffer.dtype()) {
        return Some(format!(
            "{role} ({}) is {:?}, it must be {}",
            buffer.name(),
            buffer.dtype(),
            match operand.elements {
                Elements::F32 => "F32",
                Elements::I32 => "I32",
                Elements::U32 => "U32",
                Elements::Floats => "F32, Bf16 or F16",
                Elements::Words | Elements::Any => "a 4-byte type",
            }
        ));
    }
    if operand.rows > 1
        && operand.first + operand.columns > operand.stride
        && operand.columns != operand.stride
    {
        return Some(format!(
            "{role}: columns {}..{} leave rows of {}",
            operand.first,
            operand.first + operand.columns,
            operand.stride
        ));
    }
    (operand.needed() > len).then(|| {
        format!(
            "{role} ({}[{start}..{}]) has {len} elements, {} are needed",
            buffer.name(),
            start + len,
            operand.needed()
        )
    })
}

/// A written range must not overlap another operand, unless both are the same range and the operation
/// works in place. Strided operands and pools are left to the kernel, which sees the rows.
fn overlap_problem(operands: &[Operand<'_>]) -> Option<String> {
    let plain = |operand: &&Operand<'_>| !operand.indirect && operand.rows == 1;
    for (i, written) in operands.iter().enumerate() {
        if written.kind != TouchKind::Write || !plain(&written) {
            continue;
        }
        for (j, other) in operands.iter().enumerate().filter(|(_, other)| plain(other)) {
            let overlaps = i != j
                && written.buffer.id() == other.buffer.id()
                && written.start < other.start + other.needed()
                && other.start < written.start + written.needed();
            let same = written.start == other.start && written.needed() == other.needed();
            if overlaps && !(same && other.in_place) {
                return Some(format!(
                    "{} overlaps {} in {}: elements from {} and from {}",
                    written.role,
                    other.role,
                    written.buffer.name(),
                    written.start,
                    other.start
                ));
            }
        }
    }
    None
}
