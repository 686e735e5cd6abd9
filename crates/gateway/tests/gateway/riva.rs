//! Riva's protocol at the gateway. Its real client is in the integration tests.

use laneway_proto::riva::tts::riva_speech_synthesis_client::RivaSpeechSynthesisClient;
use laneway_proto::riva::tts::{
    RivaSynthesisConfigRequest, SynthesizeSpeechRequest, SynthesizeSpeechResponse,
};
use laneway_proto::riva::{AudioEncoding, RequestId};
use laneway_proto::{ErrorCode, Failure, v1};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{TestGateway, gateway, ours, soon};

fn request(text: &str) -> SynthesizeSpeechRequest {
    SynthesizeSpeechRequest {
        text: text.into(),
        language_code: "en-US".into(),
        encoding: AudioEncoding::LinearPcm.into(),
        sample_rate_hz: 24_000,
        voice_name: "nano.ryan".into(),
        id: Some(RequestId { value: "mine".into() }),
        ..Default::default()
    }
}

async fn served(script: Vec<Step>) -> (FakeWorker, TestGateway, RivaSpeechSynthesisClient<Channel>) {
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let client = RivaSpeechSynthesisClient::new(gateway.channel.clone());
    (worker, gateway, client)
}

async fn online(
    client: &mut RivaSpeechSynthesisClient<Channel>,
    requests: Vec<SynthesizeSpeechRequest>,
) -> Result<Vec<SynthesizeSpeechResponse>, Status> {
    let mut stream = soon(client.synthesize_online(tokio_stream::iter(requests)))
        .await?
        .into_inner();
    let mut responses = Vec::new();
    while let Some(response) = soon(stream.message()).await? {
        responses.push(response);
    }
    Ok(responses)
}

#[tokio::test]
async fn a_text_is_answered_with_all_of_its_audio() {
    let (worker, _gateway, mut client) = served(speaks()).await;
    let answer = soon(client.synthesize(request("Hello there.")))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.audio.len(), 3 * 3840, "raw samples without a header");
    assert_eq!(answer.audio[..2], 8192i16.to_le_bytes());
    assert_eq!(answer.id.unwrap().value, "mine");
    let meta = answer.meta.unwrap();
    assert_eq!(
        (meta.text.as_str(), meta.processed_text.as_str()),
        ("Hello there.", "Hello there.")
    );
    let asked = worker.shared.requests.lock().unwrap()[0].1.clone();
    assert_eq!(
        (asked.voice.as_str(), asked.language.as_str()),
        ("ryan", "english")
    );

    let half = SynthesizeSpeechRequest {
        sample_rate_hz: 22_050,
        ..request("Hello there.")
    };
    let answer = soon(client.synthesize(half)).await.unwrap().into_inner();
    assert_eq!(
        answer.audio.len(),
        2 * 5292,
        "the rate that Riva's client asks for by default"
    );
    let opus = SynthesizeSpeechRequest {
        encoding: AudioEncoding::Oggopus.into(),
        ..request("Hello there.")
    };
    let answer = soon(client.synthesize(opus)).await.unwrap().into_inner();
    assert!(answer.audio.starts_with(b"OggS"));
}

#[tokio::test]
async fn texts_are_spoken_one_behind_the_other_as_they_come() {
    let (worker, _gateway, mut client) = served(speaks()).await;
    let responses = online(&mut client, vec![request("One moment"), request("Two. Three.")])
        .await
        .unwrap();
    let metas: Vec<_> = responses
        .iter()
        .filter_map(|response| response.meta.as_ref())
        .collect();
    let texts: Vec<_> = metas.iter().map(|meta| meta.text.as_str()).collect();
    assert_eq!(
        texts,
        ["One moment", "Two.", "Three."],
        "no text runs into the next"
    );
    assert_eq!(
        responses
            .iter()
            .map(|response| response.audio.len())
            .sum::<usize>(),
        9 * 3840
    );
    assert!(
        responses
            .iter()
            .all(|response| response.id.as_ref().unwrap().value == "mine")
    );
    assert!(responses[0].meta.is_some() && responses[1].meta.is_none());
    assert_eq!(worker.n_requests(), 3);
}

