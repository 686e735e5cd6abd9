//! The flags of both sides, with their environment variables. Each group is given whole or not at all.

use std::path::PathBuf;

use clap::Args;

use crate::client::{ClientFiles, ClientTls, Dial};
use crate::files::Identity;
use crate::server::{Protocols, ServerFiles, ServerTls};
use crate::{InternalTls, TlsError};

/// A flag whose value cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{flag} = \"{value}\": {problem}")]
pub struct Violation {
    /// The flag.
    pub flag: &'static str,
    /// What was given.
    pub value: String,
    /// What is wrong and what to write instead.
    pub problem: String,
}

/// TLS of the public API.
#[derive(Debug, Clone, Default, Args)]
pub struct PublicTlsArgs {
    /// Certificate of the public API, with those that lead to its authority, in PEM. With it nothing is served without
    /// TLS. The files of TLS are read again when they change.
    #[arg(long = "tls-cert", env = "LANEWAY_GATEWAY_TLS_CERT")]
    certificate: Option<PathBuf>,
    /// Private key of that certificate, in PEM.
    #[arg(long = "tls-key", env = "LANEWAY_GATEWAY_TLS_KEY")]
    key: Option<PathBuf>,
    /// Authority whose certificates callers have to show; without it they need none.
    #[arg(long = "tls-client-ca", env = "LANEWAY_GATEWAY_TLS_CLIENT_CA")]
    client_authority: Option<PathBuf>,
}

/// Mutual TLS between gateway, workers and engine-manager.
#[derive(Debug, Clone, Default, Args)]
pub struct InternalTlsArgs {
    /// Certificate of this role for the other roles, as a server and as a client, in PEM. With it every connection
    /// between roles is mutual TLS.
    #[arg(long = "internal-tls-cert", env = "LANEWAY_INTERNAL_TLS_CERT")]
    certificate: Option<PathBuf>,
    /// Private key of that certificate, in PEM.
    #[arg(long = "internal-tls-key", env = "LANEWAY_INTERNAL_TLS_KEY")]
    key: Option<PathBuf>,
    /// Authority that signed the certificates of all roles.
    #[arg(long = "internal-tls-ca", env = "LANEWAY_INTERNAL_TLS_CA")]
    authority: Option<PathBuf>,
    /// Name that the certificate of every role is for; without it each is for the host that is dialled.
    #[arg(long = "internal-tls-name", env = "LANEWAY_INTERNAL_TLS_NAME")]
    name: Option<String>,
}

/// TLS of a program that calls a service.
#[derive(Debug, Clone, Default, Args)]
pub struct ClientTlsArgs {
    /// Authority that signed the certificate of the service that is called; those of the public web without it.
    #[arg(long = "ca", env = "LANEWAY_CA")]
    authority: Option<PathBuf>,
    /// Certificate to show to a service that asks for one, in PEM.
    #[arg(long = "cert", env = "LANEWAY_CERT")]
    certificate: Option<PathBuf>,
    /// Private key of that certificate.
    #[arg(long = "key", env = "LANEWAY_KEY")]
    key: Option<PathBuf>,
    /// Name that the certificate of the service is for; the host that is dialled without it.
    #[arg(long = "tls-name", env = "LANEWAY_TLS_NAME")]
    name: Option<String>,
}

fn shown(path: &Option<PathBuf>) -> String {
    path.as_ref()
        .map_or_else(String::new, |path| path.display().to_string())
}

fn incomplete(flag: &'static str, missing: &str) -> Vec<Violation> {
    vec![Violation {
        flag,
        value: String::new(),
        problem: format!("it is missing; {missing}"),
    }]
}

fn unusable(flag: &'static str, path: &Option<PathBuf>, error: &TlsError) -> Vec<Violation> {
    vec![Violation {
        flag,
        value: shown(path),
        problem: laneway_telemetry::causes_of(error),
    }]
}

