//! The audio of one request.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream};
use laneway_proto::{samples_to_bytes, v1};
use tokio::time::Instant;
use tonic::Status;
use v1::worker_synthesize_response::Event;

use super::service::{Ending, Place};
use super::{SAMPLE_RATE, SAMPLES_PER_FRAME, Speech};
use crate::stamp;

/// Level of the hum: it can be heard.
const LEVEL: f32 = 0.1;

/// Hz of the hum.
const PITCH: f32 = 120.0;

/// What is still to come of a stream.
struct Voice {
    place: Arc<Place>,
    speech: Speech,
    /// Frames in all.
    frames: u32,
    /// Frames that were handed over.
    made: u32,
    /// When the next chunk is made.
    due: Instant,
    part: Part,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Start,
    Audio,
    End,
}

/// A stream of `frames` frames. Each chunk is made as the transport asks for it, not before its time.
pub(super) fn speak(
    place: Place,
    speech: Speech,
    frames: u32,
) -> impl Stream<Item = Result<v1::WorkerSynthesizeResponse, Status>> {
    let voice = Voice {
        place: Arc::new(place),
        speech,
        frames,
        made: 0,
        due: Instant::now() + Duration::from_millis(speech.first_chunk_ms),
        part: Part::Start,
    };
    stream::unfold(voice, async |mut voice| {
        let item = voice.next().await?;
        let message = item.map(|event| v1::WorkerSynthesizeResponse { event: Some(event) });
        Some((message, voice))
    })
}

impl Voice {
    async fn next(&mut self) -> Option<Result<Event, Status>> {
        match self.part {
            Part::Start => {
                self.part = Part::Audio;
                Some(Ok(Event::Started(v1::WorkerStarted {
                    max_frames: self.frames,
                    prompt_positions: 1,
                })))
            }
            Part::Audio => Some(self.audio().await),
            Part::End => None,
        }
    }

    async fn audio(&mut self) -> Result<Event, Status> {
        let ending = if self.made == self.frames {
            Some(Ending::Done)
        } else {
            let place = self.place.clone();
            tokio::select! {
                biased;
                ending = place.told_to_end() => Some(ending),
                () = tokio::time::sleep_until(self.due) => None,
            }
        };
        let reason = match ending {
            None => return Ok(self.chunk()),
            Some(Ending::Done) => v1::FinishReason::Length,
            Some(Ending::Stop) => v1::FinishReason::Stopped,
            Some(Ending::Kill) => {
                self.part = Part::End;
                return Err(laneway_proto::Failure::new(
                    laneway_proto::ErrorCode::Cancelled,
                    "it was killed",
                )
                .into());
            }
        };
        self.part = Part::End;
        Ok(Event::Finished(v1::WorkerFinished {
            reason: reason.into(),
            frames: self.made,
            samples: self.n_samples(),
            timings: None,
        }))
    }

    fn chunk(&mut self) -> Event {
        let frames = self.speech.chunk_frames.min(self.frames - self.made);
        let sample_offset = self.n_samples();
        let mut samples: Vec<f32> = (0..frames * SAMPLES_PER_FRAME).map(hum).collect();
        self.made += frames;
        self.due += Duration::from_millis(self.speech.chunk_ms);
        // As late as can be: nothing of this worker's own work is in what a listener measures.
        samples[..stamp::SAMPLES].copy_from_slice(&stamp::samples(stamp::now_ns()));
        Event::Audio(v1::WorkerAudio {
            sample_offset,
            samples: samples_to_bytes(&samples),
        })
    }

    fn n_samples(&self) -> u64 {
        u64::from(self.made) * u64::from(SAMPLES_PER_FRAME)
    }
}

/// A triangle wave: a hum that costs no sine.
fn hum(index: u32) -> f32 {
    let period = SAMPLE_RATE as f32 / PITCH;
    let phase = (index as f32 / period).fract();
    LEVEL * (4.0 * (phase - 0.5).abs() - 1.0)
}
