//! Overload, deadlines, callers who leave, workers that fail, drains: the behaviour table in its HTTP shape.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use laneway_proto::{ErrorCode, Failure, v1};
use serde_json::json;

use super::client::{Connection, body};
use super::requests::events;
use crate::fake::{FakeManager, FakeWorker, Step, speaks, speaks_much};
use crate::harness::{TestGateway, gateway, gateway_of, request, soon};

fn gated() -> Vec<Step> {
    vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Gate,
        Step::Audio(1, 0.5),
        Step::Finish(v1::FinishReason::Stop),
    ]
}

fn hangs() -> Vec<Step> {
    vec![Step::Started, Step::Audio(1, 0.5), Step::Hang]
}

/// A stream that has begun: its first chunk was read.
async fn begun(gateway: &TestGateway, headers: &[(&str, &str)]) -> Connection {
    let mut connection = gateway.post(&body(json!({})), headers).await;
    assert_eq!(connection.head().await.status, 200);
    assert_eq!(connection.chunk().await.unwrap().len(), 3840);
    connection
}

#[tokio::test]
async fn requests_beyond_the_bound_are_refused_at_once_and_admitted_ones_go_on() {
    let worker = FakeWorker::start("a", gated());
    let gateway = gateway(&[&worker], |config| {
        config.max_in_flight = NonZeroUsize::new(2).unwrap();
    })
    .await;
    gateway.serving().await;
    let admitted = [begun(&gateway, &[]).await, begun(&gateway, &[]).await];
    let mut waits = Vec::new();
    for _ in 0..20 {
        let asked = Instant::now();
        let answer = gateway.http(&body(json!({}))).await;
        waits.push(asked.elapsed());
        let (status, code, ..) = answer.error();
        assert_eq!((status, code.as_str()), (429, "overloaded"));
        assert_eq!(answer.head.header("retry-after"), Some("1"));
    }
    waits.sort();
    assert!(
        waits[10] < Duration::from_millis(100),
        "answered at once: {waits:?}"
    );
    worker.open_gate();
    for mut connection in admitted {
        assert_eq!(connection.chunk().await.unwrap().len(), 3840);
        assert_eq!(connection.chunk().await.unwrap().len(), 0, "its end");
    }
    assert_eq!(gateway.http(&body(json!({}))).await.head.status, 200);
}

#[tokio::test]
async fn full_workers_are_said_to_be_so() {
    let full = Failure::new(ErrorCode::Overloaded, "the queue is full");
    let worker = FakeWorker::start("a", vec![Step::Refuse(full)]);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let answer = gateway.http(&body(json!({}))).await;
    assert_eq!(answer.error().0, 429);
    assert_eq!(answer.head.header("retry-after"), Some("1"));
}

#[tokio::test]
async fn a_running_request_id_cannot_be_used_again_until_it_ends() {
    let worker = FakeWorker::start("a", gated());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mine = [("x-request-id", "mine")];
    let mut first = begun(&gateway, &mine).await;
    let answer = gateway.post(&body(json!({})), &mine).await.answer().await;
    let (status, code, param, _) = answer.error();
    assert_eq!(
        (status, code.as_str(), param.as_str()),
        (409, "duplicate_request", "x-request-id")
    );
    worker.open_gate();
    while !first.chunk().await.unwrap().is_empty() {}
    let again = gateway.post(&body(json!({})), &mine).await.answer().await;
    assert_eq!(again.head.status, 200);
}

#[tokio::test]
async fn a_deadline_before_the_first_audio_has_its_status_and_frees_its_place() {
    let worker = FakeWorker::start("a", vec![Step::Started, Step::Hang]);
    let gateway = gateway(&[&worker], |config| config.max_in_flight = NonZeroUsize::MIN).await;
    gateway.serving().await;
    let asked = Instant::now();
    let mut connection = gateway
        .post(&body(json!({})), &[("x-request-timeout-ms", "300")])
        .await;
    let (status, code, ..) = connection.answer().await.error();
    assert_eq!((status, code.as_str()), (504, "deadline_exceeded"));
    assert!(asked.elapsed() >= Duration::from_millis(300));
    worker.until_open(0).await;
    worker.plays(speaks());
    assert_eq!(gateway.http(&body(json!({}))).await.head.status, 200);
    let mut connection = gateway
        .post(&body(json!({})), &[("x-request-timeout-ms", "soon")])
        .await;
    let (status, _, param, _) = connection.answer().await.error();
    assert_eq!((status, param.as_str()), (400, "x-request-timeout-ms"));
}

