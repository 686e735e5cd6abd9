//! What this worker tells of itself: to the engine-manager in heartbeats, to anyone who asks for its status.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use laneway_engine::EngineStats;
use laneway_plan::WorkerPlan;
use laneway_proto::{micros, v1};
use parking_lot::Mutex;

use crate::service::Role;
use crate::state::State;

/// Shortest time that a lane's busy share is measured over.
const BUSY_WINDOW: Duration = Duration::from_secs(1);

/// Everything that stays as it is while the worker runs, and the meter of the one thing that does not.
#[derive(Debug)]
pub(crate) struct Reporter {
    worker_id: String,
    began: Instant,
    plan: OnceLock<Planned>,
    facts: OnceLock<v1::ModelFacts>,
    busy: Mutex<BusyMeter>,
}

#[derive(Debug)]
struct Planned {
    role: Role,
    plan: WorkerPlan,
}

impl Reporter {
    pub(crate) fn new(worker_id: String) -> Self {
        let began = Instant::now();
        let busy = Mutex::new(BusyMeter {
            since: began,
            busy_then: Vec::new(),
            share: BTreeMap::new(),
        });
        Reporter {
            worker_id,
            began,
            plan: OnceLock::new(),
            facts: OnceLock::new(),
            busy,
        }
    }

    /// The plan came. A second one is the same one.
    pub(crate) fn planned(&self, role: Role, plan: WorkerPlan) {
        let _ = self.plan.set(Planned { role, plan });
    }

    /// The model is loaded.
    pub(crate) fn loaded(&self, facts: v1::ModelFacts) {
        let _ = self.facts.set(facts);
    }

    /// What gateways may offer, once the worker serves.
    pub(crate) fn facts(&self, state: State) -> Option<v1::ModelFacts> {
        self.facts
            .get()
            .filter(|_| state == State::Serving || state == State::Draining)
            .cloned()
    }

    pub(crate) fn load(&self, stats: &EngineStats) -> v1::WorkerLoad {
        let limits = self.plan.get().map(|planned| &planned.plan);
        v1::WorkerLoad {
            queued: stats.queued as u32,
            queue_capacity: limits.map_or(0, |plan| plan.max_queue),
            running: stats.running as u32,
            capacity: limits.map_or(0, |plan| plan.max_rows),
        }
    }

    pub(crate) fn status(&self, state: State, stats: &EngineStats) -> v1::WorkerStatusResponse {
        v1::WorkerStatusResponse {
            worker_id: self.worker_id.clone(),
            state: v1::WorkerState::from(state).into(),
            load: Some(self.load(stats)),
            lanes: self.lanes(stats),
            resources: self.resources(stats),
            uptime_ms: self.began.elapsed().as_millis() as u64,
            facts: self.facts(state),
            chain_host_us: micros(stats.chain_host_time()),
            parks: stats.parks,
            overrun_rows: stats.overrun_rows,
            takes_requests: self.plan.get().is_some_and(|planned| planned.role.synthesizes),
        }
    }

    /// Share of the last second or more that each lane had a step in flight.
    pub(crate) fn busy(&self, stats: &EngineStats) -> BTreeMap<usize, f64> {
        self.busy.lock().measure(Instant::now(), stats)
    }

    fn lanes(&self, stats: &EngineStats) -> Vec<v1::LaneStatus> {
        let mut lanes: BTreeMap<usize, v1::LaneStatus> = BTreeMap::new();
        for walk in &stats.walks {
            let lane = lanes.entry(walk.lane).or_default();
            lane.lane = walk.lane as u32;
            if !lane.nodes.iter().any(|node| *node == *walk.node) {
                lane.nodes.push(walk.node.to_string());
            }
            lane.walks.push(v1::WalkStatus {
                walk: walk.walk.to_string(),
                steps: walk.steps,
                rows: walk.rows,
                step_us_total: micros(walk.step_time),
                step_us_max: micros(walk.step_time_max),
                host_us_total: micros(walk.host_time),
            });
        }
        let shares = self.busy(stats);
        for (lane, status) in &mut lanes {
            status.busy = shares.get(lane).copied().unwrap_or_default();
        }
        lanes.into_values().collect()
    }

    fn resources(&self, stats: &EngineStats) -> Vec<v1::ResourceStatus> {
        let bytes = |key: &Arc<str>| {
            let plan = &self.plan.get()?.plan;
            Some(
                plan.resources
                    .iter()
                    .find(|resource| *resource.key == **key)?
                    .bytes,
            )
        };
        let pool = |pool: &laneway_engine::PoolStats| v1::ResourceStatus {
            key: pool.key.to_string(),
            total: pool.slots,
            used: pool.used,
            bytes: bytes(&pool.key).unwrap_or_default(),
        };
        stats.pools.iter().map(pool).collect()
    }
}

/// Share of wall time that each lane had a step in flight, between the last two measurements.
#[derive(Debug)]
struct BusyMeter {
    since: Instant,
    /// By walk: one that moved was busy on the lane that it is on now, as far as this can tell.
    busy_then: Vec<Duration>,
    share: BTreeMap<usize, f64>,
}

impl BusyMeter {
    fn measure(&mut self, now: Instant, stats: &EngineStats) -> BTreeMap<usize, f64> {
        let window = now - self.since;
        if window >= BUSY_WINDOW {
            let mut busy: BTreeMap<usize, Duration> = BTreeMap::new();
            for (index, walk) in stats.walks.iter().enumerate() {
                let before = self.busy_then.get(index).copied().unwrap_or_default();
                *busy.entry(walk.lane).or_default() += walk.step_time.saturating_sub(before);
            }
            let share = |(lane, busy): (&usize, &Duration)| {
                // The chain keeps two steps in flight, whose times overlap.
                let share = busy.as_secs_f64() / window.as_secs_f64();
                (*lane, share.min(1.0))
            };
            self.share = busy.iter().map(share).collect();
            self.since = now;
            self.busy_then = stats.walks.iter().map(|walk| walk.step_time).collect();
        }
        self.share.clone()
    }
}

#[cfg(test)]
mod tests {
    use laneway_engine::WalkStats;

    use super::*;

    fn stats(chain_ms: u64, lane_ms: u64) -> EngineStats {
        let walk = |walk: &str, lane, ms| WalkStats {
            walk: walk.into(),
            node: "Node".into(),
            lane,
            step_time: Duration::from_millis(ms),
            ..Default::default()
        };
        EngineStats {
            walks: vec![
                walk("prefill", 0, chain_ms / 2),
                walk("decode", 0, chain_ms / 2),
                walk("chunk", 1, lane_ms),
            ],
            ..Default::default()
        }
    }

    #[test]
    fn busy_is_a_share_of_the_window_and_at_most_one() {
        let began = Instant::now();
        let mut meter = BusyMeter {
            since: began,
            busy_then: Vec::new(),
            share: BTreeMap::new(),
        };
        let at = |ms| began + Duration::from_millis(ms);
        assert!(
            meter.measure(at(500), &stats(400, 100)).is_empty(),
            "too early to tell"
        );
        assert_eq!(
            meter.measure(at(2000), &stats(1000, 500)),
            [(0, 0.5), (1, 0.25)].into()
        );
        assert_eq!(
            meter.measure(at(2500), &stats(1400, 500)),
            [(0, 0.5), (1, 0.25)].into()
        );
        assert_eq!(
            meter.measure(at(4000), &stats(9000, 500)),
            [(0, 1.0), (1, 0.0)].into()
        );
    }
}
