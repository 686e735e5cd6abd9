//! One vector type of 16 f32 lanes at every level of the instruction set, so that each kernel is written once
//! and reduces in the same lane pattern everywhere.
//!
//! A level's token is made only after the processor was asked for its features; holding one is the proof that
//! the intrinsics behind its methods may run.

use std::sync::LazyLock;

use super::gemm::Tiles;
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

/// Plain arrays, for processors without fused multiply-add.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type V = [f32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::V {
        std::array::from_fn(|i| x[i])
    }
    #[inline(always)]
    fn load_bf16_pair(self, x: &[u16]) -> (Self::V, Self::V) {
        let wide = |x: u16| f32::from_bits(u32::from(x) << 16);
        (
            std::array::from_fn(|i| wide(x[2 * i])),
            std::array::from_fn(|i| wide(x[2 * i + 1])),
        )
    }
    #[inline(always)]
    fn store(self, v: Self::V, out: &mut [f32]) {
        out[..LANES].copy_from_slice(&v);
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn exp2_integral(self, a: Self::V) -> Self::V {
        a.map(|a| f32::from_bits((((a as i32) + 127) << 23) as u32))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, Simd};
    use std::arch::x86_64::*;

    /// AVX2 and FMA: a vector is two registers.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Avx2(());

    /// AVX-512F: a vector is one register.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Avx512(());

    impl Avx2 {
        /// For [`super::Level::run`], which has checked the processor.
        pub(super) fn after_detection() -> Self {
            Self(())
        }
    }

    impl Avx512 {
        /// For [`super::Level::run`], which has checked the processor.
        pub(super) fn after_detection() -> Self {
            Self(())
        }
    }

    /// Wraps intrinsics that touch no memory.
    macro_rules! pure {
        ($e:expr) => {
            // SAFETY: the token's existence proves that the processor has the features; no memory is touched.
            unsafe { $e }
        };
    }

    // Never inlined: each kernel and each tile gets a function, and the registers, of its own.
    #[target_feature(enable = "avx2,fma")]
    #[inline(never)]
    fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    #[target_feature(enable = "avx512f,avx2,fma")]
    #[inline(never)]
    fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
        f()
    }

    impl Simd for Avx2 {
        type V = [__m256; 2];

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            [pure!(_mm256_set1_ps(x)); 2]
        }
        #[inline(always)]
        fn load(self, x: &[f32]) -> Self::V {
            let x = &x[..LANES];
            // SAFETY: features as above; 16 elements are in bounds; unaligned loads.
            unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
        }
        #[inline(always)]
        fn load_bf16_pair(self, x: &[u16]) -> (Self::V, Self::V) {
            let x = &x[..2 * LANES];
            // SAFETY: features as above; 32 elements of 2 bytes are in bounds; unaligned loads.
            unsafe {
                let low = _mm256_loadu_si256(x.as_ptr().cast());
                let high = _mm256_loadu_si256(x.as_ptr().add(LANES).cast());
                let odd = _mm256_set1_epi32(0xFFFF_0000u32 as i32);
                (
                    [
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                    ],
                    [
                        _mm256_castsi256_ps(_mm256_and_si256(low, odd)),
                        _mm256_castsi256_ps(_mm256_and_si256(high, odd)),
                    ],
                )
            }
        }
        #[inline(always)]
        fn store(self, v: Self::V, out: &mut [f32]) {
            let out = &mut out[..LANES];
            // SAFETY: features as above; 16 elements are in bounds; unaligned stores.
            unsafe {
                _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
                _mm256_storeu_ps(out.as_mut_ptr().add(8), v[1]);
            }
        }
        #[inline(always)]
        fn add(self, a: Self::V, b: Self::V) -> Self::V {
            pure!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn sub(self, a: Self::V, b: Self::V) -> Self::V {
            pure!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn mul(self, a: Self::V, b: Self::V) -> Self::V {
            pure!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn div(self, a: Self::V, b: Self::V) -> Self::V {
            pure!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            pure!([
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1])
            ])
        }
        #[inline(always)]
        fn max(self, a: Self::V, b: Self::V) -> Self::V {
            pure!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn min(self, a: Self::V, b: Self::V) -> Self::V {
            pure!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
        }
        #[inline(always)]
        fn abs(self, a: Self::V) -> Self::V {
            let sign = pure!(_mm256_set1_ps(-0.0));
            pure!([_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])])
        }
        #[inline(always)]
        fn round(self, a: Self::V) -> Self::V {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            pure!([_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])])
        }
        #[inline(always)]
        fn exp2_integral(self, a: Self::V) -> Self::V {
            pure!({
                let bias = _mm256_set1_epi32(127);
                let low = _mm256_add_epi32(_mm256_cvtps_epi32(a[0]), bias);
                let high = _mm256_add_epi32(_mm256_cvtps_epi32(a[1]), bias);
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
                ]
            })
        }
        #[inline(always)]
        fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
            pure!([
                _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
                _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
            ])
        }
        #[inline(always)]
        fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
            // SAFETY: the token's existence proves that the processor has the features.
            unsafe { with_avx2(f) }
        }
        #[inline(always)]
        fn sum(self, v: Self::V) -> f32 {
            pure!(sum_halves(_mm256_add_ps(v[0], v[1])))
        }
    }

    impl Simd for Avx512 {
        type V = __m512;

        #[inline(always)]
        fn splat(self, x: f32) -> Self::V {
            pure!(_mm512_set1_ps(x))
        }
        #[inline(always)]
        fn load(self, x: &[f32]) -> Self::V {
            let x = &x[..LANES];
            // SAFETY: features as above; 16 elements are in bounds; unaligned load.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn load_bf16_pair(self, x: &[u16]) -> (Self::V, Self::V) {
            let x = &x[..2 * LANES];
            // SAFETY: features as above; 32 elements of 2 bytes are in bounds; unaligned load.
            unsafe {
                let words = _mm512_loadu_si512(x.as_ptr().cast());
                let odd = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
                (
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)),
                    _mm512_castsi512_ps(_mm512_and_si512(words, odd)),
                )
            }
        }
        #[inline(always)]
        fn store(self, v: Self::V, out: &mut [f32]) {
            let out = &mut out[..LANES];
            // SAFETY: features as above; 16 elements are in bounds; unaligned store.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) }
        }
        #[inline(always)]
        fn add(self, a: Self::V, b: Self::V) -> Self::V {
            pure!(_mm512_add_ps(a, b))
        }
        #[inline(always)]
        fn sub(self, a: Self::V, b: Self::V) -> Self::V {
            pure!(_mm512_sub_ps(a, b))
        }
        #[inline(always)]
        fn mul(self, a: Self::V, b: Self::V) -> Self::V {
            pure!(_mm512_mul_ps(a, b))
        }
        #[inline(always)]
        fn div(self, a: Self::V, b: Self::V) -> Self::V {
            pure!(_mm512_div_ps(a, b))
        }
        #[inline(always)]
        fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            pure!(_mm512_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn max(self, a: Self::V, b: Self::V) -> Self::V {
            pure!(_mm512_max_ps(a, b))
        }
        #[inline(always)]
        fn min(self, a: Self::V, b: Self::V) -> Self::V {
            pure!(_mm512_min_ps(a, b))
        }
        #[inline(always)]
        fn abs(self, a: Self::V) -> Self::V {
            pure!(_mm512_abs_ps(a))
        }
        #[inline(always)]
        fn round(self, a: Self::V) -> Self::V {
            pure!(_mm512_roundscale_ps::<
                { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
            >(a))
        }
        #[inline(always)]
        fn exp2_integral(self, a: Self::V) -> Self::V {
            pure!({
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
            })
        }
        #[inline(always)]
        fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
            pure!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x))
        }
        #[inline(always)]
        fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
            // SAFETY: the token's existence proves that the processor has the features.
            unsafe { with_avx512(f) }
        }
        #[inline(always)]
        fn sum(self, v: Self::V) -> f32 {
            pure!({
                let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
                sum_halves(_mm256_add_ps(_mm512_castps512_ps256(v), high))
            })
        }
        #[inline(always)]
        fn load_part(self, x: &[f32], n: usize, fill: f32) -> Self::V {
            let x = &x[..n];
            debug_assert!(n <= LANES);
            // SAFETY: features as above; masked lanes are not read.
            unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask(n), x.as_ptr()) }
        }
        #[inline(always)]
        fn store_part(self, v: Self::V, out: &mut [f32], n: usize) {
            let out = &mut out[..n];
            debug_assert!(n <= LANES);
            // SAFETY: features as above; masked lanes are not written.
            unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask(n), v) }
        }
    }

    /// Sum of 8 lanes by halves.
    #[target_feature(enable = "avx")]
    #[inline]
    fn sum_halves(v: __m256) -> f32 {
        let q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let h = _mm_add_ps(q, _mm_movehl_ps(q, q));
        _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps::<1>(h, h)))
    }

    /// The first `n` lanes.
    #[inline(always)]
    fn mask(n: usize) -> u16 {
        ((1u32 << n) - 1) as u16
    }
}
