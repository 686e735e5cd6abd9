//! The bytes that the validator counts bound the bytes that a worker allocates, and not by much.

use std::path::Path;
use std::sync::Arc;

use laneway_device::{CpuConfig, open_cpu};
use laneway_engine::{Engine, EngineConfig};
use laneway_models::qwen3_tts::Qwen3Tts;
use laneway_models_decl::{Sizing, Validated, load_deployment};
use laneway_plan::{Sources, WorkerPlan, budget, render};

const GROUPS: &str = "\
device: cpu
max_seq_len: 1024
node_groups:
  - nodes: [Talker]
  - nodes: [Codec]
    lane: 1
resources: { talker_kv: { pages: 128 } }
limits: { max_rows: 8, max_prefill_tokens: 1024 }
";

/// Start a worker of `yaml`'s only rank and compare.
fn check(yaml: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("test.yaml");
    let validated = load_deployment(&Sources::text(file, yaml), None);
    let Validated {
        deployment,
        declaration,
        ..
    } = validated.unwrap_or_else(|violations| panic!("{}", render(&violations)));
    let plan = WorkerPlan::for_rank(&deployment, &declaration, 0).expect("the deployment has rank 0");
    let sizing = Sizing {
        device: plan.device,
        precision: plan.precision,
        page_size: plan.resources[0].page_size,
        max_prefill_tokens: plan.max_prefill_tokens,
    };
    let model = Qwen3Tts::open(&plan.weights, plan.model_config.as_ref(), &sizing).expect("the model opens");
    let device = open_cpu(CpuConfig { memory_bytes: None }).expect("the CPU device opens");
    let config = EngineConfig::from_plan(&plan, device.clone(), Arc::new(model));
    let (_engine, _handle) = Engine::start(config).expect("the engine starts");

    let counted = budget::rank_bytes(&deployment, &declaration, 0);
    let allocated = device.facts().used_bytes;
    assert!(
        allocated <= counted,
        "{allocated} bytes allocated, {counted} counted"
    );
    assert!(
        allocated >= counted / 4 * 3,
        "{allocated} bytes allocated, {counted} counted"
    );
}

#[test]
fn the_demo_checkpoint() {
    check(&format!("model: qwen3_tts\nweights: ./demo/nano\n{GROUPS}"));
}

#[test]
fn a_checkpoint_with_a_reference_encoder() {
    let with_encoder = GROUPS.replace(
        "    lane: 1\n",
        "    lane: 1\n  - nodes: [RefEncoder]\n    lane: 2\n",
    );
    let config = "../../integration-tests/golden/tiny/model-base";
    check(&format!(
        "model: qwen3_tts\nweights: random:7\nmodel_config: {config}\n{with_encoder}"
    ));
}
