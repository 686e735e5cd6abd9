//! Where a node that is left to measurement runs (`lane: auto`): a pure function from what steps cost to the arm
//! to use now. No clock, no thread, no device: time comes with the observations, so that a recorded run can be
//! replayed (see the tests).
//!
//! An *arm* is a way to run the node: arm 0 on the chain, the others on its lane, each in a partition or in none.
//! What counts is the time in which every request that wants to advance by a frame has done so, those that end have been
//! followed by others, and the node has kept up: on the chain all of it adds up, beside each other the slower one
//! decides. A request that ends waits for the node once more, and where callers follow each other that keeps the next one
//! out: an arm whose steps of the node are long makes less in the same time, though its chain may look fast. How many
//! requests begin is the load's and not the arm's. Costs depend on the load, so each *cell* (about so
//! many requests, windows about so wide) has estimates of its own.
//!
//! An arm that is not used is not measured, so it is tried from time to time: the worse it was, the more rarely,
//! so that trying costs less than [`TRY_BUDGET`] of the time. Another arm is adopted only when it is better by
//! [`MARGIN`]. Looks at arms that are well known are bounded by [`MAX_LOOKS`] flips a minute; a new load, whose arms are not,
//! may take more, but no more than [`MAX_FLIPS`] whatever happens: an arm that was good for the load before may be
//! hopeless for this one. What a cell does not know yet is guessed from the nearest one that does.

mod cell;

use std::collections::VecDeque;
use std::time::Duration;

use cell::{Cell, Load, N_CELLS, distance};

/// The node on the chain.
pub(crate) const ON_CHAIN: usize = 0;

/// Share of the time that trying worse arms may cost.
const TRY_BUDGET: f64 = 0.004;
/// A better arm is better by this share, or is left alone.
const MARGIN: f64 = 0.007;
/// Steps of the chain and of the node that a try takes.
const TRY_STEPS: u32 = 96;
const TRY_NODE_STEPS: u32 = 8;
/// A try that costs this many times the arm in use is given up after so many steps.
const HOPELESS: f64 = 1.25;
const HOPELESS_STEPS: u32 = 12;
/// A try ends after this long, whatever it has seen.
const TRY_FOR: Duration = Duration::from_secs(3);
/// Shortest and longest time between tries of one arm in one cell.
const TRY_AFTER: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(300));
/// When the arm in use costs this share more or less than when it was compared, the others are tried earlier.
const CHANGED: f64 = 0.05;
const TRY_AFTER_CHANGE: Duration = Duration::from_secs(10);
/// What is seen first of a load may not be what it is like: many requests that came together do the same things together. So
/// arms that were about as good, within this share, are tried once more soon.
const NEAR: f64 = 0.10;
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(3);
const FIRST_TRIES: u32 = 2;
/// Steps behind a flip that say nothing: what ran before it still shows in them.
const UNSETTLED_STEPS: u32 = 8;
/// As many of the node: they do what the arm before left undone.
const UNSETTLED_NODE_STEPS: u32 = 3;
/// Steps in a cell before anything is decided there.
const DWELL_STEPS: u32 = 32;
/// Flips in any minute behind which arms that are known are left alone.
pub(crate) const MAX_LOOKS: usize = 12;
/// Flips in any minute.
pub(crate) const MAX_FLIPS: usize = 48;
const MINUTE: Duration = Duration::from_secs(60);

/// One step that landed, and the arm that was in force all the while it ran.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Seen {
    pub(crate) at: Duration,
    pub(crate) arm: usize,
    pub(crate) took: Duration,
    pub(crate) step: SeenStep,
}

/// What kind of step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum SeenStep {
    /// A loop step of the chain.
    Chain {
        /// Requests that had a frame to make, those that were held up included.
        wanting: usize,
        /// Rows that made one.
        rows: usize,
        /// The node ran beside it.
        beside: bool,
    },
    /// Another step of the chain: requests that begin.
    Begin { rows: usize },
    /// A step of the node.
    Node { rows: usize, items: usize },
}

/// Why the arm changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It was not measured in this cell yet, or long ago.
    Try,
    /// The try was no better.
    Return,
    /// The try was better: it stays, or what was tried before it comes back.
    Better,
    /// Another cell, with another best arm.
    Load,
}

impl Reason {
    /// As in logs and metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Reason::Try => "try",
            Reason::Return => "return",
            Reason::Better => "better",
            Reason::Load => "load",
        }
    }
}

/// A change of arms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Flip {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) reason: Reason,
    /// What a frame of every request costs on the two, where that was measured.
    pub(crate) from_cost: Option<Duration>,
    pub(crate) to_cost: Option<Duration>,
    /// About so many requests.
    pub(crate) wanting: f64,
    /// Items of a row.
    pub(crate) width: f64,
    /// What a chain step took under `from`, with the node beside it and without.
    pub(crate) beside: Option<Duration>,
    pub(crate) alone: Option<Duration>,
}

