//! One-shot operations of the reference encoders.

use laneway_device::DType;
use laneway_device::op::{Activation, ChannelScale, Conv1d, NearestCode, Padding, TimeSoftmax, TimeStats};

use super::{Case, PARTS, Work, small};
use crate::check::Context;
use crate::check::data::{Data, Measure, narrowed};
use crate::check::experiment::{Experiment, Placed};
use crate::check::random::Random;

const BOUND: f64 = 3e-5;
const ACTIVATED_BOUND: f64 = 1e-4;

#[derive(Debug, Clone, Copy)]
struct Shape {
    c_in: usize,
    c_out: usize,
    taps: usize,
    stride: usize,
    dilation: usize,
    pad_left: usize,
    padding: Padding,
    input: Activation,
    activation: Activation,
    residual: bool,
    rows_in: usize,
    weights: DType,
}

const BASE: Shape = Shape {
    c_in: 0,
    c_out: 0,
    taps: 1,
    stride: 1,
    dilation: 1,
    pad_left: 0,
    padding: Padding::Reflect,
    input: Activation::None,
    activation: Activation::Relu,
    residual: false,
    rows_in: 50,
    weights: DType::F32,
};

/// As many rows out as in.
const fn same(c_in: usize, c_out: usize, taps: usize, dilation: usize) -> Shape {
    Shape {
        c_in,
        c_out,
        taps,
        dilation,
        pad_left: (taps - 1) * dilation / 2,
        ..BASE
    }
}

const fn causal(c_in: usize, c_out: usize, taps: usize, stride: usize) -> Shape {
    Shape {
        c_in,
        c_out,
        taps,
        stride,
        pad_left: taps - stride,
        padding: Padding::Zero,
        input: Activation::Elu,
        activation: Activation::None,
        ..BASE
    }
}

const SMALL: &[Shape] = &[
    same(3, 5, 3, 2),
    same(16, 16, 5, 1),
    causal(8, 12, 4, 2),
    causal(6, 3, 7, 1),
    Shape {
        residual: true,
        ..causal(8, 8, 1, 1)
    },
    Shape {
        padding: Padding::Replicate,
        input: Activation::None,
        ..causal(9, 9, 4, 2)
    },
];

const RELEASED: &[Shape] = &[
    same(128, 512, 5, 1),
    same(64, 64, 3, 4),
    same(1536, 1536, 1, 1),
    Shape {
        activation: Activation::ReluTanh,
        ..same(4608, 128, 1, 1)
    },
    Shape {
        rows_in: 1,
        activation: Activation::Sigmoid,
        ..same(128, 512, 1, 1)
    },
    Shape {
        rows_in: 9600,
        input: Activation::None,
        ..causal(1, 64, 7, 1)
    },
    Shape {
        rows_in: 3000,
        ..causal(64, 32, 3, 1)
    },
    Shape {
        rows_in: 3000,
        residual: true,
        ..causal(32, 64, 1, 1)
    },
    Shape {
        rows_in: 3000,
        ..causal(64, 128, 8, 4)
    },
    Shape {
        rows_in: 801,
        ..causal(256, 512, 12, 6)
    },
    Shape {
        rows_in: 160,
        ..causal(512, 1024, 16, 8)
    },
    causal(1024, 512, 3, 1),
    Shape {
        rows_in: 51,
        padding: Padding::Replicate,
        input: Activation::None,
        ..causal(512, 512, 4, 2)
    },
];

