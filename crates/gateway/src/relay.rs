//! One admitted request from its ticket to its last message.
//!
//! Owns: the ticket, the worker's stream and the relay's half of the delivery to the caller. `speech` spawns one
//! relay for each request. The worker's part ends on the last message, a failure, the deadline, a cancel or the
//! caller leaving, whichever is first, and dropping the worker's stream kills what is left of the work there. The
//! relay itself ends when the caller has taken everything, left, or took nothing for too long: then permit and id
//! are free.

mod cut;

use std::time::Duration;

use bytes::Bytes;
use laneway_audio::EncodeError;
use laneway_proto::{ErrorCode, Failure, RequestId, WorkerId, v1};
use laneway_telemetry::{metric, propagation};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status, Streaming};
use tracing::Instrument as _;
use v1::synthesize_response::Event as Sent;
use v1::worker_synthesize_response::Event as Received;

use crate::access;
use crate::admission::{Signal, Ticket};
use crate::config::{LinkConfig, StreamConfig};
use crate::delivery::{Delivery, Last, Message, Taken};
use crate::encode::{Encoder, wire_format};
use crate::progress::Progress;
use crate::routing::{Assignment, RETRY_AFTER, Router, overloaded};
use crate::samples::Samples;
use crate::validate::Checked;

pub(crate) use cut::{cut, sleep_until};

/// Most times that one request is tried: one that brings its worker down must not bring them all down.
const MAX_ATTEMPTS: usize = 3;

/// First and longest pause before a lost worker's replacement is looked for; it doubles in between.
const REPLACEMENT_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));

/// How much later than the caller's the worker's deadline is, so that which one ends a stream is not a race.
const DEADLINE_GRACE: Duration = Duration::from_millis(50);

/// Times that a stop is sent to a worker which does not answer.
const STOP_ATTEMPTS: usize = 3;

/// Bytes of a caller's id that a worker is told: with the attempt's own part no more than an id may have.
const SHOWN_ID_BYTES: usize = 119;

/// How long a worker may take to close a stream behind its last message.
const CLOSING: Duration = Duration::from_millis(100);

/// What a relay needs beside the request.
#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) ticket: Ticket,
    pub(crate) router: Router,
    pub(crate) stream: StreamConfig,
    pub(crate) link: LinkConfig,
    /// When the request arrived.
    pub(crate) arrived: Instant,
    /// When it has to have ended.
    pub(crate) deadline: Option<Instant>,
    /// Metadata that the caller sent.
    pub(crate) metadata: MetadataMap,
    /// To the caller.
    pub(crate) out: Delivery,
}

/// What ends a relay other than its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// The caller left.
    Gone,
    /// The caller's deadline passed.
    Deadline,
    /// A cancel or the drain.
    Signal(Signal),
    /// The wait ran out.
    Patience,
}

/// How an attempt on one worker failed.
#[derive(Debug)]
enum Failed {
    /// Another worker may do better, if nothing was heard yet.
    Elsewhere(Failure),
    /// No worker would do better.
    Here(Failure),
    /// No worker has to do with it.
    Ours(Failure),
    /// Not the worker's doing.
    Interrupted(Interrupt),
}

/// What an attempt says of its worker. A refusal in its own words says that it is well.
fn judge(assignment: &Assignment, outcome: &Result<v1::SynthesizeResponse, Failed>) {
    match outcome {
        Err(Failed::Here(failure) | Failed::Elsewhere(failure)) => match failure.code {
            ErrorCode::Internal | ErrorCode::WorkerLost => assignment.link.failed(),
            _ => {}
        },
        Err(Failed::Ours(_) | Failed::Interrupted(_)) => {}
        Ok(_) => assignment.link.worked(),
    }
}

/// How the worker's part of a stream ended.
#[derive(Debug)]
pub(crate) enum Ended<M = v1::SynthesizeResponse> {
    /// With this last message.
    Well(M),
    /// What was made is still delivered.
    Failed(Failure),
    /// What was not taken yet is dropped.
    Cut(Failure),
}

