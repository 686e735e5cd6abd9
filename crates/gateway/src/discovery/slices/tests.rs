use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use futures::{Stream, StreamExt as _, stream};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot, watch};

use super::*;

/// What the API server does with a request.
#[derive(Debug)]
enum Answer {
    /// This version, and these slices.
    List(&'static str, Vec<Value>),
    /// These events, and then this.
    Watch(Vec<Value>, Then),
    Refuse(u16, &'static str),
}

#[derive(Debug)]
enum Then {
    Silence,
    End,
    /// Cut, once the test says so: what is sent at once with it may be lost.
    Cut(oneshot::Receiver<()>),
}

impl Answer {
    fn response(self) -> Response {
        match self {
            Answer::List(version, items) => axum::Json(json!({
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": { "resourceVersion": version },
                "items": items,
            }))
            .into_response(),
            Answer::Watch(events, then) => {
                let lines = events
                    .into_iter()
                    .map(|event| Ok(Bytes::from(format!("{event}\n"))));
                let then: std::pin::Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>> = match then {
                    Then::Silence => Box::pin(stream::pending()),
                    Then::End => Box::pin(stream::empty()),
                    Then::Cut(told) => Box::pin(stream::once(async move {
                        told.await.expect("the test cuts it");
                        Err(io::Error::other("cut"))
                    })),
                };
                Body::from_stream(stream::iter(lines).chain(then)).into_response()
            }
            Answer::Refuse(code, message) => {
                let status = StatusCode::from_u16(code).unwrap();
                (status, axum::Json(failure(code, message))).into_response()
            }
        }
    }
}

fn failure(code: u16, message: &str) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code })
}

/// A slice of this name at this version, with an endpoint for each (address, ready, terminating).
fn slice(name: &str, version: &str, endpoints: &[(&str, Option<bool>, Option<bool>)]) -> Value {
    let endpoints: Vec<_> = endpoints
        .iter()
        .map(|(address, ready, terminating)| {
            json!({ "addresses": [address], "conditions": { "ready": ready, "terminating": terminating } })
        })
        .collect();
    json!({
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": { "name": name, "namespace": "speech", "resourceVersion": version },
        "addressType": "IPv4",
        "ports": [{ "name": "metrics", "port": 9464 }, { "name": "worker", "port": 7071 }],
        "endpoints": endpoints,
    })
}

fn event(kind: &str, object: Value) -> Value {
    json!({ "type": kind, "object": object })
}

