//! Registered voices over real connections, through every API.

use std::num::NonZeroUsize;
use std::path::Path;

use laneway_gateway::{ApiKeys, Voices, VoicesConfig, VoicesError};
use laneway_proto::riva::tts::riva_speech_synthesis_client::RivaSpeechSynthesisClient;
use laneway_proto::riva::tts::{RivaSynthesisConfigRequest, SynthesizeSpeechRequest};
use laneway_proto::{ErrorCode, samples_to_bytes, v1};
use serde_json::{Value, json};

use crate::conversation::{Conversation, start};
use crate::fake::{FakeWorker, speaks};
use crate::harness::{TestGateway, gateway, ours, request, soon};
use crate::http::client::body;
use crate::websocket::{bare, config, text};

const CONSENT: &str = "Ada, on paper, in the archive";

/// A worker whose model clones voices.
fn cloning() -> FakeWorker {
    let worker = FakeWorker::start("a", speaks());
    worker.set_status(|status| {
        let facts = status.facts.as_mut().unwrap();
        facts.voices.clear();
        facts.takes_reference = true;
        facts.limits.as_mut().unwrap().max_reference_ms = 5000;
    });
    worker
}

/// The voices of a directory, once the gateway before has let go of it.
pub(crate) async fn opened(directory: &Path) -> Voices {
    let config = VoicesConfig {
        directory: directory.to_owned(),
        max_voices: NonZeroUsize::new(2).unwrap(),
        max_bytes: 1 << 20,
    };
    let free = async {
        loop {
            match Voices::open(config.clone()) {
                Err(VoicesError::InUse) => tokio::task::yield_now().await,
                opened => return opened.unwrap(),
            }
        }
    };
    soon(free).await
}

async fn keeping(worker: &FakeWorker, directory: &Path) -> TestGateway {
    let voices = opened(directory).await;
    let gateway = gateway(&[worker], |config| config.voices = Some(voices)).await;
    gateway.serving().await;
    gateway
}

fn tone() -> Vec<f32> {
    // Steps that a 16-bit file holds exactly.
    (0..24_000i16)
        .map(|index| f32::from(index % 200 - 100) / 256.0)
        .collect()
}

