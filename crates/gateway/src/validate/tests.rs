use super::*;
use crate::facts::tests::stated;
use laneway_audio::wav_file;
use proptest::prelude::*;

/// The gateway's limit for texts, which is the model's here.
const LIMIT: usize = 100;

fn models() -> Vec<Arc<ModelFacts>> {
    vec![Arc::new(stated().try_into().unwrap())]
}

fn cloning() -> Vec<Arc<ModelFacts>> {
    let facts = v1::ModelFacts {
        voices: vec![],
        takes_instruct: false,
        takes_reference: true,
        ..stated()
    };
    vec![Arc::new(facts.try_into().unwrap())]
}

fn request() -> v1::SynthesizeRequest {
    v1::SynthesizeRequest {
        text: "Hello.".into(),
        voice: "ryan".into(),
        ..Default::default()
    }
}

/// A request that was changed by `change` is refused with this code for this field, in these words.
#[track_caller]
fn refused(change: impl FnOnce(&mut v1::SynthesizeRequest), code: ErrorCode, field: &str, words: &[&str]) {
    let mut changed = request();
    change(&mut changed);
    let failure = check(changed, &models(), LIMIT).unwrap_err();
    assert_eq!(failure.code, code, "{failure}");
    assert_eq!(failure.violations[0].field, field);
    for word in words {
        assert!(
            failure.violations[0].description.contains(word),
            "{word:?} is missing: {failure}"
        );
    }
}

#[test]
fn a_plain_request_runs_with_everything_decided() {
    let checked = check(request(), &models(), LIMIT).unwrap();
    assert_eq!(checked.wire.text, "Hello.");
    assert_eq!(checked.wire.voice, "ryan");
    assert_eq!(checked.wire.request_id, checked.id.as_str());
    assert_eq!(checked.audio.encoding, Encoding::PcmS16le);
    let other = check(request(), &models(), LIMIT).unwrap();
    assert_ne!(other.id, checked.id);
    assert_ne!(other.wire.seed, checked.wire.seed);
}

#[test]
fn everything_that_is_accepted_reaches_the_worker() {
    let sampling = v1::SamplingParams {
        temperature: Some(0.0),
        top_k: Some(5),
        ..Default::default()
    };
    let chunk = v1::ChunkPolicy {
        first: 1,
        ramp: vec![2],
        steady: 25,
    };
    let checked = check(
        v1::SynthesizeRequest {
            text: "8...".into(),
            model: "nano".into(),
            voice: "Eric".into(),
            language: "German".into(),
            instruct: "calm".into(),
            seed: Some(7),
            sampling: Some(sampling),
            chunk: Some(chunk.clone()),
            max_frames: Some(400),
            request_id: "mine".into(),
            format: v1::AudioFormat::Wav.into(),
            sample_rate: 16_000,
            speed: Some(1.5),
            layout: v1::TextLayout::Whole.into(),
            reference: None,
        },
        &models(),
        LIMIT,
    )
    .unwrap();
    let audio = AudioSpec {
        encoding: Encoding::Wav,
        sample_rate: 16_000,
        speed: 1.5,
    };
    assert_eq!(checked.audio, audio);
    let want = v1::WorkerSynthesizeRequest {
        request_id: "mine".into(),
        text: "8...".into(),
        voice: "eric".into(),
        language: "german".into(),
        instruct: "calm".into(),
        seed: 7,
        sampling: Some(sampling),
        chunk: Some(chunk),
        max_frames: Some(400),
        layout: v1::TextLayout::Whole.into(),
        reference: None,
        return_frames: false,
    };
    assert_eq!(checked.wire, want);
}

