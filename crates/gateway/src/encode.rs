//! Samples as the caller asked for them, off the threads that others wait for.

use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use laneway_audio::{AudioEncoder, AudioSpec, EncodeError, Encoding};
use laneway_proto::v1;
use laneway_telemetry::stage;
use tracing::Span;

use crate::samples::Samples;

/// Formats that are served, by their name on the wire.
pub(crate) const FORMATS: [(v1::AudioFormat, Encoding); 6] = [
    (v1::AudioFormat::PcmS16le, Encoding::PcmS16le),
    (v1::AudioFormat::PcmF32le, Encoding::PcmF32le),
    (v1::AudioFormat::Wav, Encoding::Wav),
    (v1::AudioFormat::Opus, Encoding::OggOpus),
    (v1::AudioFormat::Flac, Encoding::Flac),
    (v1::AudioFormat::Mp3, Encoding::Mp3),
];

/// Rates that are served beside the model's own, in Hz.
pub(crate) const SAMPLE_RATES: [u32; 6] = [8_000, 16_000, 22_050, 24_000, 44_100, 48_000];

/// The name of an encoding on the wire.
pub(crate) fn wire_format(encoding: Encoding) -> v1::AudioFormat {
    FORMATS
        .iter()
        .find(|(_, each)| *each == encoding)
        .map_or(v1::AudioFormat::Unspecified, |(format, _)| *format)
}

/// Encodes one stream.
#[derive(Debug)]
pub(crate) struct Encoder {
    spec: AudioSpec,
    /// Away while a chunk is encoded; gone when that failed.
    state: Option<AudioEncoder>,
    work: Work,
}

/// The stage of a request that this is, told when it is over.
#[derive(Debug)]
struct Work {
    request: Span,
    began: Option<SystemTime>,
    ended: SystemTime,
    /// Of that time, what was worked and not waited.
    busy: Duration,
}

impl Work {
    fn begins(&mut self) -> Instant {
        self.began.get_or_insert_with(SystemTime::now);
        Instant::now()
    }

    fn ends(&mut self, began: Instant) {
        self.busy += began.elapsed();
        self.ended = SystemTime::now();
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some(began) = self.began {
            let busy = i64::try_from(self.busy.as_micros()).unwrap_or(i64::MAX);
            stage::record(
                &self.request,
                stage::ENCODE,
                (began, self.ended),
                &[("busy_us", busy)],
            );
        }
    }
}

/// Samples or the end of them.
enum Input {
    Samples(Samples),
    End,
}

impl Encoder {
    /// For samples of `input_rate` Hz.
    ///
    /// # Errors
    /// As [`AudioEncoder::new`].
    pub(crate) fn new(spec: AudioSpec, input_rate: u32) -> Result<Self, EncodeError> {
        Ok(Self {
            spec,
            state: Some(AudioEncoder::new(spec, input_rate)?),
            work: Work {
                request: Span::current(),
                began: None,
                ended: SystemTime::now(),
                busy: Duration::ZERO,
            },
        })
    }

    pub(crate) fn spec(&self) -> AudioSpec {
        self.spec
    }

    /// Samples so far, at the rate asked for.
    pub(crate) fn n_samples(&self) -> u64 {
        self.state.as_ref().map_or(0, AudioEncoder::n_samples)
    }

    /// The next chunk, which may be empty while a block fills. Floats that nothing changes go through uncopied;
    /// everything else is written once, from where the samples lie.
    ///
    /// # Errors
    /// A library failed, which is a fault of ours.
    pub(crate) async fn chunk(&mut self, samples: Samples) -> Result<Bytes, EncodeError> {
        if let Some(state) = self.state.as_mut().filter(|state| state.passes_through()) {
            state.passed(samples.len());
            return Ok(samples.into_bytes());
        }
        self.run(Input::Samples(samples)).await
    }

    /// What was held back, and what a stream without any audio still has to carry to be a file.
    ///
    /// # Errors
    /// As [`Encoder::chunk`].
    pub(crate) async fn finish(&mut self) -> Result<Bytes, EncodeError> {
        self.run(Input::End).await
    }

