//! What the engine-manager hands a worker: everything it needs to build its nodes, lanes and resources.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::budget;
use crate::declaration::{ChunkPolicy, ModelDeclaration, WalkDecl};
use crate::deployment::{Deployment, DeviceKind, ModelConfig, Placement, Precision, Priority, Weights};

/// One worker's plan.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerPlan {
    /// Which worker.
    pub rank: u32,
    /// Registry name of the model.
    pub model: String,
    /// Where the weights come from.
    pub weights: Weights,
    /// Where the model's sizes come from when they do not lie beside the weights.
    pub model_config: Option<ModelConfig>,
    /// Kind of its device.
    pub device: DeviceKind,
    /// What weights are kept and products are taken in.
    pub precision: Precision,
    /// Index of its device.
    pub device_index: u32,
    /// Share of the device's threads under MPS, 1 to 100.
    pub active_thread_percentage: Option<u32>,
    /// Most bytes of device memory that it may allocate under MPS.
    pub pinned_device_memory_bytes: Option<u64>,
    /// Longest sequence in positions.
    pub max_seq_len: u32,
    /// Its nodes, in declaration order.
    pub nodes: Vec<NodePlan>,
    /// Its lanes by id; the first is lane 0, the chain.
    pub lanes: Vec<LanePlan>,
    /// Resources that its nodes declare, in declaration order.
    pub resources: Vec<ResourcePlan>,
    /// Walks of its nodes, in declaration order.
    pub walks: Vec<String>,
    /// Chunk policy of every stream edge of the model, by edge name.
    pub chunks: BTreeMap<String, ChunkPolicy>,
    /// Edges with one end in another worker.
    pub remote_edges: Vec<RemoteEdge>,
    /// Row counts that captures are made for, ascending.
    pub capture_buckets: Vec<u32>,
    /// Most rows of a chain step: requests that run at once.
    pub max_rows: u32,
    /// Most packed tokens of a prefill step.
    pub max_prefill_tokens: u32,
    /// Requests that may wait for admission.
    pub max_queue: u32,
    /// Hard cap on the frames of a request.
    pub max_frames: u32,
    /// Longest text in characters.
    pub max_text_chars: u32,
    /// With active requests and no step landed for this long the worker is stuck.
    pub stall_timeout: Duration,
    /// How long running streams may take to finish in a drain.
    pub drain_timeout: Duration,
}

impl WorkerPlan {
    /// The plan of one worker, or `None` for a rank that the deployment does not have. `deployment` must have
    /// been checked against `declaration`.
    pub fn for_rank(deployment: &Deployment, declaration: &ModelDeclaration, rank: u32) -> Option<Self> {
        let spec = deployment.ranks.iter().find(|spec| spec.rank == rank)?;
        // Nodes and lanes are written for the first replica.
        let layout = deployment.layout_rank(rank);
        let here = |node: &str| deployment.ranks_of(node).contains(&layout);

        let nodes = deployment
            .nodes
            .iter()
            .filter(|placed| placed.ranks.contains(&layout));
        let lanes = deployment.lanes.iter().filter(|lane| lane.rank == layout);
        let walks = declaration
            .walks
            .iter()
            .filter(|walk| walk.nodes.iter().any(|node| here(node)));
        Some(Self {
            rank,
            model: deployment.model.clone(),
            weights: deployment.weights.clone(),
            model_config: deployment.model_config.clone(),
            device: deployment.device,
            precision: deployment.precision,
            device_index: spec.device,
            active_thread_percentage: spec.active_thread_percentage,
            pinned_device_memory_bytes: spec.pinned_device_memory_bytes,
            max_seq_len: deployment.max_seq_len,
            nodes: nodes
                .map(|placed| NodePlan {
                    node: placed.node.clone(),
                    placement: placed.placement,
                })
                .collect(),
            lanes: lanes
                .map(|lane| LanePlan {
                    id: lane.id,
                    priority: lane.priority,
                    sms: lane.sms,
                    auto_sms: lane.auto_sms.clone(),
                    memory_bytes: budget::lane_bytes(deployment, declaration, layout, lane.id),
                    max_rows: lane.max_rows,
                })
                .collect(),
            resources: resources_of(deployment, declaration, layout),
            walks: walks.map(|walk| walk.name.clone()).collect(),
            chunks: deployment.chunks.clone(),
            remote_edges: remote_edges(deployment, declaration, layout, rank - layout),
            capture_buckets: deployment.capture_buckets.clone(),
            max_rows: deployment.limits.max_rows,
            max_prefill_tokens: deployment.limits.max_prefill_tokens,
            max_queue: deployment.limits.max_queue,
            max_frames: deployment.limits.max_frames,
            max_text_chars: deployment.limits.max_text_chars,
            stall_timeout: deployment.services.stall_timeout,
            drain_timeout: deployment.services.drain_timeout,
        })
    }
}

