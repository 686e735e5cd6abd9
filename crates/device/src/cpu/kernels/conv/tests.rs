use super::*;
use crate::cpu::kernels::testing::{Packed, Random, bits, error};

struct Case {
    c_in: usize,
    c_out: usize,
    taps: usize,
    dilation: usize,
    snake: bool,
    clamp: bool,
}

struct Operands {
    w: Vec<f32>,
    bias: Vec<f32>,
    alpha: Vec<f32>,
    inv_beta: Vec<f32>,
    x: Vec<f32>,
    residual: Vec<f32>,
}

const TIME: usize = 50;
/// A slot's state does not start at the pool's beginning.
const OFFSET: usize = 3;

impl Case {
    fn past(&self) -> usize {
        (self.taps - 1) * self.dilation * self.c_in
    }

    fn operands(&self, random: &mut Random) -> Operands {
        let scaled = |x: Vec<f32>, by: f32| x.into_iter().map(|x| x * by).collect();
        Operands {
            w: scaled(random.vec(self.c_out * self.taps * self.c_in), 0.2),
            bias: random.vec(self.c_out),
            alpha: scaled(random.vec(self.c_in), 4.0),
            inv_beta: random.vec(self.c_in),
            x: scaled(random.vec(TIME * self.c_in), 3.0),
            residual: random.vec(TIME * self.c_out),
        }
    }

    /// The clip in steps of `chunk` rows, or of the widths in `chunk` in turn.
    fn run(&self, level: Level, op: &Operands, widths: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let packed = Packed::new(&op.w, self.c_out, self.taps * self.c_in, false);
        let mut state = vec![0.0; OFFSET + self.past()];
        let mut out = vec![f32::NAN; TIME * self.c_out];
        let mut scratch = Scratch::default();
        let mut first = 0;
        for width in widths.iter().cycle() {
            let rows = (*width).min(TIME - first);
            if rows == 0 {
                break;
            }
            scratch.windows = vec![Window {
                first,
                rows,
                state: OFFSET,
            }];
            self.step(level, op, &packed, &mut state, &mut out, &mut scratch);
            first += rows;
        }
        (out, state)
    }

