use super::*;
use crate::test_support::{TOY_YAML, toy};
use crate::{DeviceInventory, Sources, load};

fn plans(yaml: &str) -> Vec<WorkerPlan> {
    let loaded = load(&Sources::text("test.yaml", yaml));
    let deployment = loaded.check(Some(&toy()), Some(&DeviceInventory::h200(1)));
    let deployment = deployment.unwrap_or_else(|violations| panic!("{}", crate::render(&violations)));
    let ranks = deployment.ranks.iter().map(|rank| rank.rank);
    let plans = ranks
        .map(|rank| WorkerPlan::for_rank(&deployment, &toy(), rank).unwrap())
        .collect();
    assert_eq!(WorkerPlan::for_rank(&deployment, &toy(), 9), None);
    plans
}

#[test]
fn one_worker_has_everything_and_no_remote_edges() {
    let plans = plans(&TOY_YAML.replace(
        "lane: 1",
        "lane: auto\n    lane_id: 1\n    auto: { sms: [0, 32] }",
    ));
    let [plan] = plans.as_slice() else {
        panic!("{plans:?}")
    };
    assert_eq!(
        (plan.rank, plan.device, plan.device_index),
        (0, DeviceKind::Cuda, 0)
    );
    let placements: Vec<_> = plan.nodes.iter().map(|node| node.placement).collect();
    assert_eq!(
        placements,
        [Placement::Chain, Placement::Auto(1), Placement::Lane(2)]
    );
    assert_eq!(
        plan.lanes.iter().map(|lane| lane.id).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert_eq!(plan.lanes[1].auto_sms, [0, 32]);
    assert_eq!(plan.walks, ["prefill", "decode", "chunk", "encode"]);
    assert_eq!(plan.remote_edges, []);

    // kv: 16 pages for each of 64 rows of 256 positions.
    let owned: Vec<_> = plan
        .resources
        .iter()
        .map(|r| (r.key.as_str(), r.lane, r.slots, r.page_size, r.bytes))
        .collect();
    let expected = [
        ("kv", 0, 1024, 16, 1_024_000_000),
        ("sampler", 0, 64, 0, 25_600),
        ("codec_state", 1, 64, 0, 320_000_000),
    ];
    assert_eq!(owned, expected);
    // Weights, 1000 bytes of workspace a row, resources.
    let bytes: Vec<_> = plan.lanes.iter().map(|lane| lane.memory_bytes).collect();
    assert_eq!(
        bytes,
        [
            1_000_064_000 + 1_024_025_600,
            1_000_064_000 + 320_000_000,
            1_000_064_000
        ]
    );
}

#[test]
fn a_split_names_the_worker_at_the_other_end_of_each_edge() {
    let split = TOY_YAML.replace("    lane: 1\n", "    ranks: [1]\n").replace(
        "    lane: 2\n",
        "    ranks: [2]\nrank_devices: { 0: 0, 1: 0, 2: 0 }\nmps: { mode: required }\n",
    );
    let plans = plans(&split);
    let edge = |edge: &str, kind, direction, peer_rank| RemoteEdge {
        edge: edge.to_owned(),
        kind,
        direction,
        peer_rank,
    };
    let edges: Vec<_> = plans.iter().map(|plan| plan.remote_edges.clone()).collect();
    let expected = [
        vec![
            edge("codes", EdgeKind::Stream, Direction::To, 1),
            edge("reference", EdgeKind::Request, Direction::From, 2),
        ],
        vec![edge("codes", EdgeKind::Stream, Direction::From, 0)],
        vec![edge("reference", EdgeKind::Request, Direction::To, 0)],
    ];
    assert_eq!(edges, expected);
    assert_eq!(plans[1].walks, ["chunk"]);
    assert_eq!(
        plans[1].nodes,
        [NodePlan {
            node: "Codec".to_owned(),
            placement: Placement::Chain
        }]
    );
    assert_eq!(plans[1].resources.len(), 1);
    assert_eq!(plans[1].resources[0].lane, 0);
    assert_eq!(plans[2].resources, []);
}

#[test]
fn a_copy_of_a_split_names_workers_of_its_own_copy() {
    let split = TOY_YAML.replace("    lane: 1\n", "    ranks: [1]\n").replace(
        "    lane: 2\n",
        "    ranks: [1]\nreplicas: 2\nrank_devices: { 0: 0, 1: 0, 2: 0, 3: 0 }\nmps: { mode: required }\n",
    );
    let plans = plans(&split);
    let peers = |plan: &WorkerPlan| {
        let peers = plan.remote_edges.iter().map(|edge| edge.peer_rank);
        peers.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let found: Vec<_> = plans.iter().map(|plan| (plan.rank, peers(plan))).collect();
    assert_eq!(found, [(0, vec![1]), (1, vec![0]), (2, vec![3]), (3, vec![2])]);
    // Otherwise a copy has what the first has.
    for (first, copy) in [(0, 2), (1, 3)] {
        assert_eq!(plans[first].nodes, plans[copy].nodes);
        assert_eq!(plans[first].lanes, plans[copy].lanes);
        assert_eq!(plans[first].resources, plans[copy].resources);
        assert_eq!(plans[first].walks, plans[copy].walks);
    }
}
