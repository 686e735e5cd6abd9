//! A layer of a decoder, twice: what one operation leaves is what the next one reads, so a captured run that does not
//! wait between its steps shows here.

use laneway_device::DType;
use laneway_device::op::{Activation, DecodeAttention, Gemm, InputNorm, QkvRope};

use super::cache::{Cache, PREDICTOR, Shape, TALKER};
use super::sequence::cos_sin;
use super::{Case, PARTS, Work, small};
use crate::check::Context;
use crate::check::data::{Data, Measure};
use crate::check::experiment::{Experiment, Placed, Slot};
use crate::check::random::Random;

/// Sums come out in another order, and their last bits decide how the inputs of later products round.
const BOUND: f64 = 2e-2;
const LAYERS: usize = 2;

pub(super) fn cases(context: &Context, out: &mut Vec<Case>) {
    let mut shapes = vec![(
        64,
        96,
        Shape {
            heads: 4,
            kv_heads: 2,
            dim: 16,
            page_size: 4,
            ..TALKER
        },
    )];
    if !small(context) {
        shapes.extend([(1024, 3072, PREDICTOR), (2048, 6144, TALKER)]);
    }
    for (hidden, inner, shape) in shapes {
        for pool in context.caches.clone() {
            let context = context.clone();
            let shape = Shape { pool, ..shape };
            out.push(Case::new(
                "Layer",
                format!("{hidden} {inner} {}", shape.label()),
                shape.dtype(),
                move |random| Work::Rows(layer(&context, hidden, inner, shape, random), PARTS.to_vec()),
            ));
        }
    }
}

fn layer(context: &Context, hidden: usize, inner: usize, shape: Shape, random: &mut Random) -> Experiment {
    let rows = 70;
    let contexts: Vec<usize> = (0..rows).map(|row| row % (shape.page_size - 1)).collect();
    let room: Vec<usize> = contexts.iter().map(|context| context + 1).collect();
    let cache = Cache::new(shape, &contexts, &room, random);
    let blocks = cache.blocks_per_sequence;
    let (width, qkv_width) = (shape.width(), shape.qkv_width());
    let narrow = context.narrow(DType::Bf16);
    let mut e = Experiment::new(rows);
    let mut matrix = |e: &mut Experiment, n: usize, k: usize| {
        let values = random.floats(n * k, 1.7 / (k as f32).sqrt());
        e.weights(n, k, Data::real(&values, DType::Bf16))
    };
    let qkv_w = matrix(&mut e, qkv_width, hidden);
    let o_w = matrix(&mut e, hidden, width);
    let gate_up_w = matrix(&mut e, 2 * inner, hidden);
    let down_w = matrix(&mut e, hidden, inner);
    let weight = |e: &mut Experiment, random: &mut Random, name, len| {
        let weight: Vec<f32> = random.floats(len, 0.5).iter().map(|w| 1.0 + w).collect();
        e.shared(name, Data::floats(&weight))
    };
    let norm = weight(&mut e, random, "norm", hidden);
    let head_norm = weight(&mut e, random, "head_norm", shape.dim);
    let x = Data::floats(&random.floats(rows * hidden, 1.0));
    let x = e.in_out_rows("x", hidden, x, Measure::Relative(BOUND));
    let positions: Vec<i32> = contexts.iter().map(|context| *context as i32).collect();
    let table_of = Data::floats(&cos_sin(&positions, shape.dim));
    let cos_sin = e.input_rows("cos_sin", shape.dim, table_of);
    let sequences: Vec<i32> = (0..rows as i32).collect();
    let sequences = e.input_rows("sequences", 1, Data::ints(&sequences));
    let positions = e.input_rows("positions", 1, Data::ints(&positions));
    let table = e.shared("table", Data::ints(&cache.table));
    let pool = e.pool("pool", cache.data(), Measure::Relative(BOUND));
    let normed = e.scratch_rows("normed", DType::F32, hidden);
    let qkv = e.scratch_rows("qkv", DType::F32, qkv_width);
    let q = e.scratch_rows("q", DType::F32, width);
    let gate_up = e.scratch_rows("gate_up", DType::F32, 2 * inner);
    let attended = e.scratch_rows("attended", narrow, width);
    let activated = e.scratch_rows("activated", narrow, inner);

    let input_norm = move |p: &Placed, prepared| {
        Some(InputNorm {
            weight: p.view(norm),
            eps: 1e-6,
            scratch: p.view(normed),
            prepared,
        })
    };
    let product = |p: &Placed, rows: usize, x: Slot, w: Slot, out: Slot| Gemm {
        x: p.view(x),
        norm: None,
        rows,
        w: p.matrix(w),
        bias: None,
        activation: Activation::None,
        scale: None,
        accumulate: false,
        gated: None,
        out: p.view(out),
        next: None,
    };
    let e = e.ops(move |p, rows| {
        let one = |layer: usize| {
            [
                Gemm {
                    norm: input_norm(p, layer > 0),
                    ..product(p, rows, x, qkv_w, qkv)
                }
                .into(),
                DecodeAttention {
                    qkv: QkvRope {
                        qkv: p.view(qkv),
                        rows,
                        heads: shape.heads,
                        q_norm: Some(p.view(head_norm)),
                        k_norm: Some(p.view(head_norm)),
                        eps: 1e-6,
                        cos_sin: p.view(cos_sin),
                        sequences: p.view(sequences),
                        positions: p.view(positions),
                        cache: Cache::view(shape, blocks, p, pool, table),
                        q_out: p.view(q),
                    },
                    window: None,
                    out: p.view(attended),
                }
                .into(),
                Gemm {
                    accumulate: true,
                    next: input_norm(p, false),
                    ..product(p, rows, attended, o_w, x)
                }
                .into(),
                Gemm {
                    norm: input_norm(p, true),
                    gated: Some(p.view(gate_up)),
                    ..product(p, rows, x, gate_up_w, activated)
                }
                .into(),
                Gemm {
                    accumulate: true,
                    next: input_norm(p, false),
                    ..product(p, rows, activated, down_w, x)
                }
                .into(),
            ]
        };
        (0..LAYERS).flat_map(one).collect()
    });
    let wide = [(attended, rows * width), (activated, rows * inner)];
    let wide = wide.map(|(slot, len)| (slot, Data::poison(DType::F32, len)));
    e.reference_data([vec![(pool, Data::floats(&cache.pool))], wide.to_vec()].concat())
}
