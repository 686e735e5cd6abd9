//! What an engine has done and holds, as plain numbers.

use std::sync::Arc;
use std::time::Duration;

use laneway_plan::declaration::WalkKind;

use crate::phase::{Histogram, LanePhases};

/// Upper bounds of the step-time buckets in milliseconds; the last bucket has none. They are finest around
/// the budget of a frame.
pub const STEP_MS_BUCKETS: [f64; 11] = [0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 1000.0];

/// A snapshot. Counters only grow; gauges are as of the engine's last turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineStats {
    /// By walk of this worker.
    pub walks: Vec<WalkStats>,
    /// By lane; entry 0 is the chain's.
    pub phases: Vec<LanePhases>,
    /// Nodes that move between the chain and their lane.
    pub autos: Vec<AutoStats>,
    /// By resource.
    pub pools: Vec<PoolStats>,
    /// Requests that wait for admission.
    pub queued: usize,
    /// Requests that run.
    pub running: usize,
    /// Requests accepted so far.
    pub submitted: u64,
    /// Requests that finished in order.
    pub finished: u64,
    /// Requests that failed, kills not counted.
    pub failed: u64,
    /// Requests that were killed or whose listener went away.
    pub cancelled: u64,
    /// Times that a row parked: its pool, its edge or its output was full.
    pub parks: u64,
    /// Steps whose plan was refused.
    pub refused_steps: u64,
    /// Rows of chain steps that ran past their end and were dropped.
    pub overrun_rows: u64,
}

impl EngineStats {
    /// Host time that the chain's steps took outside waits.
    pub fn chain_host_time(&self) -> Duration {
        let of_chain = self.walks.iter().filter(|walk| walk.lane == 0);
        of_chain.map(|walk| walk.host_time).sum()
    }
}

/// Where a node that is left to measurement runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AutoStats {
    /// Node name.
    pub node: Arc<str>,
    /// What it may choose among: `chain`, `lane1`, `lane1-sms32`.
    pub arms: Vec<Arc<str>>,
    /// The arm that it is on, by its place among these.
    pub in_force: usize,
    /// Changes so far, by where to and why.
    pub flips: Vec<FlipCount>,
}

/// Changes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlipCount {
    /// The arm, by its place among the node's.
    pub to: usize,
    /// Why: `try`, `return`, `better` or `load`.
    pub reason: &'static str,
    /// How often.
    pub count: u64,
}

/// Steps of one walk.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WalkStats {
    /// Walk name.
    pub walk: Arc<str>,
    /// Node name.
    pub node: Arc<str>,
    /// Lane id; 0 is the chain. For a node that moves, the lane that it is on now.
    pub lane: usize,
    /// What the walk is for.
    pub kind: Option<WalkKind>,
    /// Steps landed.
    pub steps: u64,
    /// Rows in them.
    pub rows: u64,
    /// Time from launch to landing, summed.
    pub step_time: Duration,
    /// The longest.
    pub step_time_max: Duration,
    /// Host time of chain steps outside waits: choosing rows, planning, launching, and what followed their landing.
    /// Of a lane's steps it is 0: their launch thread has nothing else to do.
    pub host_time: Duration,
    /// Steps by time, one more than [`STEP_MS_BUCKETS`].
    pub step_time_buckets: [u64; STEP_MS_BUCKETS.len() + 1],
    /// Rows of each step.
    pub rows_of_steps: Histogram,
    /// Items in the windows of each step; empty unless a stream edge feeds the walk.
    pub items_of_steps: Histogram,
    /// Nanoseconds that each step had the device, by its own clock where it has one.
    pub device_time: Histogram,
}

impl WalkStats {
    pub(crate) fn landed(&mut self, rows: usize, took: Duration) {
        self.steps += 1;
        self.rows += rows as u64;
        self.step_time += took;
        self.step_time_max = self.step_time_max.max(took);
        let ms = took.as_secs_f64() * 1e3;
        let bucket = STEP_MS_BUCKETS.partition_point(|&bound| bound < ms);
        self.step_time_buckets[bucket] += 1;
    }
}

/// Use of one resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Resource key.
    pub key: Arc<str>,
    /// Slots or pages.
    pub slots: u32,
    /// Of these, held by requests or by steps in flight.
    pub used: u32,
}
