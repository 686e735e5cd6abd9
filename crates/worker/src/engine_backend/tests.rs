use std::path::Path;

use futures::StreamExt as _;
use laneway_engine::OutputEvent;
use laneway_engine::node::FinishReason;
use laneway_models_decl::load_deployment;
use laneway_plan::{Sources, render};

use super::*;

const TINY: &str = "\
model: qwen3_tts
weights: WEIGHTS
device: cpu
max_seq_len: 256
node_groups:
  - nodes: [Talker]
  - nodes: [Codec]
    lane: 1
limits: { max_rows: 2, max_queue: 2, max_prefill_tokens: 128, max_frames: 40 }
";

fn start(weights: &str) -> EngineBackend {
    start_yaml(TINY, weights)
}

fn start_yaml(yaml: &str, weights: &str) -> EngineBackend {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/golden/tiny");
    let yaml = yaml.replace("WEIGHTS", weights);
    let sources = Sources::text(golden.join("test.yaml"), yaml);
    let validated =
        load_deployment(&sources, None).unwrap_or_else(|violations| panic!("{}", render(&violations)));
    let plan = WorkerPlan::for_rank(&validated.deployment, &validated.declaration, 0).unwrap();
    EngineBackend::start(&plan).unwrap()
}

fn exactly(frames: u32) -> Utterance {
    Utterance {
        text: "Hello world.".into(),
        voice: "ryan".into(),
        sampling: Sampling {
            exact_frames: Some(frames),
            ..Sampling::default()
        },
        ..Utterance::default()
    }
}

fn refusal(backend: &EngineBackend, utterance: Utterance) -> RowError {
    match backend.synthesize("a", utterance, None) {
        Err(SubmitError::Invalid(error)) => error,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was taken"),
    }
}

#[tokio::test]
async fn generated_weights_speak_exactly_as_many_frames_as_they_are_told() {
    let backend = start("random:7\nmodel_config: ./model-custom_voice");
    assert!(backend.facts().takes_exact_frames);
    for frames in [1, 7, 40] {
        let mut running = backend.synthesize("a", exactly(frames), None).unwrap();
        assert_eq!(running.max_frames, frames);
        assert!(running.prompt_positions > 0);
        let mut n_samples = 0;
        let stats = loop {
            match running.events.next().await.unwrap() {
                OutputEvent::Samples { samples, .. } => n_samples += samples.len(),
                OutputEvent::Finished { reason, stats } => {
                    assert_eq!(reason, FinishReason::Length);
                    break stats;
                }
                OutputEvent::Failed(failure) => panic!("{failure:?}"),
                _ => {}
            }
        };
        assert_eq!(stats.items, frames);
        assert_eq!(n_samples, frames as usize * 1920);
    }
    let beyond = refusal(&backend, exactly(41));
    assert!(
        beyond.invalid_argument && beyond.message.contains("40"),
        "{beyond:?}"
    );
    let both = Utterance {
        max_frames: Some(7),
        ..exactly(7)
    };
    assert_eq!(
        refusal(&backend, both).field.as_deref(),
        Some("sampling.exact_frames")
    );
}

#[test]
fn trained_weights_refuse_to_be_told() {
    let backend = start("../../../crates/models/demo/nano");
    assert!(!backend.facts().takes_exact_frames);
    let error = refusal(&backend, exactly(7));
    assert_eq!(error.field.as_deref(), Some("sampling.exact_frames"));
    assert!(error.message.contains("leave it out"), "{}", error.message);
}

/// A hum at this pitch: half a second, which is a clip of its own.
fn clip(pitch_hz: f32) -> crate::backend::ReferenceClip {
    let sample = |index: i32| 0.3 * (index as f32 * pitch_hz * std::f32::consts::TAU / 24_000.0).sin();
    crate::backend::ReferenceClip {
        samples: (0..12_000).map(sample).collect(),
        sample_rate: 24_000,
        text: String::new(),
    }
}

