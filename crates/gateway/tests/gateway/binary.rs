//! The built program: exit codes and signals.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use laneway_proto::v1;

use crate::fake::{FakeWorker, MUCH_CHUNKS, Step, speaks, speaks_much};
use crate::harness::{Call, named, narrow, soon};

pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_laneway-gateway"))
}

/// A running program, and the address it logged.
fn start(worker: &FakeWorker) -> (Child, String) {
    let (child, mut addresses) = start_with(worker, &[]);
    (child, addresses.pop().unwrap())
}

/// A running program with these flags too, and the addresses that it logged; the gateway's is the last.
fn start_with(worker: &FakeWorker, flags: &[&str]) -> (Child, Vec<String>) {
    let uri = worker.uri();
    started(&[&["--worker", &uri], flags].concat(), &[])
}

/// A running program with these flags and variables, and the addresses that it logged; the gateway's is the last.
pub(crate) fn started(flags: &[&str], variables: &[(&str, &str)]) -> (Child, Vec<String>) {
    let mut child = program()
        .args(["--listen", "127.0.0.1:0", "--log-format", "json"])
        .args(flags)
        .envs(variables.iter().copied())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut addresses = Vec::new();
    loop {
        let line = lines.next().expect("it logs its address").unwrap();
        if let Some((_, rest)) = line.split_once("\"address\":\"") {
            addresses.push(rest.split('"').next().unwrap().to_string());
        }
        if line.contains("gateway bound") {
            break;
        }
    }
    // A pipe that nobody reads would stop it.
    std::thread::spawn(move || lines.for_each(drop));
    (child, addresses)
}

pub(crate) fn terminate(child: &Child) {
    let sent = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

pub(crate) async fn exit_code(mut child: Child) -> Option<i32> {
    soon(tokio::task::spawn_blocking(move || child.wait().unwrap().code()))
        .await
        .unwrap()
}

/// Start a stream on the program that the worker does not end.
async fn open_stream(address: &str, worker: &FakeWorker) -> tonic::Streaming<v1::SynthesizeResponse> {
    let mut call = begin(address).await.events;
    worker.until_open(1).await;
    soon(call.message()).await.unwrap();
    call
}

/// A call of a caller with a narrow window.
async fn begin(address: &str) -> Call {
    begin_as(address, "mine").await
}

/// The same under another id; without one the gateway chooses.
pub(crate) async fn begin_as(address: &str, id: &str) -> Call {
    let mut speech = v1::speech_client::SpeechClient::new(narrow(address));
    // Until it has found its worker it answers UNAVAILABLE.
    soon(async {
        loop {
            match speech.synthesize(named(id)).await {
                Ok(response) => return Call::of(response),
                Err(status) => assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}"),
            }
            tokio::task::yield_now().await;
        }
    })
    .await
}

/// Health of the program until it no longer is SERVING.
async fn until_not_serving(address: &str) {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .connect_lazy();
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let check = tonic_health::pb::HealthCheckRequest::default();
    soon(async {
        use tonic_health::pb::health_check_response::ServingStatus::Serving;
        while health.check(check.clone()).await.unwrap().into_inner().status() == Serving {}
    })
    .await;
}

#[tokio::test]
async fn sigterm_cuts_no_stream_that_the_worker_has_finished_and_its_caller_not_read() {
    let worker = FakeWorker::start("a", speaks_much());
    let (child, address) = start(&worker);
    let call = begin(&address).await;
    worker.until_ended(1).await;
    terminate(&child);
    until_not_serving(&address).await;
    // Long enough for a program to exit that thinks it has nothing left to do.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert_eq!(call.rest().await.2.unwrap().chunks.len(), MUCH_CHUNKS);
    assert_eq!(exit_code(child).await, Some(0));
}

