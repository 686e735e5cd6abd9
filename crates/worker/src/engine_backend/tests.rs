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
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/golden/tiny");
    let yaml = TINY.replace("WEIGHTS", weights);
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
