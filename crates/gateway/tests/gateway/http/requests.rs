//! What is taken, what is refused, and what is listed.

use laneway_proto::v1;
use serde_json::json;

use super::client::body;
use crate::fake::{FakeWorker, Step, caller_id, speaks};
use crate::harness::gateway;

#[tokio::test]
async fn a_request_is_spoken_chunk_by_chunk() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let changes = json!({ "seed": 42, "language": "English" });
    let mut connection = gateway
        .post(
            &body(changes),
            &[("x-request-id", "mine"), ("traceparent", TRACE)],
        )
        .await;
    let answer = connection.answer().await;
    assert_eq!(answer.head.status, 200);
    for (name, value) in [
        ("content-type", "audio/pcm"),
        ("x-request-id", "mine"),
        ("laneway-seed", "42"),
        ("laneway-model", "nano"),
        ("laneway-sample-rate", "24000"),
        ("cache-control", "no-store"),
    ] {
        assert_eq!(answer.head.header(name), Some(value), "{name}");
    }
    let sizes: Vec<_> = answer.chunks.iter().map(Vec::len).collect();
    assert_eq!(sizes, [3840, 7680], "each chunk as it is made");
    assert!(answer.whole);
    assert_eq!(answer.bytes()[..2], 8192i16.to_le_bytes(), "0.25 of full scale");

    let (metadata, seen) = worker.shared.requests.lock().unwrap()[0].clone();
    assert_eq!(metadata.get("traceparent").unwrap(), TRACE);
    assert_eq!(caller_id(&seen.request_id), "mine");
    let want = v1::WorkerSynthesizeRequest {
        request_id: seen.request_id.clone(),
        text: "Hello there.".into(),
        voice: "ryan".into(),
        language: "english".into(),
        seed: 42,
        ..Default::default()
    };
    assert_eq!(seen, want);
    connection.request("GET /v1/models", &[], b"").await;
    assert_eq!(
        connection.answer().await.head.status,
        200,
        "the connection goes on"
    );
}

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test]
async fn the_bytes_are_in_the_format_asked_for() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    for (format, media_type, magic) in [
        (json!("wav"), "audio/wav", &b"RIFF\xff\xff\xff\xffWAVE"[..]),
        (json!("flac"), "audio/flac", b"fLaC"),
        (json!("opus"), "audio/opus", b"OggS"),
        (json!("mp3"), "audio/mpeg", b"\xff"),
        (json!(null), "audio/mpeg", b"\xff"),
    ] {
        let answer = gateway.http(&body(json!({ "response_format": format }))).await;
        assert_eq!(answer.head.header("content-type"), Some(media_type));
        assert!(answer.bytes().starts_with(magic), "{format}");
        assert!(answer.whole);
    }
    for (rate, speed, n_samples) in [(8_000, 1.0, 1_920), (16_000, 2.0, 1_920), (48_000, 0.5, 23_040)] {
        let changes = json!({ "sample_rate": rate, "speed": speed });
        let answer = gateway.http(&body(changes)).await;
        assert_eq!(answer.bytes().len(), 2 * n_samples, "{rate} Hz at {speed}");
        assert_eq!(
            answer.head.header("laneway-sample-rate"),
            Some(rate.to_string().as_str())
        );
    }
}

#[tokio::test]
async fn events_carry_the_audio_and_how_it_ended() {
    let script = vec![
        Step::Started,
        Step::Audio(1, 0.25),
        Step::Audio(4, 0.1),
        Step::Finish(v1::FinishReason::Length),
    ];
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let plain = gateway.http(&body(json!({}))).await.bytes();
    let answer = gateway.http(&body(json!({ "stream_format": "sse" }))).await;
    assert_eq!(answer.head.header("content-type"), Some("text/event-stream"));
    let events = events(&answer.bytes());
    let (done, deltas) = events.split_last().unwrap();
    let mut audio = Vec::new();
    for delta in deltas {
        use base64::Engine as _;
        assert_eq!(delta["type"], "speech.audio.delta");
        let encoded = delta["audio"].as_str().unwrap();
        audio.extend(base64::engine::general_purpose::STANDARD.decode(encoded).unwrap());
    }
    assert_eq!(deltas.len(), 2);
    assert_eq!(audio, plain, "the same bytes");
    assert_eq!(done["type"], "speech.audio.done");
    let usage = json!({ "input_tokens": 12, "output_tokens": 5, "total_tokens": 17 });
    assert_eq!(done["usage"], usage);
    assert_eq!(done["finish_reason"], "length", "a runaway is told from an end");
    assert_eq!(done["seconds"], 0.4);
}

/// The values of a stream of server-sent events.
pub(super) fn events(bytes: &[u8]) -> Vec<serde_json::Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    let events = text.strip_suffix("\n\n").unwrap().split("\n\n");
    events
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

