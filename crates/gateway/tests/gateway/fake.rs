//! Workers and an engine-manager that do as they are told.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures::Stream;
use laneway_proto::{ErrorCode, Failure, samples_to_bytes, v1};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use v1::worker_synthesize_response::Event;

pub(crate) const SAMPLES_PER_FRAME: u32 = 1920;

/// One thing a worker does for a request.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Refuse before the stream begins.
    Refuse(Failure),
    Started,
    /// Frames of a constant level.
    Audio(u32, f32),
    /// Audio that does not follow on what came before.
    Misplaced,
    Finish(v1::FinishReason),
    Fail(Failure),
    /// Wait until the test opens the gate. The gate stays open.
    Gate,
    /// Wait for a stop, or for ever.
    Hang,
}

/// The part of a worker's id for an attempt that its caller chose.
pub(crate) fn caller_id(worker_request_id: &str) -> &str {
    worker_request_id
        .rsplit_once('.')
        .expect("an attempt has a part of its own")
        .0
}

/// A short, good stream: three frames in two chunks.
pub(crate) fn speaks() -> Vec<Step> {
    vec![
        Step::Started,
        Step::Audio(1, 0.25),
        Step::Audio(2, -0.5),
        Step::Finish(v1::FinishReason::Stop),
    ]
}

/// Chunks of [`speaks_much`].
pub(crate) const MUCH_CHUNKS: usize = 8;

/// A stream that ends soon, with more bytes than a caller with a narrow window takes unread.
pub(crate) fn speaks_much() -> Vec<Step> {
    let mut script = vec![Step::Started];
    script.extend(std::iter::repeat_n(Step::Audio(25, 0.5), MUCH_CHUNKS));
    script.push(Step::Finish(v1::FinishReason::Stop));
    script
}

pub(crate) fn facts(model: &str) -> v1::ModelFacts {
    let voice = |name: &str| v1::Voice {
        name: name.into(),
        language: "english".into(),
        ..Default::default()
    };
    v1::ModelFacts {
        model: model.into(),
        voices: vec![voice("ryan"), voice("vivian")],
        languages: vec!["english".into()],
        sample_rate: 24_000,
        samples_per_frame: SAMPLES_PER_FRAME,
        limits: Some(v1::ModelLimits {
            max_text_chars: 200,
            max_instruct_chars: 0,
            max_frames: 500,
            max_chunk_frames: 25,
            max_reference_ms: 0,
            max_utterance_chars: 0,
        }),
        ..Default::default()
    }
}

/// What the test can see and change.
#[derive(Debug)]
pub(crate) struct Shared {
    id: String,
    script: Mutex<Vec<Step>>,
    pub(crate) requests: Mutex<Vec<(MetadataMap, v1::WorkerSynthesizeRequest)>>,
    pub(crate) cancels: Mutex<Vec<v1::WorkerCancelRequest>>,
    /// Streams that the gateway has open here.
    open: watch::Sender<usize>,
    /// Streams that were open and are not.
    ended: watch::Sender<usize>,
    status: Mutex<v1::WorkerStatusResponse>,
    /// Questions for a status that came.
    n_asked: watch::Sender<usize>,
    /// Questions for a status, and cancels, that are still to be lost.
    lost_statuses: AtomicUsize,
    lost_cancels: AtomicUsize,
    gate: watch::Sender<bool>,
    stop: Notify,
}

#[derive(Debug, Clone)]
struct Service(Arc<Shared>);

/// Counts as open until the transport drops it.
struct Open {
    events: ReceiverStream<Result<v1::WorkerSynthesizeResponse, Status>>,
    shared: Arc<Shared>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.open.send_modify(|open| *open -= 1);
        self.shared.ended.send_modify(|ended| *ended += 1);
    }
}

impl Stream for Open {
    type Item = Result<v1::WorkerSynthesizeResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.events).poll_next(context)
    }
}

async fn play(
    script: Vec<Step>,
    shared: Arc<Shared>,
    events: mpsc::Sender<Result<v1::WorkerSynthesizeResponse, Status>>,
) {
    let mut frames = 0;
    let offset = |frames: u32| u64::from(frames) * u64::from(SAMPLES_PER_FRAME);
    let finished = |frames: u32, reason: v1::FinishReason| {
        Ok(Event::Finished(v1::WorkerFinished {
            reason: reason.into(),
            frames,
            samples: offset(frames),
            timings: None,
        }))
    };
    for step in script {
        let event = match step {
            Step::Refuse(_) => unreachable!("a refusal is the only step"),
            Step::Started => Ok(Event::Started(v1::WorkerStarted {
                max_frames: 100,
                prompt_positions: 12,
            })),
            Step::Audio(n_frames, level) => {
                let samples = vec![level; (n_frames * SAMPLES_PER_FRAME) as usize];
                let sample_offset = offset(frames);
                frames += n_frames;
                Ok(Event::Audio(v1::WorkerAudio {
                    sample_offset,
                    samples: samples_to_bytes(&samples),
                }))
            }
            Step::Misplaced => Ok(Event::Audio(v1::WorkerAudio {
                sample_offset: offset(frames) + 1,
                samples: samples_to_bytes(&[0.0]),
            })),
            Step::Finish(reason) => finished(frames, reason),
            Step::Fail(failure) => Err(failure.into()),
            Step::Gate => {
                let _ = shared.gate.subscribe().wait_for(|open| *open).await;
                continue;
            }
            Step::Hang => {
                tokio::select! {
                    () = shared.stop.notified() => {}
                    () = events.closed() => return,
                }
                finished(frames, v1::FinishReason::Stopped)
            }
        };
        let message = event.map(|event| v1::WorkerSynthesizeResponse { event: Some(event) });
        if events.send(message).await.is_err() {
            return;
        }
    }
}

