//! Which worker takes a request: the least loaded one that serves the model, can be reached and does not fail all that it
//! is given. The choice itself is a pure function (`routing/choice.rs`).
//!
//! Owns: one link (connection, requests in flight, whether it is lost) for each discovered worker. The roster
//! task, started by `Config::build`, turns discovered lists into links and publishes them; it ends when the
//! discovery does. A link that failed a call is probed by a task of its own until it answers or its worker is
//! gone; while it does not answer it takes no requests.

mod choice;
mod others;
mod outlier;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use laneway_proto::v1::worker_client::WorkerClient;
use laneway_proto::{ErrorCode, Failure, WorkerId, v1};
use laneway_telemetry::metric;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tonic::transport::{Channel, Uri};

use crate::config::LinkConfig;
use crate::discovery::channel;
use crate::facts::{Load, ModelFacts, Worker};
use choice::{Candidate, choose};
use others::Others;
use outlier::Outlier;

/// When trying again makes sense for a caller who found every worker full.
pub(crate) const RETRY_AFTER: std::time::Duration = std::time::Duration::from_secs(1);

/// The connection to one worker.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: WorkerId,
    address: Uri,
    pub(crate) client: WorkerClient<Channel>,
    /// Requests that this gateway has there.
    in_flight: AtomicU32,
    /// Requests that others have there.
    others: Mutex<Others>,
    /// A probe runs.
    suspected: AtomicBool,
    /// A probe found that it does not answer.
    lost: AtomicBool,
    outlier: Mutex<Outlier>,
    config: LinkConfig,
    changed: Arc<Notify>,
}

impl Link {
    /// It did what it was asked to.
    pub(crate) fn worked(&self) {
        self.outlier.lock().worked();
    }

    /// It failed a call that another worker might not have failed.
    pub(crate) fn failed(&self) {
        if let Some(pause) = self.outlier.lock().failed(Instant::now()) {
            metrics::counter!(metric::GATEWAY_EJECTIONS).increment(1);
            tracing::warn!(worker = %self.id, ?pause, "worker failed too often in a row: others go first");
        }
    }

    /// A call failed in a way that the worker did not choose: find out whether it is there at all.
    pub(crate) fn suspect(self: &Arc<Self>) {
        if !self.suspected.swap(true, Ordering::Relaxed) {
            tokio::spawn(probe(Arc::downgrade(self)));
        }
    }

    fn set_lost(&self, lost: bool) {
        if self.lost.swap(lost, Ordering::Relaxed) != lost {
            tracing::warn!(worker = %self.id, lost, "worker reachability changed");
            self.changed.notify_one();
        }
    }
}

/// Ask for the status until it is answered or the worker left the roster.
async fn probe(link: Weak<Link>) {
    loop {
        let Some(link) = link.upgrade() else { return };
        let mut request = tonic::Request::new(v1::WorkerStatusRequest {});
        request.set_timeout(link.config.unary_timeout);
        let answered = link.client.clone().status(request).await.is_ok();
        link.set_lost(!answered);
        if answered {
            link.suspected.store(false, Ordering::Relaxed);
            return;
        }
        let pause = link.config.poll_interval;
        drop(link);
        tokio::time::sleep(pause).await;
    }
}

/// One place in the roster.
#[derive(Debug, Clone)]
struct Place {
    link: Arc<Link>,
    model: Arc<ModelFacts>,
    load: Load,
}

/// The workers that requests can go to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Roster {
    places: Vec<Place>,
    /// To every worker, also those that take no requests from here.
    links: Vec<Arc<Link>>,
}

impl Roster {
    /// Something can be routed.
    pub(crate) fn serves(&self) -> bool {
        !self.places.is_empty()
    }

    /// Models that can be asked for, each once, by name.
    pub(crate) fn models(&self) -> Vec<Arc<ModelFacts>> {
        let mut models: Vec<_> = self.places.iter().map(|place| place.model.clone()).collect();
        models.sort_by(|a, b| a.name.cmp(&b.name));
        models.dedup_by(|a, b| a.name == b.name);
        models
    }
}

/// Hands out workers.
#[derive(Debug, Clone)]
pub(crate) struct Router {
    roster: watch::Receiver<Roster>,
    turn: Arc<AtomicU32>,
    /// The worker that the stream is with, where one stream makes several calls.
    stays: Option<Arc<Mutex<Option<WorkerId>>>>,
}