/// A look at an arm that is not the one in use.
#[derive(Debug, Clone, Copy)]
struct Try {
    /// The arm to go back to.
    home: usize,
    cell: usize,
    since: Duration,
    steps: u32,
    node_steps: u32,
}

/// The decision.
#[derive(Debug)]
pub(crate) struct Chooser {
    n_arms: usize,
    arm: usize,
    load: Load,
    cells: Vec<Cell>,
    /// The cell that the arm was last chosen in.
    decided_in: Option<usize>,
    /// Steps in the cell, and under the arm, so far.
    dwelt: u32,
    /// Steps still to be passed over, of the chain and of the node.
    unsettled: u32,
    unsettled_node: u32,
    trying: Option<Try>,
    /// When the arm changed, newest last.
    flips: VecDeque<Duration>,
}

impl Chooser {
    /// `n_arms` arms, of which `start` is in force.
    pub(crate) fn new(n_arms: usize, start: usize) -> Self {
        Self {
            n_arms,
            arm: start,
            load: Load::default(),
            cells: (0..N_CELLS).map(|_| Cell::new(n_arms)).collect(),
            decided_in: None,
            dwelt: 0,
            unsettled: UNSETTLED_STEPS,
            unsettled_node: 0,
            trying: None,
            flips: VecDeque::with_capacity(MAX_FLIPS + 1),
        }
    }

    /// The arm to use now.
    #[cfg(test)]
    pub(crate) fn arm(&self) -> usize {
        self.arm
    }

    /// Take in a step.
    pub(crate) fn observe(&mut self, seen: &Seen) {
        let before = self.load.cell();
        self.load.observe(&seen.step);
        if self.load.cell() != before {
            self.dwelt = 0;
        }
        if seen.arm != self.arm {
            return;
        }
        let of_chain = matches!(seen.step, SeenStep::Chain { .. });
        let of_node = matches!(seen.step, SeenStep::Node { .. });
        if self.unsettled > 0 || self.unsettled_node > 0 {
            self.unsettled = self.unsettled.saturating_sub(u32::from(of_chain));
            self.unsettled_node = self.unsettled_node.saturating_sub(u32::from(of_node));
            return;
        }
        self.dwelt += u32::from(of_chain);
        self.cells[self.load.cell()].observe(seen);
        if let Some(trying) = &mut self.trying {
            trying.steps += u32::from(of_chain);
            trying.node_steps += u32::from(of_node);
        }
    }

    /// Decide, at a step's boundary. The caller puts the flip into effect; until it has, the steps that it
    /// reports carry the old arm and do not count. A try that was better is told as a flip to the arm in force.
    pub(crate) fn decide(&mut self, at: Duration) -> Option<Flip> {
        while self
            .flips
            .front()
            .is_some_and(|&flip| at.saturating_sub(flip) >= MINUTE)
        {
            self.flips.pop_front();
        }
        match self.trying {
            Some(trying) => self.finish_try(at, trying),
            None => self.start(at),
        }
    }

    /// What a frame of every request costs on an arm, seconds, at the load as it is.
    fn cost(&self, cell: usize, arm: usize) -> Option<f64> {
        self.cells[cell].cost(arm, self.load.wanting())
    }

    fn finish_try(&mut self, at: Duration, trying: Try) -> Option<Flip> {
        let cell = trying.cell;
        let home_cost = self.cost(cell, trying.home);
        let cost = self.cost(cell, self.arm);
        let hopeless = trying.steps >= HOPELESS_STEPS
            && matches!((cost, home_cost), (Some(cost), Some(home)) if cost > home * HOPELESS);
        let seen_enough = trying.steps >= TRY_STEPS && trying.node_steps >= TRY_NODE_STEPS;
        let over = at.saturating_sub(trying.since) >= TRY_FOR;
        let moved = self.load.cell() != cell;
        if !(hopeless || seen_enough || over || moved) {
            return None;
        }
        self.cells[cell].tried(self.arm, at);
        self.cells[cell].count_try(self.arm);
        // It was measured until the try began.
        self.cells[cell].tried(trying.home, trying.since);
        // The next arm that nobody knows is tried from here: one flip instead of two.
        if !moved
            && let Some(next) = self.due(cell, at, trying.home, self.arm)
            && self.may_flip(2, MAX_FLIPS)
            && !self.cells[cell].knows(next)
        {
            self.trying = Some(Try {
                since: at,
                steps: 0,
                node_steps: 0,
                ..trying
            });
            return Some(self.flip(at, cell, next, Reason::Try));
        }
        self.trying = None;
        let best = self.best(cell, trying.home);
        if let Some(cost) = self.cost(cell, best) {
            self.cells[cell].compared(cost);
        }
        if best == self.arm {
            // It is in force already, and stays.
            let kept = self.about(cell, trying.home, best, Reason::Better);
            self.dwelt = 0;
            return Some(kept);
        }
        let reason = if best == trying.home {
            Reason::Return
        } else {
            Reason::Better
        };
        Some(self.flip(at, cell, best, reason))
    }

