//! Faster or slower at the same pitch.
//!
//! Waveform similarity overlap-add: the output is made of overlapping windows of the input, taken further apart or
//! closer together than they are laid down; each is shifted a little to where it continues the last one best.

use std::ops::RangeInclusive;

use crate::EncodeError;

/// Speeds that are served.
pub const SPEED_RANGE: RangeInclusive<f32> = 0.25..=4.0;

/// Distance between two windows of the output, in parts of a second: 15 ms, half a window.
const HOPS_PER_SECOND: u32 = 66;

/// How far a window is shifted at most, in parts of a second: 10 ms, a period of a low voice.
const SHIFTS_PER_SECOND: u32 = 100;

/// Stretches one stream. How the stream is cut into chunks changes no sample.
#[derive(Debug)]
pub struct Stretcher {
    speed: f64,
    hop: usize,
    max_shift: usize,
    /// Rising half of a Hann window; with its falling half it adds up to one.
    fade_in: Vec<f32>,
    /// Input from `first` on.
    input: Vec<f32>,
    first: usize,
    n_in: usize,
    /// Where the last window was taken, and its second half, faded out.
    last: usize,
    tail: Vec<f32>,
    n_windows: usize,
    n_out: usize,
}

impl Stretcher {
    /// `speed` times as fast, for samples of `sample_rate` Hz.
    ///
    /// # Errors
    /// The speed is out of [`SPEED_RANGE`], or no number.
    pub fn new(speed: f32, sample_rate: u32) -> Result<Self, EncodeError> {
        if !SPEED_RANGE.contains(&speed) {
            return Err(EncodeError::Speed(speed.to_string()));
        }
        let hop = (sample_rate / HOPS_PER_SECOND).max(1) as usize;
        let angle = |i: usize| (i as f64 + 0.5) / hop as f64 * std::f64::consts::FRAC_PI_2;
        Ok(Self {
            speed: speed.into(),
            hop,
            max_shift: (sample_rate / SHIFTS_PER_SECOND) as usize,
            fade_in: (0..hop).map(|i| angle(i).sin().powi(2) as f32).collect(),
            input: Vec::new(),
            first: 0,
            n_in: 0,
            last: 0,
            tail: Vec::new(),
            n_windows: 0,
            n_out: 0,
        })
    }

