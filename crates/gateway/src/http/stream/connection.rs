//! One connection, from its first message to its last.
//!
//! The task is spawned when the handshake is done and ends with the connection. It reads and writes at once: a caller
//! who takes nothing can still cancel, and what waits for it is what [`crate::delivery`] and the socket hold, which
//! ends the utterance when it holds too much for too long. Leaving ends the work at once.

use std::ops::ControlFlow;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, close_code};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use laneway_proto::{ErrorCode, Failure, RequestId, v1};
use laneway_telemetry::metric;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_tungstenite::tungstenite;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;
use v1::stream_synthesize_response::Event;

use super::messages::{self, Config, Sent, Teller};
use crate::access;
use crate::api::Api;
use crate::caller::{Caller, KeyName};
use crate::delivery::Outgoing;
use crate::keys::{ApiKeys, Pass};
use crate::session::Command;
use crate::validate;

/// Longest wait for the first message: until then a caller has not even said its key.
const FIRST_MESSAGE: Duration = Duration::from_secs(15);

/// Longest wait for a caller to take the end and say so.
const CLOSING: Duration = Duration::from_secs(2);

/// Commands that wait for their utterance.
const MAX_COMMANDS: usize = 16;

/// Seeds that a browser's numbers can hold.
const SEED_BITS: u32 = 53;

type Sink = SplitSink<WebSocket, Message>;
type Source = SplitStream<WebSocket>;

/// How a connection ends.
#[derive(Debug)]
enum End {
    /// Everything was said.
    Done,
    /// The caller is gone.
    Left,
    /// The gateway goes away, with nothing left to say.
    GoingAway,
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        End::Failed(failure)
    }
}

/// What a connection is made of.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) api: Api,
    /// Asked for each utterance, where keys are asked for.
    pub(super) keys: Option<ApiKeys>,
    /// The key that came with the handshake.
    pub(super) secret: Option<Vec<u8>>,
    /// What came with the handshake: a trace, and a deadline for each utterance.
    pub(super) caller: Caller,
    /// The handshake's id, which is the first utterance's.
    pub(super) id: RequestId,
    pub(super) stopped: CancellationToken,
}

impl Connection {
    pub(super) async fn run(mut self, socket: WebSocket) {
        let (mut sink, mut source) = socket.split();
        let end = match self.speak(&mut sink, &mut source).await {
            Ok(never) => match never {},
            Err(end) => end,
        };
        tracing::debug!(request_id = %self.id, ?end, "connection ends");
        close(sink, source, end).await;
    }

    async fn speak(&mut self, sink: &mut Sink, source: &mut Source) -> Result<std::convert::Infallible, End> {
        let mut config: Option<Config> = None;
        let mut unsaid: Option<Sent> = None;
        let mut id = Some(std::mem::replace(&mut self.id, validate::random_request_id()));
        let mut patience = FIRST_MESSAGE.min(self.api.stream.idle);
        loop {
            let sent = match unsaid.take() {
                Some(sent) => sent,
                None => self.next(source, patience).await?,
            };
            patience = self.api.stream.idle;
            let first = match sent {
                Sent::Close => return Err(End::Done),
                Sent::Config(said) => {
                    config = Some(*said);
                    None
                }
                // It came behind the end of what it was to end.
                Sent::Command(Command::Cancel) if config.is_some() => {
                    send(sink, messages::cancelled(0)).await?;
                    continue;
                }
                Sent::Command(command) => Some(command),
            };
            let Some(config) = &config else {
                let problem = "the first message has to be `session.config`";
                return Err(Failure::of_field(ErrorCode::InvalidArgument, "type", problem).into());
            };
            let id = id.take().unwrap_or_else(validate::random_request_id);
            unsaid = self.utterance(config, id, first, sink, source).await?;
        }
    }

    /// The next message between two utterances.
    async fn next(&self, source: &mut Source, patience: Duration) -> Result<Sent, End> {
        let deadline = Instant::now() + patience;
        tokio::select! {
            biased;
            () = self.stopped.cancelled() => Err(End::GoingAway),
            sent = tokio::time::timeout_at(deadline, received(source)) => sent.unwrap_or_else(|_| {
                let problem = format!("no message came for {} seconds", patience.as_secs_f64());
                Err(Failure::new(ErrorCode::DeadlineExceeded, problem).into())
            }),
        }
    }

