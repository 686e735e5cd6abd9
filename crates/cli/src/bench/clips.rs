//! Voices to clone, for measurements: generated, so that nothing is shipped and the same clip is the same bytes.

use laneway_proto::v1;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// Length of a clip: what people send.
const SECONDS: f64 = 4.0;

/// What is said in every second clip, which then clones in context.
const SAID: &str = "The boats came home before the rain, and the harbour was quiet again.";

/// `n_clips` different voices at this rate.
pub(crate) fn clips(n_clips: usize, sample_rate: u32) -> Vec<v1::ReferenceClip> {
    (0..n_clips).map(|index| clip(index, sample_rate)).collect()
}

/// A hum of many harmonics at a pitch of its own, in syllables, with some breath.
fn clip(index: usize, sample_rate: u32) -> v1::ReferenceClip {
    let mut random = StdRng::seed_from_u64(index as u64);
    let pitch_hz = 90.0 + 130.0 * (index as f64 * 0.618).fract();
    let n_samples = (SECONDS * f64::from(sample_rate)) as usize;
    let sample = |at: usize| {
        let seconds = at as f64 / f64::from(sample_rate);
        let syllable = (seconds * 4.0 * std::f64::consts::PI).sin().abs();
        let turn = seconds * pitch_hz * std::f64::consts::TAU;
        let voiced: f64 = (1..=12).map(|n| (turn * f64::from(n)).sin() / f64::from(n)).sum();
        let breath: f64 = random.random_range(-0.02..0.02);
        (syllable * 0.2 * voiced + breath) as f32
    };
    v1::ReferenceClip {
        audio: (0..n_samples)
            .map(sample)
            .flat_map(f32::to_le_bytes)
            .collect::<Vec<u8>>()
            .into(),
        sample_rate,
        text: if index % 2 == 1 {
            SAID.to_owned()
        } else {
            String::new()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clips_differ_and_are_the_same_every_time() {
        let all = clips(8, 24_000);
        assert_eq!(all, clips(8, 24_000));
        for (i, one) in all.iter().enumerate() {
            assert_eq!(one.audio.len(), 4 * 4 * 24_000);
            assert!(all[..i].iter().all(|other| other.audio != one.audio));
            let (samples, _) = one.audio.as_chunks::<4>();
            let loudest = samples
                .iter()
                .map(|s| f32::from_le_bytes(*s).abs())
                .fold(0.0, f32::max);
            assert!((0.1..1.0).contains(&loudest), "{loudest}");
        }
        assert_eq!(all.iter().filter(|clip| !clip.text.is_empty()).count(), 4);
    }
}