    /// Take in a chunk, and append what can be said by now to `out`.
    pub fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) {
        self.input.extend_from_slice(samples);
        self.n_in += samples.len();
        self.run(self.n_in, usize::MAX, out);
    }

    /// The stream ends: append the rest. In all there are then as many samples as `n / speed`, rounded.
    pub fn finish(&mut self, out: &mut Vec<f32>) {
        let wanted = (self.n_in as f64 / self.speed).round() as usize;
        while self.n_out < wanted {
            // Silence behind the end, as far as the next window can reach.
            self.input.resize(self.needed() - self.first, 0.0);
            self.run(self.needed(), wanted, out);
        }
    }

    /// Where the next window is taken if nothing shifts it.
    fn nominal(&self) -> usize {
        (self.n_windows as f64 * self.hop as f64 * self.speed).round() as usize
    }

    /// How much input there must be for the next window.
    fn needed(&self) -> usize {
        self.nominal().max(self.last + self.hop) + self.max_shift + 2 * self.hop
    }

    /// Lay windows down while there is input for them, up to `limit` samples in all.
    fn run(&mut self, available: usize, limit: usize, out: &mut Vec<f32>) {
        while self.needed() <= available && self.n_out < limit {
            let at = if self.n_windows == 0 { 0 } else { self.best() };
            let window = &self.input[at - self.first..][..2 * self.hop];
            let (rising, falling) = window.split_at(self.hop);
            let n_left = self.hop.min(limit - self.n_out);
            if self.tail.is_empty() {
                out.extend_from_slice(&rising[..n_left]);
            } else {
                let mixed = rising.iter().zip(&self.fade_in).zip(&self.tail);
                out.extend(
                    mixed
                        .take(n_left)
                        .map(|((sample, fade), tail)| sample * fade + tail),
                );
            }
            self.n_out += n_left;
            self.tail = falling
                .iter()
                .zip(&self.fade_in)
                .map(|(sample, fade)| sample * (1.0 - fade))
                .collect();
            self.last = at;
            self.n_windows += 1;
            let unused = self
                .nominal()
                .saturating_sub(self.max_shift)
                .min(self.last + self.hop)
                .min(self.first + self.input.len());
            if unused > self.first {
                self.input.drain(..unused - self.first);
                self.first = unused;
            }
        }
    }

    /// Where a window near the nominal place looks most like what followed the last one.
    fn best(&self) -> usize {
        let continued = &self.input[self.last + self.hop - self.first..][..self.hop];
        let nominal = self.nominal();
        let earliest = nominal.saturating_sub(self.max_shift);
        let mut best = (f32::NEG_INFINITY, nominal);
        for at in earliest..=nominal + self.max_shift {
            let candidate = &self.input[at - self.first..][..self.hop];
            let (mut product, mut energy) = (0.0f32, 1e-9f32);
            for (a, b) in candidate.iter().zip(continued) {
                product += a * b;
                energy += a * a;
            }
            let likeness = product / energy.sqrt();
            if likeness > best.0 {
                best = (likeness, at);
            }
        }
        best.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cut, rms, sine};

    fn stretched(speed: f32, chunks: &[&[f32]]) -> Vec<f32> {
        let mut stretcher = Stretcher::new(speed, 24_000).unwrap();
        let mut out = Vec::new();
        for chunk in chunks {
            stretcher.push(chunk, &mut out);
        }
        stretcher.finish(&mut out);
        out
    }

    /// Times that the signal rises through zero.
    fn n_periods(samples: &[f32]) -> usize {
        samples
            .windows(2)
            .filter(|pair| pair[0] < 0.0 && pair[1] >= 0.0)
            .count()
    }

    #[test]
    fn the_length_changes_and_the_pitch_does_not() {
        let samples = sine(200.0, 24_000, 24_000);
        for speed in [0.25, 0.5, 0.8, 1.25, 2.0, 4.0] {
            let out = stretched(speed, &cut(&samples, &[1920]));
            assert_eq!(out.len(), (24_000.0 / speed).round() as usize);
            let pitch = n_periods(&out) as f32 * speed;
            // One period more or less at the ends.
            assert!(
                (pitch - 200.0).abs() <= 1.5 * speed.max(1.0),
                "{speed}: {pitch} Hz"
            );
            // Windows that meet out of phase would cancel out.
            let level = rms(&out[..out.len() * 9 / 10]);
            assert!(
                (level - rms(&samples)).abs() < 0.01,
                "{speed}: a level of {level}"
            );
        }
    }

    #[test]
    fn how_a_stream_is_cut_changes_no_sample() {
        let samples = sine(333.0, 24_000, 9001);
        for speed in [0.25, 1.1, 4.0] {
            let whole = stretched(speed, &[&samples]);
            for sizes in [&[1][..], &[1920], &[7, 2000, 361]] {
                assert_eq!(
                    stretched(speed, &cut(&samples, sizes)),
                    whole,
                    "{speed} {sizes:?}"
                );
            }
        }
    }

    #[test]
    fn short_streams_and_silence_have_their_length() {
        assert!(stretched(2.0, &[]).is_empty());
        assert_eq!(stretched(2.0, &[&[0.5; 10]]).len(), 5);
        assert_eq!(stretched(0.25, &[&[0.0; 480]]), vec![0.0; 1920]);
    }

    #[test]
    fn other_speeds_are_refused() {
        for speed in [0.0, 0.24, 4.1, -1.0, f32::NAN, f32::INFINITY] {
            assert!(Stretcher::new(speed, 24_000).is_err(), "{speed}");
        }
    }
}