    /// Let one utterance in.
    fn enter(&self, config: &Config) -> Result<(Option<Pass>, Caller), Failure> {
        let mut caller = self.caller.clone();
        if let Some(milliseconds) = config.timeout_ms
            && let Ok(timeout) = MetadataValue::try_from(format!("{milliseconds}m"))
        {
            caller.metadata.insert("grpc-timeout", timeout);
        }
        let Some(keys) = &self.keys else {
            return Ok((None, caller));
        };
        let secret = config.api_key.as_ref().map(String::as_bytes);
        let Some(secret) = secret.or(self.secret.as_deref()) else {
            let problem = "send an API key: as `api_key` of `session.config`, in `authorization`, or as the protocol \
                           `laneway-api-key.` and the key, behind `laneway.v1`";
            let failure = Failure::new(ErrorCode::Unauthenticated, problem);
            return Err(refused(failure, &KeyName::default()));
        };
        let pass = keys
            .enter_with(secret)
            .map_err(|turned_away| refused(turned_away.failure, &turned_away.key))?;
        caller.key = pass.key.clone();
        Ok((Some(pass), caller))
    }

    /// Speak one utterance to its end. Gives back what was said behind it.
    async fn utterance(
        &self,
        config: &Config,
        id: RequestId,
        first: Option<Command>,
        sink: &mut Sink,
        source: &mut Source,
    ) -> Result<Option<Sent>, End> {
        let (_pass, caller) = self.enter(config)?;
        let mut start = config.wire.clone();
        if start.request_id.is_empty() {
            start.request_id = id.to_string();
        }
        // The caller is told its seed as a number of JSON.
        let seed = || rand::random::<u64>() >> (u64::BITS - SEED_BITS);
        start.seed.get_or_insert_with(seed);
        let (sender, commands) = mpsc::channel(MAX_COMMANDS);
        if let Some(first) = first {
            // There is room for one.
            let _ = sender.try_send(Ok(first));
        }
        let commands = Box::pin(ReceiverStream::new(commands));
        let outgoing = self.api.converse(start, caller, commands)?;
        let mut hearing = Hearing {
            ended: false,
            closing: false,
            unsaid: None,
            sender,
        };
        tokio::select! {
            biased;
            told = told(outgoing, sink) => told?,
            end = hearing.hear(source) => return Err(end),
        }
        match hearing.closing {
            true => Err(End::Done),
            false => Ok(hearing.unsaid),
        }
    }
}

/// What is heard of the caller while an utterance is spoken.
struct Hearing {
    /// The end of its text was said.
    ended: bool,
    /// It wants no other utterance.
    closing: bool,
    /// What came behind the utterance's own end.
    unsaid: Option<Sent>,
    sender: mpsc::Sender<Result<Command, Failure>>,
}

impl Hearing {
    /// Pass commands on. Returns when the caller leaves, and only then.
    async fn hear(&mut self, source: &mut Source) -> End {
        loop {
            let sent = match received(source).await {
                Ok(sent) => Ok(sent),
                Err(End::Failed(failure)) => Err(failure),
                Err(end) => return end,
            };
            if self.sender.is_closed() {
                self.unsaid = sent.ok();
                // The utterance has ended, and whoever waits for that is told so.
                return std::future::pending().await;
            }
            let command = sent.and_then(|sent| self.command(sent));
            let failed = command.is_err();
            if self.sender.send(command).await.is_err() || failed {
                return std::future::pending().await;
            }
        }
    }

    fn command(&mut self, sent: Sent) -> Result<Command, Failure> {
        let problem = match sent {
            Sent::Config(_) => "`session.config` is for before an utterance; wait for `session.done`",
            Sent::Command(Command::Text(_) | Command::Flush | Command::End) if self.ended => {
                "nothing but `input.cancel` may follow `input.done` before `session.done`"
            }
            Sent::Command(command) => {
                self.ended |= command == Command::End;
                return Ok(command);
            }
            Sent::Close => {
                self.closing = true;
                self.ended = true;
                return Ok(Command::End);
            }
        };
        Err(Failure::of_field(ErrorCode::InvalidArgument, "type", problem))
    }
}

