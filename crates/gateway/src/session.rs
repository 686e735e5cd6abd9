//! One stream of audio from several utterances: a text that is too long for one, or that is still being written.
//!
//! Owns: the ticket, the text that waits, the utterances in flight and how their audio is numbered. `api` spawns one
//! session for each such stream. Every utterance is a relay of its own, so it is routed, retried and ended like any
//! request; the next one is with a worker while the audio of this one is passed on, and no other. The session ends
//! when everything was spoken, on a failure, the deadline, a cancel, a caller who left, sent nothing or took nothing.
//! Dropping it drops the utterances, and with them their work.

mod shape;
mod told;
mod utterance;

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Duration;

use futures::{FutureExt as _, Stream, StreamExt as _};
use laneway_proto::{ErrorCode, Failure, v1};
use tokio::time::Instant;
use tonic::Status;
use v1::synthesize_response::Event as Heard;

use crate::access;
use crate::admission::{Signal, Ticket};
use crate::delivery::Delivery;
use crate::encode::{Encoder, wire_format};
use crate::relay::{self, Ended, Interrupt, cut, sleep_until};
use crate::samples::Samples;
use crate::sentences::Sentences;
use crate::validate;

pub(crate) use shape::{Said, Shape, Speech};
pub(crate) use told::Told;
pub(crate) use utterance::Voice;
use utterance::{News, Utterance};

/// Utterances of one session that a worker has at once: the one that is passed on, and the next.
pub(crate) const UTTERANCES_AT_ONCE: usize = 2;

/// What the caller of a text in pieces sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    /// The next piece.
    Text(String),
    /// Speak what was sent, although no sentence has ended.
    Flush,
    /// Drop what was sent and is not spoken.
    Cancel,
    /// No more text comes.
    End,
}

/// Commands as they come. What cannot be one ends the session.
pub(crate) type Commands = Pin<Box<dyn Stream<Item = Result<Command, Failure>> + Send>>;

/// What a session is built from.
pub(crate) struct SessionConfig<M: Shape> {
    /// Speaks the utterances.
    pub(crate) voice: Voice,
    /// The request's place.
    pub(crate) ticket: Ticket,
    /// When it arrived.
    pub(crate) arrived: Instant,
    /// To the caller.
    pub(crate) out: Delivery<M>,
    /// Longest wait for the caller to take a message.
    pub(crate) caller: Duration,
    /// Longest wait for the caller to send a message, with nothing to speak.
    pub(crate) idle: Duration,
    /// Most text that waits, in characters.
    pub(crate) max_waiting_chars: usize,
}

/// A stream of several utterances.
pub(crate) struct Session<M: Shape> {
    config: SessionConfig<M>,
    commands: Option<Commands>,
    /// No more text comes.
    ended: bool,
    /// A stop was asked for.
    stopping: bool,
    sentences: Sentences,
    /// Whole utterances.
    ready: VecDeque<String>,
    /// The one whose audio is passed on.
    current: Option<Utterance>,
    next: Option<Utterance>,
    /// What the encoder held back is pending or was sent.
    flushed: bool,
    /// For the caller, when there is room.
    pending: VecDeque<Said>,
    /// The caller has to have taken something by then. None while nothing is pending.
    take_by: Option<Instant>,
    last_heard: Instant,
    told: Told,
}

/// What a session waits for.
enum Wake {
    Interrupt(Interrupt),
    Room,
    Command(Option<Result<Command, Failure>>),
    Current(News),
    Next(News),
    Idle,
}

impl<M: Shape> Session<M> {
    /// A session that speaks `parts`, and then nothing.
    ///
    /// # Errors
    /// `Internal`: no encoder for what was validated.
    pub(crate) fn of_parts(config: SessionConfig<M>, parts: Vec<String>) -> Result<Self, Failure> {
        let mut session = Self::new(config)?;
        session.ready = parts.into();
        session.ended = true;
        Ok(session)
    }

    /// A session that speaks what is sent, of which `text` is the first piece.
    ///
    /// # Errors
    /// As [`Session::of_parts`].
    pub(crate) fn of_commands(
        config: SessionConfig<M>,
        text: &str,
        commands: Commands,
    ) -> Result<Self, Failure> {
        let mut session = Self::new(config)?;
        session.commands = Some(commands);
        session.sentences.push(text);
        session.take_sentences();
        Ok(session)
    }

