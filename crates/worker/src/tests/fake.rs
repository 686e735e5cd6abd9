//! A backend whose events the test sends, and an engine-manager that gives what it is told to.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::Stream;
use laneway_engine::node::FinishReason;
use laneway_engine::{EngineStats, Health, OutputEvent, PushError, RequestStats, SubmitError};
use laneway_plan::deployment::{DeviceKind, Placement, Priority, Weights};
use laneway_plan::worker_plan::{Direction, EdgeKind, LanePlan, NodePlan, RemoteEdge, WorkerPlan};
use laneway_proto::v1;
use laneway_proto::v1::engine_manager_server::{EngineManager, EngineManagerServer};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::backend::{Backend, DecodeStart, FrameShape, Running, Strength, Utterance};

/// Words of a frame, and entries of its codebook.
pub(super) const SHAPE: FrameShape = FrameShape {
    words: 2,
    codebook_size: 100,
};

/// Samples that a frame decodes to.
pub(super) const SAMPLES_PER_FRAME: usize = 4;

/// Frames that a decoding request holds.
const CAPACITY: usize = 4;

struct Live {
    events: mpsc::UnboundedSender<OutputEvent>,
    deadline: Option<Instant>,
    utterance: Option<Utterance>,
    /// Frames not decoded yet.
    held: VecDeque<Arc<[i32]>>,
    n_frames: u32,
    strength: Option<Strength>,
}

/// Requests by id. A decoding one turns each frame into samples at once unless the backend is held.
pub(super) struct FakeBackend {
    live: Arc<Mutex<HashMap<String, Live>>>,
    n_live: Arc<watch::Sender<usize>>,
    pub(super) health: watch::Sender<Health>,
    held: Mutex<bool>,
    full: AtomicBool,
    max_frames: AtomicU32,
}

impl FakeBackend {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(FakeBackend {
            live: Arc::default(),
            n_live: Arc::new(watch::Sender::new(0)),
            health: watch::Sender::new(Health::Serving),
            held: Mutex::new(false),
            full: AtomicBool::new(false),
            max_frames: AtomicU32::new(50),
        })
    }

    /// Most frames of the requests from now on.
    pub(super) fn allow_frames(&self, frames: u32) {
        self.max_frames.store(frames, Ordering::Relaxed);
    }

    /// Whether requests wait from now on instead of starting at once.
    pub(super) fn full(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
    }

    /// A waiting request's turn came.
    pub(super) fn started(&self, id: &str) {
        self.send(
            id,
            OutputEvent::Started {
                queued: Duration::ZERO,
            },
        );
    }

    /// Send an event of a live request.
    pub(super) fn send(&self, id: &str, event: OutputEvent) {
        self.live.lock()[id]
            .events
            .send(event)
            .expect("its stream is gone");
    }

    pub(super) fn samples(&self, id: &str, samples: &[f32]) {
        let (samples, first_item, n_items) = (samples.to_vec().into(), 0, 1);
        self.send(
            id,
            OutputEvent::Samples {
                samples,
                first_item,
                n_items,
            },
        );
    }

    pub(super) fn items(&self, id: &str, first_item: u32, items: &[[i32; 2]]) {
        let items = items.iter().map(|item| Arc::from(item.as_slice())).collect();
        self.send(
            id,
            OutputEvent::Items {
                edge: "codes".into(),
                first_item,
                items,
            },
        );
    }

    pub(super) fn finish(&self, id: &str, reason: FinishReason, items: u32) {
        let stats = RequestStats {
            items,
            ..Default::default()
        };
        self.send(id, OutputEvent::Finished { reason, stats });
    }

    /// Keep frames from being decoded, or decode those that waited.
    pub(super) fn hold(&self, hold: bool) {
        *self.held.lock() = hold;
        if !hold {
            for live in self.live.lock().values_mut() {
                decode(live);
            }
        }
    }

    pub(super) fn deadline(&self, id: &str) -> Option<Instant> {
        self.live.lock()[id].deadline
    }

    pub(super) fn utterance(&self, id: &str) -> Utterance {
        self.live.lock()[id].utterance.clone().expect("it decodes")
    }

    pub(super) fn strength(&self, id: &str) -> Option<Strength> {
        self.live.lock()[id].strength
    }

    /// Wait until so many requests are live.
    pub(super) async fn until_live(&self, n: usize) {
        let mut n_live = self.n_live.subscribe();
        let reached = tokio::time::timeout(super::PATIENCE, n_live.wait_for(|live| *live == n)).await;
        reached.expect("never so many requests were live").unwrap();
    }

    fn open(
        &self,
        id: &str,
        utterance: Option<Utterance>,
        deadline: Option<Instant>,
    ) -> Result<Running, SubmitError> {
        let (events, receiver) = mpsc::unbounded_channel();
        let mut live = self.live.lock();
        if live.contains_key(id) {
            return Err(SubmitError::DuplicateId(id.into()));
        }
        if utterance.is_some() && id == "warm up" {
            let _ = events.send(OutputEvent::Finished {
                reason: FinishReason::Length,
                stats: RequestStats::default(),
            });
        }
        if !self.full.load(Ordering::Relaxed) {
            let _ = events.send(OutputEvent::Started {
                queued: Duration::ZERO,
            });
        }
        let (held, n_frames, strength) = (VecDeque::new(), 0, None);
        live.insert(
            id.into(),
            Live {
                events,
                deadline,
                utterance,
                held,
                n_frames,
                strength,
            },
        );
        self.n_live.send_replace(live.len());
        let (live, n_live) = (self.live.clone(), self.n_live.clone());
        Ok(Running {
            prompt_positions: 12,
            max_frames: self.max_frames.load(Ordering::Relaxed),
            events: Box::pin(FakeEvents {
                id: id.into(),
                receiver,
                live,
                n_live,
            }),
        })
    }
}

