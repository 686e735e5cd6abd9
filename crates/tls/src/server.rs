//! The side of a listener.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::files::{Identity, TlsError, authorities, name_of, provider, unusable};
use crate::named::Named;
use crate::reload::{Current, FromFiles, Watch};

/// What is spoken inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocols {
    /// gRPC and nothing else.
    Http2,
    /// Browsers too.
    Http1And2,
}

impl Protocols {
    fn names(self) -> Vec<Vec<u8>> {
        match self {
            Protocols::Http2 => vec![b"h2".to_vec()],
            Protocols::Http1And2 => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        }
    }
}

/// The files of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFiles {
    /// What it proves itself with.
    pub identity: Identity,
    /// Whose certificates let in. Anybody without it.
    pub client_authority: Option<PathBuf>,
    /// What those certificates have to be for besides; anything without it.
    pub client_name: Option<String>,
    /// What is spoken inside.
    pub protocols: Protocols,
}

impl FromFiles for ServerFiles {
    type Made = Arc<ServerConfig>;

    fn paths(&self) -> Vec<&Path> {
        let own = [&*self.identity.certificate, &*self.identity.key];
        own.into_iter().chain(self.client_authority.as_deref()).collect()
    }

    fn read(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let (chain, key) = self.identity.read()?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&self.identity.certificate, &error))?;
        let builder = match &self.client_authority {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(authorities(path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
                let verifier = verifier.build().map_err(|error| unusable(path, &error))?;
                builder.with_client_cert_verifier(match &self.client_name {
                    None => verifier,
                    Some(name) => Arc::new(Named {
                        inner: verifier,
                        name: name_of(name)?,
                    }),
                })
            }
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| self.identity.mismatch(&error))?;
        config.alpn_protocols = self.protocols.names();
        Ok(Arc::new(config))
    }
}

/// What a listener proves itself with, and whom it lets in. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ServerTls(Current<ServerFiles>);

impl ServerTls {
    /// Read the files for the first time.
    ///
    /// # Errors
    /// A file cannot be read or used.
    pub fn read(files: ServerFiles) -> Result<Self, TlsError> {
        Current::read(files).map(Self)
    }

    /// Read the files again whenever they change, until this is dropped.
    pub fn watch(&self) -> Watch {
        self.0.watch()
    }

    /// Shake hands; who does not get through is given back.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, (io::Error, TcpStream)> {
        let acceptor = TlsAcceptor::from((*self.0.now()).clone());
        acceptor.accept(stream).into_fallible().await
    }
}