fn bookmark(version: &str) -> Value {
    let metadata = json!({ "resourceVersion": version, "creationTimestamp": null });
    let object =
        json!({ "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata });
    event("BOOKMARK", object)
}

/// An API server that answers as it is told, and who follows it.
struct Followed {
    answers: mpsc::Sender<Answer>,
    n_steps: usize,
    requests: watch::Receiver<Vec<String>>,
    found: watch::Receiver<Vec<Vec<Endpoint>>>,
}

impl Followed {
    async fn start(service: &str) -> Self {
        let (answers, script) = mpsc::channel(1);
        let script = Arc::new(tokio::sync::Mutex::new(script));
        let (asked, requests) = watch::channel(Vec::new());
        let asked = Arc::new(asked);
        let handler = move |uri: Uri| {
            let (script, asked) = (script.clone(), asked.clone());
            async move {
                asked.send_modify(|requests| requests.push(uri.to_string()));
                let answer: Option<Answer> = script.lock().await.recv().await;
                match answer {
                    Some(answer) => Ok::<_, Infallible>(answer.response()),
                    None => std::future::pending().await,
                }
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let router = axum::Router::new().fallback(handler);
        tokio::spawn(async move { axum::serve(listener, router).await });
        let client = kube::Client::try_from(kube::Config::new(server.parse().unwrap())).unwrap();
        let (sender, found) = watch::channel(vec![Vec::new()]);
        let service: ServiceName = service.parse().unwrap();
        tokio::spawn(async move {
            let found = Found::only(sender);
            follow(Cluster(client), &service, &found).await;
        });
        Self {
            answers,
            n_steps: 0,
            requests,
            found,
        }
    }

    /// The next request is answered so. It has all of `asks` in it, and then these endpoints are known.
    async fn step(&mut self, answer: Answer, asks: &[&str], endpoints: &[(&str, bool)]) {
        let what = format!("{answer:?}: asked with {asks:?}, known are {endpoints:?}");
        let index = self.n_steps;
        self.n_steps += 1;
        self.answers.send(answer).await.unwrap();
        let asked = self.requests.wait_for(|requests| requests.len() > index);
        let asked = tokio::time::timeout(SOON, asked).await;
        let asked = asked.unwrap_or_else(|_| panic!("nobody asked: {what}")).unwrap()[index].clone();
        for part in asks {
            assert!(asked.contains(part), "{asked}: {what}");
        }
        let wanted: Vec<Endpoint> = endpoints
            .iter()
            .map(|(address, takes_requests)| Endpoint {
                address: address.parse().unwrap(),
                takes_requests: *takes_requests,
            })
            .collect();
        let mut found = self.found.clone();
        let known = tokio::time::timeout(SOON, found.wait_for(|found| found[0] == wanted)).await;
        assert!(known.is_ok(), "{:?} is known: {what}", self.found.borrow()[0]);
    }
}

/// The watcher pauses behind whatever fails.
const SOON: Duration = Duration::from_secs(20);

const LIST: &[&str] = &[
    "/apis/discovery.k8s.io/v1/namespaces/speech/endpointslices?",
    "labelSelector=kubernetes.io%2Fservice-name%3Dlaneway-worker",
    "limit=",
];

#[tokio::test]
async fn endpoints_are_those_of_the_list_and_of_all_that_the_watch_tells() {
    let mut cluster = Followed::start("k8s://speech/laneway-worker:7071").await;
    let (ready, unready) = (Some(true), Some(false));
    let (one, two, three) = ("10.0.0.1:7071", "10.0.0.2:7071", "10.0.0.3:7071");
    let from = |version| ["watch=true", version];
    let listed = vec![slice("a", "9", &[("10.0.0.1", ready, None)])];
    cluster
        .step(Answer::List("10", listed), LIST, &[(one, true)])
        .await;
    // A new one, one that terminates, and a version to go on from that no event has.
    let told = vec![
        event("ADDED", slice("b", "11", &[("10.0.0.2", None, None)])),
        event("MODIFIED", slice("a", "12", &[("10.0.0.1", unready, Some(true))])),
        bookmark("50"),
    ];
    let answer = Answer::Watch(told, Then::End);
    let known = [(one, false), (two, true)];
    cluster.step(answer, &from("resourceVersion=10"), &known).await;
    // It is in two slices while it moves: who says that it ends is right.
    let (cut, told_to_cut) = oneshot::channel();
    let moved = [("10.0.0.1", ready, None), ("10.0.0.3", ready, unready)];
    let answer = Answer::Watch(
        vec![event("ADDED", slice("c", "51", &moved))],
        Then::Cut(told_to_cut),
    );
    let known = [(one, false), (two, true), (three, true)];
    cluster.step(answer, &from("resourceVersion=50"), &known).await;
    cut.send(()).unwrap();
    // Behind the cut the watch goes on where it was; the slice of the one that ended goes.
    let told = vec![
        event("DELETED", slice("a", "52", &[])),
        event("ERROR", failure(410, "too old")),
    ];
    let answer = Answer::Watch(told, Then::Silence);
    let known = [(one, true), (two, true), (three, true)];
    cluster.step(answer, &from("resourceVersion=51"), &known).await;
    // The version is gone: all is listed again, and what is not in the list is gone too.
    let listed = vec![slice("b", "80", &[("10.0.0.2", ready, None)])];
    cluster
        .step(Answer::List("90", listed), LIST, &[(two, true)])
        .await;
    // Gone before the watch began.
    let answer = Answer::Refuse(410, "too old");
    cluster
        .step(answer, &from("resourceVersion=90"), &[(two, true)])
        .await;
    let listed = vec![slice("b", "80", &[("10.0.0.2", unready, None)])];
    cluster
        .step(Answer::List("95", listed), LIST, &[(two, false)])
        .await;
}

#[tokio::test]
async fn while_the_api_server_refuses_the_last_endpoints_stand_and_then_it_is_asked_again() {
    let mut cluster = Followed::start("k8s://speech/laneway-worker:worker").await;
    let known = [("10.0.0.1:7071", true)];
    let listed = vec![slice("a", "9", &[("10.0.0.1", None, None)])];
    cluster.step(Answer::List("10", listed), LIST, &known).await;
    let gone = vec![event("ERROR", failure(410, "too old"))];
    cluster
        .step(Answer::Watch(gone, Then::End), &["watch=true"], &known)
        .await;
    cluster.step(Answer::Refuse(403, "forbidden"), LIST, &known).await;
    let listed = vec![slice("b", "20", &[("10.0.0.2", None, None)])];
    let known = [("10.0.0.2:7071", true)];
    cluster.step(Answer::List("21", listed), LIST, &known).await;
}

#[test]
fn who_may_not_ask_is_told_what_is_missing() {
    let service = "k8s://speech/laneway-worker:worker".parse().unwrap();
    let check = |code, wanted: &[&str]| {
        let status = serde_json::from_value(failure(code, "as the server says it")).unwrap();
        let error = watcher::Error::InitialListFailed(kube::Error::Api(status));
        let told = told(&error, &service);
        for part in wanted.iter().chain(&["as the server says it"]) {
            assert!(told.contains(part), "{part}: {told}");
        }
    };
    check(
        403,
        &[
            "Role of the namespace speech",
            "`list` and `watch`",
            "`endpointslices`",
        ],
    );
    check(401, &["token"]);
    check(500, &[]);
}

#[test]
fn a_port_is_found_by_number_or_name_and_none_is_made_up() {
    let read = |service: &str, change: &dyn Fn(&mut Value)| {
        let mut value = slice("a", "1", &[("10.0.0.1", None, None), ("a.name", None, None)]);
        change(&mut value);
        let endpoints = endpoints_of(&serde_json::from_value(value).unwrap(), &service.parse().unwrap());
        endpoints
            .iter()
            .map(|each| each.address.to_string())
            .collect::<Vec<_>>()
    };
    let as_it_is = |_: &mut Value| ();
    for (port, found) in [
        ("7071", Some("10.0.0.1:7071")),
        ("worker", Some("10.0.0.1:7071")),
        ("9464", Some("10.0.0.1:9464")),
        ("7072", None),
        ("api", None),
    ] {
        let found: Vec<_> = found.into_iter().collect();
        assert_eq!(
            read(&format!("k8s://speech/worker:{port}"), &as_it_is),
            found,
            "{port}"
        );
    }
    let without_ports = |slice: &mut Value| slice["ports"] = Value::Null;
    assert!(read("k8s://speech/worker:7071", &without_ports).is_empty());
    let of_version_6 = |slice: &mut Value| slice["endpoints"][0]["addresses"][0] = json!("fd00::1");
    assert_eq!(
        read("k8s://speech/worker:7071", &of_version_6),
        ["[fd00::1]:7071"]
    );
}

#[test]
fn services_are_read_or_refused() {
    for name in ["k8s://speech/laneway-worker:7071", "k8s://a/b:grpc-1"] {
        assert_eq!(name.parse::<ServiceName>().unwrap().to_string(), name);
    }
    let long = format!("k8s://{}/worker:7071", "a".repeat(64));
    for name in [
        "worker:7071",
        "k8s://worker:7071",
        "k8s://speech/worker",
        "k8s:///worker:7071",
        "k8s://speech/:7071",
        "k8s://speech/worker:0",
        "k8s://speech/worker:99999",
        "k8s://speech/worker:",
        "k8s://speech/worker:-a",
        "k8s://Speech/worker:7071",
        "k8s://speech/a/b:7071",
        "k8s://speech/worker.x:7071",
        "k8s://speech/worker:7071/x",
        "k8s://speech/-worker:7071",
        &long,
    ] {
        assert_eq!(name.parse::<ServiceName>(), Err(NotAService), "{name}");
    }
}
