use laneway_device::DType;
use laneway_device::op::{Attention, DecodeAttention, KvCache, QkvRope};

use super::*;
use crate::lower::testing::view;

pub(super) const HOPPER: Target = Target { sms: 132, arch: 90 };
pub(super) const ADA: Target = Target { sms: 132, arch: 89 };

/// A cache of `blocks` blocks of 16 positions for each of 4 sequences.
pub(super) fn cache(blocks: usize, kv_heads: usize, head_dim: usize) -> KvCache {
    let part = 16 * kv_heads * head_dim;
    KvCache {
        pool: view(DType::F32, 4 * blocks * 2 * part),
        page_stride: 2 * part,
        k_offset: 0,
        v_offset: part,
        page_size: 16,
        kv_heads,
        head_dim,
        table: view(DType::I32, 4 * blocks),
        blocks_per_sequence: blocks,
        ring: false,
    }
}

fn decode(cache: KvCache, window: Option<usize>) -> DecodeAttention {
    let (rows, heads) = (3, 16);
    let width = (heads + 2 * cache.kv_heads) * cache.head_dim;
    let float = |len| view(DType::F32, len);
    let int = || view(DType::I32, rows);
    DecodeAttention {
        qkv: QkvRope {
            qkv: float(rows * width),
            rows,
            heads,
            q_norm: Some(float(cache.head_dim)),
            k_norm: None,
            eps: 1e-6,
            cos_sin: float(rows * cache.head_dim),
            sequences: int(),
            positions: int(),
            q_out: float(rows * heads * cache.head_dim),
            cache,
        },
        window,
        out: float(rows * heads * 128),
    }
}

fn kernels(op: &DecodeAttention) -> Vec<&'static str> {
    let mut out = Vec::new();
    decode_attention(op, HOPPER, &mut out);
    out.iter().map(|launch| launch.kernel).collect()
}

#[test]
fn one_pass_only_where_a_rows_own_key_replaces_no_visible_one() {
    let one = ["decode_attention_f32_128_2"];
    let two = ["qkv_rope_f32", "attention_f32_128_2"];
    assert_eq!(kernels(&decode(cache(4, 8, 128), None)), one);
    let ring = KvCache {
        ring: true,
        ..cache(4, 8, 128)
    };
    assert_eq!(kernels(&decode(ring.clone(), Some(64))), one);
    assert_eq!(kernels(&decode(ring.clone(), Some(65))), two);
    assert_eq!(kernels(&decode(ring, None)), two);
}

#[test]
fn shared_memory_holds_the_streams_and_the_rows_own_heads() {
    let mut out = Vec::new();
    let op = decode(cache(64, 8, 128), None);
    decode_attention(&op, ADA, &mut out);
    let staging = 16 * 2 * (4 * 128);
    let streams = 16 * 2 * (128 + 2);
    assert_eq!(out[0].shared, 4 * (staging + streams + (2 + 2) * 128));
    assert_eq!((out[0].grid, out[0].block), ([3 * 8, 1, 1], 512));
    // Of elements of 16 bits: a barrier, sums of values, parts of queries, own heads, scores and sums of weights.
    let mut half = op.clone();
    half.qkv.cache.pool = view(DType::F16, half.qkv.cache.pool.len);
    half.out = view(DType::F16, half.out.len);
    decode_attention(&half, ADA, &mut out);
    let streams = 16 * 2 * (4 * 128 + 8);
    assert_eq!(out[1].shared, 16 + streams + 2 * (7 * 160 + 2 * 128));
    assert_eq!(out[1].kernel, "decode_attention_f16_128_2");
    // Of the two-pass form too: the kernel lays both out alike.
    let qkv = op.qkv;
    attention(
        &Attention {
            q: qkv.q_out,
            rows: qkv.rows,
            heads: qkv.heads,
            sequences: qkv.sequences,
            positions: qkv.positions,
            cache: qkv.cache,
            window: None,
            out: op.out,
        },
        ADA,
        &mut out,
    );
    assert_eq!(out[2].shared, out[0].shared);
}

#[test]
fn no_rows_launch_nothing() {
    let mut op = decode(cache(4, 8, 128), None);
    op.qkv.rows = 0;
    assert!(kernels(&op).is_empty());
}

#[test]
fn sampling_has_room_to_sort_all_tokens_and_for_its_bins() {
    for (vocab, keys) in [(8, 2560), (2048, 2560), (3072, 4096)] {
        let mut out = Vec::new();
        let rows = 2;
        sample(
            &op::Sample {
                logits: view(DType::F32, rows * vocab),
                rows,
                vocab,
                live: vocab,
                extra_live: -1,
                params: view(DType::U32, rows * op::SampleRow::WORDS),
                group: 0,
                seen: None,
                tokens: view(DType::I32, rows),
                token_stride: 1,
                token_offset: 0,
                scores: None,
            },
            &mut out,
        );
        assert_eq!(
            out[0].shared as usize,
            8 * keys + 4 * vocab,
            "vocabulary of {vocab}"
        );
        assert_eq!(out[0].grid, [2, 1, 1]);
    }
}

#[test]
fn a_window_past_all_positions_fits_an_int() {
    assert_eq!(window_arg(None), 0);
    assert_eq!(window_arg(Some(72)), 72);
    assert_eq!(window_arg(Some(usize::MAX)), i32::MAX as usize);
}

#[test]
fn attention_writes_what_its_product_reads() {
    for (dtype, rows, heads, target, expected) in [
        (DType::F16, 9, 16, HOPPER, [2, 9]),
        (DType::Bf16, 300, 8, HOPPER, [1, 300]),
        (DType::F16, 1, 16, HOPPER, [2, 1]),
        // A width of no 1024, another architecture, f32: by rows.
        (DType::F16, 9, 12, HOPPER, [2, 0]),
        (DType::F16, 9, 16, ADA, [2, 0]),
        (DType::F32, 9, 16, HOPPER, [0, 0]),
    ] {
        let width = heads * 128;
        let op = Attention {
            q: view(DType::F32, rows * width),
            rows,
            heads,
            sequences: view(DType::I32, rows),
            positions: view(DType::I32, rows),
            cache: cache(4, 4, 128),
            window: None,
            out: view(dtype, rows * width),
        };
        let mut out = Vec::new();
        attention(&op, target, &mut out);
        let fields = out[0].args.fields();
        let last = fields[fields.len() - 2..].iter().map(|&(offset, size)| {
            let bytes = &out[0].args.bytes()[offset..][..size];
            i32::from_le_bytes(bytes.try_into().unwrap())
        });
        let what = format!("{dtype:?} {rows}x{width} on {}", target.arch);
        assert_eq!(last.collect::<Vec<_>>(), expected, "{what}");
    }
}