/// What a call is answered that got lost on its way, while some are to be lost.
fn lose(left: &AtomicUsize) -> Result<(), Status> {
    let lost = left.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    match lost {
        Ok(_) => Err(Status::unavailable("lost on its way")),
        Err(_) => Ok(()),
    }
}

#[tonic::async_trait]
impl v1::worker_server::Worker for Service {
    type SynthesizeStream = Open;
    type DecodeStream = tokio_stream::Empty<Result<v1::DecodeResponse, Status>>;

    async fn synthesize(
        &self,
        request: Request<v1::WorkerSynthesizeRequest>,
    ) -> Result<Response<Open>, Status> {
        let (metadata, _, request) = request.into_parts();
        self.0.requests.lock().unwrap().push((metadata, request));
        let script = self.0.script.lock().unwrap().clone();
        if let [Step::Refuse(failure)] = &script[..] {
            return Err(failure.clone().into());
        }
        let (sender, events) = mpsc::channel(1);
        self.0.open.send_modify(|open| *open += 1);
        tokio::spawn(play(script, self.0.clone(), sender));
        Ok(Response::new(Open {
            events: ReceiverStream::new(events),
            shared: self.0.clone(),
        }))
    }

    async fn decode(
        &self,
        _request: Request<tonic::Streaming<v1::DecodeRequest>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        Err(Status::unimplemented("a gateway does not decode"))
    }

    async fn cancel(
        &self,
        request: Request<v1::WorkerCancelRequest>,
    ) -> Result<Response<v1::WorkerCancelResponse>, Status> {
        lose(&self.0.lost_cancels)?;
        self.0.cancels.lock().unwrap().push(request.into_inner());
        self.0.stop.notify_one();
        Ok(Response::new(v1::WorkerCancelResponse {}))
    }

    async fn status(
        &self,
        _request: Request<v1::WorkerStatusRequest>,
    ) -> Result<Response<v1::WorkerStatusResponse>, Status> {
        self.0.n_asked.send_modify(|n_asked| *n_asked += 1);
        lose(&self.0.lost_statuses)?;
        Ok(Response::new(self.0.status.lock().unwrap().clone()))
    }
}

/// A worker on a runtime of its own, so that it can die with all its connections.
#[derive(Debug)]
pub(crate) struct FakeWorker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) address: SocketAddr,
    runtime: Option<Runtime>,
}

impl FakeWorker {
    pub(crate) fn start(id: &str, script: Vec<Step>) -> Self {
        Self::start_at(id, script, ([127, 0, 0, 1], 0).into())
    }

    pub(crate) fn start_at(id: &str, script: Vec<Step>, address: SocketAddr) -> Self {
        Self::start_with(id, script, address, None)
    }

    pub(crate) fn start_with(
        id: &str,
        script: Vec<Step>,
        address: SocketAddr,
        tls: Option<laneway_tls::ServerTls>,
    ) -> Self {
        let status = v1::WorkerStatusResponse {
            worker_id: id.into(),
            state: v1::WorkerState::Serving.into(),
            load: Some(v1::WorkerLoad {
                capacity: 8,
                queue_capacity: 8,
                ..Default::default()
            }),
            facts: Some(facts("nano")),
            takes_requests: true,
            ..Default::default()
        };
        let shared = Arc::new(Shared {
            id: id.into(),
            script: Mutex::new(script),
            requests: Mutex::default(),
            cancels: Mutex::default(),
            open: watch::Sender::new(0),
            ended: watch::Sender::new(0),
            status: Mutex::new(status),
            n_asked: watch::Sender::new(0),
            lost_statuses: AtomicUsize::new(0),
            lost_cancels: AtomicUsize::new(0),
            gate: watch::Sender::new(false),
            stop: Notify::new(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let service = v1::worker_server::WorkerServer::new(Service(shared.clone()));
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            let incoming = laneway_tls::Incoming::new(listener, tls).stream();
            Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming)
                .await
        });
        Self {
            shared,
            address,
            runtime: Some(runtime),
        }
    }

