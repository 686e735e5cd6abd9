//! How a connection ends: refusals, limits, leaving, draining.

use std::time::Duration;

use laneway_proto::{ErrorCode, Failure, v1};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::protocol::Message;

use super::{Heard, bare, broken_text, config, text};
use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{TestGateway, gateway, named, soon};

fn hangs() -> Vec<Step> {
    vec![Step::Started, Step::Audio(1, 0.25), Step::Hang]
}

async fn served(script: Vec<Step>) -> (FakeWorker, TestGateway) {
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    (worker, gateway)
}

#[tokio::test]
async fn what_cannot_be_taken_ends_the_connection_with_its_reason() {
    let (_worker, gateway) = served(speaks()).await;
    let of = |value: Value| Message::text(value.to_string());
    let long = "x".repeat(400_000);
    for (messages, reason, param, close) in [
        (vec![of(text("Hello."))], "invalid_argument", "type", 1008),
        (vec![Message::text("hello")], "invalid_argument", "", 1008),
        (
            vec![Message::binary(vec![1, 2])],
            "unsupported_media_type",
            "",
            1003,
        ),
        (vec![broken_text()], "invalid_argument", "", 1008),
        (vec![of(text(&long))], "request_too_large", "", 1009),
        (
            vec![of(config(json!({ "voice": "nobody" })))],
            "unknown_voice",
            "voice",
            1008,
        ),
        (
            vec![of(config(json!({ "model": "other" })))],
            "unknown_model",
            "model",
            1008,
        ),
        (
            vec![of(config(json!({ "sample_rate": 1 })))],
            "unsupported_sample_rate",
            "sample_rate",
            1008,
        ),
        (
            vec![of(config(json!({ "instructions": "calm" })))],
            "unsupported_field",
            "instructions",
            1008,
        ),
        (
            vec![of(config(json!({ "pitch": 2 })))],
            "unsupported_field",
            "pitch",
            1008,
        ),
        (
            vec![of(config(json!({}))), of(config(json!({})))],
            "invalid_argument",
            "type",
            1008,
        ),
        (
            vec![of(config(json!({}))), of(text("a\u{0}"))],
            "invalid_text",
            "input",
            1008,
        ),
        (
            vec![
                of(config(json!({}))),
                of(text("Not ended")),
                of(json!({ "type": "input.stop" })),
            ],
            "invalid_argument",
            "type",
            1008,
        ),
    ] {
        let mut socket = gateway.open(&[]).await.unwrap();
        let shown = format!("{:.120}", format!("{messages:?}"));
        for message in messages {
            socket.send(message).await;
        }
        let (error, code) = socket.failure().await;
        assert_eq!(error["code"], reason, "{shown}: {error}");
        assert_eq!(error["param"].as_str().unwrap_or(""), param, "{shown}: {error}");
        assert_eq!(code, close, "{shown}");
    }
}

