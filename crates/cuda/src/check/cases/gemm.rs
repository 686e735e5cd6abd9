//! Products with a weight matrix.

use laneway_device::op::{Activation, Gemm, InputNorm, RmsNorm, SiluMul};
use laneway_device::{DType, Op};

use super::{Case, Work, small};
use crate::check::Context;
use crate::check::data::{Data, Measure, narrowed};
use crate::check::experiment::Experiment;
use crate::check::random::Random;
use crate::lower::gemm::splits_norm;

/// Batch sizes at which a device may change kernels.
const SWITCHES: &[usize] = &[
    1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257,
];

/// Those where inputs in blocks of rows change blocks, columns and kernels.
const IN_BLOCKS: &[usize] = &[8, 9, 16, 17, 33, 64, 65, 100];

const EPS: f32 = 1e-6;

/// f32 sums of products whose inputs are the same, in two orders.
const BOUND: f64 = 3e-5;
/// With a norm ahead: its last bit decides how some inputs round to bfloat16.
const NORMED_BOUND: f64 = 1e-4;
/// A norm that is split rounds its row before it divides it, another one behind: to bfloat16 and to half precision.
const SPLIT_BOUND: f64 = 4e-3;
/// The last bit decides how some outputs round to 16 bits.
const NARROW_BOUND: f64 = 1e-3;

#[derive(Debug, Clone, Copy)]
struct Shape {
    n: usize,
    k: usize,
    dtype: DType,
    norm: bool,
    gated: bool,
    bias: bool,
    scale: bool,
    accumulate: bool,
    activation: Activation,
    /// The input comes in the type that products take it in.
    narrow: bool,
    /// The output goes out in it.
    narrow_out: bool,
}

const PLAIN: Shape = Shape {
    n: 0,
    k: 0,
    dtype: DType::Bf16,
    norm: false,
    gated: false,
    bias: false,
    scale: false,
    accumulate: false,
    activation: Activation::None,
    narrow: false,
    narrow_out: false,
};

const fn plain(n: usize, k: usize) -> Shape {
    Shape { n, k, ..PLAIN }
}

const fn normed(n: usize, k: usize) -> Shape {
    Shape {
        norm: true,
        ..plain(n, k)
    }
}

const fn gated(n: usize, k: usize) -> Shape {
    Shape {
        gated: true,
        ..normed(n, k)
    }
}

const fn residual(n: usize, k: usize) -> Shape {
    Shape {
        accumulate: true,
        ..plain(n, k)
    }
}

const fn biased(n: usize, k: usize, activation: Activation) -> Shape {
    Shape {
        bias: true,
        activation,
        ..plain(n, k)
    }
}

const fn scaled(n: usize, k: usize, bias: bool) -> Shape {
    Shape {
        bias,
        scale: true,
        ..residual(n, k)
    }
}

/// Talker, predictor and codec, each shape once.
const RELEASED: &[Shape] = &[
    normed(4096, 2048),
    residual(2048, 2048),
    gated(12288, 2048),
    residual(2048, 6144),
    plain(3072, 2048),
    normed(4096, 1024),
    residual(1024, 2048),
    gated(6144, 1024),
    residual(1024, 3072),
    plain(3072, 1024),
    normed(2048, 1024),
    biased(1024, 2048, Activation::None),
    biased(2048, 2048, Activation::Silu),
    plain(512, 256),
    residual(512, 256),
    plain(3072, 512),
    scaled(512, 1024, false),
    plain(2048, 512),
    biased(512, 1024, Activation::None),
    biased(1024, 512, Activation::None),
    biased(2048, 1024, Activation::None),
    biased(4096, 1024, Activation::Gelu),
    scaled(1024, 4096, true),
];

/// Small and odd ones, and those of the demo and golden models.
const SMALL: &[Shape] = &[
    plain(5, 7),
    plain(1, 16),
    normed(33, 40),
    biased(130, 100, Activation::Silu),
    gated(96, 56),
    gated(10, 9),
    gated(64, 48),
    Shape {
        gated: true,
        ..plain(64, 48)
    },
    residual(72, 24),
    scaled(48, 80, true),
    normed(512, 256),
    residual(192, 384),
    biased(17, 64, Activation::Gelu),
    biased(16, 8, Activation::Relu),
    biased(20, 12, Activation::Tanh),
    biased(24, 32, Activation::ReluTanh),
    biased(24, 32, Activation::Sigmoid),
    biased(24, 32, Activation::Elu),
    plain(64, 1),
];

