//! Which walk a stream runs next: a pure function of what is ready, used for the chain and for each lane.
//!
//! It is only ever shown walks of its own stream, and only rows whose inputs have landed: nothing of a lane
//! is speculated, nothing is yielded to a lane.

use laneway_plan::declaration::WalkKind;

/// A walk with at least one row that could run now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ready {
    /// Index among the worker's walks.
    pub(crate) walk: usize,
    pub(crate) kind: WalkKind,
    /// A listener behind one of the rows hears nothing yet, or soon nothing any more.
    pub(crate) urgent: bool,
    /// Of one of the requests only windows are left, so that it is over once they are, or more than one is full.
    pub(crate) presses: bool,
    /// Steps of other walks that ran on this stream while this one was ready.
    pub(crate) passed_over: u32,
}

impl Ready {
    /// Steps over which the walk gathers rows beside running decodes.
    pub(crate) fn gathers(&self) -> u32 {
        match self.kind {
            WalkKind::Stream if !self.presses => GATHER_WINDOWS,
            _ => GATHER,
        }
    }

    /// On a lane: whether it may wait for more rows while the chain makes some, of which it made `since` steps meanwhile.
    /// The lane is idle, so what somebody waits for runs at once, and so does what other walks of the lane went before.
    pub(crate) fn may_wait(&self, since: u64) -> bool {
        let waited = since + u64::from(self.passed_over);
        self.kind == WalkKind::Stream && !self.urgent && !self.presses && waited < u64::from(GATHER_WINDOWS)
    }
}

/// A decode is passed over at most this often in a row, so that running requests keep their pace while
/// others are prefilled and their first windows decoded.
const DECODE_PATIENCE: u32 = 2;
/// Beside running decodes, prompts gather over this many steps, and so do windows that end a request or have another one
/// behind them: a step of one row costs nearly what a step of several does.
const GATHER: u32 = 3;
/// Windows that nobody waits for gather longer: about as long as a stream takes to fill one, so that most streams have one.
pub(crate) const GATHER_WINDOWS: u32 = 8;
/// Any other walk waits at most this much longer than it may gather, plus its turn among those that waited as long.
const PATIENCE: u32 = 1;

/// The walk to run, `None` when nothing is ready.
pub(crate) fn choose(ready: &[Ready]) -> Option<usize> {
    ready
        .iter()
        .min_by_key(|walk| rank(walk, ready))
        .map(|walk| walk.walk)
}

/// Smaller goes first; ties go to the walk that waited longest.
fn rank(walk: &Ready, ready: &[Ready]) -> (u32, std::cmp::Reverse<u32>) {
    let gathered = walk.passed_over >= walk.gathers();
    let class = match walk.kind {
        _ if walk.passed_over >= walk.gathers() + PATIENCE => 0,
        WalkKind::Loop if walk.passed_over >= DECODE_PATIENCE => 1,
        // What a listener hears first, and what leads to it.
        WalkKind::Stream if walk.urgent => 2,
        WalkKind::Entry if gathered || !has_loop(ready) => 3,
        WalkKind::Once => 4,
        WalkKind::Prime => 5,
        WalkKind::Stream if gathered || !has_loop(ready) => 6,
        WalkKind::Loop => 7,
        WalkKind::Entry | WalkKind::Stream => 8,
    };
    (class, std::cmp::Reverse(walk.passed_over))
}

fn has_loop(ready: &[Ready]) -> bool {
    ready.iter().any(|walk| walk.kind == WalkKind::Loop)
}

/// How often each walk of a stream was passed over.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    passed_over: Vec<u32>,
}

impl Turns {
    pub(crate) fn new(n_walks: usize) -> Self {
        Self {
            passed_over: vec![0; n_walks],
        }
    }

    pub(crate) fn passed_over(&self, walk: usize) -> u32 {
        self.passed_over[walk]
    }

