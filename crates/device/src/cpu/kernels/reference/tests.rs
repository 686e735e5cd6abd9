use super::*;
use crate::cpu::kernels::testing::{Packed, Random, bits, error};

struct Case {
    rows_in: usize,
    rows_out: usize,
    c_in: usize,
    c_out: usize,
    taps: usize,
    stride: usize,
    dilation: usize,
    pad_left: usize,
    padding: Padding,
}

const SAME: Case = Case {
    rows_in: 20,
    rows_out: 20,
    c_in: 6,
    c_out: 17,
    taps: 5,
    stride: 1,
    dilation: 2,
    pad_left: 4,
    padding: Padding::Reflect,
};

impl Case {
    fn run(&self, level: Level, x: &[f32], w: &[f32], bias: &[f32]) -> Result<Vec<f32>, String> {
        let packed = Packed::new(w, self.c_out, self.taps * self.c_in, false);
        let mut out = vec![0.5; self.rows_out * self.c_out];
        let op = Conv1d {
            x,
            rows_in: self.rows_in,
            rows_out: self.rows_out,
            w: packed.weights(),
            bias: Some(bias),
            c_in: self.c_in,
            c_out: self.c_out,
            taps: self.taps,
            stride: self.stride,
            dilation: self.dilation,
            pad_left: self.pad_left,
            padding: self.padding,
            input_activation: Activation::Elu,
            activation: Activation::Relu,
            residual: Residual::Output,
            out: &mut out,
        };
        conv1d(level, op, &mut Scratch::default())?;
        Ok(out)
    }

    fn want(&self, x: &[f32], w: &[f32], bias: &[f32]) -> Vec<f64> {
        let last = self.rows_in as isize - 1;
        let mut want = Vec::new();
        for t in 0..self.rows_out {
            for o in 0..self.c_out {
                let mut sum = f64::from(bias[o]);
                for tap in 0..self.taps {
                    let at = (t * self.stride + tap * self.dilation) as isize - self.pad_left as isize;
                    let at = match self.padding {
                        Padding::Zero if at < 0 || at > last => continue,
                        Padding::Zero => at,
                        Padding::Reflect if at < 0 => -at,
                        Padding::Reflect if at > last => last - (at - last),
                        Padding::Reflect => at,
                        Padding::Replicate => at.min(last).max(0),
                    };
                    for c in 0..self.c_in {
                        let x = f64::from(x[at as usize * self.c_in + c]);
                        let x = if x < 0.0 { x.exp() - 1.0 } else { x };
                        sum += x * f64::from(w[(o * self.taps + tap) * self.c_in + c]);
                    }
                }
                want.push(sum.max(0.0) + 0.5);
            }
        }
        want
    }
}

#[test]
fn one_shot_convolutions_match_f64_with_every_padding() {
    let cases = [
        SAME,
        Case {
            padding: Padding::Zero,
            stride: 3,
            rows_out: 7,
            ..SAME
        },
        Case {
            padding: Padding::Replicate,
            stride: 2,
            dilation: 1,
            rows_out: 10,
            pad_left: 2,
            ..SAME
        },
        Case {
            c_in: 1,
            taps: 7,
            dilation: 1,
            pad_left: 6,
            padding: Padding::Zero,
            ..SAME
        },
        Case {
            taps: 1,
            pad_left: 0,
            ..SAME
        },
    ];
    for (i, case) in cases.iter().enumerate() {
        let mut random = Random::new(i as u64 + 1);
        let x = random.vec(case.rows_in * case.c_in);
        let w = random.vec(case.c_out * case.taps * case.c_in);
        let bias = random.vec(case.c_out);
        for level in Level::available() {
            let got = case.run(level, &x, &w, &bias).unwrap();
            let error = error(&got, &case.want(&x, &w, &bias));
            assert!(error < 1e-6, "case {i} {level:?}: {error:e}");
        }
    }
}

#[test]
fn a_clip_too_short_to_mirror_is_an_error() {
    let case = Case {
        rows_in: 3,
        rows_out: 3,
        ..SAME
    };
    let (x, w, bias) = ([0.0; 18], vec![0.0; 17 * 30], [0.0; 17]);
    let error = case.run(Level::best(), &x, &w, &bias).unwrap_err();
    assert!(error.contains("3 rows is too short for Reflect"), "{error}");
}

#[test]
fn statistics_and_softmax_over_time_match_f64() {
    let (rows, channels) = (30, 37);
    let mut random = Random::new(8);
    let x = random.vec(rows * channels);
    let column = |x: &[f32], c: usize| -> Vec<f64> {
        x.iter()
            .skip(c)
            .step_by(channels)
            .map(|x| f64::from(*x))
            .collect()
    };
    for level in Level::available() {
        let mut weights = x.clone();
        level.run(TimeSoftmax {
            x: &mut weights,
            channels,
        });
        let mut want = vec![0.0; rows * channels];
        for c in 0..channels {
            let exps: Vec<f64> = column(&x, c).iter().map(|x| x.exp()).collect();
            let total: f64 = exps.iter().sum();
            for (r, e) in exps.iter().enumerate() {
                want[r * channels + c] = e / total;
            }
        }
        let error_of_softmax = error(&weights, &want);
        assert!(error_of_softmax < 1e-6, "{level:?}: {error_of_softmax:e}");

        for weighted in [None, Some(&weights[..])] {
            let (mut mean, mut std) = (vec![f32::NAN; channels], vec![f32::NAN; channels]);
            level.run(TimeStats {
                x: &x,
                weights: weighted,
                mean: &mut mean,
                std: Some(&mut std),
            });
            let (mut want_mean, mut want_std) = (Vec::new(), Vec::new());
            for c in 0..channels {
                let x = column(&x, c);
                let w = weighted.map_or(vec![1.0 / rows as f64; rows], |w| column(w, c));
                let m: f64 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
                let v: f64 = x.iter().zip(&w).map(|(x, w)| w * (x - m).powi(2)).sum();
                want_mean.push(m);
                want_std.push(v.max(1e-12).sqrt());
            }
            assert!(error(&mean, &want_mean) < 1e-5, "{level:?} mean");
            assert!(error(&std, &want_std) < 1e-6, "{level:?} std");
        }
    }
}

#[test]
fn channel_scale_works_in_place_and_elsewhere() {
    let (x, add, scale) = ([1.0, 2.0, 3.0, 4.0], [0.5; 4], [2.0, 10.0]);
    let run = |x: Input<'_>, add: Residual<'_>, out: &mut [f32]| {
        Level::best().run(ChannelScale {
            x,
            scale: &scale,
            add,
            out,
        });
    };
    let mut out = [0.0; 4];
    run(Input::Other(&x), Residual::Other(&add), &mut out);
    assert_eq!(out, [2.5, 20.5, 6.5, 40.5]);
    let mut out = x;
    run(Input::Output, Residual::None, &mut out);
    assert_eq!(out, [2.0, 20.0, 6.0, 40.0]);
    let mut out = add;
    run(Input::Other(&x), Residual::Output, &mut out);
    assert_eq!(out, [2.5, 20.5, 6.5, 40.5]);
}

#[test]
fn the_nearest_code_is_the_lowest_of_equals_and_is_subtracted() {
    let book = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0];
    for level in Level::available() {
        let mut x = [0.9, 1.2];
        assert_eq!(
            level.run(NearestCode {
                x: &mut x,
                book: &book
            }),
            1
        );
        assert_eq!(bits(&x), bits(&[0.9f32 - 1.0, 1.2f32 - 1.0]));
    }
}
