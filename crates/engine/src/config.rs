//! What an engine is started with.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use laneway_device::{Device, Priority};
use laneway_plan::declaration::ChunkPolicy;
use laneway_plan::{WorkerPlan, deployment};

use crate::node::Model;

/// Everything that [`crate::Engine::start`] needs.
#[derive(Clone)]
pub struct EngineConfig {
    /// Where it runs.
    pub device: Arc<dyn Device>,
    /// What it runs.
    pub model: Arc<dyn Model>,
    /// Streams by lane id: entry 0 is the chain.
    pub lanes: Vec<LaneConfig>,
    /// Nodes of the model that live in this worker, and where.
    pub nodes: Vec<NodeConfig>,
    /// Sizes of the resources that these nodes declare.
    pub resources: Vec<ResourceConfig>,
    /// Chunk policies by stream edge, in place of the declared ones.
    pub chunks: BTreeMap<String, ChunkPolicy>,
    /// Most packed tokens of a prefill step.
    pub max_prefill_tokens: usize,
    /// Longest sequence in positions.
    pub max_seq_len: usize,
    /// Row counts that captures are made for, ascending.
    pub capture_buckets: Vec<usize>,
    /// Samples that a listener plays in a second: stream rows go by playback slack. 0: in order of readiness.
    pub playback_hz: u32,
    /// Bounds.
    pub limits: Limits,
}

impl std::fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineConfig")
            .field("model", &self.model.declaration().model)
            .field("lanes", &self.lanes)
            .field("nodes", &self.nodes)
            .field("resources", &self.resources)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl EngineConfig {
    /// The configuration that a worker plan asks for. A node that the plan leaves to measurement (`lane: auto`)
    /// starts on its lane.
    pub fn from_plan(plan: &WorkerPlan, device: Arc<dyn Device>, model: Arc<dyn Model>) -> Self {
        let lanes = plan.lanes.iter().map(|lane| LaneConfig {
            priority: match lane.priority {
                deployment::Priority::High => Priority::High,
                deployment::Priority::Normal => Priority::Normal,
                deployment::Priority::Low => Priority::Low,
            },
            partition_sms: lane.sms,
            max_rows: lane.max_rows as usize,
        });
        let nodes = plan.nodes.iter().map(|placed| NodeConfig {
            node: placed.node.clone(),
            lane: placed.placement.lane_id() as usize,
            auto: match placed.placement {
                deployment::Placement::Auto(id) => Some(AutoConfig {
                    sms: plan
                        .lanes
                        .iter()
                        .find(|lane| lane.id == id)
                        .map(|lane| lane.auto_sms.clone())
                        .unwrap_or_default(),
                    policy: AutoPolicy::Measured,
                }),
                _ => None,
            },
        });
        let resources = plan.resources.iter().map(|resource| ResourceConfig {
            key: resource.key.clone(),
            slots: resource.slots,
            page_size: resource.page_size,
        });
        Self {
            device,
            model,
            lanes: lanes.collect(),
            nodes: nodes.collect(),
            resources: resources.collect(),
            chunks: plan.chunks.clone(),
            max_prefill_tokens: plan.max_prefill_tokens as usize,
            max_seq_len: plan.max_seq_len as usize,
            capture_buckets: plan.capture_buckets.iter().map(|&rows| rows as usize).collect(),
            playback_hz: 0,
            limits: Limits {
                max_running: plan.max_rows as usize,
                max_queue: plan.max_queue as usize,
                step_deadline: plan.stall_timeout,
                ..Limits::default()
            },
        }
    }
}

/// One stream.
#[derive(Debug, Clone)]
pub struct LaneConfig {
    /// Stream priority.
    pub priority: Priority,
    /// Confine it to this many SMs.
    pub partition_sms: Option<u32>,
    /// Most rows of one of its steps.
    pub max_rows: usize,
}

/// Where a node runs.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Node name.
    pub node: String,
    /// Lane id; 0 is the chain.
    pub lane: usize,
    /// It moves between the chain and its lane; `None`: it stays.
    pub auto: Option<AutoConfig>,
}

/// A node that is left to measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AutoConfig {
    /// Partitions of its lane to choose among, in SMs; 0 is none. Empty: the lane as it is.
    pub sms: Vec<u32>,
    /// Who chooses.
    pub policy: AutoPolicy,
}

/// How the arm of a node is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoPolicy {
    /// By what steps cost.
    Measured,
    /// The next arm each time that the node has made so many steps: to see that nothing depends on it.
    Cycle(u32),
}

/// The size of a resource.
#[derive(Debug, Clone)]
pub struct ResourceConfig {
    /// Resource key.
    pub key: String,
    /// Slots, or pages of a paged cache.
    pub slots: u32,
    /// Positions of a page; 0 unless paged.
    pub page_size: u32,
}

/// Every bound of an engine.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Requests that run at once.
    pub max_running: usize,
    /// Requests that may wait behind them.
    pub max_queue: usize,
    /// Output events held for a listener before its request parks.
    pub output_events: usize,
    /// A listener that takes nothing for this long is ended.
    pub listener_stall: Duration,
    /// A step that has not landed after this long is stuck.
    pub step_deadline: Duration,
    /// How long building and warming up may take.
    pub start_deadline: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_running: 64,
            max_queue: 256,
            output_events: 64,
            listener_stall: Duration::from_secs(30),
            step_deadline: Duration::from_secs(10),
            start_deadline: Duration::from_secs(600),
        }
    }
}
