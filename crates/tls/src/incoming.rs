//! The connections of a listener.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use futures::stream::unfold;
use laneway_telemetry::metric;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::refusal::{answer_without_tls, turn_away};
use crate::server::ServerTls;

/// What callers are given who have not got through yet.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Until the first byte. A caller sends it as soon as it is connected: one lost packet has been sent again by then,
    /// and who says nothing holds a place for no longer.
    first_byte: Duration,
    /// From then until it has shown who it is.
    handshake: Duration,
    /// Handshakes at once; who comes then waits in the kernel's queue, for no longer than both.
    n_handshakes: usize,
    /// Until a caller that is turned away has heard why.
    farewell: Duration,
    /// Of those at once; who is turned away then hears nothing. They hold no place of a handshake.
    n_farewells: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            first_byte: Duration::from_secs(3),
            handshake: Duration::from_secs(10),
            n_handshakes: 4096,
            farewell: Duration::from_secs(1),
            n_farewells: 1024,
        }
    }
}

/// Until the next try to accept a connection when there was no room for one. Handshakes that end meanwhile are served.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection that came, encrypted or not.
#[derive(Debug)]
pub enum Accepted {
    /// As it came.
    Plain(TcpStream),
    /// Behind its handshake.
    Tls(Box<TlsStream<TcpStream>>),
}

/// The connections that come to a listener, each of them ready to be served. A handshake that fails ends there.
#[derive(Debug)]
pub struct Incoming {
    listener: TcpListener,
    tls: Option<ServerTls>,
    bounds: Bounds,
    handshakes: JoinSet<Shaken>,
    farewells: JoinSet<()>,
    /// The last one could not be accepted, which was told; none is until then.
    refused: Option<Instant>,
}

impl Incoming {
    /// Of `listener`, which asks for TLS when `tls` is there.
    pub fn new(listener: TcpListener, tls: Option<ServerTls>) -> Self {
        Self {
            listener,
            tls,
            bounds: Bounds::default(),
            handshakes: JoinSet::new(),
            farewells: JoinSet::new(),
            refused: None,
        }
    }

    /// As a stream that never ends and never fails.
    pub fn stream(self) -> impl Stream<Item = io::Result<Accepted>> + Send {
        unfold(self, async |mut incoming| {
            let next = incoming.next().await;
            Some((Ok(next), incoming))
        })
    }

    /// The next connection. Nothing is lost when this is dropped.
    pub async fn next(&mut self) -> Accepted {
        loop {
            let accepted = tokio::select! {
                Some(shaken) = self.handshakes.join_next() => {
                    match shaken {
                        Ok(Shaken::Through(accepted)) => return accepted,
                        Ok(Shaken::Refused(told)) => self.turn_away(told),
                        Err(error) => tracing::error!(%error, "a handshake ended"),
                    }
                    continue;
                }
                Some(_) = self.farewells.join_next() => continue,
                accepted = accept(&self.listener, self.refused), if self.handshakes.len() < self.bounds.n_handshakes => accepted,
            };
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    // Out of descriptors, or a caller who left again: neither is mended by asking at once.
                    if self.refused.replace(Instant::now() + ACCEPT_PAUSE).is_none() {
                        tracing::warn!(%error, "connections are not accepted at the moment");
                    }
                    continue;
                }
            };
            self.refused = None;
            let Some(tls) = self.tls.clone() else {
                return Accepted::Plain(stream);
            };
            self.handshakes.spawn(shake(stream, tls, self.bounds));
        }
    }

    fn turn_away(&mut self, told: Option<Farewell>) {
        if let Some((stream, answer)) = told
            && self.farewells.len() < self.bounds.n_farewells
        {
            self.farewells
                .spawn(turn_away(stream, answer, self.bounds.farewell));
        }
    }
}

