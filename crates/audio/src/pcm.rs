//! 32-bit float samples to 16-bit integers.

/// The nearest 16-bit sample: clamped to [-1, 1], scaled by 32767, rounded half away from zero. NaN is silence.
pub fn s16_from_f32(sample: f32) -> i16 {
    // `as` saturates and turns NaN into 0, which is what a loudspeaker should get of it.
    (sample.clamp(-1.0, 1.0) * 32767.0).round() as i16
}

/// 16-bit little-endian bytes of the samples.
pub fn s16le_from_f32(samples: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(samples.len() * 2);
    for sample in samples {
        bytes.extend_from_slice(&s16_from_f32(*sample).to_le_bytes());
    }
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

    proptest! {
        #[test]
        fn error_is_at_most_half_a_step(sample in -1.0f32..=1.0) {
            let back = f32::from(s16_from_f32(sample)) / 32767.0;
            prop_assert!((back - sample).abs() <= 0.5001 / 32767.0);
            prop_assert_eq!(s16_from_f32(-sample), -s16_from_f32(sample));
        }
    }
}
