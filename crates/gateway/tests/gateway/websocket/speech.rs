//! What is spoken over a WebSocket is what is spoken over gRPC.

use laneway_proto::v1;
use serde_json::json;
use v1::stream_synthesize_request::Message as Sent;

use super::{bare, config, text};
use crate::conversation::{self, Conversation};
use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{TestGateway, gateway};

async fn served(script: Vec<Step>) -> (FakeWorker, TestGateway) {
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    (worker, gateway)
}

#[tokio::test]
async fn a_text_in_pieces_is_spoken_and_told_in_order() {
    let (worker, gateway) = served(speaks()).await;
    let mut socket = gateway.open(&[("x-request-id", "mine")]).await.unwrap();
    socket
        .say(config(json!({ "language": "english", "sample_rate": 24_000 })))
        .await;
    let started = socket.told().await;
    let wanted = json!({
        "type": "session.started", "request_id": "mine", "model": "nano", "seed": 100, "response_format": "pcm",
        "sample_rate": 24_000, "channels": 1,
    });
    assert_eq!(started, wanted);
    for piece in ["One mo", "re. T", "wo"] {
        socket.say(text(piece)).await;
    }
    socket.say(bare("input.done")).await;
    let spoken = socket.utterance().await;
    let sentence = |index| {
        [
            format!("audio.start {index}"),
            "audio.chunk".into(),
            "audio.chunk".into(),
            format!("audio.done {index}"),
        ]
    };
    let wanted = [&sentence(0)[..], &sentence(1)[..], &["session.done".into()]].concat();
    assert_eq!(spoken.order(), wanted);
    assert_eq!(spoken.told[0]["sentence_text"], "One more.");
    assert_eq!(spoken.told[4]["sample_offset"], 3 * 1920);
    let done = spoken.last();
    assert_eq!(
        (
            &done["finish_reason"],
            &done["frames"],
            &done["samples"],
            &done["total_sentences"]
        ),
        (&json!("stop"), &json!(6), &json!(6 * 1920), &json!(2))
    );
    assert!(done["first_audio_ms"].as_f64().unwrap() > 0.0 && done["total_ms"].as_f64().unwrap() > 0.0);
    let requests = worker.shared.requests.lock().unwrap();
    assert!(
        requests
            .iter()
            .all(|(_, request)| request.voice == "ryan" && request.language == "english")
    );
    assert_eq!(requests.len(), 2);
}

#[tokio::test]
async fn every_format_has_the_bytes_of_the_same_call_over_grpc() {
    let (_worker, gateway) = served(speaks()).await;
    for (name, format, sample_rate) in [
        ("pcm", v1::AudioFormat::PcmS16le, 22_050),
        ("wav", v1::AudioFormat::Wav, 24_000),
        ("flac", v1::AudioFormat::Flac, 16_000),
        ("mp3", v1::AudioFormat::Mp3, 24_000),
        ("opus", v1::AudioFormat::Opus, 48_000),
    ] {
        let start = v1::SynthesizeRequest {
            text: "One. Two.".into(),
            format: format.into(),
            sample_rate,
            speed: Some(1.25),
            ..conversation::start()
        };
        let talk = Conversation::begin(&gateway, start).await;
        talk.send(Sent::End(v1::EndOfText {})).await;
        let mut over_grpc = Vec::new();
        let mut events = talk.events;
        while let Some(message) = events.message().await.unwrap() {
            if let Some(v1::stream_synthesize_response::Event::Chunk(chunk)) = message.event {
                over_grpc.extend_from_slice(&chunk.audio);
            }
        }
        let changes = json!({ "response_format": name, "sample_rate": sample_rate, "speed": 1.25 });
        let mut socket = gateway.begun(config(changes)).await;
        socket.say(text("One. Two.")).await;
        socket.say(bare("input.done")).await;
        let audio = socket.utterance().await.audio;
        // An Ogg stream has a serial number of its own.
        let same = match name {
            "opus" => audio.len() == over_grpc.len() && audio.starts_with(b"OggS"),
            _ => audio == over_grpc,
        };
        assert!(
            same && !audio.is_empty(),
            "{name}: {} {}",
            audio.len(),
            over_grpc.len()
        );
    }
}

#[tokio::test]
async fn one_connection_speaks_one_utterance_after_the_other() {
    let (worker, gateway) = served(speaks()).await;
    let mut socket = gateway.begun(config(json!({ "request_id": "first" }))).await;
    socket.say(text("One.")).await;
    socket.say(bare("input.done")).await;
    socket.utterance().await;
    // As before, and begun by its text.
    socket.say(text("Two.")).await;
    socket.say(bare("input.done")).await;
    let again = socket.utterance().await;
    assert_eq!(
        again.told[0]["request_id"], "first",
        "a config counts until the next"
    );
    // As it is said anew, with an id and a seed that the gateway chooses.
    let mut anew = config(json!({ "voice": "vivian" }));
    anew.as_object_mut().unwrap().remove("seed");
    socket.say(anew).await;
    let started = socket.told().await;
    assert_ne!(started["request_id"], "first");
    assert!(
        started["seed"].as_u64().unwrap() < 1 << 53,
        "a number that every browser holds"
    );
    socket.say(text("Three")).await;
    socket.say(bare("input.flush")).await;
    assert_eq!(socket.until("audio.start").await["sentence_text"], "Three");
    socket.say(bare("session.close")).await;
    socket.until("session.done").await;
    assert_eq!(socket.closed().await, 1000);
    let voices: Vec<_> = {
        let requests = worker.shared.requests.lock().unwrap();
        requests
            .iter()
            .map(|(_, request)| request.voice.clone())
            .collect()
    };
    assert_eq!(voices, ["ryan", "ryan", "vivian"]);
}

#[tokio::test]
async fn a_cancel_drops_what_was_sent_and_the_next_text_is_spoken() {
    let hangs = vec![Step::Started, Step::Audio(1, 0.25), Step::Hang];
    let (worker, gateway) = served(hangs).await;
    let mut socket = gateway.begun(config(json!({}))).await;
    socket.say(text("One. Two. Thr")).await;
    socket.until("audio.chunk").await;
    worker.until_open(2).await;
    worker.plays(speaks());
    socket.say(bare("input.cancel")).await;
    worker.until_ended(2).await;
    let cancelled = socket.until("audio.cancelled").await;
    assert_eq!(cancelled["sample_offset"], 1920);
    socket.say(text("Four.")).await;
    socket.say(bare("input.done")).await;
    let spoken = socket.utterance().await;
    assert_eq!(spoken.told[0]["sentence_text"], "Four.");
    assert_eq!(spoken.told[0]["sample_offset"], 1920);
    assert_eq!(spoken.last()["samples"], 4 * 1920);
    // One that comes too late has its answer too.
    socket.say(bare("input.cancel")).await;
    assert_eq!(
        socket.told().await,
        json!({ "type": "audio.cancelled", "sample_offset": 0 })
    );
}
