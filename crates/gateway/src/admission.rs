//! Who may run: a bounded number of requests, each under an id of its own.
//!
//! Owns: the permits and the table of running requests. A ticket holds one of each and frees both on drop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use laneway_proto::{ErrorCode, Failure, RequestId};
use laneway_telemetry::metric;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::caller::KeyName;
use crate::routing::overloaded;

/// What was asked of a running request. A later one only counts when it is stronger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Signal {
    /// Nothing.
    Run,
    /// Deliver what was made, then end.
    Stop,
    /// End now.
    Kill,
    /// End now: the gateway goes away.
    GoAway,
}

/// The door.
#[derive(Debug)]
pub(crate) struct Admission {
    permits: Arc<Semaphore>,
    n_permits: u32,
    running: DashMap<RequestId, Raiser>,
    closed: AtomicBool,
}

/// A place inside, for a request without an id yet.
#[derive(Debug)]
pub(crate) struct Place {
    admission: Arc<Admission>,
    permit: OwnedSemaphorePermit,
}

impl Place {
    /// Let the request of this key run under its id.
    ///
    /// # Errors
    /// `DuplicateRequest`.
    pub(crate) fn admit(self, id: RequestId, key: KeyName) -> Result<Ticket, Failure> {
        let Entry::Vacant(entry) = self.admission.running.entry(id.clone()) else {
            let problem = format!("a running request has the id \"{id}\"; choose another");
            return Err(Failure::of_field(
                ErrorCode::DuplicateRequest,
                "request_id",
                problem,
            ));
        };
        let (sender, signal) = watch::channel(Signal::Run);
        let raiser = Raiser(sender);
        entry.insert(raiser.clone());
        metrics::gauge!(metric::GATEWAY_RUNNING).increment(1);
        Ok(Ticket {
            id,
            key,
            signal,
            raiser,
            place: Some((self.admission, self.permit)),
        })
    }
}

/// The place of a request that runs.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) id: RequestId,
    pub(crate) key: KeyName,
    pub(crate) signal: watch::Receiver<Signal>,
    raiser: Raiser,
    /// None for a part of another's.
    place: Option<(Arc<Admission>, OwnedSemaphorePermit)>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some((admission, _permit)) = &self.place else {
            return;
        };
        // A kill has freed the id already, and it may be another's by now.
        let own = |_: &RequestId, raiser: &Raiser| raiser.0.same_channel(&self.raiser.0);
        admission.running.remove_if(&self.id, own);
        metrics::gauge!(metric::GATEWAY_RUNNING).decrement(1);
    }
}

impl Ticket {
    /// For one part of this request's work: under the same id, ended by its own signals, and gone before the request
    /// is, whose place it shares.
    pub(crate) fn part(&self) -> Ticket {
        let (sender, signal) = watch::channel(Signal::Run);
        Ticket {
            id: self.id.clone(),
            key: self.key.clone(),
            signal,
            raiser: Raiser(sender),
            place: None,
        }
    }

    /// For who may end the request while it runs.
    pub(crate) fn raiser(&self) -> Raiser {
        self.raiser.clone()
    }
}

/// Asks something of one request, whatever becomes of its id.
#[derive(Debug, Clone)]
pub(crate) struct Raiser(watch::Sender<Signal>);

impl Raiser {
    /// A weaker signal than the last one changes nothing.
    pub(crate) fn raise(&self, signal: Signal) {
        self.0.send_if_modified(|current| {
            let stronger = signal > *current;
            *current = signal.max(*current);
            stronger
        });
    }
}

impl Admission {
    /// A door for `n_permits` requests at once.
    pub(crate) fn new(n_permits: usize) -> Self {
        let n_permits = n_permits.min(Semaphore::MAX_PERMITS).min(u32::MAX as usize);
        Self {
            permits: Arc::new(Semaphore::new(n_permits)),
            n_permits: n_permits as u32,
            running: DashMap::new(),
            closed: AtomicBool::new(false),
        }
    }

    /// Requests that it lets in at once.
    pub(crate) fn n_permits(&self) -> u32 {
        self.n_permits
    }

