//! The operations of one frame, with the sizes of the demo model.

use laneway_device::op::*;
use laneway_device::{DType, Op, View};

use crate::operands::Operands;

/// Talker context in positions.
const CONTEXT: usize = 200;

fn gemm(o: &Operands, x: View, rows: usize, (n, k): (usize, usize), dtype: DType) -> Gemm {
    Gemm {
        norm: None,
        gated: None,
        x,
        rows,
        w: o.matrix(n, k, dtype),
        bias: None,
        activation: Activation::None,
        scale: None,
        accumulate: false,
        out: o.floats(rows * n),
        next: None,
    }
}

/// One stream's (or several streams') convolution; `time` rows a stream.
struct ConvShape {
    streams: usize,
    time: usize,
    c_in: usize,
    c_out: usize,
    taps: usize,
    dilation: usize,
    snake: bool,
}

fn conv(o: &Operands, x: View, shape: &ConvShape) -> Conv {
    let rows = shape.streams * shape.time;
    let past = (shape.taps - 1) * shape.dilation * shape.c_in;
    Conv {
        x,
        rows,
        w: o.matrix(shape.c_out, shape.taps * shape.c_in, DType::F32),
        bias: Some(o.floats(shape.c_out)),
        c_in: shape.c_in,
        taps: shape.taps,
        dilation: shape.dilation,
        snake: shape.snake.then(|| Snake {
            alpha: o.floats(shape.c_in),
            inv_beta: o.floats(shape.c_in),
        }),
        state: (past > 0).then(|| o.state(shape.streams, past)),
        windows: o.windows(shape.streams, shape.time),
        pointwise: None,
        scratch: None,
        residual: None,
        clamp: false,
        out: o.floats(rows * shape.c_out),
    }
}

/// Name, operation, floating-point operations and bytes of weights.
pub(crate) fn single_operations(o: &Operands) -> Vec<(String, Op, f64, f64)> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for (rows, n, k) in [
            (1, 512, 256),
            (2, 512, 256),
            (4, 512, 256),
            (8, 512, 256),
            (64, 512, 256),
        ] {
            let op = gemm(o, o.floats(rows * k), rows, (n, k), dtype);
            all.push((
                format!("gemm {rows} rows {n} x {k} {dtype:?}"),
                op.into(),
                (2 * rows * n * k) as f64,
                (n * k * dtype.size()) as f64,
            ));
        }
    }
    for (c, taps, time, dilation) in [
        (64, 7, 160, 1),
        (16, 7, 1920, 1),
        (16, 7, 1920, 9),
        (16, 1, 1920, 1),
    ] {
        for streams in [1, 8] {
            let shape = ConvShape {
                streams,
                time,
                c_in: c,
                c_out: c,
                taps,
                dilation,
                snake: true,
            };
            let op = conv(o, o.floats(streams * time * c), &shape);
            all.push((
                format!("conv {c} ch {taps} taps d{dilation} {time} x {streams}"),
                op.into(),
                (2 * streams * time * c * c * taps) as f64,
                (c * c * taps * 4) as f64,
            ));
        }
    }
    all
}

/// Sizes of a decoder stack.
struct Stack {
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    layers: usize,
    dtype: DType,
    norm_heads: bool,
}

const TALKER: Stack = Stack {
    hidden: 256,
    intermediate: 512,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    layers: 8,
    dtype: DType::Bf16,
    norm_heads: true,
};

const PREDICTOR: Stack = Stack {
    hidden: 192,
    intermediate: 384,
    layers: 2,
    ..TALKER
};

const CODEC: Stack = Stack {
    hidden: 160,
    intermediate: 384,
    heads: 4,
    kv_heads: 4,
    head_dim: 40,
    layers: 2,
    dtype: DType::F32,
    norm_heads: false,
};

/// A stack with its weights, to be run at several positions.
struct Layers {
    x: View,
    layers: Vec<Vec<Op>>,
    rope: RopeTable,
}

