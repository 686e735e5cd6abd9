//! Costs that were measured, and what the chooser once made of them.

use super::*;

/// One H200, 1.7B, milliseconds in which all callers advance by a frame: chain, lane, and the lane on 16, 32 and 64
/// multiprocessors (`benches/results/*-arms-1.7b-*`; 16: from what `auto` did when it was stuck there). With few callers
/// all lanes are as good; with many the small ones cannot keep up.
fn partitions(requests: usize) -> Row {
    let (chain, lanes) = match requests {
        1 => (2.97, [(2.88, 0.12), (2.88, 0.82), (2.88, 0.45), (2.88, 0.22)]),
        32 => (4.98, [(4.69, 2.1), (3.2, 9.99), (4.9, 4.5), (4.5, 2.3)]),
        _ => (10.26, [(10.65, 6.5), (3.2, 39.4), (6.5, 17.3), (10.08, 9.0)]),
    };
    let of = |(chain, node): (f64, f64), node_steps| Cost {
        beside: chain,
        alone: chain,
        node,
        node_steps,
        begins: 0.0,
        advances: 1.0,
    };
    let node_steps = 0.48_f64.min(requests as f64 / 8.0);
    let on_chain = of((chain * 0.76, chain * 0.24), node_steps);
    let on_lanes = lanes.map(|lane| of(lane, node_steps));
    Row {
        requests,
        arms: std::iter::once(on_chain).chain(on_lanes).collect(),
    }
}

#[test]
fn a_load_that_grows_does_not_keep_an_arm_that_only_a_small_one_can_afford() {
    for seed in 0..32 {
        let mut replay = Replay::new(5, 0.04, seed);
        // Callers come one by one: looking at every arm for each number of them takes all the looks of a minute.
        for requests in [1, 2, 3, 4, 6] {
            let few = partitions(1);
            let arms = few.arms.iter().map(|cost| Cost {
                node: cost.node * requests as f64,
                ..*cost
            });
            let arms = arms.collect();
            replay.run(&Row { requests, arms }, 4.0);
        }
        for requests in [32, 128] {
            let row = partitions(requests);
            let first = replay.run(&row, 8.0);
            assert!(
                first.loss() < 0.35,
                "seed {seed}: {:.0} % over at first",
                first.loss() * 1e2
            );
            let steady = replay.run(&row, 12.0);
            assert!(
                steady.loss() <= LOSS,
                "seed {seed}, {requests} callers: {:.1} % over the best arm\n{:?}",
                steady.loss() * 1e2,
                replay.flips
            );
        }
        replay.assert_flips_are_bounded();
    }
}

/// Callers, and of each arm: milliseconds of a chain step, of the node and of what begins, steps of the node for one of the
/// chain, and the share of the callers that advances.
fn row(requests: usize, arms: &[[f64; 5]]) -> Row {
    let of = |&[chain, node, begins, node_steps, advances]: &[f64; 5]| Cost {
        beside: chain,
        alone: chain,
        node,
        node_steps,
        begins,
        advances,
    };
    Row {
        requests,
        arms: arms.iter().map(of).collect(),
    }
}

/// After `before`, `seconds` of `row` cost at most `most` more than its best arm, whatever the seed.
fn check(row: &Row, before: impl Fn(&mut Replay), seconds: f64, most: f64) {
    for seed in 0..16 {
        let mut replay = Replay::new(row.arms.len(), 0.03, seed);
        before(&mut replay);
        let steady = replay.run(row, seconds);
        assert!(
            steady.loss() <= most,
            "seed {seed}: {:.1} % over the best arm\n{:?}",
            steady.loss() * 1e2,
            replay.flips
        );
    }
}

/// As [`partitions`], 128 callers at 8684c2c, with what requests that begin take: without those the chain looks cheaper
/// than 64 multiprocessors, where the node is nearly always busy, and is dearer.
#[test]
fn requests_that_begin_cost_the_chain_and_not_the_node() {
    let arms = [
        [6.26, 2.46, 1.01, 0.97, 1.0],
        [8.69, 7.08, 1.13, 0.97, 1.0],
        [8.19, 8.89, 1.25, 0.97, 1.0],
    ];
    let row = row(128, &arms);
    let before = |replay: &mut Replay| {
        replay.run(&row, 30.0);
    };
    check(&row, before, 120.0, LOSS / 2.0);
}

/// One H200, 0.6B, 32 callers at d2d9443, on the chain, 64 and 32 multiprocessors: a step is shorter beside the smaller
/// partition, but two more of the callers wait for the end of their sound there, so less is made.
#[test]
fn requests_that_wait_for_the_node_make_no_frames() {
    let arms = [
        [2.60, 1.05, 0.25, 0.94, 30.2 / 32.0],
        [3.20, 2.77, 0.24, 0.94, 30.2 / 32.0],
        [3.05, 3.66, 0.21, 0.29, 28.0 / 32.0],
    ];
    let row = row(32, &arms);
    let before = |replay: &mut Replay| {
        replay.run(&row, 30.0);
    };
    check(&row, before, 120.0, LOSS / 2.0);
}

/// As [`partitions`], 0.6B, 128 callers at cb0b44d: the chain, the lane, and on 64, 32 and 16 multiprocessors, of which the
/// small ones cannot keep up.
const MANY: [[f64; 5]; 5] = [
    [4.84, 2.31, 0.47, 0.51, 1.0],
    [7.10, 5.60, 0.62, 0.95, 1.0],
    [6.60, 6.79, 0.61, 0.76, 1.0],
    [5.00, 17.3, 0.50, 0.50, 1.0],
    [5.00, 39.4, 0.50, 0.50, 1.0],
];

/// 64 multiprocessors are the best arm, and stay so while their steps do what those of 16 left undone.
#[test]
fn an_arm_is_not_blamed_for_what_the_one_before_left_undone() {
    let row = row(128, &MANY);
    let before = |replay: &mut Replay| {
        replay.run(&row, 10.0);
    };
    check(&row, before, 20.0, LOSS);
}

/// The same load, come to all at once from 32 callers: streams that began together fill their windows together, and so many
/// at once are cheap. Later they are not, and where the node's time adds to the chain's another arm is the best.
#[test]
fn what_streams_cost_that_began_together_is_looked_at_again_soon() {
    let few = [
        [2.85, 0.78, 0.21, 0.46, 1.0],
        [3.25, 1.30, 0.23, 0.75, 1.0],
        [3.16, 2.33, 0.23, 0.66, 1.0],
        [3.10, 3.40, 0.23, 0.30, 1.0],
        [2.95, 7.0, 0.23, 0.2, 1.0],
    ];
    let (few, many) = (row(32, &few), row(128, &MANY));
    let before = |replay: &mut Replay| {
        replay.run(&few, 25.0);
        replay.node_factor = 0.7;
        replay.run(&many, 4.0);
        replay.node_factor = 1.0;
        replay.run(&many, 6.0);
    };
    check(&many, before, 20.0, LOSS);
}

#[test]
fn a_new_load_begins_on_the_arm_that_the_nearest_one_speaks_for() {
    let small = partitions(1);
    let mut replay = Replay::new(5, 0.02, 3);
    replay.run(&small, 20.0);
    replay.chooser.arm = 2;
    let row = partitions(32);
    replay.run(&row, 0.7);
    let flip = replay.flips.last().expect("it cannot stay");
    assert_eq!((flip.from, flip.reason), (2, Reason::Load), "{flip:?}");
}
