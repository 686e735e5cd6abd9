//! The workers' service, and what of it runs.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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

/// Who runs, by id, and how each is told to end.
type Places = HashMap<String, watch::Sender<Option<Ending>>>;

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

    /// Take nothing new from now on.
    pub(super) fn drain(&self) {
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
        if self.state() != v1::WorkerState::Serving {
            return Err(Failure::new(ErrorCode::Draining, "the worker is draining"));
        }
        let mut places = self.places();
        if places.len() >= self.capacity as usize {
            return Err(Failure::new(ErrorCode::Overloaded, "every place is taken"));
        }
        if places.contains_key(&id) {
            return Err(Failure::new(
                ErrorCode::DuplicateRequest,
                format!("{id} is running"),
            ));
        }
        let (sender, told) = watch::channel(None);
        places.insert(id.clone(), sender);
        drop(places);
        self.running.send_modify(|running| *running += 1);
        Ok(Place {
            id,
            told,
            shared: self.clone(),
        })
    }
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
        self.shared.places().remove(&self.id);
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
        let told = places.get(&request.request_id).ok_or_else(not_found)?;
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
