//! What a connection that failed means to who dialled it, and what to write instead.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::refusal;

/// How the flags are called that would mend it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flags {
    /// Of a program that calls a service.
    Caller,
    /// Of a role that dials another.
    Role,
}

impl Flags {
    fn authority(self) -> &'static str {
        match self {
            Flags::Caller => "--ca",
            Flags::Role => "--internal-tls-ca",
        }
    }

    fn identity(self) -> &'static str {
        match self {
            Flags::Caller => "--cert and --key",
            Flags::Role => "--internal-tls-cert and --internal-tls-key",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Flags::Caller => "--tls-name",
            Flags::Role => "--internal-tls-name",
        }
    }
}

/// What the last connection was told that was refused. A call that finds a connection closed hears no more than that:
/// the other end may have said why before the call was made.
#[derive(Debug, Clone, Default)]
pub(crate) struct Heard(Arc<Mutex<Option<String>>>);

impl Heard {
    /// What was told before is of no matter any more.
    pub(crate) fn anew(&self) {
        *self.0.lock() = None;
    }

    pub(crate) fn last(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

/// Who is advised.
#[derive(Debug, Clone)]
pub(crate) struct Advice {
    pub(crate) flags: Flags,
    /// The certificate that is shown.
    pub(crate) shown: Option<PathBuf>,
}

impl Advice {
    /// `error` with what to do about it. What is no matter of TLS stays as it is.
    pub(crate) fn added(&self, error: io::Error) -> io::Error {
        let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        match tls.and_then(|tls| self.of(tls)) {
            Some(advice) => io::Error::new(error.kind(), format!("{error}; {advice}")),
            None => error,
        }
    }

    fn of(&self, error: &Error) -> Option<String> {
        match error {
            Error::InvalidCertificate(problem) => self.of_theirs(problem),
            Error::AlertReceived(alert) => self.of_ours(*alert),
            Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
                Some("it is served without TLS; write http://".into())
            }
            _ => None,
        }
    }

    /// On the certificate of who is dialled.
    fn of_theirs(&self, problem: &CertificateError) -> Option<String> {
        let (authority, name) = (self.flags.authority(), self.flags.name());
        match problem {
            CertificateError::UnknownIssuer => {
                Some(format!("give the authority that signed it with {authority}"))
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Some(format!("dial a name that it is for, or give one with {name}"))
            }
            CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. } => {
                Some("a new one has to be put in its place there, unless the clock here is wrong".into())
            }
            // What most recipes for a self-signed certificate make; its type is of a library below.
            CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
                Some("it is that of an authority; serve one that the authority has signed".into())
            }
            _ => None,
        }
    }

    /// On the certificate that was shown, or was not.
    fn of_ours(&self, alert: AlertDescription) -> Option<String> {
        let identity = self.flags.identity();
        let Some(shown) = &self.shown else {
            let asks = matches!(
                alert,
                AlertDescription::CertificateRequired | AlertDescription::HandshakeFailure
            );
            return asks.then(|| format!("it asks for a certificate; show one with {identity}"));
        };
        let shown = shown.display();
        match alert {
            AlertDescription::UnknownCA | AlertDescription::DecryptError => Some(format!(
                "it does not know the authority that signed {shown}; show one of its own authority with {identity}"
            )),
            AlertDescription::CertificateExpired => Some(format!("{shown} has expired; show a new one")),
            AlertDescription::UnsupportedCertificate => {
                Some(format!("{shown} is not for clients; show one that is"))
            }
            AlertDescription::BadCertificate => Some(match self.flags {
                Flags::Role => {
                    format!("{shown} has to be for the name that all roles give as --internal-tls-name")
                }
                Flags::Caller => format!("{shown} is not for a name that is let in there"),
            }),
            _ => None,
        }
    }
}

/// A connection that says what to do when the other end refuses it: with TLS 1.3 it does so when one side has begun.
#[derive(Debug)]
pub(crate) struct Advised<S> {
    stream: S,
    /// None where there is no TLS.
    advice: Option<Advice>,
    heard: Heard,
    began: bool,
}

impl<S> Advised<S> {
    pub(crate) fn new(stream: S, advice: Option<Advice>, heard: Heard) -> Self {
        Self {
            stream,
            advice,
            heard,
            began: false,
        }
    }

    fn told<T>(&self, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        outcome.map_err(|error| {
            let error = match &self.advice {
                Some(advice) => advice.added(error),
                None => error,
            };
            self.heard.0.lock().get_or_insert_with(|| error.to_string());
            error
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Advised<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let n_before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(context, buffer);
        let is_first = outcome.is_ready() && !std::mem::replace(&mut self.began, true);
        if is_first && let Some(problem) = refusal::read(&buffer.filled()[n_before..]) {
            return self.told(Poll::Ready(Err(io::Error::other(problem))));
        }
        self.told(outcome)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Advised<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.told(outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.told(outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(context);
        self.told(outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(context);
        self.told(outcome)
    }
}
