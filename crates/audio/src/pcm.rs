//! 32-bit float samples to 16-bit integers.

/// The nearest 16-bit sample: clamped to [-1, 1], scaled by 32767, rounded half away from zero. NaN is silence.
pub fn s16_from_f32(sample: f32) -> i16 {
    // `as` saturates and turns NaN into 0, which is what a loudspeaker should get of it.
    let scaled = sample.clamp(-1.0, 1.0) * 32767.0;
    // As `round`, which is a call into a library on machines of the baseline, and most of what a chunk costs. A half
    // itself would take the number just below a half to 1.
    (scaled + BELOW_HALF.copysign(scaled)) as i32 as i16
}

/// The largest number below a half.
const BELOW_HALF: f32 = 0.5f32.next_down();

/// Append the 16-bit little-endian bytes of the samples.
pub(crate) fn append_s16le(samples: impl ExactSizeIterator<Item = f32>, out: &mut Vec<u8>) {
    let begin = out.len();
    out.resize(begin + samples.len() * 2, 0);
    let places = out[begin..].as_chunks_mut::<2>().0;
    for (place, sample) in places.iter_mut().zip(samples) {
        *place = s16_from_f32(sample).to_le_bytes();
    }
}

/// 16-bit little-endian bytes of the samples.
pub fn s16le_from_f32(samples: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(samples.len() * 2);
    append_s16le(samples.iter().copied(), &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn edges_clamp_and_halves_round_away_from_zero() {
        for (sample, want) in [
            (0.0, 0),
            (-0.0, 0),
            (1.0, 32767),
            (-1.0, -32767),
            (1.5, 32767),
            (f32::NEG_INFINITY, -32767),
            (f32::NAN, 0),
            (0.5 / 32767.0, 1),
            (-0.5 / 32767.0, -1),
            (0.49 / 32767.0, 0),
            (0.5, 16384),
        ] {
            assert_eq!(s16_from_f32(sample), want, "{sample}");
        }
        assert_eq!(s16le_from_f32(&[1.0, -1.0]), [0xff, 0x7f, 0x01, 0x80]);
    }

    /// Around every place where the nearest sample changes, and around each power of two.
    #[test]
    fn it_rounds_as_the_library_does() {
        let library = |sample: f32| (sample.clamp(-1.0, 1.0) * 32767.0).round() as i16;
        let halves = (0..65_536).map(|n| n as f32 / 2.0 / 32767.0);
        let powers = (0..150).map(|n| 2f32.powi(-n));
        for middle in halves.chain(powers) {
            let (mut below, mut above) = (middle, middle);
            for _ in 0..8 {
                for sample in [below, above, -below, -above] {
                    assert_eq!(s16_from_f32(sample), library(sample), "{sample:e}");
                }
                (below, above) = (below.next_down(), above.next_up());
            }
        }
    }

    proptest! {
        #[test]
        fn error_is_at_most_half_a_step(sample in -1.0f32..=1.0) {
            let back = f32::from(s16_from_f32(sample)) / 32767.0;
            prop_assert!((back - sample).abs() <= 0.5001 / 32767.0);
            prop_assert_eq!(s16_from_f32(-sample), -s16_from_f32(sample));
        }
    }
}
