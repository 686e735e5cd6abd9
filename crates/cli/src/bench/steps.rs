//! What the workers of a system in this process did between two looks at their status.

use std::collections::BTreeMap;

use laneway_models_decl::qwen3_tts::{CODEC_CHUNK, TALKER_DECODE};
use laneway_proto::v1;
use serde::Serialize;

/// Steps of a window.
#[derive(Debug, Serialize)]
pub(super) struct Steps {
    walks: Vec<Walk>,
    /// Steps of the codec for each frame step of the Talker.
    codec_per_talker: Option<f64>,
    /// Host time of a chain step, planning and launching.
    chain_host_us: Option<f64>,
    /// Times that a row parked: its pool, its edge or its output was full.
    parks: u64,
    /// Rows that ran past their end and were dropped.
    overrun_rows: u64,
    /// Share of wall time with a step in flight at the end of the window, by worker and lane.
    busy: Vec<Busy>,
}

/// One walk; `lane` says whether it is on the chain (0) or beside it, at the end.
#[derive(Debug, Serialize)]
struct Walk {
    worker: usize,
    lane: u32,
    walk: String,
    steps: u64,
    rows_per_step: f64,
    /// From launch to landing. The chain keeps two steps in flight, whose times overlap.
    mean_ms: f64,
    /// Host time of a chain step outside waits.
    host_us: f64,
}

#[derive(Debug, Serialize)]
struct Busy {
    worker: usize,
    lane: u32,
    share: f64,
}

impl Steps {
    /// From the workers' statuses at the start and at the end of a window; `None` where there are none to ask.
    pub(super) fn between(
        before: &[v1::WorkerStatusResponse],
        after: &[v1::WorkerStatusResponse],
    ) -> Option<Self> {
        if after.is_empty() || before.len() != after.len() {
            return None;
        }
        let walks: Vec<Walk> = before
            .iter()
            .zip(after)
            .enumerate()
            .flat_map(|(worker, (before, after))| walks(worker, before, after))
            .collect();
        let steps = |name: &str| -> u64 {
            let named = walks.iter().filter(|walk| walk.walk == name);
            named.map(|walk| walk.steps).sum()
        };
        let chain: u64 = walks
            .iter()
            .filter(|walk| walk.lane == 0)
            .map(|walk| walk.steps)
            .sum();
        let grown = |count: fn(&v1::WorkerStatusResponse) -> u64| -> u64 {
            let pairs = before.iter().zip(after);
            pairs
                .map(|(before, after)| count(after).saturating_sub(count(before)))
                .sum()
        };
        let ratio = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        Some(Steps {
            codec_per_talker: ratio(steps(CODEC_CHUNK), steps(TALKER_DECODE)),
            chain_host_us: ratio(grown(|status| status.chain_host_us), chain),
            parks: grown(|status| status.parks),
            overrun_rows: grown(|status| status.overrun_rows),
            busy: after
                .iter()
                .enumerate()
                .flat_map(|(worker, status)| {
                    status.lanes.iter().map(move |lane| Busy {
                        worker,
                        lane: lane.lane,
                        share: lane.busy,
                    })
                })
                .collect(),
            walks,
        })
    }
}

fn walks(worker: usize, before: &v1::WorkerStatusResponse, after: &v1::WorkerStatusResponse) -> Vec<Walk> {
    let all = |status: &v1::WorkerStatusResponse| -> BTreeMap<String, (u32, v1::WalkStatus)> {
        let of_lane = |lane: &v1::LaneStatus| {
            let id = lane.lane;
            lane.walks
                .iter()
                .map(move |walk| (walk.walk.clone(), (id, walk.clone())))
                .collect::<Vec<_>>()
        };
        status.lanes.iter().flat_map(of_lane).collect()
    };
    // By name alone: a walk under `lane: auto` takes its counts along when it moves.
    let before = all(before);
    let delta = |(walk, (lane, now)): (String, (u32, v1::WalkStatus))| {
        let (_, then) = before.get(&walk).cloned().unwrap_or_default();
        let steps = now.steps.saturating_sub(then.steps);
        let mean = |now: u64, then: u64| now.saturating_sub(then) as f64 / steps as f64;
        (steps > 0).then(|| Walk {
            worker,
            lane,
            walk,
            steps,
            rows_per_step: mean(now.rows, then.rows),
            mean_ms: mean(now.step_us_total, then.step_us_total) / 1e3,
            host_us: mean(now.host_us_total, then.host_us_total),
        })
    };
    let mut walks: Vec<_> = all(after).into_iter().filter_map(delta).collect();
    walks.sort_by_key(|walk| walk.lane);
    walks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(talker: [u64; 3], codec: [u64; 3], host_us: u64) -> v1::WorkerStatusResponse {
        let walk = |name: &str, [steps, rows, us]: [u64; 3]| v1::WalkStatus {
            walk: name.into(),
            steps,
            rows,
            step_us_total: us,
            step_us_max: 0,
            host_us_total: us / 10,
        };
        let lane = |lane, walk, busy| v1::LaneStatus {
            lane,
            walks: vec![walk],
            busy,
            ..Default::default()
        };
        v1::WorkerStatusResponse {
            lanes: vec![
                lane(0, walk(TALKER_DECODE, talker), 0.9),
                lane(1, walk(CODEC_CHUNK, codec), 0.4),
            ],
            chain_host_us: host_us,
            parks: talker[0],
            ..Default::default()
        }
    }

    #[test]
    fn only_what_the_window_added_counts() {
        let before = [status([100, 800, 300_000], [10, 20, 5000], 4000)];
        let after = [status([300, 2400, 700_000], [60, 420, 105_000], 24_000)];
        let steps = Steps::between(&before, &after).unwrap();
        let [talker, codec] = &steps.walks[..] else {
            panic!("{steps:?}")
        };
        assert_eq!(
            (talker.steps, talker.rows_per_step, talker.mean_ms),
            (200, 8.0, 2.0)
        );
        assert_eq!((codec.lane, codec.rows_per_step, codec.mean_ms), (1, 8.0, 2.0));
        assert_eq!((talker.host_us, codec.host_us), (200.0, 200.0));
        assert_eq!(steps.codec_per_talker, Some(0.25));
        assert_eq!(steps.chain_host_us, Some(100.0));
        assert_eq!(steps.parks, 200);
        assert_eq!((steps.busy[1].lane, steps.busy[1].share), (1, 0.4));
    }

    #[test]
    fn a_walk_that_moved_meanwhile_counts_from_where_it_was() {
        let before = [status([100, 800, 300_000], [10, 20, 5000], 4000)];
        let mut after = [status([300, 2400, 700_000], [60, 420, 105_000], 24_000)];
        let codec = after[0].lanes[1].walks.remove(0);
        after[0].lanes[0].walks.push(codec);
        let steps = Steps::between(&before, &after).unwrap();
        let codec = steps.walks.iter().find(|walk| walk.walk == CODEC_CHUNK).unwrap();
        assert_eq!((codec.lane, codec.steps, codec.rows_per_step), (0, 50, 8.0));
    }

    #[test]
    fn a_system_elsewhere_has_no_steps_and_an_idle_one_no_ratio() {
        assert!(Steps::between(&[], &[]).is_none());
        let idle = [status([5, 5, 5], [5, 5, 5], 5)];
        let steps = Steps::between(&idle, &idle).unwrap();
        assert!(steps.walks.is_empty());
        assert_eq!((steps.codec_per_talker, steps.chain_host_us), (None, None));
    }
}
