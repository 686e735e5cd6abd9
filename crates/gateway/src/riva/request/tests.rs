use laneway_proto::riva::RequestId;

use super::*;
use crate::facts::tests::stated;

type Change = fn(&mut SynthesizeSpeechRequest);

fn named(name: &str, change: impl FnOnce(&mut v1::ModelFacts)) -> Arc<ModelFacts> {
    let mut facts = v1::ModelFacts {
        model: name.into(),
        ..stated()
    };
    change(&mut facts);
    Arc::new(facts.try_into().unwrap())
}

/// One model, as `stated`: voices ryan and eric, english and german.
fn models() -> Vec<Arc<ModelFacts>> {
    vec![named("nano", |_| ())]
}

fn request() -> SynthesizeSpeechRequest {
    SynthesizeSpeechRequest {
        text: "Hello.".into(),
        language_code: "en-US".into(),
        voice_name: "nano.ryan".into(),
        encoding: AudioEncoding::LinearPcm.into(),
        sample_rate_hz: 22_050,
        ..Default::default()
    }
}

fn with(change: impl FnOnce(&mut SynthesizeSpeechRequest)) -> SynthesizeSpeechRequest {
    let mut changed = request();
    change(&mut changed);
    changed
}

#[track_caller]
fn refused(changed: SynthesizeSpeechRequest, code: ErrorCode, field: &str, words: &[&str]) {
    let failure = converted(changed, &models()).unwrap_err();
    assert_eq!(
        (failure.code, failure.violations[0].field.as_str()),
        (code, field),
        "{failure}"
    );
    for word in words {
        assert!(
            failure.violations[0].description.contains(word),
            "{word:?} is missing: {failure}"
        );
    }
}

fn custom(key: &str, value: &str) -> SynthesizeSpeechRequest {
    with(|r| {
        r.custom_configuration.insert(key.into(), value.into());
    })
}

#[test]
fn every_field_that_is_taken_reaches_the_request() {
    let configuration = [
        ("seed", "7"),
        ("temperature", "0.5"),
        ("top_k", "3"),
        ("top_p", "0.9"),
        ("repetition_penalty", "1.1"),
        ("max_frames", "40"),
        ("instruct", "calm"),
        ("speed", "1.5"),
    ];
    assert_eq!(configuration.len(), KEYS.len());
    let asked = with(|r| {
        r.id = Some(RequestId { value: "mine".into() });
        r.encoding = AudioEncoding::Oggopus.into();
        r.custom_configuration = configuration
            .map(|(key, value)| (key.into(), value.into()))
            .into();
    });
    let sampling = v1::SamplingParams {
        temperature: Some(0.5),
        top_k: Some(3),
        top_p: Some(0.9),
        repetition_penalty: Some(1.1),
        ..Default::default()
    };
    let wanted = v1::SynthesizeRequest {
        text: "Hello.".into(),
        model: "nano".into(),
        voice: "ryan".into(),
        language: "english".into(),
        format: v1::AudioFormat::Opus.into(),
        sample_rate: 22_050,
        request_id: "mine".into(),
        seed: Some(7),
        sampling: Some(sampling),
        max_frames: Some(40),
        instruct: "calm".into(),
        speed: Some(1.5),
        ..Default::default()
    };
    assert_eq!(converted(asked, &models()), Ok(wanted));
    let plain = converted(request(), &models()).unwrap();
    assert_eq!(
        (plain.sampling, plain.format()),
        (None, v1::AudioFormat::PcmS16le)
    );
}

