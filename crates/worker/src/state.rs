//! Whether this worker takes requests, and how many it holds.

use std::sync::Arc;
use std::time::Duration;

use laneway_engine::Health;
use laneway_proto::{ErrorCode, Failure, v1};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::meter;

/// When a refused caller may try again: about as long as a short sentence takes.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// What the worker tells of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Not ready: weights, captures, warm-up, or the worker at the other end of an edge is missing.
    Loading,
    /// Takes requests.
    Serving,
    /// Finishes what it has.
    Draining,
    /// Its engine is dead or stuck.
    Failed,
}

impl From<State> for v1::WorkerState {
    fn from(state: State) -> Self {
        match state {
            State::Loading => v1::WorkerState::Loading,
            State::Serving => v1::WorkerState::Serving,
            State::Draining => v1::WorkerState::Draining,
            State::Failed => v1::WorkerState::Failed,
        }
    }
}

impl State {
    /// What it is, from what it follows from. A failed engine stays failed in a drain: nothing finishes. One that stops at
    /// a drain's end has finished.
    pub(crate) fn of(engine: &Health, peers_ready: bool, draining: bool) -> State {
        match engine {
            Health::Unhealthy(_) => State::Failed,
            Health::Stopped if !draining => State::Failed,
            _ if draining => State::Draining,
            Health::Draining | Health::Stopped => State::Draining,
            Health::Serving if peers_ready => State::Serving,
            Health::Serving => State::Loading,
        }
    }

    /// Whether a request is taken now.
    pub(crate) fn admit(self) -> Result<(), Failure> {
        match self {
            State::Serving => Ok(()),
            State::Loading => Err(Failure::new(ErrorCode::NoWorker, "the worker is not ready yet")),
            State::Draining => Err(Failure::new(ErrorCode::Draining, "the worker is draining")),
            State::Failed => Err(Failure::new(
                ErrorCode::WorkerLost,
                "the worker's engine does not run",
            )),
        }
    }
}

/// Follow everything that the state depends on until the token is cancelled or the engine is gone.
pub(crate) async fn follow(
    mut engine: watch::Receiver<Health>,
    mut peers_ready: watch::Receiver<bool>,
    draining: CancellationToken,
    state: watch::Sender<State>,
    token: CancellationToken,
) {
    loop {
        // Read once: a drain that begins behind this line is still to be waited for below.
        let drains = draining.is_cancelled();
        let now = State::of(
            &engine.borrow_and_update(),
            *peers_ready.borrow_and_update(),
            drains,
        );
        let changed = state.send_if_modified(|state| std::mem::replace(state, now) != now);
        if changed {
            tracing::info!(state = v1::WorkerState::from(now).label(), "worker state");
        }
        tokio::select! {
            () = token.cancelled() => return,
            () = draining.cancelled(), if !drains => {}
            changed = engine.changed() => if changed.is_err() {
                if !drains {
                    state.send_replace(State::Failed);
                }
                return;
            },
            // Without an edge to another worker nobody says anything of peers, and what was said holds.
            Ok(()) = peers_ready.changed() => {}
        }
    }
}

/// Places for requests, running and waiting. One more is refused at once.
#[derive(Debug, Clone)]
pub(crate) struct Admission {
    places: Arc<Semaphore>,
    n_places: u32,
}

/// A request's place. It frees itself on drop, so it travels with the request's stream.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: OwnedSemaphorePermit,
    outcome: Option<&'static str>,
}

impl Place {
    /// The engine took the request: from now on it counts, as cancelled unless it ends otherwise.
    pub(crate) fn taken(&mut self) {
        self.ended(ErrorCode::Cancelled.label());
    }

    /// What metrics call its end.
    pub(crate) fn ended(&mut self, outcome: &'static str) {
        self.outcome = Some(outcome);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome {
            meter::ended(outcome);
        }
    }
}

impl Admission {
    pub(crate) fn new(n_places: u32) -> Self {
        Admission {
            places: Arc::new(Semaphore::new(n_places as usize)),
            n_places,
        }
    }

    pub(crate) fn enter(&self) -> Result<Place, Failure> {
        let permit = self.places.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{} requests run or wait here already", self.n_places);
            Failure::new(ErrorCode::Overloaded, message).retry_after(RETRY_AFTER)
        })?;
        Ok(Place {
            _permit: permit,
            outcome: None,
        })
    }

    /// Requests that hold a place.
    pub(crate) fn n_held(&self) -> u32 {
        self.n_places - self.places.available_permits() as u32
    }

    /// Wait until no request holds a place. Nobody enters meanwhile.
    pub(crate) async fn idle(&self) {
        let all = self.places.acquire_many(self.n_places).await;
        drop(all.expect("the semaphore is never closed"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_the_worst_of_what_it_follows_from() {
        let stuck = Health::Unhealthy("no step lands".into());
        for (engine, peers_ready, draining, wanted) in [
            (&Health::Serving, true, false, State::Serving),
            (&Health::Serving, false, false, State::Loading),
            (&Health::Serving, true, true, State::Draining),
            (&Health::Draining, true, false, State::Draining),
            (&stuck, true, false, State::Failed),
            (&stuck, true, true, State::Failed),
            (&Health::Stopped, true, false, State::Failed),
            (&Health::Stopped, true, true, State::Draining),
        ] {
            assert_eq!(
                State::of(engine, peers_ready, draining),
                wanted,
                "{engine:?} {peers_ready} {draining}"
            );
            assert_eq!(wanted.admit().is_ok(), wanted == State::Serving);
        }
    }

    #[tokio::test]
    async fn a_place_frees_itself_and_idle_waits_for_the_last() {
        let admission = Admission::new(2);
        let (first, second) = (admission.enter().unwrap(), admission.enter().unwrap());
        let refusal = admission.enter().unwrap_err();
        assert_eq!(
            (refusal.code, refusal.retry_after),
            (ErrorCode::Overloaded, Some(RETRY_AFTER))
        );
        drop(first);
        let idle = tokio::spawn({
            let admission = admission.clone();
            async move { admission.idle().await }
        });
        tokio::task::yield_now().await;
        assert!(!idle.is_finished());
        assert_eq!(
            admission.n_held(),
            2,
            "the waiter keeps the free place from newcomers"
        );
        drop(second);
        idle.await.unwrap();
        assert_eq!(admission.n_held(), 0);
    }
}
