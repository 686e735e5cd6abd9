//! What became of every stream of a soak, and what may become of one.
//!
//! Bounded whatever the length of the run: counts, and for each sentence the bytes that it gave first.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use laneway_proto::{ErrorCode, Failure, v1};
use serde::Serialize;
use tonic::{Code, Status};

use crate::bench::summary::Determinism;

/// How long behind a kill a stream with audio may end UNAVAILABLE: connections break at once, what was on its way to
/// the caller is delivered first.
const LOST_WITHIN: Duration = Duration::from_secs(10);

/// How long behind a recovery new requests may still be refused, until everybody has heard of it.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);

/// When a refused caller comes back that was not told when.
const COME_BACK: Duration = Duration::from_millis(500);

/// Kinds of failures that are told apart; more are counted together.
const MAX_FAILURE_KINDS: usize = 50;

/// How one stream ended.
#[derive(Debug, Clone)]
pub(super) enum End {
    Finished {
        reason: v1::FinishReason,
        hash: u64,
    },
    /// By the soak itself, in the middle.
    Cancelled,
    Failed {
        status: Status,
        with_audio: bool,
    },
    /// It broke what the interface promises.
    Broken(String),
}

/// What the caller of a failed stream does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// Its next request.
    GoOn,
    /// The same request again, after this pause.
    Again(Duration),
}

/// A worker that was killed on purpose.
#[derive(Debug, Serialize)]
pub(super) struct Outage {
    pub(super) node: String,
    pub(super) rank: u32,
    pub(super) process: u32,
    pub(super) at_s: f64,
    /// Until the rank was served again.
    pub(super) recovered_after_s: Option<f64>,
    /// Streams with audio that ended with it.
    lost_streams: u64,
    /// New requests that were refused meanwhile, each as often as it came.
    refused: u64,
    #[serde(skip)]
    pub(super) killed: Instant,
    #[serde(skip)]
    recovered: Option<Instant>,
}

/// Everything that is counted.
#[derive(Debug, Default, Serialize)]
pub(super) struct Ledger {
    pub(super) completed: u64,
    pub(super) cancelled: u64,
    pub(super) audio_s: f64,
    /// Streams that ran into their frame cap instead of an end token; forced lengths are no runaways.
    pub(super) runaways: u64,
    /// Streams that ended other than they should, by what they say.
    pub(super) failures: BTreeMap<String, u64>,
    pub(super) determinism: Determinism,
    pub(super) kills: Vec<Outage>,
}

impl Outage {
    pub(super) fn new(node: String, rank: u32, process: u32, began: Instant) -> Self {
        let killed = Instant::now();
        Outage {
            node,
            rank,
            process,
            at_s: killed.duration_since(began).as_secs_f64(),
            recovered_after_s: None,
            lost_streams: 0,
            refused: 0,
            killed,
            recovered: None,
        }
    }

    /// The rank is served again.
    pub(super) fn recovered(&mut self, now: Instant) {
        if self.recovered.is_none() {
            self.recovered = Some(now);
            self.recovered_after_s = Some(now.duration_since(self.killed).as_secs_f64());
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.recovered.is_some()
    }

    fn may_lose(&self, now: Instant) -> bool {
        now >= self.killed && now.duration_since(self.killed) < LOST_WITHIN
    }

    fn may_refuse(&self, now: Instant) -> bool {
        let over = self
            .recovered
            .is_some_and(|at| now.saturating_duration_since(at) > REFUSED_WITHIN);
        now >= self.killed && !over
    }
}

impl Ledger {
    /// Note an end; `forced` says that lengths were.
    pub(super) fn note(&mut self, line: usize, end: End, forced: bool, now: Instant) -> Then {
        match end {
            End::Finished { reason, hash } => {
                self.completed += 1;
                self.runaways += u64::from(reason == v1::FinishReason::Length && !forced);
                self.determinism.note(line, hash);
            }
            End::Cancelled => self.cancelled += 1,
            End::Broken(how) => self.failed(how),
            End::Failed { status, with_audio } => return self.unavailable(&status, with_audio, now),
        }
        Then::GoOn
    }

    fn unavailable(&mut self, status: &Status, with_audio: bool, now: Instant) -> Then {
        let failure = Failure::from_status(status);
        let is_unavailable = status.code() == Code::Unavailable;
        if is_unavailable && with_audio {
            if let Some(kill) = self.kills.iter_mut().find(|kill| kill.may_lose(now)) {
                kill.lost_streams += 1;
                return Then::GoOn;
            }
        } else if failure
            .as_ref()
            .is_some_and(|failure| failure.code == ErrorCode::NoWorker)
            && let Some(kill) = self.kills.iter_mut().find(|kill| kill.may_refuse(now))
        {
            kill.refused += 1;
            let told = failure.and_then(|failure| failure.retry_after);
            return Then::Again(told.unwrap_or(COME_BACK));
        }
        let audio = if with_audio { "after audio" } else { "before audio" };
        self.failed(format!("{} {audio}: {}", status.code(), status.message()));
        Then::GoOn
    }

