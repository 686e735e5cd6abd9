//! Elementary functions on vectors: polynomials with range reduction, the same operations in every lane.
//! Errors are stated against f64 and hold at every level.

use super::simd::{LANES, Simd};
use crate::op::Activation;

/// e^x, relative error under 4e-7; x is clamped to -87 ..= 88.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.min(s.max(x, s.splat(-87.0)), s.splat(88.0));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts: the first has few enough bits that n times it is exact.
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(0.001_395_605_6);
    for c in [0.008_375_129, 0.041_666_083, 0.166_664_15, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    s.mul(p, s.exp2_integral(n))
}

/// sin²(x), absolute error under 5e-7 for |x| up to 10 000.
#[inline(always)]
pub(crate) fn sin_squared<S: Simd>(s: S, x: S::V) -> S::V {
    // sin² has period π: reduce to ±π/2 with π in three parts. The first two have so few bits that n times
    // them is exact also without fused arithmetic.
    let n = s.round(s.mul(x, s.splat(std::f32::consts::FRAC_1_PI)));
    let r = s.fma(n, s.splat(-3.140_625), x);
    let r = s.fma(n, s.splat(-9.670_257_6e-4), r);
    let r = s.fma(n, s.splat(-6.278_329_6e-7), r);
    let u = s.mul(r, r);
    let mut p = s.splat(2.590_510_8e-6);
    for c in [-0.000_198_009_12, 0.008_332_9, -0.166_666_48, 1.0] {
        p = s.fma(p, u, s.splat(c));
    }
    let sin = s.mul(p, r);
    s.mul(sin, sin)
}

/// 1 / (1 + e^-x), absolute error under 4e-7.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// x · sigmoid(x).
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(x, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// tanh(x), absolute error under 4e-7.
#[inline(always)]
fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let t = exp(s, s.mul(s.abs(x), s.splat(-2.0)));
    let y = s.div(s.sub(one, t), s.add(one, t));
    s.select_lt(x, zero, s.sub(zero, y), y)
}

/// x/2 · (1 + erf(x/√2)), absolute error under 1e-6 for |x| up to 10. The complementary error function is
/// t·P(t)·e^-z² with t = 1/(1 + p·z) (Abramowitz and Stegun 7.1.26, error 1.5e-7).
#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let z = s.mul(s.abs(x), s.splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = s.div(one, s.fma(z, s.splat(0.327_591_1), one));
    let mut p = s.splat(1.061_405_4);
    for c in [-1.453_152, 1.421_413_7, -0.284_496_72, 0.254_829_6] {
        p = s.fma(p, t, s.splat(c));
    }
    let erfc = s.mul(s.mul(p, t), exp(s, s.sub(zero, s.mul(z, z))));
    let tail = s.mul(s.mul(x, s.splat(0.5)), erfc);
    s.select_lt(x, zero, tail, s.sub(x, tail))
}

/// An activation of every lane.
#[inline(always)]
pub(crate) fn activate<S: Simd>(s: S, activation: Activation, x: S::V) -> S::V {
    let zero = s.splat(0.0);
    match activation {
        Activation::None => x,
        Activation::Silu => silu(s, x),
        Activation::Gelu => gelu(s, x),
        Activation::Relu => s.max(x, zero),
        Activation::Elu => s.select_lt(x, zero, s.sub(exp(s, x), s.splat(1.0)), x),
        Activation::Tanh => tanh(s, x),
        Activation::ReluTanh => tanh(s, s.max(x, zero)),
        Activation::Sigmoid => sigmoid(s, x),
    }
}

/// `len` elements a vector at a time: where each starts and its lanes in use. (An iterator rather than a
/// function of a closure: a closure that is not inlined would lose the level it is compiled for.)
#[inline(always)]
pub(crate) fn chunks(len: usize) -> Chunks {
    Chunks { start: 0, len }
}

/// See [`chunks`].
pub(crate) struct Chunks {
    start: usize,
    len: usize,
}

impl Iterator for Chunks {
    type Item = (usize, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<(usize, usize)> {
        let start = self.start;
        if start >= self.len {
            return None;
        }
        self.start += LANES;
        Some((start, LANES.min(self.len - start)))
    }
}

/// Σ a·b: lane i takes elements i, i + 16, … in order, then the lanes are summed by halves.
#[inline(always)]
pub(crate) fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut acc = s.splat(0.0);
    for (i, n) in chunks(a.len()) {
        acc = s.fma(s.load_part(&a[i..], n, 0.0), s.load_part(&b[i..], n, 0.0), acc);
    }
    s.sum(acc)
}