/// A worker that was picked, counted as busy until this is dropped.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) link: Arc<Link>,
}

impl Drop for Assignment {
    fn drop(&mut self) {
        self.link.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Router {
    /// Route over what the roster task publishes.
    pub(crate) fn new(roster: watch::Receiver<Roster>) -> Self {
        Self {
            roster,
            turn: Arc::default(),
            stays: None,
        }
    }

    /// For one stream of several calls, which stays where it is while that costs it little: a worker that has encoded
    /// its clip or its prompt need not do it again.
    pub(crate) fn for_stream(&self) -> Self {
        Self {
            stays: Some(Arc::default()),
            ..self.clone()
        }
    }

    /// See [`Roster::models`].
    pub(crate) fn models(&self) -> Vec<Arc<ModelFacts>> {
        self.roster.borrow().models()
    }

    /// Every worker that is known.
    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        self.roster.borrow().links.clone()
    }

    /// Whether a request for `model` (empty: for any) finds a place now. What no worker serves is not said here.
    ///
    /// # Errors
    /// `Overloaded` when all workers that serve it are full.
    pub(crate) fn check_room(&self, model: &str) -> Result<(), Failure> {
        let roster = self.roster.borrow();
        let mut serving = roster
            .places
            .iter()
            .filter(|place| model.is_empty() || place.model.name == model)
            .peekable();
        if serving.peek().is_some() && serving.all(is_full) {
            return Err(every_worker_is_full());
        }
        Ok(())
    }

    /// The least loaded worker that serves `model` and is not in `tried`.
    ///
    /// # Errors
    /// `NoWorker` when none serves it, `Overloaded` when all that do are full.
    pub(crate) fn pick(&self, model: &str, tried: &[WorkerId]) -> Result<Assignment, Failure> {
        let roster = self.roster.borrow();
        let places: Vec<_> = roster
            .places
            .iter()
            .filter(|place| place.model.name == model && !place.link.lost.load(Ordering::Relaxed))
            .filter(|place| !tried.contains(&place.link.id))
            .collect();
        if places.is_empty() {
            return Err(Failure::new(
                ErrorCode::NoWorker,
                format!("no worker serves \"{model}\" at the moment"),
            )
            .retry_after(RETRY_AFTER));
        }
        let stays_with = self.stays.as_ref().and_then(|stays| stays.lock().clone());
        let now = Instant::now();
        let candidates: Vec<_> = places
            .iter()
            .map(|place| Candidate {
                requests: requests(place),
                capacity: place.load.capacity,
                full: is_full(place),
                ejected: place.link.outlier.lock().is_ejected(now),
                stays: stays_with.as_ref() == Some(&place.link.id),
            })
            .collect();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) as usize;
        let best = choose(&candidates, turn).ok_or_else(every_worker_is_full)?;
        let link = places[best].link.clone();
        if let Some(stays) = &self.stays {
            *stays.lock() = Some(link.id.clone());
        }
        link.in_flight.fetch_add(1, Ordering::Relaxed);
        Ok(Assignment { link })
    }
}

/// More requests than capacity and queue.
pub(crate) fn overloaded(what: &str) -> Failure {
    Failure::new(ErrorCode::Overloaded, format!("{what}; try again later")).retry_after(RETRY_AFTER)
}

fn every_worker_is_full() -> Failure {
    overloaded("every worker is full")
}

fn is_full(place: &Place) -> bool {
    let places = place.load.capacity.saturating_add(place.load.queue_capacity);
    place.load.capacity > 0 && place.link.in_flight.load(Ordering::Relaxed) >= places
}

/// Our own, and about what others sent there.
fn requests(place: &Place) -> u32 {
    let own = place.link.in_flight.load(Ordering::Relaxed);
    own.saturating_add(place.link.others.lock().requests())
}

/// Of all together; 1 where there is nobody, so that whoever balances goes elsewhere.
fn busy_share_of_all(places: &[Place]) -> f64 {
    let requests: u32 = places.iter().map(|place| place.load.requests).sum();
    let capacity: u32 = places.iter().map(|place| place.load.capacity).sum();
    match capacity {
        0 => 1.0,
        capacity => f64::from(requests) / f64::from(capacity),
    }
}

