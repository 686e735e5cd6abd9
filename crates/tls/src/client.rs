//! The side of who dials.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::Service as _;

use crate::advice::{Advice, Advised, Flags, Heard};
use crate::files::{Identity, TlsError, authorities, name_of, provider, unusable};
use crate::reload::{Current, FromFiles, Read, Watch};

/// A connection that was dialled, with TLS and without.
type Encrypted = TokioIo<Advised<TlsStream<TcpStream>>>;
type Open = TokioIo<Advised<TcpStream>>;

/// The files of who dials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// What it proves itself with, where it is asked.
    pub identity: Option<Identity>,
    /// Who has to have signed the other end's certificate; the authorities of the public web without it.
    pub authority: Option<PathBuf>,
    /// What the other end's certificate has to be for; the host that is dialled without it.
    pub name: Option<String>,
}

impl FromFiles for ClientFiles {
    type Made = Arc<ClientConfig>;

    fn paths(&self) -> Vec<&Path> {
        let own = self
            .identity
            .iter()
            .flat_map(|own| [&*own.certificate, &*own.key]);
        own.chain(self.authority.as_deref()).collect()
    }

    fn read(&self) -> Result<Read<Arc<ClientConfig>>, TlsError> {
        let roots = match &self.authority {
            Some(path) => authorities(path)?,
            None => RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(Path::new("the provider"), &error))?
            .with_root_certificates(roots);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let (chain, key) = identity.read()?;
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(|error| identity.mismatch(&error))?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Read {
            made: Arc::new(config),
            // A role shows the same one where it listens, and who calls a service is told when it is refused.
            term: None,
        })
    }
}

/// Whom it trusts, and what it proves itself with. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ClientTls {
    current: Current<ClientFiles>,
    advice: Advice,
}

impl ClientTls {
    /// Read the files for the first time.
    ///
    /// # Errors
    /// A file cannot be read or used, or the name is none.
    pub fn read(files: ClientFiles) -> Result<Self, TlsError> {
        Self::advised(files, Flags::Caller)
    }

    /// The same for a role that dials another.
    pub(crate) fn of_role(files: ClientFiles) -> Result<Self, TlsError> {
        Self::advised(files, Flags::Role)
    }

    fn advised(files: ClientFiles, flags: Flags) -> Result<Self, TlsError> {
        files.name.as_deref().map(name_of).transpose()?;
        let shown = files.identity.as_ref().map(|own| own.certificate.clone());
        Ok(Self {
            current: Current::read(files)?,
            advice: Advice { flags, shown },
        })
    }

    /// Read the files again whenever they change, until this is dropped.
    pub fn watch(&self) -> Watch {
        self.current.watch()
    }

    async fn dial(self, uri: Uri, heard: Heard) -> io::Result<Encrypted> {
        let (host, stream) = reach(&uri, &heard).await?;
        let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem);
        let name = self.current.files().name.as_deref().unwrap_or(host);
        let name = name_of(name).map_err(|error| invalid(error.to_string()))?;
        let connector = TlsConnector::from(self.current.now().made.clone());
        let advice = self.advice;
        match connector.connect(name, stream).await {
            Ok(stream) => Ok(TokioIo::new(Advised::new(stream, Some(advice), heard))),
            Err(error) => Err(advice.added(error)),
        }
    }
}

/// A connection to where `uri` leads, and the host there. Where a host has addresses of both kinds, one that does not
/// answer is not waited for.
async fn reach<'a>(uri: &'a Uri, heard: &Heard) -> io::Result<(&'a str, TcpStream)> {
    heard.anew();
    let nowhere = || io::Error::new(io::ErrorKind::InvalidInput, format!("{uri} names no host"));
    // An address of IPv6 stands in brackets.
    let host = uri.host().ok_or_else(nowhere)?.trim_matches(['[', ']']);
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    let stream = connector.call(uri.clone()).await.map_err(io::Error::other)?;
    Ok((host, stream.into_inner()))
}

async fn dial_open(uri: Uri, heard: Heard) -> io::Result<Open> {
    let (_, stream) = reach(&uri, &heard).await?;
    Ok(TokioIo::new(Advised::new(stream, None, heard)))
}

/// An address that is not dialled as it stands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// It is no address.
    #[error("\"{0}\" is not an address; write it like host:port")]
    Malformed(String),
    /// Nothing is there to check the other end with.
    #[error("\"{0}\" asks for TLS, for which there are no certificates here; give them, or write http://")]
    NoCertificates(String),
    /// What is sent would be open to read.
    #[error("\"{0}\" is without TLS, and there are certificates to use; write https://, or leave them out")]
    Open(String),
}

