//! A worker plan on its way from the engine-manager to the worker, and a device inventory on its way back.

use std::str::FromStr;
use std::time::Duration;

use laneway_plan::declaration::ChunkPolicy;
use laneway_plan::deployment::{DeviceKind, ModelConfig, Placement, Precision, Priority, Weights};
use laneway_plan::worker_plan::{
    Direction, EdgeKind, LanePlan, NodePlan, RemoteEdge, ResourcePlan, WorkerPlan,
};
use laneway_plan::{DeviceInventory, DeviceSpec};

use crate::v1;

#[cfg(test)]
mod tests;

/// A plan that a peer of another version sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("worker plan field `{field}`: {message}; run engine-manager and worker from the same build")]
pub struct PlanDecodeError {
    /// Field of `laneway.v1.WorkerPlan`.
    pub field: &'static str,
    /// What is wrong with it.
    pub message: String,
}

fn unspecified(field: &'static str) -> PlanDecodeError {
    PlanDecodeError {
        field,
        message: "holds a value that this build does not know".into(),
    }
}

impl From<&WorkerPlan> for v1::WorkerPlan {
    fn from(plan: &WorkerPlan) -> Self {
        let device = match plan.device {
            DeviceKind::Cpu => v1::DeviceKind::Cpu,
            DeviceKind::Cuda => v1::DeviceKind::Cuda,
        };
        let precision = match plan.precision {
            Precision::Bf16 => v1::Precision::Bf16,
            Precision::F32 => v1::Precision::F32,
        };
        let chunk = |(edge, policy): (&String, &ChunkPolicy)| (edge.clone(), policy.into());
        v1::WorkerPlan {
            rank: plan.rank,
            model: plan.model.clone(),
            weights: plan.weights.to_string(),
            model_config: plan
                .model_config
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            device: device.into(),
            device_index: plan.device_index,
            active_thread_percentage: plan.active_thread_percentage,
            pinned_device_memory_bytes: plan.pinned_device_memory_bytes,
            max_seq_len: plan.max_seq_len,
            nodes: plan.nodes.iter().map(Into::into).collect(),
            lanes: plan.lanes.iter().map(Into::into).collect(),
            resources: plan.resources.iter().map(Into::into).collect(),
            walks: plan.walks.clone(),
            chunks: plan.chunks.iter().map(chunk).collect(),
            remote_edges: plan.remote_edges.iter().map(Into::into).collect(),
            capture_buckets: plan.capture_buckets.clone(),
            max_rows: plan.max_rows,
            max_prefill_tokens: plan.max_prefill_tokens,
            max_queue: plan.max_queue,
            max_frames: plan.max_frames,
            max_text_chars: plan.max_text_chars,
            stall_timeout_ms: plan.stall_timeout.as_millis() as u64,
            drain_timeout_ms: plan.drain_timeout.as_millis() as u64,
            precision: precision.into(),
        }
    }
}

impl TryFrom<v1::WorkerPlan> for WorkerPlan {
    type Error = PlanDecodeError;

    fn try_from(plan: v1::WorkerPlan) -> Result<Self, PlanDecodeError> {
        let device = match plan.device() {
            v1::DeviceKind::Cpu => DeviceKind::Cpu,
            v1::DeviceKind::Cuda => DeviceKind::Cuda,
            v1::DeviceKind::Unspecified => return Err(unspecified("device")),
        };
        let precision = match plan.precision() {
            v1::Precision::Bf16 => Precision::Bf16,
            v1::Precision::F32 => Precision::F32,
            v1::Precision::Unspecified => return Err(unspecified("precision")),
        };
        let weights = Weights::from_str(&plan.weights).map_err(|message| PlanDecodeError {
            field: "weights",
            message,
        })?;
        let model_config = match plan.model_config.as_str() {
            "" => None,
            text => Some(ModelConfig::from(text)),
        };
        Ok(WorkerPlan {
            rank: plan.rank,
            model: plan.model,
            weights,
            model_config,
            device,
            precision,
            device_index: plan.device_index,
            active_thread_percentage: plan.active_thread_percentage,
            pinned_device_memory_bytes: plan.pinned_device_memory_bytes,
            max_seq_len: plan.max_seq_len,
            nodes: plan.nodes.into_iter().map(Into::into).collect(),
            lanes: plan
                .lanes
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            resources: plan.resources.into_iter().map(Into::into).collect(),
            walks: plan.walks,
            chunks: plan
                .chunks
                .into_iter()
                .map(|(edge, policy)| (edge, policy.into()))
                .collect(),
            remote_edges: plan
                .remote_edges
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            capture_buckets: plan.capture_buckets,
            max_rows: plan.max_rows,
            max_prefill_tokens: plan.max_prefill_tokens,
            max_queue: plan.max_queue,
            max_frames: plan.max_frames,
            max_text_chars: plan.max_text_chars,
            stall_timeout: Duration::from_millis(plan.stall_timeout_ms),
            drain_timeout: Duration::from_millis(plan.drain_timeout_ms),
        })
    }
}

impl From<&NodePlan> for v1::PlannedNode {
    fn from(node: &NodePlan) -> Self {
        let auto = matches!(node.placement, Placement::Auto(_));
        v1::PlannedNode {
            node: node.node.clone(),
            lane: node.placement.lane_id(),
            auto,
        }
    }
}

