//! Runs one operation on the calling thread: turns its views into slices and calls its kernel.

use super::kernels::attention::{Attention, Layout, QkvRope, rope_table};
use super::kernels::conv::{Conv, DepthwiseConv, Snake, Window, conv, depthwise_conv};
use super::kernels::embed::{Table, add_row};
use super::kernels::gemm::{Epilogue, Product, Residual, RowRef, Runs, Weights};
use super::kernels::norm::{Input, LayerNorm, RmsNorm, SiluMul};
use super::kernels::operands::Operands;
use super::kernels::reference::{ChannelScale, Conv1d, NearestCode, TimeSoftmax, TimeStats, conv1d};
use super::kernels::sample::{Rules, sample};
use super::kernels::scratch::{Scratch, sized, with_scratch};
use super::kernels::simd::{self, Level};
use super::kernels::{pack, rows};
use crate::op::{self, SampleRow};
use crate::{DType, Matrix, Op, View};

/// Run `op` now. Called by a stream's executor, in stream order.
///
/// # Errors
/// What is wrong with the operands or their contents (an id out of range, say): the stream fails with it.
pub(crate) fn execute(op: &Op) -> Result<(), String> {
    match op {
        Op::Gemm(op) => gemm(op),
        Op::RmsNorm(op) => rms_norm(op),
        Op::LayerNorm(op) => layer_norm(op),
        Op::SiluMul(op) => silu_mul(op),
        Op::Embed(op) => embed(op),
        Op::RopeTable(op) => rope(op),
        Op::QkvRope(op) => qkv_rope(op),
        Op::Attention(op) => attention(op),
        Op::Sample(op) => sample_rows(op),
        Op::GatherRows(op) => rows::gather(op),
        Op::ScatterRows(op) => rows::scatter(op),
        Op::Conv(op) => causal_conv(op),
        Op::DepthwiseConv(op) => causal_depthwise_conv(op),
        Op::Conv1d(op) => one_shot_conv(op),
        Op::CopyColumns(op) => rows::copy_columns(op),
        Op::TimeStats(op) => time_stats(op),
        Op::TimeSoftmax(op) => time_softmax(op),
        Op::ChannelScale(op) => channel_scale(op),
        Op::TileRow(op) => rows::tile_row(op),
        Op::NearestCode(op) => nearest_code(op),
        Op::Copy(op) => copy(op),
        Op::Zero(op) => zero(op),
    }
}

fn optional<'a>(o: &mut Operands, view: Option<&'a View>, len: usize) -> Result<Option<&'a [f32]>, String> {
    view.map(|view| o.read(view, len)).transpose()
}

/// An operand that may be the output, which has been taken already.
fn input<'a>(o: &mut Operands, x: &'a View, out: &View, len: usize) -> Result<Input<'a>, String> {
    if Operands::same(x, out) {
        return Ok(Input::Output);
    }
    Ok(Input::Other(o.read(x, len)?))
}

/// As [`input`], for what is added.
fn residual<'a>(
    o: &mut Operands,
    x: Option<&'a View>,
    out: &View,
    len: usize,
) -> Result<Residual<'a>, String> {
    Ok(match x {
        None => Residual::None,
        Some(x) if Operands::same(x, out) => Residual::Output,
        Some(x) => Residual::Other(o.read(x, len)?),
    })
}

fn weights<'a>(o: &mut Operands, w: &'a Matrix, view: &'a View) -> Result<Weights<'a>, String> {
    let len = pack::packed_len(w.n, w.k, w.packed.dtype());
    match w.packed.dtype() {
        DType::Bf16 => Ok(Weights::Bf16(o.read(view, len)?)),
        _ => Ok(Weights::F32(o.read(view, len)?)),
    }
}

