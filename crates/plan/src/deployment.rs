//! The checked deployment: what one configuration file means, ready to use. [`crate::Loaded::check`] is the
//! only thing that makes one from a file, so every value here has passed every rule.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use crate::declaration::ChunkPolicy;

/// One deployment.
#[derive(Debug, Clone, PartialEq)]
pub struct Deployment {
    /// Registry name of the model, `qwen3_tts`.
    pub model: String,
    /// Where the weights come from.
    pub weights: Weights,
    /// Where the model's sizes come from when they do not lie beside the weights.
    pub model_config: Option<ModelConfig>,
    /// What the workers run on.
    pub device: DeviceKind,
    /// What weights are kept and products are taken in.
    pub precision: Precision,
    /// Longest sequence in positions.
    pub max_seq_len: u32,
    /// Every node of the model, in declaration order.
    pub nodes: Vec<NodePlacement>,
    /// Every lane of every rank of the first replica, by rank and then id. Lane 0 is a rank's chain.
    pub lanes: Vec<LaneSpec>,
    /// Whole copies of the nodes. Nodes and lanes name the ranks of the first; see [`Deployment::layout_rank`].
    pub replicas: u32,
    /// Ranks of all replicas by number, contiguous from 0.
    pub ranks: Vec<RankSpec>,
    /// How workers that share a device do so.
    pub mps: MpsMode,
    /// Every resource of the model that a node declares, in declaration order.
    pub resources: Vec<ResourceSize>,
    /// Bounds of admission and of a step.
    pub limits: Limits,
    /// Row counts that captures are made for, ascending; the last is `limits.max_rows`.
    pub capture_buckets: Vec<u32>,
    /// Chunk policy of every stream edge, by edge name: the model's default or the file's.
    pub chunks: BTreeMap<String, ChunkPolicy>,
    /// Addresses and time bounds of the services.
    pub services: Services,
}

impl Deployment {
    /// Ranks of one replica.
    pub fn ranks_per_replica(&self) -> u32 {
        (self.ranks.len() as u32 / self.replicas.max(1)).max(1)
    }

    /// The rank of the first replica that `rank` is a copy of: nodes and lanes are written for that one.
    pub fn layout_rank(&self, rank: u32) -> u32 {
        rank % self.ranks_per_replica()
    }

    /// Ranks of the first replica that `node` runs on, or nothing for an unknown node.
    pub fn ranks_of(&self, node: &str) -> &[u32] {
        self.nodes
            .iter()
            .find(|placement| placement.node == node)
            .map_or(&[], |placement| &placement.ranks)
    }

    /// Device name of a rank: `cpu`, `cuda:0`.
    pub fn device_name(&self, rank: &RankSpec) -> String {
        self.device.name(rank.device)
    }
}

/// Where weights come from. Its text form is what the configuration says: `random:7`, `hf://org/name@rev`, a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// A checkpoint directory.
    Path(PathBuf),
    /// A repository of the Hugging Face hub.
    HuggingFace {
        /// `Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice`.
        repo: String,
        /// Branch, tag or commit; the hub's default branch otherwise.
        revision: Option<String>,
    },
    /// Generated from a seed, for benchmarks and tests.
    Random {
        /// The generator's seed.
        seed: u64,
    },
}

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Weights::Path(path) => write!(f, "{}", path.display()),
            Weights::HuggingFace { repo, revision: None } => write!(f, "hf://{repo}"),
            Weights::HuggingFace {
                repo,
                revision: Some(revision),
            } => write!(f, "hf://{repo}@{revision}"),
            Weights::Random { seed } => write!(f, "random:{seed}"),
        }
    }
}

impl FromStr for Weights {
    type Err = String;

    /// Parse the text form.
    ///
    /// # Errors
    /// What is wrong with it, for a person.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(seed) = text.strip_prefix("random:") {
            let seed = seed
                .parse()
                .map_err(|_| format!("`{seed}` is not a seed: a whole number from 0 to {}", u64::MAX))?;
            return Ok(Weights::Random { seed });
        }
        if let Some(rest) = text.strip_prefix("hf://") {
            let (repo, revision) = match rest.split_once('@') {
                Some((repo, revision)) => (repo, Some(revision.to_owned())),
                None => (rest, None),
            };
            let well_formed = repo.split('/').count() == 2 && repo.split('/').all(|part| !part.is_empty());
            if !well_formed || revision.as_deref() == Some("") {
                return Err(format!(
                    "`{text}` is not of the form hf://organisation/name or hf://organisation/name@revision"
                ));
            }
            return Ok(Weights::HuggingFace {
                repo: repo.to_owned(),
                revision,
            });
        }
        if text.is_empty() || text.contains("://") {
            return Err(format!(
                "`{text}` is neither a path nor hf://organisation/name nor random:<seed>"
            ));
        }
        Ok(Weights::Path(PathBuf::from(text)))
    }
}

/// Where a model's sizes come from. A name with a `/` is a directory, any other a preset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelConfig {
    /// A directory in the checkpoint layout that needs to hold configuration files only.
    Directory(PathBuf),
    /// A configuration that the model's declaration carries, `0.6b-custom_voice`.
    Preset(String),
}

impl fmt::Display for ModelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelConfig::Directory(path) => write!(f, "{}", path.display()),
            ModelConfig::Preset(name) => write!(f, "{name}"),
        }
    }
}

