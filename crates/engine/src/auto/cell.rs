//! What is known about each arm at one load, and which load it is.

use std::time::Duration;

use super::{ON_CHAIN, Seen, SeenStep};

/// Requests up to which a cell goes. Half an octave each: within one, a chain step costs nearly the same.
const WANTING: [f64; 15] = [
    1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0,
];
/// Items of a row up to which a cell goes.
const WIDTH: [f64; 4] = [1.0, 2.0, 4.0, 8.0];
pub(super) const N_CELLS: usize = (WANTING.len() + 1) * (WIDTH.len() + 1);

/// A cell is left only when the load is beyond its bound by this share.
const STICKY: f64 = 0.12;
/// What the load keeps of itself with each step.
const LOAD_MEMORY: f64 = 0.95;
const WIDTH_MEMORY: f64 = 0.98;

/// How many requests want to advance, and how wide their windows are.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    wanting: f64,
    width: f64,
    wanting_bucket: usize,
    width_bucket: usize,
}

impl Load {
    pub(super) fn observe(&mut self, step: &SeenStep) {
        match *step {
            SeenStep::Chain { wanting, .. } => {
                smooth(&mut self.wanting, wanting as f64, LOAD_MEMORY);
                self.wanting_bucket = bucket(&WANTING, self.wanting, self.wanting_bucket);
            }
            SeenStep::Node { rows, items } => {
                smooth(&mut self.width, items as f64 / rows.max(1) as f64, WIDTH_MEMORY);
                self.width_bucket = bucket(&WIDTH, self.width, self.width_bucket);
            }
            SeenStep::Begin { .. } => {}
        }
    }

    pub(super) fn wanting(&self) -> f64 {
        self.wanting
    }

    pub(super) fn width(&self) -> f64 {
        self.width
    }

    pub(super) fn cell(&self) -> usize {
        self.wanting_bucket * (WIDTH.len() + 1) + self.width_bucket
    }
}

/// How far apart two cells are: by requests first.
pub(super) fn distance(a: usize, b: usize) -> (usize, usize) {
    let n = WIDTH.len() + 1;
    ((a / n).abs_diff(b / n), (a % n).abs_diff(b % n))
}

/// The first value counts as it is.
fn smooth(mean: &mut f64, value: f64, memory: f64) {
    *mean = if *mean == 0.0 {
        value
    } else {
        *mean * memory + value * (1.0 - memory)
    };
}

/// The bucket of `value`: the one it was in unless it is well outside of that.
fn bucket(bounds: &[f64], value: f64, was: usize) -> usize {
    let above_lower = was == 0 || value > bounds[was - 1] * (1.0 - STICKY);
    let below_upper = bounds
        .get(was)
        .is_none_or(|&bound| value <= bound * (1.0 + STICKY));
    if above_lower && below_upper {
        return was;
    }
    // A load that is steady at a bound stays at it within rounding.
    bounds.partition_point(|&bound| bound * (1.0 + 1e-6) < value)
}

/// A mean of the newest values; older ones count for less.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    weight: f64,
    value: f64,
}

/// Values that a mean remembers.
const CHAIN_MEMORY: f64 = 400.0;
const NODE_MEMORY: f64 = 100.0;

impl Mean {
    fn add(&mut self, value: f64, memory: f64) {
        self.weight = (self.weight + 1.0).min(memory);
        self.value += (value - self.value) / self.weight;
    }

    /// What was learned before counts for less than what comes.
    fn age(&mut self, most: f64) {
        self.weight = self.weight.min(most);
    }

    fn known(&self, least: f64) -> Option<f64> {
        (self.weight >= least).then_some(self.value)
    }
}

/// One arm at one load.
#[derive(Debug, Clone, Copy, Default)]
struct Estimate {
    /// Seconds of a chain step, whatever ran beside it.
    step: Mean,
    /// Share of the requests that a step advances.
    advance: Mean,
    /// Seconds of the node for an item, over the items of its steps.
    per_item: Mean,
    /// Seconds of a step of the node.
    node_step: Mean,
    /// Seconds of the chain for a request that begins.
    per_begin: Mean,
    beside: Mean,
    alone: Mean,
    last_try: Option<Duration>,
    /// Tries so far.
    tries: u32,
}

/// Every arm at one load.
#[derive(Debug)]
pub(super) struct Cell {
    arms: Vec<Estimate>,
    /// Requests that begin for each loop step of the chain, whatever the arm.
    begins: Mean,
    /// Those since the last one.
    begun: usize,
    /// What the arm in use cost when it was last compared with the others.
    compared: Option<f64>,
}

/// Steps of the node that a request waits for its end: most of the one in front, its own, and now and then another's turn.
const ENDS_WAIT: f64 = 2.0;

/// Steps below which a mean says nothing.
const LEAST_STEPS: f64 = 8.0;
const LEAST_NODE_STEPS: f64 = 2.0;
const LEAST_BEGINS: f64 = 2.0;

