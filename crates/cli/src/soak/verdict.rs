//! What a soak is held to.

use std::time::Duration;

use serde::Serialize;

use super::ledger::Ledger;
use super::memory;

/// How long a killed worker may take to serve again.
pub(super) const RECOVERY_DEADLINE: Duration = Duration::from_secs(120);

/// Share of the cancels that were due which must have hit a stream.
const LEAST_CANCELLED: f64 = 0.5;

#[derive(Debug, Serialize)]
pub(super) struct Clones {
    /// Different clips that were sent.
    pub(super) clips: usize,
    /// Clips that the reference encoder ran, its warm-up left out; `None` for a system elsewhere.
    pub(super) encoded: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    pub(super) passed: bool,
    pub(super) reasons: Vec<String>,
}

/// Everything that a soak is held to.
pub(super) fn problems(
    ledger: &Ledger,
    cancels_due: u64,
    memory: &memory::Summary,
    clones: Option<&Clones>,
) -> Vec<String> {
    let mut reasons = Vec::new();
    let mut hold = |holds: bool, reason: String| {
        if !holds {
            reasons.push(reason);
        }
    };
    hold(ledger.completed > 0, "no stream was completed".into());
    for (how, times) in &ledger.failures {
        hold(false, format!("{times} streams failed: {how}"));
    }
    hold(
        ledger.runaways == 0,
        format!("{} streams ran into their frame cap", ledger.runaways),
    );
    let (repeated, differing) = (ledger.determinism.repeated(), ledger.determinism.differing);
    hold(
        differing == 0,
        format!("{differing} of {repeated} repeated streams had other bytes"),
    );
    hold(
        repeated > 0,
        "no stream was repeated: soak longer, or with fewer --sentences".into(),
    );
    hold(
        ledger.cancelled as f64 >= LEAST_CANCELLED * cancels_due as f64,
        format!(
            "{} streams were cancelled of {cancels_due} that were due: too few were in their middle",
            ledger.cancelled
        ),
    );
    for outage in &ledger.kills {
        hold(
            outage.is_over(),
            format!(
                "rank {} was not served again within {RECOVERY_DEADLINE:?} of its kill at {:.0} s",
                outage.rank, outage.at_s
            ),
        );
    }
    for growth in memory.processes.iter().chain(&memory.devices) {
        let problem = growth.problem();
        hold(problem.is_none(), problem.unwrap_or_default());
    }
    if let Some(Clones {
        clips,
        encoded: Some(encoded),
    }) = clones
    {
        hold(
            *encoded <= *clips as u64,
            format!("{encoded} clips were encoded, and {clips} different ones were sent"),
        );
    }
    reasons
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::soak::ledger::Outage;
    use crate::soak::memory::Memory;

    fn passing() -> Ledger {
        let mut ledger = Ledger {
            completed: 10,
            cancelled: 9,
            ..Ledger::default()
        };
        ledger.determinism.note(0, 1);
        ledger.determinism.note(0, 1);
        ledger
    }

    /// Why a soak does not pass.
    #[track_caller]
    fn check(change: impl FnOnce(&mut Ledger), due: u64, clones: Option<Clones>, says: &[&str]) {
        let mut ledger = passing();
        change(&mut ledger);
        let memory = Memory::new(64.0).summary();
        let reasons = problems(&ledger, due, &memory, clones.as_ref());
        assert_eq!(reasons.len(), says.len(), "{reasons:?}");
        for (reason, says) in reasons.iter().zip(says) {
            assert!(reason.contains(says), "{reason}");
        }
    }

    #[test]
    fn a_verdict_has_every_reason() {
        let clones = |encoded| Clones {
            clips: 8,
            encoded: Some(encoded),
        };
        check(|_| {}, 10, None, &[]);
        check(|_| {}, 10, Some(clones(8)), &[]);
        check(|_| {}, 10, Some(clones(9)), &["9 clips were encoded"]);
        check(|_| {}, 19, None, &["9 streams were cancelled of 19"]);
        check(|ledger| ledger.runaways = 2, 10, None, &["2 streams ran into"]);
        check(
            |ledger| ledger.determinism.note(0, 2),
            10,
            None,
            &["1 of 2 repeated"],
        );
        check(
            |ledger| ledger.determinism = Default::default(),
            10,
            None,
            &["no stream was repeated"],
        );
        let began = Instant::now();
        check(
            |ledger| {
                ledger.completed = 0;
                ledger.failures = [("Internal after audio: x".to_owned(), 3)].into();
                ledger.kills = vec![Outage::new("Codec".into(), 1, 7, began)];
            },
            10,
            None,
            &[
                "no stream was completed",
                "3 streams failed: Internal",
                "rank 1 was not served again",
            ],
        );
    }
}
