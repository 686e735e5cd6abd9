//! The codec worker's side of a split deployment: frames in, audio out.
//!
//! One task for each call, started by the service. It ends with the request, or when either half of the call
//! goes away; the request dies with it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use laneway_engine::{OutputEvent, PushError};
use laneway_proto::{ErrorCode, Failure, v1};
use tokio::sync::mpsc;
use tonic::Status;

use crate::backend::{Backend, FrameShape, Running};
use crate::failure;
use crate::meter;
use crate::output::{AudioMeter, Piece};
use crate::state::Place;
use crate::wire;

/// How long a caller may take to say what it wants decoded.
pub(crate) const HEADER_DEADLINE: Duration = Duration::from_secs(5);

/// Messages held for the caller before the request parks.
pub(crate) const RESPONSES_HELD: usize = 16;

/// How soon frames that found no room are offered again. Windows with no output (reference frames) free room too,
/// so an output event is not the only sign of it.
const RETRY_PUSH: Duration = Duration::from_millis(2);

/// What the caller sends, as a stream.
pub(crate) trait Inbound:
    Stream<Item = Result<v1::DecodeRequest, Status>> + Send + Unpin + 'static
{
}

impl<S: Stream<Item = Result<v1::DecodeRequest, Status>> + Send + Unpin + 'static> Inbound for S {}

/// The header that opens the call.
pub(crate) async fn header(inbound: &mut impl Inbound) -> Result<v1::DecodeHeader, Failure> {
    let first = tokio::time::timeout(HEADER_DEADLINE, inbound.next()).await;
    match first {
        Ok(Some(Ok(v1::DecodeRequest {
            message: Some(v1::decode_request::Message::Header(header)),
        }))) => Ok(header),
        Ok(Some(Ok(_))) => Err(Failure::of_field(
            ErrorCode::InvalidArgument,
            "header",
            "the first message is not a header",
        )),
        Ok(Some(Err(_)) | None) => Err(Failure::new(
            ErrorCode::Cancelled,
            "the call ended before its header",
        )),
        Err(_) => Err(Failure::new(ErrorCode::DeadlineExceeded, "no header came")),
    }
}

type Responses = mpsc::Sender<Result<v1::DecodeResponse, Status>>;

/// One decode call, until its end.
pub(crate) struct Decoding {
    pub(crate) id: String,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) shape: FrameShape,
    pub(crate) running: Running,
    pub(crate) place: Place,
    pub(crate) responses: Responses,
}

impl Decoding {
    pub(crate) async fn run(mut self, inbound: impl Inbound) {
        let end = self.relay(inbound).await;
        match &end {
            Ok(Some(finished)) => self.place.ended(finished.reason().label()),
            Ok(None) => {}
            Err(failure) => self.place.ended(failure.code.label()),
        }
        // The caller may be gone, which is its own affair.
        let _ = match end {
            Ok(Some(finished)) => Self::send(&self.responses, Piece::Finished(finished)).await,
            Ok(None) => Ok(()),
            Err(failure) => self.responses.send(Err(failure.into())).await.map_err(|_| Gone),
        };
        drop(self.place);
    }

    async fn send(responses: &Responses, piece: Piece) -> Result<(), Gone> {
        responses.send(Ok(piece.into())).await.map_err(|_| Gone)
    }

    /// `None`: the caller went away.
    async fn relay(&mut self, mut inbound: impl Inbound) -> Result<Option<v1::WorkerFinished>, Failure> {
        let mut meter = AudioMeter::new();
        let mut frames = Frames {
            next_index: 0,
            waiting: VecDeque::new(),
            end: End::Open,
        };
        let responses = self.responses.clone();
        loop {
            let all_pushed = frames.waiting.is_empty();
            // Room first: a request whose caller takes nothing parks in the engine.
            let next = async {
                let room = responses.reserve().await.map_err(|_| Gone)?;
                Ok::<_, Gone>((room, self.running.events.next().await))
            };
            tokio::select! {
                biased;
                () = responses.closed() => return Ok(None),
                next = next => match next {
                    Err(Gone) => return Ok(None),
                    Ok((room, event)) => match event {
                        Some(OutputEvent::Samples { samples, .. }) => {
                            room.send(Ok(Piece::Audio(meter.audio(&samples)).into()));
                        }
                        Some(OutputEvent::Finished { reason, stats }) => {
                            return Ok(Some(meter.finished(reason, &stats)));
                        }
                        Some(OutputEvent::Failed(failure)) => return Err(failure::of_engine(failure)),
                        Some(OutputEvent::Started { queued }) => {
                            meter::queued(queued);
                            room.send(Ok(Piece::Started(self.running.started()).into()));
                        }
                        Some(OutputEvent::Items { .. } | OutputEvent::Result { .. }) => {}
                        None => {
                            tracing::error!("an event stream ended without its terminal event");
                            return Err(Failure::internal());
                        }
                    },
                },
                // Whatever the engine has room for: frames that nobody reads would pile up in the connection that all
                // requests share, which gives up over many small messages. The sender keeps a window.
                message = inbound.next(), if frames.end == End::Open => match message {
                    Some(Ok(message)) => frames.take(message, self.shape, self.running.max_frames)?,
                    // A half-closed call without its end is a caller that died.
                    Some(Err(_)) | None => return Ok(None),
                },
                () = tokio::time::sleep(RETRY_PUSH), if !all_pushed => {}
            }
            frames.push(&*self.backend, &self.id)?;
        }
    }
}

/// The caller is gone.
struct Gone;

/// Frames on their way into the engine.
struct Frames {
    next_index: u32,
    /// Taken from the wire, not yet by the engine: at most the frames that the header announced.
    waiting: VecDeque<Arc<[i32]>>,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    /// No more frames come from the wire; the engine does not know yet.
    Came,
    Told,
}

impl Frames {
    fn take(
        &mut self,
        request: v1::DecodeRequest,
        shape: FrameShape,
        max_frames: u32,
    ) -> Result<(), Failure> {
        let invalid =
            |description: String| Failure::of_field(ErrorCode::InvalidArgument, "frames", description);
        match request.message {
            Some(v1::decode_request::Message::Frames(message)) => {
                let rows = wire::frames("frames", &message, self.next_index, shape)?;
                self.next_index += rows.len() as u32;
                if self.next_index > max_frames {
                    return Err(invalid(format!(
                        "more frames came than the {max_frames} that were announced"
                    )));
                }
                self.waiting.extend(rows);
                Ok(())
            }
            Some(v1::decode_request::Message::End(_)) => {
                self.end = End::Came;
                Ok(())
            }
            Some(v1::decode_request::Message::Header(_)) => Err(invalid("a second header came".into())),
            None => Err(invalid("a message of an unknown kind came".into())),
        }
    }

    fn push(&mut self, backend: &dyn Backend, id: &str) -> Result<(), Failure> {
        while let Some(frame) = self.waiting.front() {
            match backend.push_frames(id, std::slice::from_ref(frame)) {
                Ok(()) => drop(self.waiting.pop_front()),
                Err(PushError::Full { .. }) => return Ok(()),
                // It ended on its own; its terminal event says how.
                Err(PushError::UnknownRequest(_) | PushError::Closed(_)) => {
                    self.waiting.clear();
                    return Ok(());
                }
                Err(error @ PushError::ItemWords { .. }) => return Err(failure::of_push(error)),
            }
        }
        if self.end == End::Came {
            self.end = End::Told;
            // As above: a stream that is gone has said why.
            let _ = backend.end_frames(id);
        }
        Ok(())
    }
}