fn gemm(op: &op::Gemm) -> Result<(), String> {
    let (n, k) = (op.w.n, op.w.k);
    let mut o = Operands::default();
    let packed = op.w.packed.view();
    with_scratch(|scratch| {
        scratch.rows.clear();
        scratch.rows.extend((0..op.rows).map(|r| RowRef {
            input: r * k,
            output: r,
        }));
        simd::run(Product {
            out: o.write(&op.out, op.rows * n)?,
            x: o.read(&op.x, op.rows * k)?,
            rows: &scratch.rows,
            runs: Runs::contiguous(k),
            w: weights(&mut o, &op.w, &packed)?,
            n,
            epilogue: Epilogue {
                bias: optional(&mut o, op.bias.as_ref(), n)?,
                activation: op.activation,
                scale: optional(&mut o, op.scale.as_ref(), n)?,
                residual: if op.accumulate {
                    Residual::Output
                } else {
                    Residual::None
                },
                clamp: false,
            },
        });
        Ok(())
    })
}

fn rms_norm(op: &op::RmsNorm) -> Result<(), String> {
    let (mut o, len) = (Operands::default(), op.rows * op.width);
    simd::run(RmsNorm {
        out: o.write(&op.out, len)?,
        x: input(&mut o, &op.x, &op.out, len)?,
        weight: o.read(&op.weight, op.width)?,
        eps: op.eps,
    });
    Ok(())
}

fn layer_norm(op: &op::LayerNorm) -> Result<(), String> {
    let (mut o, len) = (Operands::default(), op.rows * op.width);
    simd::run(LayerNorm {
        out: o.write(&op.out, len)?,
        x: input(&mut o, &op.x, &op.out, len)?,
        weight: o.read(&op.weight, op.width)?,
        bias: o.read(&op.bias, op.width)?,
        eps: op.eps,
    });
    Ok(())
}

fn silu_mul(op: &op::SiluMul) -> Result<(), String> {
    let (mut o, len) = (Operands::default(), op.rows * op.width);
    simd::run(SiluMul {
        out: o.write(&op.out, len)?,
        x: o.read(&op.x, 2 * len)?,
        width: op.width,
    });
    Ok(())
}

fn embed(op: &op::Embed) -> Result<(), String> {
    let mut o = Operands::default();
    let out: &mut [f32] = o.write(&op.out, op.rows * op.width)?;
    let ids: &[i32] = o.read(&op.ids, op.rows * op.ids_stride)?;
    if op.first_id + op.tables.len() > op.ids_stride {
        return Err(format!(
            "{} groups from column {} leave a row of {} ids",
            op.tables.len(),
            op.first_id,
            op.ids_stride
        ));
    }
    if !op.accumulate {
        out.fill(0.0);
    }
    for (g, table) in op.tables.iter().enumerate() {
        let entries = match table.buffer.dtype() {
            DType::Bf16 => Table::Bf16(o.read(table, table.len)?),
            _ => Table::F32(o.read(table, table.len)?),
        };
        for (r, out) in out.chunks_exact_mut(op.width).enumerate() {
            if let Ok(id) = usize::try_from(ids[r * op.ids_stride + op.first_id + g]) {
                add_row(entries, id, out).map_err(|e| format!("row {r} group {g} ({table:?}): {e}"))?;
            }
        }
    }
    Ok(())
}

fn rope(op: &op::RopeTable) -> Result<(), String> {
    let mut o = Operands::default();
    rope_table(
        o.read(&op.positions, op.rows)?,
        o.read(&op.inv_freq, op.head_dim / 2)?,
        o.write(&op.out, op.rows * op.head_dim)?,
    );
    Ok(())
}

fn layout<'a>(o: &mut Operands, cache: &'a op::KvCache) -> Result<Layout<'a>, String> {
    Ok(Layout {
        page_stride: cache.page_stride,
        k_offset: cache.k_offset,
        v_offset: cache.v_offset,
        page_size: cache.page_size,
        kv_heads: cache.kv_heads,
        head_dim: cache.head_dim,
        table: o.read(&cache.table, cache.table.len)?,
        blocks_per_sequence: cache.blocks_per_sequence,
        ring: cache.ring,
        pool_len: cache.pool.len,
    })
}