    /// `chosen` runs; what else was ready was passed over. Windows of it that were `left_over` have gathered
    /// for as long as the others: they need not do so again.
    pub(crate) fn took(&mut self, chosen: usize, ready: &[Ready], left_over: bool) {
        let waited = self.passed_over[chosen];
        for walk in ready {
            self.passed_over[walk.walk] += 1;
        }
        self.passed_over[chosen] = if left_over { waited.min(GATHER_WINDOWS) } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [WalkKind; 5] = [
        WalkKind::Entry,
        WalkKind::Loop,
        WalkKind::Stream,
        WalkKind::Once,
        WalkKind::Prime,
    ];

    fn ready(walk: usize, urgent: bool, turns: &Turns) -> Ready {
        Ready {
            walk,
            kind: KINDS[walk],
            urgent,
            presses: false,
            passed_over: turns.passed_over(walk),
        }
    }

    fn run(walks: &[usize], urgent: bool, steps: usize) -> Vec<usize> {
        let mut turns = Turns::new(KINDS.len());
        (0..steps)
            .map(|_| {
                let ready: Vec<_> = walks.iter().map(|&walk| ready(walk, urgent, &turns)).collect();
                let chosen = choose(&ready).expect("something is ready");
                turns.took(chosen, &ready, false);
                chosen
            })
            .collect()
    }

    #[test]
    fn prompts_gather_while_others_decode() {
        assert_eq!(run(&[0, 1], false, 8), [1, 1, 1, 0, 1, 1, 1, 0]);
        assert_eq!(run(&[0], false, 2), [0, 0], "nobody decodes");
    }

    #[test]
    fn windows_gather_while_nobody_waits_for_them() {
        let once = [1, 1, 1, 1, 1, 1, 1, 1, 2];
        assert_eq!(run(&[1, 2], false, 18), [once, once].concat());
        assert_eq!(run(&[2], false, 2), [2, 2], "nothing is left to gather from");
    }

    #[test]
    fn windows_that_press_gather_for_as_long_as_prompts() {
        let mut turns = Turns::new(KINDS.len());
        let ran = [(); 8].map(|()| {
            let pressing = Ready {
                presses: true,
                ..ready(2, false, &turns)
            };
            let all = [ready(1, false, &turns), pressing];
            let chosen = choose(&all).expect("something is ready");
            turns.took(chosen, &all, false);
            chosen
        });
        assert_eq!(ran, [1, 1, 1, 2, 1, 1, 1, 2]);
    }

    #[test]
    fn on_a_lane_only_windows_that_nobody_waits_for_may_wait() {
        let turns = Turns::new(KINDS.len());
        let window = ready(2, false, &turns);
        assert!(window.may_wait(0) && window.may_wait(7) && !window.may_wait(8));
        let passed_over = 5;
        assert!(
            Ready {
                passed_over,
                ..window
            }
            .may_wait(2)
                && !Ready {
                    passed_over,
                    ..window
                }
                .may_wait(3)
        );
        assert!(
            !Ready {
                urgent: true,
                ..window
            }
            .may_wait(0)
        );
        assert!(
            !Ready {
                presses: true,
                ..window
            }
            .may_wait(0)
        );
        for walk in [0, 1, 3, 4] {
            assert!(!ready(walk, false, &turns).may_wait(0), "{:?}", KINDS[walk]);
        }
    }

    #[test]
    fn an_urgent_window_goes_before_prefill_and_decode() {
        assert_eq!(run(&[0, 1, 2], true, 1), [2]);
    }

    #[test]
    fn nothing_ready_runs_nothing() {
        assert_eq!(choose(&[]), None);
    }

    proptest! {
        /// Whatever comes and goes, a walk that stays ready runs within a fixed number of steps.
        #[test]
        fn no_ready_walk_starves(steps in prop::collection::vec((0u8..32, any::<bool>(), any::<bool>()), 1..200)) {
            let mut turns = Turns::new(KINDS.len());
            let mut ready_for = [0u32; 5];
            for (mask, urgent, left_over) in steps {
                let now: Vec<_> = (0..KINDS.len())
                    .filter(|walk| mask & (1 << walk) != 0)
                    .map(|walk| ready(walk, urgent, &turns))
                    .collect();
                let Some(chosen) = choose(&now) else { continue };
                prop_assert!(now.iter().any(|walk| walk.walk == chosen));
                turns.took(chosen, &now, left_over);
                for walk in &now {
                    ready_for[walk.walk] += 1;
                }
                ready_for[chosen] = 0;
                let most = GATHER_WINDOWS + PATIENCE + KINDS.len() as u32;
                prop_assert!(ready_for.iter().all(|&steps| steps <= most));
            }
        }
    }
}
