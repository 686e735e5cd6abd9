//! Causal convolutions with carried state.

use std::sync::Arc;

use laneway_device::DType;
use laneway_device::op::{Conv, DepthwiseConv, Pointwise, Snake, StateSlice, Windows};

mod shapes;

use super::{Case, Work, small};
use crate::check::Context;
use crate::check::data::{Data, Measure, narrowed};
use crate::check::experiment::Experiment;
use crate::check::random::Random;
use crate::check::streams::{Cut, Launch, StreamCase, StreamSlots};
use shapes::{RELEASED, SMALL, Shape};

const BOUND: f64 = 3e-5;
/// Snake's last bit decides how some inputs round.
const SNAKE_BOUND: f64 = 1e-4;
/// State that was rounded to 16 bits, or not, beside the other.
const STATE_BOUND: f64 = 4e-3;
/// As `STATE_BOUND`, of what a unit's second convolution takes.
const UNIT_BOUND_BF16: f64 = 4e-3;
const UNIT_BOUND_F16: f64 = 5e-4;
/// What rows of padding hold.
const STALE: f32 = 1e4;
/// Elements of a slot ahead of the case's state.
const OFFSET: usize = 16;

pub(super) fn cases(context: &Context, out: &mut Vec<Case>) {
    let mut shapes: Vec<Shape> = Vec::new();
    for weights in [DType::F32, DType::Bf16] {
        shapes.extend(SMALL.iter().map(|shape| Shape { weights, ..*shape }));
    }
    for &weights in if small(context) { &[] } else { context.given() } {
        shapes.extend(RELEASED.iter().map(|shape| Shape { weights, ..*shape }));
    }
    for &pool in &context.states {
        for shape in &shapes {
            push(context, Shape { pool, ..*shape }, out);
        }
    }
    let widths: &[usize] = if small(context) { &[3, 24] } else { &[3, 24, 1024] };
    for &channels in widths {
        for rate in [1, 2, 4] {
            for &pool in &context.states {
                let dtype = if pool == DType::Bf16 { "bf16" } else { "f32" };
                let name = format!("{channels}ch t7 x{rate}");
                out.push(Case::new("DepthwiseConv", name, dtype, move |random| {
                    Work::streams(depthwise(channels, rate, pool, random))
                }));
            }
        }
    }
}

fn push(context: &Context, shape: Shape, out: &mut Vec<Case>) {
    let mut name = format!(
        "{}>{} t{} d{} x{}",
        shape.c_in, shape.c_out, shape.taps, shape.dilation, shape.rate
    );
    for (with, what) in [
        (shape.snake, " snake"),
        (shape.residual, " res"),
        (shape.unit, " unit"),
        (shape.clamp, " clamp"),
        (shape.padding > 0, " pad"),
    ] {
        if with {
            name += what;
        }
    }
    if shape.pool == DType::Bf16 {
        name += " bf16 state";
    }
    let frames: usize = shape.frames.iter().sum();
    if shape.rate >= 32 && frames > 8 {
        name += &format!(" {frames} frames");
    }
    let dtype = if shape.weights == DType::Bf16 {
        "bf16"
    } else {
        "f32"
    };
    let kept = context.narrow(shape.weights);
    out.push(Case::new("Conv", name, dtype, move |random| {
        Work::streams(conv(shape, kept, random))
    }));
}

/// Everything of a case that its launches share.
struct Operands {
    shape: Shape,
    /// What the subject makes of weights and the inputs of products.
    kept: DType,
    w: Data,
    narrow_w: Data,
    bias: Data,
    alpha: Vec<f32>,
    inv_beta: Vec<f32>,
    second: Option<Second>,
    /// Per stream.
    x: Vec<Vec<f32>>,
    residual: Vec<Vec<f32>>,
    state: Vec<f32>,
    slots: Vec<i32>,
}

/// Operands of a unit's second convolution.
struct Second {
    w: Data,
    narrow_w: Data,
    bias: Data,
    alpha: Data,
    inv_beta: Data,
}

