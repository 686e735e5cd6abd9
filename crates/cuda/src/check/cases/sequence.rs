//! Operations over sequences of positions.

use std::sync::Arc;

use laneway_device::DType;
use laneway_device::op::{Attention, DecodeAttention, QkvRope, RopeTable};

use super::cache::{CODEC, Cache, PREDICTOR, Shape, Stale, TALKER, TINY, TINY_RING};
use super::{Case, PARTS, Work, small};
use crate::check::Context;
use crate::check::data::{Data, Measure};
use crate::check::experiment::{Experiment, Placed};
use crate::check::random::Random;
use crate::check::streams::{Cut, Launch, StreamCase, StreamSlots};

const BOUND: f64 = 1e-5;

pub(super) fn cases(context: &Context, out: &mut Vec<Case>) {
    for (dim, rows) in [(6, 20), (40, 20), (64, 70), (128, 70)] {
        out.push(Case::new(
            "RopeTable",
            format!("h{dim} r{rows}"),
            "f32",
            move |random| Work::Rows(rope_table(dim, rows, random), PARTS.to_vec()),
        ));
    }
    // Contexts of decode rows; a row each, then padding.
    let short: &[usize] = &[0, 1, 2, 3, 4, 7, 8, 11, 12, 15, 16, 31, 33];
    let long: &[usize] = &[
        0, 1, 2, 14, 15, 16, 30, 31, 32, 33, 62, 63, 64, 65, 127, 128, 129, 199, 200, 255, 256, 257, 300,
        511, 513, 600,
    ];
    let within: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 3, 9];
    let wrapped: &[usize] = &[0, 1, 4, 5, 9, 10, 11, 19, 20, 57];
    let streamed: &[usize] = &[
        0, 1, 31, 32, 63, 64, 70, 71, 72, 73, 94, 95, 96, 150, 189, 190, 191, 1000,
    ];
    for pool in context.caches.clone() {
        let mut shapes = vec![
            (TINY, short),
            (TINY_RING, wrapped),
            (
                Shape {
                    heads: 6,
                    kv_heads: 1,
                    dim: 32,
                    window: Some(7),
                    ..TINY
                },
                short,
            ),
            (
                Shape {
                    stale: Stale::Nan,
                    dim: 64,
                    ..TINY
                },
                short,
            ),
            // Wide heads of which none shares its keys.
            (
                Shape {
                    heads: 3,
                    kv_heads: 3,
                    dim: 128,
                    ..TINY
                },
                short,
            ),
        ];
        if !small(context) {
            let nan = |shape: Shape| Shape {
                stale: Stale::Nan,
                ..shape
            };
            shapes.extend([(TALKER, long), (PREDICTOR, within), (CODEC, streamed)]);
            shapes.extend([
                (nan(TALKER), short),
                (nan(PREDICTOR), within),
                (nan(CODEC), streamed),
            ]);
        }
        for (shape, positions) in shapes {
            let shape = Shape { pool, ..shape };
            decode_cases(shape, positions, out);
        }
        if context.rounds() {
            for out_type in [DType::Bf16, DType::F16] {
                let narrow = |shape: Shape| Shape {
                    pool,
                    out: out_type,
                    ..shape
                };
                decode_cases(narrow(TINY), short, out);
                if !small(context) {
                    decode_cases(narrow(TALKER), long, out);
                    decode_cases(narrow(PREDICTOR), within, out);
                    decode_cases(narrow(CODEC), streamed, out);
                }
            }
        }
        let mut packed: Vec<(Shape, &'static [usize], &'static [usize])> = vec![
            (TINY, &[9, 1, 4, 6, 2], &[0; 5]),
            (TINY_RING, &[6, 1, 5, 4], &[0, 3, 10, 27]),
        ];
        if !small(context) {
            packed.extend::<[(Shape, &'static [usize], &'static [usize]); 4]>([
                (TALKER, &[37, 1, 16, 50, 5, 33], &[0; 6]),
                (TALKER, &[3, 20, 17], &[0; 3]),
                (PREDICTOR, &[2; 9], &[0; 9]),
                (CODEC, &[24, 1, 9, 17, 20], &[0, 60, 95, 180, 30]),
            ]);
        }
        for (shape, frames, starts) in packed {
            let shape = Shape { pool, ..shape };
            out.push(Case::new(
                "Attention",
                format!("{} packed {}", shape.label(), frames.iter().sum::<usize>()),
                shape.dtype(),
                move |random| Work::streams(packed_case(shape, frames, starts, random)),
            ));
        }
        let outs: &[DType] = match (small(context), context.rounds()) {
            (true, _) => &[],
            (false, true) => &[DType::F32, DType::Bf16],
            (false, false) => &[DType::F32],
        };
        for &out_type in outs {
            let shape = Shape {
                pool,
                out: out_type,
                ..TALKER
            };
            out.push(Case::new(
                "Attention",
                format!("{} prefill 400", shape.label()),
                shape.dtype(),
                move |random| {
                    let positions: Vec<i32> = (0..300).chain(0..100).collect();
                    let sequences: Vec<i32> = (0..400).map(|r| i32::from(r >= 300)).collect();
                    let e = attention(shape, &sequences, &positions, &[300, 100], random);
                    Work::Rows(e, vec![3, 16, 64, 65, 129])
                },
            ));
        }
    }
}

