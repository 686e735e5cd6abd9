//! The flags of both sides, with their environment variables. Each group is given whole or not at all. Programs take
//! several groups, so that no field's name may be the flag's.

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
    #[arg(id = "tls-cert", long, env = "LANEWAY_GATEWAY_TLS_CERT", value_name = "FILE")]
    certificate: Option<PathBuf>,
    /// Private key of that certificate, in PEM.
    #[arg(id = "tls-key", long, env = "LANEWAY_GATEWAY_TLS_KEY", value_name = "FILE")]
    key: Option<PathBuf>,
    /// Authority whose certificates callers have to show; without it they need none.
    #[arg(
        id = "tls-client-ca",
        long,
        env = "LANEWAY_GATEWAY_TLS_CLIENT_CA",
        value_name = "FILE"
    )]
    client_authority: Option<PathBuf>,
}

/// Mutual TLS between gateway, workers and engine-manager.
#[derive(Debug, Clone, Default, Args)]
pub struct InternalTlsArgs {
    /// Certificate of this role for the other roles, as a server and as a client, in PEM. With it every connection
    /// between roles is mutual TLS.
    #[arg(
        id = "internal-tls-cert",
        long,
        env = "LANEWAY_INTERNAL_TLS_CERT",
        value_name = "FILE"
    )]
    certificate: Option<PathBuf>,
    /// Private key of that certificate, in PEM.
    #[arg(
        id = "internal-tls-key",
        long,
        env = "LANEWAY_INTERNAL_TLS_KEY",
        value_name = "FILE"
    )]
    key: Option<PathBuf>,
    /// Authority that signed the certificates of all roles.
    #[arg(
        id = "internal-tls-ca",
        long,
        env = "LANEWAY_INTERNAL_TLS_CA",
        value_name = "FILE"
    )]
    authority: Option<PathBuf>,
    /// Name that the certificate of every role is for; without it each is for the host that is dialled.
    #[arg(
        id = "internal-tls-name",
        long,
        env = "LANEWAY_INTERNAL_TLS_NAME",
        value_name = "NAME"
    )]
    name: Option<String>,
}

/// TLS of a program that calls a service.
#[derive(Debug, Clone, Default, Args)]
pub struct ClientTlsArgs {
    /// Authority that signed the certificate of the service that is called; those of the public web without it.
    #[arg(id = "ca", long, env = "LANEWAY_CA", value_name = "FILE")]
    authority: Option<PathBuf>,
    /// Certificate to show to a service that asks for one, in PEM.
    #[arg(id = "cert", long, env = "LANEWAY_CERT", value_name = "FILE")]
    certificate: Option<PathBuf>,
    /// Private key of that certificate.
    #[arg(id = "key", long, env = "LANEWAY_KEY", value_name = "FILE")]
    key: Option<PathBuf>,
    /// Name that the certificate of the service is for; the host that is dialled without it.
    #[arg(id = "tls-name", long, env = "LANEWAY_TLS_NAME", value_name = "NAME")]
    name: Option<String>,
}

fn shown(path: &Option<PathBuf>) -> String {
    path.as_deref().map_or_else(String::new, crate::files::shown)
}

fn incomplete(flag: &'static str, missing: &str) -> Vec<Violation> {
    vec![Violation {
        flag,
        value: String::new(),
        problem: format!("it is missing; {missing}"),
    }]
}

