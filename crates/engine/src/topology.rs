//! What never changes while an engine runs: which walks, edges and resources of the model live here, and on
//! which lane. Made once from the configuration; refuses what the engine could not keep its promises for.

use std::sync::Arc;

use laneway_plan::declaration::{ChunkPolicy, Element, ModelDeclaration, WalkKind};

use crate::config::{AutoConfig, EngineConfig, Limits};
use crate::handle::Submission;
use crate::node::{Amount, Model, Payload, RowError, WalkId};
use crate::resource::Ask;

/// Lane 0.
pub(crate) const CHAIN: usize = 0;

/// A node of this worker.
#[derive(Debug)]
pub(crate) struct NodeInfo {
    pub(crate) name: Arc<str>,
    /// For one that moves, the lane that it may be on.
    pub(crate) lane: usize,
    pub(crate) auto: Option<AutoConfig>,
    /// Indices of its pools.
    pub(crate) pools: Vec<usize>,
    /// It runs the entry or the loop walk: what it needs is reserved when the request is admitted.
    pub(crate) reserves_at_admission: bool,
}

/// A walk of this worker.
#[derive(Debug)]
pub(crate) struct WalkInfo {
    /// Its number in the model's declaration.
    pub(crate) id: WalkId,
    pub(crate) name: Arc<str>,
    pub(crate) node: usize,
    pub(crate) lane: usize,
    pub(crate) kind: WalkKind,
    /// Stream edge that it makes items for.
    pub(crate) produces: Option<usize>,
    /// Stream edge that feeds it; for a prime walk that of the stream walk behind it.
    pub(crate) consumes: Option<usize>,
    /// Request edge that it makes the result of.
    pub(crate) delivers: Option<usize>,
    /// Request edges that it waits for.
    pub(crate) awaits: Vec<usize>,
    /// Its landing may send the listener an event.
    pub(crate) may_output: bool,
}

/// A stream edge with at least one end in this worker.
#[derive(Debug)]
pub(crate) struct EdgeInfo {
    pub(crate) name: Arc<str>,
    /// Consumer walk; `None`: in another worker.
    pub(crate) consumer: Option<usize>,
    /// Prime walk of the consumer's node.
    pub(crate) prime: Option<usize>,
    /// Some producer is in this worker.
    pub(crate) produced_here: bool,
    pub(crate) item_words: u32,
    pub(crate) chunk: ChunkPolicy,
    pub(crate) max_window: u32,
    pub(crate) capacity: u32,
}

impl EdgeInfo {
    /// Both ends are here: items pass through a ring on the device.
    pub(crate) fn has_ring(&self) -> bool {
        self.produced_here && self.consumer.is_some()
    }
}

/// A request edge.
#[derive(Debug)]
pub(crate) struct RequestEdgeInfo {
    pub(crate) name: Arc<str>,
    /// The walk that makes it; `None`: in another worker.
    pub(crate) from: Option<usize>,
}

/// A resource.
#[derive(Debug)]
pub(crate) struct PoolInfo {
    pub(crate) key: Arc<str>,
    pub(crate) lane: usize,
    pub(crate) slots: u32,
    pub(crate) element: Element,
    /// Elements of a slot.
    pub(crate) slot_elements: usize,
    pub(crate) page_size: u32,
    pub(crate) zero_on_release: bool,
    /// Pages outlive their request as long as there is room.
    pub(crate) keeps_prefixes: bool,
}

/// The static tables.
pub(crate) struct Topology {
    pub(crate) model: Arc<dyn Model>,
    pub(crate) limits: Limits,
    pub(crate) n_lanes: usize,
    pub(crate) nodes: Vec<NodeInfo>,
    pub(crate) walks: Vec<WalkInfo>,
    pub(crate) edges: Vec<EdgeInfo>,
    pub(crate) request_edges: Vec<RequestEdgeInfo>,
    pub(crate) pools: Vec<PoolInfo>,
    pub(crate) entry: Option<usize>,
    pub(crate) looping: Option<usize>,
}

impl std::fmt::Debug for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Topology")
            .field("nodes", &self.nodes)
            .field("walks", &self.walks)
            .field("edges", &self.edges)
            .field("pools", &self.pools)
            .finish_non_exhaustive()
    }
}

