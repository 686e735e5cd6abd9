//! Operations over sequences of positions, and the choice of their next token.

use super::optional;
use crate::cpu::kernels::attention::{Attention, Layout, QkvRope, rope_table};
use crate::cpu::kernels::operands::Operands;
use crate::cpu::kernels::sample::{Rules, sample};
use crate::cpu::kernels::scratch::{sized, with_scratch};
use crate::cpu::kernels::simd;
use crate::op::{self, SampleRow};

pub(super) fn rope(op: &op::RopeTable) -> Result<(), String> {
    let mut o = Operands::default();
    rope_table(
        o.read(&op.positions, op.rows)?,
        o.read(&op.inv_freq, op.head_dim / 2)?,
        o.write(&op.out, op.rows * op.head_dim)?,
    );
    Ok(())
}

pub(super) fn layout<'a>(o: &mut Operands, cache: &'a op::KvCache) -> Result<Layout<'a>, String> {
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

pub(super) fn qkv_rope(op: &op::QkvRope) -> Result<(), String> {
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

pub(super) fn attention(op: &op::Attention) -> Result<(), String> {
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

/// Both halves one after the other.
pub(super) fn decode_attention(op: &op::DecodeAttention) -> Result<(), String> {
    qkv_rope(&op.qkv)?;
    attention(&op::Attention {
        q: op.qkv.q_out.clone(),
        rows: op.qkv.rows,
        heads: op.qkv.heads,
        sequences: op.qkv.sequences.clone(),
        positions: op.qkv.positions.clone(),
        cache: op.qkv.cache.clone(),
        window: op.window,
        out: op.out.clone(),
    })
}

pub(super) fn sample_rows(op: &op::Sample) -> Result<(), String> {
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
