//! Talker and codec on a device that wants captures for buckets, against one that takes exact shapes.

use std::sync::Arc;

use laneway_models_decl::qwen3_tts::{CODEC, REF_ENCODER, TALKER};

use crate::checkpoint::config::StackConfig;
use crate::qwen3_tts::Qwen3Tts;
use crate::qwen3_tts::prompt::TextLayout;
use crate::qwen3_tts::reference::ReferenceClip;
use crate::qwen3_tts::request::{CloneInput, SpeechInput, TtsRequest};
use crate::qwen3_tts::test_device::{Counts, bucketed};
use crate::qwen3_tts::test_engine::{Running, Spoken, finish, tiny};
use crate::qwen3_tts::test_support::{tiny as tiny_checkpoint, true_size};

const TALKER_ALONE: &[(&str, usize)] = &[(TALKER, 0)];
/// The codec on a lane of its own, fed through the edge's ring.
const WITH_CODEC: &[(&str, usize)] = &[(TALKER, 0), (CODEC, 1)];

fn on_buckets(model: Arc<Qwen3Tts>, nodes: &[(&str, usize)], rows: usize) -> (Running, Counts) {
    let (device, sanitizer, counts) = bucketed();
    (Running::on((device, sanitizer), model, nodes, rows), counts)
}

/// Requests of different lengths, every second with all its text in the prompt, so that steps of every number of
/// rows come about, with text for all, some or none of them.
fn request(model: &Qwen3Tts, i: usize, max_frames: u32) -> TtsRequest {
    let text = ["Hi.", "One, two, three!", "Where on earth did the other one go?"][i % 3];
    let mut input = SpeechInput {
        text: text.into(),
        voice: Some("vivian".into()),
        language: Some("english".into()),
        layout: Some([TextLayout::Streamed, TextLayout::Whole][i % 2]),
        seed: 77 + i as u64,
        max_frames: Some(max_frames),
        ..SpeechInput::default()
    };
    input.sampling.greedy = i % 4 == 3;
    model.requests().build(&input).unwrap()
}

fn together(running: &Running, n: usize, frames: impl Fn(usize) -> u32) -> Vec<Spoken> {
    let streams: Vec<_> = (0..n)
        .map(|i| running.submit(&format!("row {i}"), request(&running.model, i, frames(i)), None))
        .collect();
    streams.into_iter().map(finish).collect()
}

#[test]
fn padding_changes_neither_a_code_nor_a_sample() {
    let model = tiny("custom_voice");
    let frames = |i: usize| 4 + 3 * i as u32;
    for nodes in [TALKER_ALONE, WITH_CODEC] {
        let exact = Running::new(model.clone(), nodes, 1);
        let alone: Vec<_> = (0..9).map(|i| exact.run(request(&model, i, frames(i)))).collect();
        // Of 9 rows the last bucket is 9; of 12 it is 12, so that 9 rows are padded too.
        for (n, rows) in [(1, 9), (3, 9), (5, 9), (8, 9), (9, 9), (9, 12)] {
            let (running, counts) = on_buckets(model.clone(), nodes, rows);
            let captures = counts.of("chain").captures;
            assert!(captures > 0, "warm-up makes captures");
            assert_eq!(together(&running, n, frames), alone[..n], "{n} rows of {rows}");
            assert_eq!(counts.of("chain").captures, captures, "a step never captures");
        }
    }
}

/// The codec's arm changes every few of its steps, with exact shapes and with captures for each of its streams.
#[test]
fn moving_the_codec_changes_no_sample() {
    let model = tiny("custom_voice");
    let frames = |i: usize| 4 + 3 * i as u32;
    let still = Running::new(model.clone(), WITH_CODEC, 1);
    let alone: Vec<_> = (0..8).map(|i| still.run(request(&model, i, frames(i)))).collect();
    // How many steps there are depends on who is ready when; the longest stream alone has seven windows.
    for (every, least) in [(1, 4), (3, 2)] {
        let (device, sanitizer, counts) = bucketed();
        for machine in [laneway_device::testing::cpu(), (device, sanitizer)] {
            let running = Running::moving(machine, model.clone(), WITH_CODEC, 8, Some((CODEC, every)));
            let captures = counts.of("lane1").captures;
            assert_eq!(together(&running, 8, frames), alone, "moved every {every} steps");
            let flips = running.handle.stats().autos[0].flips.clone();
            assert!(
                flips.iter().map(|flip| flip.count).sum::<u64>() >= least,
                "{flips:?}"
            );
            assert_eq!(counts.of("lane1").captures, captures, "a flip never captures");
        }
    }
}

