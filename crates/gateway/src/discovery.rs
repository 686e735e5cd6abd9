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

/// A lazily connected channel that notices a peer which is gone without a word.
pub(crate) fn channel(uri: Uri, config: &LinkConfig) -> Channel {
    Endpoint::from(uri)
        .connect_timeout(config.connect_timeout)
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

async fn poll_statuses(uris: Vec<Uri>, link: &LinkConfig, workers: &watch::Sender<Vec<Worker>>) {
    let mut clients: Vec<(Uri, WorkerClient<Channel>)> = uris
        .into_iter()
        .map(|uri| (uri.clone(), WorkerClient::new(channel(uri, link))))
        .collect();
    let mut ticks = tokio::time::interval(link.poll_interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let asked = clients
            .iter_mut()
            .map(|(uri, client)| ask(uri, client, link.unary_timeout));
        let checked: Vec<Worker> = futures::future::join_all(asked)
            .await
            .into_iter()
            .flatten()
            .collect();
        workers.send_if_modified(|current| {
            let changed = *current != checked;
            *current = checked;
            changed
        });
    }
}

async fn ask(uri: &Uri, client: &mut WorkerClient<Channel>, timeout: Duration) -> Option<Worker> {
    let mut request = tonic::Request::new(v1::WorkerStatusRequest {});
    request.set_timeout(timeout);
    let status = match client.status(request).await {
        Ok(response) => response.into_inner(),
        Err(status) => {
            tracing::debug!(worker = %uri, error = status.message(), "worker not reachable");
            return None;
        }
    };
    match Worker::from_status(uri.to_string(), status) {
        Ok(worker) => Some(worker),
        Err(error) => {
            tracing::error!(worker = %uri, %error, "worker ignored");
            None
        }
    }
}
