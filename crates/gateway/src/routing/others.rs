//! How many requests a worker has from others than this gateway, from reports that are as old as the last heartbeat.
//!
//! Our own requests are counted as they come and go, so of a report only what is not ours matters. One report says little:
//! ours have come and gone since it was made, and whoever took the larger of the two numbers would keep away for a second from
//! every worker that has just finished something. Over several reports that evens out.

use std::time::{Duration, Instant};

/// What one report moves the mean by.
const WEIGHT: f64 = 0.3;
/// A number that is the same may be the same report; after this long it counts as another.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// The last report, and when it was counted.
    last: Option<(u32, Instant)>,
    mean: f64,
}

impl Others {
    /// `requests` are reported, while `own` of ours are there.
    pub(super) fn reported(&mut self, requests: u32, own: u32, now: Instant) {
        let seen = f64::from(requests) - f64::from(own);
        match self.last {
            None => self.mean = seen,
            Some((last, at)) if last == requests && now.duration_since(at) < AGAIN_AFTER => return,
            Some(_) => self.mean += (seen - self.mean) * WEIGHT,
        }
        // Others have no more than all.
        self.mean = self.mean.min(f64::from(requests));
        self.last = Some((requests, now));
    }

    /// About so many.
    pub(super) fn requests(&self) -> u32 {
        // Saturates at zero: negative where more of ours have come than gone.
        self.mean.round() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::super::choice::{Candidate, choose};
    use super::*;

    #[test]
    fn the_first_report_counts_whole_and_later_ones_move_it() {
        let mut others = Others::default();
        let began = Instant::now();
        let at = |seconds: f64| began + Duration::from_secs_f64(seconds);
        assert_eq!(others.requests(), 0);
        others.reported(5, 0, at(0.0));
        assert_eq!(others.requests(), 5);
        others.reported(5, 4, at(0.9));
        assert_eq!(others.requests(), 5, "the same report");
        others.reported(5, 4, at(1.1));
        assert_eq!(others.requests(), 4);
        others.reported(0, 0, at(1.2));
        assert_eq!(others.requests(), 0, "nobody has any there");
        for own in [9, 8, 9, 8, 9, 8, 9, 8, 9, 8, 9, 8] {
            others.reported(own, own, at(1.3));
        }
        assert_eq!(others.requests(), 0, "all of them are ours");
        others.reported(2, 9, at(1.4));
        assert_eq!(others.requests(), 0);
        for second in 2..20 {
            others.reported(6, 0, at(f64::from(second)));
        }
        assert_eq!(others.requests(), 6, "all of them are others'");
    }

    const WORKERS: usize = 38;
    const CALLERS: usize = 150;
    /// Steps of 10 ms.
    const HEARTBEAT: u64 = 167;
    const STREAM: u64 = 205;
    const SECONDS: u64 = 100;

    /// Callers who follow each other over workers whose reports are old: each worker's mean share of the requests.
    fn shares(counted: impl Fn(u32, &Others, u32) -> u32) -> Vec<f64> {
        let mut random = 1u64;
        let mut below = |n: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % n
        };
        let beats: Vec<u64> = (0..WORKERS).map(|_| below(HEARTBEAT)).collect();
        let mut next: Vec<(u64, Option<usize>)> = (0..CALLERS).map(|_| (below(200), None)).collect();
        let (mut own, mut reports) = ([0u32; WORKERS], [0u32; WORKERS]);
        let mut others: Vec<Others> = (0..WORKERS).map(|_| Others::default()).collect();
        let mut sums = vec![0u64; WORKERS];
        let (mut turn, began) = (0, Instant::now());
        for now in 0..SECONDS * 100 {
            for worker in 0..WORKERS {
                // It takes 0.7 s to get here.
                if (now + beats[worker]).is_multiple_of(HEARTBEAT) {
                    let at = began + Duration::from_millis(now * 10);
                    others[worker].reported(reports[worker], own[worker], at);
                }
                if (now + beats[worker] + 70).is_multiple_of(HEARTBEAT) {
                    reports[worker] = own[worker];
                }
                sums[worker] += if now > 1000 { u64::from(own[worker]) } else { 0 };
            }
            for (at, there) in &mut next {
                if *at != now {
                    continue;
                }
                if let Some(worker) = there.take() {
                    own[worker] -= 1;
                }
                let candidates: Vec<_> = (0..WORKERS)
                    .map(|worker| Candidate {
                        requests: counted(own[worker], &others[worker], reports[worker]),
                        capacity: 64,
                        full: false,
                        ejected: false,
                        stays: false,
                    })
                    .collect();
                turn += 1;
                let worker = choose(&candidates, turn).expect("all have room");
                own[worker] += 1;
                *there = Some(worker);
                *at = now + STREAM + below(10);
            }
        }
        let mean = sums.iter().sum::<u64>() as f64 / WORKERS as f64;
        sums.into_iter().map(|sum| sum as f64 / mean).collect()
    }

    fn spread(shares: &[f64]) -> f64 {
        shares
            .iter()
            .fold(0.0, |most, share| (share - 1.0).abs().max(most))
    }

    #[test]
    fn old_reports_do_not_unbalance_what_one_gateway_sends() {
        let spread_of_ours = spread(&shares(|own, others, _| own + others.requests()));
        let spread_of_larger = spread(&shares(|own, _, report| own.max(report)));
        assert!(spread_of_ours <= 0.04, "{spread_of_ours}");
        assert!(
            spread_of_larger >= 2.0 * spread_of_ours,
            "{spread_of_larger} by the larger number, {spread_of_ours}"
        );
    }
}
