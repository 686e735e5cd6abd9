//! The moment at which a worker made a chunk, written into the chunk's first samples.
//!
//! A moment is nanoseconds of the host's monotonic clock, which all processes of one host share. Its digits are
//! samples that survive both raw formats unchanged, so that a listener reads them back from what it hears.

use rustix::time::{ClockId, clock_gettime};

/// Samples that a stamp takes.
pub const SAMPLES: usize = 5;

/// Bits of a digit: a 16-bit sample holds any of them.
const DIGIT_BITS: u32 = 14;

/// What a digit of 1 is as a sample.
const STEP: f32 = 1.0 / 32767.0;

/// Now.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// The samples of this moment.
pub fn samples(ns: u64) -> [f32; SAMPLES] {
    std::array::from_fn(|index| {
        let digit = ns.checked_shr(DIGIT_BITS * index as u32).unwrap_or(0) & ((1 << DIGIT_BITS) - 1);
        digit as f32 * STEP
    })
}

/// The moment in a chunk of 16-bit samples; `None` when it is too short for one.
pub fn of_s16le(audio: &[u8]) -> Option<u64> {
    let (samples, _) = audio.as_chunks::<2>();
    of_digits(
        samples
            .iter()
            .map(|sample| i64::from(i16::from_le_bytes(*sample))),
    )
}

/// The moment in a chunk of floats; `None` when it is too short for one.
pub fn of_f32le(audio: &[u8]) -> Option<u64> {
    let (samples, _) = audio.as_chunks::<4>();
    of_digits(
        samples
            .iter()
            .map(|sample| (f32::from_le_bytes(*sample) / STEP).round() as i64),
    )
}

fn of_digits(digits: impl ExactSizeIterator<Item = i64>) -> Option<u64> {
    if digits.len() < SAMPLES {
        return None;
    }
    let moment = digits
        .take(SAMPLES)
        .enumerate()
        .fold(0u128, |moment, (index, digit)| {
            moment | u128::from(digit.unsigned_abs()) << (DIGIT_BITS * index as u32)
        });
    u64::try_from(moment).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_survives_both_raw_formats() {
        for moment in [0, 1, 16_383, 16_384, now_ns(), u64::MAX] {
            let samples = samples(moment);
            assert!(samples.iter().all(|sample| (0.0..1.0).contains(sample)));
            let floats: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
            assert_eq!(of_f32le(&floats), Some(moment));
            let s16: Vec<u8> = samples
                .iter()
                .flat_map(|sample| ((sample * 32767.0).round() as i16).to_le_bytes())
                .collect();
            assert_eq!(of_s16le(&s16), Some(moment));
        }
        assert_eq!(of_s16le(&[0; 8]), None);
    }

    #[test]
    fn time_goes_forward() {
        let before = now_ns();
        assert!(before > 0 && now_ns() >= before);
    }
}