#[tokio::test]
async fn text_behind_the_end_is_refused_until_the_end_was_told() {
    let script = vec![
        Step::Started,
        Step::Audio(1, 0.25),
        Step::Gate,
        Step::Finish(v1::FinishReason::Stop),
    ];
    let (worker, gateway) = served(script).await;
    let mut socket = gateway.begun(config(json!({}))).await;
    socket.say(text("One.")).await;
    socket.say(bare("input.done")).await;
    socket.until("audio.chunk").await;
    socket.say(text("Two.")).await;
    let (error, code) = socket.failure().await;
    assert_eq!((&error["code"], code), (&json!("invalid_argument"), 1008));
    assert!(
        error["message"].as_str().unwrap().contains("input.done"),
        "{error}"
    );
    worker.open_gate();
    worker.until_open(0).await;
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_its_reason_behind_what_was_made() {
    let failure = Failure::new(ErrorCode::WorkerLost, "secret");
    let (_worker, gateway) = served(vec![Step::Started, Step::Audio(1, 0.25), Step::Fail(failure)]).await;
    let mut socket = gateway.begun(config(json!({}))).await;
    socket.say(text("One.")).await;
    socket.say(bare("input.flush")).await;
    socket.until("audio.chunk").await;
    assert!(matches!(socket.hear().await, Heard::Audio(_)));
    let (error, code) = socket.failure().await;
    assert_eq!((&error["code"], code), (&json!("worker_lost"), 1013));
}

#[tokio::test]
async fn a_gateway_that_is_full_says_when_to_come_again() {
    let worker = FakeWorker::start("a", hangs());
    let gateway = gateway(&[&worker], |config| {
        config.max_in_flight = std::num::NonZeroUsize::MIN
    })
    .await;
    gateway.serving().await;
    let mut running = gateway.begun(config(json!({}))).await;
    let mut refused = gateway.open(&[]).await.unwrap();
    refused.say(config(json!({}))).await;
    let told = refused.told().await;
    assert_eq!(told["error"]["code"], "overloaded");
    assert!(told["retry_after_ms"].as_u64().unwrap() > 0, "{told}");
    assert_eq!(refused.closed().await, 1013);
    running.say(bare("session.close")).await;
    running.until("session.done").await;
}

#[tokio::test]
async fn who_leaves_ends_the_work_however_it_leaves() {
    let (worker, gateway) = served(hangs()).await;
    for (n_ended, closes) in [(2, true), (4, false)] {
        let mut socket = gateway.begun(config(json!({ "request_id": "mine" }))).await;
        socket.say(text("One. Two. Three.")).await;
        socket.until("audio.chunk").await;
        worker.until_open(2).await;
        if closes {
            socket.send(Message::Close(None)).await;
        }
        drop(socket);
        worker.until_ended(n_ended).await;
        worker.until_open(0).await;
    }
    worker.plays(speaks());
    soon(async { while gateway.speak(named("mine")).await.is_err() {} }).await;
}

#[tokio::test]
async fn who_says_nothing_is_not_waited_for() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |config| {
        config.stream.idle = Duration::from_millis(200)
    })
    .await;
    gateway.serving().await;
    let mut socket = gateway.open(&[]).await.unwrap();
    let (error, code) = socket.failure().await;
    assert_eq!(
        (&error["code"], code),
        (&json!("deadline_exceeded"), 1008),
        "no first message"
    );
    let mut socket = gateway.begun(config(json!({}))).await;
    let (error, _) = socket.failure().await;
    assert!(error["message"].as_str().unwrap().contains("no text"), "{error}");
    let mut socket = gateway.begun(config(json!({}))).await;
    socket.say(text("One.")).await;
    socket.say(bare("input.done")).await;
    socket.utterance().await;
    let (error, _) = socket.failure().await;
    assert!(
        error["message"].as_str().unwrap().contains("no message"),
        "{error}"
    );
}

#[tokio::test]
async fn an_utterance_has_the_deadline_that_is_asked_for() {
    let (worker, gateway) = served(hangs()).await;
    let mut socket = gateway.begun(config(json!({ "timeout_ms": 300 }))).await;
    socket.say(text("One.")).await;
    socket.say(bare("input.flush")).await;
    let (error, code) = socket.failure().await;
    assert_eq!((&error["code"], code), (&json!("deadline_exceeded"), 1008));
    worker.until_ended(1).await;
}