impl Shape {
    fn past(&self) -> usize {
        (self.taps - 1) * self.dilation * self.c_in
    }

    fn slot_stride(&self) -> usize {
        (OFFSET + self.past() + 8).next_multiple_of(8)
    }
}

fn conv(shape: Shape, kept: DType, random: &mut Random) -> StreamCase {
    let k = shape.taps * shape.c_in;
    let streams = shape.frames.len();
    let wave = |random: &mut Random, len: usize| -> Vec<f32> {
        random.floats(len, 0.6).iter().map(|x| 1.0 + x).collect()
    };
    let per_stream = |random: &mut Random, width: usize| -> Vec<Vec<f32>> {
        let rows = shape.frames.iter().map(|frames| frames * shape.rate);
        rows.map(|rows| random.floats(rows * width, 1.0)).collect()
    };
    let mut state = random.floats((streams + 2) * shape.slot_stride(), 1.0);
    if shape.pool == DType::Bf16 {
        state.iter_mut().for_each(|x| *x = narrowed(*x, DType::Bf16));
    }
    let matrix = |random: &mut Random, k: usize| {
        let weights = random.floats(shape.c_out * k, 1.7 / (k as f32).sqrt());
        let narrow: Vec<f32> = weights.iter().map(|w| narrowed(*w, kept)).collect();
        (Data::real(&weights, shape.weights), Data::floats(&narrow))
    };
    let (w, narrow_w) = matrix(random, k);
    let second = shape.unit.then(|| {
        let (w, narrow_w) = matrix(random, shape.c_out);
        Second {
            w,
            narrow_w,
            bias: Data::floats(&random.floats(shape.c_out, 0.5)),
            alpha: Data::floats(&wave(random, shape.c_out)),
            inv_beta: Data::floats(&wave(random, shape.c_out)),
        }
    });
    let operands = Operands {
        shape,
        kept,
        w,
        narrow_w,
        second,
        bias: Data::floats(&random.floats(shape.c_out, 0.5)),
        alpha: wave(random, shape.c_in),
        inv_beta: wave(random, shape.c_in),
        x: per_stream(random, shape.c_in),
        residual: per_stream(random, shape.c_out),
        state,
        slots: random
            .choose(streams, streams + 2)
            .iter()
            .map(|slot| *slot as i32)
            .collect(),
    };
    let launch: Launch = Arc::new(move |cuts, pool| operands.launch(cuts, pool));
    StreamCase {
        frames: shape.frames.to_vec(),
        frame_bytes: shape.rate * shape.c_out * 4,
        interleaves: false,
        launch,
    }
}

/// Rows of the cuts, one behind the other.
fn packed(streams: &[Vec<f32>], cuts: &[Cut], frame: usize) -> Vec<f32> {
    let rows = cuts
        .iter()
        .map(|cut| &streams[cut.stream][cut.first * frame..][..cut.frames * frame]);
    rows.collect::<Vec<_>>().concat()
}

/// First frame, frames and slot of each cut. What a window of no frames names is nobody's business.
fn windows(cuts: &[Cut], slots: &[i32]) -> Data {
    let (mut first, mut all) = (0, Vec::new());
    for cut in cuts {
        match cut.frames {
            0 => all.extend([-5, 0, -1]),
            frames => all.extend([first, frames as i32, slots[cut.stream]]),
        }
        first += cut.frames as i32;
    }
    Data::ints(&all)
}