    fn new(config: SessionConfig<M>) -> Result<Self, Failure> {
        let model = config.voice.model();
        let encoder = Encoder::new(config.voice.request.audio, model.sample_rate)
            .map_err(|error| relay::not_encoded(&error))?;
        Ok(Self {
            flushed: false,
            sentences: Sentences::new(validate::part_chars(model)),
            commands: None,
            ended: false,
            stopping: false,
            ready: VecDeque::new(),
            current: None,
            next: None,
            pending: VecDeque::new(),
            take_by: None,
            last_heard: Instant::now(),
            told: Told::new(encoder, config.arrived),
            config,
        })
    }

    /// Speak to the end.
    pub(crate) async fn run(mut self) {
        let ended = self.speak().await;
        let (told, arrived) = (self.told, self.config.arrived);
        // Their work is of no use to anybody now.
        drop((self.current, self.next, self.commands));
        let deadline = self.config.voice.deadline();
        let SessionConfig {
            ticket, out, caller, ..
        } = self.config;
        let key = ticket.key.clone();
        let outcome = relay::deliver(ticket, out, caller, deadline, ended).await;
        tracing::debug!(sentences = told.sentences(), "session ended");
        let ended = access::Ended {
            outcome,
            key,
            samples: told.samples(),
            first_audio: told.first_audio(),
            total: arrived.elapsed(),
        };
        ended.log();
    }

    async fn speak(&mut self) -> Ended<M> {
        self.accept();
        loop {
            self.submit();
            if self.is_done() {
                if self.flushed {
                    return self.finish();
                }
                self.flushed = true;
                match self.told.rest().await {
                    Ok(rest) => rest.map(|chunk| self.say(Said::Chunk(chunk))),
                    Err(failure) => return Ended::Failed(failure),
                };
                continue;
            }
            let outcome = match self.wake().await {
                Wake::Interrupt(Interrupt::Signal(Signal::Stop)) => {
                    self.stop();
                    Ok(())
                }
                Wake::Interrupt(interrupt) => return Ended::Cut(cut(interrupt)),
                Wake::Room => {
                    self.put();
                    Ok(())
                }
                Wake::Command(command) => self.obey(command),
                Wake::Current(news) => self.pass_on(news).await,
                Wake::Next(news) => self.look_ahead(news),
                Wake::Idle => Err(Failure::new(
                    ErrorCode::DeadlineExceeded,
                    format!(
                        "no text came for {} seconds; send `end` when there is no more",
                        self.config.idle.as_secs_f64()
                    ),
                )),
            };
            if let Err(failure) = outcome {
                return Ended::Failed(failure);
            }
        }
    }

    async fn wake(&mut self) -> Wake {
        let mut signal = self.config.ticket.signal.clone();
        let threshold = if self.stopping { Signal::Stop } else { Signal::Run };
        let blocked = !self.pending.is_empty();
        // A caller who may still send has to, once there is nothing left to speak.
        let waits_for_text =
            !self.ended && !blocked && self.current.is_none() && self.next.is_none() && self.ready.is_empty();
        let idle_at = waits_for_text.then(|| self.last_heard + self.config.idle);
        let (out, commands) = (&self.config.out, &mut self.commands);
        tokio::select! {
            // What ends a stream is seen before more of it, and what the caller says before what it is sent.
            biased;
            () = out.gone() => Wake::Interrupt(Interrupt::Gone),
            raised = signal.wait_for(|signal| *signal > threshold) => Wake::Interrupt(match raised {
                Ok(raised) => Interrupt::Signal(*raised),
                Err(_) => Interrupt::Gone,
            }),
            () = sleep_until(self.config.voice.deadline()) => Wake::Interrupt(Interrupt::Deadline),
            command = next_command(commands), if !self.pending.iter().any(Said::is_answer) => Wake::Command(command),
            room = out.room(), if blocked => match room {
                Ok(()) => Wake::Room,
                Err(_) => Wake::Interrupt(Interrupt::Gone),
            },
            news = utterance::news(&mut self.current), if !blocked => Wake::Current(news),
            news = utterance::first_news(&mut self.next) => Wake::Next(news),
            () = sleep_until(self.take_by) => Wake::Interrupt(Interrupt::Patience),
            () = sleep_until(idle_at) => Wake::Idle,
        }
    }