#[tokio::test]
async fn a_deadline_behind_the_first_audio_cuts_the_stream_off() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let timeout = [("x-request-timeout-ms", "1000")];
    let mut connection = begun(&gateway, &timeout).await;
    assert_eq!(connection.chunk().await, None, "not taken for a whole one");
    worker.until_open(0).await;
    let mut connection = gateway
        .post(&body(json!({ "stream_format": "sse" })), &timeout)
        .await;
    let answer = connection.answer().await;
    let events = events(&answer.bytes());
    assert_eq!(events.last().unwrap()["error"]["code"], "deadline_exceeded");
}

#[tokio::test]
async fn a_caller_who_leaves_stops_the_work_and_frees_its_place() {
    let before_audio = vec![Step::Started, Step::Gate];
    for (script, read_first) in [(hangs(), true), (before_audio, false)] {
        let worker = FakeWorker::start("a", script);
        let gateway = gateway(&[&worker], |config| config.max_in_flight = NonZeroUsize::MIN).await;
        gateway.serving().await;
        let connection = match read_first {
            true => begun(&gateway, &[]).await,
            false => gateway.post(&body(json!({})), &[]).await,
        };
        worker.until_open(1).await;
        drop(connection);
        worker.until_open(0).await;
        worker.plays(speaks());
        soon(async { while gateway.http(&body(json!({}))).await.head.status != 200 {} }).await;
    }
}

#[tokio::test]
async fn a_cancelled_request_ends() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut connection = begun(&gateway, &[("x-request-id", "mine")]).await;
    gateway.cancel("mine", v1::CancelStrength::Stop).await.unwrap();
    assert_eq!(connection.chunk().await.unwrap(), b"", "a stop ends well");
    let mut connection = begun(&gateway, &[("x-request-id", "mine")]).await;
    gateway.cancel("mine", v1::CancelStrength::Kill).await.unwrap();
    assert_eq!(connection.chunk().await, None);
}

#[tokio::test]
async fn one_failed_row_ends_alone() {
    let worker = FakeWorker::start("a", gated());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut neighbour = begun(&gateway, &[]).await;
    let failure = Failure::new(ErrorCode::Internal, "secret of the worker");
    worker.plays(vec![Step::Started, Step::Fail(failure.clone())]);
    let (status, code, _, message) = gateway.http(&body(json!({}))).await.error();
    assert_eq!(
        (status, code.as_str(), message.as_str()),
        (500, "internal", "internal error")
    );
    worker.plays(vec![Step::Started, Step::Audio(1, 0.5), Step::Fail(failure)]);
    let answer = gateway.http(&body(json!({}))).await;
    assert_eq!((answer.head.status, answer.whole), (200, false), "it is cut off");
    worker.open_gate();
    assert_eq!(neighbour.chunk().await.unwrap().len(), 3840);
    assert_eq!(neighbour.chunk().await.unwrap().len(), 0);
}

