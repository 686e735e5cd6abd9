//! The side of a listener.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::files::{Identity, TlsError, authorities, name_of, provider, unusable};
use crate::named::Named;
use crate::reload::{Current, FromFiles, Read, Watch};
use crate::term::Term;

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

    /// Who a certificate is shown to, as metrics have it: browsers have no business between the roles.
    fn shown_to(self) -> &'static str {
        match self {
            Protocols::Http2 => "internal",
            Protocols::Http1And2 => "public",
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

    fn read(&self) -> Result<Read<Arc<ServerConfig>>, TlsError> {
        let (chain, key) = self.identity.read()?;
        let name = self.client_name.as_deref().map(name_of).transpose()?;
        let shown_to = self.protocols.shown_to();
        // Roles have one certificate for both of their sides, so that it has to be for that name too.
        let term = Term::of(&self.identity.certificate, &chain, shown_to, name.as_ref())?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&self.identity.certificate, &error))?;
        let builder = match &self.client_authority {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(authorities(path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
                let verifier = verifier.build().map_err(|error| unusable(path, &error))?;
                builder.with_client_cert_verifier(match name {
                    None => verifier,
                    Some(name) => Arc::new(Named {
                        inner: verifier,
                        name,
                    }),
                })
            }
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| self.identity.mismatch(&error))?;
        config.alpn_protocols = self.protocols.names();
        if self.client_authority.is_some() {
            // A session that is taken up again shows no certificate: one that has expired would be let in for ever.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
        }
        Ok(Read {
            made: Arc::new(config),
            term: Some(term),
        })
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

    /// Warn of a certificate that is not for `host`, which the other roles will dial, where they ask for nothing else.
    pub(crate) fn tell_unless_for(&self, host: &str) {
        if self.0.files().client_name.is_none()
            && let Some(term) = &self.0.now().term
        {
            term.tell_unless_for(host);
        }
    }

    /// Shake hands; who does not get through is given back.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, (io::Error, TcpStream)> {
        let acceptor = TlsAcceptor::from(self.0.now().made.clone());
        acceptor.accept(stream).into_fallible().await
    }
}

#[cfg(test)]
mod tests {
    use rustls::{ClientConnection, HandshakeKind, ServerConnection, SupportedProtocolVersion};

    use super::*;
    use crate::testing::{Authority, Valid};

    /// How the second of two connections of one client came about.
    fn second(
        files: &ServerFiles,
        ours: &Authority,
        version: &'static SupportedProtocolVersion,
    ) -> HandshakeKind {
        let server = files.read().expect("the files are whole").made;
        let identity = ours.issue("client", &["client"], Valid::Now);
        let (chain, key) = identity.read().expect("it was just issued");
        let client = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[version])
            .expect("the provider has both versions")
            .with_root_certificates(authorities(&ours.file()).expect("it was just written"))
            .with_client_auth_cert(chain, key)
            .expect("they belong together");
        let mut client_config = client;
        client_config.alpn_protocols = vec![b"h2".to_vec()];
        let client_config = Arc::new(client_config);
        let connect = || {
            let name = name_of("server").expect("a name");
            let mut client = ClientConnection::new(client_config.clone(), name).expect("a client");
            let mut server = ServerConnection::new(server.clone()).expect("a server");
            // What either has to say goes to the other, tickets behind the handshake included.
            while client.wants_write() || server.wants_write() {
                let mut wire = Vec::new();
                while client.wants_write() {
                    client.write_tls(&mut wire).expect("memory takes it");
                }
                let mut wire = &wire[..];
                while !wire.is_empty() {
                    server.read_tls(&mut wire).expect("memory gives it");
                    server.process_new_packets().expect("the client is let in");
                }
                let mut wire = Vec::new();
                while server.wants_write() {
                    server.write_tls(&mut wire).expect("memory takes it");
                }
                let mut wire = &wire[..];
                while !wire.is_empty() {
                    client.read_tls(&mut wire).expect("memory gives it");
                    client.process_new_packets().expect("the server is trusted");
                }
            }
            server.handshake_kind().expect("it is over")
        };
        connect();
        connect()
    }

    #[test]
    fn a_certificate_is_looked_at_with_every_connection() {
        let ours = Authority::new();
        let files = |client_authority| ServerFiles {
            identity: ours.issue("server", &["server"], Valid::Now),
            client_authority,
            client_name: None,
            protocols: Protocols::Http2,
        };
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let asked = second(&files(Some(ours.file())), &ours, version);
            assert_eq!(asked, HandshakeKind::Full, "{version:?}");
            // Where nobody is asked for one, sessions are taken up again, and this test can tell.
            let unasked = second(&files(None), &ours, version);
            assert_eq!(unasked, HandshakeKind::Resumed, "{version:?}");
        }
    }
}
