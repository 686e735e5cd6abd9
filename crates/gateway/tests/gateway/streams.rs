//! Requests that are served or refused one at a time.

use laneway_proto::{ErrorCode, v1};
use tonic::Code;

use crate::fake::{FakeWorker, Step, caller_id, speaks};
use crate::harness::{gateway, named, ours, request, soon};

#[tokio::test]
async fn a_request_is_spoken_with_indices_offsets_and_a_last_message() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let spoken = gateway.speak(named("mine")).await.unwrap();
    assert_eq!(spoken.accepted.request_id, "mine");
    assert_eq!(spoken.accepted.model, "nano");
    assert_eq!(
        (spoken.accepted.sample_rate, spoken.accepted.channels),
        (24_000, 1)
    );
    let places: Vec<_> = spoken
        .chunks
        .iter()
        .map(|chunk| (chunk.index, chunk.sample_offset, chunk.audio.len()))
        .collect();
    assert_eq!(places, [(0, 0, 3840), (1, 1920, 7680)]);
    let finished = spoken.finished;
    assert_eq!(
        (finished.reason(), finished.frames, finished.samples),
        (v1::FinishReason::Stop, 3, 5760)
    );
    assert_eq!(finished.seconds, 0.24);
    assert_eq!(finished.prompt_positions, 12);
    let timings = finished.timings.unwrap();
    assert!(timings.first_audio_us > 0 && timings.total_us >= timings.first_audio_us);
    assert_eq!(timings.first_audible_us, Some(timings.first_audio_us));
}

#[tokio::test]
async fn the_bytes_are_in_the_format_asked_for() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let bytes = async |format: v1::AudioFormat| {
        let request = v1::SynthesizeRequest {
            format: format.into(),
            ..request()
        };
        let spoken = gateway.speak(request).await.unwrap();
        assert_eq!(spoken.accepted.format(), format);
        spoken
            .chunks
            .iter()
            .flat_map(|chunk| chunk.audio.to_vec())
            .collect::<Vec<u8>>()
    };
    let s16 = bytes(v1::AudioFormat::PcmS16le).await;
    assert_eq!(s16.len(), 5760 * 2);
    assert_eq!(s16[..2], 8192i16.to_le_bytes(), "0.25 of full scale");
    assert_eq!(s16[5760 * 2 - 2..], (-16384i16).to_le_bytes());
    let f32 = bytes(v1::AudioFormat::PcmF32le).await;
    assert_eq!(f32.len(), 5760 * 4);
    assert_eq!(f32[..4], 0.25f32.to_le_bytes());
    let wav = bytes(v1::AudioFormat::Wav).await;
    assert_eq!(
        wav[4..8],
        [0xff; 4],
        "a streamed header carries sizes of 0xFFFFFFFF"
    );
    assert_eq!(wav[40..44], [0xff; 4]);
    assert_eq!(wav[44..], s16[..]);
}

#[tokio::test]
async fn rates_speeds_and_compressed_formats_are_as_asked_for() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    for (format, sample_rate, speed, n_samples, magic) in [
        (v1::AudioFormat::PcmS16le, 48_000, None, 11_520, &b""[..]),
        (v1::AudioFormat::PcmS16le, 22_050, None, 5292, &b""[..]),
        (v1::AudioFormat::PcmF32le, 8_000, Some(0.5), 3_840, b""),
        (v1::AudioFormat::Flac, 16_000, Some(2.0), 1_920, b"fLaC"),
        (v1::AudioFormat::Opus, 24_000, None, 5_760, b"OggS"),
        (v1::AudioFormat::Mp3, 24_000, Some(1.0), 5_760, b"\xff"),
    ] {
        let request = v1::SynthesizeRequest {
            format: format.into(),
            sample_rate,
            speed,
            ..request()
        };
        let spoken = gateway.speak(request).await.unwrap();
        assert_eq!(
            (spoken.accepted.format(), spoken.accepted.sample_rate),
            (format, sample_rate)
        );
        assert_eq!(spoken.finished.samples, n_samples, "{format:?}");
        assert_eq!(spoken.finished.frames, 3);
        assert_eq!(spoken.finished.seconds, n_samples as f64 / f64::from(sample_rate));
        for (index, chunk) in (0..).zip(&spoken.chunks) {
            assert_eq!(chunk.index, index, "no gaps where the encoder held samples back");
            assert!(!chunk.audio.is_empty());
        }
        let bytes: Vec<u8> = spoken
            .chunks
            .iter()
            .flat_map(|chunk| chunk.audio.to_vec())
            .collect();
        assert!(bytes.starts_with(magic), "{format:?}");
        let width = match format {
            v1::AudioFormat::PcmS16le => 2,
            v1::AudioFormat::PcmF32le => 4,
            _ => continue,
        };
        assert_eq!(bytes.len() as u64, n_samples * width);
        let mut offset = 0;
        for chunk in &spoken.chunks {
            assert_eq!(chunk.sample_offset * width, offset);
            offset += chunk.audio.len() as u64;
        }
    }
}