pub(super) fn cases(context: &Context, out: &mut Vec<Case>) {
    let mut shapes: Vec<Shape> = Vec::new();
    for weights in [DType::F32, DType::Bf16] {
        shapes.extend(SMALL.iter().map(|shape| Shape { weights, ..*shape }));
    }
    for &weights in if small(context) { &[] } else { context.given() } {
        shapes.extend(RELEASED.iter().map(|shape| Shape { weights, ..*shape }));
    }
    for shape in shapes {
        let name = format!(
            "{}>{} t{} s{} d{} n{}{}",
            shape.c_in,
            shape.c_out,
            shape.taps,
            shape.stride,
            shape.dilation,
            shape.rows_in,
            if shape.residual { " res" } else { "" }
        );
        let kept = context.narrow(shape.weights);
        let dtype = if shape.weights == DType::Bf16 {
            "bf16"
        } else {
            "f32"
        };
        out.push(Case::new("Conv1d", name, dtype, move |random| {
            Work::Whole(conv1d(shape, kept, random))
        }));
    }
    let sizes: &[(usize, usize)] = match small(context) {
        true => &[(1, 3), (7, 20)],
        false => &[(1, 3), (7, 20), (50, 512), (250, 1536), (1200, 1536)],
    };
    for &(rows, channels) in sizes {
        for (weights, std) in [(false, false), (false, true), (true, true)] {
            let name = format!(
                "{rows}x{channels}{}{}",
                if weights { " weights" } else { "" },
                if std { " std" } else { "" }
            );
            out.push(Case::new("TimeStats", name, "f32", move |random| {
                Work::Whole(time_stats(rows, channels, weights, std, random))
            }));
        }
        out.push(Case::new(
            "TimeSoftmax",
            format!("{rows}x{channels}"),
            "f32",
            move |random| Work::Whole(time_softmax(rows, channels, random)),
        ));
    }
    for (channels, add) in [(3, false), (20, true), (512, true), (512, false)] {
        let name = format!("{channels}ch r70{}", if add { " add" } else { "" });
        out.push(Case::new("ChannelScale", name, "f32", move |random| {
            Work::Rows(channel_scale(channels, add, random), PARTS.to_vec())
        }));
    }
    for (width, entries) in [(3, 5), (8, 100), (256, 2048)] {
        out.push(Case::new(
            "NearestCode",
            format!("{entries}x{width} r70"),
            "f32",
            move |random| Work::Rows(nearest_code(width, entries, random), PARTS.to_vec()),
        ));
    }
}

/// `kept`: what the subject makes of weights and inputs.
fn conv1d(shape: Shape, kept: DType, random: &mut Random) -> Experiment {
    let rounds = kept != DType::F32;
    let k = shape.taps * shape.c_in;
    let rows_in = shape.rows_in;
    let rows_out = rows_in.div_ceil(shape.stride);
    let mut e = Experiment::new(rows_out);
    let inputs = random.floats(rows_in * shape.c_in, 1.5);
    let x = e.input("x", Data::floats(&inputs));
    let weights = random.floats(shape.c_out * k, 1.7 / (k as f32).sqrt());
    let w = e.weights(shape.c_out, k, Data::real(&weights, shape.weights));
    let bias = e.shared("bias", Data::floats(&random.floats(shape.c_out, 0.5)));
    let activated = rounds && shape.input != Activation::None;
    let measure = Measure::Relative(if activated { ACTIVATED_BOUND } else { BOUND });
    let len = rows_out * shape.c_out;
    let out = match shape.residual {
        true => e.in_out("out", Data::floats(&random.floats(len, 1.0)), measure),
        false => e.output("out", DType::F32, len, measure),
    };
    let conv = move |p: &Placed| Conv1d {
        x: p.view(x),
        rows_in,
        rows_out,
        w: p.matrix(w),
        bias: Some(p.view(bias)),
        c_in: shape.c_in,
        taps: shape.taps,
        stride: shape.stride,
        dilation: shape.dilation,
        pad_left: shape.pad_left,
        padding: shape.padding,
        input_activation: shape.input,
        activation: shape.activation,
        residual: shape.residual.then(|| p.view(out)),
        out: p.view(out),
    };
    let e = e.ops(move |p, _| vec![conv(p).into()]);
    if !rounds {
        return e;
    }
    let elu = |x: &f32| match shape.input {
        Activation::Elu if *x < 0.0 => f64::from(*x).exp_m1() as f32,
        _ => *x,
    };
    let inputs: Vec<f32> = inputs.iter().map(|x| narrowed(elu(x), kept)).collect();
    let weights: Vec<f32> = weights.iter().map(|w| narrowed(*w, kept)).collect();
    let replaced = vec![(x, Data::floats(&inputs)), (w, Data::floats(&weights))];
    e.reference(replaced, move |p, _| {
        let conv = Conv1d {
            input_activation: Activation::None,
            ..conv(p)
        };
        vec![conv.into()]
    })
}

