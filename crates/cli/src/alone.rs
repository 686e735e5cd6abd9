//! A model on an engine of its own, without services: what `profile` and `repeat` run.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use laneway_cuda::{CudaConfig, open_cuda};
use laneway_device::{CpuConfig, Device, Priority, open_cpu};
use laneway_engine::node::Model as _;
use laneway_engine::{Engine, EngineConfig, EngineHandle, LaneConfig, Limits, NodeConfig, ResourceConfig};
use laneway_models::qwen3_tts::Qwen3Tts;
use laneway_models_decl::Sizing;
use laneway_models_decl::qwen3_tts::{CODEC, REF_ENCODER};
use laneway_plan::deployment::{DeviceKind, ModelConfig, Weights};

const PAGE_SIZE: u32 = 32;
const PREFILL_TOKENS: usize = 2048;
/// Building and warming up a large model with generated weights.
const START: Duration = Duration::from_secs(600);
const STEP: Duration = Duration::from_secs(120);

/// Which model, and where.
#[derive(Debug, Args)]
pub(crate) struct Chosen {
    /// Preset of a released size, with random weights.
    #[arg(long, default_value = "1.7b-custom_voice", conflicts_with = "checkpoint")]
    preset: String,
    /// A checkpoint directory, in place of a preset.
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// The device.
    #[arg(long, value_enum, default_value_t = On::Cuda)]
    device: On,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    Cpu,
    Cuda,
}

impl Chosen {
    pub(crate) fn open(&self) -> anyhow::Result<(Arc<dyn Device>, Arc<Qwen3Tts>)> {
        let (device, kind) = match self.device {
            On::Cpu => (
                open_cpu(CpuConfig { memory_bytes: None }).context("open the CPU device")?,
                DeviceKind::Cpu,
            ),
            On::Cuda => (
                open_cuda(CudaConfig::default()).context("open the CUDA device")?,
                DeviceKind::Cuda,
            ),
        };
        let sizing = Sizing {
            device: kind,
            precision: kind.default_precision(),
            page_size: PAGE_SIZE,
            max_prefill_tokens: PREFILL_TOKENS as u32,
        };
        let (weights, config) = match &self.checkpoint {
            Some(directory) => (Weights::Path(directory.clone()), None),
            None => (
                Weights::Random { seed: 7 },
                Some(ModelConfig::Preset(self.preset.clone())),
            ),
        };
        let model = Qwen3Tts::open(&weights, config.as_ref(), &sizing).context("open the model")?;
        Ok((device, Arc::new(model)))
    }
}

/// The stream of a codec beside the chain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CodecLane {
    pub(crate) priority: Priority,
    /// Multiprocessors that it is kept to; `None` is all of them.
    pub(crate) sms: Option<u32>,
}

/// An engine of `rows` requests.
pub(crate) struct Alone {
    pub(crate) rows: usize,
    /// Longest request.
    pub(crate) frames: u32,
    /// The codec on a lane of its own, rather than on the chain.
    pub(crate) codec_lane: Option<CodecLane>,
    /// Row counts that graphs are captured for.
    pub(crate) buckets: Vec<usize>,
}

impl Alone {
    /// Every node but the encoder of clips, which no request here needs.
    pub(crate) fn start(
        self,
        device: Arc<dyn Device>,
        model: &Arc<Qwen3Tts>,
    ) -> anyhow::Result<(Engine, EngineHandle)> {
        let declaration = model.declaration();
        // The prompt of the text, and every frame.
        let seq_len = (256 + self.frames).next_multiple_of(PAGE_SIZE);
        let nodes = declaration.nodes.iter().filter(|node| node.name != REF_ENCODER);
        let resources = declaration.resources.iter().map(|resource| ResourceConfig {
            key: resource.key.clone(),
            slots: match resource.page_size {
                0 => self.rows as u32,
                page_size => self.rows as u32 * seq_len / page_size,
            },
            page_size: resource.page_size,
        });
        let lane = |priority, partition_sms| LaneConfig {
            priority,
            partition_sms,
            max_rows: self.rows,
        };
        let chain = lane(Priority::High, None);
        let beside = self.codec_lane.map(|codec| lane(codec.priority, codec.sms));
        Engine::start(EngineConfig {
            device,
            model: model.clone(),
            lanes: [Some(chain), beside].into_iter().flatten().collect(),
            nodes: nodes
                .map(|node| NodeConfig {
                    node: node.name.clone(),
                    lane: usize::from(self.codec_lane.is_some() && node.name == CODEC),
                    auto: None,
                })
                .collect(),
            resources: resources.collect(),
            chunks: Default::default(),
            max_prefill_tokens: PREFILL_TOKENS,
            max_seq_len: seq_len as usize,
            capture_buckets: self.buckets,
            playback_hz: 0,
            limits: Limits {
                max_running: self.rows,
                max_queue: self.rows,
                step_deadline: STEP,
                start_deadline: START,
                ..Limits::default()
            },
        })
        .context("start the engine")
    }
}
