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
    #[error("read {}", shown(path))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no PEM, or not of the kind that is wanted.
    #[error("{} holds no {wanted} in PEM", shown(path))]
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
    #[error("{} cannot be used: {problem}", shown(path))]
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

/// A path as it is said. Who gives a key where its file belongs does not read it in a log.
pub(crate) fn shown(path: &Path) -> String {
    let path = path.display().to_string();
    if path.contains("-----BEGIN") {
        return "what was given, which is no name of a file but what belongs into one,".to_owned();
    }
    path
}

/// What is wrong with a PEM, without a word of it: the library's own texts quote lines, which may be a key.
fn malformed(path: &Path, error: &pem::Error) -> TlsError {
    let problem = match error {
        pem::Error::MissingSectionEnd { .. } => {
            "a section has no end; write it with its lines as they were made"
        }
        pem::Error::IllegalSectionStart { .. } => {
            "the line that begins a section is malformed; write it with its lines as they were made"
        }
        pem::Error::Base64Decode(_) => "a section is no base64",
        _ => "it is no PEM",
    };
    unusable(path, &problem)
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
        Err(error) => Err(malformed(path, &error)),
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
            error => malformed(&self.key, &error),
        })?;
        Ok((certificates, key))
    }

    /// What is wrong with the two together.
    pub(crate) fn mismatch(&self, error: &rustls::Error) -> TlsError {
        match error {
            rustls::Error::InconsistentKeys(_) => {
                let certificate = shown(&self.certificate);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, Valid};

    /// What a log says of an identity whose files hold this.
    fn said(text: &str) -> String {
        let ours = Authority::new();
        let identity = ours.issue("a", &["a"], Valid::Now);
        std::fs::write(&identity.key, text).expect("the directory is there");
        let of_key = identity.read().expect_err("it is no key");
        std::fs::write(&identity.certificate, text).expect("the directory is there");
        let of_certificate = identity.read().expect_err("it is no certificate");
        [of_key, of_certificate]
            .map(|error| laneway_telemetry::causes_of(&error))
            .join("; ")
    }

    #[test]
    fn no_word_of_a_malformed_key_is_said() {
        let secret = "MIGHAgEAMBMGByqGSM49";
        for text in [
            format!("-----BEGIN PRIVATE KEY-----\\n{secret}\\n-----END PRIVATE KEY-----\\n"),
            format!("-----BEGIN PRIVATE KEY----- {secret} -----END PRIVATE KEY-----"),
            format!("-----BEGIN PRIVATE KEY-----\n{secret}\n"),
            format!("-----BEGIN PRIVATE KEY-----\n{secret}!\n-----END PRIVATE KEY-----\n"),
            format!("-----BEGIN PRIVATE KEY\n{secret}\n-----END PRIVATE KEY-----\n"),
        ] {
            let said = said(&text);
            // The library quotes bytes as numbers.
            let numbers: Vec<_> = secret.bytes().take(4).map(|byte| byte.to_string()).collect();
            assert!(
                !said.contains("MIGH") && !said.contains(&numbers.join(", ")),
                "{text:?}: {said}"
            );
        }
    }

    #[test]
    fn a_key_that_is_given_for_its_file_is_not_said() {
        let error = authorities(Path::new("-----BEGIN PRIVATE KEY-----\nMIGH")).expect_err("no such file");
        let said = laneway_telemetry::causes_of(&error);
        assert!(
            !said.contains("MIGH") && said.contains("no name of a file"),
            "{said}"
        );
    }
}