impl Topology {
    /// # Errors
    /// One sentence that names what the engine cannot run.
    pub(crate) fn new(config: &EngineConfig) -> Result<Self, String> {
        let declaration = config.model.declaration();
        if config.lanes.is_empty() {
            return Err("an engine needs lane 0, the chain".into());
        }
        let pools = pools(config, declaration)?;
        let mut nodes = nodes(config, declaration, &pools)?;
        let (mut walks, dropped) = walks(declaration, &nodes)?;
        let edges = stream_edges(config, declaration, &mut walks, &dropped)?;
        let request_edges = request_edges(declaration, &mut walks);
        for walk in &mut walks {
            let egress = walk.produces.is_some_and(|edge| edges[edge].consumer.is_none());
            walk.may_output = match walk.kind {
                WalkKind::Stream | WalkKind::Once => true,
                WalkKind::Prime => false,
                WalkKind::Entry | WalkKind::Loop => walk.produces.is_none() || egress,
            };
        }
        let only = |kind: WalkKind| -> Result<Option<usize>, String> {
            let mut found = (0..walks.len()).filter(|&walk| walks[walk].kind == kind);
            match (found.next(), found.next()) {
                (_, Some(second)) => Err(format!(
                    "walk {} is a second {kind:?} walk in one worker",
                    walks[second].name
                )),
                (first, None) => Ok(first),
            }
        };
        let (entry, looping) = (only(WalkKind::Entry)?, only(WalkKind::Loop)?);
        for walk in entry.iter().chain(&looping) {
            let walk = &walks[*walk];
            if walk.lane != CHAIN {
                return Err(format!(
                    "walk {} starts or loops, so it runs on the chain",
                    walk.name
                ));
            }
            nodes[walk.node].reserves_at_admission = true;
        }
        if looping.is_some() && entry.is_none() {
            return Err("a loop walk runs behind an entry walk of the same worker".into());
        }
        if edges.iter().filter(|edge| !edge.produced_here).count() > 1 {
            return Err("only one stream edge of a worker may be fed by another worker".into());
        }
        Ok(Self {
            model: config.model.clone(),
            limits: config.limits.clone(),
            n_lanes: config.lanes.len(),
            nodes,
            walks,
            edges,
            request_edges,
            pools,
            entry,
            looping,
        })
    }

    /// The stream edge whose items come from another worker.
    pub(crate) fn ingress_edge(&self) -> Option<&EdgeInfo> {
        self.edges.iter().find(|edge| !edge.produced_here)
    }

    /// The stream edges that walks of `node` produce to or consume from.
    pub(crate) fn edges_of(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.edges.len()).filter(move |&edge| {
            let mut walks = self.walks.iter().filter(|walk| walk.node == node);
            walks.any(|walk| walk.produces == Some(edge) || walk.consumes == Some(edge))
        })
    }

    /// What `node` must be granted for a request.
    pub(crate) fn needs(&self, node: usize, payload: &Payload) -> Vec<Ask> {
        let info = &self.nodes[node];
        let needs = self.model.needs(&info.name, payload);
        needs
            .into_iter()
            .filter_map(|need| {
                let pool = *info
                    .pools
                    .iter()
                    .find(|&&pool| *self.pools[pool].key == *need.resource)?;
                let slots = match need.amount {
                    Amount::Slots(slots) => slots,
                    Amount::Positions(positions) => positions.div_ceil(self.pools[pool].page_size.max(1)),
                };
                Some(Ask {
                    pool,
                    slots,
                    prefix: need.prefix,
                })
            })
            .collect()
    }

    /// Refuse what could never run here.
    pub(crate) fn check(&self, submission: &Submission) -> Result<(), RowError> {
        let refuse = |field: &str, message: String| {
            Err(RowError {
                invalid_argument: true,
                field: Some(field.into()),
                message,
            })
        };
        if let Some(chunk) = &submission.chunk {
            let limit = self
                .edges
                .iter()
                .map(|edge| edge.max_window)
                .min()
                .unwrap_or(u32::MAX);
            let sizes = || chunk.ramp.iter().chain([&chunk.first, &chunk.steady]);
            if sizes().any(|&size| size == 0 || size > limit) {
                return refuse(
                    "chunk",
                    format!("a window takes 1 to {limit} items, got {chunk:?}"),
                );
            }
        }
        for (edge, _) in &submission.results {
            if !self.request_edges.iter().any(|known| *known.name == **edge) {
                return refuse("results", format!("this worker has no request edge {edge}"));
            }
        }
        for node in 0..self.nodes.len() {
            for Ask { pool, slots, .. } in self.needs(node, &submission.payload) {
                let pool = &self.pools[pool];
                if slots > pool.slots {
                    let message = format!(
                        "the request needs {slots} slots of {}, which has {} in all",
                        pool.key, pool.slots
                    );
                    return Err(RowError {
                        invalid_argument: true,
                        field: None,
                        message,
                    });
                }
            }
        }
        Ok(())
    }
}