#[test]
fn voices_are_found_by_every_name_they_have() {
    let other = named("other", |facts| {
        facts.voices.remove(0);
        facts.languages = vec!["french".into()];
    });
    let cloning = named("voices/cloning-1.7b", |facts| facts.voices.clear());
    let two = [models().remove(0), other, cloning];
    let chosen = |voice_name: &str, language_code: &str| {
        let asked = with(|r| {
            r.voice_name = voice_name.into();
            r.language_code = language_code.into();
        });
        converted(asked, &two).map(|request| (request.model, request.voice))
    };
    let of = |model: &str, voice: &str| Ok((model.to_owned(), voice.to_owned()));
    assert_eq!(chosen("nano.eric", ""), of("nano", "eric"));
    assert_eq!(chosen("other.eric", "fr-FR"), of("other", "eric"));
    assert_eq!(chosen("Ryan", "auto"), of("nano", "Ryan"));
    assert_eq!(chosen("voices/cloning-1.7b", ""), of("voices/cloning-1.7b", ""));
    assert_eq!(chosen("voices/cloning-1.7b.", ""), of("voices/cloning-1.7b", ""));
    assert_eq!(chosen("", "de-DE"), of("nano", "ryan"));
    assert_eq!(
        chosen("", "fr-FR"),
        of("other", "eric"),
        "the first that speaks the language"
    );
    let namesake = [named("ryan", |_| ())];
    let asked = converted(with(|r| r.voice_name = "ryan".into()), &namesake).unwrap();
    assert_eq!((asked.model.as_str(), asked.voice.as_str()), ("ryan", "ryan"));
    assert_eq!(
        chosen("nano", "").unwrap_err().code,
        ErrorCode::UnknownVoice,
        "it has several"
    );
    let failure = chosen("eric", "").unwrap_err();
    assert!(failure.message.contains("nano.eric, other.eric"), "{failure}");
    let failure = chosen("bob", "").unwrap_err();
    assert_eq!(failure.code, ErrorCode::UnknownVoice);
    assert!(
        failure
            .message
            .contains("nano.ryan, nano.eric, other.eric, voices/cloning-1.7b"),
        "{failure}"
    );
}

#[test]
fn what_has_no_effect_is_refused_by_name() {
    let unsupported = ErrorCode::UnsupportedField;
    refused(
        with(|r| r.custom_dictionary = "a  b".into()),
        unsupported,
        "custom_dictionary",
        &["phonemes"],
    );
    refused(
        with(|r| r.enable_word_time_offsets = true),
        unsupported,
        "enable_word_time_offsets",
        &["leave it out"],
    );
    refused(
        custom("exaggeration_factor", "1"),
        unsupported,
        "custom_configuration",
        &["exaggeration_factor", "speed"],
    );
    refused(
        custom("top_k", "many"),
        ErrorCode::InvalidArgument,
        "custom_configuration.top_k",
        &["many"],
    );
    refused(
        custom("seed", "-1"),
        ErrorCode::InvalidArgument,
        "custom_configuration.seed",
        &["-1"],
    );
    let format = ErrorCode::UnsupportedFormat;
    refused(
        with(|r| r.encoding = AudioEncoding::Mulaw.into()),
        format,
        "encoding",
        &["MULAW", "LINEAR_PCM"],
    );
    refused(with(|r| r.encoding = 99), format, "encoding", &["99"]);
    refused(
        with(|r| r.sample_rate_hz = -1),
        ErrorCode::UnsupportedSampleRate,
        "sample_rate_hz",
        &["-1"],
    );
    refused(
        with(|r| r.voice_name = "bob".into()),
        ErrorCode::UnknownVoice,
        "voice_name",
        &["bob", "nano.ryan"],
    );
    let language = ErrorCode::UnknownLanguage;
    refused(
        with(|r| r.language_code = "en-GB".into()),
        language,
        "language_code",
        &["en-GB", "en-US, de-DE, auto"],
    );
}

#[test]
fn markup_is_not_read_out() {
    let ssml = " <speak>Hello.</speak>";
    refused(
        with(|r| r.text = ssml.into()),
        ErrorCode::InvalidText,
        "text",
        &["SSML"],
    );
    refused(
        with(|r| r.text = "…".into()),
        ErrorCode::InvalidText,
        "text",
        &["no letter"],
    );
    assert!(converted(with(|r| r.text = "1 < 2, speak up".into()), &models()).is_ok());
}