fn rope_table(dim: usize, rows: usize, random: &mut Random) -> Experiment {
    let mut e = Experiment::new(rows);
    let positions: Vec<i32> = (0..rows)
        .map(|r| {
            if r < 8 {
                r as i32
            } else {
                random.below(4096) as i32
            }
        })
        .collect();
    let positions = e.input_rows("positions", 1, Data::ints(&positions));
    let inv_freq = e.shared("inv_freq", Data::floats(&inv_freq(dim)));
    let y = e.output_rows("out", DType::F32, dim, Measure::Relative(1e-6));
    e.ops(move |p, rows| {
        vec![
            RopeTable {
                positions: p.view(positions),
                inv_freq: p.view(inv_freq),
                rows,
                head_dim: dim,
                out: p.view(y),
            }
            .into(),
        ]
    })
}

fn inv_freq(dim: usize) -> Vec<f32> {
    (0..dim / 2)
        .map(|i| (1e6f64.powf(-2.0 * i as f64 / dim as f64)) as f32)
        .collect()
}

/// Cosines, then sines, of each position.
pub(super) fn cos_sin(positions: &[i32], dim: usize) -> Vec<f32> {
    let freq = inv_freq(dim);
    let mut out = Vec::new();
    for p in positions {
        let angles: Vec<f64> = freq.iter().map(|f| f64::from(*p as f32 * f)).collect();
        out.extend(angles.iter().map(|a| a.cos() as f32));
        out.extend(angles.iter().map(|a| a.sin() as f32));
    }
    out
}

/// One row a sequence, two of padding.
fn decode_cases(shape: Shape, contexts: &'static [usize], out: &mut Vec<Case>) {
    let rows = || -> (Vec<i32>, Vec<i32>, Vec<usize>) {
        let mut sequences: Vec<i32> = (0..contexts.len() as i32).collect();
        let mut positions: Vec<i32> = contexts.iter().map(|p| *p as i32).collect();
        sequences.extend([-1, 0]);
        positions.extend([3, -1]);
        (sequences, positions, contexts.to_vec())
    };
    let name = format!("{} r{}", shape.label(), contexts.len() + 2);
    out.push(Case::new("QkvRope", name.clone(), shape.dtype(), move |random| {
        let (sequences, positions, contexts) = rows();
        let e = qkv_rope(shape, false, &sequences, &positions, &contexts, random);
        Work::Rows(e, PARTS.to_vec())
    }));
    out.push(Case::new(
        "DecodeAttention",
        name.clone(),
        shape.dtype(),
        move |random| {
            let (sequences, positions, contexts) = rows();
            let e = qkv_rope(shape, true, &sequences, &positions, &contexts, random);
            Work::Rows(e, PARTS.to_vec())
        },
    ));
    out.push(Case::new("Attention", name, shape.dtype(), move |random| {
        let (sequences, positions, contexts) = rows();
        let filled: Vec<usize> = contexts.iter().map(|c| c + 1).collect();
        let e = attention(shape, &sequences, &positions, &filled, random);
        Work::Rows(e, PARTS.to_vec())
    }));
}