/// Tell the caller everything that comes of an utterance.
async fn told(mut outgoing: Outgoing<v1::StreamSynthesizeResponse>, sink: &mut Sink) -> Result<(), End> {
    let mut teller = Teller::default();
    while let Some(item) = outgoing.next().await {
        let message =
            item.map_err(|status| Failure::from_status(&status).unwrap_or_else(Failure::internal))?;
        let Some(event) = message.event else { continue };
        for value in teller.tell(&event) {
            send(sink, value).await?;
        }
        if let Event::Chunk(chunk) = event {
            sink.send(Message::Binary(chunk.audio))
                .await
                .map_err(|_| End::Left)?;
        }
    }
    Ok(())
}

async fn send(sink: &mut Sink, value: Value) -> Result<(), End> {
    let text = Message::Text(Utf8Bytes::from(value.to_string()));
    sink.send(text).await.map_err(|_| End::Left)
}

/// The next message.
async fn received(source: &mut Source) -> Result<Sent, End> {
    loop {
        if let ControlFlow::Break(sent) = read(source.next().await) {
            return sent;
        }
    }
}

fn read(message: Option<Result<Message, axum::Error>>) -> ControlFlow<Result<Sent, End>> {
    let failed = |code, problem: &str| ControlFlow::Break(Err(Failure::new(code, problem).into()));
    match message {
        Some(Ok(Message::Text(text))) => ControlFlow::Break(messages::parse(&text).map_err(End::from)),
        Some(Ok(Message::Binary(_))) => failed(
            ErrorCode::UnsupportedMediaType,
            "binary messages are not taken; send text as JSON in text messages",
        ),
        // The library answers pings.
        Some(Ok(Message::Ping(_) | Message::Pong(_))) => ControlFlow::Continue(()),
        Some(Ok(Message::Close(_))) | None => ControlFlow::Break(Err(End::Left)),
        Some(Err(error)) => {
            let inner = error.into_inner();
            match inner.downcast_ref::<tungstenite::Error>() {
                Some(tungstenite::Error::Capacity(_)) => {
                    failed(ErrorCode::RequestTooLarge, "a message is over the limit")
                }
                Some(tungstenite::Error::Utf8(_)) => {
                    failed(ErrorCode::InvalidArgument, "a text message is not UTF-8")
                }
                _ => ControlFlow::Break(Err(End::Left)),
            }
        }
    }
}

fn refused(failure: Failure, key: &KeyName) -> Failure {
    let reason = failure.code.label();
    metrics::counter!(metric::GATEWAY_REFUSALS, "reason" => reason, "key" => key.label()).increment(1);
    access::refused(failure.code, key);
    failure
}

/// Say the end, and wait until the caller has said so too: a connection that is dropped with something unread in it
/// may take back what was written.
async fn close(mut sink: Sink, mut source: Source, end: End) {
    let (code, reason, last) = match end {
        End::Left => return,
        End::Done => (close_code::NORMAL, "", None),
        End::GoingAway => (close_code::AWAY, "draining", None),
        End::Failed(failure) => (code(failure.code), failure.code.label(), Some(failure)),
    };
    let closing = async {
        if let Some(failure) = last {
            let _ = send(&mut sink, messages::error(&failure)).await;
        }
        let frame = CloseFrame {
            code,
            reason: reason.into(),
        };
        let _ = sink.send(Message::Close(Some(frame))).await;
        while let Some(Ok(_)) = source.next().await {}
    };
    let _ = tokio::time::timeout(CLOSING, closing).await;
}

/// The code that a connection is closed with.
fn code(code: ErrorCode) -> u16 {
    match code {
        ErrorCode::RequestTooLarge => close_code::SIZE,
        ErrorCode::UnsupportedMediaType => close_code::UNSUPPORTED,
        ErrorCode::Draining => close_code::AWAY,
        ErrorCode::Overloaded | ErrorCode::RateLimited | ErrorCode::NoWorker | ErrorCode::WorkerLost => {
            close_code::AGAIN
        }
        ErrorCode::Internal => close_code::ERROR,
        _ => close_code::POLICY,
    }
}