impl PublicTlsArgs {
    /// Read the files, where any is named.
    ///
    /// # Errors
    /// One that is missing, or cannot be used.
    pub fn read(&self) -> Result<Option<ServerTls>, Vec<Violation>> {
        let (certificate, key) = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => (certificate.clone(), key.clone()),
            (None, None) if self.client_authority.is_none() => return Ok(None),
            (Some(_), None) => return Err(incomplete("--tls-key", "give the key of --tls-cert")),
            (None, _) => return Err(incomplete("--tls-cert", "give the certificate of the public API")),
        };
        let files = ServerFiles {
            identity: Identity { certificate, key },
            client_authority: self.client_authority.clone(),
            protocols: Protocols::Http1And2,
        };
        let read = ServerTls::read(files);
        read.map(Some)
            .map_err(|error| unusable("--tls-cert", &self.certificate, &error))
    }
}

impl InternalTlsArgs {
    /// Read the files, where any is named.
    ///
    /// # Errors
    /// One that is missing, or cannot be used.
    pub fn read(&self) -> Result<Option<InternalTls>, Vec<Violation>> {
        if self.certificate.is_none() && self.key.is_none() && self.authority.is_none() && self.name.is_none()
        {
            return Ok(None);
        }
        let all = "mutual TLS between roles takes certificate, key and authority";
        let certificate = self
            .certificate
            .clone()
            .ok_or_else(|| incomplete("--internal-tls-cert", all))?;
        let key = self
            .key
            .clone()
            .ok_or_else(|| incomplete("--internal-tls-key", all))?;
        let authority = self
            .authority
            .clone()
            .ok_or_else(|| incomplete("--internal-tls-ca", all))?;
        let read = InternalTls::read(Identity { certificate, key }, authority, self.name.clone());
        read.map(Some)
            .map_err(|error| unusable("--internal-tls-cert", &self.certificate, &error))
    }

    /// The flags that say the same to another process.
    pub fn flags(&self) -> Vec<std::ffi::OsString> {
        let path = |flag: &str, path: &Option<PathBuf>| {
            let given = path.as_ref().map(|path| [flag.into(), path.into()]);
            given.into_iter().flatten()
        };
        let name = self
            .name
            .as_ref()
            .map(|name| ["--internal-tls-name".into(), name.into()]);
        path("--internal-tls-cert", &self.certificate)
            .chain(path("--internal-tls-key", &self.key))
            .chain(path("--internal-tls-ca", &self.authority))
            .chain(name.into_iter().flatten())
            .collect()
    }
}

impl ClientTlsArgs {
    /// How `address` is dialled: with TLS when it is https.
    ///
    /// # Errors
    /// A file that is missing, cannot be used, or is of no use.
    pub fn dial(&self, address: &str) -> Result<Dial, Vec<Violation>> {
        let given = [
            ("--ca", shown(&self.authority)),
            ("--cert", shown(&self.certificate)),
            ("--key", shown(&self.key)),
            ("--tls-name", self.name.clone().unwrap_or_default()),
        ];
        if !address.starts_with("https://") {
            let of_no_use = given.into_iter().find(|(_, value)| !value.is_empty());
            return match of_no_use {
                None => Ok(Dial::default()),
                Some((flag, value)) => Err(vec![Violation {
                    flag,
                    value,
                    problem: format!("{address} is called without TLS; write https:// in front of it"),
                }]),
            };
        }
        let identity = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Some(Identity {
                certificate: certificate.clone(),
                key: key.clone(),
            }),
            (None, None) => None,
            (Some(_), None) => return Err(incomplete("--key", "give the key of --cert")),
            (None, Some(_)) => return Err(incomplete("--cert", "give the certificate of --key")),
        };
        let files = ClientFiles {
            identity,
            authority: self.authority.clone(),
            name: self.name.clone(),
        };
        let read = ClientTls::read(files);
        read.map(|tls| Some(tls).into())
            .map_err(|error| unusable("--ca", &self.authority, &error))
    }
}