/// Keep the roster in step with what was discovered and with which links are lost, until the discovery ends.
pub(crate) async fn run_roster(
    mut workers: watch::Receiver<Vec<Worker>>,
    config: LinkConfig,
    roster: watch::Sender<Roster>,
) {
    let changed = Arc::new(Notify::new());
    let mut links: Vec<Arc<Link>> = Vec::new();
    loop {
        let discovered = workers.borrow_and_update().clone();
        links = links_for(&discovered, &links, &config, &changed);
        let mut places = Vec::new();
        for (worker, link) in discovered.into_iter().zip(&links) {
            let lost = link.lost.load(Ordering::Relaxed);
            let own = link.in_flight.load(Ordering::Relaxed);
            link.others
                .lock()
                .reported(worker.load.requests, own, Instant::now());
            match worker.model {
                Some(model) if worker.serving && !lost => {
                    places.push(Place {
                        link: link.clone(),
                        model: Arc::new(model),
                        load: worker.load,
                    });
                }
                _ => {}
            }
        }
        metrics::gauge!(metric::GATEWAY_WORKERS_SERVING).set(places.len() as f64);
        metrics::gauge!(metric::GATEWAY_BUSY).set(busy_share_of_all(&places));
        roster.send_replace(Roster {
            places,
            links: links.clone(),
        });
        tokio::select! {
            more = workers.changed() => if more.is_err() { return },
            () = changed.notified() => {}
        }
    }
}