#[tokio::test]
async fn a_worker_that_dies_ends_its_own_streams_and_one_without_audio_is_spoken_elsewhere() {
    let (a, b) = (FakeWorker::start("a", gated()), FakeWorker::start("b", gated()));
    let manager = FakeManager::start(vec![a.info(), b.info()]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    gateway.serving().await;
    // The least loaded worker takes a request: one stream on each.
    let mut streams = vec![begun(&gateway, &[]).await, begun(&gateway, &[]).await];
    for worker in [&a, &b] {
        worker.until_open(1).await;
        worker.plays(vec![Step::Started, Step::Hang]);
    }
    let mut moved = gateway.post(&body(json!({})), &[]).await;
    soon(async {
        while a.n_requests() + b.n_requests() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let (mut dying, surviving) = if a.n_requests() == 2 { (a, b) } else { (b, a) };
    surviving.plays(speaks());
    dying.die();
    let answer = moved.answer().await;
    assert_eq!(
        (answer.head.status, answer.whole),
        (200, true),
        "spoken elsewhere"
    );
    surviving.open_gate();
    let mut n_cut = 0;
    for stream in &mut streams {
        match stream.chunk().await {
            Some(chunk) => {
                assert_eq!(chunk.len(), 3840);
                assert_eq!(stream.chunk().await.unwrap().len(), 0, "its end");
            }
            None => n_cut += 1,
        }
    }
    assert_eq!(n_cut, 1, "only its own");
}

#[tokio::test]
async fn without_a_worker_it_says_so_and_the_lists_are_empty() {
    let manager = FakeManager::start(vec![]).await;
    let gateway = gateway_of(&manager, |_| ()).await;
    let answer = gateway.http(&body(json!({}))).await;
    let (status, code, ..) = answer.error();
    assert_eq!((status, code.as_str()), (503, "no_worker"));
    assert!(answer.head.header("retry-after").is_some());
    for path in ["/v1/models", "/v1/audio/voices"] {
        assert_eq!(gateway.get(path).await.json()["data"], json!([]));
    }
}

#[tokio::test]
async fn a_drain_refuses_new_requests_and_lets_running_streams_finish() {
    let worker = FakeWorker::start("a", gated());
    let mut gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut running = begun(&gateway, &[]).await;
    let mut idle = gateway.connection().await;
    idle.request("GET /v1/models", &[], b"").await;
    idle.answer().await;
    gateway.shutdown.drain.cancel();
    gateway.not_serving().await;
    let (status, code, ..) = gateway.http(&body(json!({}))).await.error();
    assert_eq!((status, code.as_str()), (503, "draining"));
    assert!(!gateway.served.is_finished());
    worker.open_gate();
    assert_eq!(running.chunk().await.unwrap().len(), 3840);
    assert_eq!(running.chunk().await.unwrap().len(), 0);
    soon(&mut gateway.served).await.unwrap().unwrap();
    idle.closed().await;
}

#[tokio::test]
async fn a_drain_waits_for_the_caller_who_has_yet_to_read_a_finished_stream() {
    let mut much = vec![Step::Started];
    much.extend(std::iter::repeat_n(Step::Audio(25, 0.5), 100));
    much.push(Step::Finish(v1::FinishReason::Stop));
    let worker = FakeWorker::start("a", much);
    let mut gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut connection = gateway.post(&body(json!({})), &[]).await;
    worker.until_open(1).await;
    gateway.shutdown.drain.cancel();
    let ended = tokio::time::timeout(Duration::from_millis(500), &mut gateway.served).await;
    assert!(ended.is_err(), "nobody has read the stream: {ended:?}");
    let answer = connection.answer().await;
    assert_eq!(
        (answer.bytes().len(), answer.whole),
        (100 * 25 * 3840, true),
        "all of it"
    );
    soon(&mut gateway.served).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stream_that_does_not_finish_is_ended_at_the_drain_bound() {
    let worker = FakeWorker::start("a", hangs());
    let mut gateway = gateway(&[&worker], |config| {
        config.drain_bound = Duration::from_millis(100);
    })
    .await;
    gateway.serving().await;
    let mut running = begun(&gateway, &[]).await;
    gateway.shutdown.drain.cancel();
    assert_eq!(running.chunk().await, None);
    soon(&mut gateway.served).await.unwrap().unwrap();
    worker.until_open(0).await;
}

/// The listeners of one gateway, whatever they speak, share its places.
#[tokio::test]
async fn all_shapes_share_the_places() {
    let worker = FakeWorker::start("a", speaks_much());
    let gateway = gateway(&[&worker], |config| config.max_in_flight = NonZeroUsize::MIN).await;
    gateway.serving().await;
    worker.plays(hangs());
    let held = begun(&gateway, &[]).await;
    assert_eq!(gateway.fails(request()).await.code, ErrorCode::Overloaded);
    drop(held);
    worker.until_open(0).await;
    let mut call = soon(async {
        loop {
            if let Ok(call) = gateway.begin(request()).await {
                return call;
            }
        }
    })
    .await;
    call.accepted().await;
    assert_eq!(gateway.http(&body(json!({}))).await.error().0, 429);
}
