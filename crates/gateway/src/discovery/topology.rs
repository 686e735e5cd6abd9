//! Workers as the engine-manager lists them.

use std::time::Duration;

use laneway_proto::v1;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use tokio::sync::watch;
use tonic::transport::Uri;

use super::{Discovery, dialled, publish};
use crate::config::LinkConfig;
use crate::facts::Worker;

/// Longest pause between attempts to reach the engine-manager.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// The topology of one engine-manager. Without it the last topology stands: workers outlive it, and one that died
/// meanwhile is found by the first call or probe that fails.
pub(super) struct Topology {
    pub(super) uri: Uri,
    pub(super) link: LinkConfig,
}

#[tonic::async_trait]
impl Discovery for Topology {
    async fn run(self: Box<Self>, workers: watch::Sender<Vec<Worker>>) {
        let Self { uri, link } = *self;
        let (channel, dial) = dialled(uri.clone(), &link);
        let mut client = EngineManagerClient::new(channel);
        let mut backoff = link.poll_interval;
        loop {
            match client.watch_topology(v1::WatchTopologyRequest {}).await {
                Ok(response) => {
                    tracing::info!(engine_manager = %uri, "topology watched");
                    backoff = link.poll_interval;
                    let mut topologies = response.into_inner();
                    loop {
                        match topologies.message().await {
                            Ok(Some(topology)) => publish(&workers, checked(topology)),
                            Ok(None) => break,
                            Err(status) => {
                                let error = dial.why(&status);
                                tracing::warn!(engine_manager = %uri, error, "topology lost");
                                break;
                            }
                        }
                    }
                }
                Err(status) => {
                    let error = dial.why(&status);
                    tracing::warn!(engine_manager = %uri, error, "topology not reachable");
                }
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
    }
}

fn checked(topology: v1::Topology) -> Vec<Worker> {
    let mut checked = Vec::with_capacity(topology.workers.len());
    for info in topology.workers {
        let id = info.worker_id.clone();
        match Worker::try_from(info) {
            Ok(worker) => checked.push(worker),
            Err(error) => tracing::error!(worker = id, %error, "worker ignored"),
        }
    }
    checked
}