impl Operands {
    fn launch(&self, cuts: &[Cut], pool: Option<&Data>) -> (Experiment, StreamSlots) {
        let shape = self.shape;
        let rate = shape.rate;
        let covered = cuts.iter().map(|cut| cut.frames).sum::<usize>() * rate;
        let rows = covered + shape.padding * rate;
        let mut e = Experiment::new(rows);
        let mut inputs = packed(&self.x, cuts, rate * shape.c_in);
        inputs.resize(rows * shape.c_in, STALE);
        let x = e.input("x", Data::floats(&inputs));
        let w = e.weights(shape.c_out, shape.taps * shape.c_in, self.w.clone());
        let bias = shape.bias.then(|| e.shared("bias", self.bias.clone()));
        let snake = shape.snake.then(|| {
            let alpha = e.shared("alpha", Data::floats(&self.alpha));
            (alpha, e.shared("inv_beta", Data::floats(&self.inv_beta)))
        });
        let second = self.second.as_ref().map(|second| {
            let w = e.weights(shape.c_out, shape.c_out, second.w.clone());
            let bias = e.shared("bias2", second.bias.clone());
            let alpha = e.shared("alpha2", second.alpha.clone());
            let inv_beta = e.shared("inv_beta2", second.inv_beta.clone());
            // The reference's `x` is activated already.
            let plain = e.input("plain", Data::floats(&inputs));
            (w, bias, alpha, inv_beta, plain)
        });
        let between = if shape.unit { shape.c_out } else { 0 };
        let staged = (rows + cuts.len() * (shape.taps - 1) * shape.dilation) * (shape.c_in + between);
        let scratch = e.scratch("scratch", DType::F32, staged.div_ceil(2).max(rows * between));
        let windows = e.input("windows", windows(cuts, &self.slots));
        let contents = pool
            .cloned()
            .unwrap_or_else(|| Data::real(&self.state, shape.pool));
        let rounds = self.kept != DType::F32;
        let rounded_state = rounds || shape.pool == DType::Bf16;
        let state = (shape.taps > 1).then(|| {
            let bound = if rounded_state { STATE_BOUND } else { 2e-6 };
            e.pool("state", contents, Measure::Relative(bound))
        });
        let bound = match (shape.snake && rounds, shape.pool, rounds) {
            // What lies between the two was rounded that the reference has not.
            _ if shape.unit && self.kept == DType::Bf16 => UNIT_BOUND_BF16,
            _ if shape.unit && self.kept == DType::F16 => UNIT_BOUND_F16,
            // Carried inputs were rounded that the reference has not.
            (_, DType::Bf16, false) => STATE_BOUND,
            (true, ..) => SNAKE_BOUND,
            _ => BOUND,
        };
        let measure = match shape.padding {
            0 => Measure::Relative(bound),
            _ => Measure::Prefix {
                bound,
                len: covered * shape.c_out,
            },
        };
        let out = match shape.residual {
            true => {
                let mut residual = packed(&self.residual, cuts, rate * shape.c_out);
                residual.resize(rows * shape.c_out, STALE);
                e.in_out("out", Data::floats(&residual), measure)
            }
            false => e.output("out", DType::F32, rows * shape.c_out, measure),
        };
        let count = cuts.len();
        let conv = move |p: &crate::check::experiment::Placed, rows: usize| Conv {
            x: p.view(x),
            rows,
            w: p.matrix(w),
            bias: p.optional(bias),
            c_in: shape.c_in,
            taps: shape.taps,
            dilation: shape.dilation,
            snake: snake.map(|(alpha, inv_beta)| Snake {
                alpha: p.view(alpha),
                inv_beta: p.view(inv_beta),
            }),
            state: state.map(|state| StateSlice {
                pool: p.view(state),
                slot_stride: shape.slot_stride(),
                offset: OFFSET,
            }),
            windows: Windows {
                windows: p.view(windows),
                count,
                rate,
            },
            pointwise: second.map(|(w, bias, alpha, inv_beta, _)| Pointwise {
                snake: Snake {
                    alpha: p.view(alpha),
                    inv_beta: p.view(inv_beta),
                },
                w: p.matrix(w),
                bias: Some(p.view(bias)),
            }),
            scratch: Some(p.view(scratch)),
            residual: match shape.unit {
                true => Some(p.view(x)),
                false => shape.residual.then(|| p.view(out)),
            },
            clamp: shape.clamp,
            out: p.view(out),
        };
        let e = e.ops(move |p, rows| vec![conv(p, rows).into()]);
        let slots = StreamSlots { pool: state, out };
        let mut replaced = Vec::new();
        if let Some(state) = state {
            // Carried inputs are rounded when they are used.
            let carried: Vec<f32> = self.state.iter().map(|x| narrowed(*x, self.kept)).collect();
            replaced.push((state, Data::floats(&carried)));
        }
        if !rounds {
            return (e.reference_data(replaced), slots);
        }
        replaced.push((w, self.narrow_w.clone()));
        if let (Some(data), Some((w, ..))) = (&self.second, second) {
            replaced.push((w, data.narrow_w.clone()));
        }
        let activated = inputs
            .iter()
            .enumerate()
            .map(|(i, x)| narrowed(self.snake(*x, i % shape.c_in), self.kept));
        replaced.push((x, Data::floats(&activated.collect::<Vec<_>>())));
        let e = e.reference(replaced, move |p, rows| {
            let conv = conv(p, rows);
            let conv = Conv {
                snake: None,
                residual: match second {
                    Some((.., plain)) => Some(p.view(plain)),
                    None => conv.residual.clone(),
                },
                ..conv
            };
            vec![conv.into()]
        });
        (e, slots)
    }