#[tokio::test]
async fn a_wav_without_audio_is_still_a_file() {
    let worker = FakeWorker::start("a", vec![Step::Started, Step::Finish(v1::FinishReason::Stop)]);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let wav = v1::SynthesizeRequest {
        format: v1::AudioFormat::Wav.into(),
        ..request()
    };
    assert_eq!(gateway.speak(wav).await.unwrap().chunks[0].audio.len(), 44);
    assert!(gateway.speak(request()).await.unwrap().chunks.is_empty());
}

#[tokio::test]
async fn bad_requests_are_refused_by_field_before_any_worker_sees_them() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |config| config.max_text_chars = 200).await;
    gateway.serving().await;
    let change = |change: fn(&mut v1::SynthesizeRequest)| {
        let mut changed = request();
        change(&mut changed);
        changed
    };
    for (sent, grpc, code, field, words) in [
        (
            change(|r| r.text = "…".into()),
            Code::InvalidArgument,
            ErrorCode::InvalidText,
            "text",
            "letter",
        ),
        (
            change(|r| r.text = "🙂".into()),
            Code::InvalidArgument,
            ErrorCode::InvalidText,
            "text",
            "digit",
        ),
        (
            change(|r| r.text = "a\0".into()),
            Code::InvalidArgument,
            ErrorCode::InvalidText,
            "text",
            "U+0000",
        ),
        (
            change(|r| r.text = "a".repeat(201)),
            Code::InvalidArgument,
            ErrorCode::TextTooLong,
            "text",
            "201 characters are over the limit of 200",
        ),
        (
            change(|r| r.voice = "bob".into()),
            Code::NotFound,
            ErrorCode::UnknownVoice,
            "voice",
            "ryan, vivian",
        ),
        (
            change(|r| r.language = "elvish".into()),
            Code::InvalidArgument,
            ErrorCode::UnknownLanguage,
            "language",
            "english, auto",
        ),
        (
            change(|r| r.model = "giga".into()),
            Code::NotFound,
            ErrorCode::UnknownModel,
            "model",
            "there are: nano",
        ),
        (
            change(|r| r.format = 9),
            Code::InvalidArgument,
            ErrorCode::UnsupportedFormat,
            "format",
            "9 is not served; there are: pcm_s16le, pcm_f32le, wav, opus, flac, mp3",
        ),
        (
            change(|r| r.sample_rate = 11_025),
            Code::InvalidArgument,
            ErrorCode::UnsupportedSampleRate,
            "sample_rate",
            "there are: 8000, 16000, 22050, 24000, 44100, 48000",
        ),
        (
            change(|r| r.instruct = "whisper".into()),
            Code::InvalidArgument,
            ErrorCode::UnsupportedField,
            "instruct",
            "does not take it",
        ),
        (
            change(|r| r.max_frames = Some(501)),
            Code::InvalidArgument,
            ErrorCode::InvalidArgument,
            "max_frames",
            "cap of 500",
        ),
    ] {
        let status = gateway.begin(sent).await.map(|_| ()).unwrap_err();
        assert_eq!(status.code(), grpc);
        let failure = ours(status);
        assert_eq!(failure.code, code, "{failure}");
        assert_eq!(failure.violations[0].field, field);
        assert!(failure.violations[0].description.contains(words), "{failure}");
    }
    assert_eq!(worker.n_requests(), 0);
    let digits = v1::SynthesizeRequest {
        text: "8...".into(),
        ..request()
    };
    gateway.speak(digits).await.unwrap();
}

