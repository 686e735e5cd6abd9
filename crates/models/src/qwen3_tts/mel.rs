//! Log-mel spectrogram of a clip, on the host: the speaker encoder's input.

use std::fmt;
use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};

const SAMPLE_RATE_HZ: f64 = 24_000.0;
const WINDOW: usize = 1024;
const HOP: usize = 256;
const HIGHEST_HZ: f64 = 12_000.0;
/// Samples mirrored in front of and behind the clip.
const PAD: usize = (WINDOW - HOP) / 2;

/// Frames of a clip; a clip must be longer than the mirrored edge.
pub const fn mel_frames(samples: usize) -> usize {
    (samples + 2 * PAD - WINDOW) / HOP + 1
}

/// Computes spectrograms; holds the transform's plan, the window and the filters.
pub struct MelSpectrogram {
    bands: Vec<Band>,
    window: Vec<f32>,
    fft: Arc<dyn RealToComplex<f32>>,
}

/// One triangle of the filter bank: weights of neighbouring bins.
#[derive(Debug)]
struct Band {
    first_bin: usize,
    weights: Vec<f32>,
}

impl fmt::Debug for MelSpectrogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mel spectrogram of {} bands", self.bands.len())
    }
}

impl MelSpectrogram {
    /// Slaney mel bands from 0 Hz to 12 kHz, normalised by area.
    pub fn new(bands: usize) -> Self {
        let window = (0..WINDOW)
            .map(|i| (0.5 - 0.5 * (2.0 * std::f64::consts::PI * i as f64 / WINDOW as f64).cos()) as f32)
            .collect();
        Self {
            bands: filters(bands),
            window,
            fft: RealFftPlanner::new().plan_fft_forward(WINDOW),
        }
    }

    /// `ln(max(mel, 1e-5))` of 24 kHz samples, `[mel_frames(samples), bands]`.
    ///
    /// # Panics
    /// When the clip is no longer than the mirrored edge (384 samples): the caller checked its length.
    pub fn compute(&self, samples: &[f32]) -> Vec<f32> {
        assert!(samples.len() > PAD, "a clip of {} samples", samples.len());
        let last = samples.len() - 1;
        let before = samples[1..=PAD].iter().rev();
        let after = samples[last - PAD..last].iter().rev();
        let padded: Vec<f32> = before.chain(samples).chain(after).copied().collect();

        let mut frame = self.fft.make_input_vec();
        let mut bins = self.fft.make_output_vec();
        let mut scratch = self.fft.make_scratch_vec();
        let mut magnitudes = vec![0.0; bins.len()];
        let mut mel = Vec::with_capacity(mel_frames(samples.len()) * self.bands.len());
        for input in padded.windows(WINDOW).step_by(HOP) {
            for ((out, x), w) in frame.iter_mut().zip(input).zip(&self.window) {
                *out = x * w;
            }
            self.fft
                .process_with_scratch(&mut frame, &mut bins, &mut scratch)
                .expect("the buffers were made by this plan");
            for (magnitude, bin) in magnitudes.iter_mut().zip(&bins) {
                let Complex { re, im } = bin;
                *magnitude = (re * re + im * im + 1e-9).sqrt();
            }
            mel.extend(self.bands.iter().map(|band| {
                let sum: f32 = band
                    .weights
                    .iter()
                    .zip(&magnitudes[band.first_bin..])
                    .map(|(w, m)| w * m)
                    .sum();
                sum.max(1e-5).ln()
            }));
        }
        mel
    }
}

fn filters(bands: usize) -> Vec<Band> {
    let highest = hz_to_mel(HIGHEST_HZ);
    let edges: Vec<f64> = (0..bands + 2)
        .map(|i| mel_to_hz(highest * i as f64 / (bands + 1) as f64))
        .collect();
    let bin_hz = SAMPLE_RATE_HZ / WINDOW as f64;
    edges
        .windows(3)
        .map(|edge| {
            let (low, centre, high) = (edge[0], edge[1], edge[2]);
            let weight = |bin: usize| {
                let hz = bin as f64 * bin_hz;
                let rise = (hz - low) / (centre - low);
                let fall = (high - hz) / (high - centre);
                (rise.min(fall).max(0.0) * 2.0 / (high - low)) as f32
            };
            let first_bin = (low / bin_hz).ceil() as usize;
            let end = ((high / bin_hz).floor() as usize).min(WINDOW / 2);
            Band {
                first_bin,
                weights: (first_bin..=end).map(weight).collect(),
            }
        })
        .collect()
}

/// Slaney's scale: linear below 1 kHz, logarithmic above.
const LINEAR_HZ_PER_MEL: f64 = 200.0 / 3.0;
const BREAK_HZ: f64 = 1000.0;
const BREAK_MEL: f64 = BREAK_HZ / LINEAR_HZ_PER_MEL;

fn log_step() -> f64 {
    6.4f64.ln() / 27.0
}

fn hz_to_mel(hz: f64) -> f64 {
    if hz < BREAK_HZ {
        hz / LINEAR_HZ_PER_MEL
    } else {
        BREAK_MEL + (hz / BREAK_HZ).ln() / log_step()
    }
}

fn mel_to_hz(mel: f64) -> f64 {
    if mel < BREAK_MEL {
        mel * LINEAR_HZ_PER_MEL
    } else {
        BREAK_HZ * (log_step() * (mel - BREAK_MEL)).exp()
    }
}

#[cfg(test)]
mod tests;
