//! What a session says, in the messages of each call that is answered by one.

use laneway_proto::v1;
use v1::stream_synthesize_response::Event as StreamEvent;
use v1::synthesize_response::Event;

use crate::delivery::Message;

/// One thing that a session says to its caller.
#[derive(Debug)]
pub(crate) enum Said {
    Accepted(v1::Accepted),
    Sentence(v1::SentenceBegun),
    Chunk(v1::AudioChunk),
    Cancelled(v1::UtteranceCancelled),
    Finished(v1::SynthesisFinished),
}

/// The part of what is said that a cancel takes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speech {
    Sentence { index: u32 },
    Chunk { index: u32, sample_offset: u64 },
}

impl Speech {
    fn of_chunk(chunk: &v1::AudioChunk) -> Self {
        Self::Chunk {
            index: chunk.index,
            sample_offset: chunk.sample_offset,
        }
    }
}

impl Said {
    /// It answers a command, of which the caller may send no more until it has room for this.
    pub(crate) fn is_answer(&self) -> bool {
        matches!(self, Said::Cancelled(_))
    }

    pub(crate) fn speech(&self) -> Option<Speech> {
        match self {
            Said::Sentence(sentence) => Some(Speech::Sentence {
                index: sentence.index,
            }),
            Said::Chunk(chunk) => Some(Speech::of_chunk(chunk)),
            Said::Accepted(_) | Said::Cancelled(_) | Said::Finished(_) => None,
        }
    }
}

/// Messages of a call that a session answers.
pub(crate) trait Shape: Message + Sized {
    /// As this call says it. None for what it has no word for.
    fn of(said: Said) -> Option<Self>;

    /// What a cancel takes back of it.
    fn speech(&self) -> Option<Speech>;
}

impl Shape for v1::SynthesizeResponse {
    fn of(said: Said) -> Option<Self> {
        let event = match said {
            Said::Accepted(accepted) => Event::Accepted(accepted),
            Said::Chunk(chunk) => Event::Chunk(chunk),
            Said::Finished(finished) => Event::Finished(finished),
            Said::Sentence(_) | Said::Cancelled(_) => return None,
        };
        Some(Self { event: Some(event) })
    }

    fn speech(&self) -> Option<Speech> {
        match &self.event {
            Some(Event::Chunk(chunk)) => Some(Speech::of_chunk(chunk)),
            _ => None,
        }
    }
}

impl Message for v1::StreamSynthesizeResponse {
    fn audio_bytes(&self) -> usize {
        match &self.event {
            Some(StreamEvent::Chunk(chunk)) => chunk.audio.len(),
            _ => 0,
        }
    }
}

impl Shape for v1::StreamSynthesizeResponse {
    fn of(said: Said) -> Option<Self> {
        let event = match said {
            Said::Accepted(accepted) => StreamEvent::Accepted(accepted),
            Said::Sentence(sentence) => StreamEvent::Sentence(sentence),
            Said::Chunk(chunk) => StreamEvent::Chunk(chunk),
            Said::Cancelled(cancelled) => StreamEvent::Cancelled(cancelled),
            Said::Finished(finished) => StreamEvent::Finished(finished),
        };
        Some(Self { event: Some(event) })
    }

    fn speech(&self) -> Option<Speech> {
        match &self.event {
            Some(StreamEvent::Sentence(sentence)) => Some(Speech::Sentence {
                index: sentence.index,
            }),
            Some(StreamEvent::Chunk(chunk)) => Some(Speech::of_chunk(chunk)),
            _ => None,
        }
    }
}
