//! One utterance of a session: a relay, and what came of it.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use laneway_audio::{AudioSpec, Encoding};
use laneway_proto::{ErrorCode, Failure, v1};
use tokio::time::Instant;
use tonic::Status;
use tonic::metadata::MetadataMap;
use tracing::Instrument as _;

use crate::admission::{Raiser, Signal, Ticket};
use crate::config::{LinkConfig, StreamConfig};
use crate::delivery::{Outgoing, delivery};
use crate::facts::ModelFacts;
use crate::relay::{self, Relay};
use crate::routing::{RETRY_AFTER, Router};
use crate::validate::Checked;

/// The session waits for the caller; an utterance waits for the session, which drops it when it is over.
const FOR_THE_SESSION: Duration = Duration::from_secs(365 * 24 * 3600);

/// Speaks utterances that differ in their text only.
#[derive(Debug)]
pub(crate) struct Voice {
    pub(crate) router: Router,
    pub(crate) stream: StreamConfig,
    pub(crate) link: LinkConfig,
    pub(crate) metadata: MetadataMap,
    /// When the session has to have ended.
    pub(crate) deadline: Option<Instant>,
    /// The request, whose text and seed are each utterance's own.
    pub(crate) request: Checked,
}

/// An utterance that a worker has, or should have.
#[derive(Debug)]
pub(crate) struct Utterance {
    pub(crate) text: String,
    index: u32,
    pub(crate) submitted: Instant,
    /// A worker took it into its queue.
    pub(crate) accepted: bool,
    /// The caller was told of it: its audio has begun.
    pub(crate) announced: bool,
    /// Until then it is tried again when there is no room.
    try_until: Instant,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Runs(Outgoing, Raiser),
    /// There was no room: again then.
    Waits(Instant),
    /// For good. Counts when its turn has come.
    Failed(Failure),
}

/// What happened to an utterance.
#[derive(Debug)]
pub(crate) enum News {
    /// Its stream went on, or ended.
    Message(Option<Result<v1::SynthesizeResponse, Status>>),
    /// It should be tried again.
    Again,
    /// It failed before its turn came.
    Failed(Failure),
}

/// What happens to the utterance whose audio is passed on. Never without one.
pub(crate) async fn news(utterance: &mut Option<Utterance>) -> News {
    let Some(utterance) = utterance else {
        return std::future::pending().await;
    };
    match &mut utterance.work {
        Work::Runs(outgoing, _) => News::Message(outgoing.next().await),
        Work::Waits(until) => {
            tokio::time::sleep_until(*until).await;
            News::Again
        }
        Work::Failed(failure) => News::Failed(failure.clone()),
    }
}

/// What happens to the next utterance until a worker has it. Its audio stays where it is, which holds up its worker
/// once there is enough of it.
pub(crate) async fn first_news(utterance: &mut Option<Utterance>) -> News {
    match utterance {
        Some(next) if !next.accepted && !matches!(next.work, Work::Failed(_)) => news(utterance).await,
        _ => std::future::pending().await,
    }
}

impl Voice {
    pub(crate) fn model(&self) -> &Arc<ModelFacts> {
        &self.request.model
    }

    pub(crate) fn seed(&self) -> u64 {
        self.request.wire.seed
    }

    /// Most frames of the whole session.
    pub(crate) fn max_frames(&self) -> Option<u32> {
        self.request.wire.max_frames
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Give `text` to a worker as the utterance of this index, of at most `max_frames` frames.
    pub(crate) fn begin(
        &self,
        text: String,
        index: u32,
        max_frames: Option<u32>,
        ticket: &Ticket,
    ) -> Utterance {
        let now = Instant::now();
        Utterance {
            work: self.work(&text, index, max_frames, ticket),
            text,
            index,
            submitted: now,
            accepted: false,
            announced: false,
            try_until: now + self.stream.queue,
        }
    }

    /// Give it to a worker once more.
    pub(crate) fn again(&self, utterance: &mut Utterance, max_frames: Option<u32>, ticket: &Ticket) {
        utterance.work = self.work(&utterance.text, utterance.index, max_frames, ticket);
    }

    fn work(&self, text: &str, index: u32, max_frames: Option<u32>, ticket: &Ticket) -> Work {
        let part = ticket.part();
        let raiser = part.raiser();
        let checked = Checked {
            id: ticket.id.clone(),
            model: self.request.model.clone(),
            // As the worker sends it: the session encodes all of its audio as one stream.
            audio: AudioSpec {
                encoding: Encoding::PcmF32le,
                sample_rate: self.request.model.sample_rate,
                speed: 1.0,
            },
            wire: v1::WorkerSynthesizeRequest {
                text: text.to_owned(),
                seed: self.request.wire.seed.wrapping_add(u64::from(index)),
                max_frames,
                ..self.request.wire.clone()
            },
            parts: Vec::new(),
        };
        let (out, outgoing) = delivery();
        let relay = Relay {
            ticket: part,
            router: self.router.clone(),
            stream: StreamConfig {
                caller: FOR_THE_SESSION,
                ..self.stream.clone()
            },
            link: self.link.clone(),
            arrived: Instant::now(),
            deadline: self.deadline,
            metadata: self.metadata.clone(),
            out,
        };
        tokio::spawn(relay::run(relay, checked).in_current_span());
        Work::Runs(outgoing, raiser)
    }
}

impl Utterance {
    /// It found no room: wait, and try again while there is time.
    ///
    /// # Errors
    /// The time is up, or it failed for another reason.
    pub(crate) fn retry(&mut self, failure: Failure) -> Result<(), Failure> {
        let again = Instant::now() + failure.retry_after.unwrap_or(RETRY_AFTER);
        let no_room = matches!(failure.code, ErrorCode::Overloaded | ErrorCode::NoWorker);
        if !no_room || again > self.try_until {
            return Err(failure);
        }
        self.work = Work::Waits(again);
        Ok(())
    }

    /// It will not be spoken.
    pub(crate) fn fail(&mut self, failure: Failure) {
        self.work = Work::Failed(failure);
    }

    /// Ask for a clean end. False when there is nothing that could end.
    pub(crate) fn stop(&mut self) -> bool {
        match &self.work {
            Work::Runs(_, raiser) => {
                raiser.raise(Signal::Stop);
                true
            }
            Work::Waits(_) | Work::Failed(_) => false,
        }
    }
}
