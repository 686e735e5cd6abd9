//! The built program behind a cluster's API server: over TLS, with a service account's token, as in a pod.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use laneway_proto::v1;
use laneway_tls::testing::{Authority, Valid};
use laneway_tls::{Incoming, Protocols, ServerFiles, ServerTls};
use serde_json::{Value, json};
use tokio::sync::{broadcast, watch};
use tokio_stream::wrappers::BroadcastStream;

use crate::binary::{begin_as, exit_code, program, started, terminate};
use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::soon;

const TOKEN: &str = "token-of-the-gateway";

/// An API server that knows the slices of one Service.
struct Cluster {
    address: SocketAddr,
    authority: Authority,
    events: broadcast::Sender<Value>,
    n_watches: watch::Receiver<usize>,
}

#[derive(Clone)]
struct Shared {
    listed: Value,
    events: broadcast::Sender<Value>,
    n_watches: Arc<watch::Sender<usize>>,
}

/// An endpoint in a slice of its own.
fn slice(name: &str, worker: &FakeWorker, ready: bool, terminating: bool) -> Value {
    let conditions = json!({ "ready": ready, "serving": true, "terminating": terminating });
    json!({
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": { "name": name, "namespace": "speech", "resourceVersion": "2" },
        "addressType": "IPv4",
        "ports": [{ "name": "worker", "port": worker.address.port() }],
        "endpoints": [{ "addresses": [worker.address.ip()], "conditions": conditions }],
    })
}

async fn slices(
    State(shared): State<Shared>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
) -> Response {
    let token = format!("Bearer {TOKEN}");
    if headers
        .get("authorization")
        .is_none_or(|value| value != token.as_str())
    {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if query.iter().all(|(key, _)| key != "watch") {
        return Json(json!({
            "kind": "EndpointSliceList",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": { "resourceVersion": "1" },
            "items": shared.listed,
        }))
        .into_response();
    }
    let events = BroadcastStream::new(shared.events.subscribe());
    shared.n_watches.send_modify(|n_watches| *n_watches += 1);
    Body::from_stream(events.map(|event| event.map(|event| Bytes::from(format!("{event}\n")))))
        .into_response()
}

impl Cluster {
    async fn start(listed: Value) -> Self {
        let authority = Authority::new();
        let files = ServerFiles {
            identity: authority.issue("api", &["127.0.0.1"], Valid::Now),
            client_authority: None,
            client_name: None,
            protocols: Protocols::Http1And2,
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (n_watches, counted) = watch::channel(0);
        let events = broadcast::Sender::new(16);
        let shared = Shared {
            listed,
            events: events.clone(),
            n_watches: Arc::new(n_watches),
        };
        let path = "/apis/discovery.k8s.io/v1/namespaces/speech/endpointslices";
        let routes = axum::Router::new()
            .route(path, axum::routing::get(slices))
            .with_state(shared);
        let mut incoming = Incoming::new(listener, Some(ServerTls::read(files).unwrap()));
        tokio::spawn(async move {
            loop {
                let stream = TokioIo::new(incoming.next().await);
                let service = TowerToHyperService::new(routes.clone());
                tokio::spawn(async move {
                    Builder::new(TokioExecutor::new())
                        .serve_connection(stream, service)
                        .await
                });
            }
        });
        Self {
            address,
            authority,
            events,
            n_watches: counted,
        }
    }

    /// A file that says where it is, and who asks.
    fn kubeconfig(&self, directory: &std::path::Path) -> String {
        let token = directory.join("token");
        std::fs::write(&token, TOKEN).unwrap();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{ "name": "here", "context": { "cluster": "here", "user": "gateway" } }],
            "clusters": [{ "name": "here", "cluster": {
                "server": format!("https://{}", self.address),
                "certificate-authority": self.authority.file(),
            } }],
            "users": [{ "name": "gateway", "user": { "tokenFile": token } }],
        });
        let path = directory.join("kubeconfig");
        std::fs::write(&path, config.to_string()).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn tell(&self, kind: &str, slice: Value) {
        let event = json!({ "type": kind, "object": slice });
        self.events.send(event).expect("somebody watches");
    }
}

#[tokio::test]
async fn an_endpoint_that_terminates_gets_nothing_new_and_finishes_what_it_has() {
    let held = vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Gate,
        Step::Audio(1, 0.5),
        Step::Finish(v1::FinishReason::Stop),
    ];
    let (leaving, coming) = (FakeWorker::start("a", held), FakeWorker::start("b", speaks()));
    let mut cluster = Cluster::start(json!([slice("a", &leaving, true, false)])).await;
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = cluster.kubeconfig(directory.path());
    let (child, mut addresses) = started(
        &["--worker", "k8s://speech/laneway-worker:worker"],
        &[("KUBECONFIG", &kubeconfig)],
    );
    let address = addresses.pop().unwrap();
    let call = begin_as(&address, "").await;
    leaving.until_open(1).await;
    soon(cluster.n_watches.wait_for(|n_watches| *n_watches > 0))
        .await
        .unwrap();
    // It says of itself that it serves, and goes on saying so.
    cluster.tell("MODIFIED", slice("a", &leaving, false, true));
    cluster.tell("ADDED", slice("b", &coming, true, false));
    while coming.n_requests() == 0 {
        // Until the events are heard it may be the one that leaves.
        let mut call = begin_as(&address, "").await;
        call.accepted().await;
        call.chunk().await;
    }
    let n_before = leaving.n_requests();
    for _ in 0..6 {
        begin_as(&address, "").await.rest().await.2.unwrap();
    }
    assert_eq!(leaving.n_requests(), n_before, "it got something new");
    leaving.open_gate();
    assert_eq!(call.rest().await.2.unwrap().chunks.len(), 2);
    // Gone from the Service: what is left serves on.
    cluster.tell("DELETED", slice("a", &leaving, false, true));
    begin_as(&address, "").await.rest().await.2.unwrap();
    terminate(&child);
    assert_eq!(exit_code(child).await, Some(0));
}

#[test]
fn outside_a_cluster_a_service_is_refused_with_what_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("none");
    let check = |kubeconfig: Option<&std::path::Path>, wanted: &str| {
        let mut program = program();
        program
            .args([
                "--listen",
                "127.0.0.1:0",
                "--worker",
                "k8s://speech/laneway-worker:7071",
            ])
            .env_remove("KUBECONFIG")
            .env_remove("KUBERNETES_SERVICE_HOST")
            .envs(kubeconfig.map(|path| ("KUBECONFIG", path)));
        let output = program.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(wanted), "{said}");
    };
    check(None, "automountServiceAccountToken");
    check(Some(&absent), "KUBECONFIG");
}