/// Run a request to its end, and say how it was. `None`: it could not begin, and its caller is told so.
pub(crate) async fn run(relay: Relay, checked: Checked) -> Option<access::Ended> {
    let encoder = match Encoder::new(checked.audio, checked.model.sample_rate) {
        Ok(encoder) => encoder,
        Err(error) => {
            // It was validated. Dropping the delivery tells the caller of an internal error.
            tracing::error!(%error, "no encoder for a request that was validated");
            return None;
        }
    };
    let mut state = State {
        deadline: relay.deadline,
        encoder,
        n_chunks: 0,
        progress: Progress::new(relay.arrived, checked.model.sample_rate),
        accepted: false,
        taken: false,
        prompt_positions: 0,
        checked,
        relay,
    };
    let ended = state.route().await;
    let (samples, first_audio) = (state.encoder.n_samples(), state.progress.first_audio());
    let State { relay, deadline, .. } = state;
    let key = relay.ticket.key.clone();
    let outcome = deliver(relay.ticket, relay.out, relay.stream.caller, deadline, ended).await;
    let label = outcome.map_or_else(ErrorCode::label, |()| "ok");
    metrics::counter!(metric::GATEWAY_REQUESTS, "outcome" => label, "key" => key.label()).increment(1);
    Some(access::Ended {
        outcome,
        key,
        samples,
        first_audio,
        total: relay.arrived.elapsed(),
    })
}

/// Hand over the end, behind what waits, and wait until it was taken, for at most `caller` between two messages.
///
/// # Errors
/// What the caller was told, or would have been.
pub(crate) async fn deliver<M: Message>(
    ticket: Ticket,
    mut out: Delivery<M>,
    caller: Duration,
    deadline: Option<Instant>,
    ended: Ended<M>,
) -> Result<(), ErrorCode> {
    let mut signal = ticket.signal.clone();
    let (last, outcome) = match ended {
        Ended::Cut(failure) => {
            let code = failure.code;
            // Before the status can be seen: a caller who goes on at once finds its place free.
            drop(ticket);
            out.give_up(failure.into());
            return Err(code);
        }
        Ended::Well(message) => (Last::Message(message), Ok(())),
        Ended::Failed(failure) => (Last::Status(failure.clone().into()), Err(failure.code)),
    };
    out.end(last, Some(ticket));
    loop {
        let interrupt = tokio::select! {
            biased;
            taken = out.taken() => match taken {
                Ok(Taken::More) => continue,
                Ok(Taken::End) => return outcome,
                Err(_) => Interrupt::Gone,
            },
            // When the ticket is gone, so is the end.
            Ok(raised) = signal.wait_for(|signal| *signal > Signal::Stop) => Interrupt::Signal(*raised),
            () = sleep_until(deadline) => Interrupt::Deadline,
            () = tokio::time::sleep(caller) => Interrupt::Patience,
        };
        let failure = cut(interrupt);
        let code = failure.code;
        out.give_up(failure.into());
        return outcome.and(Err(code));
    }
}

struct State {
    relay: Relay,
    checked: Checked,
    deadline: Option<Instant>,
    encoder: Encoder,
    /// Chunks that the caller was sent: fewer than came while the encoder holds samples back.
    n_chunks: u32,
    progress: Progress,
    /// `Accepted` was sent.
    accepted: bool,
    /// The worker of the last attempt took the request.
    taken: bool,
    /// As the worker said when it began; 0 before.
    prompt_positions: u32,
}

impl State {
    async fn route(&mut self) -> Ended {
        let mut tried: Vec<WorkerId> = Vec::new();
        let mut last: Option<Failure> = None;
        let mut n_attempts = 0;
        let mut replace_by: Option<Instant> = None;
        loop {
            let picked = self.relay.router.pick(&self.checked.model.name, &tried);
            let assignment = match (picked, last.take()) {
                (Ok(assignment), _) => assignment,
                (Err(_), Some(failure)) if failure.code == ErrorCode::WorkerLost => {
                    let wait = self.relay.stream.replacement;
                    let until = *replace_by.get_or_insert_with(|| Instant::now() + wait);
                    match self.replaced(until).await {
                        Ok(Some(assignment)) => assignment,
                        Ok(None) => return Ended::Failed(failure),
                        Err(interrupt) => return self.interrupted(interrupt).await,
                    }
                }
                // Why the last worker failed says more than that there is no other.
                (Err(failure), None) | (Err(_), Some(failure)) => return Ended::Failed(failure),
            };
            if !tried.is_empty() {
                metrics::counter!(metric::GATEWAY_RETRIES).increment(1);
            }
            tried.push(assignment.link.id.clone());
            self.taken = false;
            let outcome = self.attempt(&assignment).await;
            judge(&assignment, &outcome);
            let failure = match outcome {
                Ok(last) => return Ended::Well(last),
                Err(Failed::Interrupted(interrupt)) => return self.interrupted(interrupt).await,
                Err(Failed::Here(failure) | Failed::Ours(failure)) => return Ended::Failed(failure),
                Err(Failed::Elsewhere(failure)) => failure,
            };
            // One that is not up yet has not tried it, and the wait for it has its own bound.
            n_attempts += usize::from(self.taken || replace_by.is_none());
            if self.progress.begun() || n_attempts == MAX_ATTEMPTS {
                return Ended::Failed(failure);
            }
            last = Some(failure);
        }
    }