/// How addresses are dialled: with TLS, or all of them without. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Dial {
    tls: Option<ClientTls>,
    heard: Heard,
}

impl From<Option<ClientTls>> for Dial {
    fn from(tls: Option<ClientTls>) -> Self {
        Self {
            tls,
            heard: Heard::default(),
        }
    }
}

impl Dial {
    /// Scheme of an address that names none.
    pub fn scheme(&self) -> &'static str {
        match self.tls {
            Some(_) => "https",
            None => "http",
        }
    }

    /// `host:port` or a whole URI, as a URI that is dialled so.
    ///
    /// # Errors
    /// It is none, or its scheme says otherwise.
    pub fn uri(&self, address: &str) -> Result<Uri, AddressError> {
        let whole = match address.contains("://") {
            true => address.to_owned(),
            false => format!("{}://{address}", self.scheme()),
        };
        let parsed = whole.parse::<Uri>().ok().filter(|uri| uri.host().is_some());
        let malformed = || AddressError::Malformed(address.to_owned());
        let uri = parsed.ok_or_else(malformed)?;
        match (uri.scheme_str(), &self.tls) {
            (Some("https"), Some(_)) | (Some("http"), None) => Ok(uri),
            (Some("https"), None) => Err(AddressError::NoCertificates(address.to_owned())),
            (Some("http"), Some(_)) => Err(AddressError::Open(address.to_owned())),
            _ => Err(malformed()),
        }
    }

    /// A channel that connects when it is used, and again whenever the connection is lost. With TLS nothing goes out
    /// without it, whatever the address says: an endpoint that is a Unix socket is not for this.
    pub fn lazy(&self, endpoint: Endpoint) -> Channel {
        match self.tls.clone() {
            Some(tls) => endpoint.connect_with_connector_lazy(self.connector(tls)),
            None => endpoint.connect_lazy(),
        }
    }

    /// A channel that is connected.
    ///
    /// # Errors
    /// It cannot be.
    pub async fn connect(&self, endpoint: Endpoint) -> Result<Channel, tonic::transport::Error> {
        let heard = self.heard.clone();
        let open = tower::service_fn(move |uri: Uri| dial_open(uri, heard.clone()));
        match self.tls.clone() {
            Some(tls) => endpoint.connect_with_connector(self.connector(tls)).await,
            None => endpoint.connect_with_connector(open).await,
        }
    }

    /// Why a call failed on the one channel that this made: also where the connection had been refused before the call came
    /// to it. Without TLS only [`Dial::connect`] hears that.
    pub fn why(&self, status: &tonic::Status) -> String {
        let said = laneway_telemetry::causes_of_status(status);
        match self.heard.last() {
            Some(heard) if !said.contains(&heard) => format!("{said}: {heard}"),
            _ => said,
        }
    }

    fn connector(
        &self,
        tls: ClientTls,
    ) -> impl tower::Service<
        Uri,
        Response = Encrypted,
        Error = io::Error,
        Future = impl Future<Output = io::Result<Encrypted>> + Send + use<>,
    > + Send
    + use<> {
        let heard = self.heard.clone();
        tower::service_fn(move |uri: Uri| tls.clone().dial(uri, heard.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_what_it_is_dialled_with() {
        let with = Dial::from(Some(ClientTls::read(ClientFiles::default()).unwrap()));
        let without = Dial::default();
        let uri = |dial: &Dial, address: &str| dial.uri(address).map(|uri| uri.to_string());
        assert_eq!(uri(&without, "host:1").unwrap(), "http://host:1/");
        assert_eq!(uri(&with, "host:1").unwrap(), "https://host:1/");
        assert_eq!(uri(&with, "https://[::1]:1").unwrap(), "https://[::1]:1/");
        let refused = |dial: &Dial, address: &str| uri(dial, address).unwrap_err();
        assert!(matches!(
            refused(&without, "https://host:1"),
            AddressError::NoCertificates(_)
        ));
        assert!(matches!(refused(&with, "http://host:1"), AddressError::Open(_)));
        for none in ["", "no address", "ftp://host:1", "http://"] {
            assert!(
                matches!(refused(&without, none), AddressError::Malformed(_)),
                "{none}"
            );
        }
    }
}