    /// Snake, where there is one, in f64.
    fn snake(&self, x: f32, channel: usize) -> f32 {
        if !self.shape.snake {
            return x;
        }
        let sine = f64::from(x * self.alpha[channel]).sin();
        (f64::from(x) + sine * sine * f64::from(self.inv_beta[channel])) as f32
    }
}

fn depthwise(channels: usize, rate: usize, pool_dtype: DType, random: &mut Random) -> StreamCase {
    let frames: &[usize] = &[9, 1, 4, 2];
    let taps = 7;
    let w = Data::floats(&random.floats(taps * channels, 0.6));
    let bias = Data::floats(&random.floats(channels, 0.5));
    let x: Vec<Vec<f32>> = frames
        .iter()
        .map(|frames| random.floats(frames * rate * channels, 1.0))
        .collect();
    let slot_stride = ((taps - 1) * channels + OFFSET).next_multiple_of(8);
    let mut state = random.floats(6 * slot_stride, 1.0);
    if pool_dtype == DType::Bf16 {
        state.iter_mut().for_each(|x| *x = narrowed(*x, DType::Bf16));
    }
    let slots: Vec<i32> = random
        .choose(frames.len(), 6)
        .iter()
        .map(|slot| *slot as i32)
        .collect();
    let bound = if pool_dtype == DType::Bf16 {
        STATE_BOUND
    } else {
        BOUND
    };
    let launch: Launch = Arc::new(move |cuts, pool| {
        let rows = cuts.iter().map(|cut| cut.frames).sum::<usize>() * rate;
        let mut e = Experiment::new(rows);
        let x = e.input("x", Data::floats(&packed(&x, cuts, rate * channels)));
        let w = e.shared("w", w.clone());
        let bias = e.shared("bias", bias.clone());
        let windows = e.input("windows", windows(cuts, &slots));
        let contents = pool.cloned().unwrap_or_else(|| Data::real(&state, pool_dtype));
        let pool = e.pool("state", contents, Measure::Relative(bound));
        let out = e.output("out", DType::F32, rows * channels, Measure::Relative(bound));
        let count = cuts.len();
        let e = e.ops(move |p, rows| {
            vec![
                DepthwiseConv {
                    x: p.view(x),
                    rows,
                    w: p.view(w),
                    bias: p.view(bias),
                    channels,
                    taps,
                    state: StateSlice {
                        pool: p.view(pool),
                        slot_stride,
                        offset: 8,
                    },
                    windows: Windows {
                        windows: p.view(windows),
                        count,
                        rate,
                    },
                    out: p.view(out),
                }
                .into(),
            ]
        });
        let slots = StreamSlots {
            pool: Some(pool),
            out,
        };
        (e.reference_data(vec![(pool, Data::floats(&state))]), slots)
    });
    StreamCase {
        frames: frames.to_vec(),
        frame_bytes: rate * channels * 4,
        interleaves: false,
        launch,
    }
}