    fn check_open(&self) -> Result<(), Failure> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Failure::new(
                ErrorCode::Draining,
                "the gateway is shutting down; try another",
            ));
        }
        Ok(())
    }

    /// Take a place for a request that is still to be read, or say at once why not.
    ///
    /// # Errors
    /// `Overloaded`, `Draining`.
    pub(crate) fn enter(self: &Arc<Self>) -> Result<Place, Failure> {
        self.check_open()?;
        let permit = self
            .permits
            .clone()
            .try_acquire_owned()
            .map_err(|_| overloaded(&format!("{} requests are in flight", self.n_permits)))?;
        // After the permit is taken: a drain that closes the door now waits for this one.
        self.check_open()?;
        Ok(Place {
            admission: self.clone(),
            permit,
        })
    }

    /// Ask something of a running request. A kill frees its id at once, its place when its work has ended.
    ///
    /// # Errors
    /// `RequestNotFound`.
    pub(crate) fn signal(&self, id: &RequestId, signal: Signal) -> Result<(), Failure> {
        let raiser = match signal {
            Signal::Kill => self.running.remove(id).map(|(_, raiser)| raiser),
            _ => self.running.get(id).map(|raiser| raiser.clone()),
        };
        let Some(raiser) = raiser else {
            return Err(Failure::new(
                ErrorCode::RequestNotFound,
                format!("no running request has the id \"{id}\""),
            ));
        };
        raiser.raise(signal);
        Ok(())
    }

    /// Let nobody in any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Wait until nobody is inside. Only after [`Admission::close`].
    pub(crate) async fn empty(&self) {
        // The semaphore is never closed, so the permits always come.
        let _all = self.permits.acquire_many(self.n_permits).await;
    }

    /// Ask everybody inside to leave now.
    pub(crate) fn end_all(&self) -> usize {
        for request in &self.running {
            request.raise(Signal::GoAway);
        }
        self.running.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn id(name: &str) -> RequestId {
        RequestId::new(name).unwrap()
    }

    fn admit(admission: &Arc<Admission>, name: &str) -> Result<Ticket, Failure> {
        admission.enter()?.admit(id(name), KeyName::default())
    }

    fn code<T>(result: Result<T, Failure>) -> ErrorCode {
        result.map(|_| ()).unwrap_err().code
    }

    #[test]
    fn places_and_ids_free_themselves() {
        let admission = Arc::new(Admission::new(2));
        let a = admit(&admission, "a").unwrap();
        assert_eq!(code(admit(&admission, "a")), ErrorCode::DuplicateRequest);
        let b = admit(&admission, "b").unwrap();
        let refused = admit(&admission, "c").unwrap_err();
        assert_eq!(refused.code, ErrorCode::Overloaded);
        assert!(refused.retry_after.is_some());
        drop((a, b));
        let again = admit(&admission, "a").unwrap();
        assert_eq!(admission.running.len(), 1);
        drop(again);
        assert_eq!(admission.permits.available_permits(), 2);
    }

    #[test]
    fn a_stronger_signal_wins() {
        let admission = Arc::new(Admission::new(1));
        let ticket = admit(&admission, "a").unwrap();
        ticket.raiser().raise(Signal::GoAway);
        admission.signal(&id("a"), Signal::Stop).unwrap();
        assert_eq!(*ticket.signal.borrow(), Signal::GoAway);
        assert_eq!(
            code(admission.signal(&id("b"), Signal::Stop)),
            ErrorCode::RequestNotFound
        );
    }

    #[test]
    fn a_killed_id_is_free_at_once_and_its_next_holder_keeps_it() {
        let admission = Arc::new(Admission::new(2));
        let killed = admit(&admission, "a").unwrap();
        admission.signal(&id("a"), Signal::Kill).unwrap();
        assert_eq!(*killed.signal.borrow(), Signal::Kill);
        assert_eq!(
            code(admission.signal(&id("a"), Signal::Kill)),
            ErrorCode::RequestNotFound
        );
        let next = admit(&admission, "a").unwrap();
        drop(killed);
        assert_eq!(code(admit(&admission, "a")), ErrorCode::DuplicateRequest);
        assert_eq!(*next.signal.borrow(), Signal::Run);
    }

    #[test]
    fn a_part_has_its_own_signal_and_no_place_of_its_own() {
        let admission = Arc::new(Admission::new(1));
        let whole = admit(&admission, "a").unwrap();
        let part = whole.part();
        part.raiser().raise(Signal::Stop);
        assert_eq!(*whole.signal.borrow(), Signal::Run);
        assert_eq!((part.id.as_str(), *part.signal.borrow()), ("a", Signal::Stop));
        drop(part);
        assert_eq!(code(admission.enter()), ErrorCode::Overloaded);
        assert_eq!(admission.running.len(), 1);
    }

    #[tokio::test]
    async fn a_closed_door_lets_nobody_in_and_waits_for_the_rest() {
        let admission = Arc::new(Admission::new(2));
        let ticket = admit(&admission, "a").unwrap();
        admission.close();
        assert_eq!(code(admit(&admission, "b")), ErrorCode::Draining);
        assert!(
            tokio::time::timeout(Duration::ZERO, admission.empty())
                .await
                .is_err()
        );
        assert_eq!(admission.end_all(), 1);
        assert_eq!(*ticket.signal.borrow(), Signal::GoAway);
        drop(ticket);
        admission.empty().await;
    }
}
