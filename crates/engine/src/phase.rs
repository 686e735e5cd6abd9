//! What the phases of a step take and how large steps are, in histograms that an engine's threads fill without
//! a lock and without allocating. Read them through [`crate::EngineStats`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::topology::Topology;

/// Buckets of every histogram here: one more than bounds.
const N_BUCKETS: usize = 16;
type Bounds = [u64; N_BUCKETS - 1];

/// Upper bounds of times, nanoseconds: from what a choice of rows takes to a step that no listener forgives.
const TIME_NS: Bounds = [
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    200_000_000,
];
/// Upper bounds of the rows or items of a step.
const SIZES: Bounds = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256];

/// A part of a step's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The engine thread chooses the walk and its rows, and takes out of the requests what they need.
    Admit,
    /// The node opens new rows and fills its index buffers.
    Plan,
    /// The step is queued on its stream.
    Launch,
    /// From there until it was seen to have landed; on the chain the step in front of it is part of that.
    Wait,
    /// The node turns what landed into outcomes.
    Postprocess,
    /// The engine thread hands outcomes to edges and listeners.
    Settle,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Phase; 6] = [
        Phase::Admit,
        Phase::Plan,
        Phase::Launch,
        Phase::Wait,
        Phase::Postprocess,
        Phase::Settle,
    ];

    /// As in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Phase::Admit => "admit",
            Phase::Plan => "plan",
            Phase::Launch => "launch",
            Phase::Wait => "wait",
            Phase::Postprocess => "postprocess",
            Phase::Settle => "settle",
        }
    }
}

/// A histogram as it was: for each bucket how many values fell into it, and their sum. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; N_BUCKETS],
    sums: [u64; N_BUCKETS],
}

impl Histogram {
    /// Values in it.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// What they sum to.
    pub fn sum(&self) -> u64 {
        self.sums.iter().sum()
    }

    /// What was added since `earlier`, bucket by bucket: how many values, and their mean, which lies inside the
    /// bucket. Empty buckets are left out.
    pub fn since<'a>(&'a self, earlier: &'a Histogram) -> impl Iterator<Item = (u64, f64)> + 'a {
        (0..N_BUCKETS).filter_map(|bucket| {
            // Two numbers are not read at one instant, so that a sum may be ahead of its count.
            let count = self.counts[bucket].saturating_sub(earlier.counts[bucket]);
            let sum = self.sums[bucket].saturating_sub(earlier.sums[bucket]);
            (count > 0).then(|| (count, sum as f64 / count as f64))
        })
    }
}

/// A histogram in the making. Any thread may add.
#[derive(Debug)]
pub(crate) struct Recorder {
    bounds: &'static Bounds,
    counts: [AtomicU64; N_BUCKETS],
    sums: [AtomicU64; N_BUCKETS],
}

impl Recorder {
    fn new(bounds: &'static Bounds) -> Self {
        Self {
            bounds,
            counts: Default::default(),
            sums: Default::default(),
        }
    }

    pub(crate) fn add(&self, value: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.sums[bucket].fetch_add(value, Ordering::Relaxed);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_time(&self, time: Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    fn snapshot(&self) -> Histogram {
        let load = |numbers: &[AtomicU64; N_BUCKETS]| {
            std::array::from_fn(|bucket| numbers[bucket].load(Ordering::Relaxed))
        };
        Histogram {
            counts: load(&self.counts),
            sums: load(&self.sums),
        }
    }
}

/// The steps of one walk.
#[derive(Debug)]
pub(crate) struct WalkRecorders {
    pub(crate) rows: Recorder,
    pub(crate) items: Recorder,
    /// Device time, by its own clock where it has one.
    pub(crate) device: Recorder,
}

/// Every recorder of an engine.
#[derive(Debug)]
pub(crate) struct Recorders {
    /// By lane, then by phase.
    phases: Vec<[Recorder; Phase::ALL.len()]>,
    pub(crate) walks: Vec<WalkRecorders>,
}

impl Recorders {
    pub(crate) fn new(topology: &Topology) -> Self {
        let lane = |_| std::array::from_fn(|_| Recorder::new(&TIME_NS));
        let walk = |_| WalkRecorders {
            rows: Recorder::new(&SIZES),
            items: Recorder::new(&SIZES),
            device: Recorder::new(&TIME_NS),
        };
        Self {
            phases: (0..topology.n_lanes).map(lane).collect(),
            walks: topology.walks.iter().map(walk).collect(),
        }
    }

    pub(crate) fn phase(&self, lane: usize, phase: Phase, took: Duration) {
        self.phases[lane][phase as usize].add_time(took);
    }

    /// The histograms of each phase, by lane.
    pub(crate) fn phases(&self) -> Vec<LanePhases> {
        let lanes = self.phases.iter();
        lanes
            .map(|recorders| LanePhases {
                phases: std::array::from_fn(|phase| recorders[phase].snapshot()),
            })
            .collect()
    }

    pub(crate) fn fill(&self, walks: &mut [crate::WalkStats]) {
        for (recorders, stats) in self.walks.iter().zip(walks) {
            stats.rows_of_steps = recorders.rows.snapshot();
            stats.items_of_steps = recorders.items.snapshot();
            stats.device_time = recorders.device.snapshot();
        }
    }
}

/// What the phases of one lane's steps took.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LanePhases {
    phases: [Histogram; Phase::ALL.len()],
}

impl LanePhases {
    /// Nanoseconds.
    pub fn of(&self, phase: Phase) -> &Histogram {
        &self.phases[phase as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_falls_into_the_bucket_whose_bound_it_does_not_pass() {
        let recorder = Recorder::new(&SIZES);
        let before = recorder.snapshot();
        for value in [1, 4, 5, 6, 257, 1000] {
            recorder.add(value);
        }
        let now = recorder.snapshot();
        let added: Vec<_> = now.since(&before).collect();
        assert_eq!(added, [(1, 1.0), (1, 4.0), (2, 5.5), (2, 628.5)]);
        assert_eq!((now.count(), now.sum()), (6, 1273));
        assert_eq!(now.since(&now).count(), 0);
    }

    #[test]
    fn phases_have_one_place_each() {
        for (place, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, place);
        }
    }
}