    pub(crate) fn uri(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Play this for requests from now on.
    pub(crate) fn plays(&self, script: Vec<Step>) {
        *self.shared.script.lock().unwrap() = script;
    }

    pub(crate) fn open_gate(&self) {
        self.shared.gate.send_replace(true);
    }

    pub(crate) fn set_status(&self, change: impl FnOnce(&mut v1::WorkerStatusResponse)) {
        change(&mut self.shared.status.lock().unwrap());
    }

    /// Lose this many questions for a status, or none.
    pub(crate) fn lose_statuses(&self, n: usize) {
        self.shared.lost_statuses.store(n, Ordering::Relaxed);
    }

    /// Lose this many cancels.
    pub(crate) fn lose_cancels(&self, n: usize) {
        self.shared.lost_cancels.store(n, Ordering::Relaxed);
    }

    /// Times that it was asked for its status.
    pub(crate) fn n_asked(&self) -> usize {
        *self.shared.n_asked.borrow()
    }

    /// Until it was asked for its status this many times more.
    pub(crate) async fn until_asked(&self, n_times: usize) {
        let mut n_asked = self.shared.n_asked.subscribe();
        let wanted = *n_asked.borrow() + n_times;
        crate::harness::soon(n_asked.wait_for(|n_asked| *n_asked >= wanted))
            .await
            .unwrap();
    }

    /// Ids of the requests that came, as the callers chose them.
    pub(crate) fn caller_ids(&self) -> Vec<String> {
        let requests = self.shared.requests.lock().unwrap();
        let chosen = |(_, request): &(MetadataMap, v1::WorkerSynthesizeRequest)| {
            caller_id(&request.request_id).to_string()
        };
        requests.iter().map(chosen).collect()
    }

    pub(crate) fn n_requests(&self) -> usize {
        self.shared.requests.lock().unwrap().len()
    }

    /// Until this many streams are open here.
    pub(crate) async fn until_open(&self, n_streams: usize) {
        let mut open = self.shared.open.subscribe();
        crate::harness::soon(open.wait_for(|open| *open == n_streams))
            .await
            .unwrap();
    }

    /// Until this many streams were open and are not.
    pub(crate) async fn until_ended(&self, n_streams: usize) {
        let mut ended = self.shared.ended.subscribe();
        crate::harness::soon(ended.wait_for(|ended| *ended >= n_streams))
            .await
            .unwrap();
    }

    /// Drop everything at once, connections included.
    pub(crate) fn die(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// As the engine-manager would list it.
    pub(crate) fn info(&self) -> v1::WorkerInfo {
        let status = self.shared.status.lock().unwrap().clone();
        v1::WorkerInfo {
            worker_id: self.shared.id.clone(),
            address: self.uri(),
            state: status.state,
            takes_requests: true,
            load: status.load,
            facts: status.facts,
            ..Default::default()
        }
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.die();
    }
}

/// An engine-manager whose topology the test writes.
#[derive(Debug)]
pub(crate) struct FakeManager {
    pub(crate) address: SocketAddr,
    topology: watch::Sender<v1::Topology>,
    server: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct ManagerService(watch::Receiver<v1::Topology>);

#[tonic::async_trait]
impl v1::engine_manager_server::EngineManager for ManagerService {
    type WatchTopologyStream = Pin<Box<dyn Stream<Item = Result<v1::Topology, Status>> + Send>>;

    async fn register(
        &self,
        _request: Request<v1::RegisterRequest>,
    ) -> Result<Response<v1::RegisterResponse>, Status> {
        Err(Failure::new(ErrorCode::UnknownRank, "no plan here").into())
    }

    async fn heartbeat(
        &self,
        _request: Request<v1::HeartbeatRequest>,
    ) -> Result<Response<v1::HeartbeatResponse>, Status> {
        Err(Failure::new(ErrorCode::NotRegistered, "nobody is registered here").into())
    }

    async fn deregister(
        &self,
        _request: Request<v1::DeregisterRequest>,
    ) -> Result<Response<v1::DeregisterResponse>, Status> {
        Err(Failure::new(ErrorCode::NotRegistered, "nobody is registered here").into())
    }

    async fn watch_topology(
        &self,
        _request: Request<v1::WatchTopologyRequest>,
    ) -> Result<Response<Self::WatchTopologyStream>, Status> {
        Ok(Response::new(Box::pin(WatchStream::new(self.0.clone()).map(Ok))))
    }
}

impl FakeManager {
    pub(crate) async fn start(workers: Vec<v1::WorkerInfo>) -> Self {
        let topology = watch::Sender::new(v1::Topology { version: 1, workers });
        let service =
            v1::engine_manager_server::EngineManagerServer::new(ManagerService(topology.subscribe()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let incoming = TcpIncoming::from(listener);
            let _ = Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming)
                .await;
        });
        Self {
            address,
            topology,
            server,
        }
    }

    pub(crate) fn publish(&self, workers: Vec<v1::WorkerInfo>) {
        self.topology.send_modify(|topology| {
            topology.version += 1;
            topology.workers = workers;
        });
    }
}

impl Drop for FakeManager {
    fn drop(&mut self) {
        self.server.abort();
    }
}
