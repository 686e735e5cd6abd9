//! An authority and certificates, made where a test runs.

#![allow(clippy::unwrap_used, reason = "for tests, which may panic")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use tempfile::TempDir;

use crate::Identity;
use crate::files::{authorities, provider};

/// Made in this process.
static N_AUTHORITIES: AtomicU32 = AtomicU32::new(0);

/// Signs certificates, whose files go with it.
#[derive(Debug)]
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: TempDir,
}

/// When a certificate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Valid {
    /// Today.
    Now,
    /// No longer.
    Expired,
}

impl Authority {
    /// One that nobody knows yet.
    pub fn new() -> Self {
        // Two of one name would be told apart by their signatures only.
        let number = N_AUTHORITIES.fetch_add(1, Ordering::Relaxed);
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("authority {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, directory }
    }

    /// Its own certificate.
    pub fn file(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    /// For a client that trusts it, and shows `identity` where it is asked.
    pub fn connector(&self, identity: Option<&Identity>, protocols: &[&str]) -> tokio_rustls::TlsConnector {
        let builder = rustls::ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(authorities(&self.file()).unwrap());
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let (chain, key) = identity.read().unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        std::sync::Arc::new(config).into()
    }

    /// A certificate for these names, also as a client, in files that are called `stem`.
    pub fn issue(&self, stem: &str, names: &[&str], valid: Valid) -> Identity {
        let at = |ending: &str| self.directory.path().join(format!("{stem}{ending}"));
        let identity = Identity {
            certificate: at(".pem"),
            key: at("-key.pem"),
        };
        self.reissue(&identity, names, valid);
        identity
    }

    /// Put another one in the place of `identity`.
    pub fn reissue(&self, identity: &Identity, names: &[&str], valid: Valid) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        if valid == Valid::Expired {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2001, 2, 1);
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        replace(&identity.key, &key.serialize_pem());
        replace(&identity.certificate, &certificate.pem());
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

/// As a file changes whole.
fn replace(path: &Path, text: &str) {
    let next = path.with_extension("next");
    std::fs::write(&next, text).unwrap();
    std::fs::rename(next, path).unwrap();
}
