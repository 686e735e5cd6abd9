//! The worker's metrics. The engine counts by itself; this carries what it counted over to the recorder.

use laneway_engine::{EngineStats, STEP_MS_BUCKETS, WalkStats};
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
        let n_steps = walk.steps - earlier.steps;
        if n_steps > 0 {
            // The engine sums rows, so the steps of one interval are recorded with their mean.
            let mean_rows = (walk.rows - earlier.rows) as f64 / n_steps as f64;
            histogram!(metric::WORKER_STEP_ROWS, &labels).record_many(mean_rows, n_steps as usize);
        }
    }
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