    /// Give a worker what it should have by now.
    fn submit(&mut self) {
        if self.current.is_none() {
            self.current = self.next.take();
        }
        let remaining = self.remaining_frames();
        let begun = match &self.current {
            None => {
                let index = self.told.sentences();
                self.current = self.ready.pop_front().map(|text| {
                    self.config
                        .voice
                        .begin(text, index, remaining, &self.config.ticket)
                });
                return;
            }
            Some(current) => current.announced,
        };
        if begun && self.next.is_none() {
            let index = self.told.sentences();
            self.next = self.ready.pop_front().map(|text| {
                self.config
                    .voice
                    .begin(text, index, remaining, &self.config.ticket)
            });
        }
    }

    /// Frames that the caller still allows. None when it set no bound.
    fn remaining_frames(&self) -> Option<u32> {
        let spoken = self.told.model_samples() / u64::from(self.config.voice.model().samples_per_frame);
        let spoken = u32::try_from(spoken).unwrap_or(u32::MAX);
        self.config
            .voice
            .max_frames()
            .map(|most| most.saturating_sub(spoken))
    }

    fn is_done(&self) -> bool {
        self.ended
            && self.ready.is_empty()
            && self.current.is_none()
            && self.next.is_none()
            && self.pending.is_empty()
    }

    fn say(&mut self, said: Said) {
        self.pending.push_back(said);
        self.take_by
            .get_or_insert_with(|| Instant::now() + self.config.caller);
        // Most of the time there is room, and no reason to wait.
        while !self.pending.is_empty() && matches!(self.config.out.room().now_or_never(), Some(Ok(()))) {
            self.put();
        }
    }

    fn put(&mut self) {
        let message = self.pending.pop_front().and_then(M::of);
        if let Some(message) = message {
            self.config.out.put(message);
        }
        self.take_by = (!self.pending.is_empty()).then(|| Instant::now() + self.config.caller);
    }

    fn accept(&mut self) {
        let (model, audio) = (self.config.voice.model(), self.told.audio());
        let accepted = v1::Accepted {
            request_id: self.config.ticket.id.to_string(),
            model: model.name.clone(),
            seed: self.config.voice.seed(),
            format: wire_format(audio.encoding).into(),
            sample_rate: audio.sample_rate,
            channels: 1,
        };
        self.say(Said::Accepted(accepted));
    }

    /// # Errors
    /// What is no command, or no more text could be taken.
    fn obey(&mut self, command: Option<Result<Command, Failure>>) -> Result<(), Failure> {
        self.last_heard = Instant::now();
        match command.transpose()? {
            None => {
                self.commands = None;
                self.end_text();
            }
            Some(Command::End) => self.end_text(),
            Some(Command::Cancel) => self.cancel(),
            Some(Command::Flush | Command::Text(_)) if self.stopping => {}
            Some(Command::Flush | Command::Text(_)) if self.ended => {
                let problem = "no text may follow the end";
                return Err(Failure::of_field(ErrorCode::InvalidArgument, "message", problem));
            }
            Some(Command::Flush) => self.take_rest(),
            Some(Command::Text(piece)) => {
                let ready: usize = self.ready.iter().map(|text| text.chars().count()).sum();
                let n_waiting = ready + self.sentences.n_chars();
                validate::check_piece(&piece, n_waiting, self.config.max_waiting_chars)?;
                self.sentences.push(&piece);
                self.take_sentences();
            }
        }
        Ok(())
    }

    fn take_sentences(&mut self) {
        self.ready
            .extend(std::iter::from_fn(|| self.sentences.next_sentence()));
    }

    fn take_rest(&mut self) {
        self.ready
            .extend(std::iter::from_fn(|| self.sentences.next_of_rest()));
    }

    fn end_text(&mut self) {
        self.ended = true;
        self.take_rest();
    }

    fn forget_text(&mut self) {
        self.ready.clear();
        self.sentences.clear();
        self.next = None;
    }

    /// Deliver what was made, then end.
    fn stop(&mut self) {
        self.stopping = true;
        self.ended = true;
        self.forget_text();
        if let Some(current) = &mut self.current
            && !current.stop()
        {
            self.current = None;
        }
    }

    /// Drop everything that was sent: a person speaks over it. What waits for the transport would still be heard, so
    /// it is taken back.
    fn cancel(&mut self) {
        self.forget_text();
        self.current = None;
        let told = &self.told;
        let unwanted = |speech: Option<Speech>| speech.is_some_and(|speech| told.can_take_back(&speech));
        let sent = self.config.out.take_back(|message| unwanted(message.speech()));
        let (unsent, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|said| unwanted(said.speech()));
        self.pending = kept;
        let back = sent.iter().filter_map(M::speech);
        for speech in back.chain(unsent.iter().filter_map(Said::speech)) {
            self.told.take_back(speech);
        }
        self.say(Said::Cancelled(v1::UtteranceCancelled {
            sample_offset: self.told.samples(),
        }));
    }

