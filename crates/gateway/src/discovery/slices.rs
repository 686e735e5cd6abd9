//! The endpoints of a Kubernetes Service, as the API server lists its EndpointSlices and then tells each change of them.
//!
//! Beside a name in the domain name system this knows of an endpoint that terminates, which takes nothing new while what it
//! carries goes on, and it knows at once. List, watch, bookmarks, versions that are gone and connections that are cut are
//! `kube`'s (its `watcher`), as are the service account's token and authority, which it reads again.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use futures::TryStreamExt as _;
use k8s_openapi::api::discovery::v1 as k8s;
use kube::Api;
use kube::config::{InClusterError, KubeConfigOptions, KubeconfigError};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};

use super::polled::{Endpoint, Found};

/// How long one watch goes on before it is asked for again. Where the connection is gone without a word, this and five
/// seconds are how late that is noticed.
const WATCH_SECONDS: u32 = 30;

/// Before all is listed again where a watch cannot go on.
const LIST_AGAIN: Duration = Duration::from_secs(1);

/// The label of a slice that names its Service.
const OF_SERVICE: &str = "kubernetes.io/service-name";

/// Longest name of a namespace, a Service or a port.
const MAX_NAME_BYTES: usize = 63;

/// Variable that names a file with the address of an API server and who asks it; its client's own.
const KUBECONFIG: &str = "KUBECONFIG";

/// A Service, and which of its ports is the workers'.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceName {
    namespace: String,
    service: String,
    port: Port,
}

/// As a slice names it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Port {
    Number(u16),
    Name(String),
}

/// What is wrong with the name of a Service.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a Service; write it like k8s://namespace/laneway-worker:7071, the port by its number or its name"
)]
pub struct NotAService;

impl FromStr for ServiceName {
    type Err = NotAService;

    /// Read `k8s://namespace/service:port`.
    fn from_str(text: &str) -> Result<Self, NotAService> {
        let rest = text.strip_prefix("k8s://").ok_or(NotAService)?;
        let (namespace, rest) = rest.split_once('/').ok_or(NotAService)?;
        let (service, port) = rest.split_once(':').ok_or(NotAService)?;
        let of_a_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let is_name = |name: &str| {
            let ends = |name: &str| name.starts_with('-') || name.ends_with('-');
            (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(of_a_name) && !ends(name)
        };
        let port = match port.parse() {
            Ok(0) => return Err(NotAService),
            Ok(number) => Port::Number(number),
            // A name has a letter, or it is a number that is too large.
            Err(_) if port.chars().any(|c| c.is_ascii_lowercase()) => Port::Name(port.to_owned()),
            Err(_) => return Err(NotAService),
        };
        let mut names = [namespace, service].into_iter();
        let named = match &port {
            Port::Name(name) => is_name(name),
            Port::Number(_) => true,
        };
        if !named || !names.all(is_name) {
            return Err(NotAService);
        }
        Ok(Self {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            port,
        })
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k8s://{}/{}:{}", self.namespace, self.service, self.port)
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Port::Number(number) => number.fmt(f),
            Port::Name(name) => name.fmt(f),
        }
    }
}

/// Why no API server can be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// It is no pod, or one without the token of a service account.
    #[error(
        "not in a pod with the token of a service account (`automountServiceAccountToken`); elsewhere name a file in {KUBECONFIG}"
    )]
    NotInACluster(#[source] InClusterError),
    /// The file cannot be used.
    #[error("read the file that {KUBECONFIG} names")]
    Kubeconfig(#[source] KubeconfigError),
    /// What it says makes no client.
    #[error("make a client of the cluster's API server")]
    Client(#[source] kube::Error),
}

/// A cluster's API server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Cluster(kube::Client);

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cluster")
    }
}

impl Cluster {
    /// That of the pod this runs in, or of the file that `KUBECONFIG` names.
    pub(crate) async fn from_environment() -> Result<Self, ClusterError> {
        let mut config = match std::env::var_os(KUBECONFIG) {
            Some(_) => {
                let options = KubeConfigOptions::default();
                kube::Config::from_kubeconfig(&options)
                    .await
                    .map_err(ClusterError::Kubeconfig)?
            }
            None => kube::Config::incluster().map_err(ClusterError::NotInACluster)?,
        };
        // A watch says something or ends after its seconds; a list and the start of a watch have no other deadline.
        config.read_timeout = Some(Duration::from_secs(u64::from(WATCH_SECONDS) + 5));
        kube::Client::try_from(config)
            .map(Self)
            .map_err(ClusterError::Client)
    }
}

/// Tell `found` of the endpoints of `service`, whenever they change. While the API server cannot be asked the last ones
/// stand: whoever asks the workers themselves finds out which of them are gone.
pub(super) async fn follow(cluster: Cluster, service: &ServiceName, found: &Found) {
    let api: Api<k8s::EndpointSlice> = Api::namespaced(cluster.0, &service.namespace);
    loop {
        watch(api.clone(), service, found).await;
        tokio::time::sleep(LIST_AGAIN).await;
    }
}

