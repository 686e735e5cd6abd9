//! The Talker worker's side of a split deployment: frames go to the codec worker, its audio comes back.
//!
//! One task for each request, started by the service. It ends with the request, or when the caller, the engine
//! or the codec worker goes away; whatever of the request is left on either side dies with it.

use std::time::{Duration, Instant};

use futures::StreamExt;
use laneway_engine::node::FinishReason;
use laneway_engine::{OutputEvent, RequestStats};
use laneway_proto::v1::decode_request::Message;
use laneway_proto::v1::worker_client::WorkerClient;
use laneway_proto::{ErrorCode, Failure, frames_from_rows, samples_from_bytes, v1};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::backend::{FrameShape, Running};
use crate::failure;
use crate::meter;
use crate::output::{AudioMeter, Piece, finish_reason};
use crate::state::Place;
use crate::trace::Trace;

/// Messages on their way to the codec worker before the Talker parks.
const FRAMES_HELD: usize = 16;

/// Frames beyond the widest window that the codec worker is sent before their audio came back.
const FRAMES_AHEAD: u64 = 64;

/// How long the codec worker may take to answer a call that it has room for.
const OPEN_DEADLINE: Duration = Duration::from_secs(5);

/// One request whose codec is another worker's.
pub(crate) struct Relay {
    pub(crate) header: v1::DecodeHeader,
    pub(crate) shape: FrameShape,
    pub(crate) pace: Pace,
    pub(crate) running: Running,
    pub(crate) place: Place,
    pub(crate) deadline: Option<Instant>,
    pub(crate) peer: WorkerClient<Channel>,
    pub(crate) responses: Responses,
    pub(crate) trace: Trace,
}

/// How far the frames of a request may be ahead of its audio. The codec worker reads what it is sent whether its
/// engine has room or not, so this is what holds the Talker when the caller stops reading.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    samples_per_frame: u64,
    frames_ahead: u64,
}

impl Pace {
    pub(crate) fn new(facts: &v1::ModelFacts) -> Self {
        let widest = facts.limits.as_ref().map_or(0, |limits| limits.max_chunk_frames);
        Pace {
            samples_per_frame: u64::from(facts.samples_per_frame.max(1)),
            // No audio comes of less than a window.
            frames_ahead: u64::from(widest) + FRAMES_AHEAD,
        }
    }
}

impl Relay {
    pub(crate) async fn run(mut self) {
        if let Err(failure) = self.relay().await {
            self.place.ended(failure.code.label());
            // The caller may be gone, which is its own affair.
            let _ = self.responses.send(Err(failure.into())).await;
        }
        drop(self.place);
    }

    async fn relay(&mut self) -> Result<(), Failure> {
        let (to_peer, frames) = mpsc::channel(FRAMES_HELD);
        let header = v1::DecodeRequest {
            message: Some(Message::Header(self.header.clone())),
        };
        to_peer.try_send(header).expect("a fresh channel has room");
        let audio = self.open(frames).await?;

        let mut meter = Meter {
            audio: AudioMeter::new(),
            began: Instant::now(),
            first_output: None,
            heard: watch::Sender::new(0),
        };
        let heard = meter.heard.subscribe();
        let mut talker = None;
        let codec = {
            let forward = forward(
                &mut self.running,
                to_peer,
                self.shape,
                (self.pace, heard),
                &self.responses,
            );
            let collect = collect(audio, &self.responses, &mut meter);
            tokio::pin!(forward, collect);
            loop {
                tokio::select! {
                    biased;
                    () = self.responses.closed() => return Ok(()),
                    end = &mut forward, if talker.is_none() => talker = Some(end?),
                    finished = &mut collect => break finished?,
                }
            }
        };
        let Some((reason, mut stats)) = talker else {
            return Err(Failure::new(
                ErrorCode::WorkerLost,
                "the codec worker finished before the last frame",
            ));
        };
        if codec.frames != stats.items {
            tracing::error!(
                made = stats.items,
                decoded = codec.frames,
                "frames were lost on the way to the codec"
            );
            return Err(Failure::internal());
        }
        self.place.ended(finish_reason(reason).label());
        stats.first_output = meter.first_output;
        stats.total = meter.began.elapsed();
        send(
            &self.responses,
            Piece::Finished(meter.audio.finished(reason, &stats)),
        )
        .await
    }

    async fn open(
        &mut self,
        frames: mpsc::Receiver<v1::DecodeRequest>,
    ) -> Result<Streaming<v1::DecodeResponse>, Failure> {
        let mut request = tonic::Request::new(ReceiverStream::new(frames));
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        self.trace.inject(request.metadata_mut());
        match tokio::time::timeout(OPEN_DEADLINE, self.peer.decode(request)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(of_peer(status)),
            Err(_) => Err(Failure::new(
                ErrorCode::WorkerLost,
                "the codec worker does not answer",
            )),
        }
    }
}

type Responses = mpsc::Sender<Result<v1::WorkerSynthesizeResponse, Status>>;

struct Meter {
    audio: AudioMeter,
    began: Instant,
    first_output: Option<Duration>,
    /// Samples that were passed on.
    heard: watch::Sender<u64>,
}

async fn send(responses: &Responses, piece: Piece) -> Result<(), Failure> {
    let sent = responses.send(Ok(piece.into())).await;
    sent.map_err(|_| Failure::new(ErrorCode::Cancelled, "the caller went away"))
}

