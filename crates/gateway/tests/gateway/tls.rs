//! TLS of the public API, and mutual TLS to workers.

use std::net::SocketAddr;
use std::time::Duration;

use laneway_gateway::DiscoveryConfig;
use laneway_proto::v1;
use laneway_tls::testing::{Authority, Valid};
use laneway_tls::{ClientFiles, ClientTls, Dial, Identity, InternalTls, Protocols, ServerFiles, ServerTls};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::Message;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use v1::speech_client::SpeechClient;

use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{Call, TestGateway, gateway, named, request, soon};

const HERE: &[&str] = &["127.0.0.1"];

fn server(identity: &Identity, clients: Option<&Authority>) -> ServerTls {
    let files = ServerFiles {
        identity: identity.clone(),
        client_authority: clients.map(Authority::file),
        client_name: None,
        protocols: Protocols::Http1And2,
    };
    ServerTls::read(files).unwrap()
}

/// A channel of who trusts `authority`, and shows `identity`.
fn channel(address: SocketAddr, authority: &Authority, identity: Option<&Identity>) -> Channel {
    let files = ClientFiles {
        identity: identity.cloned(),
        authority: Some(authority.file()),
        name: None,
    };
    let dial = Dial::from(Some(ClientTls::read(files).unwrap()));
    let uri = dial.uri(&address.to_string()).unwrap();
    dial.lazy(Endpoint::from(uri))
}

/// A connection over HTTP/1.1, as browsers and curl make it.
async fn connection(address: SocketAddr, authority: &Authority) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = "127.0.0.1".try_into().unwrap();
    let connector = authority.connector(None, &["http/1.1"]);
    soon(connector.connect(name, stream)).await.unwrap()
}

