//! The worker at the other end of an edge, as the topology has it.
//!
//! One task, started with the worker when its plan has an edge that leaves; it follows the topology until the
//! worker ends.

use std::time::Duration;

use laneway_proto::v1;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_proto::v1::worker_client::WorkerClient;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

/// How long a connection may take.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(2);

/// A peer that answers no ping for so long is gone, and its calls end.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// Pause before the topology is asked for again.
const RETRY: Duration = Duration::from_millis(200);

/// The peer while it serves.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    address: String,
    pub(crate) client: WorkerClient<Channel>,
}

/// A channel to `address` that connects on its first call and notices a peer that went away.
pub(crate) fn channel(address: &str) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(address.to_owned())?
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_lazy())
}

/// Keep `peer` at the serving worker of `rank` until the token is cancelled.
pub(crate) async fn follow(
    manager: EngineManagerClient<Channel>,
    rank: u32,
    peer: watch::Sender<Option<Peer>>,
    token: CancellationToken,
) {
    token
        .run_until_cancelled(watch_topology(manager, rank, &peer))
        .await;
}

async fn watch_topology(
    mut manager: EngineManagerClient<Channel>,
    rank: u32,
    peer: &watch::Sender<Option<Peer>>,
) {
    loop {
        match manager.watch_topology(v1::WatchTopologyRequest {}).await {
            Ok(response) => {
                let mut versions = response.into_inner();
                // What the last topology said holds while the engine-manager is away.
                while let Ok(Some(topology)) = versions.message().await {
                    apply(&topology, rank, peer);
                }
            }
            Err(status) => tracing::debug!(%status, "no topology from the engine-manager"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn apply(topology: &v1::Topology, rank: u32, peer: &watch::Sender<Option<Peer>>) {
    let serving = topology
        .workers
        .iter()
        .find(|worker| worker.rank == rank && worker.state() == v1::WorkerState::Serving);
    let same = peer.borrow().as_ref().map(|peer| peer.address.as_str())
        == serving.map(|worker| worker.address.as_str());
    if same {
        return;
    }
    let next = serving.and_then(|worker| {
        let channel = channel(&worker.address)
            .inspect_err(|error| tracing::error!(%error, worker.address, "a worker registered an address that cannot be dialled"))
            .ok()?;
        Some(Peer { address: worker.address.clone(), client: WorkerClient::new(channel) })
    });
    tracing::info!(
        rank,
        address = next.as_ref().map(|peer| peer.address.as_str()),
        "peer at the other end of the edge"
    );
    peer.send_replace(next);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(workers: &[(u32, &str, v1::WorkerState)]) -> v1::Topology {
        let worker = |(rank, address, state): &(u32, &str, v1::WorkerState)| v1::WorkerInfo {
            rank: *rank,
            address: (*address).to_owned(),
            state: (*state).into(),
            ..Default::default()
        };
        v1::Topology {
            version: 1,
            workers: workers.iter().map(worker).collect(),
        }
    }

    #[tokio::test]
    async fn the_peer_is_the_serving_worker_of_the_rank() {
        use v1::WorkerState::{Draining, Loading, Serving};
        let peer = watch::Sender::new(None);
        let address = || peer.borrow().as_ref().map(|peer: &Peer| peer.address.clone());
        for (workers, wanted) in [
            (vec![(0, "http://a:1", Serving), (1, "http://b:1", Loading)], None),
            (
                vec![(0, "http://a:1", Serving), (1, "http://b:1", Serving)],
                Some("http://b:1"),
            ),
            (vec![(1, "http://c:1", Serving)], Some("http://c:1")),
            (vec![(1, "http://c:1", Draining)], None),
            (vec![], None),
        ] {
            apply(&topology(&workers), 1, &peer);
            assert_eq!(address().as_deref(), wanted, "{workers:?}");
        }
    }
}