/// Σ a in the lane pattern of [`dot`].
#[inline(always)]
pub(crate) fn sum<S: Simd>(s: S, a: &[f32]) -> f32 {
    let mut acc = s.splat(0.0);
    for (i, n) in chunks(a.len()) {
        acc = s.add(acc, s.load_part(&a[i..], n, 0.0));
    }
    s.sum(acc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::simd::{Kernel, Level};

    struct Map<'a, F>(F, &'a mut [f32]);

    trait Function {
        fn apply<S: Simd>(&self, s: S, x: S::V) -> S::V;
    }

    impl<F: Function> Kernel for Map<'_, F> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let len = self.1.len();
            for (i, n) in chunks(len) {
                let y = self.0.apply(s, s.load_part(&self.1[i..], n, 0.0));
                s.store_part(y, &mut self.1[i..], n);
            }
        }
    }

    impl Function for Activation {
        #[inline(always)]
        fn apply<S: Simd>(&self, s: S, x: S::V) -> S::V {
            activate(s, *self, x)
        }
    }

    struct SinSquared;
    impl Function for SinSquared {
        #[inline(always)]
        fn apply<S: Simd>(&self, s: S, x: S::V) -> S::V {
            sin_squared(s, x)
        }
    }

    struct Exp;
    impl Function for Exp {
        #[inline(always)]
        fn apply<S: Simd>(&self, s: S, x: S::V) -> S::V {
            exp(s, x)
        }
    }

    /// Largest error over a grid, as `measure(got, want)` has it.
    fn worst<F: Function + Copy>(
        f: F,
        range: f32,
        want: impl Fn(f64) -> f64,
        measure: impl Fn(f64, f64) -> f64,
    ) -> f64 {
        let xs: Vec<f32> = (-40_003..=40_003)
            .map(|i| i as f32 * (range / 40_003.0))
            .collect();
        let mut worst = 0f64;
        for level in Level::available() {
            let mut got = xs.clone();
            level.run(Map(f, &mut got));
            for (&x, &y) in xs.iter().zip(&got) {
                worst = worst.max(measure(f64::from(y), want(f64::from(x))));
            }
        }
        worst
    }

    impl Copy for SinSquared {}
    impl Clone for SinSquared {
        fn clone(&self) -> Self {
            *self
        }
    }
    impl Copy for Exp {}
    impl Clone for Exp {
        fn clone(&self) -> Self {
            *self
        }
    }

    fn absolute(got: f64, want: f64) -> f64 {
        (got - want).abs()
    }

    /// erf as e^-x² times a series of terms of one sign, which does not cancel.
    fn erf(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..400 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp()
    }

    #[test]
    fn functions_keep_their_stated_errors() {
        let relative = |got: f64, want: f64| ((got - want) / want).abs();
        let error = worst(Exp, 86.0, f64::exp, relative);
        assert!(error < 4e-7, "exp: {error:e}");
        for range in [3.0, 100.0, 10_000.0] {
            let error = worst(SinSquared, range, |x| x.sin().powi(2), absolute);
            assert!(error < 5e-7, "sin² on ±{range}: {error:e}");
        }
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        type Want<'a> = &'a dyn Fn(f64) -> f64;
        let cases: [(Activation, Want<'_>, f64); 8] = [
            (Activation::None, &|x| x, 0.0),
            (Activation::Silu, &|x| x * sigmoid(x), 2e-6),
            (
                Activation::Gelu,
                &|x| x / 2.0 * (1.0 + erf(x / 2f64.sqrt())),
                1e-6,
            ),
            (Activation::Relu, &|x| x.max(0.0), 0.0),
            (
                Activation::Elu,
                &|x| if x < 0.0 { x.exp() - 1.0 } else { x },
                4e-7,
            ),
            (Activation::Tanh, &f64::tanh, 4e-7),
            (Activation::ReluTanh, &|x| x.max(0.0).tanh(), 4e-7),
            (Activation::Sigmoid, &sigmoid, 4e-7),
        ];
        for (activation, want, bound) in cases {
            let error = worst(activation, 10.0, want, absolute);
            assert!(error <= bound, "{activation:?}: {error:e}");
        }
    }
}
