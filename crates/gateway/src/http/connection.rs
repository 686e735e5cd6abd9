//! Connections that end when their other end does nothing.
//!
//! HTTP/2 finds a peer that is gone by its pings, but a connection that has not said yet what it speaks has none, and
//! over HTTP/1 a listener who reads nothing looks like one who reads slowly.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use laneway_tls::Accepted;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Bytes after which it is known: HTTP/2's preface is as long, and no request of HTTP/1 that is waited for by then
/// is shorter without being answered.
const GREETING_BYTES: usize = 24;

/// A connection with two deadlines: on its first words, and on each wait for its peer to take what is written.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Accepted,
    /// Runs until enough was read or anything was written.
    greeting: Option<Pin<Box<Sleep>>>,
    n_read: usize,
    write_timeout: Duration,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Connection {
    /// Watch `stream`: a peer that does not say what it speaks for `greeting_timeout`, or takes nothing of what is
    /// written for `write_timeout`, is given up.
    pub(crate) fn new(stream: Accepted, greeting_timeout: Duration, write_timeout: Duration) -> Self {
        Self {
            stream,
            greeting: Some(Box::pin(tokio::time::sleep(greeting_timeout))),
            n_read: 0,
            write_timeout,
            stalled: None,
        }
    }

    /// What a write became, unless it has waited for too long.
    fn written<T>(&mut self, outcome: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.greeting = None;
            self.stalled = None;
            return outcome;
        }
        let ends = Instant::now() + self.write_timeout;
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(ends)));
        timed_out(stalled, context)
    }
}

fn timed_out<T>(sleep: &mut Pin<Box<Sleep>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
    sleep
        .as_mut()
        .poll(context)
        .map(|()| Err(io::ErrorKind::TimedOut.into()))
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.n_read = self.n_read.saturating_add(buffer.filled().len() - before);
        if self.n_read >= GREETING_BYTES {
            self.greeting = None;
        }
        match (&outcome, &mut self.greeting) {
            (Poll::Pending, Some(greeting)) => timed_out(greeting, context),
            _ => outcome,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(outcome, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.written(outcome, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    const LONG: Duration = Duration::from_secs(60);

    async fn pair(greeting_timeout: Duration, write_timeout: Duration) -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let stream = Accepted::Plain(stream);
        (Connection::new(stream, greeting_timeout, write_timeout), peer)
    }

    #[tokio::test]
    async fn a_peer_that_takes_nothing_is_given_up() {
        let timeout = Duration::from_millis(200);
        let (mut connection, mut peer) = pair(LONG, timeout).await;
        let block = vec![0; 1 << 20];
        let began = Instant::now();
        let error = loop {
            if let Err(error) = connection.write_all(&block).await {
                break error;
            }
            assert!(began.elapsed() < Duration::from_secs(20));
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= timeout);
        drop(connection);
        let mut rest = Vec::new();
        let _ = peer.read_to_end(&mut rest).await;
    }

    #[tokio::test]
    async fn a_slow_peer_that_takes_something_is_not() {
        let (mut connection, mut peer) = pair(LONG, Duration::from_millis(400)).await;
        let reader = tokio::spawn(async move {
            let mut part = vec![0; 4 << 20];
            let mut n_read = 0;
            while let Ok(n @ 1..) = peer.read(&mut part).await {
                n_read += n;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            n_read
        });
        let block = vec![0; 16 << 20];
        connection.write_all(&block).await.unwrap();
        drop(connection);
        assert_eq!(reader.await.unwrap(), block.len());
    }

    #[tokio::test]
    async fn who_says_nothing_is_not_waited_for() {
        let timeout = Duration::from_millis(100);
        let (mut connection, mut peer) = pair(timeout, LONG).await;
        peer.write_all(b"PRI * HTTP").await.unwrap();
        let mut said = Vec::new();
        let error = connection.read_to_end(&mut said).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(said, b"PRI * HTTP");

        let (mut connection, mut peer) = pair(timeout, LONG).await;
        peer.write_all(&[b'x'; GREETING_BYTES]).await.unwrap();
        let mut said = [0; GREETING_BYTES];
        connection.read_exact(&mut said).await.unwrap();
        let more = connection.read_u8();
        let waited = tokio::time::timeout(3 * timeout, more).await;
        assert!(waited.is_err(), "it is known, and may be idle");
    }
}