fn decode(live: &mut Live) {
    while let Some(frame) = live.held.pop_front() {
        let samples = vec![frame[0] as f32 / 100.0; SAMPLES_PER_FRAME];
        let _ = live.events.send(OutputEvent::Samples {
            samples: samples.into(),
            first_item: live.n_frames,
            n_items: 1,
        });
        live.n_frames += 1;
    }
}

struct FakeEvents {
    id: String,
    receiver: mpsc::UnboundedReceiver<OutputEvent>,
    live: Arc<Mutex<HashMap<String, Live>>>,
    n_live: Arc<watch::Sender<usize>>,
}

impl Stream for FakeEvents {
    type Item = OutputEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<OutputEvent>> {
        self.receiver.poll_recv(context)
    }
}

impl Drop for FakeEvents {
    fn drop(&mut self) {
        let mut live = self.live.lock();
        live.remove(&self.id);
        self.n_live.send_replace(live.len());
    }
}

impl Backend for FakeBackend {
    fn facts(&self) -> v1::ModelFacts {
        v1::ModelFacts {
            model: "fake".into(),
            sample_rate: 24_000,
            ..Default::default()
        }
    }

    fn frame_shape(&self) -> FrameShape {
        SHAPE
    }

    fn synthesize(
        &self,
        id: &str,
        utterance: Utterance,
        deadline: Option<Instant>,
    ) -> Result<Running, SubmitError> {
        self.open(id, Some(utterance), deadline)
    }

    fn decode(&self, id: &str, _: DecodeStart, deadline: Option<Instant>) -> Result<Running, SubmitError> {
        self.open(id, None, deadline)
    }

    fn push_frames(&self, id: &str, frames: &[Arc<[i32]>]) -> Result<(), PushError> {
        let mut all = self.live.lock();
        let live = all
            .get_mut(id)
            .ok_or_else(|| PushError::UnknownRequest(id.into()))?;
        if live.held.len() + frames.len() > CAPACITY && id != "warm up" {
            return Err(PushError::Full {
                request: id.into(),
                held: live.held.len(),
                capacity: CAPACITY,
            });
        }
        live.held.extend(frames.iter().cloned());
        if !*self.held.lock() {
            decode(live);
        }
        Ok(())
    }