fn cloned(pitch_hz: f32, seed: u64) -> Utterance {
    Utterance {
        voice: String::new(),
        reference: Some(clip(pitch_hz)),
        seed,
        ..exactly(3)
    }
}

async fn samples(mut running: Running) -> Vec<f32> {
    let mut all = Vec::new();
    loop {
        match running.events.next().await.unwrap() {
            OutputEvent::Samples { samples, .. } => all.extend_from_slice(&samples),
            OutputEvent::Finished { .. } => return all,
            OutputEvent::Failed(failure) => panic!("{failure:?}"),
            _ => {}
        }
    }
}

fn encoded(backend: &EngineBackend) -> u64 {
    let walks = backend.stats().walks;
    let encode = walks.iter().find(|walk| *walk.walk == *qwen3_tts::REF_ENCODE);
    encode.map_or(0, |walk| walk.rows)
}

fn cloning() -> EngineBackend {
    let lanes = TINY.replace(
        "    lane: 1\n",
        "    lane: 1\n  - nodes: [RefEncoder]\n    lane: 2\n",
    );
    start_yaml(
        &lanes.replace("max_queue: 2", "max_queue: 8"),
        "random:7\nmodel_config: ./model-base",
    )
}

#[tokio::test]
async fn a_clip_is_encoded_once_whoever_sends_it_and_however_many_at_once() {
    let backend = cloning();
    // At once: the first encodes, the others wait for it.
    let runs = (0..4).map(|n| {
        backend
            .synthesize(&format!("r{n}"), cloned(220.0, n % 2), None)
            .unwrap()
    });
    let runs: Vec<_> = runs.map(|running| tokio::spawn(samples(running))).collect();
    let mut heard = Vec::new();
    for run in runs {
        heard.push(run.await.unwrap());
    }
    assert_eq!(encoded(&backend), 1);
    assert!(
        heard[0] == heard[2] && heard[1] == heard[3],
        "the seed decides, not who encoded"
    );
    assert_ne!(heard[0], heard[1]);
    // Later: from the cache, and the same bytes.
    assert_eq!(
        samples(backend.synthesize("late", cloned(220.0, 0), None).unwrap()).await,
        heard[0]
    );
    assert_eq!(encoded(&backend), 1);
    // Another clip is another voice.
    assert_ne!(
        samples(backend.synthesize("other", cloned(150.0, 0), None).unwrap()).await,
        heard[0]
    );
    assert_eq!(encoded(&backend), 2);
}

#[tokio::test]
async fn a_waiting_clone_can_be_cancelled_and_takes_over_from_one_that_is_killed() {
    let backend = cloning();
    // It is not read, so nobody has heard yet that its clip is encoded.
    let first = backend.synthesize("first", cloned(220.0, 1), None).unwrap();
    let end = |id: &str, strength: Strength, deadline| {
        let running = backend.synthesize(id, cloned(220.0, 1), deadline).unwrap();
        if deadline.is_none() {
            assert!(backend.cancel(id, strength));
        }
        running
    };
    let mut killed = end("killed", Strength::Kill, None);
    let mut stopped = end("stopped", Strength::Stop, None);
    let mut late = end("late", Strength::Kill, Some(Instant::now()));
    let kind = |event: Option<OutputEvent>| match event {
        Some(OutputEvent::Failed(failure)) => format!("{:?}", failure.kind),
        Some(OutputEvent::Finished { reason, .. }) => format!("{reason:?}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(kind(killed.events.next().await), "Cancelled");
    assert_eq!(kind(stopped.events.next().await), "Stopped");
    assert_eq!(kind(late.events.next().await), "DeadlineExceeded");
    drop((killed, stopped, late));
    assert!(!backend.cancel("killed", Strength::Kill), "it waits no more");

    let second = backend.synthesize("second", cloned(220.0, 1), None).unwrap();
    drop(first);
    assert!(!samples(second).await.is_empty());
    assert_eq!(backend.waiting.len(), 0);
}
