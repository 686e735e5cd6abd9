//! Every operation once, with all its optional operands.

use super::*;

/// An operation and the operands whose length or type is free, by name.
pub(super) type Case = (
    fn(&mut Make) -> Op,
    &'static [&'static str],
    &'static [&'static str],
);

pub(super) const CASES: &[Case] = &[
    (
        |m| {
            Op::from(Gemm {
                norm: None,
                gated: None,
                x: m.f32("x", 3 * 5),
                rows: 3,
                w: m.matrix(4, 5),
                bias: Some(m.f32("bias", 4)),
                activation: Activation::Silu,
                scale: Some(m.f32("scale", 4)),
                accumulate: true,
                out: m.f32("out", 3 * 4),
                next: None,
            })
        },
        &["w"],
        &["w"],
    ),
    (
        |m| {
            Op::from(Gemm {
                norm: Some(InputNorm {
                    weight: m.f32("norm.weight", 5),
                    eps: 1e-6,
                    scratch: m.f32("norm.scratch", 3 * 5),
                    prepared: false,
                }),
                gated: Some(m.f32("gated", 3 * 4)),
                x: m.f32("x", 3 * 5),
                rows: 3,
                w: m.matrix(4, 5),
                bias: None,
                activation: Activation::None,
                scale: None,
                accumulate: false,
                out: m.f32("out", 3 * 2),
                next: None,
            })
        },
        &["w"],
        &["w"],
    ),
    (
        |m| {
            Op::from(Gemm {
                norm: None,
                gated: None,
                x: m.f32("x", 3 * 5),
                rows: 3,
                w: m.matrix(4, 5),
                bias: None,
                activation: Activation::None,
                scale: None,
                accumulate: true,
                out: m.f32("out", 3 * 4),
                next: Some(InputNorm {
                    weight: m.f32("next.weight", 4),
                    eps: 1e-6,
                    scratch: m.f32("next.scratch", 3 * 4),
                    prepared: false,
                }),
            })
        },
        &["w"],
        &["w"],
    ),
    (
        |m| {
            Op::from(RmsNorm {
                x: m.f32("x", 6),
                rows: 2,
                width: 3,
                weight: m.f32("weight", 3),
                eps: 1e-6,
                out: m.f32("out", 6),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(LayerNorm {
                x: m.f32("x", 6),
                rows: 2,
                width: 3,
                weight: m.f32("weight", 3),
                bias: m.f32("bias", 3),
                eps: 1e-6,
                out: m.f32("out", 6),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(SiluMul {
                x: m.f32("x", 12),
                rows: 2,
                width: 3,
                out: m.f32("out", 6),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(Embed {
                tables: vec![m.f32("table0", 10 * 3), m.f32("table1", 4 * 3)],
                ids: m.i32("ids", 2 * 4),
                ids_stride: 4,
                first_id: 2,
                rows: 2,
                width: 3,
                accumulate: false,
                out: m.f32("out", 6),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(RopeTable {
                positions: m.i32("positions", 3),
                inv_freq: m.f32("inv_freq", 2),
                rows: 3,
                head_dim: 4,
                out: m.f32("out", 12),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(QkvRope {
                qkv: m.f32("qkv", 3 * 8 * 4),
                rows: 3,
                heads: 4,
                q_norm: Some(m.f32("q_norm", 4)),
                k_norm: Some(m.f32("k_norm", 4)),
                eps: 1e-6,
                cos_sin: m.f32("cos_sin", 12),
                sequences: m.i32("sequences", 3),
                positions: m.i32("positions", 3),
                cache: m.cache(),
                q_out: m.f32("q_out", 3 * 4 * 4),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(Attention {
                q: m.f32("q", 3 * 4 * 4),
                rows: 3,
                heads: 4,
                sequences: m.i32("sequences", 3),
                positions: m.i32("positions", 3),
                cache: m.cache(),
                window: Some(7),
                out: m.f32("out", 3 * 4 * 4),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(DecodeAttention {
                qkv: QkvRope {
                    qkv: m.f32("qkv", 3 * 8 * 4),
                    rows: 3,
                    heads: 4,
                    q_norm: Some(m.f32("q_norm", 4)),
                    k_norm: Some(m.f32("k_norm", 4)),
                    eps: 1e-6,
                    cos_sin: m.f32("cos_sin", 3 * 4),
                    sequences: m.i32("sequences", 3),
                    positions: m.i32("positions", 3),
                    cache: m.cache(),
                    q_out: m.f32("q_out", 3 * 4 * 4),
                },
                window: Some(7),
                out: m.f32("out", 3 * 4 * 4),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(Sample {
                logits: m.f32("logits", 2 * 40),
                rows: 2,
                vocab: 40,
                live: 30,
                extra_live: 35,
                params: m.buffer("params", 2 * SampleRow::WORDS, DType::U32).view(),
                group: 1,
                seen: Some(StateSlice {
                    pool: m.i32("seen", 2),
                    slot_stride: 2,
                    offset: 0,
                }),
                tokens: m.i32("tokens", 16 + 5 + 1),
                token_stride: 16,
                token_offset: 5,
                scores: Some(m.f32("scores", 2 * 40)),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(GatherRows {
                src: m.i32("src", 30),
                indirect: false,
                index: m.i32("index", 2),
                rows: 2,
                width: 3,
                out: m.i32("out", 6),
            })
        },
        &["src"],
        &[],
    ),
    (
        |m| {
            Op::from(ScatterRows {
                src: m.i32("src", 6),
                index: m.i32("index", 2),
                rows: 2,
                width: 3,
                dst: m.i32("dst", 30),
            })
        },
        &["dst"],
        &[],
    ),
    (
        |m| {
            Op::from(Conv {
                x: m.f32("x", 5 * 2),
                rows: 5,
                w: m.matrix(3, 3 * 2),
                bias: Some(m.f32("bias", 3)),
                c_in: 2,
                taps: 3,
                dilation: 2,
                snake: Some(Snake {
                    alpha: m.f32("alpha", 2),
                    inv_beta: m.f32("inv_beta", 2),
                }),
                state: Some(m.state("state", 2 * 2 * 2)),
                windows: m.windows(),
                pointwise: None,
                scratch: None,
                residual: Some(m.f32("residual", 5 * 3)),
                clamp: true,
                out: m.f32("out", 5 * 3),
            })
        },
        &["w"],
        &["w"],
    ),
    (
        |m| {
            Op::from(Conv {
                x: m.f32("x", 5 * 2),
                rows: 5,
                w: m.matrix(3, 3 * 2),
                bias: Some(m.f32("bias", 3)),
                c_in: 2,
                taps: 3,
                dilation: 2,
                snake: Some(Snake {
                    alpha: m.f32("alpha", 2),
                    inv_beta: m.f32("inv_beta", 2),
                }),
                state: Some(m.state("state", 2 * 2 * 2)),
                windows: m.windows(),
                pointwise: Some(Pointwise {
                    snake: Snake {
                        alpha: m.f32("pointwise.alpha", 3),
                        inv_beta: m.f32("pointwise.inv_beta", 3),
                    },
                    w: m.matrix(4, 3),
                    bias: Some(m.f32("pointwise.bias", 4)),
                }),
                scratch: Some(m.f32("scratch", 33)),
                residual: Some(m.f32("residual", 5 * 4)),
                clamp: true,
                out: m.f32("out", 5 * 4),
            })
        },
        &["w"],
        &["w"],
    ),
    (
        |m| {
            Op::from(DepthwiseConv {
                x: m.f32("x", 5 * 2),
                rows: 5,
                w: m.f32("w", 3 * 2),
                bias: m.f32("bias", 2),
                channels: 2,
                taps: 3,
                state: m.state("state", 2 * 2),
                windows: m.windows(),
                out: m.f32("out", 5 * 2),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(Conv1d {
                x: m.f32("x", 5 * 2),
                rows_in: 5,
                rows_out: 3,
                w: m.matrix(4, 3 * 2),
                bias: Some(m.f32("bias", 4)),
                c_in: 2,
                taps: 3,
                stride: 2,
                dilation: 1,
                pad_left: 1,
                padding: Padding::Reflect,
                input_activation: Activation::None,
                activation: Activation::Relu,
                residual: Some(m.f32("residual", 3 * 4)),
                out: m.f32("out", 3 * 4),
            })
        },
        &["w"],
        &["w"],
    ),
    (
        |m| {
            Op::from(CopyColumns {
                src: m.f32("src", 2 * 6 - 1),
                src_stride: 6,
                src_first: 2,
                add: Some((m.f32("add", 5 + 4), 5, 1)),
                rows: 2,
                columns: 3,
                dst: m.f32("dst", 4 + 3),
                dst_stride: 4,
                dst_first: 0,
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(TimeStats {
                x: m.f32("x", 8),
                rows: 4,
                channels: 2,
                weights: Some(m.f32("weights", 8)),
                mean: m.f32("mean", 2),
                std: Some(m.f32("std", 2)),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(TimeSoftmax {
                x: m.f32("x", 8),
                rows: 4,
                channels: 2,
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(ChannelScale {
                x: m.f32("x", 8),
                scale: m.f32("scale", 2),
                add: Some(m.f32("add", 8)),
                rows: 4,
                channels: 2,
                out: m.f32("out", 8),
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(TileRow {
                src: m.i32("src", 2),
                rows: 3,
                columns: 2,
                dst: m.i32("dst", 2 * 5 + 1 + 2),
                dst_stride: 5,
                dst_first: 1,
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(NearestCode {
                x: m.f32("x", 6),
                rows: 2,
                width: 3,
                book: m.f32("book", 12),
                entries: 4,
                codes: m.i32("codes", 16 + 3 + 1),
                code_stride: 16,
                code_offset: 3,
            })
        },
        &[],
        &[],
    ),
    (
        |m| {
            Op::from(Copy {
                src: m.i32("src", 4),
                dst: m.i32("dst", 4),
            })
        },
        &[],
        &[],
    ),
    (|m| Op::from(Zero { dst: m.i32("dst", 4) }), &["dst"], &["dst"]),
];