impl From<v1::PlannedNode> for NodePlan {
    fn from(node: v1::PlannedNode) -> Self {
        let placement = match (node.lane, node.auto) {
            (lane, true) => Placement::Auto(lane),
            (0, false) => Placement::Chain,
            (lane, false) => Placement::Lane(lane),
        };
        NodePlan {
            node: node.node,
            placement,
        }
    }
}

impl From<&LanePlan> for v1::PlannedLane {
    fn from(lane: &LanePlan) -> Self {
        let priority = match lane.priority {
            Priority::Low => v1::StreamPriority::Low,
            Priority::Normal => v1::StreamPriority::Normal,
            Priority::High => v1::StreamPriority::High,
        };
        v1::PlannedLane {
            id: lane.id,
            priority: priority.into(),
            sms: lane.sms,
            auto_sms: lane.auto_sms.clone(),
            memory_bytes: lane.memory_bytes,
            max_rows: lane.max_rows,
        }
    }
}

impl TryFrom<v1::PlannedLane> for LanePlan {
    type Error = PlanDecodeError;

    fn try_from(lane: v1::PlannedLane) -> Result<Self, PlanDecodeError> {
        let priority = match lane.priority() {
            v1::StreamPriority::Low => Priority::Low,
            v1::StreamPriority::Normal => Priority::Normal,
            v1::StreamPriority::High => Priority::High,
            v1::StreamPriority::Unspecified => return Err(unspecified("lanes.priority")),
        };
        Ok(LanePlan {
            id: lane.id,
            priority,
            sms: lane.sms,
            auto_sms: lane.auto_sms,
            memory_bytes: lane.memory_bytes,
            max_rows: lane.max_rows,
        })
    }
}

impl From<&ResourcePlan> for v1::PlannedResource {
    fn from(resource: &ResourcePlan) -> Self {
        let ResourcePlan {
            key,
            lane,
            slots,
            page_size,
            bytes,
        } = resource.clone();
        v1::PlannedResource {
            key,
            lane,
            slots,
            page_size,
            bytes,
        }
    }
}

impl From<v1::PlannedResource> for ResourcePlan {
    fn from(resource: v1::PlannedResource) -> Self {
        let v1::PlannedResource {
            key,
            lane,
            slots,
            page_size,
            bytes,
        } = resource;
        ResourcePlan {
            key,
            lane,
            slots,
            page_size,
            bytes,
        }
    }
}

impl From<&RemoteEdge> for v1::RemoteEdge {
    fn from(edge: &RemoteEdge) -> Self {
        let kind = match edge.kind {
            EdgeKind::Stream => v1::EdgeKind::Stream,
            EdgeKind::Request => v1::EdgeKind::Request,
        };
        let direction = match edge.direction {
            Direction::To => v1::EdgeDirection::To,
            Direction::From => v1::EdgeDirection::From,
        };
        v1::RemoteEdge {
            edge: edge.edge.clone(),
            kind: kind.into(),
            direction: direction.into(),
            peer_rank: edge.peer_rank,
        }
    }
}

impl TryFrom<v1::RemoteEdge> for RemoteEdge {
    type Error = PlanDecodeError;

    fn try_from(edge: v1::RemoteEdge) -> Result<Self, PlanDecodeError> {
        let kind = match edge.kind() {
            v1::EdgeKind::Stream => EdgeKind::Stream,
            v1::EdgeKind::Request => EdgeKind::Request,
            v1::EdgeKind::Unspecified => return Err(unspecified("remote_edges.kind")),
        };
        let direction = match edge.direction() {
            v1::EdgeDirection::To => Direction::To,
            v1::EdgeDirection::From => Direction::From,
            v1::EdgeDirection::Unspecified => return Err(unspecified("remote_edges.direction")),
        };
        Ok(RemoteEdge {
            edge: edge.edge,
            kind,
            direction,
            peer_rank: edge.peer_rank,
        })
    }
}

impl From<&ChunkPolicy> for v1::ChunkPolicy {
    fn from(policy: &ChunkPolicy) -> Self {
        let ChunkPolicy { first, ramp, steady } = policy.clone();
        v1::ChunkPolicy { first, ramp, steady }
    }
}

impl From<v1::ChunkPolicy> for ChunkPolicy {
    fn from(policy: v1::ChunkPolicy) -> Self {
        let v1::ChunkPolicy { first, ramp, steady } = policy;
        ChunkPolicy { first, ramp, steady }
    }
}

impl From<&DeviceSpec> for v1::DeviceSpec {
    fn from(device: &DeviceSpec) -> Self {
        let DeviceSpec {
            name,
            memory_bytes,
            sms,
            partition_granularity,
        } = device.clone();
        v1::DeviceSpec {
            name,
            memory_bytes,
            sms,
            partition_granularity,
        }
    }
}

impl From<v1::DeviceSpec> for DeviceSpec {
    fn from(device: v1::DeviceSpec) -> Self {
        let v1::DeviceSpec {
            name,
            memory_bytes,
            sms,
            partition_granularity,
        } = device;
        DeviceSpec {
            name,
            memory_bytes,
            sms,
            partition_granularity,
        }
    }
}

/// The devices that a worker reports.
pub fn inventory(devices: Vec<v1::DeviceSpec>) -> DeviceInventory {
    DeviceInventory {
        devices: devices.into_iter().map(Into::into).collect(),
        ..DeviceInventory::default()
    }
}