/// What waits for a reader who does not read is bounded, and so is the time that it waits.
#[tokio::test]
async fn who_takes_nothing_is_given_up_and_little_is_made_for_it() {
    const CHUNKS: usize = 400;
    const CHUNK_BYTES: usize = 25 * 1920 * 4;
    let mut script = vec![Step::Started];
    script.extend(std::iter::repeat_n(Step::Audio(25, 0.5), CHUNKS));
    script.push(Step::Finish(v1::FinishReason::Stop));
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |config| {
        config.stream.caller = Duration::from_millis(500)
    })
    .await;
    gateway.serving().await;
    let mut socket = gateway
        .begun(config(json!({ "response_format": "wav", "sample_rate": 48_000 })))
        .await;
    socket.say(text("One.")).await;
    socket.say(bare("input.flush")).await;
    // Not read from here on, and the work ends all the same.
    worker.until_ended(1).await;
    let mut n_bytes = 0;
    let ended = soon(async {
        use futures::StreamExt as _;
        loop {
            match socket.0.next().await {
                Some(Ok(Message::Binary(bytes))) => n_bytes += bytes.len(),
                Some(Ok(Message::Text(text))) if text.contains("session.done") => return false,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return true,
            }
        }
    })
    .await;
    assert!(ended, "it was cut off");
    assert!(
        n_bytes < CHUNKS * CHUNK_BYTES / 2,
        "{n_bytes} bytes were made for nobody"
    );
}

#[tokio::test]
async fn a_cancel_is_heard_of_who_reads_nothing() {
    let mut script = vec![Step::Started];
    script.extend(std::iter::repeat_n(Step::Audio(25, 0.5), 200));
    script.push(Step::Hang);
    let (worker, gateway) = served(script).await;
    let mut socket = gateway.begun(config(json!({ "sample_rate": 48_000 }))).await;
    socket.say(text("One. Tw")).await;
    worker.until_open(1).await;
    worker.until_asked(5).await;
    worker.plays(speaks());
    socket.say(bare("input.cancel")).await;
    worker.until_ended(1).await;
    socket.say(text("o.")).await;
    socket.say(bare("input.done")).await;
    socket.until("audio.cancelled").await;
    socket.until("session.done").await;
}

#[tokio::test]
async fn a_drain_lets_an_utterance_finish_and_closes_what_waits() {
    let script = vec![
        Step::Started,
        Step::Audio(1, 0.5),
        Step::Gate,
        Step::Finish(v1::FinishReason::Stop),
    ];
    let (worker, mut gateway) = served(script).await;
    let mut idle = gateway.open(&[]).await.unwrap();
    let mut socket = gateway.begun(config(json!({}))).await;
    socket.say(text("One.")).await;
    socket.say(bare("input.done")).await;
    socket.until("audio.chunk").await;
    let mut health = gateway.health().await;
    gateway.shutdown.drain.cancel();
    health
        .until(tonic_health::pb::health_check_response::ServingStatus::NotServing)
        .await;
    let mut late = gateway.open(&[]).await.unwrap();
    late.say(config(json!({}))).await;
    let (error, code) = late.failure().await;
    assert_eq!((&error["code"], code), (&json!("draining"), 1001));
    worker.open_gate();
    socket.until("session.done").await;
    assert_eq!(socket.closed().await, 1001);
    assert_eq!(idle.closed().await, 1001);
    soon(&mut gateway.served).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_utterance_that_does_not_finish_is_ended_at_the_drain_bound() {
    let worker = FakeWorker::start("a", hangs());
    let mut gateway = gateway(&[&worker], |config| {
        config.drain_bound = Duration::from_millis(200)
    })
    .await;
    gateway.serving().await;
    let mut socket = gateway.begun(config(json!({}))).await;
    socket.say(text("One.")).await;
    socket.say(bare("input.flush")).await;
    socket.until("audio.chunk").await;
    gateway.shutdown.drain.cancel();
    let (error, code) = socket.failure().await;
    assert_eq!((&error["code"], code), (&json!("draining"), 1001));
    soon(&mut gateway.served).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_request_that_is_no_handshake_is_told_so() {
    let (_worker, gateway) = served(speaks()).await;
    let (status, code, _, message) = gateway.get("/v1/audio/speech/stream").await.error();
    assert_eq!((status, code.as_str()), (400, "invalid_argument"));
    assert!(message.contains("WebSocket"), "{message}");
}