fn attention(
    shape: Shape,
    sequences: &[i32],
    positions: &[i32],
    filled: &[usize],
    random: &mut Random,
) -> Experiment {
    let rows = sequences.len();
    let cache = Cache::new(shape, filled, filled, random);
    let blocks = cache.blocks_per_sequence;
    let mut e = Experiment::new(rows);
    let width = shape.width();
    let q = e.input_rows("q", width, Data::floats(&random.floats(rows * width, 2.0)));
    let sequences = e.input_rows("sequences", 1, Data::ints(sequences));
    let positions = e.input_rows("positions", 1, Data::ints(positions));
    let table = e.shared("table", Data::ints(&cache.table));
    let pool = e.input_pool("pool", cache.data());
    let y = e.output_rows("out", shape.out, width, Measure::Relative(shape.out_bound()));
    let e = e.ops(move |p, rows| {
        vec![
            Attention {
                q: p.view(q),
                rows,
                heads: shape.heads,
                sequences: p.view(sequences),
                positions: p.view(positions),
                cache: Cache::view(shape, blocks, p, pool, table),
                window: shape.window,
                out: p.view(y),
            }
            .into(),
        ]
    });
    cache.in_f32(e, pool, Some((y, rows * width)))
}

/// [`QkvRope`], and the attention behind it when `decode`.
fn qkv_rope(
    shape: Shape,
    decode: bool,
    sequences: &[i32],
    positions: &[i32],
    contexts: &[usize],
    random: &mut Random,
) -> Experiment {
    let rows = sequences.len();
    let room: Vec<usize> = contexts.iter().map(|c| c + 1).collect();
    let cache = Cache::new(shape, contexts, &room, random);
    let blocks = cache.blocks_per_sequence;
    let mut e = Experiment::new(rows);
    let qkv = Data::floats(&random.floats(rows * shape.qkv_width(), 2.0));
    let qkv = e.input_rows("qkv", shape.qkv_width(), qkv);
    let norm = |e: &mut Experiment, random: &mut Random, name| {
        let weight: Vec<f32> = random.floats(shape.dim, 0.5).iter().map(|w| 1.0 + w).collect();
        shape.norm.then(|| e.shared(name, Data::floats(&weight)))
    };
    let (q_norm, k_norm) = (norm(&mut e, random, "q_norm"), norm(&mut e, random, "k_norm"));
    let table_of = Data::floats(&cos_sin(positions, shape.dim));
    let cos_sin = e.input_rows("cos_sin", shape.dim, table_of);
    let sequences = e.input_rows("sequences", 1, Data::ints(sequences));
    let positions = e.input_rows("positions", 1, Data::ints(positions));
    let table = e.shared("table", Data::ints(&cache.table));
    let pool = e.pool("pool", cache.data(), Measure::Relative(shape.bound()));
    let width = shape.width();
    let q_out = match decode {
        true => e.scratch_rows("q_out", DType::F32, width),
        false => e.output_rows("q_out", DType::F32, width, Measure::Relative(BOUND)),
    };
    let y = decode.then(|| e.output_rows("out", shape.out, width, Measure::Relative(shape.out_bound())));
    let rope = move |p: &Placed, rows: usize| QkvRope {
        qkv: p.view(qkv),
        rows,
        heads: shape.heads,
        q_norm: p.optional(q_norm),
        k_norm: p.optional(k_norm),
        eps: 1e-6,
        cos_sin: p.view(cos_sin),
        sequences: p.view(sequences),
        positions: p.view(positions),
        cache: Cache::view(shape, blocks, p, pool, table),
        q_out: p.view(q_out),
    };
    let e = match y {
        None => e.ops(move |p, rows| vec![rope(p, rows).into()]),
        Some(y) => e
            .ops(move |p, rows| {
                vec![
                    DecodeAttention {
                        qkv: rope(p, rows),
                        window: shape.window,
                        out: p.view(y),
                    }
                    .into(),
                ]
            })
            .alternate("apart", 0.0, move |p, rows| {
                let qkv = rope(p, rows);
                let attention = Attention {
                    q: p.view(q_out),
                    rows,
                    heads: shape.heads,
                    sequences: p.view(sequences),
                    positions: p.view(positions),
                    cache: qkv.cache.clone(),
                    window: shape.window,
                    out: p.view(y),
                };
                vec![qkv.into(), attention.into()]
            }),
    };
    cache.in_f32(e, pool, y.map(|y| (y, rows * width)))
}

