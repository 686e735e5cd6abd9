//! What one thread of this machine can do.

use std::hint::black_box;
use std::time::Instant;

/// GFLOP/s of fused multiply-adds on registers.
pub(crate) fn fma_gflops() -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was just detected.
            return best(2 * 16 * 16, || unsafe { x86::fma512() });
        }
        if is_x86_feature_detected!("fma") {
            // SAFETY: the feature was just detected, and it implies AVX.
            return best(2 * 8 * 12, || unsafe { x86::fma256() });
        }
    }
    best(2 * 16, portable)
}

const ROUNDS: usize = 1 << 18;

fn best(flops_a_round: usize, run: impl Fn()) -> f64 {
    let mut seconds = f64::INFINITY;
    for _ in 0..20 {
        let start = Instant::now();
        run();
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    (flops_a_round * ROUNDS) as f64 / seconds / 1e9
}

fn portable() {
    let mut acc = [1.0f32; 16];
    for _ in 0..ROUNDS {
        for a in &mut acc {
            *a = *a * black_box(0.999) + 1e-3;
        }
    }
    black_box(acc);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ROUNDS, black_box};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn fma512() {
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(1e-3)));
        let mut acc = [_mm512_set1_ps(1.0); 16];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(*acc, a, b);
            }
        }
        black_box(acc.map(|acc| _mm512_reduce_add_ps(acc)));
    }

    #[target_feature(enable = "avx,fma")]
    pub(super) fn fma256() {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(1e-3)));
        let mut acc = [_mm256_set1_ps(1.0); 12];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm256_fmadd_ps(*acc, a, b);
            }
        }
        black_box(acc.map(|acc| _mm256_cvtss_f32(acc)));
    }
}

/// GB/s of reading memory that no cache holds.
pub(crate) fn bandwidth_gb() -> f64 {
    let words = vec![1u64; 32 << 20];
    let mut seconds = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        let mut sums = [0u64; 16];
        for chunk in words.as_chunks::<16>().0 {
            for (sum, word) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*word);
            }
        }
        black_box(sums);
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    (words.len() * 8) as f64 / seconds / 1e9
}
