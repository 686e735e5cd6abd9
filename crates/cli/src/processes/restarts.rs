//! When a worker that died is started again. Pure: it is told the time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Deaths within [`WINDOW`] that end the deployment: what kills a worker again and again is not mended by a start.
const MAX_DEATHS: usize = 5;

/// How long a death counts.
const WINDOW: Duration = Duration::from_secs(60);

/// Pause before the first start again; it doubles with each death that counts, up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Deaths of one worker.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    deaths: VecDeque<Instant>,
}

/// What follows a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Start it again after this pause.
    After(Duration),
    /// It died this often in this time.
    GiveUp { deaths: usize, within: Duration },
}

impl Restarts {
    pub(super) fn died(&mut self, now: Instant) -> Verdict {
        self.deaths.push_back(now);
        self.deaths.retain(|death| now.duration_since(*death) < WINDOW);
        if self.deaths.len() >= MAX_DEATHS {
            return Verdict::GiveUp {
                deaths: self.deaths.len(),
                within: WINDOW,
            };
        }
        let doublings = self.deaths.len().saturating_sub(1) as u32;
        Verdict::After((MIN_PAUSE * 2u32.pow(doublings)).min(MAX_PAUSE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deaths at these seconds, and what followed the last.
    #[track_caller]
    fn check(deaths_s: &[u64], expected: Verdict) {
        let began = Instant::now();
        let mut restarts = Restarts::default();
        let verdicts = deaths_s
            .iter()
            .map(|&second| restarts.died(began + Duration::from_secs(second)));
        assert_eq!(verdicts.last(), Some(expected), "{deaths_s:?}");
    }

    #[test]
    fn pauses_grow_and_the_fifth_death_in_a_minute_is_the_last() {
        let after = |ms| Verdict::After(Duration::from_millis(ms));
        check(&[0], after(100));
        check(&[0, 1], after(200));
        check(&[0, 1, 2, 3], after(800));
        let within = Duration::from_secs(60);
        check(&[0, 1, 2, 3, 4], Verdict::GiveUp { deaths: 5, within });
        // What is a minute old counts no more.
        check(&[0, 1, 2, 3, 61], after(400));
        check(&[0, 100, 200, 300, 400, 500], after(100));
    }
}
