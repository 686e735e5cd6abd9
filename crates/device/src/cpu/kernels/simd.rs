//! One vector type of 16 f32 lanes at every level of the instruction set, so that each kernel is written once
//! and reduces in the same lane pattern everywhere.
//!
//! A level's token is made only after the processor was asked for its features; holding one is the proof that
//! the intrinsics behind its methods may run.

use std::sync::LazyLock;

use super::gemm::Tiles;

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Vector arithmetic at one level. `fma` is fused except in the portable level, where it is a multiplication
/// and an addition in every kernel alike.
pub(crate) trait Simd: Copy {
    /// 16 lanes.
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    /// The first 16 elements of `x`.
    fn load(self, x: &[f32]) -> Self::V;
    /// Two vectors from 32 bfloat16: the even elements and the odd ones, so that each is half of a word.
    fn load_bf16_pair(self, x: &[u16]) -> (Self::V, Self::V);
    /// Into the first 16 elements of `out`.
    fn store(self, v: Self::V, out: &mut [f32]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// To the nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// 2^a for integral a in -126..=127.
    fn exp2_integral(self, a: Self::V) -> Self::V;
    /// Lane by lane: `a < b ? x : y`.
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Run `f` compiled for this level; everything in it must be inlined into it.
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R;

    /// The first `n` (at most 16) elements; the other lanes are `fill`.
    #[inline(always)]
    fn load_part(self, x: &[f32], n: usize, fill: f32) -> Self::V {
        if n == LANES {
            return self.load(x);
        }
        let mut lanes = [fill; LANES];
        lanes[..n].copy_from_slice(&x[..n]);
        self.load(&lanes)
    }

    /// The first `n` (at most 16) lanes.
    #[inline(always)]
    fn store_part(self, v: Self::V, out: &mut [f32], n: usize) {
        if n == LANES {
            return self.store(v, out);
        }
        out[..n].copy_from_slice(&self.lanes(v)[..n]);
    }

    /// As an array.
    #[inline(always)]
    fn lanes(self, v: Self::V) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes
    }

    /// Sum of the lanes, by halves: one order at every level.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let l = self.lanes(v);
        let q: [f32; 8] = std::array::from_fn(|i| l[i] + l[i + 8]);
        let h: [f32; 4] = std::array::from_fn(|i| q[i] + q[i + 4]);
        (h[0] + h[2]) + (h[1] + h[3])
    }

    /// Largest lane.
    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        self.lanes(v)
            .into_iter()
            .fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
}

/// A kernel that can be compiled for every level.
pub(crate) trait Kernel {
    type Output;
    /// The kernel's body; `#[inline(always)]` in every implementation.
    fn run<S: Tiles>(self, s: S) -> Self::Output;
}

/// A level of the instruction set, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The best level of this processor.
static BEST: LazyLock<Level> = LazyLock::new(|| {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Level::Avx2;
        }
    }
    Level::Portable
});

impl Level {
    /// The best level of this processor.
    pub(crate) fn best() -> Self {
        *BEST
    }

    /// Every level that this processor has.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let all = [Level::Portable, Level::Avx2, Level::Avx512];
        #[cfg(not(target_arch = "x86_64"))]
        let all = [Level::Portable];
        all.into_iter().filter(|&level| level <= Self::best()).collect()
    }

    /// Run a kernel at this level.
    ///
    /// # Panics
    /// When the processor does not have it.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        assert!(
            self <= Self::best(),
            "{self:?} is not available on this processor"
        );
        match self {
            Level::Portable => kernel.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                let s = x86::Avx2::after_detection();
                s.vectorize(
                    #[inline(always)]
                    || kernel.run(s),
                )
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                let s = x86::Avx512::after_detection();
                s.vectorize(
                    #[inline(always)]
                    || kernel.run(s),
                )
            }
        }
    }
}

/// Run a kernel at the processor's best level.
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    Level::best().run(kernel)
}