/// Inputs and outputs in blocks of rows, and what neighbours them.
fn in_blocks() -> Vec<Shape> {
    let narrow = |shape| Shape {
        narrow: true,
        ..shape
    };
    let to_narrow = |shape| Shape {
        narrow_out: true,
        ..shape
    };
    let bare_gate = |n, k| Shape {
        gated: true,
        ..plain(n, k)
    };
    vec![
        narrow(biased(1024, 3072, Activation::Silu)),
        narrow(scaled(2048, 1024, true)),
        narrow(residual(1024, 2048)),
        narrow(plain(8192, 1024)),
        narrow(bare_gate(256, 2048)),
        to_narrow(narrow(bare_gate(4096, 1024))),
        to_narrow(narrow(bare_gate(256, 1024))),
        to_narrow(narrow(biased(1024, 2048, Activation::Gelu))),
        to_narrow(normed(2048, 1024)),
        // Read by the kernels of other shapes: whole blocks, eight rows at a time, in parts.
        narrow(biased(130, 1024, Activation::None)),
        narrow(bare_gate(96, 1024)),
        narrow(bare_gate(80, 1024)),
        // Written by them.
        to_narrow(narrow(biased(1024, 512, Activation::Gelu))),
        to_narrow(plain(2048, 48)),
        to_narrow(plain(1024, 40)),
        to_narrow(bare_gate(2048, 40)),
    ]
}

pub(super) fn cases(context: &Context, out: &mut Vec<Case>) {
    for dtype in [DType::Bf16, DType::F32] {
        for shape in SMALL {
            push(context, Shape { dtype, ..*shape }, 35, SWITCHES, out);
        }
        // Where products are taken of 16 bits, their inputs may come so and their outputs go.
        for shape in SMALL.iter().filter(|shape| context.rounds() && !shape.accumulate) {
            let shape = Shape {
                dtype,
                narrow: !shape.norm,
                narrow_out: true,
                ..*shape
            };
            push(context, shape, 35, SWITCHES, out);
        }
    }
    if small(context) {
        return;
    }
    for &dtype in context.given() {
        let mut released = RELEASED.to_vec();
        if context.rounds() {
            let narrow = |shape: &Shape| Shape {
                narrow: true,
                ..*shape
            };
            released.extend(RELEASED.iter().filter(|shape| !shape.norm).map(narrow));
            let narrow_out = |shape: &Shape| Shape {
                narrow_out: true,
                ..*shape
            };
            let hands_on = |shape: &&Shape| shape.gated || shape.activation == Activation::Gelu;
            released.extend(RELEASED.iter().filter(hands_on).map(narrow_out));
        }
        for (i, shape) in released.iter().enumerate() {
            // The first ones go through every batch size, the others only where few rows end.
            let (rows, parts): (usize, &[usize]) = match (i, dtype) {
                (0..4, DType::Bf16) => (140, SWITCHES),
                (0..4, _) => (34, &[1, 8, 9, 16, 17, 33]),
                (_, DType::Bf16) => (66, &[1, 3, 8, 9, 16, 32, 33, 64]),
                _ => (20, &[1, 8, 9, 16, 17]),
            };
            push(context, Shape { dtype, ..*shape }, rows, parts, out);
        }
        for shape in in_blocks().into_iter().filter(|_| context.rounds()) {
            push(context, Shape { dtype, ..shape }, 130, IN_BLOCKS, out);
        }
        // Prefills.
        for shape in [normed(4096, 1024), residual(2048, 6144), gated(6144, 1024)] {
            push(context, Shape { dtype, ..shape }, 300, SWITCHES, out);
        }
    }
    if context.rounds() {
        push(context, normed(4096, 2048), 700, &[1, 128, 300, 512, 513], out);
    }
}

fn push(context: &Context, shape: Shape, rows: usize, parts: &'static [usize], out: &mut Vec<Case>) {
    let mut name = format!("{}x{} r{rows}", shape.n, shape.k);
    for (with, what) in [
        (shape.norm, " norm"),
        (shape.gated, " gated"),
        (shape.bias, " bias"),
        (shape.scale, " scale"),
        (shape.accumulate, " acc"),
        (shape.narrow, " narrow"),
        (shape.narrow_out, " to narrow"),
    ] {
        if with {
            name += what;
        }
    }
    if shape.activation != Activation::None {
        name += &format!(" {:?}", shape.activation).to_lowercase();
    }
    let dtype = if shape.dtype == DType::Bf16 { "bf16" } else { "f32" };
    let kept = context.narrow(shape.dtype);
    let split = shape.norm && splits_norm(kept, (shape.n, shape.k), shape.gated, context.arch);
    out.push(Case::new("Gemm", name, dtype, move |random| {
        Work::Rows(experiment(shape, rows, (kept, split), random), parts.to_vec())
    }));
}