async fn accept(listener: &TcpListener, not_before: Option<Instant>) -> io::Result<TcpStream> {
    if let Some(at) = not_before {
        tokio::time::sleep_until(at).await;
    }
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A caller who is still there, and what it is told.
type Farewell = (TcpStream, &'static [u8]);

/// How a handshake ended.
#[derive(Debug)]
enum Shaken {
    Through(Accepted),
    /// It is counted.
    Refused(Option<Farewell>),
}

async fn shake(stream: TcpStream, tls: ServerTls, bounds: Bounds) -> Shaken {
    match shaken(stream, tls, bounds).await {
        Ok(stream) => Shaken::Through(Accepted::Tls(Box::new(stream))),
        Err((error, told)) => {
            refused(&error);
            Shaken::Refused(told)
        }
    }
}

async fn shaken(
    stream: TcpStream,
    tls: ServerTls,
    bounds: Bounds,
) -> Result<TlsStream<TcpStream>, (io::Error, Option<Farewell>)> {
    let gone = |error: io::Error| (error, None);
    let late = |late: tokio::time::error::Elapsed| (io::Error::from(late), None);
    let first = tokio::time::timeout(bounds.first_byte, answer_without_tls(&stream)).await;
    if let Some(answer) = first.map_err(late)?.map_err(gone)? {
        let without = io::Error::other("it speaks without TLS");
        return Err((without, Some((stream, answer))));
    }
    let accepted = tokio::time::timeout(bounds.handshake, tls.accept(stream)).await;
    // The library has told the caller why: nothing is added, and it is given the time to hear it.
    accepted
        .map_err(late)?
        .map_err(|(error, stream)| (error, Some((stream, &b""[..]))))
}

fn refused(error: &io::Error) {
    metrics::counter!(metric::TLS_REFUSALS).increment(1);
    tracing::debug!(%error, "handshake failed");
}

/// One of the two kinds, behind one pin.
macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Accepted::Plain($stream) => {
                let $stream = Pin::new($stream);
                $call
            }
            Accepted::Tls($stream) => {
                let $stream = Pin::new(&mut **$stream);
                $call
            }
        }
    };
}

impl AsyncRead for Accepted {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Accepted::Plain(stream) => stream.is_write_vectored(),
            Accepted::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_shutdown(context))
    }
}

impl Connected for Accepted {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        match self {
            Accepted::Plain(stream) => stream.connect_info(),
            Accepted::Tls(stream) => stream.get_ref().0.connect_info(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, Valid};
    use crate::{Protocols, ServerFiles};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    const LONG: Duration = Duration::from_secs(600);

    /// Whether a caller gets through behind others, of whom each has said `first` and says no more.
    async fn gets_through(bounds: Bounds, n_others: usize, first: &[u8]) {
        let ours = Authority::new();
        let files = ServerFiles {
            identity: ours.issue("server", &["127.0.0.1"], Valid::Now),
            client_authority: None,
            client_name: None,
            protocols: Protocols::Http2,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Incoming::new(listener, Some(ServerTls::read(files).unwrap()));
        incoming.bounds = bounds;
        let mut others = Vec::new();
        for _ in 0..n_others {
            let mut other = TcpStream::connect(address).await.unwrap();
            other.write_all(first).await.unwrap();
            others.push(other);
        }
        let caller = async {
            let stream = TcpStream::connect(address).await.unwrap();
            let name = "127.0.0.1".try_into().unwrap();
            let mut stream = ours.connector(None, &["h2"]).connect(name, stream).await.unwrap();
            stream.write_all(b"hello").await.unwrap();
            stream
        };
        let served = async {
            let mut said = [0; 5];
            incoming.next().await.read_exact(&mut said).await.unwrap();
            assert_eq!(&said, b"hello");
        };
        let both = async { tokio::join!(caller, served) };
        tokio::time::timeout(Duration::from_secs(30), both)
            .await
            .expect("a place is free again");
        drop(others);
    }

    #[tokio::test]
    async fn who_says_nothing_is_not_waited_for_as_long_as_for_a_handshake() {
        let bounds = Bounds {
            first_byte: Duration::from_millis(100),
            handshake: LONG,
            n_handshakes: 2,
            ..Bounds::default()
        };
        gets_through(bounds, 8, b"").await;
    }

    #[tokio::test]
    async fn a_handshake_that_stops_halfway_is_not_waited_for() {
        let bounds = Bounds {
            first_byte: LONG,
            handshake: Duration::from_millis(100),
            n_handshakes: 2,
            ..Bounds::default()
        };
        gets_through(bounds, 8, b"\x16\x03\x01").await;
    }

    #[tokio::test]
    async fn who_is_turned_away_holds_no_place_of_a_handshake() {
        let bounds = Bounds {
            n_handshakes: 1,
            farewell: LONG,
            n_farewells: 2,
            ..Bounds::default()
        };
        // They never hang up, and more of them come than are told why.
        gets_through(bounds, 8, b"GET / HTTP/1.1\r\n").await;
    }
}
