//! A model in an engine on a CPU device under the sanitizer, for tests.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_device::Device;
use laneway_device::sanitize::Sanitizer;
use laneway_engine::node::{FinishReason, Model};
use laneway_engine::{
    AutoConfig, AutoPolicy, Engine, EngineConfig, EngineHandle, LaneConfig, Limits, NodeConfig, OutputEvent,
    RequestStream, ResourceConfig, Submission,
};
use laneway_models_decl::Sizing;
use laneway_plan::declaration::ChunkPolicy;
use laneway_plan::deployment::{DeviceKind, ModelConfig, Weights};

use super::model::Qwen3Tts;
use super::request::TtsRequest;
use super::test_support::golden_dir;

const PAGE_SIZE: u32 = 16;
const SEQ_LEN: usize = 384;
/// Packed prompt rows of a step.
pub(crate) const PREFILL_TOKENS: usize = 256;

fn open(weights: &Weights, config: Option<&ModelConfig>) -> Arc<Qwen3Tts> {
    let sizing = Sizing {
        device: DeviceKind::Cpu,
        precision: DeviceKind::Cpu.default_precision(),
        page_size: PAGE_SIZE,
        max_prefill_tokens: PREFILL_TOKENS as u32,
    };
    Arc::new(Qwen3Tts::open(weights, config, &sizing).unwrap())
}

/// A tiny model with the golden sets' generated weights.
pub(crate) fn tiny(kind: &str) -> Arc<Qwen3Tts> {
    let config = ModelConfig::Directory(golden_dir().join(format!("tiny/model-{kind}")));
    open(&Weights::Random { seed: 7 }, Some(&config))
}

/// The demo model.
pub(crate) fn nano() -> Arc<Qwen3Tts> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/nano");
    open(&Weights::Path(dir), None)
}

/// What one request gave.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Spoken {
    /// Frames, where the engine has no codec.
    pub(crate) frames: Vec<Vec<i32>>,
    /// Samples, where it has one.
    pub(crate) samples: Vec<f32>,
    pub(crate) reason: Option<FinishReason>,
}

/// A running engine. Dropping it asserts that the sanitizer saw nothing.
pub(crate) struct Running {
    pub(crate) model: Arc<Qwen3Tts>,
    pub(crate) handle: EngineHandle,
    _engine: Engine,
    sanitizer: Sanitizer,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.sanitizer.assert_clean();
        }
    }
}

impl Running {
    /// Start these nodes on these lanes, for `rows` requests at once.
    pub(crate) fn new(model: Arc<Qwen3Tts>, nodes: &[(&str, usize)], rows: usize) -> Self {
        Self::on(laneway_device::testing::cpu(), model, nodes, rows)
    }

    /// As [`Running::new`], on this device.
    pub(crate) fn on(
        machine: (Arc<dyn Device>, Sanitizer),
        model: Arc<Qwen3Tts>,
        nodes: &[(&str, usize)],
        rows: usize,
    ) -> Self {
        Self::moving(machine, model, nodes, rows, None)
    }

    /// As [`Running::on`], with a node that moves between the chain and its lane every so many of its steps.
    pub(crate) fn moving(
        (device, sanitizer): (Arc<dyn Device>, Sanitizer),
        model: Arc<Qwen3Tts>,
        nodes: &[(&str, usize)],
        rows: usize,
        moves: Option<(&str, u32)>,
    ) -> Self {
        let lanes = nodes.iter().map(|(_, lane)| lane + 1).max().unwrap_or(1);
        let lane = || LaneConfig {
            priority: Default::default(),
            partition_sms: None,
            max_rows: rows,
        };
        let resources = model
            .declaration()
            .resources
            .iter()
            .map(|resource| ResourceConfig {
                key: resource.key.clone(),
                slots: match resource.page_size {
                    0 => rows as u32,
                    // Twice what a sequence may hold, so that its own limit is met first.
                    page_size => 2 * (SEQ_LEN as u32 / page_size) * rows as u32,
                },
                page_size: resource.page_size,
            });
        let config = EngineConfig {
            device,
            model: model.clone(),
            lanes: (0..lanes).map(|_| lane()).collect(),
            nodes: nodes
                .iter()
                .map(|(node, lane)| NodeConfig {
                    node: (*node).into(),
                    lane: *lane,
                    auto: moves
                        .filter(|(moving, _)| moving == node)
                        .map(|(_, every)| AutoConfig {
                            sms: Vec::new(),
                            policy: AutoPolicy::Cycle(every),
                        }),
                })
                .collect(),
            resources: resources.collect(),
            chunks: Default::default(),
            max_prefill_tokens: PREFILL_TOKENS,
            max_seq_len: SEQ_LEN,
            capture_buckets: [1, 2, 4, 8]
                .into_iter()
                .filter(|n| *n < rows)
                .chain([rows])
                .collect(),
            playback_hz: 0,
            limits: Limits {
                step_deadline: Duration::from_secs(120),
                ..Limits::default()
            },
        };
        let (engine, handle) = Engine::start(config).unwrap();
        Self {
            model,
            handle,
            _engine: engine,
            sanitizer,
        }
    }

    pub(crate) fn submit(&self, id: &str, request: TtsRequest, chunk: Option<ChunkPolicy>) -> RequestStream {
        self.handle
            .submit(Submission {
                id: id.into(),
                payload: Arc::new(request),
                chunk,
                deadline: Some(Instant::now() + Duration::from_secs(300)),
                results: Vec::new(),
            })
            .unwrap()
    }

    /// Run one request.
    pub(crate) fn run(&self, request: TtsRequest) -> Spoken {
        finish(self.submit("one", request, None))
    }
}

/// Everything that a request gives.
pub(crate) fn finish(mut stream: RequestStream) -> Spoken {
    let mut spoken = Spoken::default();
    while let Some(event) = stream.blocking_recv() {
        match event {
            OutputEvent::Items {
                first_item, items, ..
            } => {
                assert_eq!(first_item as usize, spoken.frames.len());
                spoken.frames.extend(items.iter().map(|item| item.to_vec()));
            }
            OutputEvent::Samples { samples, .. } => spoken.samples.extend_from_slice(&samples),
            OutputEvent::Finished { reason, .. } => {
                spoken.reason = Some(reason);
                return spoken;
            }
            OutputEvent::Failed(failure) => panic!("{failure:?}"),
            OutputEvent::Started { .. } | OutputEvent::Result { .. } => {}
        }
    }
    panic!("the stream ended without an end");
}