#[test]
fn a_prompt_to_clone_is_a_wav_file_or_raw_samples() {
    let prompt = |data: ZeroShotData| converted(with(|r| r.zero_shot_data = Some(data)), &models());
    let raw = ZeroShotData {
        audio_prompt: [i16::MIN, 0, 16_384].map(i16::to_le_bytes).concat().into(),
        sample_rate_hz: 24_000,
        encoding: AudioEncoding::LinearPcm.into(),
        quality: 20,
        transcript: "what is said".into(),
    };
    let clip = prompt(raw.clone()).unwrap().reference.unwrap();
    assert_eq!(clip.audio, samples_to_bytes(&[-1.0, 0.0, 0.5]));
    assert_eq!((clip.sample_rate, clip.text.as_str()), (24_000, "what is said"));
    let wav = ZeroShotData {
        audio_prompt: laneway_audio::wav_file(&[0.5; 100], 24_000).unwrap().into(),
        sample_rate_hz: 0,
        encoding: 0,
        ..raw.clone()
    };
    let clip = prompt(wav.clone()).unwrap().reference.unwrap();
    assert_eq!((clip.audio, clip.sample_rate), (wav.audio_prompt.clone(), 0));

    let field = |data| prompt(data).unwrap_err().violations[0].field.clone();
    let quality = ZeroShotData {
        quality: 30,
        ..raw.clone()
    };
    assert_eq!(field(quality), "zero_shot_data.quality");
    let opus = ZeroShotData {
        encoding: AudioEncoding::Oggopus.into(),
        ..raw.clone()
    };
    assert_eq!(field(opus), "zero_shot_data.encoding");
    let rateless = ZeroShotData {
        sample_rate_hz: 0,
        ..raw.clone()
    };
    assert_eq!(field(rateless), "zero_shot_data.sample_rate_hz");
    let other_rate = ZeroShotData {
        sample_rate_hz: 16_000,
        ..wav
    };
    assert_eq!(field(other_rate), "zero_shot_data.sample_rate_hz");
    let odd = ZeroShotData {
        audio_prompt: vec![0; 3].into(),
        ..raw
    };
    assert_eq!(field(odd), "zero_shot_data.audio_prompt");
}

#[test]
fn only_the_text_changes_within_a_call() {
    let settings = with(|r| r.text = String::new());
    assert_eq!(
        next_text(with(|r| r.text = "More.".into()), &settings),
        Ok("More.".into())
    );
    let changes: [(&str, Change); 9] = [
        ("language_code", |r| r.language_code = "de-DE".into()),
        ("encoding", |r| r.encoding = 4),
        ("sample_rate_hz", |r| r.sample_rate_hz = 0),
        ("voice_name", |r| r.voice_name = "eric".into()),
        ("zero_shot_data", |r| {
            r.zero_shot_data = Some(ZeroShotData::default())
        }),
        ("custom_dictionary", |r| r.custom_dictionary = "a".into()),
        ("custom_configuration", |r| {
            drop(r.custom_configuration.insert("seed".into(), "1".into()))
        }),
        ("enable_word_time_offsets", |r| r.enable_word_time_offsets = true),
        ("id", |r| r.id = Some(RequestId::default())),
    ];
    for (field, change) in changes {
        let failure = next_text(with(change), &settings).unwrap_err();
        assert_eq!(failure.violations[0].field, field);
    }
    let silent = next_text(with(|r| r.text = "…".into()), &settings).unwrap_err();
    assert_eq!(silent.code, ErrorCode::InvalidText);
}

#[test]
fn failures_name_rivas_fields() {
    let ours = Failure::of_field(ErrorCode::UnknownVoice, "voice", "no voice");
    let theirs = in_rivas_words(ours);
    assert_eq!(theirs.violations[0].field, "voice_name");
    assert_eq!(theirs.message, "voice_name: no voice");
    let other = Failure::new(ErrorCode::Overloaded, "full");
    assert_eq!(in_rivas_words(other.clone()), other);
}
