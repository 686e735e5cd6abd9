//! The built program: exit codes and signals.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use laneway_proto::v1;

use crate::fake::{FakeWorker, MUCH_CHUNKS, Step, speaks_much};
use crate::harness::{Call, named, narrow, soon};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_laneway-gateway"))
}

/// A running program, and the address it logged.
fn start(worker: &FakeWorker) -> (Child, String) {
    let mut child = program()
        .args([
            "--listen",
            "127.0.0.1:0",
            "--log-format",
            "json",
            "--worker",
            &worker.uri(),
        ])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = loop {
        let line = lines.next().expect("it logs its address").unwrap();
        if let Some((_, rest)) = line.split_once("\"address\":\"") {
            break rest.split('"').next().unwrap().to_string();
        }
    };
    // A pipe that nobody reads would stop it.
    std::thread::spawn(move || lines.for_each(drop));
    (child, address)
}

fn terminate(child: &Child) {
    let sent = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

async fn exit_code(mut child: Child) -> Option<i32> {
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
    let mut speech = v1::speech_client::SpeechClient::new(narrow(address));
    // Until it has found its worker it answers UNAVAILABLE.
    soon(async {
        loop {
            match speech.synthesize(named("mine")).await {
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