fn resources_of(deployment: &Deployment, declaration: &ModelDeclaration, rank: u32) -> Vec<ResourcePlan> {
    let owner = |key: &str| {
        let declares = |node: &str| {
            declaration
                .nodes
                .iter()
                .any(|decl| decl.name == node && decl.resources.iter().any(|k| k == key))
        };
        let owner = deployment
            .nodes
            .iter()
            .find(|placed| placed.ranks.contains(&rank) && declares(&placed.node))?;
        Some(owner.placement.lane_id())
    };
    let sizes = deployment.resources.iter().filter_map(|size| {
        let resource = declaration
            .resources
            .iter()
            .find(|resource| resource.key == size.key)?;
        Some(ResourcePlan {
            key: size.key.clone(),
            lane: owner(&size.key)?,
            slots: size.slots,
            page_size: size.page_size,
            bytes: budget::resource_bytes(resource, size.slots),
        })
    });
    sizes.collect()
}

/// Edges of `rank` of the first replica, with peers in the replica whose first rank is `replica_begins`.
fn remote_edges(
    deployment: &Deployment,
    declaration: &ModelDeclaration,
    rank: u32,
    replica_begins: u32,
) -> Vec<RemoteEdge> {
    let ranks_of_walks = |names: &[String]| -> BTreeSet<u32> {
        let walks = declaration.walks.iter().filter(|walk| names.contains(&walk.name));
        walks
            .flat_map(|walk: &WalkDecl| &walk.nodes)
            .flat_map(|node| deployment.ranks_of(node))
            .copied()
            .collect()
    };
    let streams = declaration.stream_edges.iter().map(|edge| {
        (
            &edge.name,
            EdgeKind::Stream,
            ranks_of_walks(&edge.from),
            ranks_of_walks(std::slice::from_ref(&edge.to)),
        )
    });
    let requests = declaration.request_edges.iter().map(|edge| {
        (
            &edge.name,
            EdgeKind::Request,
            ranks_of_walks(std::slice::from_ref(&edge.from)),
            ranks_of_walks(&edge.to),
        )
    });

    let mut remote = Vec::new();
    for (edge, kind, from, to) in streams.chain(requests) {
        let mut push = |peers: &BTreeSet<u32>, direction| {
            remote.extend(
                peers
                    .iter()
                    .filter(|&&peer| peer != rank)
                    .map(|&peer_rank| RemoteEdge {
                        edge: edge.clone(),
                        kind,
                        direction,
                        peer_rank: replica_begins + peer_rank,
                    }),
            );
        };
        if from.contains(&rank) {
            push(&to, Direction::To);
        }
        if to.contains(&rank) {
            push(&from, Direction::From);
        }
    }
    remote
}

/// One node of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// Node name.
    pub node: String,
    /// Chain, lane or auto.
    pub placement: Placement,
}

/// One lane of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LanePlan {
    /// 0 is the chain.
    pub id: u32,
    /// Stream priority.
    pub priority: Priority,
    /// SM partition of its stream; `None`: the whole device.
    pub sms: Option<u32>,
    /// Partitions that `lane: auto` may choose among; 0 is no partition.
    pub auto_sms: Vec<u32>,
    /// Bytes that its nodes and their resources take by their reports.
    pub memory_bytes: u64,
    /// Most rows of one of its steps.
    pub max_rows: u32,
}

/// One resource of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourcePlan {
    /// Resource key.
    pub key: String,
    /// The lane that owns it; 0 is the chain.
    pub lane: u32,
    /// Slots, or pages of a paged cache.
    pub slots: u32,
    /// Positions of a page; 0 unless paged.
    pub page_size: u32,
    /// Bytes in all, by its report.
    pub bytes: u64,
}

/// An edge with one end in another worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteEdge {
    /// Edge name, `codes`.
    pub edge: String,
    /// Stream or request edge.
    pub kind: EdgeKind,
    /// Which way it goes from here.
    pub direction: Direction,
    /// The worker at the other end.
    pub peer_rank: u32,
}

/// Stream or request edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EdgeKind {
    /// Items while both ends run.
    Stream,
    /// One whole result.
    Request,
}

/// Which way an edge goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Leaves to the peer.
    To,
    /// Comes from the peer.
    From,
}
