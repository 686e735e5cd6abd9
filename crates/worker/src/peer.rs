//! The worker at the other end of an edge, as the topology has it.
//!
//! One task, started with the worker when its plan has an edge that leaves; it follows the topology, and the health
//! of the worker that the topology names, until the worker ends. The topology hears of a death when a lease runs out;
//! the connection breaks at once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use laneway_proto::v1;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_proto::v1::worker_client::WorkerClient;
use laneway_tls::Dial;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// How long a connection may take.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(2);

/// A peer that answers no ping for so long is gone, and its calls end.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// Pause before the topology, or a peer that did not answer, is asked again.
const RETRY: Duration = Duration::from_millis(200);

/// Bytes of a call that the peer may send ahead of its reader.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;

/// Largest window that HTTP/2 has.
const MAX_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// The peer while it serves.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) client: WorkerClient<Channel>,
}

/// A channel to `address` that connects on its first call and notices a peer that went away.
pub(crate) fn channel(address: &str, dial: &Dial) -> Result<Channel, tonic::transport::Error> {
    Ok(dial.lazy(endpoint(address)?))
}

fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(address.to_owned())?
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    Ok(endpoint)
}

/// A channel with room for what `n_streams` calls may hold unread, so that callers who do not read cannot keep the
/// rest of them from their audio.
fn shared_channel(at: &At, n_streams: u32, dial: &Dial) -> Result<Channel, tonic::transport::Error> {
    let room = n_streams.saturating_add(1).saturating_mul(STREAM_WINDOW_BYTES);
    let sized = |endpoint: Endpoint| {
        endpoint
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(room.min(MAX_WINDOW_BYTES))
    };
    match at {
        // The kernel keeps a socket of this host to its user; it has no name that a certificate could be for.
        At::Socket(path) => Ok(sized(endpoint(&format!("unix://{}", path.display()))?).connect_lazy()),
        At::Address(address) => Ok(dial.lazy(sized(endpoint(address)?))),
    }
}

/// Where the peer is.
#[derive(Debug)]
enum At {
    /// A socket of this host, in this worker's own directory.
    Socket(PathBuf),
    /// As the topology has it, whatever it says.
    Address(String),
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            At::Socket(path) => path.display().fmt(f),
            At::Address(address) => address.fmt(f),
        }
    }
}

/// Keep `peer` at the serving worker of `rank` until the token is cancelled; at its socket, where it has one on this
/// host. At most `n_streams` calls go to it at once.
pub(crate) async fn follow(
    manager: EngineManagerClient<Channel>,
    (rank, socket): (u32, Option<PathBuf>),
    (n_streams, dial): (u32, Dial),
    peer: watch::Sender<Option<Peer>>,
    token: CancellationToken,
) {
    let (named, names) = watch::channel(None);
    let both = async {
        tokio::join!(
            watch_topology(manager, rank, &named),
            hold(names, socket, (n_streams, &dial), &peer)
        )
    };
    token.run_until_cancelled(both).await;
}

