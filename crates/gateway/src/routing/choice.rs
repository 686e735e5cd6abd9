//! The choice of a worker: a function of what is known at that moment, and nothing else.

/// Requests more, for each ten that a worker runs at once, that a stream puts up with to stay where it is.
const STAYS_FOR_TENTHS: u64 = 2;

/// What is known of a worker that could take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Waiting and running there.
    pub(super) requests: u32,
    /// Requests that run at once; 0 when it does not say.
    pub(super) capacity: u32,
    /// It would refuse more.
    pub(super) full: bool,
    /// It failed what it was given.
    pub(super) ejected: bool,
    /// The stream is there already.
    pub(super) stays: bool,
}

/// The least busy worker with room, whoever works before whoever fails; `turn` decides among equals. A stream stays
/// where it is unless that is much busier than the least busy one.
pub(super) fn choose(candidates: &[Candidate], turn: usize) -> Option<usize> {
    let with_room = |ejected: bool| {
        let candidates = candidates.iter().enumerate();
        candidates.filter(move |(_, each)| !each.full && each.ejected == ejected)
    };
    let ejected = with_room(false).next().is_none();
    let n = candidates.len();
    let in_turn = |index: usize| (index + n - turn % n) % n;
    let (index, least) = with_room(ejected).min_by(|(i, a), (j, b)| {
        let busier = busy(a, b).cmp(&busy(b, a));
        busier.then(in_turn(*i).cmp(&in_turn(*j)))
    })?;
    let staying = with_room(ejected).find(|(_, each)| each.stays);
    let stays = staying.filter(|(_, each)| is_near(each, least));
    Some(stays.map_or(index, |(index, _)| index))
}

/// The share of `a` that is busy, times the capacities of both: shares are compared without a division.
fn busy(a: &Candidate, b: &Candidate) -> u64 {
    u64::from(a.requests) * u64::from(b.capacity.max(1))
}

/// Whether `here` is at most so much busier than `least`, and runs what it is given at once.
fn is_near(here: &Candidate, least: &Candidate) -> bool {
    let capacity = u64::from(here.capacity.max(1));
    let slack = capacity * u64::from(least.capacity.max(1)) * STAYS_FOR_TENTHS;
    let waits = u64::from(here.requests) >= capacity;
    let least_waits = least.requests >= least.capacity.max(1);
    busy(here, least) * 10 <= busy(least, here) * 10 + slack && (!waits || least_waits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate() -> impl Strategy<Value = Candidate> {
        let flags = (any::<bool>(), any::<bool>(), any::<bool>());
        (0u32..40, 0u32..12, flags).prop_map(|(requests, capacity, (full, ejected, stays))| Candidate {
            requests,
            capacity,
            full,
            ejected,
            stays,
        })
    }

    fn share(candidate: &Candidate) -> f64 {
        f64::from(candidate.requests) / f64::from(candidate.capacity.max(1))
    }

    proptest! {
        #[test]
        fn whoever_is_chosen_has_room_works_if_any_does_and_is_the_least_busy(
            candidates in proptest::collection::vec(candidate(), 0..8),
            turn in any::<usize>(),
        ) {
            let room = || candidates.iter().filter(|each| !each.full);
            let Some(index) = choose(&candidates, turn) else {
                prop_assert_eq!(room().count(), 0, "somebody had room");
                return Ok(());
            };
            let chosen = candidates[index];
            prop_assert!(!chosen.full);
            prop_assert!(!chosen.ejected || room().all(|each| each.ejected));
            let least = room()
                .filter(|each| each.ejected == chosen.ejected)
                .map(share)
                .fold(f64::INFINITY, f64::min);
            let slack = if chosen.stays { 0.2 } else { 0.0 };
            prop_assert!(share(&chosen) <= least + slack + 1e-9, "{} is over {least}", share(&chosen));
        }

        #[test]
        fn equals_take_turns(n in 1usize..8, first in 0usize..1000) {
            let equal = Candidate { requests: 3, capacity: 8, full: false, ejected: false, stays: false };
            let mut chosen: Vec<_> = (first..first + n).filter_map(|turn| choose(&vec![equal; n], turn)).collect();
            chosen.sort_unstable();
            prop_assert_eq!(chosen, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_stream_stays_for_a_little_and_not_for_much() {
        let here = |requests| Candidate {
            requests,
            capacity: 10,
            full: false,
            ejected: false,
            stays: true,
        };
        let other = |requests| Candidate {
            stays: false,
            ..here(requests)
        };
        let check = |candidates: [Candidate; 2], wanted| assert_eq!(choose(&candidates, 0), Some(wanted));
        check([other(3), here(5)], 1);
        check([other(3), here(6)], 0);
        check(
            [
                other(3),
                Candidate {
                    full: true,
                    ..here(3)
                },
            ],
            0,
        );
        check(
            [
                other(9),
                Candidate {
                    ejected: true,
                    ..here(0)
                },
            ],
            0,
        );
        // It would wait here, and there it would not.
        check([other(9), here(10)], 0);
        check([other(10), here(11)], 1);
    }
}
