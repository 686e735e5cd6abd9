//! Runs one operation on the calling thread: turns its views into slices and calls its kernel.

use super::kernels::embed::{Table, add_row};
use super::kernels::gemm::{Epilogue, Product, Residual, RowRef, Runs, Weights};
use super::kernels::norm::{Input, LayerNorm, RmsNorm, SiluMul};
use super::kernels::operands::Operands;
use super::kernels::scratch::with_scratch;
use super::kernels::{pack, rows, simd};
use crate::{DType, Matrix, Op, View, op};

mod clip;
mod sequence;

/// Run `op` now. Called by a stream's executor, in stream order.
///
/// # Errors
/// What is wrong with the operands or their contents (an id out of range, say): the stream fails with it.
pub(crate) fn execute(op: &Op) -> Result<(), String> {
    match op {
        Op::Gemm(op) => fused_gemm(op),
        Op::RmsNorm(op) => rms_norm(op),
        Op::LayerNorm(op) => layer_norm(op),
        Op::SiluMul(op) => silu_mul(op),
        Op::Embed(op) => embed(op),
        Op::RopeTable(op) => sequence::rope(op),
        Op::QkvRope(op) => sequence::qkv_rope(op),
        Op::Attention(op) => sequence::attention(op),
        Op::DecodeAttention(op) => sequence::decode_attention(op),
        Op::Sample(op) => sequence::sample_rows(op),
        Op::GatherRows(op) => rows::gather(op),
        Op::ScatterRows(op) => rows::scatter(op),
        Op::Conv(op) => clip::causal_conv(op),
        Op::DepthwiseConv(op) => clip::causal_depthwise_conv(op),
        Op::Conv1d(op) => clip::one_shot_conv(op),
        Op::CopyColumns(op) => rows::copy_columns(op),
        Op::TimeStats(op) => clip::time_stats(op),
        Op::TimeSoftmax(op) => clip::time_softmax(op),
        Op::ChannelScale(op) => clip::channel_scale(op),
        Op::TileRow(op) => rows::tile_row(op),
        Op::NearestCode(op) => clip::nearest_code(op),
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

/// Norm, product and gate one after the other.
fn fused_gemm(op: &op::Gemm) -> Result<(), String> {
    let mut product = op.clone();
    if let Some(norm) = product.norm.take() {
        rms_norm(&op::RmsNorm {
            x: op.x.clone(),
            rows: op.rows,
            width: op.w.k,
            weight: norm.weight,
            eps: norm.eps,
            out: norm.scratch.clone(),
        })?;
        product.x = norm.scratch;
    }
    let Some(scratch) = product.gated.take() else {
        return gemm(&product);
    };
    product.out = scratch.clone();
    gemm(&product)?;
    silu_mul(&op::SiluMul {
        x: scratch,
        rows: op.rows,
        width: op.w.n / 2,
        out: op.out.clone(),
    })
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