    fn end_frames(&self, id: &str) -> Result<(), PushError> {
        let mut all = self.live.lock();
        let live = all
            .get_mut(id)
            .ok_or_else(|| PushError::UnknownRequest(id.into()))?;
        let stats = RequestStats {
            items: live.n_frames,
            ..Default::default()
        };
        let _ = live.events.send(OutputEvent::Finished {
            reason: FinishReason::Stop,
            stats,
        });
        Ok(())
    }

    fn cancel(&self, id: &str, strength: Strength) -> bool {
        self.live
            .lock()
            .get_mut(id)
            .map(|live| live.strength = Some(strength))
            .is_some()
    }

    fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.live.lock().len(),
            ..Default::default()
        }
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }
}

/// A plan with room for one running and one waiting request.
pub(crate) fn plan(rank: u32, remote: Option<(Direction, u32)>) -> WorkerPlan {
    let lane = LanePlan {
        id: 0,
        priority: Priority::Normal,
        sms: None,
        auto_sms: vec![],
        memory_bytes: 0,
        max_rows: 1,
    };
    let edge = |(direction, peer_rank)| RemoteEdge {
        edge: "codes".into(),
        kind: EdgeKind::Stream,
        direction,
        peer_rank,
    };
    WorkerPlan {
        rank,
        model: "fake".into(),
        weights: Weights::Random { seed: 0 },
        model_config: None,
        device: DeviceKind::Cpu,
        precision: laneway_plan::deployment::Precision::F32,
        device_index: 0,
        active_thread_percentage: None,
        pinned_device_memory_bytes: None,
        max_seq_len: 64,
        nodes: vec![NodePlan {
            node: "Node".into(),
            placement: Placement::Chain,
        }],
        lanes: vec![lane],
        resources: vec![],
        walks: vec![],
        chunks: Default::default(),
        remote_edges: remote.map(edge).into_iter().collect(),
        capture_buckets: vec![1],
        max_rows: 1,
        max_prefill_tokens: 64,
        max_queue: 1,
        max_frames: 100,
        max_text_chars: 100,
        stall_timeout: Duration::from_secs(5),
        drain_timeout: Duration::from_secs(10),
    }
}

#[derive(Debug, Default)]
struct ManagerState {
    plans: HashMap<u32, WorkerPlan>,
    n_registered: u64,
    refuse: Option<laneway_proto::Failure>,
}

/// Gives each rank the plan that the test set; every worker's last heartbeat makes the topology.
#[derive(Debug, Clone)]
pub(super) struct FakeManager {
    address: SocketAddr,
    state: Arc<Mutex<ManagerState>>,
    topology: watch::Sender<v1::Topology>,
    sockets: Option<Arc<tempfile::TempDir>>,
}