#[tokio::test]
async fn what_is_accepted_reaches_the_worker() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let sampling = v1::SamplingParams {
        temperature: Some(0.3),
        top_k: Some(30),
        ..Default::default()
    };
    let chunk = v1::ChunkPolicy {
        first: 2,
        ramp: vec![3],
        steady: 4,
    };
    let sent = v1::SynthesizeRequest {
        language: "English".into(),
        seed: Some(42),
        sampling: Some(sampling),
        chunk: Some(chunk.clone()),
        max_frames: Some(77),
        layout: v1::TextLayout::Streamed.into(),
        ..named("mine")
    };
    assert_eq!(gateway.speak(sent).await.unwrap().accepted.seed, 42);
    let seen = worker.shared.requests.lock().unwrap()[0].1.clone();
    assert_eq!(caller_id(&seen.request_id), "mine");
    let want = v1::WorkerSynthesizeRequest {
        request_id: seen.request_id.clone(),
        text: "Hello there.".into(),
        voice: "ryan".into(),
        language: "english".into(),
        seed: 42,
        sampling: Some(sampling),
        chunk: Some(chunk),
        max_frames: Some(77),
        layout: v1::TextLayout::Streamed.into(),
        ..Default::default()
    };
    assert_eq!(seen, want);
    let accepted = gateway.speak(request()).await.unwrap().accepted;
    let seen = worker.shared.requests.lock().unwrap()[1].1.clone();
    assert_eq!(
        (accepted.seed, accepted.request_id.as_str()),
        (seen.seed, caller_id(&seen.request_id)),
        "chosen here, told to both"
    );
}

#[tokio::test]
async fn a_trace_goes_through_to_the_worker() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut traced = tonic::Request::new(request());
    traced
        .metadata_mut()
        .insert("traceparent", parent.parse().unwrap());
    gateway.begin_with(traced).await.unwrap().rest().await.2.unwrap();
    let seen = worker.shared.requests.lock().unwrap()[0].0.clone();
    assert_eq!(seen.get("traceparent").unwrap(), parent);
}

#[tokio::test]
async fn a_runaway_ends_with_length() {
    let script = vec![
        Step::Started,
        Step::Audio(5, 0.1),
        Step::Finish(v1::FinishReason::Length),
    ];
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    assert_eq!(
        gateway.speak(request()).await.unwrap().finished.reason(),
        v1::FinishReason::Length
    );
}

#[tokio::test]
async fn a_running_request_id_cannot_be_used_again_until_it_ends() {
    let worker = FakeWorker::start(
        "a",
        vec![Step::Started, Step::Gate, Step::Finish(v1::FinishReason::Stop)],
    );
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut first = gateway.begin(named("mine")).await.unwrap();
    first.accepted().await;
    let status = gateway.begin(named("mine")).await.map(|_| ()).unwrap_err();
    assert_eq!(status.code(), Code::AlreadyExists);
    assert_eq!(ours(status).violations[0].field, "request_id");
    worker.open_gate();
    first.rest().await.2.unwrap();
    gateway.speak(named("mine")).await.unwrap();
}

#[tokio::test]
async fn the_longest_id_reaches_the_worker_as_an_id() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let longest = "x".repeat(128);
    let accepted = gateway.speak(named(&longest)).await.unwrap().accepted;
    assert_eq!(accepted.request_id, longest);
    let seen = worker.shared.requests.lock().unwrap()[0].1.request_id.clone();
    laneway_proto::RequestId::new(seen).unwrap();
}

#[tokio::test]
async fn models_and_voices_are_those_that_are_served() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let models = soon(gateway.models().list(v1::ListModelsRequest {}))
        .await
        .unwrap()
        .into_inner()
        .models;
    let mut facts = crate::fake::facts("nano");
    let limits = facts.limits.as_mut().unwrap();
    // The worker's limit is of one utterance, and a text may be of several.
    limits.max_utterance_chars = limits.max_text_chars;
    limits.max_text_chars = laneway_gateway::config::DEFAULT_MAX_TEXT_CHARS as u32;
    assert_eq!(models, [facts]);
    let list = |model: &str| v1::ListVoicesRequest { model: model.into() };
    let voices = soon(gateway.speech().list_voices(list("nano")))
        .await
        .unwrap()
        .into_inner()
        .models;
    assert_eq!(voices[0].voices, models[0].voices);
    let status = soon(gateway.speech().list_voices(list("giga")))
        .await
        .unwrap_err();
    assert_eq!(ours(status).code, ErrorCode::UnknownModel);
}
