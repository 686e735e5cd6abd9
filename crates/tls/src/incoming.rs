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

/// Until a caller has shown who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Handshakes at once; who comes then waits in the kernel's queue, for no longer than the timeout.
const MAX_HANDSHAKES: usize = 4096;

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
    handshakes: JoinSet<Option<Accepted>>,
    /// The last one could not be accepted, which was told; none is until then.
    refused: Option<Instant>,
}

impl Incoming {
    /// Of `listener`, which asks for TLS when `tls` is there.
    pub fn new(listener: TcpListener, tls: Option<ServerTls>) -> Self {
        Self {
            listener,
            tls,
            handshakes: JoinSet::new(),
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
                        Ok(Some(accepted)) => return accepted,
                        // It was told.
                        Ok(None) => {}
                        Err(error) => tracing::error!(%error, "a handshake ended"),
                    }
                    continue;
                }
                accepted = accept(&self.listener, self.refused), if self.handshakes.len() < MAX_HANDSHAKES => accepted,
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
            self.handshakes.spawn(shake(stream, tls));
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

/// A caller who gets through. Who does not is counted, and hears why.
async fn shake(stream: TcpStream, tls: ServerTls) -> Option<Accepted> {
    let shaken = async {
        match answer_without_tls(&stream).await {
            Ok(None) => match tls.accept(stream).await {
                Ok(stream) => Ok(stream),
                Err((error, stream)) => Err((error, Some((stream, &b""[..])))),
            },
            Ok(Some(answer)) => Err((io::Error::other("it speaks without TLS"), Some((stream, answer)))),
            Err(error) => Err((error, None)),
        }
    };
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, shaken).await {
        Ok(Ok(stream)) => Some(Accepted::Tls(Box::new(stream))),
        Ok(Err((error, told))) => {
            refused(&error);
            if let Some((stream, answer)) = told {
                turn_away(stream, answer).await;
            }
            None
        }
        Err(late) => {
            refused(&late.into());
            None
        }
    }
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
