//! The rules against an oracle that says the same in another way: quantifiers over everything, dependencies by
//! listing every path.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};

use super::{Assigned, violations};
use crate::declaration::{ModelDeclaration, NodeDecl, RequestEdgeDecl, ResourceReport, WalkDecl, WalkKind};
use crate::test_support::{node, resource, stream_edge, walk};
use crate::violation::Reason;

const NODES: usize = 4;
const RESOURCES: usize = 4;

/// A model and a map of its nodes to (ranks, lane).
#[derive(Debug, Clone)]
struct World {
    declaration: ModelDeclaration,
    homes: Vec<(Vec<u32>, u32)>,
}

impl World {
    fn assigned(&self) -> Vec<Assigned<'_>> {
        let nodes = self.declaration.nodes.iter().zip(&self.homes);
        nodes
            .map(|(node, (ranks, lane))| Assigned {
                node,
                ranks: ranks.clone(),
                lane: *lane,
                key: node.name.clone(),
            })
            .collect()
    }

    fn reported(&self) -> BTreeSet<Reason> {
        violations(&self.declaration, &self.assigned())
            .into_iter()
            .map(|violation| violation.reason)
            .collect()
    }
}

/// True about once in `n`.
fn one_in(n: u32) -> impl Strategy<Value = bool> {
    prop::bool::weighted(1.0 / f64::from(n))
}

fn some_of(names: &'static str, count: usize, n: u32) -> impl Strategy<Value = Vec<String>> {
    vec(one_in(n), count).prop_map(move |chosen| {
        let chosen = chosen.iter().enumerate().filter(|(_, chosen)| **chosen);
        chosen.map(|(i, _)| format!("{names}{i}")).collect()
    })
}

fn reports() -> impl Strategy<Value = ResourceReport> {
    let flags = (
        one_in(15),
        one_in(15),
        one_in(15),
        one_in(15),
        one_in(15),
        one_in(15),
    );
    (some_of("r", RESOURCES, 14), flags).prop_map(|(depends_on, flags)| ResourceReport {
        depends_on,
        prefix_cache: flags.0,
        evicts: flags.1,
        moved_outside_step: flags.2,
        stages_host_rows: flags.3,
        shared_with_ranks: if flags.4 { vec![0] } else { Vec::new() },
        snapshots_keyed_on: flags.5.then(|| "r0".to_owned()),
        ..ResourceReport::default()
    })
}

fn walks() -> impl Strategy<Value = Vec<WalkDecl>> {
    let kinds = prop_oneof![
        8 => Just(WalkKind::Stream),
        1 => Just(WalkKind::Once),
        1 => Just(WalkKind::Entry),
        1 => Just(WalkKind::Prime),
        1 => Just(WalkKind::Loop),
    ];
    let one = (
        0..NODES,
        kinds,
        prop::option::weighted(0.06, 0..NODES),
        prop::option::weighted(0.06, 0..NODES),
        one_in(20),
    );
    vec(one, NODES..=2 * NODES).prop_map(|walks| {
        let walks = walks
            .into_iter()
            .enumerate()
            .map(|(i, (of, kind, second, combined, across))| {
                // The first walks go round the nodes, so that most nodes have one.
                let of = if i < NODES { i } else { of };
                let mut walk = walk(&format!("w{i}"), &format!("n{of}"), kind);
                walk.nodes.extend(second.map(|second| format!("n{second}")));
                walk.combined_with = combined.map(|other| format!("w{other}"));
                walk.state_across_requests = across;
                walk
            });
        walks.collect()
    })
}