fn qkv_rope(op: &op::QkvRope) -> Result<(), String> {
    let dim = op.cache.head_dim;
    let mut o = Operands::default();
    simd::run(QkvRope {
        q_out: o.write(&op.q_out, op.rows * op.heads * dim)?,
        pool: o.write(&op.cache.pool, op.cache.pool.len)?,
        qkv: o.read(&op.qkv, op.rows * (op.heads + 2 * op.cache.kv_heads) * dim)?,
        heads: op.heads,
        q_norm: optional(&mut o, op.q_norm.as_ref(), dim)?,
        k_norm: optional(&mut o, op.k_norm.as_ref(), dim)?,
        eps: op.eps,
        cos_sin: o.read(&op.cos_sin, op.rows * dim)?,
        sequences: o.read(&op.sequences, op.rows)?,
        positions: o.read(&op.positions, op.rows)?,
        layout: layout(&mut o, &op.cache)?,
    })
}

fn attention(op: &op::Attention) -> Result<(), String> {
    let len = op.rows * op.heads * op.cache.head_dim;
    let mut o = Operands::default();
    with_scratch(|scratch| {
        simd::run(Attention {
            out: o.write(&op.out, len)?,
            q: o.read(&op.q, len)?,
            heads: op.heads,
            sequences: o.read(&op.sequences, op.rows)?,
            positions: o.read(&op.positions, op.rows)?,
            layout: layout(&mut o, &op.cache)?,
            pool: o.read(&op.cache.pool, op.cache.pool.len)?,
            window: op.window,
            scores: &mut scratch.data,
            spans: &mut scratch.spans,
        })
    })
}

fn sample_rows(op: &op::Sample) -> Result<(), String> {
    let vocab = op.vocab;
    let mut o = Operands::default();
    let logits: &[f32] = o.read(&op.logits, op.rows * vocab)?;
    let params: &[u32] = o.read(&op.params, op.rows * SampleRow::WORDS)?;
    let params: &[SampleRow] = bytemuck::cast_slice(params);
    let tokens: &mut [i32] = o.write(&op.tokens, op.tokens.len)?;
    let mut seen_pool = match &op.seen {
        Some(seen) => Some((o.write::<u32>(&seen.pool, seen.pool.len)?, seen)),
        None => None,
    };
    let mut scores = match &op.scores {
        Some(scores) => Some(o.write::<f32>(scores, op.rows * vocab)?),
        None => None,
    };
    let rules = Rules {
        live: op.live,
        extra_live: op.extra_live,
        group: op.group,
    };
    with_scratch(|scratch| {
        for (r, row) in params.iter().enumerate() {
            let mut seen = match (&mut seen_pool, usize::try_from(row.slot)) {
                (Some((pool, seen)), Ok(slot)) => {
                    let start = slot * seen.slot_stride + seen.offset;
                    let words = start..start + vocab.div_ceil(32);
                    Some(
                        pool.get_mut(words)
                            .ok_or_else(|| format!("row {r}: slot {slot} is not in the pool of seen sets"))?,
                    )
                }
                _ => None,
            };
            let z = sized(&mut scratch.data, vocab);
            z.copy_from_slice(&logits[r * vocab..][..vocab]);
            let token = sample(z, rules, row, seen.as_deref(), &mut scratch.sample)
                .map_err(|e| format!("row {r}: {e}"))?;
            if let Some(seen) = &mut seen {
                seen[token as usize / 32] |= 1 << (token % 32);
            }
            if let Some(scores) = &mut scores {
                scores[r * vocab..][..vocab].copy_from_slice(z);
            }
            *tokens
                .get_mut(r * op.token_stride + op.token_offset)
                .ok_or_else(|| format!("row {r}: its token leaves {:?}", op.tokens))? = token as i32;
        }
        Ok(())
    })
}