impl Stack {
    /// One pass of `rows` rows, each at `position` of its own sequence.
    fn build(&self, o: &Operands, rows: usize, position: usize) -> Layers {
        let (dim, q_width) = (self.head_dim, self.heads * self.head_dim);
        let qkv_width = (self.heads + 2 * self.kv_heads) * dim;
        let x = o.floats(rows * self.hidden);
        let sequences = o.ints(&(0..rows as i32).collect::<Vec<_>>());
        let positions = o.ints(&vec![position as i32; rows]);
        let rope = RopeTable {
            positions: positions.clone(),
            inv_freq: o.floats(dim / 2),
            rows,
            head_dim: dim,
            out: o.floats(rows * dim),
        };
        let norm = |out: &View| RmsNorm {
            x: x.clone(),
            rows,
            width: self.hidden,
            weight: o.floats(self.hidden),
            eps: 1e-6,
            out: out.clone(),
        };
        let h = o.floats(rows * self.hidden);
        let layers = (0..self.layers)
            .map(|_| {
                let cache = o.cache(rows, position + 1, self.kv_heads, dim);
                let qkv = gemm(o, h.clone(), rows, (qkv_width, self.hidden), self.dtype);
                let q = QkvRope {
                    qkv: qkv.out.clone(),
                    rows,
                    heads: self.heads,
                    q_norm: self.norm_heads.then(|| o.floats(dim)),
                    k_norm: self.norm_heads.then(|| o.floats(dim)),
                    eps: 1e-6,
                    cos_sin: rope.out.clone(),
                    sequences: sequences.clone(),
                    positions: positions.clone(),
                    cache: cache.clone(),
                    q_out: o.floats(rows * q_width),
                };
                let attention = Attention {
                    q: q.q_out.clone(),
                    rows,
                    heads: self.heads,
                    sequences: sequences.clone(),
                    positions: positions.clone(),
                    cache,
                    window: None,
                    out: o.floats(rows * q_width),
                };
                let down_to_x = |from: &View, k: usize| Gemm {
                    accumulate: true,
                    out: x.clone(),
                    ..gemm(o, from.clone(), rows, (self.hidden, k), self.dtype)
                };
                let o_proj = down_to_x(&attention.out, q_width);
                let gate_up = gemm(
                    o,
                    h.clone(),
                    rows,
                    (2 * self.intermediate, self.hidden),
                    self.dtype,
                );
                let silu = SiluMul {
                    x: gate_up.out.clone(),
                    rows,
                    width: self.intermediate,
                    out: o.floats(rows * self.intermediate),
                };
                let down = down_to_x(&silu.out, self.intermediate);
                vec![
                    norm(&h).into(),
                    qkv.into(),
                    q.into(),
                    attention.into(),
                    o_proj.into(),
                    norm(&h).into(),
                    gate_up.into(),
                    silu.into(),
                    down.into(),
                ]
            })
            .collect();
        Layers { x, layers, rope }
    }
}

/// Head projection and sampling of `rows` rows.
fn sample(o: &Operands, x: &View, rows: usize, hidden: usize, vocab: usize, group: u32) -> [Op; 2] {
    let head = gemm(o, x.clone(), rows, (vocab, hidden), DType::Bf16);
    let params = [
        0.9f32.to_bits(),
        1f32.to_bits(),
        1.05f32.to_bits(),
        50,
        1,
        2,
        3,
        u32::MAX,
        0,
        0,
        0,
        0,
    ];
    let sample = Sample {
        logits: head.out.clone(),
        rows,
        vocab,
        live: vocab,
        extra_live: -1,
        params: o.words(&params.repeat(rows)),
        group,
        seen: None,
        tokens: o.ints(&vec![0; rows]),
        token_stride: 1,
        token_offset: 0,
        scores: None,
    };
    [head.into(), sample.into()]
}

fn talker(o: &Operands, rows: usize) -> Vec<Op> {
    let stack = TALKER.build(o, rows, CONTEXT - 1);
    let mut ops = vec![stack.rope.into()];
    ops.extend(stack.layers.into_iter().flatten());
    ops.extend(sample(o, &stack.x, rows, TALKER.hidden, 1280, 0));
    ops
}