fn time_stats(rows: usize, channels: usize, weights: bool, std: bool, random: &mut Random) -> Experiment {
    let mut e = Experiment::new(rows);
    let x: Vec<f32> = random
        .floats(rows * channels, 1.0)
        .iter()
        .map(|x| x + 0.2)
        .collect();
    let x = e.input("x", Data::floats(&x));
    let weights = weights.then(|| {
        let mut w: Vec<f32> = random
            .floats(rows * channels, 1.0)
            .iter()
            .map(|x| x.abs() + 0.01)
            .collect();
        for c in 0..channels {
            let sum: f32 = (0..rows).map(|r| w[r * channels + c]).sum();
            (0..rows).for_each(|r| w[r * channels + c] /= sum);
        }
        e.input("weights", Data::floats(&w))
    });
    let mean = e.output("mean", DType::F32, channels, Measure::Relative(1e-5));
    // A row alone deviates by nothing but its rounding.
    let bound = if rows == 1 { 1.0 } else { 2e-5 };
    let std = std.then(|| e.output("std", DType::F32, channels, Measure::Relative(bound)));
    e.ops(move |p, rows| {
        vec![
            TimeStats {
                x: p.view(x),
                rows,
                channels,
                weights: p.optional(weights),
                mean: p.view(mean),
                std: p.optional(std),
            }
            .into(),
        ]
    })
}

fn time_softmax(rows: usize, channels: usize, random: &mut Random) -> Experiment {
    let mut e = Experiment::new(rows);
    let x = Data::floats(&random.floats(rows * channels, 5.0));
    let x = e.in_out("x", x, Measure::Relative(1e-5));
    e.ops(move |p, rows| {
        vec![
            TimeSoftmax {
                x: p.view(x),
                rows,
                channels,
            }
            .into(),
        ]
    })
}

fn channel_scale(channels: usize, add: bool, random: &mut Random) -> Experiment {
    let rows = 70;
    let mut e = Experiment::new(rows);
    let x = e.input_rows("x", channels, Data::floats(&random.floats(rows * channels, 1.0)));
    let scale = e.shared("scale", Data::floats(&random.floats(channels, 1.0)));
    let addend = Data::floats(&random.floats(rows * channels, 1.0));
    let add = add.then(|| e.input_rows("add", channels, addend));
    let out = e.output_rows("out", DType::F32, channels, Measure::Relative(1e-6));
    e.ops(move |p, rows| {
        vec![
            ChannelScale {
                x: p.view(x),
                scale: p.view(scale),
                add: p.optional(add),
                rows,
                channels,
                out: p.view(out),
            }
            .into(),
        ]
    })
}

fn nearest_code(width: usize, entries: usize, random: &mut Random) -> Experiment {
    let rows = 70;
    let mut e = Experiment::new(rows);
    let mut book = random.floats(entries * width, 1.0);
    // The first entry once more at the end: the lower id wins.
    let (first, last) = book.split_at_mut((entries - 1) * width);
    last.copy_from_slice(&first[..width]);
    let mut x = Vec::new();
    for r in 0..rows {
        let near = if r % 5 == 0 { 0 } else { random.below(entries) };
        let entry = &book[near * width..][..width];
        x.extend(entry.iter().map(|v| v + 0.05 * random.float()));
    }
    let x = e.in_out_rows("x", width, Data::floats(&x), Measure::Relative(1e-6));
    let book = e.shared("book", Data::floats(&book));
    let codes = e.output_rows("codes", DType::I32, 3, Measure::Exact);
    e.ops(move |p, rows| {
        vec![
            NearestCode {
                x: p.view(x),
                rows,
                width,
                book: p.view(book),
                entries,
                codes: p.view(codes),
                code_stride: 3,
                code_offset: 2,
            }
            .into(),
        ]
    })
}
