//! A caller over HTTP/1.1: bytes on a connection, so that a test decides what is sent when, and sees what came.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{TestGateway, soon};

/// A connection, and what was read from it and not looked at yet.
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    buffer: Vec<u8>,
}

/// An answer up to its body.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) head: Head,
    pub(crate) chunks: Vec<Vec<u8>>,
    /// The body came to its end. A stream that fails is cut off.
    pub(crate) whole: bool,
}

impl Head {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(each, _)| each == name)
            .map(|(_, value)| value.as_str())
    }
}

impl Answer {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.chunks.concat()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes()).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// The error that it tells of: its code, its field and its message.
    #[track_caller]
    pub(crate) fn error(&self) -> (u16, String, String, String) {
        let json = self.json();
        let error = &json["error"];
        let text = |key: &str| error[key].as_str().unwrap_or("").to_string();
        let kind = match self.head.status {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        assert_eq!(text("type"), kind, "{json}");
        assert!(
            self.head.header("x-request-id").is_some(),
            "every answer has an id"
        );
        for internal in ["127.0.0.1", "h2", "hyper", "transport", "tcp", "secret"] {
            assert!(!text("message").contains(internal), "{json} tells of {internal}");
        }
        (self.head.status, text("code"), text("param"), text("message"))
    }
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        Self {
            stream: soon(TcpStream::connect(address)).await.unwrap(),
            buffer: Vec::new(),
        }
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        soon(self.stream.write_all(bytes)).await.unwrap();
    }

    /// Send a request with a body of this type.
    pub(crate) async fn request(&mut self, line: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{line} HTTP/1.1\r\nhost: gateway\r\n");
        if !body.is_empty() {
            head += &format!("content-length: {}\r\n", body.len());
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        self.send(&[head.as_bytes(), b"\r\n", body].concat()).await;
    }

    /// More of what the other end says; false at its end.
    async fn more(&mut self) -> bool {
        let mut part = [0; 16 * 1024];
        match soon(self.stream.read(&mut part)).await {
            Ok(0) | Err(_) => false,
            Ok(n_bytes) => {
                self.buffer.extend_from_slice(&part[..n_bytes]);
                true
            }
        }
    }

    /// Up to and without `end`, which is taken too; `None` when the connection ended before.
    async fn until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            let found = self.buffer.windows(end.len()).position(|window| window == end);
            if let Some(at) = found {
                let rest = self.buffer.split_off(at + end.len());
                let mut before = std::mem::replace(&mut self.buffer, rest);
                before.truncate(at);
                return Some(before);
            }
            if !self.more().await {
                return None;
            }
        }
    }

    pub(crate) async fn head(&mut self) -> Head {
        let text = self.until(b"\r\n\r\n").await.expect("an answer");
        let text = String::from_utf8(text).unwrap();
        let mut lines = text.split("\r\n");
        let status = lines.next().unwrap();
        let status = status.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
        let header = |line: &str| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_lowercase(), value.trim().to_string())
        };
        Head {
            status,
            headers: lines.map(header).collect(),
        }
    }

    /// The next chunk of a chunked body; empty at its end, `None` when it is cut off.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.until(b"\r\n").await?;
        let size = usize::from_str_radix(std::str::from_utf8(&size).unwrap(), 16).unwrap();
        while self.buffer.len() < size + 2 {
            if !self.more().await {
                return None;
            }
        }
        let rest = self.buffer.split_off(size + 2);
        let mut chunk = std::mem::replace(&mut self.buffer, rest);
        chunk.truncate(size);
        Some(chunk)
    }

    pub(crate) async fn answer(&mut self) -> Answer {
        let head = self.head().await;
        let mut answer = Answer {
            head,
            chunks: Vec::new(),
            whole: false,
        };
        if let Some(n_bytes) = answer.head.header("content-length") {
            let n_bytes: usize = n_bytes.parse().unwrap();
            while self.buffer.len() < n_bytes {
                if !self.more().await {
                    return answer;
                }
            }
            let rest = self.buffer.split_off(n_bytes);
            answer.chunks.push(std::mem::replace(&mut self.buffer, rest));
            answer.whole = true;
            return answer;
        }
        assert_eq!(answer.head.header("transfer-encoding"), Some("chunked"));
        while let Some(chunk) = self.chunk().await {
            if chunk.is_empty() {
                answer.whole = true;
                break;
            }
            answer.chunks.push(chunk);
        }
        answer
    }

    /// Until the other end has closed it.
    pub(crate) async fn closed(&mut self) {
        while self.more().await {}
    }
}

/// The body of a plain request for raw samples, changed by these fields.
pub(crate) fn body(changes: Value) -> Value {
    let mut body = json!({
        "model": "nano",
        "input": "Hello there.",
        "voice": "ryan",
        "response_format": "pcm",
    });
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

const JSON: (&str, &str) = ("content-type", "application/json");

impl TestGateway {
    pub(crate) async fn connection(&self) -> Connection {
        Connection::open(self.address).await
    }

    /// Begin to speak on a connection of its own.
    pub(crate) async fn post(&self, body: &Value, headers: &[(&str, &str)]) -> Connection {
        let mut connection = self.connection().await;
        let headers = [&[JSON], headers].concat();
        let body = body.to_string();
        connection
            .request("POST /v1/audio/speech", &headers, body.as_bytes())
            .await;
        connection
    }

    /// Speak to the end.
    pub(crate) async fn http(&self, body: &Value) -> Answer {
        self.post(body, &[]).await.answer().await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        let mut connection = self.connection().await;
        connection.request(&format!("GET {path}"), &[], b"").await;
        connection.answer().await
    }
}