/// Clones: the primed state of a stream moves with it.
#[test]
fn moving_the_codec_changes_no_sample_of_a_clone() {
    let model = tiny("base");
    let nodes = &[(TALKER, 0), (CODEC, 1), (REF_ENCODER, 2)];
    let still = Running::new(model.clone(), nodes, 1);
    let machine = laneway_device::testing::cpu();
    let running = Running::moving(machine, model.clone(), nodes, 5, Some((CODEC, 2)));
    let streams: Vec<_> = (0..5)
        .map(|i| running.submit(&format!("clone {i}"), clone_request(&model, i), None))
        .collect();
    for (i, stream) in streams.into_iter().enumerate() {
        assert!(finish(stream) == still.run(clone_request(&model, i)), "clone {i}");
    }
}

/// Every second one an in-context clone, whose reference primes the codec.
fn clone_request(model: &Qwen3Tts, i: usize) -> TtsRequest {
    let samples: Vec<f32> = (0..9000 + 1920 * i)
        .map(|t| (t as f32 * 0.05).sin() * 0.3)
        .collect();
    let in_context = i.is_multiple_of(2);
    let input = SpeechInput {
        text: ["Hi.", "One, two, three!"][i % 2].into(),
        reference: Some(CloneInput {
            clip: ReferenceClip {
                samples: samples.into(),
                sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
                in_context,
            },
            text: in_context.then(|| "The user said so.".into()),
        }),
        seed: 5 + i as u64,
        max_frames: Some(6 + i as u32),
        ..SpeechInput::default()
    };
    model.requests().build(&input).unwrap()
}

#[test]
fn padding_changes_no_sample_of_a_clone() {
    let model = tiny("base");
    let nodes = &[(TALKER, 0), (CODEC, 1), (REF_ENCODER, 2)];
    let exact = Running::new(model.clone(), nodes, 1);
    let (running, _) = on_buckets(model.clone(), nodes, 7);
    let streams: Vec<_> = (0..5)
        .map(|i| running.submit(&format!("clone {i}"), clone_request(&model, i), None))
        .collect();
    for (i, stream) in streams.into_iter().enumerate() {
        let alone = exact.run(clone_request(&model, i));
        assert!(!alone.samples.is_empty());
        assert!(finish(stream) == alone, "clone {i}");
    }
}

#[test]
fn every_step_is_one_graph() {
    let model = tiny("custom_voice");
    for n in [1, 3, 8] {
        let (running, counts) = on_buckets(model.clone(), TALKER_ALONE, 8);
        let steps = |running: &Running| {
            let stats = running.handle.stats();
            let steps = stats.walks.iter().map(|walk| walk.steps as usize);
            steps.sum::<usize>()
        };
        let (before, steps_before) = (counts.of("chain"), steps(&running));
        together(&running, n, |_| 24);
        // An overrun step may still be on its way.
        let (after, steps) = (counts.of("chain"), steps(&running) - steps_before);
        assert_eq!(
            after.launches_of_nodes(),
            before.launches_of_nodes(),
            "steps launch nothing beside their graphs"
        );
        let replays = after.replays - before.replays;
        assert!(
            (steps..=steps + 1).contains(&replays),
            "{replays} replays, {steps} steps"
        );
    }
}

/// Operations of a prefill, by name.
fn prefill_operations(talker: &StackConfig, clones: bool) -> Vec<(&'static str, usize)> {
    let layers = talker.num_hidden_layers;
    let speakers = usize::from(clones);
    vec![
        // Of the last layer only what leads to its keys and values.
        ("Attention", layers - 1),
        // Integers, and speaker vectors.
        ("Copy", 1 + speakers),
        // Text, frames, speaker vectors.
        ("Embed", 2 + speakers),
        ("Gemm", 2 + 4 * (layers - 1) + 1),
        ("QkvRope", layers),
        ("RopeTable", 1),
        // Pages, and the codes that the first decode step begins with.
        ("ScatterRows", 2),
    ]
}

