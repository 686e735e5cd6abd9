//! What of a stream has reached the caller, and when.

use std::time::Duration;

use laneway_proto::{micros, v1};
use laneway_telemetry::metric;
use tokio::time::Instant;

/// A sample that can be heard: about -46 dB of full scale.
const AUDIBLE: f32 = 0.005;

/// Counts samples and takes the times of one stream. While no audio came it counts as waiting.
#[derive(Debug)]
pub(crate) struct Progress {
    arrived: Instant,
    sample_rate: u32,
    samples: u64,
    first_audio: Option<Duration>,
    first_audible: Option<Duration>,
    last_chunk: Option<Instant>,
    /// Longest that a chunk came after what was there had been played.
    underrun: Duration,
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.begun() {
            metrics::histogram!(metric::GATEWAY_UNDERRUN).record(self.underrun);
        } else {
            metrics::gauge!(metric::GATEWAY_WAITING).decrement(1);
        }
    }
}

impl Progress {
    pub(crate) fn new(arrived: Instant, sample_rate: u32) -> Self {
        metrics::gauge!(metric::GATEWAY_WAITING).increment(1);
        Self {
            arrived,
            sample_rate,
            samples: 0,
            first_audio: None,
            first_audible: None,
            last_chunk: None,
            underrun: Duration::ZERO,
        }
    }

    /// Audio was passed on: from here on nothing can be retried.
    pub(crate) fn begun(&self) -> bool {
        self.first_audio.is_some()
    }

    /// Until the first audio was passed on.
    pub(crate) fn first_audio(&self) -> Option<Duration> {
        self.first_audio
    }

    /// Samples passed on.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// Take in a chunk that is passed on `now`.
    pub(crate) fn chunk(&mut self, mut samples: impl ExactSizeIterator<Item = f32>, now: Instant) {
        let n_samples = samples.len() as u64;
        let since = now - self.arrived;
        if self.first_audio.is_none() {
            self.first_audio = Some(since);
            metrics::gauge!(metric::GATEWAY_WAITING).decrement(1);
            metrics::histogram!(metric::GATEWAY_TTFA).record(since);
        }
        let due = self.heard_at(self.samples, Duration::ZERO);
        self.underrun = self.underrun.max(since.saturating_sub(due));
        if let Some(last) = self.last_chunk.replace(now) {
            metrics::histogram!(metric::GATEWAY_CHUNK_INTERVAL).record(now - last);
        }
        if self.first_audible.is_none()
            && let Some(index) = samples.position(|sample| sample.abs() >= AUDIBLE)
        {
            let audible = self.heard_at(self.samples + index as u64, since);
            self.first_audible = Some(audible);
            metrics::histogram!(metric::GATEWAY_TTFA_AUDIBLE).record(audible);
        }
        self.samples += n_samples;
        metrics::counter!(metric::GATEWAY_AUDIO_SAMPLES).increment(n_samples);
    }

    /// A listener who plays from the first chunk on hears a sample when its chunk is there and everything
    /// before it was played.
    fn heard_at(&self, sample: u64, chunk_there: Duration) -> Duration {
        let played = Duration::from_secs_f64(sample as f64 / f64::from(self.sample_rate));
        self.first_audio
            .map_or(chunk_there, |first| chunk_there.max(first + played))
    }

    /// As the caller is told when the stream ends `now`.
    pub(crate) fn timings(&self, now: Instant) -> v1::Timings {
        v1::Timings {
            first_audio_us: self.first_audio.map_or(0, micros),
            first_audible_us: self.first_audible.map(micros),
            total_us: micros(now - self.arrived),
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn silence_at_the_start_is_time_until_something_is_heard() {
        let arrived = Instant::now();
        let mut progress = Progress::new(arrived, 1000);
        assert!(!progress.begun());
        progress.chunk([0.0; 100].into_iter(), arrived + 50 * MS);
        let mut second = [0.0; 100];
        second[30] = -0.5;
        progress.chunk(second.into_iter(), arrived + 70 * MS);
        let timings = progress.timings(arrived + 90 * MS);
        assert_eq!(timings.first_audio_us, 50_000);
        assert_eq!(
            timings.first_audible_us,
            Some(180_000),
            "it plays behind 130 ms of audio"
        );
        assert_eq!(timings.total_us, 90_000);
        assert_eq!(progress.samples(), 200);
    }

    #[test]
    fn a_late_chunk_is_heard_when_it_comes() {
        let arrived = Instant::now();
        let mut progress = Progress::new(arrived, 1000);
        progress.chunk([0.0; 10].into_iter(), arrived);
        progress.chunk([1.0; 10].into_iter(), arrived + 500 * MS);
        assert_eq!(progress.timings(arrived).first_audible_us, Some(500_000));
        assert_eq!(progress.underrun, 490 * MS, "10 ms of sound were there");
    }

    #[test]
    fn a_stream_without_sound_has_no_audible_time() {
        let arrived = Instant::now();
        let progress = Progress::new(arrived, 1000);
        assert_eq!(progress.timings(arrived).first_audible_us, None);
    }
}