impl Cell {
    pub(super) fn new(n_arms: usize) -> Self {
        Self {
            arms: vec![Estimate::default(); n_arms],
            begins: Mean::default(),
            begun: 0,
            compared: None,
        }
    }

    pub(super) fn observe(&mut self, seen: &Seen) {
        let estimate = &mut self.arms[seen.arm];
        let seconds = seen.took.as_secs_f64();
        match seen.step {
            SeenStep::Chain {
                wanting,
                rows,
                beside,
            } => {
                self.begins.add(self.begun as f64, CHAIN_MEMORY);
                self.begun = 0;
                estimate.step.add(seconds, CHAIN_MEMORY);
                let advance = rows as f64 / wanting.max(rows).max(1) as f64;
                estimate.advance.add(advance, CHAIN_MEMORY);
                let split = if beside {
                    &mut estimate.beside
                } else {
                    &mut estimate.alone
                };
                split.add(seconds, CHAIN_MEMORY);
            }
            SeenStep::Begin { rows } => {
                self.begun += rows;
                estimate.per_begin.add(seconds / rows.max(1) as f64, NODE_MEMORY);
            }
            SeenStep::Node { items, .. } => {
                estimate.per_item.add(seconds / items.max(1) as f64, NODE_MEMORY);
                estimate.node_step.add(seconds, NODE_MEMORY);
            }
        }
    }

    /// Seconds in which each of `wanting` requests advances by a frame on this arm, and the node by as many
    /// items; `None`: not known.
    pub(super) fn cost(&self, arm: usize, wanting: f64) -> Option<f64> {
        let estimate = &self.arms[arm];
        let begins = self.begins.value * self.per_begin(arm);
        let chain = (estimate.step.known(LEAST_STEPS)? + begins) / estimate.advance.value.max(1e-3);
        let node = estimate.per_item.known(LEAST_NODE_STEPS)? * wanting;
        let cost = match arm {
            ON_CHAIN => chain + node,
            _ => chain.max(node),
        };
        // As many end as begin, for each loop step, of which a frame of all takes more than one where not all advance. Told from the node's steps rather than counted: the
        // arm that was in force before leaves more or fewer of them behind than this one will have.
        let ends = self.begins.value / estimate.advance.value.max(1e-3) / cost.max(1e-9);
        let waiting = ends * ENDS_WAIT * estimate.node_step.value;
        Some(cost * (1.0 + waiting / wanting.max(1.0)))
    }

    /// Of an arm under which none began yet: what it costs under the others.
    fn per_begin(&self, arm: usize) -> f64 {
        let known = |estimate: &Estimate| estimate.per_begin.known(LEAST_BEGINS);
        known(&self.arms[arm]).unwrap_or_else(|| {
            let others: Vec<f64> = self.arms.iter().filter_map(known).collect();
            others.iter().sum::<f64>() / others.len().max(1) as f64
        })
    }

    pub(super) fn knows(&self, arm: usize) -> bool {
        self.arms[arm].last_try.is_some()
    }

    pub(super) fn last_try(&self, arm: usize) -> Option<Duration> {
        self.arms[arm].last_try
    }

    /// A try of the arm is over.
    pub(super) fn count_try(&mut self, arm: usize) {
        self.arms[arm].tries += 1;
    }

    pub(super) fn tries(&self, arm: usize) -> u32 {
        self.arms[arm].tries
    }

    /// The arm was looked at.
    pub(super) fn tried(&mut self, arm: usize, at: Duration) {
        let estimate = &mut self.arms[arm];
        estimate.last_try = Some(at);
        // The next look, half a minute and more later, counts for more than this one.
        estimate.step.age(f64::from(super::TRY_STEPS));
        estimate.advance.age(f64::from(super::TRY_STEPS));
        estimate.per_item.age(f64::from(super::TRY_NODE_STEPS));
        estimate.node_step.age(f64::from(super::TRY_NODE_STEPS));
        estimate.per_begin.age(f64::from(super::TRY_NODE_STEPS));
    }

    pub(super) fn compared(&mut self, cost: f64) {
        self.compared = Some(cost);
    }

    /// Whether `cost` differs by this share from what was compared.
    pub(super) fn changed(&self, cost: f64, share: f64) -> bool {
        self.compared
            .is_some_and(|then| (cost / then - 1.0).abs() > share)
    }

    /// Chain steps under an arm: with the node beside them, and without.
    pub(super) fn chain_steps(&self, arm: usize) -> (Option<Duration>, Option<Duration>) {
        let [beside, alone] = [self.arms[arm].beside, self.arms[arm].alone].map(|mean| {
            let seconds = mean.known(LEAST_STEPS)?;
            Some(Duration::from_secs_f64(seconds))
        });
        (beside, alone)
    }
}
