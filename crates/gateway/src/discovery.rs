//! Where workers come from: the engine-manager's topology (`discovery/topology.rs`), or addresses that are asked
//! themselves (`discovery/polled.rs`): fixed ones, those that names stand for (`discovery/names.rs`) and those that a
//! cluster lists as a Service's (`discovery/slices.rs`).
//!
//! A [`Discovery`] owns the latest list of workers, which it publishes on a `watch` channel; whoever holds its sender is
//! the discovery, so tests publish lists of their own. Its task is started by `Gateway::serve` and ends with it.

mod names;
mod polled;
mod slices;
mod topology;

use laneway_tls::Dial;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::config::{DiscoveryConfig, LinkConfig};
use crate::facts::Worker;

pub use names::{DnsName, NotADnsName};
pub(crate) use slices::Cluster;
pub use slices::{ClusterError, NotAService, ServiceName};

/// Bytes of a stream that its worker may send ahead of its reader.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 64 << 10;

/// Largest window that HTTP/2 has.
const MAX_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// Room in a connection for what all its streams may hold unread, so that callers who do not read cannot keep the
/// rest of them from their audio.
fn connection_window(n_streams: usize) -> u32 {
    let n_streams = u32::try_from(n_streams).unwrap_or(u32::MAX).saturating_add(1);
    n_streams
        .saturating_mul(STREAM_WINDOW_BYTES)
        .min(MAX_WINDOW_BYTES)
}

/// A lazily connected channel that notices a peer which is gone without a word.
pub(crate) fn channel(uri: Uri, config: &LinkConfig) -> Channel {
    dialled(uri, config).0
}

/// The same, with what knows why a call on it failed.
fn dialled(uri: Uri, config: &LinkConfig) -> (Channel, Dial) {
    let endpoint = Endpoint::from(uri)
        .connect_timeout(config.connect_timeout)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(connection_window(config.max_streams.get()))
        .http2_keep_alive_interval(config.keep_alive_interval)
        .keep_alive_timeout(config.keep_alive_timeout)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true);
    let dial = config.dial();
    (dial.lazy(endpoint), dial)
}

/// A source of workers.
#[tonic::async_trait]
pub(crate) trait Discovery: Send {
    /// Publish the workers that there are, whenever that changes, until nobody listens.
    async fn run(self: Box<Self>, workers: watch::Sender<Vec<Worker>>);
}

impl DiscoveryConfig {
    /// The API server that it asks, where it asks one.
    ///
    /// # Errors
    /// Nothing says where that is, or who asks.
    pub(crate) async fn cluster(&self) -> Result<Option<Cluster>, ClusterError> {
        match self {
            Self::Named { services, .. } if !services.is_empty() => {
                Cluster::from_environment().await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The source that is configured. `cluster` is [`DiscoveryConfig::cluster`].
    pub(crate) fn source(self, cluster: Option<Cluster>, link: LinkConfig) -> Box<dyn Discovery> {
        let (fixed, names, services) = match self {
            Self::EngineManager(uri) => return Box::new(topology::Topology { uri, link }),
            Self::Static(uris) => (uris, Vec::new(), Vec::new()),
            Self::Named {
                fixed,
                names,
                services,
            } => (fixed, names, services),
        };
        let services = cluster.into_iter().flat_map(|cluster| {
            let with = move |service| (cluster.clone(), service);
            services.clone().into_iter().map(with)
        });
        Box::new(polled::Polling {
            fixed,
            names,
            services: services.collect(),
            resolver: std::sync::Arc::new(names::System),
            link,
        })
    }
}

/// Publish a list that differs from the last one.
fn publish(workers: &watch::Sender<Vec<Worker>>, found: Vec<Worker>) {
    workers.send_if_modified(|current| {
        let changed = *current != found;
        *current = found;
        changed
    });
}
