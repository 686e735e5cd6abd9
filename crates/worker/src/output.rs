//! A request's events as the messages of its response stream.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures::Stream;
use laneway_engine::node::FinishReason;
use laneway_engine::{OutputEvent, RequestStats};
use laneway_proto::{Failure, micros, samples_to_bytes, v1};
use tonic::Status;

use crate::backend::{Events, Running};
use crate::failure;
use crate::meter;
use crate::state::Place;

/// Samples quieter than this cannot be heard (−40 dBFS).
const AUDIBLE: f32 = 0.01;

/// What both response streams of a worker are made of.
#[derive(Debug)]
pub(crate) enum Piece {
    Started(v1::WorkerStarted),
    Audio(v1::WorkerAudio),
    Finished(v1::WorkerFinished),
}

impl From<Piece> for v1::WorkerSynthesizeResponse {
    fn from(piece: Piece) -> Self {
        use v1::worker_synthesize_response::Event;
        let event = match piece {
            Piece::Started(started) => Event::Started(started),
            Piece::Audio(audio) => Event::Audio(audio),
            Piece::Finished(finished) => Event::Finished(finished),
        };
        Self { event: Some(event) }
    }
}

impl From<Piece> for v1::DecodeResponse {
    fn from(piece: Piece) -> Self {
        use v1::decode_response::Message;
        let message = match piece {
            Piece::Started(started) => Message::Started(started),
            Piece::Audio(audio) => Message::Audio(audio),
            Piece::Finished(finished) => Message::Finished(finished),
        };
        Self {
            message: Some(message),
        }
    }
}

/// Counts the samples of a stream and finds the first that can be heard.
#[derive(Debug)]
pub(crate) struct AudioMeter {
    began: Instant,
    n_samples: u64,
    first_audible: Option<Duration>,
}

impl AudioMeter {
    pub(crate) fn new() -> Self {
        AudioMeter {
            began: Instant::now(),
            n_samples: 0,
            first_audible: None,
        }
    }

    pub(crate) fn audio(&mut self, samples: &[f32]) -> v1::WorkerAudio {
        let sample_offset = self.n_samples;
        self.n_samples += samples.len() as u64;
        if self.first_audible.is_none() && samples.iter().any(|sample| sample.abs() > AUDIBLE) {
            self.first_audible = Some(self.began.elapsed());
        }
        v1::WorkerAudio {
            sample_offset,
            samples: samples_to_bytes(samples),
        }
    }

    pub(crate) fn finished(&self, reason: FinishReason, stats: &RequestStats) -> v1::WorkerFinished {
        let or_total = |at: Option<Duration>| micros(at.unwrap_or(stats.total));
        v1::WorkerFinished {
            reason: finish_reason(reason).into(),
            frames: stats.items,
            samples: self.n_samples,
            timings: Some(v1::Timings {
                queue_us: micros(stats.queued),
                first_frame_us: or_total(stats.first_item),
                first_audio_us: or_total(stats.first_output),
                first_audible_us: self.first_audible.map(micros),
                total_us: micros(stats.total),
            }),
        }
    }
}

pub(crate) fn finish_reason(reason: FinishReason) -> v1::FinishReason {
    match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
        FinishReason::Stopped => v1::FinishReason::Stopped,
    }
}

/// The response stream of a request whose audio is made in this worker. It holds the request: dropping it is a
/// kill, and frees the request's place.
pub(crate) struct LocalStream {
    started: v1::WorkerStarted,
    events: Option<Events>,
    meter: AudioMeter,
    place: Place,
}

impl LocalStream {
    pub(crate) fn new(running: Running, place: Place) -> Self {
        LocalStream {
            started: running.started(),
            events: Some(running.events),
            meter: AudioMeter::new(),
            place,
        }
    }

    fn piece(&mut self, event: OutputEvent) -> Option<Result<Piece, Failure>> {
        match event {
            OutputEvent::Samples { samples, .. } => Some(Ok(Piece::Audio(self.meter.audio(&samples)))),
            OutputEvent::Finished { reason, stats } => {
                self.events = None;
                self.place.ended(finish_reason(reason).label());
                Some(Ok(Piece::Finished(self.meter.finished(reason, &stats))))
            }
            OutputEvent::Failed(failure) => {
                self.events = None;
                let failure = failure::of_engine(failure);
                self.place.ended(failure.code.label());
                Some(Err(failure))
            }
            OutputEvent::Started { queued } => {
                meter::queued(queued);
                Some(Ok(Piece::Started(self.started)))
            }
            // Nobody outside this worker waits for these.
            OutputEvent::Items { .. } | OutputEvent::Result { .. } => None,
        }
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Piece, Failure>>> {
        loop {
            let Some(events) = &mut self.events else {
                return Poll::Ready(None);
            };
            let Some(event) = ready!(events.as_mut().poll_next(context)) else {
                self.events = None;
                tracing::error!("an event stream ended without its terminal event");
                return Poll::Ready(Some(Err(Failure::internal())));
            };
            if let Some(piece) = self.piece(event) {
                return Poll::Ready(Some(piece));
            }
        }
    }
}

impl Stream for LocalStream {
    type Item = Result<v1::WorkerSynthesizeResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let piece = ready!(self.poll_piece(context));
        Poll::Ready(piece.map(|piece| piece.map(Into::into).map_err(Into::into)))
    }
}
