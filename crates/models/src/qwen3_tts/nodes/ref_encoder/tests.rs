use laneway_engine::node::RequestId;

use super::*;
use crate::qwen3_tts::test_support::{Golden, Machine, assert_close, tiny};

const WALK: WalkId = WalkId(0);

fn clip_of(payload: &Payload) -> Option<&ReferenceClip> {
    payload.downcast_ref()
}

fn clip(samples: Vec<f32>, in_context: bool) -> ReferenceClip {
    ReferenceClip {
        samples: samples.into(),
        sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
        in_context,
    }
}

fn build(machine: &Machine) -> RefEncoderNode {
    let context = NodeContext {
        device: machine.device.clone(),
        stream: machine.stream.clone(),
        resources: Vec::new(),
        rings: Vec::new(),
        max_rows: 4,
        max_prefill_tokens: 0,
        max_seq_len: 0,
        capture_buckets: Vec::new(),
    };
    RefEncoderNode::build(&tiny("base"), &context, clip_of).unwrap()
}

fn encode(machine: &Machine, node: &mut RefEncoderNode, clip: ReferenceClip) -> Arc<Reference> {
    let payload: Payload = Arc::new(clip);
    let mut state = node.open(WALK, &payload).unwrap();
    let mut touches = Touches::none();
    let mut rows = vec![StepRow {
        request: RequestId(1),
        payload: &payload,
        state: &mut state,
        grants: &[],
        items: &[],
        last: false,
        ring_row: None,
        results: &[],
    }];
    node.plan(WALK, Stage(0), &mut rows, &mut touches).unwrap();
    machine.launch(&touches, |launcher| node.forward(WALK, Stage(0), 1, launcher));
    node.commit(WALK, &mut rows);
    machine.finish();
    let mut rows: Vec<_> = rows.into_iter().map(Some).collect();
    let outcome = node.postprocess(WALK, Stage(0), &mut rows).remove(0);
    outcome.result.unwrap().downcast().unwrap()
}

#[test]
fn clips_become_references() {
    let machine = Machine::new();
    let mut node = build(&machine);
    machine.launch(&Touches::none(), |launcher| node.warm_up(launcher));
    machine.finish();
    let golden = Golden::open("tiny/audio_frontend");
    for (name, in_context) in [("long", true), ("short", false), ("short", true)] {
        let wav = golden.floats(&format!("{name}/wav"));
        let reference = encode(&machine, &mut node, clip(wav, in_context));
        let want = golden.floats(&format!("{name}/spk_embedding"));
        assert_close(name, &reference.speaker, &want, 1e-3);
        let codes = reference.codes.as_ref().map(|codes| codes.concat());
        let want = golden.codes(&format!("{name}/codes")).concat();
        assert_eq!(codes, in_context.then_some(want), "{name}");
    }
}

#[test]
fn clips_that_hold_no_voice_are_refused() {
    let voice = |len: usize| {
        (0..len)
            .map(|i| (i as f32 * 0.05).sin() * 0.5)
            .collect::<Vec<_>>()
    };
    let with = |at: usize, value: f32| {
        let mut samples = voice(24_000);
        samples[at] = value;
        samples
    };
    let other_rate = ReferenceClip {
        sample_rate_hz: 16_000,
        ..clip(voice(24_000), false)
    };
    let cases = [
        (
            other_rate,
            "reference.sample_rate",
            "the reference clip has 16000 Hz; send 24000 Hz",
        ),
        (
            clip(voice(7_199), false),
            "reference.audio",
            "the reference clip has 7199 samples; send 7200 to 720000, 0.3 to 30 s of one voice",
        ),
        (
            clip(voice(720_001), true),
            "reference.audio",
            "the reference clip has 720001 samples; send 7200 to 720000, 0.3 to 30 s of one voice",
        ),
        (
            clip(with(5, f32::NAN), false),
            "reference.audio",
            "sample 5 of the reference clip is NaN; send finite samples from -1 to 1",
        ),
        (
            clip(with(23_999, f32::INFINITY), false),
            "reference.audio",
            "sample 23999 of the reference clip is inf; send finite samples from -1 to 1",
        ),
        (
            clip(vec![1e-4; 24_000], false),
            "reference.audio",
            "the reference clip is silent; send a recording of the voice",
        ),
    ];
    for (clip, field, message) in cases {
        let error = check_clip(&clip).unwrap_err();
        assert!(error.invalid_argument);
        assert_eq!(error.field.as_deref(), Some(field));
        assert_eq!(error.message, message);
    }
    for len in [7_200, 720_000] {
        check_clip(&clip(voice(len), true)).unwrap();
    }
}

#[test]
fn a_checkpoint_without_a_speaker_encoder_is_refused() {
    let machine = Machine::new();
    let context = NodeContext {
        device: machine.device.clone(),
        stream: machine.stream.clone(),
        resources: Vec::new(),
        rings: Vec::new(),
        max_rows: 1,
        max_prefill_tokens: 0,
        max_seq_len: 0,
        capture_buckets: Vec::new(),
    };
    let error = RefEncoderNode::build(&tiny("custom_voice"), &context, clip_of).unwrap_err();
    assert!(matches!(error, RefEncoderError::NoSpeakerEncoder));
}
