use laneway_engine::PushError;
use laneway_plan::declaration::ChunkPolicy;
use laneway_plan::deployment::DeviceKind;

use super::*;
use crate::qwen3_tts::request::SpeechInput;
use crate::qwen3_tts::test_engine::{Running, Spoken, finish, nano, tiny};
use crate::qwen3_tts::test_support::golden_dir;

const SAMPLES_PER_FRAME: usize = 1920;
const TEXTS: [&str; 3] = ["Hello there.", "The sun rose over the hill.", "Yes, it is."];

fn request(running: &Running, i: usize) -> TtsRequest {
    let mut input = SpeechInput {
        text: TEXTS[i].into(),
        voice: Some("nano".into()),
        seed: i as u64,
        ..SpeechInput::default()
    };
    input.sampling.temperature = Some(0.3);
    running.model.requests().build(&input).unwrap()
}

fn chunk(first: u32, ramp: &[u32], steady: u32) -> Option<ChunkPolicy> {
    Some(ChunkPolicy {
        first,
        ramp: ramp.to_vec(),
        steady,
    })
}

/// All texts at once.
fn speak(nodes: &[(&str, usize)], chunk: Option<ChunkPolicy>) -> Vec<Spoken> {
    let running = Running::new(nano(), nodes, TEXTS.len());
    let streams: Vec<_> = (0..TEXTS.len())
        .map(|i| running.submit(TEXTS[i], request(&running, i), chunk.clone()))
        .collect();
    streams.into_iter().map(finish).collect()
}

/// Frames from one engine pushed into another, as two workers do.
fn speak_split() -> Vec<Spoken> {
    let talker = Running::new(nano(), &[(TALKER, 0)], 1);
    let codec = Running::new(nano(), &[(CODEC, 0)], 1);
    let split = |i: usize| {
        let frames = talker.run(request(&talker, i));
        let mut stream = codec.submit("split", request(&codec, i), None);
        let mut spoken = Spoken {
            reason: frames.reason,
            ..Spoken::default()
        };
        for frame in &frames.frames {
            let item = [frame[..].into()];
            while let Err(error) = codec.handle.push_items("split", &item) {
                assert!(matches!(error, PushError::Full { .. }), "{error}");
                if let Some(laneway_engine::OutputEvent::Samples { samples, .. }) = stream.blocking_recv() {
                    spoken.samples.extend_from_slice(&samples);
                }
            }
        }
        codec.handle.end_items("split", frames.reason.unwrap()).unwrap();
        spoken.samples.extend(finish(stream).samples);
        spoken
    };
    (0..TEXTS.len()).map(split).collect()
}

#[test]
fn placement_chunks_and_processes_do_not_change_a_bit() {
    let chain = speak(&[(TALKER, 0), (CODEC, 0)], None);
    for (text, spoken) in TEXTS.iter().zip(&chain) {
        assert!(spoken.samples.len() > 5 * SAMPLES_PER_FRAME, "{text}");
        assert_eq!(spoken.samples.len() % SAMPLES_PER_FRAME, 0, "{text}");
        assert!(
            spoken.samples.iter().any(|sample| sample.abs() > 0.05),
            "{text} is silent"
        );
    }
    let lane = [(TALKER, 0), (CODEC, 1)];
    assert!(chain == speak(&lane, None), "a lane of its own");
    assert!(chain == speak(&lane, chunk(1, &[], 1)), "one frame a window");
    assert!(chain == speak(&lane, chunk(3, &[5, 2], 7)), "odd windows");
    assert!(chain == speak_split(), "its own worker");
}

#[test]
fn a_model_without_vocabulary_or_with_another_is_refused() {
    let sizing = Sizing {
        device: DeviceKind::Cpu,
        precision: DeviceKind::Cpu.default_precision(),
        page_size: 16,
        max_prefill_tokens: 256,
    };
    let random = WeightsKey::Random { seed: 7 };
    let open = |config: ModelConfig| {
        Qwen3Tts::open(&random, Some(&config), &sizing)
            .unwrap_err()
            .to_string()
    };
    assert!(open(ModelConfig::Preset("0.5b".into())).contains("no preset"));
    assert!(open(ModelConfig::Directory(golden_dir())).contains("config.json"));

    let tiny = tiny("custom_voice");
    let mut configs = tiny.checkpoint().configs.clone();
    configs.model.talker_config.text_vocab_size = 300;
    let dir = tiny.checkpoint().dir.clone();
    let tokenizer = Tokenizer::load(&dir, WordSplit::Qwen2).unwrap();
    let declaration = tiny.declaration().clone();
    let error = Qwen3Tts::new(Checkpoint::random(7, configs, dir), tokenizer, declaration).unwrap_err();
    assert!(error.to_string().contains("text_vocab_size 300"), "{error}");
}