fn pools(config: &EngineConfig, declaration: &ModelDeclaration) -> Result<Vec<PoolInfo>, String> {
    let mut pools = Vec::new();
    for resource in &declaration.resources {
        let mut owners = config.nodes.iter().filter(|placed| {
            declaration
                .nodes
                .iter()
                .any(|node| node.name == placed.node && node.resources.contains(&resource.key))
        });
        let Some(owner) = owners.next() else { continue };
        if let Some(second) = owners.next() {
            return Err(format!(
                "resource {} is declared by nodes {} and {}: it belongs to one",
                resource.key, owner.node, second.node
            ));
        }
        let size = config
            .resources
            .iter()
            .find(|size| size.key == resource.key)
            .ok_or_else(|| format!("resource {} has no size", resource.key))?;
        pools.push(PoolInfo {
            key: resource.key.as_str().into(),
            lane: owner.lane,
            slots: size.slots,
            element: resource.element,
            slot_elements: resource.report.bytes_per_slot.div_ceil(resource.element.bytes()) as usize,
            page_size: size.page_size,
            zero_on_release: resource.zero_on_release,
            keeps_prefixes: resource.report.prefix_cache,
        });
    }
    if let Some(pool) = pools
        .iter()
        .find(|pool| pool.keeps_prefixes && pool.lane != CHAIN)
    {
        return Err(format!(
            "resource {} keeps a prefix cache, so it belongs on the chain, not on lane {}",
            pool.key, pool.lane
        ));
    }
    if let Some(pool) = pools
        .iter()
        .find(|pool| pool.keeps_prefixes && pool.zero_on_release)
    {
        return Err(format!(
            "resource {} cannot both be zeroed on release and keep a prefix cache",
            pool.key
        ));
    }
    for (resource, pool) in declaration
        .resources
        .iter()
        .filter_map(|resource| Some((resource, pools.iter().find(|pool| *pool.key == *resource.key)?)))
    {
        for key in &resource.report.depends_on {
            if let Some(other) = pools.iter().find(|other| *other.key == **key)
                && other.lane != pool.lane
            {
                return Err(format!(
                    "resource {} on lane {} depends on {key} on lane {}",
                    pool.key, pool.lane, other.lane
                ));
            }
        }
    }
    Ok(pools)
}

fn nodes(
    config: &EngineConfig,
    declaration: &ModelDeclaration,
    pools: &[PoolInfo],
) -> Result<Vec<NodeInfo>, String> {
    let mut nodes: Vec<NodeInfo> = Vec::new();
    for placed in &config.nodes {
        let declared = declaration
            .nodes
            .iter()
            .find(|node| node.name == placed.node)
            .ok_or_else(|| format!("model {} has no node {}", declaration.model, placed.node))?;
        if placed.lane >= config.lanes.len() {
            return Err(format!(
                "node {} is on lane {}, which is not there",
                placed.node, placed.lane
            ));
        }
        if let Some(auto) = &placed.auto {
            check_auto(&placed.node, placed.lane, auto)?;
        }
        if nodes.iter().any(|node| *node.name == *placed.node) {
            return Err(format!("node {} is placed twice", placed.node));
        }
        nodes.push(NodeInfo {
            name: placed.node.as_str().into(),
            lane: placed.lane,
            auto: placed.auto.clone(),
            pools: (0..pools.len())
                .filter(|&pool| declared.resources.iter().any(|key| *pools[pool].key == **key))
                .collect(),
            reserves_at_admission: false,
        });
    }
    Ok(nodes)
}