    fn failed(&mut self, how: String) {
        let known = self.failures.contains_key(&how) || self.failures.len() < MAX_FAILURE_KINDS;
        let kind = if known { how } else { "others".to_owned() };
        *self.failures.entry(kind).or_default() += 1;
    }

    pub(super) fn n_failed(&self) -> u64 {
        self.failures.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger_with_a_kill(seconds_ago: u64, recovered_ago: Option<u64>) -> (Ledger, Instant) {
        let began = Instant::now();
        let now = began + Duration::from_secs(100);
        let mut outage = Outage::new("Codec".into(), 1, 42, began);
        outage.killed = now - Duration::from_secs(seconds_ago);
        if let Some(ago) = recovered_ago {
            outage.recovered(now - Duration::from_secs(ago));
        }
        let ledger = Ledger {
            kills: vec![outage],
            ..Ledger::default()
        };
        (ledger, now)
    }

    fn failed(code: ErrorCode, with_audio: bool) -> End {
        let failure = Failure::new(code, "gone").retry_after(Duration::from_millis(70));
        End::Failed {
            status: failure.into(),
            with_audio,
        }
    }

    /// What a stream's end counts as: (lost, refused, failed), and what its caller does.
    #[track_caller]
    fn check(kill: Option<(u64, Option<u64>)>, end: End, counts: (u64, u64, u64), then: Then) {
        let (mut ledger, now) = match kill {
            Some((killed, recovered)) => ledger_with_a_kill(killed, recovered),
            None => (Ledger::default(), Instant::now()),
        };
        assert_eq!(ledger.note(0, end.clone(), false, now), then, "{end:?}");
        let (lost, refused) = ledger
            .kills
            .first()
            .map_or((0, 0), |kill| (kill.lost_streams, kill.refused));
        assert_eq!((lost, refused, ledger.n_failed()), counts, "{end:?}");
    }

    #[test]
    fn only_streams_with_audio_may_be_lost_and_only_new_ones_refused_around_a_kill() {
        let again = Then::Again(Duration::from_millis(70));
        let (lost, refused) = (ErrorCode::WorkerLost, ErrorCode::NoWorker);
        check(Some((1, None)), failed(lost, true), (1, 0, 0), Then::GoOn);
        check(Some((1, None)), failed(refused, false), (0, 1, 0), again);
        check(Some((40, None)), failed(refused, false), (0, 1, 0), again);
        check(Some((40, Some(2))), failed(refused, false), (0, 1, 0), again);
        // One without audio is to be tried again, never lost.
        check(Some((1, None)), failed(lost, false), (0, 0, 1), Then::GoOn);
        check(Some((30, None)), failed(lost, true), (0, 0, 1), Then::GoOn);
        check(
            Some((40, Some(20))),
            failed(refused, false),
            (0, 0, 1),
            Then::GoOn,
        );
        check(None, failed(lost, true), (0, 0, 1), Then::GoOn);
        check(None, failed(refused, false), (0, 0, 1), Then::GoOn);
        // Nothing else is excused by a kill.
        check(
            Some((1, None)),
            failed(ErrorCode::Internal, true),
            (0, 0, 1),
            Then::GoOn,
        );
        check(
            Some((1, None)),
            failed(ErrorCode::Overloaded, false),
            (0, 0, 1),
            Then::GoOn,
        );
        check(
            Some((1, None)),
            failed(ErrorCode::DeadlineExceeded, false),
            (0, 0, 1),
            Then::GoOn,
        );
        check(Some((1, None)), End::Broken("gap".into()), (0, 0, 1), Then::GoOn);
    }

    #[test]
    fn finishes_are_held_to_their_reason_and_their_first_bytes() {
        let mut ledger = Ledger::default();
        let now = Instant::now();
        let end = |reason, hash| End::Finished { reason, hash };
        ledger.note(0, end(v1::FinishReason::Stop, 1), false, now);
        ledger.note(0, end(v1::FinishReason::Length, 2), false, now);
        ledger.note(1, end(v1::FinishReason::Length, 3), true, now);
        ledger.note(1, End::Cancelled, true, now);
        assert_eq!((ledger.completed, ledger.cancelled, ledger.runaways), (3, 1, 1));
        assert_eq!(
            (ledger.determinism.repeated(), ledger.determinism.differing),
            (1, 1)
        );
    }

    #[test]
    fn kinds_of_failures_are_bounded() {
        let mut ledger = Ledger::default();
        for n in 0..1000 {
            ledger.note(0, End::Broken(format!("kind {n}")), false, Instant::now());
        }
        assert_eq!(
            (ledger.n_failed(), ledger.failures.len()),
            (1000, MAX_FAILURE_KINDS + 1)
        );
    }
}