/// The same as 16-bit samples of a WAV file.
fn wav(samples: &[f32]) -> Vec<u8> {
    let n_bytes = samples.len() as u32 * 2;
    let mut file = b"RIFF".to_vec();
    file.extend((n_bytes + 36).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(24_000u32.to_le_bytes());
    file.extend(48_000u32.to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend(n_bytes.to_le_bytes());
    file.extend(
        samples
            .iter()
            .flat_map(|sample| ((sample * 32_768.0) as i16).to_le_bytes()),
    );
    file
}

fn form(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut form = Vec::new();
    for (name, value) in fields {
        let file = if *name == "audio_sample" {
            "; filename=\"../../a.wav\""
        } else {
            ""
        };
        form.extend(format!("--B\r\ncontent-disposition: form-data; name=\"{name}\"{file}\r\n\r\n").bytes());
        form.extend_from_slice(value);
        form.extend(b"\r\n");
    }
    form.extend(b"--B--\r\n");
    form
}

const FORM: [(&str, &str); 1] = [("content-type", "multipart/form-data; boundary=B")];

impl TestGateway {
    async fn post_voice(&self, form: &[u8]) -> crate::http::client::Answer {
        let mut connection = self.connection().await;
        connection.request("POST /v1/audio/voices", &FORM, form).await;
        connection.answer().await
    }

    async fn delete_voice(&self, voice: &str) -> crate::http::client::Answer {
        let mut connection = self.connection().await;
        connection
            .request(&format!("DELETE /v1/audio/voices/{voice}"), &[], b"")
            .await;
        connection.answer().await
    }
}

fn json_of(answer: &crate::http::client::Answer) -> Value {
    assert_eq!(answer.head.status, 200);
    serde_json::from_slice(&answer.bytes()).unwrap()
}

/// What the worker was asked to clone, each time.
fn references(worker: &FakeWorker) -> Vec<(String, v1::ReferenceClip)> {
    let requests = worker.shared.requests.lock().unwrap();
    let reference = |request: &v1::WorkerSynthesizeRequest| {
        (
            request.voice.clone(),
            request.reference.clone().unwrap_or_default(),
        )
    };
    requests.iter().map(|(_, request)| reference(request)).collect()
}

#[tokio::test]
async fn a_voice_registered_over_http_speaks_in_every_api_and_survives_a_restart() {
    let worker = cloning();
    let place = tempfile::tempdir().unwrap();
    let gateway = keeping(&worker, place.path()).await;
    let file = wav(&tone());
    let fields: [(&str, &[u8]); 4] = [
        ("name", b"ada"),
        ("consent", CONSENT.as_bytes()),
        ("ref_text", b"Over there."),
        ("audio_sample", &file),
    ];
    let made = json_of(&gateway.post_voice(&form(&fields)).await);
    let id = made["id"].as_str().unwrap().to_owned();
    assert_eq!(
        (&made["object"], &made["name"]),
        (&json!("audio.voice"), &json!("ada"))
    );
    assert!(made["created_at"].as_u64() > Some(1_700_000_000));
    let listed = json_of(&gateway.get("/v1/audio/voices").await);
    assert_eq!(
        (
            &listed["data"][0]["id"],
            &listed["data"][0]["name"],
            &listed["data"][0]["model"]
        ),
        (&json!(id), &json!("ada"), &json!("nano"))
    );
    assert!(
        !listed.to_string().contains("archive"),
        "consent is not for everybody's eyes"
    );

    gateway.shutdown.now.cancel();
    let mut gateway = gateway;
    soon(&mut gateway.served).await.unwrap().unwrap_err();
    drop(gateway);
    let gateway = keeping(&worker, place.path()).await;
    let listed = soon(gateway.speech().list_voices(v1::ListVoicesRequest::default())).await;
    let voice = listed.unwrap().into_inner().models[0].voices[0].clone();
    assert_eq!((voice.name.as_str(), voice.id.as_str()), ("ada", id.as_str()));

    let named = |voice: &str| v1::SynthesizeRequest {
        voice: voice.into(),
        ..request()
    };
    gateway.speak(named("Ada")).await.unwrap();
    gateway.speak(named(&id)).await.unwrap();
    for voice in [json!("ada"), json!({ "id": id })] {
        assert_eq!(
            gateway.http(&body(json!({ "voice": voice }))).await.head.status,
            200
        );
    }
    let talk = Conversation::begin(
        &gateway,
        v1::SynthesizeRequest {
            voice: "ada".into(),
            ..start()
        },
    )
    .await;
    talk.text("Hello there.").await;
    talk.end().await;
    talk.rest().await.unwrap();
    for voice in [json!("ada"), json!({ "id": id })] {
        let mut socket = gateway.begun(config(json!({ "voice": voice }))).await;
        socket.say(text("Hello there.")).await;
        socket.say(bare("input.done")).await;
        assert_eq!(socket.utterance().await.audio.len(), 3 * 1920 * 2);
    }
    let mut riva = RivaSpeechSynthesisClient::new(gateway.channel.clone());
    let riva_config = soon(riva.get_riva_synthesis_config(RivaSynthesisConfigRequest::default())).await;
    assert_eq!(
        riva_config.unwrap().into_inner().model_config[0].parameters["subvoices"],
        "ada:0"
    );
    for voice_name in ["nano.ada", "ada", &id] {
        let asked = SynthesizeSpeechRequest {
            text: "Hello there.".into(),
            voice_name: voice_name.into(),
            ..Default::default()
        };
        soon(riva.synthesize(asked)).await.unwrap();
    }
    let wanted = v1::ReferenceClip {
        audio: samples_to_bytes(&tone()),
        sample_rate: 24_000,
        text: "Over there.".into(),
    };
    let asked = references(&worker);
    assert_eq!(asked.len(), 10);
    for (voice, reference) in asked {
        assert_eq!(voice, "");
        assert!(
            reference == wanted,
            "another clip came: {} bytes",
            reference.audio.len()
        );
    }

    let gone = json_of(&gateway.delete_voice(&id).await);
    assert_eq!(
        gone,
        json!({ "id": id, "object": "audio.voice.deleted", "deleted": true })
    );
    assert_eq!(gateway.fails(named("ada")).await.code, ErrorCode::UnknownVoice);
    let (status, code, param, _) = gateway.delete_voice("ada").await.error();
    assert_eq!(
        (status, code.as_str(), param.as_str()),
        (404, "unknown_voice", "voice")
    );
}

fn registration(name: &str) -> v1::RegisterVoiceRequest {
    v1::RegisterVoiceRequest {
        name: name.into(),
        clip: Some(v1::ReferenceClip {
            audio: wav(&tone()).into(),
            ..Default::default()
        }),
        consent: CONSENT.into(),
        model: "nano".into(),
    }
}

#[tokio::test]
async fn grpc_registers_deletes_and_says_what_is_wrong() {
    let worker = cloning();
    let place = tempfile::tempdir().unwrap();
    let gateway = keeping(&worker, place.path()).await;
    let mut speech = gateway.speech();
    let voice = soon(speech.register_voice(registration("ada"))).await.unwrap();
    let voice = voice.into_inner().voice.unwrap();
    assert!(
        voice.id.starts_with("voice_") && voice.created_at > 0,
        "{voice:?}"
    );
    soon(speech.register_voice(registration("bob"))).await.unwrap();
    let mut other = registration("bob");
    other.clip.as_mut().unwrap().text = "Said otherwise.".into();
    for (asked, code) in [
        (other, ErrorCode::VoiceExists),
        (registration("eve"), ErrorCode::VoicesFull),
        (registration("../eve"), ErrorCode::InvalidArgument),
        (
            v1::RegisterVoiceRequest {
                consent: String::new(),
                ..registration("eve")
            },
            ErrorCode::InvalidArgument,
        ),
    ] {
        let status = soon(speech.register_voice(asked)).await.unwrap_err();
        assert_eq!(ours(status).code, code);
    }
    let forget = |voice: &str| v1::DeleteVoiceRequest { voice: voice.into() };
    let id = soon(speech.delete_voice(forget("ada")))
        .await
        .unwrap()
        .into_inner()
        .id;
    assert_eq!(id, voice.id);
    let status = soon(speech.delete_voice(forget("../lock"))).await.unwrap_err();
    assert_eq!(ours(status).code, ErrorCode::UnknownVoice);
    soon(speech.register_voice(registration("eve"))).await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_a_voice_is_refused_and_leaves_nothing() {
    let worker = cloning();
    let place = tempfile::tempdir().unwrap();
    let gateway = keeping(&worker, place.path()).await;
    let good = wav(&tone());
    // A header that promises four gigabytes, and one of a chunk without an end.
    let mut bomb = good.clone();
    bomb[40..44].copy_from_slice(&0xffff_fff0u32.to_le_bytes());
    let mut endless = good[..36].to_vec();
    endless.extend(b"LIST\xf0\xff\xff\xff");
    for audio in [
        &bomb[..],
        &endless,
        &wav(&[0.0; 24_000]),
        &wav(&[1.0, -1.0].repeat(12_000)),
        b"",
    ] {
        let fields: [(&str, &[u8]); 3] = [("name", b"ada"), ("consent", b"hers"), ("audio_sample", audio)];
        let (status, code, param, message) = gateway.post_voice(&form(&fields)).await.error();
        assert_eq!(
            (status, code.as_str(), param.as_str()),
            (400, "invalid_argument", "audio_sample"),
            "{message}"
        );
    }
    let (status, code, param, _) = gateway
        .post_voice(&form(&[("audio_sample", &good)]))
        .await
        .error();
    assert_eq!(
        (status, code.as_str(), param.as_str()),
        (400, "invalid_argument", "name")
    );
    // Only promised: it is refused before any of it is read.
    let mut connection = gateway.connection().await;
    let promised = [FORM[0], ("content-length", "9437184")];
    connection.request("POST /v1/audio/voices", &promised, b"").await;
    let (status, code, ..) = connection.answer().await.error();
    assert_eq!((status, code.as_str()), (413, "request_too_large"));
    for path in ["..%2F..%2Fetc%2Fpasswd", "lock", "%00", "voice_"] {
        assert_eq!(gateway.delete_voice(path).await.error().0, 404, "{path}");
    }
    let files: Vec<_> = std::fs::read_dir(place.path()).unwrap().collect();
    assert_eq!(files.len(), 1, "the lock alone: {files:?}");
}

#[tokio::test]
async fn a_voice_belongs_to_the_key_that_registered_it() {
    const KEYS: [&str; 2] = ["alice-0123456789abc", "bob-0123456789abcde"];
    let worker = cloning();
    let place = tempfile::tempdir().unwrap();
    let lines = format!("alice {}\nbob {}\n", KEYS[0], KEYS[1]);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines).unwrap();
    let keys = ApiKeys::read(file.path().to_owned()).unwrap();
    let voices = opened(place.path()).await;
    let gateway = gateway(&[&worker], |config| {
        config.voices = Some(voices);
        config.api_keys = Some(keys);
    })
    .await;
    gateway.serving().await;
    let [alice, bob] = KEYS.map(|key| format!("Bearer {key}"));
    let mut speech = gateway.speech();
    let mut register = tonic::Request::new(registration("ada"));
    register
        .metadata_mut()
        .insert("authorization", alice.parse().unwrap());
    soon(speech.register_voice(register)).await.unwrap();
    let mut forget = tonic::Request::new(v1::DeleteVoiceRequest { voice: "ada".into() });
    forget
        .metadata_mut()
        .insert("authorization", bob.parse().unwrap());
    let status = soon(speech.delete_voice(forget)).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::PermissionDenied);
    assert_eq!(ours(status).code, ErrorCode::VoiceOfAnother);
    for (authorization, wanted) in [(&bob, Some(403)), (&alice, None)] {
        let mut connection = gateway.connection().await;
        let headers = [("authorization", &authorization[..])];
        connection
            .request("DELETE /v1/audio/voices/ada", &headers, b"")
            .await;
        let answer = connection.answer().await;
        let Some(wanted) = wanted else {
            assert_eq!(answer.head.status, 200);
            continue;
        };
        let (status, code, param, message) = answer.error();
        assert_eq!(
            (status, code.as_str(), param.as_str()),
            (wanted, "voice_of_another", "voice")
        );
        assert!(message.contains("another API key"), "{message}");
    }
}

#[tokio::test]
async fn a_gateway_without_a_directory_keeps_no_voices() {
    let worker = cloning();
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let status = soon(gateway.speech().register_voice(registration("ada")))
        .await
        .unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    let failure = ours(status);
    assert_eq!(failure.code, ErrorCode::VoicesNotKept);
    assert!(failure.message.contains("--voices-dir"), "{failure}");
    let (status, code, ..) = gateway.post_voice(&form(&[("name", b"ada")])).await.error();
    assert_eq!((status, code.as_str()), (501, "voices_not_kept"));
    assert_eq!(gateway.delete_voice("ada").await.error().0, 501);
}