    /// Wait for any worker that serves the model, be it the one that was lost: whoever runs it starts it again.
    /// `None`: none came in time.
    async fn replaced(&self, until: Instant) -> Result<Option<Assignment>, Interrupt> {
        let (mut pause, longest) = REPLACEMENT_PAUSE;
        while Instant::now() + pause < until {
            self.unless_interrupted(tokio::time::sleep(pause), until, false)
                .await?;
            if let Ok(assignment) = self.relay.router.pick(&self.checked.model.name, &[]) {
                return Ok(Some(assignment));
            }
            pause = (pause * 2).min(longest);
        }
        Ok(None)
    }

    async fn attempt(&mut self, assignment: &Assignment) -> Result<v1::SynthesizeResponse, Failed> {
        self.prompt_positions = 0;
        let mut client = assignment.link.client.clone();
        let worker_request_id = worker_request_id(&self.relay.ticket.id);
        tracing::debug!(worker = %assignment.link.id, worker_request_id, "request sent");
        let mut request = tonic::Request::new(v1::WorkerSynthesizeRequest {
            request_id: worker_request_id.clone(),
            ..self.checked.wire.clone()
        });
        propagation::inject(
            &tracing::Span::current(),
            &self.relay.metadata,
            request.metadata_mut(),
        );
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()) + DEADLINE_GRACE);
        }
        let asked = Instant::now();
        let answer_by = asked + self.relay.stream.first_audio;
        let answer = self
            .unless_interrupted(client.synthesize(request), answer_by, false)
            .await;
        let mut events = match answer {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return Err(self.worker_failed(&status, assignment)),
            Err(interrupt) => return Err(self.waited(interrupt, assignment)),
        };
        self.taken = true;
        // It is in the worker's queue.
        self.accept().await.map_err(Failed::Interrupted)?;
        let queue_ends = Instant::now() + self.relay.stream.queue;
        let mut started: Option<Instant> = None;
        let mut stopping = None;
        loop {
            let patience = match started {
                _ if self.progress.begun() => Instant::now() + self.relay.stream.stall,
                Some(started) => started + self.relay.stream.first_audio,
                None => queue_ends,
            };
            let event = match self
                .unless_interrupted(events.message(), patience, stopping.is_some())
                .await
            {
                Ok(Ok(Some(message))) => message.event,
                Ok(Ok(None)) => {
                    tracing::error!(worker = %assignment.link.id, "worker ended a stream without a last message");
                    return Err(Failed::Elsewhere(worker_lost()));
                }
                Ok(Err(status)) => return Err(self.worker_failed(&status, assignment)),
                Err(Interrupt::Signal(Signal::Stop)) if started.is_some() => {
                    stopping = Some(self.stop_at_worker(assignment, &worker_request_id));
                    continue;
                }
                Err(Interrupt::Patience) if started.is_none() => {
                    tracing::warn!(worker = %assignment.link.id, waited = ?asked.elapsed(), "still in the worker's queue");
                    return Err(Failed::Elsewhere(overloaded(
                        "the request waited too long for its turn",
                    )));
                }
                Err(interrupt) => return Err(self.waited(interrupt, assignment)),
            };
            match event {
                Some(Received::Started(it)) => {
                    started = Some(Instant::now());
                    self.prompt_positions = it.prompt_positions;
                }
                Some(Received::Audio(audio)) => {
                    started.get_or_insert_with(Instant::now);
                    self.audio(audio, assignment).await?;
                }
                Some(Received::Finished(finished)) => {
                    return self.finish(finished, &mut events, assignment).await;
                }
                // Frames were not asked for, and an event of a later version means nothing here.
                Some(Received::Frames(_)) | None => {}
            }
        }
    }

    /// Tell the caller what the request became, once.
    async fn accept(&mut self) -> Result<(), Interrupt> {
        if self.accepted {
            return Ok(());
        }
        self.accepted = true;
        let audio = self.encoder.spec();
        let accepted = v1::Accepted {
            request_id: self.relay.ticket.id.to_string(),
            model: self.checked.model.name.clone(),
            seed: self.checked.wire.seed,
            format: wire_format(audio.encoding).into(),
            sample_rate: audio.sample_rate,
            channels: 1,
        };
        self.send(Sent::Accepted(accepted)).await
    }

    async fn audio(&mut self, audio: v1::WorkerAudio, assignment: &Assignment) -> Result<(), Failed> {
        let samples = match Samples::new(audio.samples) {
            Ok(samples) if audio.sample_offset == self.progress.samples() => samples,
            Ok(_) => return Err(broken(assignment, "audio is not in order")),
            Err(error) => return Err(broken(assignment, &error.to_string())),
        };
        if samples.is_empty() {
            return Ok(());
        }
        self.progress.chunk(samples.iter(), Instant::now());
        let sample_offset = self.encoder.n_samples();
        let audio = self
            .encoder
            .chunk(samples)
            .await
            .map_err(|error| Failed::Ours(not_encoded(&error)))?;
        self.send_audio(sample_offset, audio)
            .await
            .map_err(Failed::Interrupted)
    }

    /// The next chunk to the caller, if there is anything in it.
    async fn send_audio(&mut self, sample_offset: u64, audio: Bytes) -> Result<(), Interrupt> {
        if audio.is_empty() {
            return Ok(());
        }
        let index = self.n_chunks;
        self.n_chunks += 1;
        self.send(Sent::Chunk(v1::AudioChunk {
            index,
            sample_offset,
            audio,
        }))
        .await
    }

    async fn finish(
        &mut self,
        finished: v1::WorkerFinished,
        events: &mut Streaming<v1::WorkerSynthesizeResponse>,
        assignment: &Assignment,
    ) -> Result<v1::SynthesizeResponse, Failed> {
        let reason = finished.reason();
        let samples = self.progress.samples();
        let promised = u64::from(finished.frames) * u64::from(self.checked.model.samples_per_frame);
        if reason == v1::FinishReason::Unspecified || finished.samples != samples || promised != samples {
            let problem = format!(
                "{} frames, {} samples, {samples} received, finish reason {}",
                finished.frames,
                finished.samples,
                reason.label()
            );
            return Err(broken(assignment, &problem));
        }
        let last = self.last(reason, finished.frames).await?;
        // Reading to the end lets the connection close the stream instead of resetting it.
        let _ = tokio::time::timeout(CLOSING, events.message()).await;
        Ok(last)
    }

    /// The last message, once everything before it is on its way.
    async fn last(
        &mut self,
        reason: v1::FinishReason,
        frames: u32,
    ) -> Result<v1::SynthesizeResponse, Failed> {
        self.accept().await.map_err(Failed::Interrupted)?;
        let sample_offset = self.encoder.n_samples();
        let rest = self
            .encoder
            .finish()
            .await
            .map_err(|error| Failed::Ours(not_encoded(&error)))?;
        self.send_audio(sample_offset, rest)
            .await
            .map_err(Failed::Interrupted)?;
        let samples = self.encoder.n_samples();
        let finished = v1::SynthesisFinished {
            reason: reason.into(),
            frames,
            samples,
            seconds: samples as f64 / f64::from(self.encoder.spec().sample_rate),
            timings: Some(self.progress.timings(Instant::now())),
            prompt_positions: self.prompt_positions,
        };
        metrics::counter!(metric::GATEWAY_FINISHED, "reason" => reason.label()).increment(1);
        Ok(v1::SynthesizeResponse {
            event: Some(Sent::Finished(finished)),
        })
    }

    async fn send(&self, event: Sent) -> Result<(), Interrupt> {
        let patience = Instant::now() + self.relay.stream.caller;
        // A stop does not hold up what was made already.
        self.unless_interrupted(self.relay.out.room(), patience, true)
            .await?
            .map_err(|_| Interrupt::Gone)?;
        self.relay.out.put(v1::SynthesizeResponse { event: Some(event) });
        Ok(())
    }

    /// `work`, unless something else ends the stream first. With `stopping`, a stop that was acted on already
    /// does not interrupt again.
    async fn unless_interrupted<F: Future>(
        &self,
        work: F,
        patience: Instant,
        stopping: bool,
    ) -> Result<F::Output, Interrupt> {
        let mut signal = self.relay.ticket.signal.clone();
        let threshold = if stopping { Signal::Stop } else { Signal::Run };
        tokio::select! {
            // What ends a stream is seen before more of it.
            biased;
            () = self.relay.out.gone() => Err(Interrupt::Gone),
            raised = signal.wait_for(|signal| *signal > threshold) => match raised {
                Ok(raised) => Err(Interrupt::Signal(*raised)),
                Err(_) => Err(Interrupt::Gone),
            },
            () = sleep_until(self.deadline) => Err(Interrupt::Deadline),
            output = work => Ok(output),
            () = tokio::time::sleep_until(patience) => Err(Interrupt::Patience),
        }
    }

    /// Running out of patience with a worker is the worker's failure; everything else ends the stream.
    fn waited(&self, interrupt: Interrupt, assignment: &Assignment) -> Failed {
        if interrupt != Interrupt::Patience {
            return Failed::Interrupted(interrupt);
        }
        tracing::warn!(worker = %assignment.link.id, "worker stalled");
        assignment.link.suspect();
        Failed::Elsewhere(worker_lost())
    }

    /// What a worker's status means to the request.
    fn worker_failed(&self, status: &Status, assignment: &Assignment) -> Failed {
        let Some(failure) = Failure::from_status(status) else {
            tracing::warn!(worker = %assignment.link.id, code = ?status.code(), error = status.message(), "worker lost");
            assignment.link.suspect();
            return Failed::Elsewhere(worker_lost());
        };
        tracing::info!(worker = %assignment.link.id, %failure, "worker refused or failed a request");
        match failure.code {
            ErrorCode::Overloaded | ErrorCode::Draining => {
                Failed::Elsewhere(failure.retry_after(RETRY_AFTER))
            }
            // What a worker says of itself or of another worker is not for callers.
            ErrorCode::WorkerLost | ErrorCode::NoWorker => Failed::Elsewhere(worker_lost()),
            ErrorCode::Internal => Failed::Here(Failure::internal()),
            _ => Failed::Here(failure),
        }
    }

    /// Ask the worker to finish cleanly, while its audio is passed on. Its last message then ends the stream; a stop
    /// that cannot be delivered becomes a kill. Dropping the handle ends the asking.
    fn stop_at_worker(&self, assignment: &Assignment, worker_request_id: &str) -> AbortOnDropHandle<()> {
        metrics::counter!(metric::GATEWAY_CANCELS, "by" => "stop").increment(1);
        let stop = v1::WorkerCancelRequest {
            request_id: worker_request_id.to_string(),
            strength: v1::CancelStrength::Stop.into(),
        };
        let link = assignment.link.clone();
        let config = self.relay.link.clone();
        let kill = self.relay.ticket.raiser();
        let delivery = async move {
            for _ in 0..STOP_ATTEMPTS {
                let mut request = tonic::Request::new(stop.clone());
                request.set_timeout(config.unary_timeout);
                match link.client.clone().cancel(request).await {
                    Ok(_) => return,
                    // It has just finished, and the last message is on its way.
                    Err(status) if status.code() == Code::NotFound => return,
                    Err(status) => {
                        tracing::warn!(worker = %link.id, error = status.message(), "stop not delivered");
                    }
                }
                tokio::time::sleep(config.poll_interval).await;
            }
            kill.raise(Signal::Kill);
        };
        AbortOnDropHandle::new(tokio::spawn(delivery.in_current_span()))
    }

    /// End a stream that its worker did not end.
    async fn interrupted(&mut self, interrupt: Interrupt) -> Ended {
        if interrupt != Interrupt::Signal(Signal::Stop) {
            return Ended::Cut(cut(interrupt));
        }
        // No worker has begun: there is nothing to deliver but the end.
        metrics::counter!(metric::GATEWAY_CANCELS, "by" => "stop").increment(1);
        match self.last(v1::FinishReason::Stopped, 0).await {
            Ok(last) => Ended::Well(last),
            Err(Failed::Interrupted(interrupt)) => Ended::Cut(cut(interrupt)),
            Err(Failed::Here(failure) | Failed::Elsewhere(failure) | Failed::Ours(failure)) => {
                Ended::Failed(failure)
            }
        }
    }
}

/// What a worker knows one attempt by: the caller's id, so that logs can be read together, and a part of its own.
fn worker_request_id(id: &RequestId) -> String {
    let shown = id.as_str().get(..SHOWN_ID_BYTES).unwrap_or(id.as_str());
    format!("{shown}.{:08x}", rand::random::<u32>())
}

/// Samples that cannot be encoded: nobody's fault but ours.
pub(crate) fn not_encoded(error: &EncodeError) -> Failure {
    tracing::error!(%error, "audio not encoded");
    Failure::internal()
}

fn worker_lost() -> Failure {
    Failure::new(ErrorCode::WorkerLost, "the worker that ran the request is gone").retry_after(RETRY_AFTER)
}

/// A worker that breaks the protocol: nothing more of its stream can be trusted.
fn broken(assignment: &Assignment, problem: &str) -> Failed {
    tracing::error!(worker = %assignment.link.id, problem, "worker broke the protocol");
    Failed::Here(Failure::internal())
}