/// `kept`: what the subject makes of weights and inputs; `split`: whether it divides behind the product.
fn experiment(shape: Shape, rows: usize, (kept, split): (DType, bool), random: &mut Random) -> Experiment {
    let rounds = kept != DType::F32;
    let Shape { n, k, .. } = shape;
    let x = random.floats(rows * k, 1.0);
    let norm_weight: Vec<f32> = random.floats(k, 0.5).iter().map(|w| 1.0 + w).collect();
    let mut e = Experiment::new(rows);
    let x_slot = e.input_rows(
        "x",
        k,
        Data::real(&x, if shape.narrow { kept } else { DType::F32 }),
    );
    let weights = random.floats(n * k, 1.7 / (k as f32).sqrt());
    let w = e.weights(n, k, Data::real(&weights, shape.dtype));
    let vector = |e: &mut Experiment, random: &mut Random, name, wanted: bool| {
        wanted.then(|| e.shared(name, Data::floats(&random.floats(n, 1.0))))
    };
    let bias = vector(&mut e, random, "bias", shape.bias);
    let scale = vector(&mut e, random, "scale", shape.scale);
    let norm = shape.norm.then(|| {
        let weight = e.shared("norm", Data::floats(&norm_weight));
        (weight, e.scratch_rows("norm.scratch", DType::F32, k))
    });
    let gate = shape.gated.then(|| e.scratch_rows("gated", DType::F32, n));
    let width = if shape.gated { n / 2 } else { n };
    let bound = match (shape.narrow_out, shape.norm && rounds) {
        (true, _) => NARROW_BOUND,
        (false, true) => NORMED_BOUND,
        (false, false) => BOUND,
    };
    let out = match shape.accumulate {
        true => e.in_out_rows(
            "out",
            n,
            Data::floats(&random.floats(rows * n, 1.0)),
            Measure::Relative(bound),
        ),
        false => {
            let dtype = if shape.narrow_out { kept } else { DType::F32 };
            e.output_rows("out", dtype, width, Measure::Relative(bound))
        }
    };
    let gemm = move |p: &crate::check::experiment::Placed, rows: usize| Gemm {
        x: p.view(x_slot),
        norm: norm.map(|(weight, scratch)| InputNorm {
            weight: p.view(weight),
            eps: EPS,
            scratch: p.view(scratch),
            prepared: false,
        }),
        rows,
        w: p.matrix(w),
        bias: p.optional(bias),
        activation: shape.activation,
        scale: p.optional(scale),
        accumulate: shape.accumulate,
        gated: p.optional(gate),
        out: p.view(out),
        next: None,
    };
    let mut e = e.ops(move |p, rows| vec![gemm(p, rows).into()]);
    if let Some((_, scratch)) = norm {
        let bound = match (split, shape.narrow_out) {
            (true, false) => SPLIT_BOUND,
            // And is rounded once more.
            (true, true) => 2.0 * SPLIT_BOUND,
            (false, _) => bound.max(NORMED_BOUND),
        };
        e = e.alternate("norm apart", bound, move |p, rows| {
            let mut product = gemm(p, rows);
            let mut ops: Vec<Op> = Vec::new();
            if let Some(norm) = product.norm.take() {
                ops.push(
                    RmsNorm {
                        x: product.x,
                        rows,
                        width: k,
                        weight: norm.weight,
                        eps: norm.eps,
                        out: norm.scratch,
                    }
                    .into(),
                );
            }
            product.x = p.view(scratch);
            ops.push(product.into());
            ops
        });
    }
    // A gate of its own makes f32.
    if let Some(gate) = gate.filter(|_| !shape.narrow_out) {
        e = e.alternate("gate apart", bound.max(NORMED_BOUND), move |p, rows| {
            let mut product = gemm(p, rows);
            let gate = SiluMul {
                x: p.view(gate),
                rows,
                width,
                out: product.out,
            };
            (product.gated, product.out) = (None, gate.x.clone());
            vec![product.into(), gate.into()]
        });
    }
    if !rounds {
        return e;
    }
    let mut inputs = x;
    if shape.norm {
        for row in inputs.chunks_exact_mut(k) {
            normalise(row, &norm_weight, |x| if split { narrowed(x, kept) } else { x });
        }
    }
    let round = |values: &[f32]| -> Vec<f32> { values.iter().map(|x| narrowed(*x, kept)).collect() };
    if !split {
        inputs = round(&inputs);
    }
    let mut replaced = vec![
        (x_slot, Data::floats(&inputs)),
        (w, Data::floats(&round(&weights))),
    ];
    if shape.narrow_out {
        replaced.push((out, Data::poison(DType::F32, rows * width)));
    }
    e.reference(replaced, move |p, rows| {
        let product = Gemm {
            norm: None,
            ..gemm(p, rows)
        };
        vec![product.into()]
    })
}

/// RMS norm of a row, in f64; `ahead` is done to what is then divided by the root.
fn normalise(row: &mut [f32], weight: &[f32], ahead: impl Fn(f32) -> f32) {
    let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
    let inverse = 1.0 / (squares / row.len() as f64 + f64::from(EPS)).sqrt();
    for (x, w) in row.iter_mut().zip(weight) {
        *x = (f64::from(ahead(*x * w)) * inverse) as f32;
    }
}
