//! A caller of `StreamSynthesize`.

use laneway_proto::{Failure, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use v1::stream_synthesize_request::Message;
use v1::stream_synthesize_response::Event;

use crate::harness::{TestGateway, ours, request, soon};

/// A stream that was accepted.
pub(crate) struct Conversation {
    pub(crate) sender: mpsc::Sender<v1::StreamSynthesizeRequest>,
    pub(crate) events: Streaming<v1::StreamSynthesizeResponse>,
}

pub(crate) fn sent(message: Message) -> v1::StreamSynthesizeRequest {
    v1::StreamSynthesizeRequest {
        message: Some(message),
    }
}

/// How the conversations of these tests begin: no text yet.
pub(crate) fn start() -> v1::SynthesizeRequest {
    v1::SynthesizeRequest {
        text: String::new(),
        seed: Some(100),
        request_id: "talk".into(),
        ..request()
    }
}

impl Conversation {
    pub(crate) async fn begin(gateway: &TestGateway, start: v1::SynthesizeRequest) -> Self {
        Self::try_begin(gateway, sent(Message::Start(start)), tonic::Request::new)
            .await
            .unwrap()
    }

    pub(crate) async fn try_begin(
        gateway: &TestGateway,
        first: v1::StreamSynthesizeRequest,
        wrap: impl FnOnce(
            ReceiverStream<v1::StreamSynthesizeRequest>,
        ) -> tonic::Request<ReceiverStream<v1::StreamSynthesizeRequest>>,
    ) -> Result<Self, tonic::Status> {
        let (sender, messages) = mpsc::channel(64);
        sender.send(first).await.unwrap();
        let call = wrap(ReceiverStream::new(messages));
        let response = soon(gateway.speech().stream_synthesize(call)).await?;
        let mut events = response.into_inner();
        match soon(events.message()).await?.and_then(|message| message.event) {
            Some(Event::Accepted(_)) => Ok(Self { sender, events }),
            other => panic!("{other:?} in place of Accepted"),
        }
    }

    pub(crate) async fn send(&self, message: Message) {
        self.sender.send(sent(message)).await.unwrap();
    }

    pub(crate) async fn text(&self, piece: &str) {
        self.send(Message::Text(piece.into())).await;
    }

    pub(crate) async fn end(&self) {
        self.send(Message::End(v1::EndOfText {})).await;
    }

    pub(crate) async fn next(&mut self) -> Result<Option<Event>, Failure> {
        match soon(self.events.message()).await {
            Ok(message) => Ok(message.map(|message| message.event.expect("an event"))),
            Err(status) => Err(ours(status)),
        }
    }

    /// The next sentence that begins, and nothing before it but chunks.
    pub(crate) async fn sentence(&mut self) -> v1::SentenceBegun {
        loop {
            match self.next().await.unwrap() {
                Some(Event::Sentence(sentence)) => return sentence,
                Some(Event::Chunk(_)) => {}
                other => panic!("{other:?} in place of a sentence"),
            }
        }
    }

    pub(crate) async fn chunk(&mut self) -> v1::AudioChunk {
        match self.next().await.unwrap() {
            Some(Event::Chunk(chunk)) => chunk,
            other => panic!("{other:?} in place of a chunk"),
        }
    }

    /// Everything up to the end, with audio checked for gaps.
    pub(crate) async fn rest(mut self) -> Result<Heard, Failure> {
        let mut heard = Heard::default();
        let mut place = None;
        loop {
            match self.next().await? {
                Some(Event::Sentence(sentence)) => {
                    assert_eq!(
                        place.map_or(sentence.sample_offset, |(_, offset)| offset),
                        sentence.sample_offset
                    );
                    heard.sentences.push((sentence.index, sentence.text));
                }
                Some(Event::Chunk(chunk)) => {
                    let (index, offset) = place.unwrap_or((chunk.index, chunk.sample_offset));
                    assert_eq!((chunk.index, chunk.sample_offset), (index, offset), "a gap");
                    place = Some((index + 1, offset + chunk.audio.len() as u64 / 2));
                    heard.audio.extend_from_slice(&chunk.audio);
                }
                Some(Event::Cancelled(cancelled)) => heard.cancelled.push(cancelled.sample_offset),
                Some(Event::Finished(finished)) => {
                    assert!(heard.finished.replace(finished).is_none());
                }
                Some(Event::Accepted(_)) => panic!("accepted twice"),
                None => return Ok(heard),
            }
        }
    }

    pub(crate) async fn failure(self) -> Failure {
        self.rest().await.unwrap_err()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) sentences: Vec<(u32, String)>,
    pub(crate) audio: Vec<u8>,
    pub(crate) cancelled: Vec<u64>,
    pub(crate) finished: Option<v1::SynthesisFinished>,
}

impl Heard {
    pub(crate) fn texts(&self) -> Vec<&str> {
        self.sentences.iter().map(|(_, text)| text.as_str()).collect()
    }
}