/// Pass frames on until the Talker's end, and tell the caller when its request's turn came.
async fn forward(
    running: &mut Running,
    to_peer: mpsc::Sender<v1::DecodeRequest>,
    shape: FrameShape,
    (pace, mut heard): (Pace, watch::Receiver<u64>),
    responses: &Responses,
) -> Result<(FinishReason, RequestStats), Failure> {
    let mut n_sent = 0;
    loop {
        let in_window = |samples: &u64| n_sent < samples / pace.samples_per_frame + pace.frames_ahead;
        if heard.wait_for(in_window).await.is_err() {
            // Nobody collects audio any more; how that ended ends the request.
            return std::future::pending().await;
        }
        // Room first: an event is taken from the engine only when it can be passed on, so a slow peer parks it.
        let Ok(room) = to_peer.reserve().await else {
            // The peer closed its half of the call; its answer says why.
            return std::future::pending().await;
        };
        match running.events.next().await {
            Some(OutputEvent::Items {
                first_item, items, ..
            }) => {
                n_sent += items.len() as u64;
                let frames = frames_from_rows(first_item, shape.words, &items);
                room.send(v1::DecodeRequest {
                    message: Some(Message::Frames(frames)),
                });
            }
            Some(OutputEvent::Finished { reason, stats }) => {
                room.send(v1::DecodeRequest {
                    message: Some(Message::End(v1::DecodeEnd {})),
                });
                return Ok((reason, stats));
            }
            Some(OutputEvent::Failed(failure)) => return Err(failure::of_engine(failure)),
            Some(OutputEvent::Started { queued }) => {
                meter::queued(queued);
                let started = Piece::Started(running.started());
                send(responses, started).await?;
            }
            Some(OutputEvent::Samples { .. } | OutputEvent::Result { .. }) => {}
            None => {
                tracing::error!("an event stream ended without its terminal event");
                return Err(Failure::internal());
            }
        }
    }
}

/// Hand audio to the caller until the codec's end.
async fn collect(
    mut from_peer: Streaming<v1::DecodeResponse>,
    responses: &Responses,
    meter: &mut Meter,
) -> Result<v1::WorkerFinished, Failure> {
    loop {
        let response = from_peer.message().await.map_err(of_peer)?;
        match response.and_then(|response| response.message) {
            Some(v1::decode_response::Message::Audio(audio)) => {
                meter.first_output.get_or_insert_with(|| meter.began.elapsed());
                let samples = samples_from_bytes(&audio.samples).map_err(|error| {
                    tracing::error!(%error, "the codec worker sent malformed audio");
                    Failure::internal()
                })?;
                send(responses, Piece::Audio(meter.audio.audio(&samples))).await?;
                meter.heard.send_modify(|heard| *heard += samples.len() as u64);
            }
            Some(v1::decode_response::Message::Finished(finished)) => return Ok(finished),
            Some(v1::decode_response::Message::Started(_)) => {}
            None => {
                return Err(Failure::new(
                    ErrorCode::WorkerLost,
                    "the codec worker ended early",
                ));
            }
        }
    }
}

/// What the codec worker's refusal or failure is to our caller. An argument that it refuses is our fault, not the
/// caller's.
fn of_peer(status: Status) -> Failure {
    let lost = |message: &str| Failure::new(ErrorCode::WorkerLost, message);
    match Failure::from_status(&status) {
        Some(failure)
            if matches!(
                failure.code,
                ErrorCode::Overloaded | ErrorCode::DeadlineExceeded | ErrorCode::Draining
            ) =>
        {
            failure
        }
        Some(failure) if matches!(failure.code, ErrorCode::WorkerLost | ErrorCode::NoWorker) => {
            lost("the codec worker cannot finish this request; try again")
        }
        None if status.code() == Code::DeadlineExceeded => Failure::new(
            ErrorCode::DeadlineExceeded,
            "the deadline passed before the end of the audio",
        ),
        None if matches!(
            status.code(),
            Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal
        ) =>
        {
            tracing::warn!(%status, "the codec worker went away");
            lost("the codec worker went away; try again")
        }
        _ => {
            tracing::error!(%status, "the codec worker refused a request of ours");
            Failure::internal()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(status: impl Into<Status>, wanted: ErrorCode) {
        assert_eq!(of_peer(status.into()).code, wanted);
    }

    #[test]
    fn a_peers_failure_reaches_the_caller_as_what_the_caller_can_act_on() {
        check(Failure::new(ErrorCode::Overloaded, "full"), ErrorCode::Overloaded);
        check(
            Failure::new(ErrorCode::WorkerLost, "stuck"),
            ErrorCode::WorkerLost,
        );
        check(
            Failure::new(ErrorCode::NoWorker, "loading"),
            ErrorCode::WorkerLost,
        );
        check(
            Failure::of_field(ErrorCode::InvalidArgument, "frames", "code 9999"),
            ErrorCode::Internal,
        );
        check(Status::unavailable("connection reset"), ErrorCode::WorkerLost);
        check(Status::unknown("transport error"), ErrorCode::WorkerLost);
        check(Status::deadline_exceeded("timeout"), ErrorCode::DeadlineExceeded);
    }
}
