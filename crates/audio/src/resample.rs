//! One stream of samples from one rate to another.

use rubato::audioadapter_buffers::direct::SequentialSlice;
use rubato::{Fft, FixedSync, Indexing, Resampler as _};

use crate::EncodeError;

/// Parts of a second that are converted at once: 20 ms. What is left over of a chunk waits for the next one.
const BLOCKS_PER_SECOND: u32 = 50;

/// Converts a stream chunk by chunk. Its state lives across chunks: how a stream is cut into chunks changes no
/// sample, and there is no click where they meet. The filter's delay is taken out, so nothing shifts in time.
pub struct Resampler {
    filter: Fft<f32>,
    block_in: usize,
    from: u64,
    to: u64,
    /// Input that does not fill a block yet.
    waiting: Vec<f32>,
    converted: Vec<f32>,
    /// Samples at the front that are the filter's delay and still to be dropped.
    delay_left: usize,
    n_in: u64,
    n_out: u64,
}

impl std::fmt::Debug for Resampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resampler")
            .field("from", &self.from)
            .field("to", &self.to)
            .field("n_in", &self.n_in)
            .field("n_out", &self.n_out)
            .finish_non_exhaustive()
    }
}

impl Resampler {
    /// From `from` Hz to `to` Hz, one channel.
    ///
    /// # Errors
    /// A rate of zero, or one that the filter does not take.
    pub fn new(from: u32, to: u32) -> Result<Self, EncodeError> {
        // The filter's delay is half of a block of output: only a whole number of samples can be taken out.
        let unit = from / gcd(from, to).max(1);
        let mut n_units = (from / BLOCKS_PER_SECOND).div_ceil(unit.max(1)).max(1);
        if n_units * (to / gcd(from, to).max(1)) % 2 == 1 {
            n_units += 1;
        }
        let block = (n_units * unit).max(1) as usize;
        let filter = Fft::<f32>::new_custom(
            from as usize,
            to as usize,
            block,
            1,
            1,
            rubato::WindowFunction::BlackmanHarris2,
            FixedSync::Both,
        )
        .map_err(|error| EncodeError::library("resampler", error))?;
        Ok(Self {
            block_in: filter.input_frames_max(),
            converted: vec![0.0; filter.output_frames_max()],
            delay_left: filter.output_delay(),
            filter,
            from: from.into(),
            to: to.into(),
            waiting: Vec::new(),
            n_in: 0,
            n_out: 0,
        })
    }

    /// Take in a chunk, and append what can be said by now to `out`.
    ///
    /// # Errors
    /// The filter refuses a block, which is a fault of ours.
    pub fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) -> Result<(), EncodeError> {
        self.n_in += samples.len() as u64;
        self.waiting.extend_from_slice(samples);
        let n_whole = self.waiting.len() / self.block_in * self.block_in;
        let waiting = std::mem::take(&mut self.waiting);
        for block in waiting[..n_whole].chunks_exact(self.block_in) {
            self.convert(block, u64::MAX, out)?;
        }
        self.waiting.extend_from_slice(&waiting[n_whole..]);
        Ok(())
    }

    /// The stream ends: append the rest. In all there are then as many samples as `n * to / from`, rounded up.
    ///
    /// # Errors
    /// As [`Resampler::push`].
    pub fn finish(&mut self, out: &mut Vec<f32>) -> Result<(), EncodeError> {
        let wanted = (self.n_in * self.to).div_ceil(self.from);
        let mut block = std::mem::take(&mut self.waiting);
        while self.n_out < wanted {
            block.resize(self.block_in, 0.0);
            self.convert(&block, wanted, out)?;
            block.clear();
        }
        Ok(())
    }

    /// One block through the filter, with no more than `limit` samples in all.
    fn convert(&mut self, block: &[f32], limit: u64, out: &mut Vec<f32>) -> Result<(), EncodeError> {
        let capacity = self.converted.len();
        let fault = |error: &dyn std::fmt::Display| EncodeError::library("resampler", error);
        let input = SequentialSlice::new(block, 1, block.len()).map_err(|error| fault(&error))?;
        let mut output =
            SequentialSlice::new_mut(&mut self.converted, 1, capacity).map_err(|error| fault(&error))?;
        let none: Option<&Indexing> = None;
        let (_, n_converted) = self
            .filter
            .process_into_buffer(&input, &mut output, none)
            .map_err(|error| fault(&error))?;
        let n_dropped = self.delay_left.min(n_converted);
        self.delay_left -= n_dropped;
        let left = usize::try_from(limit - self.n_out).unwrap_or(usize::MAX);
        let kept = &self.converted[n_dropped..n_converted];
        let kept = &kept[..kept.len().min(left)];
        self.n_out += kept.len() as u64;
        out.extend_from_slice(kept);
        Ok(())
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cut, rms, sine};

    fn resampled(from: u32, to: u32, chunks: &[&[f32]]) -> Vec<f32> {
        let mut resampler = Resampler::new(from, to).unwrap();
        let mut out = Vec::new();
        for chunk in chunks {
            resampler.push(chunk, &mut out).unwrap();
        }
        resampler.finish(&mut out).unwrap();
        out
    }

    #[test]
    fn how_a_stream_is_cut_changes_no_sample() {
        let samples = sine(440.0, 24_000, 7001);
        for to in [8_000, 16_000, 48_000, 44_100] {
            let whole = resampled(24_000, to, &[&samples]);
            assert_eq!(whole.len() as u64, (7001 * u64::from(to)).div_ceil(24_000));
            for sizes in [&[1][..], &[1920], &[7, 480, 481, 3, 1]] {
                assert_eq!(
                    resampled(24_000, to, &cut(&samples, sizes)),
                    whole,
                    "{to} {sizes:?}"
                );
            }
        }
    }

    /// A click where blocks meet, or a shift in time, would be a difference to the sine that was meant.
    #[test]
    fn a_tone_stays_the_tone_it_was_and_where_it_was() {
        let samples = sine(440.0, 24_000, 24_000);
        for to in [8_000, 16_000, 22_050, 48_000] {
            let out = resampled(24_000, to, &cut(&samples, &[1920]));
            let want = sine(440.0, to, out.len());
            let middle = out.len() / 10..out.len() * 9 / 10;
            let error: Vec<f32> = middle.clone().map(|i| out[i] - want[i]).collect();
            assert!(rms(&error) < 1e-3, "{to} Hz: an error of {}", rms(&error));
        }
    }

    #[test]
    fn what_the_lower_rate_cannot_carry_is_gone_and_does_not_fold_back() {
        let samples = sine(6_000.0, 24_000, 24_000);
        let out = resampled(24_000, 8_000, &[&samples]);
        assert!(rms(&out[800..7_200]) < 1e-3, "{}", rms(&out[800..7_200]));
    }

    #[test]
    fn short_and_empty_streams_have_their_length() {
        assert!(resampled(24_000, 48_000, &[]).is_empty());
        assert_eq!(resampled(24_000, 48_000, &[&[0.5]]).len(), 2);
        assert_eq!(resampled(24_000, 8_000, &[&[0.5; 4]]).len(), 2);
        assert!(Resampler::new(0, 8_000).is_err());
    }
}
