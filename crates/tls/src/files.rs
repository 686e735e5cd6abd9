//! What the files hold.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};

/// Largest file.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// A certificate with those that lead to its authority, and its private key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The certificate first, then each that signed the one before.
    pub certificate: PathBuf,
    /// PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
}

/// Why files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// It cannot be read.
    #[error("read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no PEM, or not of the kind that is wanted.
    #[error("{} holds no {wanted} in PEM", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        wanted: &'static str,
    },
    /// What certificates should be for is no name.
    #[error(
        "\"{0}\" is no name that a certificate could be for; write one like laneway.internal, or an IP address"
    )]
    Name(String),
    /// What it holds cannot be taken.
    #[error("{} cannot be used: {problem}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl TlsError {
    /// The file that cannot be used.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            TlsError::Unreadable { path, .. }
            | TlsError::Empty { path, .. }
            | TlsError::Unusable { path, .. } => Some(path),
            TlsError::Name(_) => None,
        }
    }
}

/// As a name that a certificate may be for.
pub(crate) fn name_of(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name(name.to_owned()))
}

/// The arithmetic that every connection uses.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn bytes(path: &Path) -> Result<Vec<u8>, TlsError> {
    let unreadable = |source| TlsError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let n_bytes = std::fs::metadata(path).map_err(unreadable)?.len();
    if n_bytes > MAX_FILE_BYTES {
        return Err(TlsError::Unusable {
            path: path.to_owned(),
            problem: format!("{n_bytes} bytes are over the limit of {MAX_FILE_BYTES}"),
        });
    }
    std::fs::read(path).map_err(unreadable)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&bytes(path)?).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(TlsError::Empty {
            path: path.to_owned(),
            wanted: "certificate",
        }),
        Err(error) => Err(unusable(path, &error)),
    }
}

pub(crate) fn unusable(path: &Path, problem: &dyn std::fmt::Display) -> TlsError {
    TlsError::Unusable {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}

/// A certificate with its chain, and its key.
pub(crate) type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Identity {
    pub(crate) fn read(&self) -> Result<Pair, TlsError> {
        let certificates = certificates(&self.certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&bytes(&self.key)?).map_err(|error| match error {
            pem::Error::NoItemsFound => TlsError::Empty {
                path: self.key.clone(),
                wanted: "private key",
            },
            error => unusable(&self.key, &error),
        })?;
        Ok((certificates, key))
    }

    /// What is wrong with the two together.
    pub(crate) fn mismatch(&self, error: &rustls::Error) -> TlsError {
        match error {
            rustls::Error::InconsistentKeys(_) => {
                let certificate = self.certificate.display();
                unusable(&self.key, &format!("it is not the key of {certificate}"))
            }
            error => unusable(&self.certificate, error),
        }
    }
}

/// The authorities of a file.
pub(crate) fn authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| unusable(path, &error))?;
    }
    Ok(roots)
}

/// Changes when any of the files does; what cannot be read counts as empty, and is told when it is used.
pub(crate) fn fingerprint<'a>(paths: impl Iterator<Item = &'a Path>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for path in paths {
        bytes(path).unwrap_or_default().hash(&mut hasher);
    }
    hasher.finish()
}