    /// # Errors
    /// The utterance failed for good.
    async fn pass_on(&mut self, news: News) -> Result<(), Failure> {
        self.last_heard = Instant::now();
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        let heard = match news {
            News::Message(Some(Ok(message))) => message.event,
            News::Message(Some(Err(status))) => return self.failed(status),
            News::Message(None) => return Err(Failure::internal()),
            News::Failed(failure) => return Err(failure),
            News::Again => {
                let remaining = self.remaining_frames();
                if let Some(current) = &mut self.current {
                    self.config.voice.again(current, remaining, &self.config.ticket);
                }
                return Ok(());
            }
        };
        match heard {
            Some(Heard::Accepted(_)) => current.accepted = true,
            Some(Heard::Chunk(chunk)) => self.chunk(chunk).await?,
            Some(Heard::Finished(finished)) => {
                self.announce();
                if let Some(current) = &self.current {
                    self.told.ended(&finished, current.submitted);
                }
                self.current = None;
            }
            None => {}
        }
        Ok(())
    }

    /// The utterance that is passed on failed: try again unless it was the first, or was heard.
    fn failed(&mut self, status: Status) -> Result<(), Failure> {
        let failure = Failure::from_status(&status).unwrap_or_else(Failure::internal);
        let first = self.told.sentences() == 0;
        match &mut self.current {
            Some(current) if !first && !current.announced => current.retry(failure),
            _ => Err(failure),
        }
    }

    /// # Errors
    /// Never: a failure of the next utterance counts when its turn comes.
    fn look_ahead(&mut self, news: News) -> Result<(), Failure> {
        let remaining = self.remaining_frames();
        let Some(next) = &mut self.next else {
            return Ok(());
        };
        match news {
            News::Message(Some(Ok(_))) => next.accepted = true,
            News::Message(Some(Err(status))) => {
                let failure = Failure::from_status(&status).unwrap_or_else(Failure::internal);
                if let Err(failure) = next.retry(failure) {
                    next.fail(failure);
                }
            }
            News::Message(None) => next.fail(Failure::internal()),
            News::Failed(failure) => next.fail(failure),
            News::Again => self.config.voice.again(next, remaining, &self.config.ticket),
        }
        Ok(())
    }

    /// Say once what the audio that follows is of.
    fn announce(&mut self) {
        let Some(current) = &mut self.current else { return };
        if std::mem::replace(&mut current.announced, true) {
            return;
        }
        let text = current.text.clone();
        let begun = self.told.sentence(text);
        self.say(Said::Sentence(begun));
    }

    async fn chunk(&mut self, chunk: v1::AudioChunk) -> Result<(), Failure> {
        self.announce();
        let mut samples = Samples::new(chunk.audio).map_err(|_| Failure::internal())?;
        let left = self.config.voice.max_frames().map(|most| {
            let most = u64::from(most) * u64::from(self.config.voice.model().samples_per_frame);
            most.saturating_sub(self.told.model_samples())
        });
        // The next utterance was given all that was left when it was submitted.
        let at_end = left.is_some_and(|left| left <= samples.len() as u64);
        if let Some(left) = left {
            samples.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        }
        if !samples.is_empty()
            && let Some(chunk) = self.told.chunk(samples).await?
        {
            self.say(Said::Chunk(chunk));
        }
        if at_end && !self.last_frames_of_all() {
            self.told.at_length();
            self.forget_text();
            self.current = None;
            self.ended = true;
        }
        Ok(())
    }

    /// The budget ends just where the text does: let the utterance say how it ended.
    fn last_frames_of_all(&self) -> bool {
        self.ended && self.ready.is_empty() && self.next.is_none()
    }

    fn finish(&mut self) -> Ended<M> {
        let finished = self.told.finished(self.config.voice.model(), self.stopping);
        match M::of(Said::Finished(finished)) {
            Some(message) => Ended::Well(message),
            None => Ended::Failed(Failure::internal()),
        }
    }
}

async fn next_command(commands: &mut Option<Commands>) -> Option<Result<Command, Failure>> {
    match commands {
        Some(commands) => commands.next().await,
        None => std::future::pending().await,
    }
}