#[tokio::test]
async fn bad_requests_are_refused_by_field_before_any_worker_sees_them() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |config| config.max_text_chars = 200).await;
    gateway.serving().await;
    for (changes, status, code, param, words) in [
        (json!({ "input": "" }), 400, "invalid_text", "input", "letter"),
        (json!({ "input": "…" }), 400, "invalid_text", "input", "letter"),
        (json!({ "input": "—" }), 400, "invalid_text", "input", "letter"),
        (json!({ "input": "🙂" }), 400, "invalid_text", "input", "digit"),
        (
            json!({ "input": "a\u{0}" }),
            400,
            "invalid_text",
            "input",
            "U+0000",
        ),
        (
            json!({ "input": "a".repeat(201) }),
            400,
            "text_too_long",
            "input",
            "201 characters are over the limit of 200",
        ),
        (json!({ "input": null }), 400, "invalid_text", "input", "letter"),
        (
            json!({ "voice": "alloy" }),
            404,
            "unknown_voice",
            "voice",
            "ryan, vivian",
        ),
        (
            json!({ "voice": null }),
            400,
            "invalid_argument",
            "voice",
            "ryan, vivian",
        ),
        (
            json!({ "voice": "" }),
            400,
            "invalid_argument",
            "voice",
            "it is empty",
        ),
        (
            json!({ "model": "" }),
            400,
            "invalid_argument",
            "model",
            "it is empty",
        ),
        (
            json!({ "model": "tts-1" }),
            404,
            "unknown_model",
            "model",
            "there are: nano",
        ),
        (
            json!({ "language": "elvish" }),
            400,
            "unknown_language",
            "language",
            "english, auto",
        ),
        (
            json!({ "response_format": "aac" }),
            400,
            "unsupported_format",
            "response_format",
            "mp3, opus, flac, wav, pcm",
        ),
        (
            json!({ "sample_rate": 11_025 }),
            400,
            "unsupported_sample_rate",
            "sample_rate",
            "8000, 16000, 22050, 24000, 44100, 48000",
        ),
        (
            json!({ "speed": 5 }),
            400,
            "invalid_argument",
            "speed",
            "[0.25, 4]",
        ),
        (
            json!({ "instructions": "whisper" }),
            400,
            "unsupported_field",
            "instructions",
            "does not take it",
        ),
        (
            json!({ "emotion": 1 }),
            400,
            "unsupported_field",
            "emotion",
            "no such field",
        ),
        (
            json!({ "stream_format": "raw" }),
            400,
            "invalid_argument",
            "stream_format",
            "audio, sse",
        ),
    ] {
        let answer = gateway.http(&body(changes)).await;
        let (got_status, got_code, got_param, message) = answer.error();
        assert_eq!(
            (got_status, got_code.as_str(), got_param.as_str()),
            (status, code, param),
            "{message}"
        );
        assert!(message.contains(words), "{message}");
        assert!(message.starts_with(&format!("{param}: ")), "{message}");
    }
    assert_eq!(worker.n_requests(), 0);
    let digits = gateway.http(&body(json!({ "input": "8..." }))).await;
    assert_eq!(digits.head.status, 200);
}

#[tokio::test]
async fn models_and_voices_are_those_that_are_served() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let models = gateway.get("/v1/models").await.json();
    assert_eq!(models["object"], "list");
    let model = &models["data"][0];
    assert_eq!(model["id"], "nano");
    assert_eq!(model["object"], "model");
    assert_eq!(model["owned_by"], "laneway");
    assert_eq!(model["voices"], json!(["ryan", "vivian"]));
    assert_eq!(model["max_input_chars"], 20_000);
    assert_eq!(gateway.get("/v1/models/nano").await.json(), *model);
    let (status, code, ..) = gateway.get("/v1/models/giga").await.error();
    assert_eq!((status, code.as_str()), (404, "unknown_model"));

    let voices = gateway.get("/v1/audio/voices?model=nano").await.json();
    assert_eq!(voices["data"][1]["id"], "vivian");
    assert_eq!(voices["data"][1]["model"], "nano");
    assert_eq!(voices["data"].as_array().unwrap().len(), 2);
    assert_eq!(gateway.get("/v1/audio/voices").await.json(), voices);
    let (status, code, ..) = gateway.get("/v1/audio/voices?model=giga").await.error();
    assert_eq!((status, code.as_str()), (404, "unknown_model"));
    let (status, _, param, _) = gateway.get("/v1/audio/voices?limit=1").await.error();
    assert_eq!((status, param.as_str()), (400, "limit"));
}

#[tokio::test]
async fn the_ids_of_requests_are_the_callers_or_made_up() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let first = gateway.http(&body(json!({}))).await;
    let second = gateway.http(&body(json!({}))).await;
    let id = first.head.header("x-request-id").unwrap();
    assert_ne!(Some(id), second.head.header("x-request-id"));
    let seen = worker.shared.requests.lock().unwrap()[0].1.request_id.clone();
    assert_eq!(caller_id(&seen), id);
    let mut connection = gateway
        .post(&body(json!({})), &[("x-request-id", "not an id")])
        .await;
    let (status, _, param, _) = connection.answer().await.error();
    assert_eq!((status, param.as_str()), (400, "x-request-id"));
    assert_eq!(worker.n_requests(), 2);
}

#[tokio::test]
async fn a_stream_without_audio_is_an_empty_file() {
    let worker = FakeWorker::start("a", vec![Step::Started, Step::Finish(v1::FinishReason::Stop)]);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let pcm = gateway.http(&body(json!({}))).await;
    assert_eq!((pcm.head.status, pcm.bytes().len(), pcm.whole), (200, 0, true));
    let wav = gateway.http(&body(json!({ "response_format": "wav" }))).await;
    assert_eq!(wav.bytes().len(), 44);
}
