//! Bytes that nodes, resources and lanes take, by what they report.

use std::collections::BTreeSet;

use crate::declaration::{ModelDeclaration, NodeDecl, ResourceDecl};
use crate::deployment::Deployment;

/// Bytes of a node: its weights, and workspace for the largest batch of its lane.
pub fn node_bytes(node: &NodeDecl, max_rows: u32) -> u64 {
    let workspace = node.workspace_bytes_per_row.saturating_mul(u64::from(max_rows));
    node.weight_bytes.saturating_add(workspace)
}

/// Bytes of a resource of this many slots.
pub fn resource_bytes(resource: &ResourceDecl, slots: u32) -> u64 {
    let pool = resource.report.bytes_per_slot.saturating_mul(u64::from(slots));
    resource.report.fixed_bytes.saturating_add(pool)
}

/// Bytes of one lane of a rank: its nodes and the resources that they declare.
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

/// Bytes of the device rings of the stream edges, all of them in the rank that consumes them.
pub fn ring_bytes(deployment: &Deployment, declaration: &ModelDeclaration) -> u64 {
    let words = declaration
        .stream_edges
        .iter()
        .map(|edge| u64::from(edge.capacity).saturating_mul(u64::from(edge.item_words)));
    words
        .fold(0, u64::saturating_add)
        .saturating_mul(4 * u64::from(deployment.limits.max_rows))
}