fn predictor(o: &Operands, rows: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    let mut stack = PREDICTOR.build(o, rows, 15);
    for pass in 0..16 {
        // The same weights sixteen times, as in the model; positions do not matter for the time.
        let from_talker = gemm(
            o,
            o.floats(rows * 256),
            rows,
            (PREDICTOR.hidden, 256),
            DType::Bf16,
        );
        ops.push(Op::from(from_talker));
        ops.push(stack.rope.clone().into());
        ops.extend(stack.layers.iter().flatten().cloned());
        if pass > 0 {
            ops.extend(sample(o, &stack.x, rows, PREDICTOR.hidden, 256, pass));
        }
    }
    stack.layers.clear();
    ops
}

fn codec(o: &Operands, streams: usize) -> Vec<Op> {
    let mut ops = Vec::new();
    let mut x = o.floats(streams * 128);
    let push_conv = |ops: &mut Vec<Op>, x: &View, shape: ConvShape, residual: Option<&View>| {
        let mut op = conv(o, x.clone(), &shape);
        if let Some(residual) = residual {
            op.residual = Some(residual.clone());
            op.out = residual.clone();
        }
        let out = op.out.clone();
        ops.push(op.into());
        out
    };
    let shape = |time, c_in, c_out, taps, dilation, snake| ConvShape {
        streams,
        time,
        c_in,
        c_out,
        taps,
        dilation,
        snake,
    };
    x = push_conv(&mut ops, &x, shape(1, 128, 128, 3, 1, false), None);
    let stack = CODEC.build(o, streams, 15);
    ops.push(gemm(o, x, streams, (160, 128), DType::F32).into());
    ops.push(stack.rope.into());
    ops.extend(stack.layers.into_iter().flatten());
    let from_stack = gemm(o, stack.x, streams, (128, 160), DType::F32);
    x = from_stack.out.clone();
    ops.push(from_stack.into());
    let mut time = 1;
    for _ in 0..2 {
        x = push_conv(&mut ops, &x, shape(time, 128, 256, 1, 1, false), None);
        time *= 2;
        let rows = streams * time;
        let depthwise = DepthwiseConv {
            x: x.clone(),
            rows,
            w: o.floats(7 * 128),
            bias: o.floats(128),
            channels: 128,
            taps: 7,
            state: o.state(streams, 6 * 128),
            windows: o.windows(streams, time),
            out: o.floats(rows * 128),
        };
        let norm = LayerNorm {
            x: depthwise.out.clone(),
            rows,
            width: 128,
            weight: o.floats(128),
            bias: o.floats(128),
            eps: 1e-6,
            out: depthwise.out.clone(),
        };
        let up = Gemm {
            activation: Activation::Gelu,
            ..gemm(o, norm.out.clone(), rows, (512, 128), DType::F32)
        };
        let down = Gemm {
            scale: Some(o.floats(128)),
            accumulate: true,
            out: x.clone(),
            ..gemm(o, up.out.clone(), rows, (128, 512), DType::F32)
        };
        ops.extend([Op::from(depthwise), norm.into(), up.into(), down.into()]);
    }
    x = push_conv(&mut ops, &x, shape(time, 128, 256, 7, 1, false), None);
    let mut channels = 256;
    for rate in [8, 5, 4, 3] {
        x = push_conv(
            &mut ops,
            &x,
            shape(time, channels, rate * channels / 2, 2, 1, true),
            None,
        );
        (time, channels) = (time * rate, channels / 2);
        for dilation in [1, 3, 9] {
            let h = push_conv(
                &mut ops,
                &x,
                shape(time, channels, channels, 7, dilation, true),
                None,
            );
            push_conv(
                &mut ops,
                &h,
                shape(time, channels, channels, 1, 1, true),
                Some(&x),
            );
        }
    }
    push_conv(&mut ops, &x, shape(time, channels, 1, 7, 1, true), None);
    ops
}

/// The three parts of a frame of `rows` requests.
pub(crate) fn parts(o: &Operands, rows: usize) -> [(&'static str, Vec<Op>); 3] {
    [
        ("talker", talker(o, rows)),
        ("predictor", predictor(o, rows)),
        ("codec", codec(o, rows)),
    ]
}