#[test]
fn a_prefill_has_these_operations() {
    for (kind, clones) in [("custom_voice", false), ("base", true)] {
        let (_running, counts) = on_buckets(tiny(kind), TALKER_ALONE, 4);
        let stack = tiny_checkpoint(kind).configs.model.talker_config.stack;
        let expected = prefill_operations(&stack, clones);
        // The first that warm-up ran.
        assert_eq!(counts.of("chain").first_graph, expected.into_iter().collect());
    }
}

/// A prompt's frames depend neither on the bucket that its prefill took nor on the prompts beside it.
#[test]
fn prompts_of_all_lengths_give_the_codes_that_each_gives_alone() {
    let model = tiny("custom_voice");
    let words = |n: usize| vec!["one"; n].join(" ");
    let build = |i: usize| {
        let input = SpeechInput {
            text: words(1 + 9 * i),
            voice: Some("vivian".into()),
            layout: Some(TextLayout::Whole),
            seed: i as u64,
            max_frames: Some(3),
            ..SpeechInput::default()
        };
        model.requests().build(&input).unwrap()
    };
    let exact = Running::new(model.clone(), TALKER_ALONE, 1);
    let (running, _) = on_buckets(model.clone(), TALKER_ALONE, 6);
    let alone: Vec<_> = (0..6).map(|i| exact.run(build(i))).collect();
    for (i, expected) in alone.iter().enumerate() {
        assert_eq!(running.run(build(i)), *expected, "text {i} alone in its bucket");
    }
    let streams: Vec<_> = (0..6)
        .map(|i| running.submit(&format!("text {i}"), build(i), None))
        .collect();
    let company: Vec<_> = streams.into_iter().map(finish).collect();
    assert_eq!(company, alone);
}

/// Operations of a decode step in which no row has text, by name: a launch each, at the least.
fn frame_operations(
    talker: &StackConfig,
    predictor: &StackConfig,
    projected: bool,
) -> Vec<(&'static str, usize)> {
    let passes = predictor.num_code_groups - 1;
    let (layers, small) = (talker.num_hidden_layers, predictor.num_hidden_layers);
    vec![
        // Only the predictor's first pass has two rows a sequence.
        ("Attention", small),
        // Integers and sampling records in, codes out; the hidden state to the predictor.
        ("Copy", 3 + usize::from(!projected)),
        ("DecodeAttention", layers + small * (passes - 1)),
        // Padding in place of text, the last frame; the input of every pass.
        ("Embed", 2 + passes),
        // The last frame's codes.
        ("GatherRows", 1),
        (
            "Gemm",
            4 * layers + 1 + usize::from(projected) + passes * (4 * small + 1),
        ),
        ("QkvRope", small),
        ("RmsNorm", 1),
        ("RopeTable", 1),
        ("Sample", 1 + passes),
        // To the sampler's pool and the edge's ring.
        ("ScatterRows", 2),
    ]
}

/// The number of operations of a frame must not grow silently: each is a kernel of about 2.6 µs on a GPU even when
/// it does nothing.
#[test]
fn a_frame_has_these_operations() {
    let model = tiny("custom_voice");
    let (running, counts) = on_buckets(model.clone(), WITH_CODEC, 4);
    running.run(request(&model, 1, 6));
    let configs = tiny_checkpoint("custom_voice").configs.model;
    let talker = &configs.talker_config;
    let of = |projected| frame_operations(&talker.stack, &talker.code_predictor_config, projected);
    let expected = of(configs.has_predictor_projection());
    assert_eq!(counts.of("chain").last_graph, expected.into_iter().collect());

    for (preset, operations) in [("0.6b-base", 578), ("1.7b-base", 578)] {
        let configs = true_size(preset).configs.model;
        let talker = &configs.talker_config;
        let projected = configs.has_predictor_projection();
        let all = frame_operations(&talker.stack, &talker.code_predictor_config, projected);
        let sum: usize = all.iter().map(|(_, count)| count).sum();
        assert_eq!(sum, operations, "{preset}: {all:?}");
    }
}
