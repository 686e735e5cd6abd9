//! Seeded inputs.

/// A small deterministic generator (xorshift64*).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        // Neighbouring seeds begin alike.
        for _ in 0..8 {
            random.word();
        }
        random
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Uniform in -1..1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.word() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    /// Uniform in -scale..scale.
    pub(crate) fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.float() * scale).collect()
    }

    /// Uniform in `0..bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.word() >> 33) as usize % bound
    }

    /// `count` of the numbers `0..of` in random order.
    pub(crate) fn choose(&mut self, count: usize, of: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..of).collect();
        for i in (1..of).rev() {
            all.swap(i, self.below(i + 1));
        }
        all.truncate(count);
        all
    }
}
