//! The Talker through a real engine on the CPU device, against the reference's tensors.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_engine::node::{EdgeResult, FinishReason};
use laneway_engine::{
    Engine, EngineConfig, EngineHandle, LaneConfig, Limits as EngineLimits, NodeConfig, OutputEvent,
    RequestStream, ResourceConfig, Submission,
};
use laneway_models_decl::Sizing;
use laneway_plan::deployment::{DeviceKind, ModelConfig, Weights as WeightsKey};

use super::*;
use crate::qwen3_tts::Qwen3Tts;
use crate::qwen3_tts::prompt::TextLayout;
use crate::qwen3_tts::reference::{CODES_PER_FRAME, ReferenceClip};
use crate::qwen3_tts::request::{CloneInput, Probe, ProbeRecord, SpeechInput, TtsRequest};
use crate::qwen3_tts::test_support::{Golden, assert_close, golden_dir};

const PAGE_SIZE: u32 = 16;
const PREFILL_TOKENS: usize = 256;

fn sizing() -> Sizing {
    Sizing {
        device: DeviceKind::Cpu,
        page_size: PAGE_SIZE,
        max_prefill_tokens: PREFILL_TOKENS as u32,
    }
}

fn generated(dir: &str, seed: u64) -> Arc<Qwen3Tts> {
    let config = ModelConfig::Directory(golden_dir().join(dir));
    Arc::new(Qwen3Tts::open(&WeightsKey::Random { seed }, Some(&config), &sizing()).unwrap())
}

fn nano() -> Arc<Qwen3Tts> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("demo/nano");
    Arc::new(Qwen3Tts::open(&WeightsKey::Path(dir), None, &sizing()).unwrap())
}

/// An engine that runs the Talker alone: frames leave it as items.
struct Talking {
    model: Arc<Qwen3Tts>,
    handle: EngineHandle,
    _engine: Engine,
}

impl Talking {
    fn new(model: Arc<Qwen3Tts>, rows: usize) -> Self {
        let device = laneway_device::open_cpu(laneway_device::CpuConfig { memory_bytes: None }).unwrap();
        let resource = |key: &str, slots, page_size| ResourceConfig {
            key: key.into(),
            slots,
            page_size,
        };
        let (engine, handle) = Engine::start(EngineConfig {
            device,
            model: model.clone(),
            lanes: vec![LaneConfig {
                priority: Default::default(),
                partition_sms: None,
                max_rows: rows,
            }],
            nodes: vec![NodeConfig {
                node: TALKER.into(),
                lane: 0,
            }],
            resources: vec![
                resource(TALKER_KV, 48 * rows as u32, PAGE_SIZE),
                resource(SAMPLER, rows as u32, 0),
            ],
            chunks: Default::default(),
            max_prefill_tokens: PREFILL_TOKENS,
            max_seq_len: 384,
            capture_buckets: vec![1, rows],
            playback_hz: 0,
            limits: EngineLimits {
                step_deadline: Duration::from_secs(120),
                ..EngineLimits::default()
            },
        })
        .unwrap();
        Self {
            model,
            handle,
            _engine: engine,
        }
    }

    fn submit(&self, id: &str, request: TtsRequest, reference: Option<Reference>) -> RequestStream {
        let result = |reference| ("reference".to_owned(), Arc::new(reference) as EdgeResult);
        self.handle
            .submit(Submission {
                id: id.into(),
                payload: Arc::new(request),
                chunk: None,
                deadline: Some(Instant::now() + Duration::from_secs(300)),
                results: reference.into_iter().map(result).collect(),
            })
            .unwrap()
    }

    fn run(&self, request: TtsRequest, reference: Option<Reference>) -> (Vec<Vec<i32>>, FinishReason) {
        finish(self.submit("one", request, reference))
    }
}

fn finish(mut stream: RequestStream) -> (Vec<Vec<i32>>, FinishReason) {
    let mut frames = Vec::new();
    while let Some(event) = stream.blocking_recv() {
        match event {
            OutputEvent::Items {
                first_item, items, ..
            } => {
                assert_eq!(first_item as usize, frames.len());
                frames.extend(items.iter().map(|item| item.to_vec()));
            }
            OutputEvent::Finished { reason, .. } => return (frames, reason),
            OutputEvent::Failed(failure) => panic!("{failure:?}"),
            _ => {}
        }
    }
    panic!("the stream ended without an end");
}

/// A case of a golden set as a request.
struct Case {
    set: &'static str,
    name: &'static str,
    info: serde_json::Value,
    golden: Golden,
}

impl Case {
    fn open(set: &'static str, name: &'static str) -> Self {
        let manifest = std::fs::read(golden_dir().join(set).join("manifest.json")).unwrap();
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
        Self {
            set,
            name,
            info: manifest["cases"][name].clone(),
            golden: Golden::open(&format!("{set}/{name}")),
        }
    }