/// A link for each worker in order, kept where id and address are as before.
fn links_for(
    discovered: &[Worker],
    existing: &[Arc<Link>],
    config: &LinkConfig,
    changed: &Arc<Notify>,
) -> Vec<Arc<Link>> {
    let link_for = |worker: &Worker| {
        let same = |link: &&Arc<Link>| link.id == worker.id && link.address == worker.address;
        existing.iter().find(same).cloned().unwrap_or_else(|| {
            Arc::new(Link {
                id: worker.id.clone(),
                address: worker.address.clone(),
                client: WorkerClient::new(channel(worker.address.clone(), config)),
                in_flight: AtomicU32::new(0),
                others: Mutex::default(),
                suspected: AtomicBool::new(false),
                lost: AtomicBool::new(false),
                outlier: Mutex::default(),
                config: config.clone(),
                changed: changed.clone(),
            })
        })
    };
    discovered.iter().map(link_for).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::tests::stated;

    fn worker(id: &str, requests: u32, capacity: u32) -> Worker {
        Worker {
            id: WorkerId::new(id).unwrap(),
            address: "http://127.0.0.1:1".parse().unwrap(),
            serving: true,
            load: Load {
                requests,
                capacity,
                queue_capacity: 1,
            },
            model: Some(stated().try_into().unwrap()),
        }
    }

    /// A router over `workers`, and the sender that keeps its roster task going.
    async fn router(workers: Vec<Worker>) -> (Router, watch::Sender<Vec<Worker>>) {
        let (discovered, workers) = watch::channel(workers);
        let (publisher, mut roster) = watch::channel(Roster::default());
        tokio::spawn(run_roster(workers, LinkConfig::default(), publisher));
        roster.changed().await.unwrap();
        (Router::new(roster), discovered)
    }

    async fn until(roster: &mut watch::Receiver<Roster>, holds: impl FnMut(&Roster) -> bool) {
        let soon = tokio::time::timeout(std::time::Duration::from_secs(20), roster.wait_for(holds));
        soon.await.expect("the roster never came to this").unwrap();
    }

    fn picked(router: &Router) -> String {
        router.pick("nano", &[]).unwrap().link.id.to_string()
    }

    #[tokio::test]
    async fn the_least_loaded_worker_takes_the_request() {
        let (router, _discovered) =
            router(vec![worker("a", 4, 8), worker("b", 3, 8), worker("c", 1, 2)]).await;
        for _ in 0..5 {
            assert_eq!(picked(&router), "b");
        }
    }

    #[tokio::test]
    async fn own_requests_count_before_the_next_report_and_free_themselves() {
        let (router, _discovered) = router(vec![worker("a", 0, 2), worker("b", 0, 2)]).await;
        let held: Vec<_> = (0..6).map(|_| router.pick("nano", &[]).unwrap()).collect();
        let on_a = held.iter().filter(|each| each.link.id.as_str() == "a").count();
        assert_eq!(on_a, 3, "six requests spread evenly over two workers");
        assert_eq!(router.pick("nano", &[]).unwrap_err().code, ErrorCode::Overloaded);
        for model in ["nano", ""] {
            assert_eq!(router.check_room(model).unwrap_err().code, ErrorCode::Overloaded);
        }
        assert!(
            router.check_room("other").is_ok(),
            "nobody serves it: that is said elsewhere"
        );
        drop(held);
        assert!(router.pick("nano", &[]).is_ok());
        assert!(router.check_room("nano").is_ok());
    }

    #[test]
    fn a_gateway_with_nobody_behind_it_counts_as_busy() {
        let place = |requests| Place {
            link: links_for(&[worker("a", 0, 2)], &[], &LinkConfig::default(), &Arc::default()).remove(0),
            model: Arc::new(stated().try_into().unwrap()),
            load: worker("a", requests, 2).load,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _entered = runtime.enter();
        for (requests, share) in [
            (vec![], 1.0),
            (vec![0, 0], 0.0),
            (vec![1, 2], 0.75),
            (vec![5], 2.5),
        ] {
            let places: Vec<Place> = requests.into_iter().map(place).collect();
            assert_eq!(busy_share_of_all(&places), share);
        }
    }

    #[tokio::test]
    async fn what_cannot_be_picked_is_said() {
        let (router, discovered) = router(vec![worker("a", 0, 2)]).await;
        assert_eq!(router.pick("other", &[]).unwrap_err().code, ErrorCode::NoWorker);
        let tried = [WorkerId::new("a").unwrap()];
        assert_eq!(router.pick("nano", &tried).unwrap_err().code, ErrorCode::NoWorker);
        discovered.send_replace(vec![Worker {
            serving: false,
            ..worker("a", 0, 2)
        }]);
        let mut roster = router.roster.clone();
        until(&mut roster, |roster| !roster.serves()).await;
        assert_eq!(router.pick("nano", &[]).unwrap_err().code, ErrorCode::NoWorker);
    }

    #[tokio::test]
    async fn a_worker_that_does_not_answer_is_lost_and_its_count_survives_new_reports() {
        let (router, discovered) = router(vec![worker("a", 0, 2)]).await;
        let held = router.pick("nano", &[]).unwrap();
        discovered.send_replace(vec![worker("a", 1, 2)]);
        let mut roster = router.roster.clone();
        until(&mut roster, |roster| roster.places[0].load.requests == 1).await;
        assert!(Arc::ptr_eq(&router.pick("nano", &[]).unwrap().link, &held.link));
        // Nothing listens at its address.
        held.link.suspect();
        until(&mut roster, |roster| !roster.serves()).await;
        assert_eq!(router.pick("nano", &[]).unwrap_err().code, ErrorCode::NoWorker);
    }

    #[tokio::test]
    async fn a_worker_that_fails_all_it_is_given_is_left_alone_while_there_are_others() {
        let (router, _discovered) = router(vec![worker("a", 0, 8), worker("b", 7, 8)]).await;
        for _ in 0..outlier::IN_A_ROW {
            let assignment = router.pick("nano", &[]).unwrap();
            assert_eq!(assignment.link.id.as_str(), "a");
            assignment.link.failed();
        }
        assert_eq!(picked(&router), "b", "busier, and works");
        let b = [WorkerId::new("b").unwrap()];
        let only = router.pick("nano", &b).unwrap();
        assert_eq!(only.link.id.as_str(), "a", "where there is no other it is tried");
        only.link.worked();
        assert_eq!(picked(&router), "a");
    }

    #[tokio::test]
    async fn a_stream_stays_where_it_is_and_other_streams_do_not_follow() {
        let (router, _discovered) = router(vec![worker("a", 0, 8), worker("b", 0, 8)]).await;
        let stream = router.for_stream();
        let first = picked(&stream);
        for _ in 0..4 {
            assert_eq!(picked(&stream), first);
        }
        let others = [picked(&router), picked(&router)];
        assert_ne!(others[0], others[1], "equally loaded workers take turns");
    }
}
