//! What the kernel tests share: random data, packed weights and the error measure.

use super::gemm::Weights;
use super::pack::pack;

/// A small deterministic generator (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Uniform in -1..1.
    pub(crate) fn next(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let word = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        word as f32 / 8_388_608.0 - 1.0
    }

    pub(crate) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

/// Elements rounded down to bfloat16, as floats.
pub(crate) fn as_bf16(x: &[f32]) -> Vec<f32> {
    x.iter()
        .map(|x| f32::from_bits(x.to_bits() & 0xFFFF_0000))
        .collect()
}

/// A packed matrix.
pub(crate) enum Packed {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Packed {
    /// Row-major `[n, k]`; `bf16` keeps the high halves.
    pub(crate) fn new(w: &[f32], n: usize, k: usize, bf16: bool) -> Self {
        if bf16 {
            let halves: Vec<u16> = w.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
            let bytes = pack::<2>(bytemuck::cast_slice(&halves), n, k);
            return Packed::Bf16(
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| u16::from_le_bytes(*b))
                    .collect(),
            );
        }
        let bytes = pack::<4>(bytemuck::cast_slice(w), n, k);
        Packed::F32(
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect(),
        )
    }

    pub(crate) fn weights(&self) -> Weights<'_> {
        match self {
            Packed::F32(w) => Weights::F32(w),
            Packed::Bf16(w) => Weights::Bf16(w),
        }
    }
}

/// ‖got − want‖ / ‖want‖.
pub(crate) fn error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - w));
    difference / norm(&mut want.iter().copied())
}

/// Bits, to compare exactly (NaN included).
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