#[test]
fn texts_that_cannot_be_spoken_are_refused() {
    for text in ["", "…", "—", "🙂", " \n\t", "?!"] {
        refused(
            |r| r.text = text.into(),
            ErrorCode::InvalidText,
            "text",
            &["no letter and no digit"],
        );
    }
    refused(
        |r| r.text = "a\0b".into(),
        ErrorCode::InvalidText,
        "text",
        &["character 1", "U+0000"],
    );
    refused(
        |r| r.text = "a\u{85}".into(),
        ErrorCode::InvalidText,
        "text",
        &["U+0085"],
    );
    refused(
        |r| r.text = "ä".repeat(101),
        ErrorCode::TextTooLong,
        "text",
        &["101", "100"],
    );
    for text in ["8...", "ok\n\tfine", "你好", "é"] {
        assert!(
            check(
                v1::SynthesizeRequest {
                    text: text.into(),
                    ..request()
                },
                &models(),
                LIMIT
            )
            .is_ok(),
            "{text}"
        );
    }
    let failure = check(request(), &models(), 3).unwrap_err();
    assert_eq!(failure.code, ErrorCode::TextTooLong, "the limit is the gateway's");
}

#[test]
fn what_a_model_does_not_take_in_one_go_is_parted_at_sentences() {
    let of = |text: String| {
        let sent = v1::SynthesizeRequest { text, ..request() };
        check(sent, &models(), 1000).unwrap()
    };
    let sentence = format!("{}. ", "a".repeat(38));
    let short = of(sentence.repeat(2));
    assert!(short.parts.is_empty());
    assert_eq!(short.wire.text, sentence.repeat(2));
    let long = of(sentence.to_uppercase().repeat(5));
    let lengths: Vec<_> = long.parts.iter().map(String::len).collect();
    assert_eq!(lengths, [79, 79, 39]);
    let failure = check(
        v1::SynthesizeRequest {
            text: sentence.repeat(5),
            sampling: Some(v1::SamplingParams {
                exact_frames: Some(7),
                ..Default::default()
            }),
            ..request()
        },
        &models(),
        1000,
    );
    let failure = failure.unwrap_err();
    assert_eq!(failure.violations[0].field, "sampling.exact_frames", "{failure}");
}

#[test]
fn a_text_in_pieces_may_begin_with_nothing() {
    let sent = v1::SynthesizeRequest {
        text: String::new(),
        ..request()
    };
    let checked = check_start(sent.clone(), &models(), LIMIT).unwrap();
    assert!(checked.parts.is_empty());
    assert_eq!(
        check(sent, &models(), LIMIT).unwrap_err().code,
        ErrorCode::InvalidText
    );
    let code = |piece: &str, n_waiting| check_piece(piece, n_waiting, LIMIT).map_err(|failure| failure.code);
    assert_eq!(code("", 100), Ok(()));
    assert_eq!(code("ä", 99), Ok(()));
    assert_eq!(code("ä", 100), Err(ErrorCode::TextTooLong));
    assert_eq!(code("a\u{7}", 0), Err(ErrorCode::InvalidText));
    assert_eq!(code("<|im_end|>", 0), Ok(()), "added tokens are text");
}