/// Sequences whose positions are computed by any number of launches; one row a sequence goes through
/// [`DecodeAttention`], everything else through its parts.
fn packed_case(
    shape: Shape,
    frames: &'static [usize],
    starts: &'static [usize],
    random: &mut Random,
) -> StreamCase {
    let room: Vec<usize> = frames.iter().zip(starts).map(|(f, s)| f + s).collect();
    let cache = Arc::new(Cache::new(shape, starts, &room, random));
    let rows: Vec<Vec<f32>> = frames
        .iter()
        .map(|frames| random.floats(frames * shape.qkv_width(), 2.0))
        .collect();
    let weight =
        |random: &mut Random| -> Vec<f32> { random.floats(shape.dim, 0.5).iter().map(|w| 1.0 + w).collect() };
    let norms = [weight(random), weight(random)];
    let launch: Launch =
        Arc::new(move |cuts, pool| packed_launch(shape, starts, &cache, &rows, &norms, cuts, pool));
    StreamCase {
        frames: frames.to_vec(),
        frame_bytes: shape.width() * 4,
        interleaves: true,
        launch,
    }
}

fn packed_launch(
    shape: Shape,
    starts: &[usize],
    cache: &Cache,
    inputs: &[Vec<f32>],
    norms: &[Vec<f32>; 2],
    cuts: &[Cut],
    pool: Option<&Data>,
) -> (Experiment, StreamSlots) {
    let (mut qkv, mut sequences, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    let width = shape.qkv_width();
    for cut in cuts {
        qkv.extend_from_slice(&inputs[cut.stream][cut.first * width..][..cut.frames * width]);
        for frame in cut.first..cut.first + cut.frames {
            sequences.push(cut.stream as i32);
            positions.push((starts[cut.stream] + frame) as i32);
        }
    }
    let rows = sequences.len();
    let mut once = sequences.clone();
    once.sort_unstable();
    once.dedup();
    let decode = once.len() == rows;
    let blocks = cache.blocks_per_sequence;
    let mut e = Experiment::new(rows);
    let qkv = e.input("qkv", Data::floats(&qkv));
    let q_norm = shape.norm.then(|| e.shared("q_norm", Data::floats(&norms[0])));
    let k_norm = shape.norm.then(|| e.shared("k_norm", Data::floats(&norms[1])));
    let cos_sin = e.input("cos_sin", Data::floats(&cos_sin(&positions, shape.dim)));
    let sequences = e.input("sequences", Data::ints(&sequences));
    let positions = e.input("positions", Data::ints(&positions));
    let table = e.shared("table", Data::ints(&cache.table));
    let contents = pool.cloned().unwrap_or_else(|| cache.data());
    let pool = e.pool("pool", contents, Measure::Relative(shape.bound()));
    let q_out = e.scratch_rows("q_out", DType::F32, shape.width());
    let y = e.output(
        "out",
        DType::F32,
        rows * shape.width(),
        Measure::Relative(shape.bound()),
    );
    let e = e.ops(move |p, rows| {
        let qkv = QkvRope {
            qkv: p.view(qkv),
            rows,
            heads: shape.heads,
            q_norm: p.optional(q_norm),
            k_norm: p.optional(k_norm),
            eps: 1e-6,
            cos_sin: p.view(cos_sin),
            sequences: p.view(sequences),
            positions: p.view(positions),
            cache: Cache::view(shape, blocks, p, pool, table),
            q_out: p.view(q_out),
        };
        if decode {
            let op = DecodeAttention {
                qkv,
                window: shape.window,
                out: p.view(y),
            };
            return vec![op.into()];
        }
        let attention = Attention {
            q: qkv.q_out.clone(),
            rows,
            heads: shape.heads,
            sequences: qkv.sequences.clone(),
            positions: qkv.positions.clone(),
            cache: qkv.cache.clone(),
            window: shape.window,
            out: p.view(y),
        };
        vec![qkv.into(), attention.into()]
    });
    let slots = StreamSlots {
        pool: Some(pool),
        out: y,
    };
    (cache.in_f32(e, pool, None), slots)
}