/// List, then watch, for as long as the watch can go on from where it was.
async fn watch(api: Api<k8s::EndpointSlice>, service: &ServiceName, found: &Found) {
    let config = watcher::Config::default()
        .labels(&format!("{OF_SERVICE}={}", service.service))
        .timeout(WATCH_SECONDS);
    let mut events = std::pin::pin!(watcher(api, config).default_backoff());
    let mut slices = Slices::default();
    loop {
        match events.try_next().await {
            Ok(Some(event)) => {
                if slices.heard(event, service) {
                    found.set(service, slices.endpoints());
                }
            }
            Ok(None) => return,
            Err(error) if is_gone(&error) => {
                tracing::info!(%service, "the watch is too old for the API server: endpoints are listed again");
                // The watcher lists again by itself where the watch had begun, and tries for ever where it had not.
                if matches!(error, watcher::Error::WatchStartFailed(_)) {
                    return;
                }
            }
            Err(error) => {
                let problem = told(&error, service);
                tracing::warn!(%service, error = problem, "endpoints not followed: the last ones stand");
            }
        }
    }
}

/// The API server has forgotten the version that the watch goes on from. That happens.
fn is_gone(error: &watcher::Error) -> bool {
    status_of(error).is_some_and(|status| status.code == 410)
}

fn status_of(error: &watcher::Error) -> Option<&kube::core::Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status),
        watcher::Error::WatchError(status) => Some(status),
        _ => None,
    }
}

/// What is wrong, and what to do where that is known.
fn told(error: &watcher::Error, service: &ServiceName) -> String {
    let namespace = &service.namespace;
    match status_of(error) {
        Some(status) if status.code == 403 => format!(
            "{}; bind the gateway's service account to a Role of the namespace {namespace} that may `list` and `watch` \
             `endpointslices` of `discovery.k8s.io`",
            status.message
        ),
        Some(status) if status.code == 401 => format!(
            "{}; the API server does not take the token of this service account",
            status.message
        ),
        _ => laneway_telemetry::causes_of(error),
    }
}

/// The slices of one Service.
#[derive(Debug, Default)]
struct Slices {
    /// Endpoints by the slice's name.
    known: BTreeMap<String, Vec<Endpoint>>,
    /// While all of them are listed anew.
    listed: Option<BTreeMap<String, Vec<Endpoint>>>,
}

impl Slices {
    /// Whether all that there are is known now.
    fn heard(&mut self, event: Event<k8s::EndpointSlice>, service: &ServiceName) -> bool {
        let read = |slice: k8s::EndpointSlice| {
            let endpoints = endpoints_of(&slice, service);
            (slice.metadata.name.unwrap_or_default(), endpoints)
        };
        match event {
            Event::Init => self.listed = Some(BTreeMap::new()),
            Event::InitApply(slice) => self.listed.get_or_insert_default().extend([read(slice)]),
            Event::InitDone => self.known = self.listed.take().unwrap_or_default(),
            Event::Apply(slice) => self.known.extend([read(slice)]),
            Event::Delete(slice) => {
                self.known.remove(&slice.metadata.name.unwrap_or_default());
            }
        }
        self.listed.is_none()
    }

    /// In order, each address once. While it moves from one slice to another it may be in both, and one of them is older:
    /// who says that it ends is right.
    fn endpoints(&self) -> Vec<Endpoint> {
        let mut takes: BTreeMap<SocketAddr, bool> = BTreeMap::new();
        for endpoint in self.known.values().flatten() {
            *takes.entry(endpoint.address).or_insert(true) &= endpoint.takes_requests;
        }
        let endpoint = |(address, takes_requests)| Endpoint {
            address,
            takes_requests,
        };
        takes.into_iter().map(endpoint).collect()
    }
}

/// What a slice says of the workers behind it.
fn endpoints_of(slice: &k8s::EndpointSlice, service: &ServiceName) -> Vec<Endpoint> {
    let name = slice.metadata.name.as_deref().unwrap_or_default();
    let Some(port) = port_of(slice, &service.port) else {
        // Nobody is ready in a slice without ports.
        if !slice.endpoints.is_empty() {
            let ports = slice.ports.iter().flatten();
            let ports: Vec<_> = ports.map(|port| (port.name.as_deref(), port.port)).collect();
            tracing::warn!(%service, slice = name, ?ports, "the Service has no such port: nobody is found there");
        }
        return Vec::new();
    };
    let endpoint = |endpoint: &k8s::Endpoint| {
        // More than the first has no meaning. A name in its place, of a slice of names, is no address.
        let first = endpoint.addresses.first()?;
        let Ok(ip) = first.parse::<IpAddr>() else {
            tracing::warn!(%service, slice = name, address = first, "not an address: nobody is found there");
            return None;
        };
        let conditions = endpoint.conditions.as_ref();
        let is = |condition: Option<bool>, unsaid: bool| condition.unwrap_or(unsaid);
        let ready = is(conditions.and_then(|conditions| conditions.ready), true);
        let serving = is(conditions.and_then(|conditions| conditions.serving), true);
        let terminating = is(conditions.and_then(|conditions| conditions.terminating), false);
        Some(Endpoint {
            address: SocketAddr::new(ip, port),
            takes_requests: ready && serving && !terminating,
        })
    };
    slice.endpoints.iter().filter_map(endpoint).collect()
}

fn port_of(slice: &k8s::EndpointSlice, wanted: &Port) -> Option<u16> {
    let mut ports = slice.ports.iter().flatten();
    let port = ports.find(|port| match wanted {
        Port::Number(number) => port.port == Some(i32::from(*number)),
        Port::Name(name) => port.name.as_deref() == Some(name),
    })?;
    u16::try_from(port.port?).ok()
}
