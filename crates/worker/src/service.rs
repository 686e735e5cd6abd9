//! `laneway.v1.Worker`: the gRPC service around one loaded model.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use laneway_proto::v1::worker_server::Worker;
use laneway_proto::{ErrorCode, Failure, grpc_timeout, v1};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument as _;

use crate::backend::{Backend, Running, Strength};
use crate::builders::Builders;
use crate::decode::{self, Decoding};
use crate::failure;
use crate::meter;
use crate::output::LocalStream;
use crate::peer::Peer;
use crate::relay::{Pace, Relay};
use crate::report::Reporter;
use crate::state::{Admission, Place, State};
use crate::trace::Trace;
use crate::wire;

/// Messages held for a caller of a split deployment before the relay waits.
const RESPONSES_HELD: usize = 16;

/// Where the audio of this worker's requests is made.
#[derive(Debug, Clone)]
pub(crate) enum Codec {
    /// Here.
    Local,
    /// In the worker at the other end of the frames' edge, while it serves.
    Remote(watch::Receiver<Option<Peer>>),
}

/// What this worker's plan makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Role {
    /// It runs the entry walk.
    pub(crate) synthesizes: bool,
    /// Frames come to it from another worker.
    pub(crate) decodes: bool,
}

/// What there is once the model is loaded.
pub(crate) struct Core {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) builders: Builders,
    pub(crate) role: Role,
    pub(crate) codec: Codec,
    pub(crate) admission: Admission,
}

/// The service. It answers from the start, and takes requests once its core is set and the state says so.
#[derive(Clone)]
pub(crate) struct WorkerService {
    pub(crate) core: Arc<OnceLock<Core>>,
    pub(crate) state: watch::Receiver<State>,
    pub(crate) reporter: Arc<Reporter>,
}

type Stream<T> = std::pin::Pin<Box<dyn futures::Stream<Item = Result<T, Status>> + Send>>;

impl WorkerService {
    fn core(&self) -> Result<&Core, Failure> {
        self.core
            .get()
            .ok_or_else(|| Failure::new(ErrorCode::NoWorker, "the worker is not ready yet"))
    }

    /// A place for one more request of a kind that this worker serves.
    fn admit(&self, call: &str, serves: impl Fn(Role) -> bool) -> Result<(&Core, Place), Failure> {
        let core = self.core()?;
        if !serves(core.role) {
            let message = format!("this worker's plan has no nodes for {call}");
            return Err(Failure::new(ErrorCode::InvalidArgument, message));
        }
        self.state.borrow().admit()?;
        Ok((core, core.admission.enter()?))
    }

    async fn synthesize(
        &self,
        request: Request<v1::WorkerSynthesizeRequest>,
    ) -> Result<Stream<v1::WorkerSynthesizeResponse>, Failure> {
        let (core, mut place) = self.admit("Synthesize", |role| role.synthesizes)?;
        let deadline = deadline(&request)?;
        let span = tracing::info_span!("worker_synthesize", request_id = request.get_ref().request_id);
        let trace = Trace::new(span, request.metadata());
        let request = request.into_inner();
        if request.return_frames {
            let why = "no build of the worker returns frames beside the audio; leave it out";
            return Err(Failure::of_field(
                ErrorCode::UnsupportedField,
                "return_frames",
                why,
            ));
        }
        let id = wire::request_id(&request.request_id)?;
        let utterance = wire::utterance(request)?;
        let peer = match &core.codec {
            Codec::Local => None,
            Codec::Remote(peer) => {
                let peer = peer.borrow().clone();
                Some(
                    peer.ok_or_else(|| Failure::new(ErrorCode::NoWorker, "the codec worker is not serving"))?,
                )
            }
        };
        let chunk = utterance.chunk.as_ref().map(Into::into);
        let mut running = core
            .submit({
                let id = id.clone();
                move |backend| backend.synthesize(&id, utterance, deadline)
            })
            .await?;
        running.events = trace.watch(running.events);
        place.taken();
        let Some(peer) = peer else {
            return Ok(Box::pin(LocalStream::new(running, place)));
        };
        let (responses, stream) = mpsc::channel(RESPONSES_HELD);
        let relay = Relay {
            header: v1::DecodeHeader {
                request_id: id,
                chunk,
                prime: None,
                max_frames: running.max_frames,
            },
            shape: core.backend.frame_shape(),
            pace: Pace::new(&core.backend.facts()),
            running,
            place,
            deadline,
            peer: peer.client,
            responses,
            trace: trace.clone(),
        };
        tokio::spawn(relay.run().instrument(trace.span()));
        Ok(Box::pin(ReceiverStream::new(stream)))
    }