#[tokio::test]
async fn audio_comes_before_the_texts_have_ended() {
    let hangs = vec![Step::Started, Step::Audio(1, 0.25), Step::Hang];
    let (worker, _gateway, mut client) = served(hangs).await;
    let (sender, texts) = tokio::sync::mpsc::channel(4);
    sender.send(request("Hello")).await.unwrap();
    let mut stream = soon(client.synthesize_online(ReceiverStream::new(texts)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(soon(stream.message()).await.unwrap().unwrap().audio.len(), 3840);
    drop((stream, sender));
    worker.until_ended(1).await;
}

#[tokio::test]
async fn failures_name_rivas_fields_and_what_exists() {
    let (worker, _gateway, mut client) = served(speaks()).await;
    for (change, grpc, code, field, words) in [
        (
            (|r| r.voice_name = "nano.bob".into()) as fn(&mut SynthesizeSpeechRequest),
            Code::NotFound,
            ErrorCode::UnknownVoice,
            "voice_name",
            "ryan, vivian",
        ),
        (
            |r| r.language_code = "fr-FR".into(),
            Code::InvalidArgument,
            ErrorCode::UnknownLanguage,
            "language_code",
            "en-US",
        ),
        (
            |r| r.sample_rate_hz = 11_025,
            Code::InvalidArgument,
            ErrorCode::UnsupportedSampleRate,
            "sample_rate_hz",
            "22050",
        ),
        (
            |r| r.encoding = AudioEncoding::Mulaw.into(),
            Code::InvalidArgument,
            ErrorCode::UnsupportedFormat,
            "encoding",
            "LINEAR_PCM",
        ),
        (
            |r| r.custom_dictionary = "a  b".into(),
            Code::InvalidArgument,
            ErrorCode::UnsupportedField,
            "custom_dictionary",
            "phonemes",
        ),
        (
            |r| {
                r.zero_shot_data = Some(laneway_proto::riva::tts::ZeroShotData {
                    audio_prompt: vec![0; 4800].into(),
                    sample_rate_hz: 24_000,
                    ..Default::default()
                })
            },
            Code::InvalidArgument,
            ErrorCode::UnsupportedField,
            "zero_shot_data",
            "does not clone",
        ),
        (
            |r| r.text = "a\u{7}".into(),
            Code::InvalidArgument,
            ErrorCode::InvalidText,
            "text",
            "U+0007",
        ),
        (
            |r| {
                r.id = Some(RequestId {
                    value: "not an id".into(),
                })
            },
            Code::InvalidArgument,
            ErrorCode::InvalidArgument,
            "id",
            "A-Z",
        ),
    ] {
        let mut changed = request("Hello there.");
        change(&mut changed);
        let batch = soon(client.synthesize(changed.clone()))
            .await
            .map(|_| ())
            .unwrap_err();
        let streamed = online(&mut client, vec![changed]).await.map(|_| ()).unwrap_err();
        for status in [batch, streamed] {
            assert_eq!(status.code(), grpc, "{status}");
            let failure = ours(status);
            assert_eq!(
                (failure.code, failure.violations[0].field.as_str()),
                (code, field),
                "{failure}"
            );
            assert!(failure.message.contains(words), "{failure}");
        }
    }
    let mut second = request("Two.");
    second.language_code = String::new();
    let changed = online(&mut client, vec![request("One."), second])
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(ours(changed).violations[0].field, "language_code");
    let nothing = online(&mut client, Vec::new()).await.map(|_| ()).unwrap_err();
    assert_eq!(ours(nothing).code, ErrorCode::InvalidArgument);
    worker.plays(vec![Step::Refuse(Failure::new(ErrorCode::Overloaded, "full"))]);
    let busy = soon(client.synthesize(request("Hello.")))
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(busy.code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn a_caller_who_leaves_a_whole_answer_ends_its_work() {
    let (worker, gateway, mut client) = served(vec![Step::Started, Step::Hang]).await;
    let call = tokio::spawn(async move { client.synthesize(request("Hello there.")).await });
    worker.until_open(1).await;
    call.abort();
    worker.until_ended(1).await;
    worker.plays(speaks());
    soon(async { while gateway.speak(crate::harness::named("mine")).await.is_err() {} }).await;
}

#[tokio::test]
async fn the_models_are_listed_as_rivas_tools_read_them() {
    let (_worker, gateway, mut client) = served(speaks()).await;
    let all = RivaSynthesisConfigRequest::default();
    let configs = soon(client.get_riva_synthesis_config(all))
        .await
        .unwrap()
        .into_inner()
        .model_config;
    let [config] = &configs[..] else {
        panic!("{configs:?}")
    };
    assert_eq!(config.model_name, "nano");
    let wanted = [
        ("language_code", "en-US"),
        ("sample_rate", "24000"),
        ("subvoices", "ryan:0,vivian:1"),
        ("voice_name", "nano"),
    ];
    let parameters: Vec<_> = config
        .parameters
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(parameters, wanted);
    let one = RivaSynthesisConfigRequest {
        model_name: "giga".into(),
    };
    let unknown = ours(
        soon(client.get_riva_synthesis_config(one))
            .await
            .map(|_| ())
            .unwrap_err(),
    );
    assert_eq!(
        (unknown.code, unknown.violations[0].field.as_str()),
        (ErrorCode::UnknownModel, "model_name")
    );
    let listed = soon(gateway.models().list(v1::ListModelsRequest {}))
        .await
        .unwrap();
    assert_eq!(listed.into_inner().models[0].model, config.model_name);
}
