//! The workers' service, and what of it runs.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::Stream;
use laneway_proto::{ErrorCode, Failure, v1};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming};

use super::{MAX_FRAMES, Speech, voice};

/// What ends a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// Its last frame.
    Done,
    /// A stop: it finishes now, and well.
    Stop,
    /// A kill.
    Kill,
}

/// Who runs, and since when nobody else may.
#[derive(Debug, Default)]
struct Places {
    /// By id, how each is told to end.
    running: HashMap<String, watch::Sender<Option<Ending>>>,
    draining_since: Option<Instant>,
}

/// What all calls share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: String,
    capacity: u32,
    facts: v1::ModelFacts,
    speech: Speech,
    began: Instant,
    places: Mutex<Places>,
    /// Streams that run.
    running: watch::Sender<u32>,
    state: watch::Sender<v1::WorkerState>,
}

impl Shared {
    pub(super) fn new(id: String, capacity: u32, facts: v1::ModelFacts, speech: Speech) -> Self {
        Shared {
            id,
            capacity,
            facts,
            speech,
            began: Instant::now(),
            places: Mutex::default(),
            running: watch::Sender::new(0),
            state: watch::Sender::new(v1::WorkerState::Serving),
        }
    }

    pub(super) fn state(&self) -> v1::WorkerState {
        *self.state.borrow()
    }

    pub(super) fn facts(&self) -> v1::ModelFacts {
        self.facts.clone()
    }

    pub(super) fn load(&self) -> v1::WorkerLoad {
        v1::WorkerLoad {
            running: *self.running.borrow(),
            capacity: self.capacity,
            ..Default::default()
        }
    }

    /// Follow the state.
    pub(super) fn states(&self) -> watch::Receiver<v1::WorkerState> {
        self.state.subscribe()
    }

    /// Take nothing new from now on.
    pub(super) fn drain(&self) {
        self.places().draining_since.get_or_insert_with(Instant::now);
        self.state.send_replace(v1::WorkerState::Draining);
    }

    /// Until nothing runs.
    pub(super) async fn idle(&self) {
        let mut running = self.running.subscribe();
        // The sender is here: it does not close.
        let _ = running.wait_for(|running| *running == 0).await;
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(self: &Arc<Self>, id: String) -> Result<Place, Failure> {
        let mut places = self.places();
        if let Some(since) = places.draining_since {
            eprintln!("{}", refused_in_drain(since.elapsed()));
            return Err(Failure::new(ErrorCode::Draining, "the worker is draining"));
        }
        if places.running.len() >= self.capacity as usize {
            return Err(Failure::new(ErrorCode::Overloaded, "every place is taken"));
        }
        if places.running.contains_key(&id) {
            return Err(Failure::new(
                ErrorCode::DuplicateRequest,
                format!("{id} is running"),
            ));
        }
        let (sender, told) = watch::channel(None);
        places.running.insert(id.clone(), sender);
        // Before a drain can begin, which would see that nothing runs.
        self.running.send_modify(|running| *running += 1);
        drop(places);
        Ok(Place {
            id,
            told,
            shared: self.clone(),
        })
    }
}

/// The line that tells of a stream which came so long behind the begin of the drain: whoever runs many workers adds up
/// how late streams still come.
fn refused_in_drain(since: Duration) -> String {
    format!("{{\"refused_ms_into_drain\":{}}}", since.as_millis())
}

/// A place that a stream holds until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    id: String,
    told: watch::Receiver<Option<Ending>>,
    shared: Arc<Shared>,
}

impl Place {
    /// Until somebody ends it.
    pub(super) async fn told_to_end(&self) -> Ending {
        let mut told = self.told.clone();
        let told = told.wait_for(Option::is_some).await;
        told.ok().and_then(|ending| *ending).unwrap_or(Ending::Kill)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.places().running.remove(&self.id);
        self.shared.running.send_modify(|running| *running -= 1);
    }
}

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Service(pub(super) Arc<Shared>);

type Events = Pin<Box<dyn Stream<Item = Result<v1::WorkerSynthesizeResponse, Status>> + Send>>;

#[tonic::async_trait]
impl v1::worker_server::Worker for Service {
    type SynthesizeStream = Events;
    type DecodeStream = tokio_stream::Empty<Result<v1::DecodeResponse, Status>>;

    async fn synthesize(
        &self,
        request: Request<v1::WorkerSynthesizeRequest>,
    ) -> Result<Response<Events>, Status> {
        let request = request.into_inner();
        let place = self.0.enter(request.request_id)?;
        let speech = self.0.speech;
        let frames = request.max_frames.unwrap_or(speech.frames).clamp(1, MAX_FRAMES);
        Ok(Response::new(Box::pin(voice::speak(place, speech, frames))))
    }

    async fn decode(
        &self,
        _request: Request<Streaming<v1::DecodeRequest>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        Err(Status::unimplemented("a fake worker has no codec"))
    }

    async fn cancel(
        &self,
        request: Request<v1::WorkerCancelRequest>,
    ) -> Result<Response<v1::WorkerCancelResponse>, Status> {
        let request = request.into_inner();
        let ending = match request.strength() {
            v1::CancelStrength::Kill => Ending::Kill,
            _ => Ending::Stop,
        };
        let not_found = || Failure::new(ErrorCode::RequestNotFound, "no such request runs");
        let places = self.0.places();
        let told = places.running.get(&request.request_id).ok_or_else(not_found)?;
        told.send_replace(Some(ending));
        Ok(Response::new(v1::WorkerCancelResponse {}))
    }

    async fn status(
        &self,
        _request: Request<v1::WorkerStatusRequest>,
    ) -> Result<Response<v1::WorkerStatusResponse>, Status> {
        Ok(Response::new(v1::WorkerStatusResponse {
            worker_id: self.0.id.clone(),
            state: self.0.state().into(),
            load: Some(self.0.load()),
            facts: Some(self.0.facts()),
            takes_requests: true,
            uptime_ms: self.0.began.elapsed().as_millis() as u64,
            ..Default::default()
        }))
    }
}