async fn until_serving(channel: &Channel) {
    let mut health = HealthClient::new(channel.clone());
    soon(async {
        loop {
            let answer = health.check(HealthCheckRequest::default()).await;
            if answer.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

async fn speak(channel: &Channel) -> Result<usize, tonic::Status> {
    let response = soon(SpeechClient::new(channel.clone()).synthesize(request())).await?;
    Ok(Call::of(response).rest().await.2?.chunks.len())
}

async fn secured(worker: &FakeWorker, tls: ServerTls) -> TestGateway {
    gateway(&[worker], |config| config.tls = Some(tls)).await
}

#[tokio::test]
async fn everything_is_served_over_tls_and_nothing_without() {
    let ours = Authority::new();
    let worker = FakeWorker::start("a", speaks());
    let identity = ours.issue("gateway", HERE, Valid::Now);
    let gateway = secured(&worker, server(&identity, None)).await;
    let over_tls = channel(gateway.address, &ours, None);
    until_serving(&over_tls).await;
    assert_eq!(speak(&over_tls).await.unwrap(), 2);

    let mut https = connection(gateway.address, &ours).await;
    https
        .write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    soon(https.read_to_string(&mut answer)).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("nano"),
        "{answer}"
    );

    let stream = connection(gateway.address, &ours).await;
    let url = format!("wss://{}/v1/audio/speech/stream", gateway.address);
    let (mut socket, _) = soon(tokio_tungstenite::client_async(url, stream)).await.unwrap();
    {
        use futures::{SinkExt as _, StreamExt as _};
        for message in [
            r#"{"type": "session.config", "voice": "ryan"}"#,
            r#"{"type": "input.text", "text": "Hello there."}"#,
            r#"{"type": "input.done"}"#,
        ] {
            socket.send(Message::text(message)).await.unwrap();
        }
        let mut n_bytes = 0;
        loop {
            match soon(socket.next()).await.unwrap().unwrap() {
                Message::Binary(bytes) => n_bytes += bytes.len(),
                Message::Text(text) if text.contains("session.done") => break,
                Message::Text(text) => assert!(!text.contains("error"), "{text}"),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(n_bytes, 3 * 1920 * 2);
    }

    // The harness's own channel is without TLS.
    assert!(speak(&gateway.channel).await.is_err());
    assert!(
        speak(&channel(gateway.address, &Authority::new(), None))
            .await
            .is_err()
    );
    assert_eq!(worker.n_requests(), 2);
}

#[tokio::test]
async fn a_gateway_that_asks_for_certificates_serves_only_those_who_have_one() {
    let ours = Authority::new();
    let worker = FakeWorker::start("a", speaks());
    let identity = ours.issue("gateway", HERE, Valid::Now);
    let gateway = secured(&worker, server(&identity, Some(&ours))).await;
    let caller = ours.issue("caller", &["caller"], Valid::Now);
    let known = channel(gateway.address, &ours, Some(&caller));
    // Health too: who probes has a certificate as well.
    until_serving(&known).await;
    assert!(speak(&known).await.is_ok());
    let expired = ours.issue("late", &["caller"], Valid::Expired);
    for unknown in [None, Some(&expired)] {
        assert!(speak(&channel(gateway.address, &ours, unknown)).await.is_err());
    }
    assert_eq!(worker.n_requests(), 1);
}

#[tokio::test]
async fn a_stream_goes_on_while_the_certificate_changes() {
    let (old, new) = (Authority::new(), Authority::new());
    let script = vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Gate,
        Step::Audio(1, 0.5),
        Step::Finish(v1::FinishReason::Stop),
    ];
    let worker = FakeWorker::start("a", script);
    let identity = old.issue("gateway", HERE, Valid::Now);
    let mut gateway = secured(&worker, server(&identity, None)).await;
    let before = channel(gateway.address, &old, None);
    until_serving(&before).await;
    let response = soon(SpeechClient::new(before.clone()).synthesize(named("mine")))
        .await
        .unwrap();
    let mut running = Call::of(response);
    running.accepted().await;
    running.chunk().await;
    new.reissue(&identity, HERE, Valid::Now);
    until_serving(&channel(gateway.address, &new, None)).await;
    worker.open_gate();
    assert_eq!(running.rest().await.1.len(), 1);
    assert_eq!(speak(&channel(gateway.address, &new, None)).await.unwrap(), 2);
    drop(before);
    gateway.shutdown.drain.cancel();
    soon(&mut gateway.served).await.unwrap().unwrap();
}

/// A way to a worker, which tells how many connections on it have ended.
async fn way_to(worker: &FakeWorker) -> (Uri, watch::Receiver<u32>) {
    let there = worker.address;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let here = format!("http://{}", listener.local_addr().unwrap())
        .parse()
        .unwrap();
    let (sender, ended) = watch::channel(0);
    tokio::spawn(async move {
        while let Ok((mut caller, _)) = listener.accept().await {
            let sender = sender.clone();
            tokio::spawn(async move {
                let mut worker = TcpStream::connect(there).await.unwrap();
                // However it ends.
                let _ = tokio::io::copy_bidirectional(&mut caller, &mut worker).await;
                sender.send_modify(|n_ended| *n_ended += 1);
            });
        }
    });
    (here, ended)
}

/// A gateway with these certificates has tried to reach `worker` again and again, and could not.
async fn does_not_reach(worker: &FakeWorker, internal: InternalTls) {
    let (way, mut ended) = way_to(worker).await;
    let gateway = gateway(&[], |config| {
        config.discovery = DiscoveryConfig::Static(vec![way]);
        config.link.internal_tls = Some(internal);
    })
    .await;
    soon(ended.wait_for(|n_ended| *n_ended > 5)).await.unwrap();
    let failure = gateway.fails(request()).await;
    assert_eq!(failure.code, laneway_proto::ErrorCode::NoWorker);
    assert_eq!(worker.n_requests(), 0);
}

/// A worker that asks for certificates of `authority`.
fn asks_for(authority: &Authority) -> FakeWorker {
    let at = authority.issue("worker", HERE, Valid::Now);
    let tls = server(&at, Some(authority));
    FakeWorker::start_with("a", speaks(), ([127, 0, 0, 1], 0).into(), Some(tls))
}

#[tokio::test]
async fn a_worker_is_reached_by_who_shows_a_certificate_and_trusts_its_own() {
    let ours = Authority::new();
    let own = ours.issue("gateway", HERE, Valid::Now);
    let worker = asks_for(&ours);
    let internal = InternalTls::read(own, ours.file(), None).unwrap();
    let gateway = gateway(&[&worker], |config| config.link.internal_tls = Some(internal)).await;
    gateway.serving().await;
    gateway.speak(request()).await.unwrap();
    assert_eq!(worker.n_requests(), 1);
}

#[tokio::test]
async fn a_worker_is_not_reached_with_the_wrong_certificate_or_trust() {
    let (ours, other) = (Authority::new(), Authority::new());
    let expired = ours.issue("late", HERE, Valid::Expired);
    let foreign = other.issue("foreign", HERE, Valid::Now);
    let good = ours.issue("good", HERE, Valid::Now);
    for (own, trusts) in [(&expired, &ours), (&foreign, &ours), (&good, &other)] {
        let internal = InternalTls::read(own.clone(), trusts.file(), None).unwrap();
        does_not_reach(&asks_for(&ours), internal).await;
    }
    // And a gateway with a certificate does not speak to a worker without.
    let internal = InternalTls::read(good, ours.file(), None).unwrap();
    does_not_reach(&FakeWorker::start("a", speaks()), internal).await;
}
