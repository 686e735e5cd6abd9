//! Whether a clip is one to clone a voice from.
//!
//! A model clones whatever it is given: silence, hum or a recording that was driven into its limits would all become a
//! voice, and nobody would hear why before it speaks.

/// Shortest clip: less of a voice says too little of it.
const MIN_MS: u64 = 1000;

/// Loudness below which there is nothing to hear, in decibels of full scale.
const SILENCE_DB: f64 = -50.0;

/// What counts as driven to full scale.
const FULL_SCALE: f32 = 0.99;

/// Largest share of samples at full scale. Speech that was recorded well has next to none, and a limiter leaves a few.
const MAX_FULL_SHARE: f64 = 0.01;

/// What is wrong with a clip that can be read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum Unfit {
    #[error("the clip is {0} ms long; send {MIN_MS} ms or more")]
    TooShort(u64),
    #[error("the clip is silent: its loudness is {0:.0} dB of full scale, under {SILENCE_DB} dB")]
    Silent(f64),
    #[error("the clip is clipped: {percent:.0} % of its samples are at full scale; record it at a lower level",
            percent = .0 * 100.0)]
    Clipped(f64),
}

/// Check length and level.
///
/// # Errors
/// What makes it unfit.
pub(super) fn check(samples: &[f32], sample_rate: u32) -> Result<(), Unfit> {
    let ms = samples.len() as u64 * 1000 / u64::from(sample_rate.max(1));
    if ms < MIN_MS {
        return Err(Unfit::TooShort(ms));
    }
    let n_samples = samples.len() as f64;
    let mean = samples.iter().map(|sample| f64::from(*sample)).sum::<f64>() / n_samples;
    // A constant is silence, however high it lies.
    let power = samples
        .iter()
        .map(|sample| (f64::from(*sample) - mean).powi(2))
        .sum::<f64>()
        / n_samples;
    let loudness = 10.0 * power.max(1e-12).log10();
    if loudness < SILENCE_DB {
        return Err(Unfit::Silent(loudness));
    }
    let n_full = samples.iter().filter(|sample| sample.abs() >= FULL_SCALE).count();
    let share = n_full as f64 / n_samples;
    if share > MAX_FULL_SHARE {
        return Err(Unfit::Clipped(share));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u32 = 24_000;

    fn tone(n_samples: usize, level: f32) -> Vec<f32> {
        let wave = |index: usize| level * (index as f32 * 0.06).sin();
        (0..n_samples).map(wave).collect()
    }

    #[track_caller]
    fn unfit(samples: &[f32], words: &str) {
        let problem = check(samples, RATE).unwrap_err().to_string();
        assert!(problem.contains(words), "{problem}");
    }

    #[test]
    fn speech_levels_pass_and_the_rest_is_named() {
        for level in [0.01, 0.3, 0.9] {
            check(&tone(24_000, level), RATE).unwrap();
        }
        unfit(&tone(23_999, 0.3), "999 ms long");
        unfit(&[], "0 ms long");
        unfit(&vec![0.0; 24_000], "silent: its loudness is -120 dB");
        unfit(&tone(24_000, 0.002), "silent");
        unfit(&vec![0.5; 24_000], "silent");
        let driven: Vec<f32> = tone(24_000, 3.0)
            .iter()
            .map(|sample| sample.clamp(-1.0, 1.0))
            .collect();
        unfit(&driven, "clipped: 79 % of its samples");
        // Floats over full scale are heard as clipped too.
        unfit(&tone(24_000, 3.0), "clipped");
        // A peak here and there is no reason.
        let mut peaks = tone(24_000, 0.5);
        peaks.iter_mut().step_by(200).for_each(|sample| *sample = 1.0);
        check(&peaks, RATE).unwrap();
    }
}