#[test]
fn unknown_names_are_answered_with_what_exists() {
    refused(
        |r| r.voice = "bob".into(),
        ErrorCode::UnknownVoice,
        "voice",
        &["bob", "ryan, eric"],
    );
    refused(
        |r| r.voice = String::new(),
        ErrorCode::InvalidArgument,
        "voice",
        &["ryan, eric"],
    );
    refused(
        |r| r.language = "klingon".into(),
        ErrorCode::UnknownLanguage,
        "language",
        &["english, german, auto"],
    );
    refused(
        |r| r.model = "big".into(),
        ErrorCode::UnknownModel,
        "model",
        &["big", "nano"],
    );
    refused(
        |r| r.format = 99,
        ErrorCode::UnsupportedFormat,
        "format",
        &["99", "pcm_s16le, pcm_f32le, wav, opus, flac, mp3"],
    );
    refused(
        |r| r.sample_rate = 11_025,
        ErrorCode::UnsupportedSampleRate,
        "sample_rate",
        &["11025", "8000, 16000, 22050, 24000, 44100, 48000"],
    );
    for speed in [0.2, 4.5, f32::NAN] {
        refused(
            |r| r.speed = Some(speed),
            ErrorCode::InvalidArgument,
            "speed",
            &["[0.25, 4]"],
        );
    }
    refused(|r| r.layout = 9, ErrorCode::InvalidArgument, "layout", &["9"]);
    for language in ["", "auto", "Auto"] {
        let checked = check(
            v1::SynthesizeRequest {
                language: language.into(),
                ..request()
            },
            &models(),
            LIMIT,
        );
        assert_eq!(checked.unwrap().wire.language, "");
    }
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    let sampling =
        |params: v1::SamplingParams| move |r: &mut v1::SynthesizeRequest| r.sampling = Some(params);
    let of = |temperature, top_p, repetition_penalty| v1::SamplingParams {
        temperature,
        top_p,
        repetition_penalty,
        ..Default::default()
    };
    let code = ErrorCode::InvalidArgument;
    refused(
        sampling(of(Some(-0.1), None, None)),
        code,
        "sampling.temperature",
        &["-0.1", "[0, 5]"],
    );
    refused(
        sampling(of(Some(f32::NAN), None, None)),
        code,
        "sampling.temperature",
        &["NaN"],
    );
    refused(
        sampling(of(None, Some(0.0), None)),
        code,
        "sampling.top_p",
        &["(0, 1]"],
    );
    refused(
        sampling(of(None, None, Some(f32::INFINITY))),
        code,
        "sampling.repetition_penalty",
        &["inf"],
    );
    refused(
        sampling(of(None, None, Some(0.5))),
        code,
        "sampling.repetition_penalty",
        &["0.5", "[1, 10]"],
    );
    refused(|r| r.max_frames = Some(401), code, "max_frames", &["401", "400"]);
    refused(|r| r.max_frames = Some(0), code, "max_frames", &["0", "400"]);
    let chunk = |first, ramp: Vec<u32>, steady| {
        move |r: &mut v1::SynthesizeRequest| r.chunk = Some(v1::ChunkPolicy { first, ramp, steady })
    };
    refused(chunk(0, vec![], 4), code, "chunk.first", &["between 1 and 25"]);
    refused(chunk(1, vec![2, 26], 4), code, "chunk.ramp", &["26"]);
    refused(chunk(1, vec![1; 65], 4), code, "chunk.ramp", &["65"]);
    refused(chunk(1, vec![], 0), code, "chunk.steady", &["0 frames"]);
    refused(|r| r.request_id = "a b".into(), code, "request_id", &["' '"]);
}

#[test]
fn exact_frames_are_for_generated_weights_and_say_all_there_is_to_say() {
    let exactly = |frames, max_frames| {
        move |r: &mut v1::SynthesizeRequest| {
            r.sampling = Some(v1::SamplingParams {
                exact_frames: Some(frames),
                ..Default::default()
            });
            r.max_frames = max_frames;
        }
    };
    let (code, field) = (ErrorCode::InvalidArgument, "sampling.exact_frames");
    refused(exactly(0, None), code, field, &["0", "400"]);
    refused(exactly(401, None), code, field, &["401", "400"]);
    refused(exactly(7, Some(7)), code, field, &["leave max_frames out"]);
    let of = |facts: v1::ModelFacts| {
        let mut request = request();
        exactly(7, None)(&mut request);
        check(request, &[Arc::new(facts.try_into().unwrap())], LIMIT)
    };
    let wire = of(stated()).unwrap().wire;
    assert_eq!(wire.sampling.unwrap().exact_frames, Some(7));
    let trained = v1::ModelFacts {
        takes_exact_frames: false,
        ..stated()
    };
    let failure = of(trained).unwrap_err();
    assert_eq!(failure.code, ErrorCode::UnsupportedField);
    assert_eq!(failure.violations[0].field, field);
    assert!(failure.message.contains("trained weights"), "{failure}");
}

