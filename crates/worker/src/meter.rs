//! The worker's metrics. The engine counts by itself; this carries what it counted over to the recorder.

use std::collections::BTreeMap;

use laneway_engine::{EngineStats, Histogram, LanePhases, Phase, STEP_MS_BUCKETS, WalkStats};
use laneway_plan::declaration::WalkKind;
use laneway_telemetry::metric;
use metrics::{counter, gauge, histogram};

/// A request ended: a finish reason's label, or that of an error code.
pub(crate) fn ended(outcome: &'static str) {
    counter!(metric::WORKER_FINISHED, "outcome" => outcome).increment(1);
}

/// A request was admitted after so long.
pub(crate) fn queued(wait: std::time::Duration) {
    histogram!(metric::WORKER_QUEUE_WAIT).record(wait.as_secs_f64());
}

/// How busy the lanes were.
pub(crate) fn lanes(shares: &BTreeMap<usize, f64>) {
    for (lane, share) in shares {
        gauge!(metric::WORKER_LANE_BUSY, "lane" => lane.to_string()).set(*share);
    }
}

/// Carry over what changed between two snapshots of the same engine.
pub(crate) fn carry_over(before: &EngineStats, now: &EngineStats) {
    gauge!(metric::WORKER_QUEUED).set(now.queued as f64);
    gauge!(metric::WORKER_RUNNING).set(now.running as f64);
    for pool in &now.pools {
        gauge!(metric::WORKER_RESOURCE_USED, "resource" => pool.key.to_string()).set(f64::from(pool.used));
        gauge!(metric::WORKER_RESOURCE_CAPACITY, "resource" => pool.key.to_string())
            .set(f64::from(pool.slots));
    }
    for walk in &now.walks {
        let none = WalkStats::default();
        let earlier = before
            .walks
            .iter()
            .find(|earlier| earlier.walk == walk.walk)
            .unwrap_or(&none);
        let labels = [("lane", walk.lane.to_string()), ("walk", walk.walk.to_string())];
        let seconds = histogram!(metric::WORKER_STEP, &labels);
        for (bucket, n_steps) in new_steps(earlier, walk) {
            seconds.record_many(bucket_seconds(bucket), n_steps);
        }
        record(
            &histogram!(metric::WORKER_STEP_ROWS, &labels),
            &earlier.rows_of_steps,
            &walk.rows_of_steps,
            1.0,
        );
        record(
            &histogram!(metric::WORKER_STEP_DEVICE, &labels),
            &earlier.device_time,
            &walk.device_time,
            NANOS,
        );
        if walk.kind == Some(WalkKind::Stream) {
            record(
                &histogram!(metric::WORKER_STEP_ITEMS, &labels),
                &earlier.items_of_steps,
                &walk.items_of_steps,
                1.0,
            );
        }
    }
    let untouched = LanePhases::default();
    for (lane, phases) in now.phases.iter().enumerate() {
        let earlier = before.phases.get(lane).unwrap_or(&untouched);
        for phase in Phase::ALL {
            let labels = [("lane", lane.to_string()), ("phase", phase.label().to_owned())];
            record(
                &histogram!(metric::WORKER_PHASE, &labels),
                earlier.of(phase),
                phases.of(phase),
                NANOS,
            );
        }
    }
    for (index, auto) in now.autos.iter().enumerate() {
        let node = auto.node.to_string();
        for (place, arm) in auto.arms.iter().enumerate() {
            let labels = [("node", node.clone()), ("arm", arm.to_string())];
            gauge!(metric::WORKER_ARM, &labels).set(f64::from(u8::from(place == auto.in_force)));
        }
        for flip in &auto.flips {
            let labels = [
                ("node", node.clone()),
                ("to", auto.arms[flip.to].to_string()),
                ("reason", flip.reason.to_owned()),
            ];
            let earlier = before.autos.get(index).map_or(&[][..], |auto| &auto.flips);
            let same = earlier
                .iter()
                .find(|other| (other.to, other.reason) == (flip.to, flip.reason));
            let new = flip.count - same.map_or(0, |flip| flip.count);
            counter!(metric::WORKER_LANE_FLIPS, &labels).increment(new);
        }
    }
    if let Some(ratio) = steps_per_loop_step(before, now) {
        gauge!(metric::WORKER_CODEC_STEPS_PER_TALKER_STEP).set(ratio);
    }
}

/// Seconds in one of the engine's nanoseconds.
const NANOS: f64 = 1e-9;

/// Add what is new to an exported histogram: each bucket's values with their mean, so that the sum is exact.
fn record(exported: &metrics::Histogram, before: &Histogram, now: &Histogram, unit: f64) {
    for (count, mean) in now.since(before) {
        exported.record_many(mean * unit, count as usize);
    }
}

/// Steps that consumed a stream for each one that produced it; `None` when nothing was produced meanwhile.
fn steps_per_loop_step(before: &EngineStats, now: &EngineStats) -> Option<f64> {
    let steps = |stats: &EngineStats, kind| -> u64 {
        let of_kind = stats.walks.iter().filter(|walk| walk.kind == Some(kind));
        of_kind.map(|walk| walk.steps).sum()
    };
    let new = |kind| steps(now, kind).saturating_sub(steps(before, kind));
    let produced = new(WalkKind::Loop);
    (produced > 0).then(|| new(WalkKind::Stream) as f64 / produced as f64)
}

fn new_steps(before: &WalkStats, now: &WalkStats) -> impl Iterator<Item = (usize, usize)> {
    let counts = now.step_time_buckets.iter().zip(before.step_time_buckets);
    let new: Vec<_> = counts
        .map(|(now, before)| (now - before) as usize)
        .enumerate()
        .collect();
    new.into_iter().filter(|(_, n_steps)| *n_steps > 0)
}

/// A step time inside the bucket: its middle, or the last bound for the one without an end.
fn bucket_seconds(bucket: usize) -> f64 {
    let lower = if bucket == 0 {
        0.0
    } else {
        STEP_MS_BUCKETS[bucket - 1]
    };
    let upper = STEP_MS_BUCKETS.get(bucket).copied().unwrap_or(lower);
    (lower + upper) / 2.0 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codec_steps_are_set_against_talker_steps() {
        let stats = |talker, codec| {
            let walk = |kind, steps| WalkStats {
                kind: Some(kind),
                steps,
                ..WalkStats::default()
            };
            EngineStats {
                walks: vec![walk(WalkKind::Loop, talker), walk(WalkKind::Stream, codec)],
                ..EngineStats::default()
            }
        };
        assert_eq!(steps_per_loop_step(&stats(100, 40), &stats(200, 88)), Some(0.48));
        assert_eq!(steps_per_loop_step(&stats(100, 40), &stats(100, 41)), None);
    }

    #[test]
    fn only_new_steps_are_carried_over_each_inside_its_bucket() {
        let (mut before, mut now) = (WalkStats::default(), WalkStats::default());
        (before.step_time_buckets[0], now.step_time_buckets[0]) = (5, 7);
        (before.step_time_buckets[3], now.step_time_buckets[3]) = (4, 4);
        let last = STEP_MS_BUCKETS.len();
        now.step_time_buckets[last] = 1;
        assert_eq!(new_steps(&before, &now).collect::<Vec<_>>(), [(0, 2), (last, 1)]);
        for (bucket, bound) in STEP_MS_BUCKETS.iter().enumerate() {
            assert!(bucket_seconds(bucket) * 1e3 < *bound);
        }
        assert_eq!(bucket_seconds(last) * 1e3, STEP_MS_BUCKETS[last - 1]);
    }
}