fn worlds() -> impl Strategy<Value = World> {
    let node_shapes = (one_in(20), one_in(20), one_in(20), some_of("r", RESOURCES, 6));
    let homes = (
        prop_oneof![6 => Just(vec![0]), 2 => Just(vec![1]), 1 => Just(vec![0, 1])],
        0_u32..4,
    );
    let edges = (
        vec(any::<prop::sample::Index>(), 0..8),
        vec(any::<prop::sample::Index>(), 0..3),
    );
    (
        1..=NODES,
        vec(node_shapes, NODES),
        vec(reports(), RESOURCES),
        walks(),
        edges,
        vec(homes, NODES),
    )
        .prop_map(|(n_nodes, nodes, reports, walks, (fed, started), homes)| {
            let nodes =
                nodes
                    .into_iter()
                    .take(n_nodes)
                    .enumerate()
                    .map(|(i, (parallel, stop, spans, resources))| NodeDecl {
                        parallel_ranks: if parallel { 2 } else { 1 },
                        stop_check: stop,
                        output_spans: spans,
                        resources,
                        ..node(&format!("n{i}"), &[])
                    });
            let stream_edges = fed
                .iter()
                .map(|walk| stream_edge(&["w0"], &walk.get(&walks).name))
                .collect();
            let request_edges = started.iter().map(|walk| RequestEdgeDecl {
                name: "reference".to_owned(),
                from: walk.get(&walks).name.clone(),
                to: vec!["w0".to_owned()],
            });
            let request_edges = request_edges.collect();
            let resources = reports
                .into_iter()
                .enumerate()
                .map(|(i, report)| resource(&format!("r{i}"), "any", report));
            let declaration = ModelDeclaration {
                model: "random".to_owned(),
                nodes: nodes.collect(),
                resources: resources.collect(),
                stream_edges,
                request_edges,
                walks,
            };
            // The first node makes the chain of rank 0 often enough for lanes to be possible.
            let mut homes = homes;
            if homes[0].0 == [0] {
                homes[0].1 = 0;
            }
            homes.truncate(n_nodes);
            World { declaration, homes }
        })
}

/// What the rules forbid, by quantifiers over everything.
struct Oracle<'a>(&'a World);

