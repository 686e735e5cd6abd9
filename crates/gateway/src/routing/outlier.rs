//! When a worker that answers, and fails what it is given, is left alone.
//!
//! A worker that cannot be reached is found by a probe. One that takes requests and fails each of them would look idle,
//! and so draw all of them.

use std::time::{Duration, Instant};

/// Failures in a row after which a worker is left alone. One bad request, tried as often as requests are, is fewer.
pub(super) const IN_A_ROW: u32 = 5;

/// How long, the first time; each time after it twice as long, up to the longest.
const FIRST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(60);

/// What became of the calls to one worker.
#[derive(Debug, Default)]
pub(super) struct Outlier {
    in_a_row: u32,
    n_ejections: u32,
    until: Option<Instant>,
}

impl Outlier {
    /// A call was answered as it should be: all is forgotten.
    pub(super) fn worked(&mut self) {
        *self = Self::default();
    }

    /// A call failed. Says for how long the worker is left alone, where that begins now: after the pause one more failure
    /// is enough.
    pub(super) fn failed(&mut self, now: Instant) -> Option<Duration> {
        self.in_a_row = self.in_a_row.saturating_add(1);
        if self.in_a_row < IN_A_ROW || self.is_ejected(now) {
            return None;
        }
        let pause = FIRST.saturating_mul(1 << self.n_ejections.min(16)).min(LONGEST);
        self.n_ejections = self.n_ejections.saturating_add(1);
        self.until = Some(now + pause);
        Some(pause)
    }

    /// Whether others go first.
    pub(super) fn is_ejected(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_are_bounded_and_end_with_a_call_that_works() {
        let mut outlier = Outlier::default();
        let mut now = Instant::now();
        for _ in 1..IN_A_ROW {
            assert_eq!(outlier.failed(now), None);
        }
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let pause = outlier.failed(now).unwrap();
            assert!(outlier.is_ejected(now) && outlier.is_ejected(now + pause / 2));
            assert_eq!(outlier.failed(now), None, "it is left alone already");
            now += pause;
            assert!(!outlier.is_ejected(now), "it is tried again");
            pauses.push(pause.as_secs());
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60, 60]);
        outlier.worked();
        assert_eq!(outlier.failed(now), None);
    }
}
