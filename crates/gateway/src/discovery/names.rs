//! Names whose addresses are workers, such as that of a headless service.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// Until a lookup counts as unanswered.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A name in the domain name system, and the port of the workers behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsName {
    host: String,
    port: u16,
}

/// What is wrong with a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a name to look up; write it like dns://laneway-worker:7071")]
pub struct NotADnsName;

impl FromStr for DnsName {
    type Err = NotADnsName;

    /// Read `dns://name:port`.
    fn from_str(text: &str) -> Result<Self, NotADnsName> {
        let (host, port) = text
            .strip_prefix("dns://")
            .and_then(|rest| rest.rsplit_once(':'))
            .ok_or(NotADnsName)?;
        let of_a_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let port = port.parse().ok().filter(|port| *port > 0).ok_or(NotADnsName)?;
        if host.is_empty() || host.len() > 253 || !host.chars().all(of_a_name) {
            return Err(NotADnsName);
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dns://{}:{}", self.host, self.port)
    }
}

/// Says what a name stands for.
#[tonic::async_trait]
pub(super) trait Resolver: Send + Sync {
    /// The addresses, in order and each once.
    async fn addresses(&self, name: &DnsName) -> std::io::Result<Vec<SocketAddr>>;
}

/// The system's own resolver, which knows of search domains and of the files beside the domain name system. It does not
/// say how long an answer is good for.
#[derive(Debug)]
pub(super) struct System;

#[tonic::async_trait]
impl Resolver for System {
    async fn addresses(&self, name: &DnsName) -> std::io::Result<Vec<SocketAddr>> {
        let lookup = tokio::net::lookup_host((name.host.as_str(), name.port));
        let answered = tokio::time::timeout(TIMEOUT, lookup)
            .await
            .map_err(|_| std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer in time"))??;
        let mut addresses: Vec<_> = answered.collect();
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_or_refused() {
        for name in ["dns://worker:7071", "dns://worker.speech.svc.cluster.local.:1"] {
            assert_eq!(name.parse::<DnsName>().unwrap().to_string(), name);
        }
        for name in [
            "worker:7071",
            "dns://worker",
            "dns://:7071",
            "dns://worker:0",
            "dns://worker:99999",
            "dns://a b:1",
            "dns://worker/x:1",
            "dns://[::1]:1",
        ] {
            assert_eq!(name.parse::<DnsName>(), Err(NotADnsName), "{name}");
        }
    }
}