/// Read the step's windows into `scratch`; those of no frames are left out.
fn read_windows(
    o: &mut Operands,
    op: &op::Windows,
    rows: usize,
    state: Option<&op::StateSlice>,
    state_len: usize,
    scratch: &mut Scratch,
) -> Result<(), String> {
    let windows: &[i32] = o.read(&op.windows, op.count * 3)?;
    scratch.windows.clear();
    for (i, window) in windows.as_chunks::<3>().0.iter().enumerate() {
        let [first, frames, slot] = *window;
        if frames == 0 {
            continue;
        }
        let bad = || format!("window {i} (first {first}, frames {frames}, slot {slot}) leaves its operands");
        let row = |frames: i32| usize::try_from(frames).map(|f| f * op.rate).map_err(|_| bad());
        let (first_row, count) = (row(first)?, row(frames)?);
        let state = match state {
            Some(state) => {
                let slot = usize::try_from(slot).map_err(|_| bad())?;
                let start = slot * state.slot_stride + state.offset;
                if start + state_len > state.pool.len {
                    return Err(bad());
                }
                start
            }
            None => 0,
        };
        if first_row + count > rows {
            return Err(bad());
        }
        scratch.windows.push(Window {
            first: first_row,
            rows: count,
            state,
        });
    }
    Ok(())
}

fn causal_conv(op: &op::Conv) -> Result<(), String> {
    let (c_in, c_out, rows) = (op.c_in, op.w.n, op.rows);
    if op.w.k != op.taps * c_in || (op.taps > 1) != op.state.is_some() {
        return Err(format!(
            "weight [{c_out}, {}] against {} taps of {c_in} channels, state {:?}",
            op.w.k, op.taps, op.state
        ));
    }
    let past = (op.taps - 1) * op.dilation * c_in;
    let mut o = Operands::default();
    let packed = op.w.packed.view();
    with_scratch(|scratch| {
        read_windows(&mut o, &op.windows, rows, op.state.as_ref(), past, scratch)?;
        let snake = match &op.snake {
            Some(snake) => Some(Snake {
                alpha: o.read(&snake.alpha, c_in)?,
                inv_beta: o.read(&snake.inv_beta, c_in)?,
            }),
            None => None,
        };
        let conv_op = Conv {
            out: o.write(&op.out, rows * c_out)?,
            x: o.read(&op.x, rows * c_in)?,
            w: weights(&mut o, &op.w, &packed)?,
            bias: optional(&mut o, op.bias.as_ref(), c_out)?,
            c_in,
            c_out,
            taps: op.taps,
            dilation: op.dilation,
            snake,
            state: match &op.state {
                Some(state) => o.write(&state.pool, state.pool.len)?,
                None => &mut [],
            },
            residual: residual(&mut o, op.residual.as_ref(), &op.out, rows * c_out)?,
            clamp: op.clamp,
        };
        conv(Level::best(), conv_op, scratch);
        Ok(())
    })
}

fn causal_depthwise_conv(op: &op::DepthwiseConv) -> Result<(), String> {
    let (channels, rows) = (op.channels, op.rows);
    let past = (op.taps - 1) * channels;
    let mut o = Operands::default();
    with_scratch(|scratch| {
        read_windows(&mut o, &op.windows, rows, Some(&op.state), past, scratch)?;
        let conv_op = DepthwiseConv {
            out: o.write(&op.out, rows * channels)?,
            x: o.read(&op.x, rows * channels)?,
            w: o.read(&op.w, op.taps * channels)?,
            bias: o.read(&op.bias, channels)?,
            channels,
            taps: op.taps,
            state: o.write(&op.state.pool, op.state.pool.len)?,
        };
        depthwise_conv(Level::best(), conv_op, scratch);
        Ok(())
    })
}

