//! What may live on a lane: one function for each row of the table, decided from what nodes, walks and
//! resources report and never from a resource's kind.
//!
//! The caller has matched the configuration's groups with the model's nodes; every node here exists. Several
//! nodes on one lane of one worker take turns on one stream and may share what they like.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use crate::declaration::{ModelDeclaration, NodeDecl, ResourceReport, WalkDecl, WalkKind};
use crate::violation::{Reason, Violation};

/// A node and where the configuration puts it.
#[derive(Debug, Clone)]
pub(crate) struct Assigned<'a> {
    pub(crate) node: &'a NodeDecl,
    pub(crate) ranks: Vec<u32>,
    /// 0 is the chain; `lane: auto` counts as its lane.
    pub(crate) lane: u32,
    /// Key path that a violation points to.
    pub(crate) key: String,
}

impl Assigned<'_> {
    /// Whether both run on one stream of one worker.
    fn shares_stream_with(&self, other: &Assigned<'_>) -> bool {
        self.lane == other.lane && self.ranks == other.ranks
    }

    fn refuse(&self, reason: Reason, message: String, remedy: &str) -> Violation {
        Violation::new(reason, self.key.clone(), message, remedy).node(&self.node.name)
    }
}

/// Every violation of the table's rows 2 to 14, of lane numbering, and of resources across workers.
pub(crate) fn violations(declaration: &ModelDeclaration, assigned: &[Assigned<'_>]) -> Vec<Violation> {
    let rules = Rules {
        declaration,
        assigned,
    };
    let mut found = Vec::new();
    for node in assigned.iter().filter(|node| node.lane > 0) {
        rules.parallel(node, &mut found);
        rules.walks(node, &mut found);
        rules.postprocessing(node, &mut found);
        rules.alone(node, &mut found);
        rules.never_scheduled(node, &mut found);
        rules.shared(node, &mut found);
        rules.reports(node, &mut found);
    }
    rules.depends(&mut found);
    rules.lane_ids(&mut found);
    rules.across_workers(&mut found);
    found
}

struct Rules<'a> {
    declaration: &'a ModelDeclaration,
    assigned: &'a [Assigned<'a>],
}

const TO_THE_CHAIN: &str = "leave `lane` out: the node then runs on the chain";