async fn watch_topology(
    mut manager: EngineManagerClient<Channel>,
    rank: u32,
    named: &watch::Sender<Option<String>>,
) {
    loop {
        match manager.watch_topology(v1::WatchTopologyRequest {}).await {
            Ok(response) => {
                let mut versions = response.into_inner();
                // What the last topology said holds while the engine-manager is away.
                while let Ok(Some(topology)) = versions.message().await {
                    apply(&topology, rank, named);
                }
            }
            Err(status) => tracing::debug!(%status, "no topology from the engine-manager"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn apply(topology: &v1::Topology, rank: u32, named: &watch::Sender<Option<String>>) {
    let serving = topology
        .workers
        .iter()
        .find(|worker| worker.rank == rank && worker.state() == v1::WorkerState::Serving)
        .map(|worker| worker.address.clone());
    named.send_if_modified(|named| {
        let changed = *named != serving;
        if changed {
            tracing::info!(
                rank,
                address = serving,
                "worker at the other end of the edge, as the topology has it"
            );
            *named = serving;
        }
        changed
    });
}

/// Be in touch with the worker that is named, and with the next one once another is.
async fn hold(
    mut names: watch::Receiver<Option<String>>,
    socket: Option<PathBuf>,
    calls: (u32, &Dial),
    peer: &watch::Sender<Option<Peer>>,
) {
    loop {
        let named = names.borrow_and_update().clone();
        let at = named.map(|address| reached_at(address, socket.as_deref()));
        tokio::select! {
            changed = names.changed() => if changed.is_err() { return },
            () = stay_in_touch(at, calls, peer) => {}
        }
        peer.send_replace(None);
    }
}

/// A worker of this host by its socket, any other by its address.
fn reached_at(address: String, socket: Option<&Path>) -> At {
    match socket.filter(|path| path.exists()) {
        Some(path) => At::Socket(path.to_owned()),
        None => At::Address(address),
    }
}

/// `peer` is there while it says that it serves, over the connection that requests take. Never returns.
async fn stay_in_touch(at: Option<At>, (n_streams, dial): (u32, &Dial), peer: &watch::Sender<Option<Peer>>) {
    let Some(at) = at else {
        return std::future::pending().await;
    };
    let channel = match shared_channel(&at, n_streams, dial) {
        Ok(channel) => channel,
        Err(error) => {
            tracing::error!(%error, address = %at, "a worker registered an address that cannot be dialled");
            return std::future::pending().await;
        }
    };
    let mut health = HealthClient::new(channel.clone());
    let mut told = false;
    loop {
        let service = "laneway.v1.Worker".to_owned();
        let watched = health.watch(HealthCheckRequest { service }).await;
        if let Err(status) = &watched {
            // Once: it is asked again many times a minute.
            if !std::mem::replace(&mut told, true) {
                let error = laneway_telemetry::causes_of_status(status);
                tracing::warn!(
                    address = %at,
                    error,
                    "no answer from the peer at the other end of the edge"
                );
            }
        }
        if let Ok(response) = watched {
            told = false;
            let mut updates = response.into_inner();
            while let Ok(Some(update)) = updates.message().await {
                let serves = update.status() == ServingStatus::Serving;
                tracing::info!(address = %at, serves, "peer at the other end of the edge");
                let client = WorkerClient::new(channel.clone());
                peer.send_replace(serves.then_some(Peer { client }));
            }
            tracing::warn!(address = %at, "lost touch with the peer at the other end of the edge");
        }
        peer.send_replace(None);
        tokio::time::sleep(RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_tls::{ClientFiles, ClientTls, Incoming};
    use tokio::net::{TcpListener, UnixListener};
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;

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
    async fn a_socket_of_this_host_stays_plain_where_addresses_are_encrypted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let socket = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", tcp.local_addr().unwrap());
        let server = || Server::builder().add_service(tonic_health::server::health_reporter().1);
        tokio::spawn(server().serve_with_incoming(socket));
        tokio::spawn(server().serve_with_incoming(Incoming::new(tcp, None).stream()));

        let tls = ClientTls::read(ClientFiles::default()).unwrap();
        let (open, encrypted) = (Dial::default(), Dial::from(Some(tls)));
        let ask = async |socket: Option<&Path>, dial: &Dial| {
            let channel = shared_channel(&reached_at(address.clone(), socket), 1, dial).unwrap();
            let mut health = HealthClient::new(channel);
            let answer = health.check(HealthCheckRequest::default());
            let answer = tokio::time::timeout(Duration::from_secs(20), answer).await;
            let answer = answer.expect("an answer, whatever it is");
            answer.map_err(|status| laneway_telemetry::causes_of_status(&status))
        };
        for dial in [&open, &encrypted] {
            ask(Some(&path), dial).await.expect("a socket takes no TLS");
        }
        ask(None, &open).await.expect("the address takes none either");
        // What another process registered is no socket of this worker's.
        let registered = At::Address(format!("unix://{}", path.display()));
        let channel = shared_channel(&registered, 1, &encrypted);
        if let Ok(channel) = channel {
            let asked = HealthClient::new(channel)
                .check(HealthCheckRequest::default())
                .await;
            asked.expect_err("it is dialled as an address, with TLS");
        }
        let refused = ask(None, &encrypted).await.expect_err("nothing goes to it open");
        assert!(refused.contains("it is served without TLS"), "{refused}");
    }

    #[tokio::test]
    async fn the_peer_is_the_serving_worker_of_the_rank() {
        use v1::WorkerState::{Draining, Loading, Serving};
        let named = watch::Sender::new(None);
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
            apply(&topology(&workers), 1, &named);
            assert_eq!(named.borrow().as_deref(), wanted, "{workers:?}");
        }
    }
}
