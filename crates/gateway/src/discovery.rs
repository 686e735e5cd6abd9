//! Where workers come from: the engine-manager's topology, or a fixed list whose members are asked.
//!
//! Owns: the latest list of workers, published on a `watch` channel; whoever holds its sender is the
//! discovery, so tests publish lists of their own. The task is started by `Config::build` and ends when the
//! gateway stops.

use std::time::Duration;

use laneway_proto::v1;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_proto::v1::worker_client::WorkerClient;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::config::{DiscoveryConfig, LinkConfig};
use crate::facts::Worker;

/// Longest pause between attempts to reach the engine-manager.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// Questions for a status in a row without an answer after which a worker of a fixed list is gone. One may be lost
/// to a busy machine; a call that fails finds a dead worker sooner.
const MAX_MISSED: u32 = 3;

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
    Endpoint::from(uri)
        .connect_timeout(config.connect_timeout)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(connection_window(config.max_streams.get()))
        .http2_keep_alive_interval(config.keep_alive_interval)
        .keep_alive_timeout(config.keep_alive_timeout)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true)
        .connect_lazy()
}

/// Publish the workers of `config` until nobody listens.
pub(crate) async fn run(config: DiscoveryConfig, link: LinkConfig, workers: watch::Sender<Vec<Worker>>) {
    match config {
        DiscoveryConfig::EngineManager(uri) => watch_topology(uri, &link, &workers).await,
        DiscoveryConfig::Static(uris) => poll_statuses(uris, &link, &workers).await,
    }
}

/// Without the engine-manager the last topology stands: workers outlive it, and one that died meanwhile is
/// found by the first call or probe that fails.
async fn watch_topology(uri: Uri, link: &LinkConfig, workers: &watch::Sender<Vec<Worker>>) {
    let mut client = EngineManagerClient::new(channel(uri.clone(), link));
    let mut backoff = link.poll_interval;
    loop {
        match client.watch_topology(v1::WatchTopologyRequest {}).await {
            Ok(response) => {
                tracing::info!(engine_manager = %uri, "topology watched");
                backoff = link.poll_interval;
                let mut topologies = response.into_inner();
                loop {
                    match topologies.message().await {
                        Ok(Some(topology)) => publish(workers, topology),
                        Ok(None) => break,
                        Err(status) => {
                            tracing::warn!(engine_manager = %uri, error = status.message(), "topology lost");
                            break;
                        }
                    }
                }
            }
            Err(status) => {
                tracing::warn!(engine_manager = %uri, error = status.message(), "topology not reachable");
            }
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

fn publish(workers: &watch::Sender<Vec<Worker>>, topology: v1::Topology) {
    let mut checked = Vec::with_capacity(topology.workers.len());
    for info in topology.workers {
        let id = info.worker_id.clone();
        match Worker::try_from(info) {
            Ok(worker) => checked.push(worker),
            Err(error) => tracing::error!(worker = id, %error, "worker ignored"),
        }
    }
    workers.send_if_modified(|current| {
        let changed = *current != checked;
        *current = checked;
        changed
    });
}

/// A worker of a fixed list.
struct Polled {
    uri: Uri,
    client: WorkerClient<Channel>,
    /// As it last described itself.
    last: Option<Worker>,
    n_missed: u32,
}

impl Polled {
    /// Ask for its status, and keep what it said last through a few questions without an answer.
    async fn poll(&mut self, timeout: Duration) {
        let mut request = tonic::Request::new(v1::WorkerStatusRequest {});
        request.set_timeout(timeout);
        let status = match self.client.status(request).await {
            Ok(response) => response.into_inner(),
            Err(status) => {
                self.n_missed = self.n_missed.saturating_add(1);
                tracing::debug!(worker = %self.uri, n_missed = self.n_missed, error = status.message(), "no status");
                if self.n_missed >= MAX_MISSED {
                    self.last = None;
                }
                return;
            }
        };
        self.n_missed = 0;
        self.last = Worker::from_status(self.uri.to_string(), status)
            .inspect_err(|error| tracing::error!(worker = %self.uri, %error, "worker ignored"))
            .ok();
    }
}

async fn poll_statuses(uris: Vec<Uri>, link: &LinkConfig, workers: &watch::Sender<Vec<Worker>>) {
    let polled = |uri: Uri| Polled {
        client: WorkerClient::new(channel(uri.clone(), link)),
        uri,
        last: None,
        n_missed: 0,
    };
    let mut all: Vec<Polled> = uris.into_iter().map(polled).collect();
    let mut ticks = tokio::time::interval(link.poll_interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        futures::future::join_all(all.iter_mut().map(|each| each.poll(link.unary_timeout))).await;
        let known: Vec<Worker> = all.iter().filter_map(|each| each.last.clone()).collect();
        workers.send_if_modified(|current| {
            let changed = *current != known;
            *current = known;
            changed
        });
    }
}