    fn floats(&self, tensor: &str) -> Vec<f32> {
        self.golden.floats(&format!("{}/{tensor}", self.name))
    }

    fn codes(&self) -> Vec<Vec<i32>> {
        let codes = self.golden.codes(&format!("{}/codes", self.name));
        codes.iter().map(|frame| frame.to_vec()).collect()
    }

    fn text(&self, key: &str) -> Option<String> {
        self.info[key].as_str().map(str::to_owned)
    }

    fn reference(&self) -> Option<(Reference, CloneInput)> {
        let in_context = self.name.starts_with("icl");
        if !in_context && self.name != "xvec" {
            return None;
        }
        let which = if self.name == "icl_codes_longer" {
            "long"
        } else {
            "short"
        };
        let front = Golden::open(&format!("{}/audio_frontend", self.set));
        let frame = |codes: &Arc<[i32]>| -> [i32; CODES_PER_FRAME] { codes[..].try_into().unwrap() };
        let codes: Arc<[_]> = front.codes(&format!("{which}/codes")).iter().map(frame).collect();
        let reference = Reference {
            speaker: front.floats(&format!("{which}/spk_embedding")).into(),
            codes: in_context.then_some(codes),
        };
        let clip = ReferenceClip {
            samples: front.floats(&format!("{which}/wav")).into(),
            sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
            in_context,
        };
        let text = self.text("ref_text");
        Some((reference, CloneInput { clip, text }))
    }

    fn request(&self, model: &Qwen3Tts) -> (TtsRequest, Option<Reference>) {
        let reference = self.reference();
        let whole = ["cv_full_dialect_instruct", "vd_full", "icl_full", "cv_sample"].contains(&self.name);
        let mut input = SpeechInput {
            text: self.text("text").unwrap(),
            voice: self
                .name
                .starts_with("cv")
                .then(|| self.text("speaker").unwrap_or("ryan".into())),
            language: Some(self.text("language").unwrap_or("english".into())),
            instruct: self.text("instruct"),
            reference: reference.as_ref().map(|(_, clone)| clone.clone()),
            layout: Some(if whole {
                TextLayout::Whole
            } else {
                TextLayout::Streamed
            }),
            max_frames: Some(self.codes().len() as u32),
            ..SpeechInput::default()
        };
        input.sampling.greedy = self.name != "cv_sample";
        let mut request = model.requests().build(&input).unwrap();
        if let Some(eos) = self.info["eos_token_id"].as_u64() {
            request.eos = eos as u32;
        }
        // The end token takes a step of its own.
        if self.name == "cv_eos" {
            request.max_frames += 1;
        }
        (request, reference.map(|(reference, _)| reference))
    }
}

fn probed(
    talking: &Talking,
    mut request: TtsRequest,
    reference: Option<Reference>,
    forced: Vec<[i32; CODES_PER_FRAME]>,
) -> (Vec<Vec<i32>>, FinishReason, ProbeRecord) {
    let probe = Arc::new(Probe {
        forced,
        ..Probe::default()
    });
    request.probe = Some(probe.clone());
    let (frames, reason) = talking.run(request, reference);
    let record = std::mem::take(&mut *probe.record.lock());
    (frames, reason, record)
}

/// The case's codes are the reference's, and so is everything on the way to them.
fn check(talking: &Talking, set: &'static str, name: &'static str) {
    let case = Case::open(set, name);
    let (request, reference) = case.request(&talking.model);
    let (frames, reason, record) = probed(talking, request, reference, Vec::new());
    let codes = case.codes();
    let close = |what: &str, got: &[Vec<f32>], tensor: &str, tolerance: f32| {
        let mut want = case.floats(tensor);
        let got: Vec<f32> = got.concat();
        assert!(want.len() >= got.len(), "{name} {what}");
        want.truncate(got.len());
        assert_close(&format!("{name} {what}"), &got, &want, tolerance);
    };
    close(
        "prompt",
        std::slice::from_ref(&record.prompt),
        "prefill_embeds",
        2e-4,
    );
    close("inputs", &record.inputs, "step_embeds", 2e-4);
    close("logits", &record.logits, "logits", 1e-3);
    let predicted = codes.len().min(record.predictor_logits.len());
    close(
        "predictor logits",
        &record.predictor_logits[..predicted],
        "cp_logits",
        1e-3,
    );
    close("hidden states", &record.hidden[1..], "step_hidden", 1e-3);
    assert_eq!(frames, codes, "{name}");
    let expected = match name {
        "cv_eos" => FinishReason::Stop,
        _ => FinishReason::Length,
    };
    assert_eq!(reason, expected, "{name}");
}

