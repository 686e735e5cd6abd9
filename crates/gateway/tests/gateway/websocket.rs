//! A caller over a WebSocket, as a browser is one.

mod browsers;
mod life;
mod speech;

use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::http::{HeaderName, Response};
use tokio_tungstenite::tungstenite::protocol::Message;
use tokio_tungstenite::tungstenite::{self, Error};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use crate::harness::{TestGateway, soon};

/// An open connection.
pub(crate) struct Socket(pub(crate) WebSocketStream<MaybeTlsStream<TcpStream>>);

/// What a caller hears.
#[derive(Debug, PartialEq)]
pub(crate) enum Heard {
    Told(Value),
    Audio(Vec<u8>),
    Closed(u16),
}

/// One utterance that ended well.
#[derive(Debug, Default)]
pub(crate) struct Spoken {
    /// Everything that was told, without the audio.
    pub(crate) told: Vec<Value>,
    pub(crate) audio: Vec<u8>,
}

/// How the utterances of these tests begin.
pub(crate) fn config(changes: Value) -> Value {
    let mut config = json!({ "type": "session.config", "model": "nano", "voice": "ryan", "seed": 100 });
    for (name, value) in changes.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

pub(crate) fn text(piece: &str) -> Value {
    json!({ "type": "input.text", "text": piece })
}

pub(crate) fn bare(kind: &str) -> Value {
    json!({ "type": kind })
}

impl TestGateway {
    /// Open a connection with these headers beside the handshake's own.
    pub(crate) async fn open(&self, headers: &[(&'static str, &str)]) -> Result<Socket, Box<Error>> {
        self.open_answered(headers).await.map(|(socket, _)| socket)
    }

    pub(crate) async fn open_answered(
        &self,
        headers: &[(&'static str, &str)],
    ) -> Result<(Socket, Response<Option<Vec<u8>>>), Box<Error>> {
        let url = format!("ws://{}/v1/audio/speech/stream", self.address);
        let mut request = url.into_client_request().unwrap();
        for (name, value) in headers {
            request
                .headers_mut()
                .insert(HeaderName::from_static(name), value.parse().unwrap());
        }
        let (stream, response) = soon(tokio_tungstenite::connect_async(request)).await?;
        Ok((Socket(stream), response))
    }

    /// A connection on which an utterance has begun.
    pub(crate) async fn begun(&self, config: Value) -> Socket {
        let mut socket = self.open(&[]).await.unwrap();
        socket.say(config).await;
        assert_eq!(socket.told().await["type"], "session.started");
        socket
    }
}

/// The status and the envelope of a handshake that was refused.
pub(crate) fn refusal(error: Error) -> (u16, Value) {
    let Error::Http(response) = error else {
        panic!("no answer: {error}")
    };
    let body = response.body().as_deref().unwrap_or_default();
    let error = serde_json::from_slice::<Value>(body).unwrap()["error"].take();
    (response.status().as_u16(), error)
}

impl Socket {
    pub(crate) async fn send(&mut self, message: Message) {
        soon(self.0.send(message)).await.unwrap();
    }

    pub(crate) async fn say(&mut self, message: Value) {
        self.send(Message::text(message.to_string())).await;
    }

    pub(crate) async fn hear(&mut self) -> Heard {
        loop {
            match soon(self.0.next()).await {
                Some(Ok(Message::Text(text))) => return Heard::Told(serde_json::from_str(&text).unwrap()),
                Some(Ok(Message::Binary(bytes))) => return Heard::Audio(bytes.into()),
                Some(Ok(Message::Close(Some(frame)))) => return Heard::Closed(frame.code.into()),
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// What is told next. Audio is heard where it belongs.
    pub(crate) async fn told(&mut self) -> Value {
        match self.hear().await {
            Heard::Told(value) => value,
            other => panic!("{other:?} in place of a message"),
        }
    }

    /// Up to the next message of this type.
    pub(crate) async fn until(&mut self, kind: &str) -> Value {
        loop {
            match self.hear().await {
                Heard::Told(value) if value["type"] == kind => return value,
                Heard::Closed(code) => panic!("closed with {code} before {kind}"),
                Heard::Told(value) if value["type"] == "error" => panic!("{value} before {kind}"),
                Heard::Told(_) | Heard::Audio(_) => {}
            }
        }
    }

    /// An utterance up to its end, with its audio checked against what is told of it.
    pub(crate) async fn utterance(&mut self) -> Spoken {
        let mut spoken = Spoken::default();
        let mut announced = None;
        loop {
            match self.hear().await {
                Heard::Audio(bytes) => {
                    assert_eq!(
                        announced.take(),
                        Some(bytes.len() as u64),
                        "audio that was not told of"
                    );
                    spoken.audio.extend(bytes);
                }
                Heard::Told(value) => {
                    assert!(announced.is_none(), "{value} in place of audio");
                    if value["type"] == "audio.chunk" {
                        announced = value["bytes"].as_u64();
                        assert!(announced.is_some());
                    }
                    let last = value["type"] == "session.done";
                    assert_ne!(value["type"], "error", "{value}");
                    spoken.told.push(value);
                    if last {
                        return spoken;
                    }
                }
                Heard::Closed(code) => panic!("closed with {code}"),
            }
        }
    }

    /// The failure that ends it, as it is told, and the code that it is closed with.
    pub(crate) async fn failure(&mut self) -> (Value, u16) {
        let error = loop {
            match self.hear().await {
                Heard::Told(value) if value["type"] == "error" => break value,
                Heard::Closed(code) => panic!("closed with {code} and no error"),
                _ => {}
            }
        };
        for internal in ["127.0.0.1", "h2", "hyper", "tungstenite", "transport", "tcp"] {
            assert!(
                !error.to_string().contains(internal),
                "{error} tells of {internal}"
            );
        }
        assert_eq!(error["message"], error["error"]["message"]);
        (error["error"].clone(), self.closed().await)
    }

    pub(crate) async fn closed(&mut self) -> u16 {
        loop {
            if let Heard::Closed(code) = self.hear().await {
                return code;
            }
        }
    }
}

impl Spoken {
    /// Types in order, with the index of a sentence.
    pub(crate) fn order(&self) -> Vec<String> {
        let short = |value: &Value| {
            let kind = value["type"].as_str().unwrap();
            match value["sentence_index"].as_u64() {
                Some(index) => format!("{kind} {index}"),
                None => kind.to_owned(),
            }
        };
        self.told.iter().map(short).collect()
    }

    pub(crate) fn last(&self) -> &Value {
        self.told.last().unwrap()
    }
}

/// Text that is no UTF-8, which the library would not send by itself.
pub(crate) fn broken_text() -> Message {
    use tungstenite::protocol::frame::Frame;
    use tungstenite::protocol::frame::coding::{Data, OpCode};
    Message::Frame(Frame::message(vec![0xff, 0xfe], OpCode::Data(Data::Text), true))
}
