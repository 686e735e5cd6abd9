//! Bytes that nodes, resources and lanes take, by what they report.

use std::collections::BTreeSet;

use crate::declaration::{ModelDeclaration, NodeDecl, ResourceDecl};
use crate::deployment::{Deployment, DeviceKind, LaneSpec};
use crate::inventory::DeviceSpec;
use crate::raw::ByteSize;
use crate::violation::{Reason, Violation};

/// What a CUDA process takes besides its allocations: context, libraries, captured graphs.
pub const CUDA_CONTEXT_BYTES: u64 = 1 << 30;

/// Bytes of a word of a stream edge's item.
const WORD_BYTES: u64 = 4;

/// Bytes of a node: its weights, and workspace for the largest batch of its lane.
pub fn node_bytes(node: &NodeDecl, max_rows: u32) -> u64 {
    let of_rows = node.workspace_bytes_per_row.saturating_mul(u64::from(max_rows));
    node.weight_bytes
        .saturating_add(node.workspace_bytes)
        .saturating_add(of_rows)
}

/// Bytes of a resource of this many slots.
pub fn resource_bytes(resource: &ResourceDecl, slots: u32) -> u64 {
    let pool = resource.report.bytes_per_slot.saturating_mul(u64::from(slots));
    resource.report.fixed_bytes.saturating_add(pool)
}

/// Bytes of one lane of a rank of the first replica: its nodes and the resources that they declare.
pub fn lane_bytes(deployment: &Deployment, declaration: &ModelDeclaration, rank: u32, lane: u32) -> u64 {
    let max_rows = deployment
        .lanes
        .iter()
        .find(|spec| spec.rank == rank && spec.id == lane)
        .map_or(deployment.limits.max_rows, |spec| spec.max_rows);
    let on_lane = deployment
        .nodes
        .iter()
        .filter(|placed| placed.ranks.contains(&rank) && placed.placement.lane_id() == lane);
    let nodes: Vec<&NodeDecl> = on_lane
        .filter_map(|placed| declaration.nodes.iter().find(|node| node.name == placed.node))
        .collect();
    let keys: BTreeSet<&str> = nodes
        .iter()
        .flat_map(|node| &node.resources)
        .map(String::as_str)
        .collect();

    let of_nodes = nodes.iter().map(|node| node_bytes(node, max_rows));
    let of_resources = deployment
        .resources
        .iter()
        .filter(|size| keys.contains(size.key.as_str()))
        .filter_map(|size| {
            let resource = declaration
                .resources
                .iter()
                .find(|resource| resource.key == size.key)?;
            Some(resource_bytes(resource, size.slots))
        });
    of_nodes.chain(of_resources).fold(0, u64::saturating_add)
}

/// Bytes of the device rings of the stream edges that walks of this rank of the first replica consume.
pub fn ring_bytes(deployment: &Deployment, declaration: &ModelDeclaration, rank: u32) -> u64 {
    let consumes = |walk: &str| {
        let walk = declaration.walks.iter().find(|decl| decl.name == walk);
        walk.is_some_and(|walk| {
            walk.nodes
                .iter()
                .any(|node| deployment.ranks_of(node).contains(&rank))
        })
    };
    let edges = declaration.stream_edges.iter().filter(|edge| consumes(&edge.to));
    let words = edges.map(|edge| u64::from(edge.capacity).saturating_mul(u64::from(edge.item_words)));
    words
        .fold(0, u64::saturating_add)
        .saturating_mul(WORD_BYTES * u64::from(deployment.limits.max_rows))
}

/// Bytes of one worker: its lanes, and the rings of the stream edges that its walks consume.
pub fn rank_bytes(deployment: &Deployment, declaration: &ModelDeclaration, rank: u32) -> u64 {
    let rank = deployment.layout_rank(rank);
    let lanes = deployment.lanes.iter().filter(|lane| lane.rank == rank);
    let lanes = lanes.map(|lane| lane_bytes(deployment, declaration, rank, lane.id));
    let context = if deployment.device == DeviceKind::Cuda {
        CUDA_CONTEXT_BYTES
    } else {
        0
    };
    lanes
        .chain([ring_bytes(deployment, declaration, rank), context])
        .fold(0, u64::saturating_add)
}

/// Lane `lane` needs more than its budget.
pub(crate) fn lane_violation(key: String, lane: &LaneSpec, needed: u64, budget: u64) -> Violation {
    let (needed, budget) = (ByteSize(needed), ByteSize(budget));
    let message = format!(
        "lane {} of rank {} needs {needed} of its {budget}",
        lane.id, lane.rank
    );
    let remedy = format!(
        "write `memory: {}` or more, or give its resources fewer slots",
        needed.0
    );
    Violation::new(Reason::LaneMemoryExceeded, key, message, remedy)
}

/// A worker needs more than it may allocate under MPS.
pub(crate) fn pinned_violation(rank: u32, needed: u64, bound: u64) -> Violation {
    let message = format!(
        "rank {rank} may allocate {} and needs {}",
        ByteSize(bound),
        ByteSize(needed)
    );
    let remedy = format!("write `pinned_device_memory: {needed}` or more, or give its resources fewer slots");
    let key = format!("mps.ranks.{rank}.pinned_device_memory");
    Violation::new(Reason::DeviceMemoryExceeded, key, message, remedy)
}

/// Whether the workers of these ranks fit on the device together.
pub(crate) fn device_violation(
    deployment: &Deployment,
    declaration: &ModelDeclaration,
    device: &DeviceSpec,
    ranks: &[u32],
) -> Option<Violation> {
    let needed = ranks
        .iter()
        .map(|&rank| rank_bytes(deployment, declaration, rank))
        .fold(0, u64::saturating_add);
    if needed <= device.memory_bytes {
        return None;
    }
    let on_device = |key: &str| {
        let declares = |node: &NodeDecl| node.resources.iter().any(|name| name == key);
        let nodes = declaration.nodes.iter().filter(|node| declares(node));
        nodes
            .flat_map(|node| deployment.ranks_of(&node.name))
            .any(|rank| ranks.iter().any(|&on| deployment.layout_rank(on) == *rank))
    };
    let sizes = deployment
        .resources
        .iter()
        .filter(|size| on_device(&size.key))
        .filter_map(|size| {
            let resource = declaration
                .resources
                .iter()
                .find(|resource| resource.key == size.key)?;
            Some((size, resource, resource_bytes(resource, size.slots)))
        });
    let largest = sizes.max_by_key(|(.., bytes)| *bytes);

    let (total, has) = (ByteSize(needed), ByteSize(device.memory_bytes));
    let mut message = format!("{} has {has}; the workers on it need {total}", device.name);
    let Some((size, resource, bytes)) = largest else {
        let remedy = "use a larger device";
        return Some(Violation::new(Reason::DeviceMemoryExceeded, "", message, remedy));
    };
    message.push_str(&format!(", {} of it for `{}`", ByteSize(bytes), size.key));
    let unit = if size.page_size > 0 { "pages" } else { "slots" };
    let spare = bytes
        .saturating_sub(needed - device.memory_bytes)
        .saturating_sub(resource.report.fixed_bytes);
    let fitting = spare / resource.report.bytes_per_slot.max(1);
    let remedy = match fitting {
        0 => format!(
            "fewer {unit} of `{}` are not enough: use a larger device",
            size.key
        ),
        _ => format!(
            "write `{}: {{ {unit}: {fitting} }}` or fewer under `resources`",
            size.key
        ),
    };
    let key = format!("resources.{}.{unit}", size.key);
    Some(Violation::new(Reason::DeviceMemoryExceeded, key, message, remedy).resource(&size.key))
}