#[tokio::test]
async fn sigterm_lets_a_running_stream_finish_and_exits_0() {
    let script = vec![
        Step::Started,
        Step::Gate,
        Step::Audio(1, 0.5),
        Step::Finish(v1::FinishReason::Stop),
    ];
    let worker = FakeWorker::start("a", script);
    let (child, address) = start(&worker);
    let mut call = open_stream(&address, &worker).await;
    terminate(&child);
    worker.open_gate();
    while soon(call.message()).await.unwrap().is_some() {}
    assert_eq!(exit_code(child).await, Some(0));
}

#[tokio::test]
async fn a_second_sigterm_exits_now() {
    let worker = FakeWorker::start("a", vec![Step::Started, Step::Hang]);
    let (child, address) = start(&worker);
    let _call = open_stream(&address, &worker).await;
    terminate(&child);
    // Two signals at once count as one: the second is sent when the first is seen to have worked.
    until_not_serving(&address).await;
    terminate(&child);
    // As the shell counts an end by SIGTERM.
    assert_eq!(exit_code(child).await, Some(143));
}

#[tokio::test]
async fn a_wrong_configuration_exits_2_and_names_everything() {
    let output = program()
        .args([
            "--listen",
            "nowhere",
            "--worker",
            "ftp://w:1",
            "--max-in-flight",
            "0",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    for flag in ["--listen", "--worker", "--max-in-flight"] {
        assert!(said.contains(flag), "{flag} is missing from {said}");
    }
    assert_eq!(
        program().arg("--no-such-flag").output().unwrap().status.code(),
        Some(2)
    );
}

/// Who used it, and never what lets them in.
#[tokio::test]
async fn metrics_name_the_key_of_a_call() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    const ALICE: &str = "alice-0123456789abc";
    let worker = FakeWorker::start("a", speaks());
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), format!("alice {ALICE} requests_per_minute=1\n")).unwrap();
    let file = keys.path().to_str().unwrap();
    let flags = ["--api-keys", file, "--metrics-listen", "127.0.0.1:0"];
    let (child, addresses) = start_with(&worker, &flags);
    let [metrics, address] = &addresses[..] else {
        panic!("{addresses:?}")
    };
    let get = async |address: &str, path: &str, header: &str| {
        let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{header}\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        soon(socket.read_to_string(&mut answer)).await.unwrap();
        answer
    };
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let health = tonic_health::pb::health_client::HealthClient::new(channel.connect_lazy());
    let check = tonic_health::pb::HealthCheckRequest::default();
    let status = async || {
        health
            .clone()
            .check(check.clone())
            .await
            .unwrap()
            .into_inner()
            .status()
    };
    soon(async {
        use tonic_health::pb::health_check_response::ServingStatus::Serving;
        while status().await != Serving {}
    })
    .await;
    let mut speech = v1::speech_client::SpeechClient::new(channel.connect_lazy());
    let mut call = tonic::Request::new(named("mine"));
    let bearer = format!("Bearer {ALICE}");
    call.metadata_mut()
        .insert("authorization", bearer.parse().unwrap());
    Call::of(soon(speech.synthesize(call)).await.unwrap())
        .rest()
        .await
        .2
        .unwrap();
    let again = get(address, "/v1/models", &format!("authorization: {bearer}\r\n")).await;
    assert!(again.starts_with("HTTP/1.1 429"), "{again}");
    assert!(get(address, "/v1/models", "").await.starts_with("HTTP/1.1 401"));
    let page = get(metrics, "/metrics", "").await;
    for line in [
        "laneway_gateway_requests_total{outcome=\"ok\",key=\"alice\"} 1",
        "laneway_gateway_refusals_total{reason=\"rate_limited\",key=\"alice\"} 1",
        "laneway_gateway_refusals_total{reason=\"unauthenticated\",key=\"\"} 1",
    ] {
        assert!(page.contains(line), "{line} is missing from {page}");
    }
    assert!(!page.contains(ALICE));
    terminate(&child);
    assert_eq!(exit_code(child).await, Some(0));
}