/// Refuse what a node could not choose among.
fn check_auto(node: &str, lane: usize, auto: &AutoConfig) -> Result<(), String> {
    if lane == CHAIN {
        return Err(format!(
            "node {node} is left to measurement on lane 0, the chain: name the lane that it may move to"
        ));
    }
    let repeated = (1..auto.sms.len()).find(|&at| auto.sms[..at].contains(&auto.sms[at]));
    if let Some(at) = repeated {
        return Err(format!(
            "node {node} is to choose among partitions of {:?} SMs, of which {} is named twice",
            auto.sms, auto.sms[at]
        ));
    }
    Ok(())
}

/// The walks of this worker, and for each walk of the declaration its place among them.
fn walks(
    declaration: &ModelDeclaration,
    nodes: &[NodeInfo],
) -> Result<(Vec<WalkInfo>, Vec<Option<usize>>), String> {
    let mut walks = Vec::new();
    let mut local = vec![None; declaration.walks.len()];
    for (number, walk) in declaration.walks.iter().enumerate() {
        let [name] = walk.nodes.as_slice() else {
            return Err(format!(
                "walk {} steps {} nodes; the engine runs walks of one",
                walk.name,
                walk.nodes.len()
            ));
        };
        let Some(node) = nodes.iter().position(|node| *node.name == **name) else {
            continue;
        };
        local[number] = Some(walks.len());
        walks.push(WalkInfo {
            id: WalkId(number),
            name: walk.name.as_str().into(),
            node,
            lane: nodes[node].lane,
            kind: walk.kind,
            produces: None,
            consumes: None,
            delivers: None,
            awaits: Vec::new(),
            may_output: false,
        });
    }
    Ok((walks, local))
}

fn stream_edges(
    config: &EngineConfig,
    declaration: &ModelDeclaration,
    walks: &mut [WalkInfo],
    local: &[Option<usize>],
) -> Result<Vec<EdgeInfo>, String> {
    let find = |name: &str| -> Result<Option<usize>, String> {
        let number = declaration.walks.iter().position(|walk| walk.name == name);
        number
            .map(|number| local[number])
            .ok_or_else(|| format!("an edge names walk {name}, which is not declared"))
    };
    let mut edges = Vec::new();
    for edge in &declaration.stream_edges {
        let consumer = find(&edge.to)?;
        let mut producers = Vec::new();
        for from in &edge.from {
            producers.extend(find(from)?);
        }
        if consumer.is_none() && producers.is_empty() {
            continue;
        }
        let chunk = config.chunks.get(&edge.name).unwrap_or(&edge.chunk).clone();
        let max_window = edge.max_window.max(1);
        if edge.capacity < max_window || chunk.widest() > max_window {
            return Err(format!(
                "edge {} holds {} items and allows windows of {max_window}, asked for {}: \
                 the widest window must fit both",
                edge.name,
                edge.capacity,
                chunk.widest()
            ));
        }
        let number = edges.len();
        for &producer in &producers {
            walks[producer].produces = Some(number);
        }
        let mut prime = None;
        if let Some(consumer) = consumer {
            walks[consumer].consumes = Some(number);
            let node = walks[consumer].node;
            prime = (0..walks.len())
                .find(|&walk| walks[walk].kind == WalkKind::Prime && walks[walk].node == node);
            if let Some(prime) = prime {
                walks[prime].consumes = Some(number);
            }
        }
        edges.push(EdgeInfo {
            name: edge.name.as_str().into(),
            consumer,
            prime,
            produced_here: !producers.is_empty(),
            item_words: edge.item_words,
            chunk,
            max_window,
            capacity: edge.capacity,
        });
    }
    Ok(edges)
}

fn request_edges(declaration: &ModelDeclaration, walks: &mut [WalkInfo]) -> Vec<RequestEdgeInfo> {
    let mut edges = Vec::new();
    for edge in &declaration.request_edges {
        let number = edges.len();
        let mut from = None;
        for (index, walk) in walks.iter_mut().enumerate() {
            if *walk.name == *edge.from {
                walk.delivers = Some(number);
                from = Some(index);
            }
            if edge.to.iter().any(|to| **to == *walk.name) {
                walk.awaits.push(number);
            }
        }
        edges.push(RequestEdgeInfo {
            name: edge.name.as_str().into(),
            from,
        });
    }
    edges
}