impl From<&str> for ModelConfig {
    fn from(text: &str) -> Self {
        match text.contains('/') || text == "." || text == ".." {
            true => ModelConfig::Directory(PathBuf::from(text)),
            false => ModelConfig::Preset(text.to_owned()),
        }
    }
}

/// Kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The CPU device.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

impl DeviceKind {
    /// Name of device `index`: `cpu`, `cuda:0`.
    pub fn name(self, index: u32) -> String {
        match self {
            DeviceKind::Cpu => "cpu".to_owned(),
            DeviceKind::Cuda => format!("cuda:{index}"),
        }
    }

    /// What it computes in, the default first.
    pub fn precisions(self) -> &'static [Precision] {
        match self {
            DeviceKind::Cpu => &[Precision::F32],
            DeviceKind::Cuda => &[Precision::Bf16, Precision::F32],
        }
    }

    /// What it computes in unless a deployment says otherwise.
    pub fn default_precision(self) -> Precision {
        match self {
            DeviceKind::Cpu => Precision::F32,
            DeviceKind::Cuda => Precision::Bf16,
        }
    }
}

/// What the weight matrices are kept in, and so what products are taken in. Everything between products is f32
/// either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// bf16 operands, sums in f32: what the released weights are stored in.
    Bf16,
    /// f32 operands (no TF32): for comparing numbers.
    F32,
}

impl Precision {
    /// Bytes of an entry of a weight matrix.
    pub fn weight_bytes(self) -> u64 {
        match self {
            Precision::Bf16 => 2,
            Precision::F32 => 4,
        }
    }

    /// As a configuration writes it.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Bf16 => "bf16",
            Precision::F32 => "f32",
        }
    }
}

/// Where a node runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlacement {
    /// Node name.
    pub node: String,
    /// Its ranks; more than one when it steps over several together.
    pub ranks: Vec<u32>,
    /// Chain, lane or auto.
    pub placement: Placement,
}

/// Chain, lane or auto.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Lane 0.
    Chain,
    /// That lane, always.
    Lane(u32),
    /// The worker measures and moves the node between the chain and this lane.
    Auto(u32),
}

impl Placement {
    /// The lane that the node's resources and captures are made for: 0 is the chain.
    pub fn lane_id(self) -> u32 {
        match self {
            Placement::Chain => 0,
            Placement::Lane(id) | Placement::Auto(id) => id,
        }
    }
}

/// One lane of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneSpec {
    /// Whose.
    pub rank: u32,
    /// 0 is the chain.
    pub id: u32,
    /// Stream priority.
    pub priority: Priority,
    /// SM partition of its stream; `None`: the whole device.
    pub sms: Option<u32>,
    /// Partitions that `lane: auto` may choose among; 0 is no partition. Empty unless a node is on auto.
    pub auto_sms: Vec<u32>,
    /// Bytes that its nodes and their resources may take; checked when the deployment is validated.
    pub memory_bytes: Option<u64>,
    /// Most rows of one of its steps.
    pub max_rows: u32,
}

/// Stream priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Runs before others where the hardware allows.
    High,
    /// The default of the chain.
    #[default]
    Normal,
    /// Gives way to others.
    Low,
}

/// One rank: a worker process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSpec {
    /// Its number.
    pub rank: u32,
    /// Index of its device.
    pub device: u32,
    /// Share of the device's threads under MPS, 1 to 100.
    pub active_thread_percentage: Option<u32>,
    /// Most bytes of device memory that it may allocate under MPS.
    pub pinned_device_memory_bytes: Option<u64>,
}

/// How workers share a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpsMode {
    /// No two workers share one, or the file does not say.
    Unset,
    /// The engine-manager requires a daemon that answers.
    Required,
    /// A daemon that someone else runs: it must answer, it is never started or stopped.
    Unmanaged,
    /// Time slicing, on purpose.
    Disabled,
}

/// How much of a resource there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceSize {
    /// Resource key.
    pub key: String,
    /// Slots, or pages of a paged cache.
    pub slots: u32,
    /// Positions of a page; 0 unless paged.
    pub page_size: u32,
}

/// Bounds of admission and of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most rows of a chain step: requests that run at once.
    pub max_rows: u32,
    /// Most packed tokens of a prefill step.
    pub max_prefill_tokens: u32,
    /// Requests that may wait for admission; one more is refused at once.
    pub max_queue: u32,
    /// Longest text in characters.
    pub max_text_chars: u32,
    /// Hard cap on the frames of a request, whatever its own budget.
    pub max_frames: u32,
}

/// Addresses and time bounds of the services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Services {
    /// Where the engine-manager listens, `host:port`.
    pub engine_manager_listen: String,
    /// Where workers and the gateway reach it.
    pub engine_manager_address: String,
    /// Where the gateway listens.
    pub gateway_listen: String,
    /// Where a worker listens; port 0 takes a free one, which it registers.
    pub worker_listen: String,
    /// Host that a worker registers for others to dial; the host it listens on when absent.
    pub worker_advertise: Option<String>,
    /// How long running streams may take to finish after SIGTERM.
    pub drain_timeout: Duration,
    /// A worker with active requests that lands no step for this long is stuck.
    pub stall_timeout: Duration,
}