impl FakeManager {
    pub(super) async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let manager = FakeManager {
            address: listener.local_addr().unwrap(),
            state: Arc::default(),
            topology: watch::Sender::default(),
            sockets: None,
        };
        manager.serve(listener)
    }

    /// Its workers reach each other by their sockets only: the topology names addresses that nobody listens at.
    pub(super) async fn of_one_host() -> Self {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let manager = FakeManager {
            address: listener.local_addr().unwrap(),
            state: Arc::default(),
            topology: watch::Sender::default(),
            sockets: Some(Arc::new(tempfile::tempdir().unwrap())),
        };
        manager.serve(listener)
    }

    fn serve(self, listener: tokio::net::TcpListener) -> Self {
        let service = EngineManagerServer::new(self.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        self
    }

    /// Where its workers meet.
    pub(super) fn sockets(&self) -> Option<std::path::PathBuf> {
        self.sockets.as_ref().map(|directory| directory.path().join("s"))
    }

    pub(super) fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn plan(&self, plan: WorkerPlan) {
        self.state.lock().plans.insert(plan.rank, plan);
    }

    /// Refuse every registration from now on.
    pub(super) fn refuse(&self, failure: laneway_proto::Failure) {
        self.state.lock().refuse = Some(failure);
    }

    /// Forget every worker, as a restarted engine-manager does.
    pub(super) fn forget(&self) {
        self.topology.send_modify(|topology| topology.workers.clear());
    }

    /// Wait until the workers' states by rank are these.
    pub(super) async fn until(&self, wanted: &[(u32, v1::WorkerState)]) {
        let states = |topology: &v1::Topology| {
            let mut states: Vec<_> = topology
                .workers
                .iter()
                .map(|worker| (worker.rank, worker.state()))
                .collect();
            states.sort();
            states == wanted
        };
        let mut topology = self.topology.subscribe();
        let reached = tokio::time::timeout(super::PATIENCE, topology.wait_for(states)).await;
        reached
            .unwrap_or_else(|_| panic!("never {wanted:?}: {:?}", self.topology.borrow()))
            .unwrap();
    }
}

#[tonic::async_trait]
impl EngineManager for FakeManager {
    type WatchTopologyStream = Pin<Box<dyn Stream<Item = Result<v1::Topology, Status>> + Send>>;

    async fn register(
        &self,
        request: Request<v1::RegisterRequest>,
    ) -> Result<Response<v1::RegisterResponse>, Status> {
        let request = request.into_inner();
        let mut state = self.state.lock();
        if let Some(refusal) = &state.refuse {
            return Err(refusal.clone().into());
        }
        state.n_registered += 1;
        let worker = v1::WorkerInfo {
            worker_id: request.worker_id,
            address: match &self.sockets {
                Some(_) => "http://127.0.0.1:1".to_owned(),
                None => request.address,
            },
            rank: request.rank,
            state: v1::WorkerState::Loading.into(),
            ..Default::default()
        };
        self.topology.send_modify(|topology| {
            topology.workers.retain(|other| other.rank != worker.rank);
            topology.workers.push(worker);
        });
        Ok(Response::new(v1::RegisterResponse {
            plan: Some((&state.plans[&request.rank]).into()),
            generation: state.n_registered,
            heartbeat_interval_ms: 20,
            heartbeat_timeout_ms: 5000,
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<v1::HeartbeatRequest>,
    ) -> Result<Response<v1::HeartbeatResponse>, Status> {
        let request = request.into_inner();
        let mut known = false;
        self.topology.send_if_modified(|topology| {
            let worker = topology
                .workers
                .iter_mut()
                .find(|worker| worker.worker_id == request.worker_id);
            let Some(worker) = worker else { return false };
            known = true;
            let changed = worker.state != request.state;
            (worker.state, worker.facts) = (request.state, request.facts.clone());
            changed
        });
        if !known {
            return Err(laneway_proto::Failure::new(laneway_proto::ErrorCode::NotRegistered, "who?").into());
        }
        Ok(Response::new(v1::HeartbeatResponse { drain: false }))
    }

    async fn deregister(
        &self,
        request: Request<v1::DeregisterRequest>,
    ) -> Result<Response<v1::DeregisterResponse>, Status> {
        let gone = request.into_inner().worker_id;
        self.topology
            .send_modify(|topology| topology.workers.retain(|worker| worker.worker_id != gone));
        Ok(Response::new(v1::DeregisterResponse {}))
    }

    async fn watch_topology(
        &self,
        _: Request<v1::WatchTopologyRequest>,
    ) -> Result<Response<Self::WatchTopologyStream>, Status> {
        let versions = tokio_stream::wrappers::WatchStream::new(self.topology.subscribe());
        Ok(Response::new(Box::pin(futures::StreamExt::map(versions, Ok))))
    }
}
