//! How a caller is turned away that does not get through: so that it hears why.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// First byte of a record that begins a handshake.
const HANDSHAKE: u8 = 22;

/// To who speaks HTTP/1 without TLS.
const HTTP1: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 48\r\n\
                       connection: close\r\n\r\nThis address is served over TLS; write https://\n";

/// To who speaks HTTP/2 without TLS: a frame of settings, as it has to begin, and a farewell for inadequate security.
const HTTP2: &[u8] = b"\0\0\0\x04\0\0\0\0\0\
                       \0\0\x37\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0c\
                       This address is served over TLS; write https://";

/// The problem, when that is what the first bytes from a server are.
pub(crate) fn read(first: &[u8]) -> Option<&'static str> {
    let told = first.starts_with(HTTP2);
    told.then_some("This address is served over TLS; write https://")
}

/// What a caller says first, when that is no handshake: the answer to it.
///
/// # Errors
/// It left.
pub(crate) async fn answer_without_tls(stream: &TcpStream) -> io::Result<Option<&'static [u8]>> {
    let mut first = [0; 2];
    match stream.peek(&mut first).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(match &first {
            [HANDSHAKE, _] => None,
            b"PR" => Some(HTTP2),
            [b'A'..=b'Z', _] => Some(HTTP1),
            _ => Some(b""),
        }),
    }
}

/// Say `answer`, and close the connection when the caller has heard it, or after `linger`: bytes of it that nobody
/// reads would reset the connection, and take what it is told with it.
pub(crate) async fn turn_away(mut stream: TcpStream, answer: &[u8], linger: Duration) {
    let told = async {
        stream.write_all(answer).await?;
        stream.shutdown().await?;
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    };
    // Whatever comes of it, nobody is there any more.
    let _ = tokio::time::timeout(linger, told).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_as_long_as_they_say() {
        let text = std::str::from_utf8(HTTP1).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}\r\n", body.len())),
            "{text}"
        );
        let payload = &HTTP2[9 + 9..];
        assert_eq!(
            u32::from_be_bytes([0, HTTP2[9], HTTP2[10], HTTP2[11]]) as usize,
            payload.len()
        );
    }
}