    async fn decode(
        &self,
        request: Request<Streaming<v1::DecodeRequest>>,
    ) -> Result<Stream<v1::DecodeResponse>, Failure> {
        let (core, mut place) = self.admit("Decode", |role| role.decodes)?;
        let deadline = deadline(&request)?;
        let metadata = request.metadata().clone();
        let mut inbound = request.into_inner();
        let header = decode::header(&mut inbound).await?;
        let span = tracing::info_span!("worker_decode", request_id = header.request_id);
        let trace = Trace::new(span, &metadata);
        let id = wire::request_id(&header.request_id)?;
        let shape = core.backend.frame_shape();
        let start = wire::decode_start(header, shape)?;
        let mut running = core
            .submit({
                let id = id.clone();
                move |backend| backend.decode(&id, start, deadline)
            })
            .await?;
        running.events = trace.watch(running.events);
        place.taken();
        let (responses, stream) = mpsc::channel(decode::RESPONSES_HELD);
        let decoding = Decoding {
            id,
            backend: core.backend.clone(),
            shape,
            running,
            place,
            responses,
        };
        tokio::spawn(decoding.run(inbound).instrument(trace.span()));
        Ok(Box::pin(ReceiverStream::new(stream)))
    }
}

impl Core {
    /// Submit off the async threads: building a prompt may take milliseconds. A caller that goes away meanwhile
    /// drops the request with the result.
    async fn submit(
        &self,
        submit: impl FnOnce(&dyn Backend) -> Result<Running, laneway_engine::SubmitError> + Send + 'static,
    ) -> Result<Running, Failure> {
        let backend = self.backend.clone();
        let submitted = self.builders.run(move || submit(&*backend)).await?;
        submitted.map_err(failure::of_submit)
    }
}

fn deadline<T>(request: &Request<T>) -> Result<Option<Instant>, Failure> {
    match grpc_timeout(request.metadata()) {
        Some(Duration::ZERO) => Err(Failure::new(
            ErrorCode::DeadlineExceeded,
            "the deadline had passed when the request came",
        )),
        timeout => Ok(timeout.map(|timeout| Instant::now() + timeout)),
    }
}

fn refused(failure: &Failure) {
    meter::ended(failure.code.label());
}

#[tonic::async_trait]
impl Worker for WorkerService {
    type SynthesizeStream = Stream<v1::WorkerSynthesizeResponse>;
    type DecodeStream = Stream<v1::DecodeResponse>;

    async fn synthesize(
        &self,
        request: Request<v1::WorkerSynthesizeRequest>,
    ) -> Result<Response<Self::SynthesizeStream>, Status> {
        let stream = WorkerService::synthesize(self, request)
            .await
            .inspect_err(refused)?;
        Ok(Response::new(stream))
    }

    async fn decode(
        &self,
        request: Request<Streaming<v1::DecodeRequest>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        let stream = WorkerService::decode(self, request).await.inspect_err(refused)?;
        Ok(Response::new(stream))
    }

    async fn cancel(
        &self,
        request: Request<v1::WorkerCancelRequest>,
    ) -> Result<Response<v1::WorkerCancelResponse>, Status> {
        let request = request.into_inner();
        let strength = match request.strength() {
            v1::CancelStrength::Unspecified | v1::CancelStrength::Stop => Strength::Stop,
            v1::CancelStrength::Kill => Strength::Kill,
        };
        let id = wire::request_id(&request.request_id)?;
        if !self.core()?.backend.cancel(&id, strength) {
            let message = format!("no running request has the id {id}");
            return Err(Failure::of_field(ErrorCode::RequestNotFound, "request_id", message).into());
        }
        Ok(Response::new(v1::WorkerCancelResponse {}))
    }

    async fn status(
        &self,
        _: Request<v1::WorkerStatusRequest>,
    ) -> Result<Response<v1::WorkerStatusResponse>, Status> {
        let stats = self
            .core
            .get()
            .map(|core| core.backend.stats())
            .unwrap_or_default();
        Ok(Response::new(self.reporter.status(*self.state.borrow(), &stats)))
    }
}
