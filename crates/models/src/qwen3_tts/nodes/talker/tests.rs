//! The Talker through a real engine on the CPU device; the golden cases are in `verify`.

use std::path::Path;
use std::sync::Arc;

use laneway_engine::OutputEvent;
use laneway_engine::node::FinishReason;

use super::*;
use crate::qwen3_tts::Qwen3Tts;
use crate::qwen3_tts::prompt::TextLayout;
use crate::qwen3_tts::reference::CODES_PER_FRAME;
use crate::qwen3_tts::request::{Probe, ProbeRecord, SpeechInput, TtsRequest};
use crate::qwen3_tts::test_engine::{Running, finish, nano, tiny};

/// An engine that runs the Talker alone: frames leave it as items.
fn talking(model: Arc<Qwen3Tts>, rows: usize) -> Running {
    Running::new(model, &[(TALKER, 0)], rows)
}

/// Run a request and record what it computed.
fn probed(talking: &Running, mut request: TtsRequest, forced: Vec<[i32; CODES_PER_FRAME]>) -> ProbeRecord {
    let probe = Arc::new(Probe {
        forced,
        ..Probe::default()
    });
    request.probe = Some(probe.clone());
    talking.run(request);
    std::mem::take(&mut *probe.record.lock())
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

fn text_request(talking: &Running, i: usize, greedy: bool) -> TtsRequest {
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
    let model = tiny("custom_voice");
    let alone = talking(model.clone(), 1);
    let together = talking(model, 8);
    for greedy in [true, false] {
        let streams: Vec<_> = (0..8)
            .map(|i| together.submit(TEXTS[i], text_request(&together, i, greedy), None))
            .collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let company = finish(stream);
            assert_eq!(
                company,
                alone.run(text_request(&alone, i, greedy)),
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
    let talking = talking(tiny("custom_voice"), 1);
    let run = |seed| {
        let request = TtsRequest {
            seed,
            ..text_request(&talking, 0, false)
        };
        talking.run(request).frames
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    // Both halves of a seed count.
    assert_ne!(run(1), run(1 | 1 << 40));
}

/// FNV-1a of all frames.
fn fingerprint(frames: &[Vec<i32>]) -> u64 {
    let words = frames.iter().flatten();
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ u64::from(*word as u32)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Codes are an interface: how a prompt is run is not to be heard. Levels without fused multiplication round
/// differently, and have codes of their own.
#[test]
fn the_same_seed_gives_the_codes_that_it_always_gave() {
    #[cfg(target_arch = "x86_64")]
    if !std::arch::is_x86_feature_detected!("fma") {
        return;
    }
    let talking = talking(nano(), 4);
    let run = |i: usize| {
        let mut input = SpeechInput {
            text: TEXTS[i].into(),
            voice: Some("nano".into()),
            layout: Some([TextLayout::Streamed, TextLayout::Whole][i % 2]),
            seed: 7 << 33 | i as u64,
            max_frames: Some(12),
            min_frames: Some(6),
            ..SpeechInput::default()
        };
        input.sampling.greedy = i % 4 == 3;
        finish(talking.submit(TEXTS[i], talking.model.requests().build(&input).unwrap(), None))
    };
    let prints: Vec<u64> = (0..TEXTS.len()).map(|i| fingerprint(&run(i).frames)).collect();
    let always = [
        0x8345_db5b_c5ae_a0e8,
        0x02e8_6619_49b8_a88c,
        0xe0e4_7a8b_40a4_b4b1,
        0xc7a1_e4aa_79b0_de86,
        0x2257_480b_82dc_0d3f,
        0xe933_866b_95b1_2ab1,
        0x5ac8_73eb_2afc_4d7e,
        0xb898_f826_07d5_13a9,
    ];
    assert_eq!(prints, always, "{prints:#x?}");
}

#[test]
fn prompts_that_do_not_fit_this_worker_are_refused_by_field() {
    let talking = talking(tiny("custom_voice"), 1);
    let refused_after = |text: String, max_frames, change: fn(&mut TtsRequest)| {
        let input = SpeechInput {
            text,
            voice: Some("ryan".into()),
            max_frames: Some(max_frames),
            ..SpeechInput::default()
        };
        let mut request = talking.model.requests().build(&input).unwrap();
        change(&mut request);
        let mut stream = talking.submit("long", request, None);
        while let Some(event) = stream.blocking_recv() {
            if let OutputEvent::Failed(failure) = event {
                return format!("{failure:?}");
            }
        }
        panic!("it ran");
    };
    let refused = |text, max_frames| refused_after(text, max_frames, |_| {});
    assert!(refused("a b ".repeat(200), 8).contains("rows"));
    assert!(refused("Hello.".into(), 380).contains("positions"));
    // No prompt is laid out like these.
    let last = |request: &mut TtsRequest| request.prompt.rows.truncate(1);
    assert!(refused_after("Hello.".into(), 8, last).contains("a prompt of 1 rows"));
    let speaker = |request: &mut TtsRequest| {
        request.prompt.rows.last_mut().unwrap().codec = CodecPart::Speaker;
    };
    assert!(refused_after("Hello.".into(), 8, speaker).contains("cannot be run"));
}

/// One of nano's reference utterances.
struct NanoCase {
    request: TtsRequest,
    codes: Vec<[i32; CODES_PER_FRAME]>,
    name: String,
}

fn nano_cases(model: &Qwen3Tts) -> Vec<NanoCase> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/nano/nano_greedy.json");
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
    let talking = talking(nano(), 1);
    let (mut ties, mut compared) = (0, 0);
    for case in nano_cases(&talking.model) {
        let request = TtsRequest {
            max_frames: case.codes.len() as u32,
            ..case.request
        };
        let record = probed(&talking, request.clone(), case.codes.clone());
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
        let spoken = talking.run(TtsRequest {
            max_frames: 100,
            ..request
        });
        let want = &case.codes[..first_tie];
        assert!(
            spoken
                .frames
                .iter()
                .take(first_tie)
                .map(|frame| &frame[..])
                .eq(want.iter().map(|frame| &frame[..])),
            "{}: free-running codes differ before frame {first_tie}",
            case.name
        );
        if first_tie == case.codes.len() {
            assert_eq!(
                (spoken.frames.len(), spoken.reason),
                (case.codes.len(), Some(FinishReason::Stop)),
                "{}",
                case.name
            );
        }
    }
    assert!(ties <= 3, "{ties} of {compared} choices differ");
}