    async fn run(&mut self, input: Input) -> Result<Bytes, EncodeError> {
        let mut state = self.state.take().ok_or_else(|| lost("it failed before"))?;
        if state.passes_through() {
            // There is nothing to encode, nor to tell of.
            let mut out = Vec::new();
            state.finish(&mut out)?;
            self.state = Some(state);
            return Ok(out.into());
        }
        let began = self.work.begins();
        let heavy = self.spec.encoding.is_compressed() || self.spec.speed != 1.0;
        let work = move || {
            let mut out = Vec::new();
            match input {
                Input::Samples(samples) => state.push_le(samples.little_endian(), &mut out),
                Input::End => state.finish(&mut out),
            }?;
            Ok((state, out))
        };
        // A second of audio takes milliseconds to compress: others wait for this thread.
        let done = match heavy {
            true => tokio::task::spawn_blocking(work).await.map_err(lost)?,
            false => work(),
        };
        let (state, out) = done?;
        self.state = Some(state);
        self.work.ends(began);
        Ok(out.into())
    }
}

fn lost(problem: impl std::fmt::Display) -> EncodeError {
    EncodeError::Library {
        library: "encoder",
        problem: problem.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_proto::samples_to_bytes;

    async fn encoded(encoding: Encoding) -> Vec<Bytes> {
        let spec = AudioSpec {
            encoding,
            sample_rate: 24_000,
            speed: 1.0,
        };
        let mut encoder = Encoder::new(spec, 24_000).unwrap();
        let mut chunks = Vec::new();
        for samples in [[0.0, 1.0], [-1.0, 0.5]] {
            let samples = Samples::new(samples_to_bytes(&samples)).unwrap();
            chunks.push(encoder.chunk(samples).await.unwrap());
        }
        assert_eq!(encoder.n_samples(), 4);
        chunks.push(encoder.finish().await.unwrap());
        chunks
    }

    #[tokio::test]
    async fn bytes_are_in_the_format_asked_for() {
        let pcm = encoded(Encoding::PcmS16le).await;
        assert_eq!(pcm[0][..], [0, 0, 0xff, 0x7f]);
        assert_eq!(
            encoded(Encoding::PcmF32le).await[1],
            samples_to_bytes(&[-1.0, 0.5])
        );
        let wav = encoded(Encoding::Wav).await;
        assert_eq!(wav[0][..4], *b"RIFF");
        assert_eq!(wav[0][44..], pcm[0][..]);
        assert_eq!(wav[1], pcm[1], "the header is sent once");
        assert!(wav[2].is_empty());
        for (encoding, magic) in [(Encoding::Flac, b"fLaC"), (Encoding::OggOpus, b"OggS")] {
            assert_eq!(encoded(encoding).await.concat()[..4], *magic);
        }
        let mp3 = encoded(Encoding::Mp3).await.concat();
        assert_eq!(
            (mp3[0], mp3[1] & 0xe0),
            (0xff, 0xe0),
            "a frame starts with its sync word"
        );
    }

    /// What a chunk of so many samples becomes, and where it lies.
    async fn chunk_of(encoding: Encoding, samples: &Bytes) -> Bytes {
        let spec = AudioSpec {
            encoding,
            sample_rate: 24_000,
            speed: 1.0,
        };
        let mut encoder = Encoder::new(spec, 24_000).unwrap();
        let samples = Samples::new(samples.clone()).unwrap();
        encoder.chunk(samples).await.unwrap()
    }

    #[tokio::test]
    async fn audio_is_copied_once_at_most() {
        // Not at the start of its buffer, as a message's bytes never are.
        let buffer = Bytes::from(vec![0; 4 * 1920 + 1]);
        let samples = buffer.slice(1..);
        let floats = chunk_of(Encoding::PcmF32le, &samples).await;
        assert_eq!(
            floats.as_ptr(),
            samples.as_ptr(),
            "they are passed on where they lie"
        );
        for encoding in [Encoding::PcmS16le, Encoding::Wav] {
            let s16 = chunk_of(encoding, &samples).await;
            let n_bytes = s16.len();
            let written = s16.try_into_mut().unwrap();
            assert_eq!(
                (written.len(), written.capacity()),
                (n_bytes, n_bytes),
                "{encoding:?} is written once, into as much as it takes"
            );
        }
    }

    #[test]
    fn every_format_of_the_wire_is_served() {
        for format in 1..=6 {
            let format = v1::AudioFormat::try_from(format).unwrap();
            let (_, encoding) = FORMATS.iter().find(|(each, _)| *each == format).unwrap();
            assert_eq!(wire_format(*encoding), format);
        }
        assert!(
            v1::AudioFormat::try_from(7).is_err(),
            "a new one belongs here too"
        );
    }
}
