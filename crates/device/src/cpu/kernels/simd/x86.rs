//! AVX2 with FMA, and AVX-512.

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