impl Oracle<'_> {
    fn report(&self, key: &str) -> &ResourceReport {
        let index: usize = key[1..].parse().unwrap();
        &self.0.declaration.resources[index].report
    }

    /// Every path of dependencies that starts at `path`'s last resource and meets none twice.
    fn paths(&self, path: Vec<String>) -> Vec<Vec<String>> {
        let mut all = vec![path.clone()];
        for next in &self.report(path.last().unwrap()).depends_on {
            if !path.contains(next) {
                let mut longer = path.clone();
                longer.push(next.clone());
                all.extend(self.paths(longer));
            }
        }
        all
    }

    /// (declared, reached) for every way in which node `n` reaches a resource.
    fn reaches(&self, n: usize) -> BTreeSet<(String, String)> {
        let declared = &self.0.declaration.nodes[n].resources;
        let paths = declared.iter().flat_map(|key| self.paths(vec![key.clone()]));
        paths
            .map(|path| (path[0].clone(), path[path.len() - 1].clone()))
            .collect()
    }

    fn forbidden(&self) -> BTreeSet<Reason> {
        let World { declaration, homes } = self.0;
        let mut reasons = BTreeSet::new();
        let mut forbid = |reason, when: bool| {
            if when {
                reasons.insert(reason);
            }
        };
        let all = || 0..homes.len();
        for n in all() {
            let (node, (ranks, lane)) = (&declaration.nodes[n], &homes[n]);
            let own = |walk: &&WalkDecl| walk.nodes.contains(&node.name);
            for m in all().filter(|&m| m != n && homes[m] != homes[n]) {
                let of_lanes = *lane != 0 || homes[m].1 != 0;
                let ways = self.reaches(n);
                let others = self.reaches(m);
                let meet = |way: &(String, String)| others.iter().any(|other| other.1 == way.1);
                forbid(
                    Reason::LaneResourceShared,
                    *lane != 0
                        && node
                            .resources
                            .iter()
                            .any(|key| declaration.nodes[m].resources.contains(key)),
                );
                forbid(
                    Reason::LaneResourceDepends,
                    of_lanes && ways.iter().any(|way| way.0 != way.1 && meet(way)),
                );
                forbid(Reason::ResourceAcrossWorkers, !of_lanes && ways.iter().any(meet));
            }
            if *lane == 0 {
                continue;
            }
            forbid(
                Reason::LaneParallelNode,
                node.parallel_ranks != 1 || ranks.len() != 1,
            );
            forbid(
                Reason::LaneChainPostprocessing,
                node.stop_check || node.output_spans,
            );
            let walks = || declaration.walks.iter().filter(own);
            forbid(
                Reason::LaneWalkIsGraph,
                !walks().all(|walk| walk.nodes == [node.name.as_str()] && walk.kind != WalkKind::Loop),
            );
            let combined = walks().any(|walk| {
                let of_another = declaration
                    .walks
                    .iter()
                    .any(|w| w.combined_with.as_deref() == Some(&walk.name));
                walk.combined_with.is_some() || of_another
            });
            forbid(Reason::LaneWalkCombined, combined);
            forbid(
                Reason::LaneStateAcrossRequests,
                walks().any(|walk| walk.state_across_requests),
            );
            let targets = declaration.stream_edges.iter().map(|edge| &edge.to);
            let sources = declaration.request_edges.iter().map(|edge| &edge.from);
            let scheduled: BTreeSet<&String> = targets.chain(sources).collect();
            forbid(
                Reason::LaneNeverScheduled,
                walks().all(|walk| !scheduled.contains(&walk.name)),
            );
            let chains: BTreeSet<u32> = all()
                .filter(|&m| homes[m].1 == 0)
                .flat_map(|m| homes[m].0.clone())
                .collect();
            forbid(
                Reason::LaneWithoutChain,
                !ranks.iter().all(|rank| chains.contains(rank)),
            );
            forbid(
                Reason::LaneIdSkips,
                ranks.iter().any(|rank| {
                    (1..*lane).any(|id| !all().any(|m| homes[m].1 == id && homes[m].0.contains(rank)))
                }),
            );
            for key in &node.resources {
                forbid(
                    Reason::LaneResourceShared,
                    self.report(key)
                        .shared_with_ranks
                        .iter()
                        .any(|rank| !ranks.contains(rank)),
                );
            }
            for (_, reached) in self.reaches(n) {
                let report = self.report(&reached);
                forbid(Reason::LanePrefixCache, report.prefix_cache);
                forbid(
                    Reason::LaneEvictsOrMoved,
                    report.evicts || report.moved_outside_step,
                );
                forbid(Reason::LaneStagesHostRows, report.stages_host_rows);
                forbid(Reason::LaneSnapshotPool, report.snapshots_keyed_on.is_some());
            }
        }
        reasons
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_random_map_is_refused_for_exactly_the_reasons_that_the_oracle_finds(world in worlds()) {
        prop_assert_eq!(world.reported(), Oracle(&world).forbidden());
    }

    /// Invariant 2: whatever a lane's step may touch belongs to that lane of that worker alone.
    #[test]
    fn invariant_2_resource_to_lane_is_a_function(world in worlds()) {
        if !world.reported().is_empty() {
            return Ok(());
        }
        let mut owners: BTreeMap<String, BTreeSet<&(Vec<u32>, u32)>> = BTreeMap::new();
        for (n, home) in world.homes.iter().enumerate() {
            for (_, reached) in Oracle(&world).reaches(n) {
                owners.entry(reached).or_default().insert(home);
            }
        }
        prop_assert!(owners.values().all(|homes| homes.len() == 1));
    }
}

/// The generator must make worlds of every kind, or the comparison says little.
#[test]
fn the_random_worlds_break_every_rule_and_none() {
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let mut seen: BTreeMap<Reason, usize> = BTreeMap::new();
    let mut accepted_with_lane = 0;
    for _ in 0..4000 {
        let world = worlds().new_tree(&mut runner).unwrap().current();
        let reported = world.reported();
        if reported.is_empty() && world.homes.iter().any(|(_, lane)| *lane > 0) {
            accepted_with_lane += 1;
        }
        for reason in reported {
            *seen.entry(reason).or_default() += 1;
        }
    }
    assert!(
        accepted_with_lane > 50,
        "{accepted_with_lane} of 4000 accepted with a lane"
    );
    // Rows 2 to 14, lane numbering, and resources across workers.
    assert_eq!(seen.len(), 15, "{seen:?}");
    assert!(seen.values().all(|&count| count > 50), "{seen:?}");
}