/// A violation of the flag that gave the file, or else of `name`.
fn unusable(
    files: &[(&'static str, &Option<PathBuf>)],
    name: (&'static str, &Option<String>),
    error: &TlsError,
) -> Vec<Violation> {
    let of_file = error.path().and_then(|path| {
        let mut files = files.iter();
        files.find(|(_, given)| given.as_deref() == Some(path))
    });
    let (flag, value) = match of_file {
        Some((flag, path)) => (*flag, shown(path)),
        None => (name.0, name.1.clone().unwrap_or_default()),
    };
    vec![Violation {
        flag,
        value,
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
            client_name: None,
            protocols: Protocols::Http1And2,
        };
        let given = [
            ("--tls-cert", &self.certificate),
            ("--tls-key", &self.key),
            ("--tls-client-ca", &self.client_authority),
        ];
        let read = ServerTls::read(files).map(Some);
        read.map_err(|error| unusable(&given, ("--tls-cert", &None), &error))
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
        let given = [
            ("--internal-tls-cert", &self.certificate),
            ("--internal-tls-key", &self.key),
            ("--internal-tls-ca", &self.authority),
        ];
        let name = ("--internal-tls-name", &self.name);
        read.map(Some).map_err(|error| unusable(&given, name, &error))
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
    /// The first flag that was given, with its value.
    pub fn first(&self) -> Option<(&'static str, String)> {
        let files = [
            ("--ca", &self.authority),
            ("--cert", &self.certificate),
            ("--key", &self.key),
        ];
        let file = files.into_iter().find(|(_, path)| path.is_some());
        let name = self.name.clone().map(|name| ("--tls-name", name));
        file.map(|(flag, path)| (flag, shown(path))).or(name)
    }

    /// How `address` is dialled: with TLS when it is https, or when it names no scheme and any of this is given.
    ///
    /// # Errors
    /// A file that is missing, cannot be used, or is of no use.
    pub fn dial(&self, address: &str) -> Result<Dial, Vec<Violation>> {
        match self.first() {
            Some((flag, value)) if address.starts_with("http://") => {
                return Err(vec![Violation {
                    flag,
                    value,
                    problem: format!(
                        "it is for TLS, and {address} is without; write https://, or leave it out"
                    ),
                }]);
            }
            None if !address.starts_with("https://") => return Ok(Dial::default()),
            _ => {}
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
        let given = [
            ("--ca", &self.authority),
            ("--cert", &self.certificate),
            ("--key", &self.key),
        ];
        let read = ClientTls::read(files).map(|tls| Some(tls).into());
        read.map_err(|error| unusable(&given, ("--tls-name", &self.name), &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, Valid};

    fn violated<T>(read: Result<T, Vec<Violation>>, flag: &str, words: &str) {
        let said = read.err().expect("it is refused");
        let [violation] = &said[..] else {
            panic!("{said:?}")
        };
        assert!(
            violation.flag == flag && violation.problem.contains(words),
            "{violation}"
        );
    }

    #[test]
    fn an_address_without_a_scheme_is_dialled_with_what_is_given() {
        let ours = Authority::new();
        let none = ClientTlsArgs::default();
        assert_eq!(none.first(), None);
        assert_eq!(none.dial("host:1").unwrap().scheme(), "http");
        // The authorities of the web are enough.
        assert_eq!(none.dial("https://host:1").unwrap().scheme(), "https");
        let some = ClientTlsArgs {
            authority: Some(ours.file()),
            ..none
        };
        assert_eq!(some.dial("host:1").unwrap().scheme(), "https");
        violated(some.dial("http://host:1"), "--ca", "write https://");
        let named = ClientTlsArgs {
            name: Some("no name".into()),
            ..some
        };
        violated(named.dial("host:1"), "--tls-name", "write one like");
    }

    #[test]
    fn the_flag_whose_file_is_wrong_is_the_one_that_is_named() {
        let ours = Authority::new();
        let [a, b] = ["a", "b"].map(|stem| ours.issue(stem, &["a"], Valid::Now));
        let public = |key: Option<PathBuf>, client_authority: Option<PathBuf>| PublicTlsArgs {
            certificate: Some(a.certificate.clone()),
            key,
            client_authority,
        };
        assert!(public(Some(a.key.clone()), None).read().unwrap().is_some());
        violated(public(None, None).read(), "--tls-key", "give the key");
        violated(
            public(Some(b.key.clone()), None).read(),
            "--tls-key",
            "it is not the key",
        );
        let nowhere = PathBuf::from("/nowhere");
        violated(
            public(Some(a.key.clone()), Some(nowhere)).read(),
            "--tls-client-ca",
            "No such file",
        );
        let alone = PublicTlsArgs {
            client_authority: Some(ours.file()),
            ..PublicTlsArgs::default()
        };
        violated(alone.read(), "--tls-cert", "give the certificate");

        let internal = |name: &str, authority| InternalTlsArgs {
            certificate: Some(a.certificate.clone()),
            key: Some(a.key.clone()),
            authority,
            name: Some(name.into()),
        };
        let whole = internal("a", Some(ours.file()));
        assert!(whole.read().unwrap().is_some());
        assert_eq!(whole.flags().len(), 8);
        violated(internal("a", None).read(), "--internal-tls-ca", "authority");
        violated(
            internal("a b", Some(ours.file())).read(),
            "--internal-tls-name",
            "write one like",
        );
    }
}