#[test]
fn custom_voice_cases_equal_the_reference() {
    let talking = Talking::new(generated("tiny/model-custom_voice", 7), 2);
    for name in ["cv_stream_en", "cv_full_dialect_instruct", "cv_eos", "cv_min_new"] {
        check(&talking, "tiny", name);
    }
}

#[test]
fn voice_design_cases_equal_the_reference() {
    let talking = Talking::new(generated("tiny/model-voice_design", 7), 2);
    for name in ["vd_full", "vd_stream"] {
        check(&talking, "tiny", name);
    }
}

#[test]
fn clone_cases_equal_the_reference() {
    let talking = Talking::new(generated("tiny/model-base", 7), 2);
    for name in ["xvec", "icl_text_longer", "icl_codes_longer", "icl_full"] {
        check(&talking, "tiny", name);
    }
}

#[test]
fn a_predictor_without_projection_equals_the_reference() {
    let talking = Talking::new(generated("tiny/noproj/model-custom_voice", 8), 2);
    check(&talking, "tiny/noproj", "cv_stream_en");
}

/// Processors of a sampled run: the reference's codes are forced, so that its seen set is ours.
#[test]
fn processed_scores_equal_the_reference() {
    let talking = Talking::new(generated("tiny/model-custom_voice", 7), 1);
    let case = Case::open("tiny", "cv_sample");
    let (request, _) = case.request(&talking.model);
    let forced = case
        .codes()
        .iter()
        .map(|frame| frame[..].try_into().unwrap())
        .collect();
    let (frames, _, record) = probed(&talking, request, None, forced);
    assert_eq!(frames, case.codes());
    for (what, got, tensor) in [
        ("scores", record.scores.concat(), "scores"),
        ("predictor scores", record.predictor_scores.concat(), "cp_scores"),
    ] {
        let mut want = case.floats(tensor);
        want.truncate(got.len());
        let kept = |values: &[f32]| values.iter().map(|v| v.is_finite()).collect::<Vec<_>>();
        assert_eq!(kept(&got), kept(&want), "{what}: kept tokens");
        let finite = |values: &[f32]| {
            values
                .iter()
                .copied()
                .filter(|v| v.is_finite())
                .collect::<Vec<_>>()
        };
        assert_close(what, &finite(&got), &finite(&want), 1e-5);
    }
}

const TEXTS: [&str; 8] = [
    "Hello world.",
    "The user is on the other end, in the morning.",
    "A",
    "Where on earth did the other one go?",
    "In the beginning there was nothing; then there was a test.",
    "One, two, three!",
    "Hi.",
    "How are you doing there?",
];

fn text_request(talking: &Talking, i: usize, greedy: bool) -> TtsRequest {
    let mut input = SpeechInput {
        text: TEXTS[i].into(),
        voice: Some("vivian".into()),
        language: Some("english".into()),
        layout: Some([TextLayout::Streamed, TextLayout::Whole][i % 2]),
        seed: 1000 + i as u64,
        max_frames: Some(8 + 2 * i as u32),
        ..SpeechInput::default()
    };
    input.sampling.greedy = greedy;
    talking.model.requests().build(&input).unwrap()
}

#[test]
fn eight_texts_at_once_give_the_codes_that_each_gives_alone() {
    let model = generated("tiny/model-custom_voice", 7);
    let alone = Talking::new(model.clone(), 1);
    let together = Talking::new(model, 8);
    for greedy in [true, false] {
        let streams: Vec<_> = (0..8)
            .map(|i| together.submit(&i.to_string(), text_request(&together, i, greedy), None))
            .collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let company = finish(stream);
            assert_eq!(
                company,
                alone.run(text_request(&alone, i, greedy), None),
                "{}",
                TEXTS[i]
            );
        }
    }
    let stats = together.handle.stats();
    let decode = stats
        .walks
        .iter()
        .find(|walk| &*walk.walk == TALKER_DECODE)
        .unwrap();
    assert!(
        decode.rows > 2 * decode.steps,
        "steps held several rows: {decode:?}"
    );
    for pool in &together.handle.stats().pools {
        assert_eq!(pool.used, 0, "{pool:?}");
    }
}

