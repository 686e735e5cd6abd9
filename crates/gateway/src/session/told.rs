//! What the caller of a session was told: its sentences, and its audio encoded and numbered as one stream.

use std::time::Duration;

use bytes::Bytes;
use laneway_audio::Encoding;
use laneway_proto::{Failure, micros, v1};
use tokio::time::Instant;

use crate::encode::Encoder;
use crate::facts::ModelFacts;
use crate::relay::not_encoded;
use crate::samples::Samples;

use super::shape::Speech;

/// Encodes and counts.
#[derive(Debug)]
pub(crate) struct Told {
    encoder: Encoder,
    arrived: Instant,
    sentences: u32,
    chunks: u32,
    /// Samples of the model that were encoded.
    model_samples: u64,
    /// Samples, as the caller counts them, that were encoded and never sent.
    taken_back: u64,
    prompt_positions: u32,
    /// An utterance ended at its budget.
    at_length: bool,
    first_audio: Option<Duration>,
    first_audible: Option<Duration>,
}

impl Told {
    /// Nothing yet, of a request that came at `arrived`.
    pub(crate) fn new(encoder: Encoder, arrived: Instant) -> Self {
        Self {
            encoder,
            arrived,
            sentences: 0,
            chunks: 0,
            model_samples: 0,
            taken_back: 0,
            prompt_positions: 0,
            at_length: false,
            first_audio: None,
            first_audible: None,
        }
    }

    /// Sentences that have begun.
    pub(crate) fn sentences(&self) -> u32 {
        self.sentences
    }

    /// Until its first audio.
    pub(crate) fn first_audio(&self) -> Option<Duration> {
        self.first_audio
    }

    /// Samples before the next chunk, as the caller counts them.
    pub(crate) fn samples(&self) -> u64 {
        self.encoder.n_samples().saturating_sub(self.taken_back)
    }

    /// Samples of the model so far.
    pub(crate) fn model_samples(&self) -> u64 {
        self.model_samples
    }

    /// How the caller is answered.
    pub(crate) fn audio(&self) -> laneway_audio::AudioSpec {
        self.encoder.spec()
    }

    /// A sentence whose audio follows.
    pub(crate) fn sentence(&mut self, text: String) -> v1::SentenceBegun {
        let begun = v1::SentenceBegun {
            index: self.sentences,
            sample_offset: self.samples(),
            text,
        };
        self.sentences += 1;
        begun
    }

    /// Audio of the model, as it came. None while a block fills.
    ///
    /// # Errors
    /// `Internal`.
    pub(crate) async fn chunk(&mut self, samples: Samples) -> Result<Option<v1::AudioChunk>, Failure> {
        let sample_offset = self.samples();
        self.model_samples += samples.len() as u64;
        let audio = self.encoder.chunk(samples).await;
        let audio = audio.map_err(|error| not_encoded(&error))?;
        self.first_audio.get_or_insert_with(|| self.arrived.elapsed());
        Ok(self.numbered(sample_offset, audio))
    }

    /// What was held back. Once, behind everything.
    ///
    /// # Errors
    /// `Internal`.
    pub(crate) async fn rest(&mut self) -> Result<Option<v1::AudioChunk>, Failure> {
        let sample_offset = self.samples();
        let audio = self.encoder.finish().await.map_err(|error| not_encoded(&error))?;
        Ok(self.numbered(sample_offset, audio))
    }

    fn numbered(&mut self, sample_offset: u64, audio: Bytes) -> Option<v1::AudioChunk> {
        (!audio.is_empty()).then(|| {
            self.chunks += 1;
            v1::AudioChunk {
                index: self.chunks - 1,
                sample_offset,
                audio,
            }
        })
    }

    /// Whether this can be left out of the stream: samples can, and parts of a container cannot.
    pub(crate) fn can_take_back(&self, speech: &Speech) -> bool {
        match (speech, self.encoder.spec().encoding) {
            (Speech::Sentence { .. }, _) | (_, Encoding::PcmS16le | Encoding::PcmF32le) => true,
            // Its header is in the first.
            (Speech::Chunk { index, .. }, Encoding::Wav) => *index > 0,
            (_, Encoding::Flac | Encoding::OggOpus | Encoding::Mp3) => false,
        }
    }

    /// It was not sent, nor was anything behind it.
    pub(crate) fn take_back(&mut self, speech: Speech) {
        match speech {
            Speech::Sentence { index } => self.sentences = self.sentences.min(index),
            Speech::Chunk { index, sample_offset } => {
                self.chunks = self.chunks.min(index);
                self.taken_back += self.samples().saturating_sub(sample_offset);
            }
        }
    }

    /// An utterance that was submitted at `submitted` ended.
    pub(crate) fn ended(&mut self, finished: &v1::SynthesisFinished, submitted: Instant) {
        self.prompt_positions = self.prompt_positions.max(finished.prompt_positions);
        self.at_length |= finished.reason() == v1::FinishReason::Length;
        if let (None, Some(timings)) = (self.first_audible, &finished.timings) {
            let before = submitted - self.arrived;
            self.first_audible = timings
                .first_audible_us
                .map(|us| before + Duration::from_micros(us));
        }
    }

    /// The budget of the whole stream is used up.
    pub(crate) fn at_length(&mut self) {
        self.at_length = true;
    }

    /// The last message.
    pub(crate) fn finished(&self, model: &ModelFacts, stopped: bool) -> v1::SynthesisFinished {
        let reason = match (stopped, self.at_length) {
            (true, _) => v1::FinishReason::Stopped,
            (false, true) => v1::FinishReason::Length,
            (false, false) => v1::FinishReason::Stop,
        };
        let frames = self.model_samples.div_ceil(u64::from(model.samples_per_frame));
        v1::SynthesisFinished {
            reason: reason.into(),
            frames: u32::try_from(frames).unwrap_or(u32::MAX),
            samples: self.samples(),
            seconds: self.samples() as f64 / f64::from(self.encoder.spec().sample_rate),
            timings: Some(v1::Timings {
                first_audio_us: self.first_audio.map_or(0, micros),
                first_audible_us: self.first_audible.map(micros),
                total_us: micros(self.arrived.elapsed()),
                ..Default::default()
            }),
            prompt_positions: self.prompt_positions,
        }
    }
}
