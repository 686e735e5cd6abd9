//! API keys over real connections.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway_gateway::ApiKeys;
use laneway_proto::{ErrorCode, v1};
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tracing_subscriber::fmt::MakeWriter;

use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{Call, TestGateway, gateway, ours, request, soon};

const ALICE: &str = "alice-0123456789abc";
const BOB: &str = "bob-0123456789abcde";

/// A gateway that asks for keys, and their file.
async fn asking(worker: &FakeWorker, lines: &str) -> (TestGateway, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines).unwrap();
    let keys = ApiKeys::read(file.path().to_owned()).unwrap();
    let gateway = gateway(&[worker], |config| config.api_keys = Some(keys)).await;
    // Health is told without a key.
    gateway.serving().await;
    (gateway, file)
}

fn with_key<M>(message: M, key: &str) -> Request<M> {
    let mut call = Request::new(message);
    let value = format!("Bearer {key}").parse().unwrap();
    call.metadata_mut().insert("authorization", value);
    call
}

/// What is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn speak(gateway: &TestGateway, key: &str) -> Result<(), ErrorCode> {
    let begun = gateway.begin_with(with_key(request(), key)).await;
    let ended = match begun {
        Ok(call) => call.rest().await.2,
        Err(status) => Err(status),
    };
    ended.map(|_| ()).map_err(|status| ours(status).code)
}

#[tokio::test]
async fn a_call_needs_a_key_and_health_does_not() {
    let worker = FakeWorker::start("a", speaks());
    let (gateway, _file) = asking(&worker, &format!("alice {ALICE}")).await;
    let refused = gateway.begin(request()).await.map(|_| ()).unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert_eq!(ours(refused).code, ErrorCode::Unauthenticated);
    assert_eq!(speak(&gateway, BOB).await, Err(ErrorCode::Unauthenticated));
    assert_eq!(speak(&gateway, ALICE).await, Ok(()));
    let listed = soon(gateway.models().list(v1::ListModelsRequest {})).await;
    assert_eq!(
        listed.unwrap_err().code(),
        Code::Unauthenticated,
        "every service asks"
    );
    let mut health = HealthClient::new(gateway.channel.clone());
    soon(health.check(HealthCheckRequest::default())).await.unwrap();
    assert_eq!(worker.n_requests(), 1);
}

#[tokio::test]
async fn http_callers_are_told_in_their_envelope_and_the_page_is_open() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let worker = FakeWorker::start("a", speaks());
    let (gateway, _file) = asking(&worker, &format!("alice {ALICE}")).await;
    let get = async |path: &str, header: &str| {
        let mut stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{header}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        soon(stream.read_to_string(&mut answer)).await.unwrap();
        answer
    };
    let refused = get("/v1/models", "").await;
    assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    assert!(
        refused.contains("authentication_error") && refused.contains("unauthenticated"),
        "{refused}"
    );
    let listed = get("/v1/models", &format!("authorization: Bearer {ALICE}\r\n")).await;
    assert!(
        listed.starts_with("HTTP/1.1 200") && listed.contains("nano"),
        "{listed}"
    );
    assert!(get("/", "").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_key_has_so_many_calls_at_once_and_a_minute() {
    let worker = FakeWorker::start("a", vec![Step::Started, Step::Audio(1, 0.5), Step::Hang]);
    let lines = format!("alice {ALICE} concurrent=1\nbob {BOB} requests_per_minute=2");
    let (gateway, _file) = asking(&worker, &lines).await;
    let mut running: Call = gateway.begin_with(with_key(request(), ALICE)).await.unwrap();
    running.accepted().await;
    let busy = gateway
        .begin_with(with_key(request(), ALICE))
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(busy.code(), Code::ResourceExhausted);
    let busy = ours(busy);
    assert_eq!(busy.code, ErrorCode::RateLimited);
    assert!(busy.retry_after.is_some());
    worker.plays(speaks());
    assert_eq!(speak(&gateway, BOB).await, Ok(()));
    assert_eq!(speak(&gateway, BOB).await, Ok(()));
    assert_eq!(speak(&gateway, BOB).await, Err(ErrorCode::RateLimited));
    // A caller who leaves frees the place of its key.
    drop(running);
    soon(async { while speak(&gateway, ALICE).await.is_err() {} }).await;
}

#[tokio::test]
async fn a_changed_file_counts_from_then_on_and_a_broken_one_changes_nothing() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    // Of this thread, on which the gateway's tasks run too.
    let _guard = tracing::subscriber::set_default(subscriber);
    let worker = FakeWorker::start("a", speaks());
    let (gateway, file) = asking(&worker, &format!("alice {ALICE}")).await;
    std::fs::write(file.path(), format!("bob {BOB}")).unwrap();
    soon(async {
        while speak(&gateway, BOB).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert_eq!(speak(&gateway, ALICE).await, Err(ErrorCode::Unauthenticated));
    std::fs::write(file.path(), "bob short").unwrap();
    // It was read, and found to be none.
    soon(async {
        while !log.text().contains("API keys not read") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(speak(&gateway, BOB).await, Ok(()), "the last good file counts");
}