    fn start(&mut self, at: Duration) -> Option<Flip> {
        if self.dwelt < DWELL_STEPS {
            return None;
        }
        let cell = self.load.cell();
        self.cost(cell, self.arm)?;
        // Only a cell that was just entered is decided by what was known: in one, estimates drift past each other.
        if self.decided_in.replace(cell) != Some(cell) {
            let best = self.guess(cell).unwrap_or_else(|| self.best(cell, self.arm));
            if best != self.arm && self.may_flip(1, MAX_FLIPS) {
                if let Some(cost) = self.cost(cell, best) {
                    self.cells[cell].compared(cost);
                }
                return Some(self.flip(at, cell, best, Reason::Load));
            }
        }
        let next = self.due(cell, at, self.arm, self.arm)?;
        let most = match self.cells[cell].tries(next) < FIRST_TRIES {
            true => MAX_FLIPS,
            false => MAX_LOOKS,
        };
        if !self.may_flip(2, most) {
            return None;
        }
        self.trying = Some(Try {
            home: self.arm,
            cell,
            since: at,
            steps: 0,
            node_steps: 0,
        });
        Some(self.flip(at, cell, next, Reason::Try))
    }

    /// In a cell where no arm was looked at yet: what the nearest one says of this load, when the arm in use would be
    /// hopeless.
    fn guess(&self, cell: usize) -> Option<usize> {
        let explored = |cell: &usize| (0..self.n_arms).any(|arm| self.cells[*cell].knows(arm));
        if explored(&cell) {
            return None;
        }
        let nearest = (0..N_CELLS)
            .filter(explored)
            .min_by_key(|&other| distance(cell, other))?;
        let best = self.best(nearest, self.arm);
        let hopeless = self.cost(nearest, self.arm)? > self.cost(nearest, best)? * HOPELESS;
        hopeless.then_some(best)
    }

    /// The arm that costs least; `home` unless another is better by the margin.
    fn best(&self, cell: usize, home: usize) -> usize {
        let Some(home_cost) = self.cost(cell, home) else {
            return home;
        };
        let others = (0..self.n_arms).filter(|&arm| arm != home);
        let costs = others.filter_map(|arm| Some((arm, self.cost(cell, arm)?)));
        let best = costs.min_by(|a, b| a.1.total_cmp(&b.1));
        best.filter(|(_, cost)| *cost < home_cost * (1.0 - MARGIN))
            .map_or(home, |(arm, _)| arm)
    }

    /// The arm to try now: one that is not known here, or that was last tried longest ago of those that are due.
    fn due(&self, cell: usize, at: Duration, home: usize, here: usize) -> Option<usize> {
        let home_cost = self.cost(cell, home)?;
        let state = &self.cells[cell];
        let changed = state.changed(home_cost, CHANGED);
        let n_others = (self.n_arms - 1) as f64;
        (0..self.n_arms)
            .filter(|&arm| arm != home && arm != here)
            .filter(|&arm| {
                let Some(tried) = state.last_try(arm) else {
                    return true;
                };
                let since = at.saturating_sub(tried);
                let loss = self.cost(cell, arm).map_or(0.0, |cost| cost / home_cost - 1.0);
                if state.tries(arm) < FIRST_TRIES && loss < NEAR {
                    return since >= TRY_AGAIN_AFTER;
                }
                let step = home_cost.max(0.0) * f64::from(TRY_STEPS + UNSETTLED_STEPS);
                let within_budget = (step * loss.max(0.0) / TRY_BUDGET).min(TRY_AFTER.1.as_secs_f64());
                let least = if changed { TRY_AFTER_CHANGE } else { TRY_AFTER.0 };
                since.as_secs_f64() >= within_budget.max(least.as_secs_f64()) * n_others
            })
            .min_by_key(|&arm| state.last_try(arm))
    }

    /// Whether `n` more flips are within a bound.
    fn may_flip(&self, n: usize, most: usize) -> bool {
        self.flips.len() + n <= most
    }

    fn flip(&mut self, at: Duration, cell: usize, to: usize, reason: Reason) -> Flip {
        let flip = self.about(cell, self.arm, to, reason);
        self.arm = to;
        self.unsettled = UNSETTLED_STEPS;
        self.unsettled_node = UNSETTLED_NODE_STEPS;
        self.dwelt = 0;
        self.flips.push_back(at);
        flip
    }

    fn about(&self, cell: usize, from: usize, to: usize, reason: Reason) -> Flip {
        let cost = |arm| self.cost(cell, arm).map(Duration::from_secs_f64);
        let (beside, alone) = self.cells[cell].chain_steps(from);
        Flip {
            from,
            to,
            reason,
            from_cost: cost(from),
            to_cost: cost(to),
            wanting: self.load.wanting(),
            width: self.load.width(),
            beside,
            alone,
        }
    }
}

#[cfg(test)]
mod tests;
