//! Row norms and the gated activation. Sums over a row use the lane pattern of [`super::math::dot`].

use super::math::{chunks, dot, silu, sum};
use super::simd::{Kernel, Simd};

/// Where a kernel that may work in place reads.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// What the output holds.
    Output,
    /// Another operand.
    Other(&'a [f32]),
}

impl Input<'_> {
    /// Bring row `row` into `out`, its place in the output.
    #[inline(always)]
    pub(crate) fn fetch(self, row: usize, out: &mut [f32]) {
        if let Input::Other(x) = self {
            out.copy_from_slice(&x[row * out.len()..][..out.len()]);
        }
    }
}

/// See [`crate::op::RmsNorm`]; the width is the weight's.
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: Input<'a>,
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (r, out) in self.out.chunks_exact_mut(self.weight.len()).enumerate() {
            self.x.fetch(r, out);
            rms_norm(s, out, self.weight, self.eps);
        }
    }
}

/// Norm one row in place.
#[inline(always)]
pub(crate) fn rms_norm<S: Simd>(s: S, row: &mut [f32], weight: &[f32], eps: f32) {
    let inverse = s.splat(1.0 / (dot(s, row, row) / row.len() as f32 + eps).sqrt());
    for (c, n) in chunks(row.len()) {
        let x = s.mul(s.load_part(&row[c..], n, 0.0), inverse);
        s.store_part(s.mul(x, s.load_part(&weight[c..], n, 0.0)), &mut row[c..], n);
    }
}

/// See [`crate::op::LayerNorm`]; the width is the weight's.
pub(crate) struct LayerNorm<'a> {
    pub(crate) x: Input<'a>,
    pub(crate) weight: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for (r, out) in self.out.chunks_exact_mut(width).enumerate() {
            self.x.fetch(r, out);
            // Two passes: the variance of the centred row does not cancel.
            let mean = s.splat(sum(s, out) / width as f32);
            for (c, n) in chunks(width) {
                let centred = s.sub(s.load_part(&out[c..], n, 0.0), mean);
                s.store_part(centred, &mut out[c..], n);
            }
            let inverse = s.splat(1.0 / (dot(s, out, out) / width as f32 + self.eps).sqrt());
            for (c, n) in chunks(width) {
                let x = s.mul(s.load_part(&out[c..], n, 0.0), inverse);
                let weight = s.load_part(&self.weight[c..], n, 0.0);
                let bias = s.load_part(&self.bias[c..], n, 0.0);
                s.store_part(s.fma(x, weight, bias), &mut out[c..], n);
            }
        }
    }
}

/// See [`crate::op::SiluMul`].
pub(crate) struct SiluMul<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) width: usize,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.width;
        for (x, out) in self
            .x
            .chunks_exact(2 * width)
            .zip(self.out.chunks_exact_mut(width))
        {
            let (gate, up) = x.split_at(width);
            for (c, n) in chunks(width) {
                let gate = silu(s, s.load_part(&gate[c..], n, 0.0));
                s.store_part(s.mul(gate, s.load_part(&up[c..], n, 0.0)), &mut out[c..], n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::simd::Level;
    use crate::cpu::kernels::testing::{Random, bits, error};

    const ROWS: usize = 5;

    /// Checks a kernel of rows against f64, in place against elsewhere, and each row alone against all.
    fn check(
        width_in: usize,
        width: usize,
        run: impl Fn(Level, Input<'_>, &mut [f32]),
        want: impl Fn(&[f64]) -> Vec<f64>,
    ) {
        let x: Vec<f32> = Random::new(width as u64).vec(ROWS * width_in);
        let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let want: Vec<f64> = wide.chunks_exact(width_in).flat_map(want).collect();
        for level in Level::available() {
            let mut out = vec![f32::NAN; ROWS * width];
            run(level, Input::Other(&x), &mut out);
            let error = error(&out, &want);
            assert!(error < 1e-6, "width {width} {level:?}: {error:e}");
            let mut alone = vec![f32::NAN; ROWS * width];
            for (x, out) in x.chunks_exact(width_in).zip(alone.chunks_exact_mut(width)) {
                run(level, Input::Other(x), out);
            }
            assert_eq!(bits(&alone), bits(&out), "width {width} {level:?}");
            if width == width_in {
                let mut in_place = x.clone();
                run(level, Input::Output, &mut in_place);
                assert_eq!(bits(&in_place), bits(&out), "width {width} {level:?} in place");
            }
        }
    }

    #[test]
    fn norms_match_f64() {
        for width in [1, 8, 16, 40, 64, 250] {
            let mut random = Random::new(3);
            let (weight, bias) = (random.vec(width), random.vec(width));
            let eps = 1e-5;
            check(
                width,
                width,
                |level, x, out| {
                    level.run(RmsNorm {
                        x,
                        weight: &weight,
                        eps,
                        out,
                    })
                },
                |x| {
                    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
                    let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
                    x.iter()
                        .zip(&weight)
                        .map(|(x, w)| x * inverse * f64::from(*w))
                        .collect()
                },
            );
            check(
                width,
                width,
                |level, x, out| {
                    let (weight, bias) = (&weight, &bias);
                    level.run(LayerNorm {
                        x,
                        weight,
                        bias,
                        eps,
                        out,
                    });
                },
                |x| {
                    let mean = x.iter().sum::<f64>() / x.len() as f64;
                    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
                    let inverse = 1.0 / (variance + f64::from(eps)).sqrt();
                    let affine = weight.iter().zip(&bias);
                    x.iter()
                        .zip(affine)
                        .map(|(x, (w, b))| (x - mean) * inverse * f64::from(*w) + f64::from(*b))
                        .collect()
                },
            );
        }
    }

    #[test]
    fn silu_mul_matches_f64() {
        for width in [1, 16, 40] {
            check(
                2 * width,
                width,
                |level, x, out| {
                    let Input::Other(x) = x else {
                        unreachable!("the widths differ")
                    };
                    level.run(SiluMul { x, width, out });
                },
                |x| {
                    (0..width)
                        .map(|i| x[i] / (1.0 + (-x[i]).exp()) * x[width + i])
                        .collect()
                },
            );
        }
    }
}