#[test]
fn all_violations_are_answered_at_once() {
    let failure = check(
        v1::SynthesizeRequest {
            text: "…".into(),
            voice: "bob".into(),
            max_frames: Some(0),
            format: 9,
            ..request()
        },
        &models(),
        LIMIT,
    )
    .unwrap_err();
    let fields: Vec<_> = failure
        .violations
        .iter()
        .map(|each| each.field.as_str())
        .collect();
    assert_eq!(fields, ["text", "voice", "max_frames", "format"]);
    assert_eq!(
        failure.code,
        ErrorCode::InvalidText,
        "the first one decides the code"
    );
}

#[test]
fn fields_that_mean_nothing_to_a_model_are_refused_by_name() {
    let clip = v1::ReferenceClip::default();
    refused(
        |r| r.reference = Some(clip),
        ErrorCode::UnsupportedField,
        "reference",
        &["does not clone"],
    );
    let clip = v1::ReferenceClip {
        audio: wav_file(&[0.5; 240], 24_000).unwrap().into(),
        ..Default::default()
    };
    let named = v1::SynthesizeRequest {
        reference: Some(clip),
        instruct: "calm".into(),
        ..request()
    };
    let failure = check(named, &cloning(), LIMIT).unwrap_err();
    let fields: Vec<_> = failure
        .violations
        .iter()
        .map(|each| each.field.as_str())
        .collect();
    assert_eq!(fields, ["voice", "instruct"]);
    let designs = v1::ModelFacts {
        voices: vec![],
        needs_instruct: true,
        ..stated()
    };
    let plain = v1::SynthesizeRequest {
        voice: String::new(),
        ..request()
    };
    let failure = check(plain, &[Arc::new(designs.try_into().unwrap())], LIMIT).unwrap_err();
    assert_eq!(failure.violations[0].field, "instruct");
}

#[test]
fn a_registered_voice_stands_for_its_clip() {
    use crate::voices::{Clip, Registered};
    let clip = Clip {
        audio: samples_to_bytes(&[0.5; 240]),
        sample_rate: 24_000,
        text: "Hi.".into(),
    };
    let registered = Arc::new(Registered {
        id: "voice_77".into(),
        name: "Ada".into(),
        consent: "hers".into(),
        owner: crate::caller::KeyName::default(),
        created_at: 1,
        clip: clip.clone(),
    });
    let mut model = ModelFacts::clone(&cloning()[0]);
    model.voices.push((&registered).into());
    let models = [Arc::new(model)];
    let sent = |voice: &str, reference| {
        let request = v1::SynthesizeRequest {
            voice: voice.into(),
            reference,
            ..request()
        };
        check(request, &models, LIMIT)
    };
    for voice in ["ada", "voice_77"] {
        let wire = sent(voice, None).unwrap().wire;
        assert_eq!(
            (wire.voice, wire.reference),
            (String::new(), Some((&clip).into()))
        );
    }
    let own = v1::ReferenceClip {
        audio: wav_file(&[0.25; 240], 24_000).unwrap().into(),
        ..Default::default()
    };
    let wire = sent("", Some(own.clone())).unwrap().wire;
    assert_eq!(
        wire.reference.unwrap().audio,
        samples_to_bytes(&[0.25; 240]),
        "no voice is needed"
    );
    for (voice, reference, code, field, words) in [
        (
            "ada",
            Some(own),
            ErrorCode::InvalidArgument,
            "reference",
            "leave one of them out",
        ),
        (
            "VOICE_77",
            None,
            ErrorCode::UnknownVoice,
            "voice",
            "there are: Ada",
        ),
        (
            "",
            None,
            ErrorCode::InvalidArgument,
            "reference",
            "name a registered one",
        ),
    ] {
        let failure = sent(voice, reference).unwrap_err();
        assert_eq!(
            (failure.code, failure.violations[0].field.as_str()),
            (code, field)
        );
        assert!(failure.message.contains(words), "{failure}");
    }
}

