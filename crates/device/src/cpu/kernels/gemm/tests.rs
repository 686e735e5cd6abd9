use super::*;
use crate::cpu::kernels::simd::Level;
use crate::cpu::kernels::testing::{Packed, Random, as_bf16, bits, error};

struct Case {
    n: usize,
    k: usize,
    w: Vec<f32>,
    packed: Packed,
    bias: Vec<f32>,
    scale: Vec<f32>,
}

impl Case {
    fn new(random: &mut Random, n: usize, k: usize, bf16: bool) -> Self {
        let w = as_bf16(&random.vec(n * k));
        Self {
            n,
            k,
            packed: Packed::new(&w, n, k, bf16),
            w,
            bias: random.vec(n),
            scale: random.vec(n),
        }
    }

    fn run(&self, level: Level, x: &[f32], out: &mut [f32], residual: Residual<'_>) {
        let rows: Vec<RowRef> = (0..x.len() / self.k)
            .map(|r| RowRef {
                input: r * self.k,
                output: r,
            })
            .collect();
        level.run(Product {
            x,
            rows: &rows,
            runs: Runs::contiguous(self.k),
            w: self.packed.weights(),
            n: self.n,
            epilogue: Epilogue {
                bias: Some(&self.bias),
                activation: Activation::Relu,
                scale: Some(&self.scale),
                residual,
                clamp: false,
            },
            out,
        });
    }

    fn want(&self, x: &[f32], before: &[f32]) -> Vec<f64> {
        let mut want = Vec::new();
        for (r, x) in x.chunks_exact(self.k).enumerate() {
            for o in 0..self.n {
                let w = &self.w[o * self.k..][..self.k];
                let sum: f64 = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let v = (sum + f64::from(self.bias[o])).max(0.0) * f64::from(self.scale[o]);
                want.push(v + f64::from(before[r * self.n + o]));
            }
        }
        want
    }
}

#[test]
fn matches_f64_and_does_not_depend_on_the_batch() {
    let mut random = Random::new(1);
    for (n, k) in [
        (1, 7),
        (16, 16),
        (40, 33),
        (64, 20),
        (96, 50),
        (200, 112),
        (300, 5),
    ] {
        for bf16 in [false, true] {
            let case = Case::new(&mut random, n, k, bf16);
            for level in Level::available() {
                let x = random.vec(23 * k);
                let before = random.vec(23 * n);
                let mut all = before.clone();
                case.run(level, &x, &mut all, Residual::Output);
                let error = error(&all, &case.want(&x, &before));
                assert!(error < 2e-6, "[{n}, {k}] {level:?}: {error:e}");

                let mut other = vec![f32::NAN; all.len()];
                case.run(level, &x, &mut other, Residual::Other(&before));
                assert_eq!(
                    bits(&other),
                    bits(&all),
                    "[{n}, {k}] {level:?} residual elsewhere"
                );

                for batch in 1..=17 {
                    let mut split = before.clone();
                    for (x, out) in x.chunks(batch * k).zip(split.chunks_mut(batch * n)) {
                        case.run(level, x, out, Residual::Output);
                    }
                    assert_eq!(
                        bits(&split),
                        bits(&all),
                        "[{n}, {k}] {level:?} in batches of {batch}"
                    );
                }
            }
        }
    }
}