    fn step(
        &self,
        level: Level,
        op: &Operands,
        packed: &Packed,
        state: &mut [f32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let conv_op = Conv {
            x: &op.x,
            w: packed.weights(),
            bias: Some(&op.bias),
            c_in: self.c_in,
            c_out: self.c_out,
            taps: self.taps,
            dilation: self.dilation,
            snake: self.snake.then_some(Snake {
                alpha: &op.alpha,
                inv_beta: &op.inv_beta,
            }),
            state,
            residual: Residual::Other(&op.residual),
            clamp: self.clamp,
            out,
        };
        conv(level, conv_op, scratch);
    }

    fn want(&self, op: &Operands) -> Vec<f64> {
        let activated = |t: isize, c: usize| {
            if t < 0 {
                return 0.0;
            }
            let x = f64::from(op.x[t as usize * self.c_in + c]);
            if !self.snake {
                return x;
            }
            x + (x * f64::from(op.alpha[c])).sin().powi(2) * f64::from(op.inv_beta[c])
        };
        let mut want = Vec::new();
        for t in 0..TIME {
            for o in 0..self.c_out {
                let mut sum = f64::from(op.bias[o]);
                for tap in 0..self.taps {
                    let at = t as isize - ((self.taps - 1 - tap) * self.dilation) as isize;
                    for c in 0..self.c_in {
                        let w = op.w[o * self.taps * self.c_in + tap * self.c_in + c];
                        sum += activated(at, c) * f64::from(w);
                    }
                }
                sum += f64::from(op.residual[t * self.c_out + o]);
                want.push(if self.clamp { sum.clamp(-1.0, 1.0) } else { sum });
            }
        }
        want
    }
}

const CASES: [Case; 5] = [
    Case {
        c_in: 16,
        c_out: 16,
        taps: 7,
        dilation: 1,
        snake: true,
        clamp: false,
    },
    Case {
        c_in: 16,
        c_out: 16,
        taps: 7,
        dilation: 9,
        snake: true,
        clamp: false,
    },
    Case {
        c_in: 5,
        c_out: 70,
        taps: 3,
        dilation: 3,
        snake: false,
        clamp: false,
    },
    Case {
        c_in: 24,
        c_out: 1,
        taps: 7,
        dilation: 1,
        snake: true,
        clamp: true,
    },
    Case {
        c_in: 40,
        c_out: 33,
        taps: 1,
        dilation: 1,
        snake: true,
        clamp: false,
    },
];

#[test]
fn matches_f64_and_any_chunking_is_bit_identical_with_its_state() {
    for (i, case) in CASES.iter().enumerate() {
        let op = case.operands(&mut Random::new(i as u64 + 1));
        for level in Level::available() {
            let (whole, state) = case.run(level, &op, &[TIME]);
            let error = error(&whole, &case.want(&op));
            assert!(error < 3e-6, "case {i} {level:?}: {error:e}");
            for widths in [&[1][..], &[2], &[3], &[5], &[25], &[1, 2, 3, 5, 25]] {
                let (out, after) = case.run(level, &op, widths);
                assert_eq!(
                    bits(&out),
                    bits(&whole),
                    "case {i} {level:?} in steps of {widths:?}"
                );
                assert_eq!(
                    bits(&after),
                    bits(&state),
                    "case {i} {level:?} state after {widths:?}"
                );
            }
        }
    }
}

#[test]
fn windows_of_one_step_do_not_see_each_other() {
    for (i, case) in CASES.iter().enumerate() {
        let op = case.operands(&mut Random::new(i as u64 + 20));
        let packed = Packed::new(&op.w, case.c_out, case.taps * case.c_in, false);
        let level = Level::best();
        // Rows 10..17 belong to no window.
        let windows = [(30, 20), (0, 10), (17, 13)];
        let slot = OFFSET + case.past();
        let mut scratch = Scratch::default();
        let windows: Vec<Window> = windows
            .iter()
            .enumerate()
            .map(|(w, &(first, rows))| Window {
                first,
                rows,
                state: w * slot + OFFSET,
            })
            .collect();
        let before = Random::new(99).vec(3 * slot);

        let mut together = (before.clone(), vec![7.0; TIME * case.c_out]);
        scratch.windows = windows.clone();
        case.step(
            level,
            &op,
            &packed,
            &mut together.0,
            &mut together.1,
            &mut scratch,
        );

        let mut alone = (before, vec![7.0; TIME * case.c_out]);
        for window in windows {
            scratch.windows = vec![window];
            case.step(level, &op, &packed, &mut alone.0, &mut alone.1, &mut scratch);
        }
        assert_eq!(bits(&together.1), bits(&alone.1), "case {i}");
        assert_eq!(bits(&together.0), bits(&alone.0), "case {i} state");
        assert_eq!(
            together.1[12 * case.c_out],
            7.0,
            "a row outside all windows is left alone"
        );
    }
}

#[test]
fn depthwise_matches_f64_and_any_chunking_is_bit_identical() {
    let (channels, taps) = (37, 7);
    let mut random = Random::new(5);
    let (w, bias) = (random.vec(taps * channels), random.vec(channels));
    let x = random.vec(TIME * channels);
    let mut want = Vec::new();
    for t in 0..TIME {
        for c in 0..channels {
            let taps = (0..taps).filter(|tap| t + tap + 1 >= taps);
            let sum: f64 = taps
                .map(|tap| f64::from(x[(t + tap + 1 - 7) * channels + c]) * f64::from(w[tap * channels + c]))
                .sum();
            want.push(sum + f64::from(bias[c]));
        }
    }
    for level in Level::available() {
        let run = |chunk: usize| {
            let mut state = vec![0.0; OFFSET + (taps - 1) * channels];
            let mut out = vec![f32::NAN; TIME * channels];
            let mut scratch = Scratch::default();
            for first in (0..TIME).step_by(chunk) {
                let rows = chunk.min(TIME - first);
                scratch.windows = vec![Window {
                    first,
                    rows,
                    state: OFFSET,
                }];
                let op = DepthwiseConv {
                    x: &x,
                    w: &w,
                    bias: &bias,
                    channels,
                    taps,
                    state: &mut state,
                    out: &mut out,
                };
                depthwise_conv(level, op, &mut scratch);
            }
            (out, state)
        };
        let (whole, state) = run(TIME);
        let error = error(&whole, &want);
        assert!(error < 1e-6, "{level:?}: {error:e}");
        for chunk in [1, 2, 3, 5, 25] {
            let (out, after) = run(chunk);
            assert_eq!(bits(&out), bits(&whole), "{level:?} in steps of {chunk}");
            assert_eq!(
                bits(&after),
                bits(&state),
                "{level:?} state after steps of {chunk}"
            );
        }
    }
}