#[test]
fn another_seed_gives_other_codes() {
    let talking = Talking::new(generated("tiny/model-custom_voice", 7), 1);
    let run = |seed| {
        let request = TtsRequest {
            seed,
            ..text_request(&talking, 0, false)
        };
        talking.run(request, None).0
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    // Both halves of a seed count.
    assert_ne!(run(1), run(1 | 1 << 40));
}

#[test]
fn prompts_that_do_not_fit_this_worker_are_refused_by_field() {
    let talking = Talking::new(generated("tiny/model-custom_voice", 7), 1);
    let refused = |text: String, max_frames| {
        let input = SpeechInput {
            text,
            voice: Some("ryan".into()),
            max_frames: Some(max_frames),
            ..SpeechInput::default()
        };
        let request = talking.model.requests().build(&input).unwrap();
        let mut stream = talking.submit("long", request, None);
        while let Some(event) = stream.blocking_recv() {
            if let OutputEvent::Failed(failure) = event {
                return format!("{failure:?}");
            }
        }
        panic!("it ran");
    };
    assert!(refused("a b ".repeat(200), 8).contains("rows"));
    assert!(refused("Hello.".into(), 380).contains("positions"));
}

/// One of nano's reference utterances.
struct NanoCase {
    request: TtsRequest,
    codes: Vec<[i32; CODES_PER_FRAME]>,
    name: String,
}

fn nano_cases(model: &Qwen3Tts) -> Vec<NanoCase> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("demo/nano/nano_greedy.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 24);
    let case = |case: &serde_json::Value| {
        let text = case["text"].as_str().unwrap();
        let layout = case["layout"].as_str().unwrap();
        let mut input = SpeechInput {
            text: text.into(),
            voice: Some("nano".into()),
            language: case["language"].as_str().map(Into::into),
            layout: Some(if layout == "whole" {
                TextLayout::Whole
            } else {
                TextLayout::Streamed
            }),
            ..SpeechInput::default()
        };
        input.sampling.greedy = true;
        NanoCase {
            request: model.requests().build(&input).unwrap(),
            codes: serde_json::from_value(case["codes"].clone()).unwrap(),
            name: format!("{text} ({layout})"),
        }
    };
    cases.iter().map(case).collect()
}

/// The likeliest token and how far it is ahead of the next.
fn best(scores: &[f32]) -> (usize, f32) {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    (order[0], scores[order[0]] - scores[order[1]])
}

/// Every code that is not the likeliest under the reference's own history, if a near tie explains it.
#[test]
fn nano_agrees_with_the_reference_wherever_its_own_choice_is_clear() {
    const NEAR_TIE: f32 = 1e-3;
    let talking = Talking::new(nano(), 1);
    let (mut ties, mut compared) = (0, 0);
    for case in nano_cases(&talking.model) {
        let request = TtsRequest {
            max_frames: case.codes.len() as u32,
            ..case.request
        };
        let (_, _, record) = probed(&talking, request.clone(), None, case.codes.clone());
        let codebook = record.predictor_scores[0].len() / (CODES_PER_FRAME - 1);
        let mut first_tie = case.codes.len();
        for (frame, codes) in case.codes.iter().enumerate() {
            let groups = record.predictor_scores[frame].chunks(codebook);
            for (group, scores) in std::iter::once(&record.scores[frame][..])
                .chain(groups)
                .enumerate()
            {
                let (token, margin) = best(scores);
                compared += 1;
                if token as i32 == codes[group] {
                    continue;
                }
                eprintln!(
                    "{}: frame {frame} group {group}: {token} not {}, ahead by {margin:e}",
                    case.name, codes[group]
                );
                assert!(margin < NEAR_TIE, "{}: frame {frame} group {group}", case.name);
                ties += 1;
                first_tie = first_tie.min(frame);
            }
        }
        let (frames, reason) = talking.run(
            TtsRequest {
                max_frames: 100,
                ..request
            },
            None,
        );
        let want = &case.codes[..first_tie];
        assert!(
            frames
                .iter()
                .take(first_tie)
                .map(|frame| &frame[..])
                .eq(want.iter().map(|frame| &frame[..])),
            "{}: free-running codes differ before frame {first_tie}",
            case.name
        );
        if first_tie == case.codes.len() {
            assert_eq!(
                (frames.len(), reason),
                (case.codes.len(), FinishReason::Stop),
                "{}",
                case.name
            );
        }
    }
    assert!(ties <= 3, "{ties} of {compared} choices differ");
}

/// True sizes need 4 GB and minutes: run it with `LANEWAY_TRUE_SIZE=1` and the released vocabulary.
#[test]
fn the_0_6b_case_equals_the_reference() {
    if std::env::var_os("LANEWAY_TRUE_SIZE").is_none() {
        eprintln!("skipped: set LANEWAY_TRUE_SIZE=1 to run the 0.6B golden case");
        return;
    }
    let config = ModelConfig::Preset("0.6b-custom_voice".into());
    let model = Qwen3Tts::open(&WeightsKey::Random { seed: 7 }, Some(&config), &sizing()).unwrap();
    let talking = Talking::new(Arc::new(model), 1);
    check(&talking, "0.6b", "cv_stream_en");
}