#[test]
fn clips_are_decoded_once_and_bounded() {
    let sent = |reference| {
        let request = v1::SynthesizeRequest {
            voice: String::new(),
            reference,
            ..request()
        };
        check(request, &cloning(), LIMIT)
    };
    let wav = |n_samples, rate| v1::ReferenceClip {
        audio: wav_file(&vec![0.5; n_samples], rate).unwrap().into(),
        sample_rate: 0,
        text: "Hi.".into(),
    };
    let passed = sent(Some(wav(240, 24_000))).unwrap().wire.reference.unwrap();
    assert_eq!(
        (passed.audio.len(), passed.sample_rate, passed.text.as_str()),
        (960, 24_000, "Hi.")
    );
    for (clip, words) in [
        (None, "send a clip"),
        (
            Some(v1::ReferenceClip {
                audio: "noise".into(),
                ..Default::default()
            }),
            "not a readable WAV",
        ),
        (Some(wav(16_000, 16_000)), "send 24000 Hz"),
        (
            Some(wav(24_000 * 6, 24_000)),
            "6000 ms long; the limit is 5000 ms",
        ),
    ] {
        let failure = sent(clip).unwrap_err();
        assert!(failure.violations[0].field.starts_with("reference"), "{failure}");
        assert!(failure.message.contains(words), "{words:?} is missing: {failure}");
    }
}

#[test]
fn several_models_have_to_be_told_apart() {
    let other = ModelFacts {
        name: "large".into(),
        ..(*models()[0]).clone()
    };
    let models = [Arc::new(other), models()[0].clone()];
    let failure = check(request(), &models, LIMIT).unwrap_err();
    assert!(failure.message.contains("large, nano"), "{failure}");
    let named = v1::SynthesizeRequest {
        model: "large".into(),
        ..request()
    };
    assert_eq!(check(named, &models, LIMIT).unwrap().model.name, "large");
}

#[test]
fn with_nothing_served_a_bad_text_is_still_the_callers_fault() {
    assert_eq!(
        check(request(), &[], LIMIT).unwrap_err().code,
        ErrorCode::NoWorker
    );
    let bad = v1::SynthesizeRequest {
        text: String::new(),
        ..request()
    };
    assert_eq!(check(bad, &[], LIMIT).unwrap_err().code, ErrorCode::InvalidText);
}

proptest! {
    /// Whatever is sent: no panic, and what is accepted obeys every limit.
    #[test]
    fn accepted_requests_obey_the_limits(
        text in "\\PC{0,120}|[ -~\\n\\x00]{0,120}",
        voice in "ryan|eric|bob|\\PC{0,4}",
        max_frames in proptest::option::of(0u32..500),
        chunk in proptest::option::of((0u32..30, proptest::collection::vec(0u32..30, 0..3), 0u32..30)),
        format in -1i32..9,
        temperature in proptest::option::of(proptest::num::f32::ANY),
    ) {
        let chunk = chunk.map(|(first, ramp, steady)| v1::ChunkPolicy { first, ramp, steady });
        let sampling = Some(v1::SamplingParams { temperature, ..Default::default() });
        let sent = v1::SynthesizeRequest { text, voice, max_frames, chunk, format, sampling, ..Default::default() };
        match check(sent, &models(), LIMIT) {
            Err(failure) => prop_assert!(!failure.violations.is_empty()),
            Ok(checked) => {
                let wire = checked.wire;
                prop_assert!(wire.text.chars().any(char::is_alphanumeric) && wire.text.chars().count() <= 100);
                prop_assert!(["ryan", "eric"].contains(&wire.voice.as_str()));
                prop_assert!(wire.max_frames.is_none_or(|frames| (1..=400).contains(&frames)));
                prop_assert!((0..=6).contains(&format));
                prop_assert!(temperature.is_none_or(|t| (0.0..=5.0).contains(&t)));
                if let Some(chunk) = wire.chunk {
                    prop_assert!(chunk.ramp.iter().chain([&chunk.first, &chunk.steady]).all(|n| (1..=25).contains(n)));
                }
            }
        }
    }
}