impl<'a> Rules<'a> {
    fn report(&self, key: &str) -> Option<&'a ResourceReport> {
        self.declaration
            .resources
            .iter()
            .find(|resource| resource.key == key)
            .map(|resource| &resource.report)
    }

    /// What `key` depends on, directly or through others, without itself.
    fn dependencies(&self, key: &'a str) -> BTreeSet<&'a str> {
        let mut seen = BTreeSet::new();
        let mut queue = vec![key];
        while let Some(next) = queue.pop() {
            for dependency in self
                .report(next)
                .into_iter()
                .flat_map(|report| &report.depends_on)
            {
                if dependency != key && seen.insert(dependency.as_str()) {
                    queue.push(dependency);
                }
            }
        }
        seen
    }

    /// Everything that a step of the node may touch, each with the declared resource that leads to it.
    fn touched(&self, node: &'a NodeDecl) -> BTreeMap<&'a str, &'a str> {
        let mut touched: BTreeMap<&str, &str> = node
            .resources
            .iter()
            .map(|key| (key.as_str(), key.as_str()))
            .collect();
        for key in &node.resources {
            for dependency in self.dependencies(key) {
                touched.entry(dependency).or_insert(key);
            }
        }
        touched
    }

    fn walks_of(&self, node: &'a NodeDecl) -> impl Iterator<Item = &'a WalkDecl> {
        self.declaration
            .walks
            .iter()
            .filter(|walk| walk.nodes.contains(&node.name))
    }

    fn parallel(&self, node: &Assigned<'_>, found: &mut Vec<Violation>) {
        let ranks = node.node.parallel_ranks.max(node.ranks.len() as u32);
        if ranks > 1 {
            let message = format!(
                "`{}` steps over {ranks} ranks together; a lane of one worker does not",
                node.node.name
            );
            found.push(node.refuse(Reason::LaneParallelNode, message, TO_THE_CHAIN));
        }
    }

    fn walks(&self, node: &Assigned<'a>, found: &mut Vec<Violation>) {
        for walk in self.walks_of(node.node) {
            if walk.nodes.len() > 1 || walk.kind == WalkKind::Loop {
                let what = match walk.kind {
                    WalkKind::Loop => "loops".to_owned(),
                    _ => format!("steps {}", walk.nodes.join(", ")),
                };
                let message = format!(
                    "walk `{}` {what}: a lane runs one node's step, not a graph",
                    walk.name
                );
                found.push(node.refuse(Reason::LaneWalkIsGraph, message, TO_THE_CHAIN));
            }
            let combined = self.declaration.walks.iter().find(|other| {
                walk.combined_with.as_ref() == Some(&other.name)
                    || other.combined_with.as_ref() == Some(&walk.name)
            });
            if let Some(other) = combined {
                let message = format!(
                    "walk `{}` is combined with `{}` into one forward: a lane runs one node's step",
                    walk.name, other.name
                );
                found.push(node.refuse(Reason::LaneWalkCombined, message, TO_THE_CHAIN));
            }
            if walk.state_across_requests {
                let message = format!(
                    "walk `{}` keeps its state across requests: its slot would never free",
                    walk.name
                );
                found.push(node.refuse(Reason::LaneStateAcrossRequests, message, TO_THE_CHAIN));
            }
        }
    }

    fn postprocessing(&self, node: &Assigned<'_>, found: &mut Vec<Violation>) {
        let needs = match (node.node.stop_check, node.node.output_spans) {
            (false, false) => return,
            (true, false) => "a stop check",
            (false, true) => "output spans",
            (true, true) => "a stop check and output spans",
        };
        let message = format!(
            "`{}` has {needs}, which only the chain's postprocessing does",
            node.node.name
        );
        found.push(node.refuse(Reason::LaneChainPostprocessing, message, TO_THE_CHAIN));
    }

    fn alone(&self, node: &Assigned<'_>, found: &mut Vec<Violation>) {
        let chain_of = |rank: &u32| {
            self.assigned
                .iter()
                .any(|other| other.lane == 0 && other.ranks.contains(rank))
        };
        if let Some(rank) = node.ranks.iter().find(|rank| !chain_of(rank)) {
            let message = format!(
                "nothing runs on the chain of rank {rank}: `{}` has nothing to run beside",
                node.node.name
            );
            let remedy = "leave `lane` out: alone on its worker, the node is that worker's chain";
            found.push(node.refuse(Reason::LaneWithoutChain, message, remedy));
        }
    }

    fn never_scheduled(&self, node: &Assigned<'a>, found: &mut Vec<Violation>) {
        let scheduled = self.walks_of(node.node).any(|walk| {
            let fed = self
                .declaration
                .stream_edges
                .iter()
                .any(|edge| edge.to == walk.name);
            fed || self
                .declaration
                .request_edges
                .iter()
                .any(|edge| edge.from == walk.name)
        });
        if !scheduled {
            let message = format!(
                "neither a stream edge feeds `{}` nor a request edge starts it: nothing would schedule it on a lane",
                node.node.name
            );
            found.push(node.refuse(Reason::LaneNeverScheduled, message, TO_THE_CHAIN));
        }
    }

    fn shared(&self, node: &Assigned<'a>, found: &mut Vec<Violation>) {
        for key in &node.node.resources {
            let elsewhere = self
                .assigned
                .iter()
                .filter(|other| !node.shares_stream_with(other));
            let mut sharers: Vec<String> = elsewhere
                .filter(|other| other.node.resources.contains(key))
                .map(|other| format!("`{}` on {}", other.node.name, place(other)))
                .collect();
            let reported = self
                .report(key)
                .into_iter()
                .flat_map(|report| &report.shared_with_ranks);
            sharers.extend(
                reported
                    .filter(|rank| !node.ranks.contains(rank))
                    .map(|rank| format!("rank {rank}")),
            );
            if !sharers.is_empty() {
                let message = format!(
                    "resource `{key}` is shared with {}: two streams would order its writes differently",
                    sharers.join(", ")
                );
                let remedy = "put all nodes that share it on one lane, or leave `lane` out";
                found.push(
                    node.refuse(Reason::LaneResourceShared, message, remedy)
                        .resource(key),
                );
            }
        }
    }

    /// Rows 10 to 13, for what the node declares and for everything that this depends on.
    fn reports(&self, node: &Assigned<'a>, found: &mut Vec<Violation>) {
        for (key, through) in self.touched(node.node) {
            let Some(report) = self.report(key) else { continue };
            let name = if key == through {
                format!("`{key}`")
            } else {
                format!("`{key}` (through `{through}`)")
            };
            let mut refuse = |reason, what: &str| {
                let message = format!("resource {name} {what}");
                found.push(node.refuse(reason, message, TO_THE_CHAIN).resource(key));
            };
            if report.prefix_cache {
                refuse(
                    Reason::LanePrefixCache,
                    "keeps a prefix cache, which only the chain can",
                );
            }
            if report.evicts {
                refuse(
                    Reason::LaneEvictsOrMoved,
                    "takes state from live requests under memory pressure",
                );
            }
            if report.moved_outside_step {
                refuse(
                    Reason::LaneEvictsOrMoved,
                    "has its state moved by the main thread outside a step",
                );
            }
            if report.stages_host_rows {
                refuse(Reason::LaneStagesHostRows, "stages host rows for a later step");
            }
            if let Some(cache) = &report.snapshots_keyed_on {
                refuse(
                    Reason::LaneSnapshotPool,
                    &format!("has snapshots keyed on the KV cache `{cache}`"),
                );
            }
        }
    }

    /// Row 9, from both ends: a lane's resource depends on another's, or another's on the lane's.
    fn depends(&self, found: &mut Vec<Violation>) {
        for node in self.assigned {
            for key in &node.node.resources {
                let dependencies = self.dependencies(key);
                let owners: Vec<(&Assigned<'_>, &str)> = self
                    .assigned
                    .iter()
                    .filter(|other| !node.shares_stream_with(other) && (node.lane > 0 || other.lane > 0))
                    .filter_map(|other| {
                        let touched = self.touched(other.node);
                        let (dependency, _) =
                            touched.into_iter().find(|(key, _)| dependencies.contains(key))?;
                        Some((other, dependency))
                    })
                    .collect();
                let Some((other, _)) = owners.first() else {
                    continue;
                };
                let owned: Vec<String> = owners
                    .iter()
                    .map(|(other, dependency)| {
                        format!("`{dependency}` of `{}` on {}", other.node.name, place(other))
                    })
                    .collect();
                let message = format!(
                    "resource `{key}` of `{}` on {} depends on {}: two streams would order its writes differently",
                    node.node.name,
                    place(node),
                    owned.join(", ")
                );
                let remedy = "put both nodes on one lane, or both on the chain";
                let at = if node.lane > 0 { node } else { other };
                let violation = Violation::new(Reason::LaneResourceDepends, at.key.clone(), message, remedy);
                found.push(violation.node(&node.node.name).resource(key));
            }
        }
    }

    fn lane_ids(&self, found: &mut Vec<Violation>) {
        let mut lanes: BTreeMap<u32, BTreeMap<u32, &Assigned<'_>>> = BTreeMap::new();
        for node in self.assigned.iter().filter(|node| node.lane > 0) {
            for &rank in &node.ranks {
                lanes.entry(rank).or_default().entry(node.lane).or_insert(node);
            }
        }
        for (rank, lanes) in lanes {
            let mut expected = 1;
            for (&lane, node) in &lanes {
                if lane != expected {
                    let message = format!("lane {lane} of rank {rank} skips lane {expected}");
                    let remedy =
                        format!("write `{expected}`: lanes of a worker are numbered from 1 without gaps");
                    found.push(node.refuse(Reason::LaneIdSkips, message, &remedy));
                }
                expected = lane.saturating_add(1);
            }
        }
    }

    /// Two chains: no lane's rule, but no worker can reach another's memory either.
    fn across_workers(&self, found: &mut Vec<Violation>) {
        for (i, node) in self.assigned.iter().enumerate() {
            let touched = self.touched(node.node);
            for other in &self.assigned[..i] {
                if node.lane > 0 || other.lane > 0 || node.ranks == other.ranks {
                    continue;
                }
                for (key, _) in self
                    .touched(other.node)
                    .into_iter()
                    .filter(|(key, _)| touched.contains_key(key))
                {
                    let message = format!(
                        "resource `{key}` is used by `{}` on {} and `{}` on {}: workers share no memory",
                        other.node.name,
                        place(other),
                        node.node.name,
                        place(node)
                    );
                    let remedy = "give both nodes the same `ranks`";
                    found.push(
                        node.refuse(Reason::ResourceAcrossWorkers, message, remedy)
                            .resource(key),
                    );
                }
            }
        }
    }
}

fn place(node: &Assigned<'_>) -> String {
    let ranks = node
        .ranks
        .iter()
        .map(u32::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    match node.lane {
        0 => format!("the chain of rank {ranks}"),
        lane => format!("lane {lane} of rank {ranks}"),
    }
}