fn one_shot_conv(op: &op::Conv1d) -> Result<(), String> {
    let (c_out, len) = (op.w.n, op.rows_out * op.w.n);
    if op.w.k != op.taps * op.c_in {
        return Err(format!(
            "weight [{c_out}, {}] against {} taps of {} channels",
            op.w.k, op.taps, op.c_in
        ));
    }
    let mut o = Operands::default();
    let packed = op.w.packed.view();
    let conv_op = Conv1d {
        out: o.write(&op.out, len)?,
        x: o.read(&op.x, op.rows_in * op.c_in)?,
        rows_in: op.rows_in,
        rows_out: op.rows_out,
        w: weights(&mut o, &op.w, &packed)?,
        bias: optional(&mut o, op.bias.as_ref(), c_out)?,
        c_in: op.c_in,
        c_out,
        taps: op.taps,
        stride: op.stride,
        dilation: op.dilation,
        pad_left: op.pad_left,
        padding: op.padding,
        input_activation: op.input_activation,
        activation: op.activation,
        residual: residual(&mut o, op.residual.as_ref(), &op.out, len)?,
    };
    with_scratch(|scratch| conv1d(Level::best(), conv_op, scratch))
}

fn time_stats(op: &op::TimeStats) -> Result<(), String> {
    let (mut o, len) = (Operands::default(), op.rows * op.channels);
    simd::run(TimeStats {
        mean: o.write(&op.mean, op.channels)?,
        std: match &op.std {
            Some(std) => Some(o.write(std, op.channels)?),
            None => None,
        },
        x: o.read(&op.x, len)?,
        weights: optional(&mut o, op.weights.as_ref(), len)?,
    });
    Ok(())
}

fn time_softmax(op: &op::TimeSoftmax) -> Result<(), String> {
    simd::run(TimeSoftmax {
        x: Operands::default().write(&op.x, op.rows * op.channels)?,
        channels: op.channels,
    });
    Ok(())
}

fn channel_scale(op: &op::ChannelScale) -> Result<(), String> {
    let (mut o, len) = (Operands::default(), op.rows * op.channels);
    simd::run(ChannelScale {
        out: o.write(&op.out, len)?,
        x: input(&mut o, &op.x, &op.out, len)?,
        scale: o.read(&op.scale, op.channels)?,
        add: residual(&mut o, op.add.as_ref(), &op.out, len)?,
    });
    Ok(())
}

fn nearest_code(op: &op::NearestCode) -> Result<(), String> {
    let mut o = Operands::default();
    let x: &mut [f32] = o.write(&op.x, op.rows * op.width)?;
    let book: &[f32] = o.read(&op.book, op.entries * op.width)?;
    let codes: &mut [i32] = o.write(&op.codes, op.codes.len)?;
    for (r, x) in x.chunks_exact_mut(op.width).enumerate() {
        let code = simd::run(NearestCode { x, book });
        *codes
            .get_mut(r * op.code_stride + op.code_offset)
            .ok_or_else(|| format!("row {r}: its code leaves {:?}", op.codes))? = code as i32;
    }
    Ok(())
}

fn copy(op: &op::Copy) -> Result<(), String> {
    let (src, dst) = (&op.src, &op.dst);
    if src.len != dst.len || src.buffer.dtype().size() != dst.buffer.dtype().size() {
        return Err(format!("{src:?} and {dst:?} differ in type or length"));
    }
    let mut o = Operands::default();
    match dst.buffer.dtype().size() {
        2 => o
            .write::<u16>(dst, dst.len)?
            .copy_from_slice(o.read(src, src.len)?),
        _ => o
            .write::<u32>(dst, dst.len)?
            .copy_from_slice(o.read(src, src.len)?),
    }
    Ok(())
}

fn zero(op: &op::Zero) -> Result<(), String> {
    let (dst, mut o) = (&op.dst, Operands::default());
    match dst.buffer.dtype().size() {
        2 => o.write::<u16>(dst, dst.len)?.fill(0),
        _ => o.write::<u32>(dst, dst.len)?.fill(0),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
