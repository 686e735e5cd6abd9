//! `laneway.v1.EngineManager` over the registry and the deployment.

use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use laneway_proto::v1::engine_manager_server::EngineManager;
use laneway_proto::{ErrorCode, Failure, Violation, WorkerId, plan, v1};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::deployment::Served;
use crate::registry::{Registration, Registry, RegistryError, Report, Topology, Worker, WorkerState};

/// Heartbeats that fit into a lease: two may be lost.
const HEARTBEATS_PER_LEASE: u32 = 3;

/// The service. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ManagerService {
    pub(crate) served: Arc<Served>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) draining: CancellationToken,
}

impl ManagerService {
    fn register(&self, request: v1::RegisterRequest) -> Result<v1::RegisterResponse, Failure> {
        if self.draining.is_cancelled() {
            return Err(Failure::new(
                ErrorCode::Draining,
                "the engine-manager is draining",
            ));
        }
        let worker_id = worker_id(&request.worker_id)?;
        let inventory = plan::inventory(request.devices);
        // With the devices known, what the file alone could not tell is checked: devices, memory, partitions.
        if let Err(violations) = self.served.check_devices(&inventory) {
            tracing::error!(
                worker_id,
                rank = request.rank,
                "the deployment does not fit a worker's devices\n{}",
                laneway_plan::render(&violations)
            );
            let describe = |v: &laneway_plan::Violation| Violation {
                field: v.key.clone(),
                description: format!("{}: {} [{}]; {}", v.location, v.message, v.reason, v.remedy),
            };
            return Err(Failure {
                code: ErrorCode::DeploymentRefused,
                message: format!(
                    "the deployment does not fit this worker's devices: {} violations",
                    violations.len()
                ),
                violations: violations.iter().map(describe).collect(),
                retry_after: None,
            });
        }
        let rank = request.rank;
        let registration = Registration {
            worker_id: worker_id.clone(),
            rank,
            address: request.address,
            version: request.version,
        };
        let generation = self.registry.register(registration).map_err(|error| {
            // It asks again every second, for as long as its patience lasts.
            if matches!(error, RegistryError::Held { .. }) {
                tracing::debug!(worker_id, rank, %error, "a worker stands by");
            }
            of_registry(error)
        })?;
        let plan = self
            .served
            .plan(rank)
            .expect("the registry knows only ranks of the deployment");
        tracing::info!(worker_id, rank, generation, "worker registered");
        let lease = self.registry.lease();
        let ms = |duration: Duration| duration.as_millis() as u32;
        Ok(v1::RegisterResponse {
            plan: Some((&plan).into()),
            generation,
            heartbeat_interval_ms: ms(lease / HEARTBEATS_PER_LEASE),
            heartbeat_timeout_ms: ms(lease),
        })
    }

    fn heartbeat(&self, request: v1::HeartbeatRequest) -> Result<v1::HeartbeatResponse, Failure> {
        let state = match request.state() {
            v1::WorkerState::Loading => WorkerState::Loading,
            v1::WorkerState::Serving => WorkerState::Serving,
            v1::WorkerState::Draining => WorkerState::Draining,
            v1::WorkerState::Failed => WorkerState::Failed,
            v1::WorkerState::Unspecified => {
                let why = "a worker says LOADING, SERVING, DRAINING or FAILED";
                return Err(Failure::of_field(ErrorCode::InvalidArgument, "state", why));
            }
        };
        let report = Report {
            state,
            load: request.load.unwrap_or_default(),
            facts: request.facts,
        };
        self.registry
            .heartbeat(&request.worker_id, request.generation, report)
            .map_err(of_registry)?;
        // Workers outlive their engine-manager: its own end is no reason for theirs.
        Ok(v1::HeartbeatResponse { drain: false })
    }

    fn topology(&self, topology: &Topology) -> v1::Topology {
        let worker = |worker: &Worker| v1::WorkerInfo {
            worker_id: worker.worker_id.clone(),
            address: worker.address.clone(),
            rank: worker.rank,
            state: v1::WorkerState::from(worker.report.state).into(),
            nodes: self.served.nodes(worker.rank),
            takes_requests: self.served.runs_entry(worker.rank),
            load: Some(worker.report.load),
            facts: worker.report.facts.clone(),
        };
        v1::Topology {
            version: topology.revision,
            workers: topology.workers.values().map(worker).collect(),
        }
    }
}

/// Each version behind the one before, and none that may list too few: a gateway that still has workers from before
/// this manager started, or was cut off, would take them for gone. That there is nobody is told late to one who comes,
/// for the same reason, and who comes new does not miss it. A watch channel holds one value, so a slow watcher skips
/// versions and never holds any back.
fn settled(topologies: watch::Receiver<Topology>, patience: Duration) -> impl Stream<Item = Topology> {
    let came = Instant::now();
    futures::stream::unfold((topologies, false), move |(mut topologies, is_next)| async move {
        if is_next && topologies.changed().await.is_err() {
            return None;
        }
        loop {
            let topology = topologies.borrow_and_update().clone();
            let empty = topology.workers.is_empty().then_some(came + patience);
            let held = topology
                .settles
                .max(empty)
                .filter(|until| *until > Instant::now());
            let Some(until) = held else {
                return Some((topology, (topologies, true)));
            };
            // Either may change what is to be told.
            if let Ok(Err(_)) = tokio::time::timeout_at(until, topologies.changed()).await {
                return None;
            }
        }
    })
}

fn worker_id(id: &str) -> Result<String, Failure> {
    let id = WorkerId::new(id)
        .map_err(|error| Failure::of_field(ErrorCode::InvalidArgument, "worker_id", error.to_string()))?;
    Ok(id.into())
}

fn of_registry(error: RegistryError) -> Failure {
    let code = match error {
        RegistryError::UnknownRank { .. } => ErrorCode::UnknownRank,
        RegistryError::Held { .. } => ErrorCode::RankTaken,
        RegistryError::LeaseLost { .. } => ErrorCode::NotRegistered,
    };
    Failure::new(code, error.to_string())
}

impl From<WorkerState> for v1::WorkerState {
    fn from(state: WorkerState) -> Self {
        match state {
            WorkerState::Loading => v1::WorkerState::Loading,
            WorkerState::Serving => v1::WorkerState::Serving,
            WorkerState::Draining => v1::WorkerState::Draining,
            WorkerState::Failed => v1::WorkerState::Failed,
        }
    }
}

#[tonic::async_trait]
impl EngineManager for ManagerService {
    type WatchTopologyStream =
        std::pin::Pin<Box<dyn futures::Stream<Item = Result<v1::Topology, Status>> + Send>>;

    async fn register(
        &self,
        request: Request<v1::RegisterRequest>,
    ) -> Result<Response<v1::RegisterResponse>, Status> {
        Ok(Response::new(ManagerService::register(
            self,
            request.into_inner(),
        )?))
    }

    async fn heartbeat(
        &self,
        request: Request<v1::HeartbeatRequest>,
    ) -> Result<Response<v1::HeartbeatResponse>, Status> {
        Ok(Response::new(ManagerService::heartbeat(
            self,
            request.into_inner(),
        )?))
    }

    async fn deregister(
        &self,
        request: Request<v1::DeregisterRequest>,
    ) -> Result<Response<v1::DeregisterResponse>, Status> {
        let request = request.into_inner();
        self.registry.deregister(&request.worker_id, request.generation);
        Ok(Response::new(v1::DeregisterResponse {}))
    }

    async fn watch_topology(
        &self,
        _: Request<v1::WatchTopologyRequest>,
    ) -> Result<Response<Self::WatchTopologyStream>, Status> {
        let service = self.clone();
        let versions = settled(self.registry.watch(), self.registry.lease());
        let versions = versions.map(move |topology| Ok(service.topology(&topology)));
        let until = self.draining.clone().cancelled_owned();
        Ok(Response::new(Box::pin(versions.take_until(until))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than any test: what waits for it does not come.
    const NEVER: Duration = Duration::from_secs(600);

    fn registration(rank: u32) -> Registration {
        Registration {
            worker_id: format!("worker-{rank}"),
            rank,
            address: format!("http://worker-{rank}:7071"),
            version: "0.1.0".into(),
        }
    }

    fn serving() -> Report {
        Report {
            state: WorkerState::Serving,
            load: v1::WorkerLoad::default(),
            facts: None,
        }
    }

    /// How many workers a watcher is told of next, and how long it took.
    async fn told(watch: &mut (impl Stream<Item = Topology> + Unpin)) -> (usize, Duration) {
        let began = Instant::now();
        let next = tokio::time::timeout(Duration::from_secs(60), watch.next()).await;
        let topology = next.expect("nothing was told").unwrap();
        (topology.workers.len(), began.elapsed())
    }

    #[tokio::test]
    async fn a_manager_that_starts_tells_of_workers_when_all_have_reported() {
        let registry = Registry::new(vec![0, 1], NEVER, 0);
        let mut watch = Box::pin(settled(registry.watch(), NEVER));
        let first = registry.register(registration(0)).unwrap();
        registry.heartbeat("worker-0", first, serving()).unwrap();
        let second = registry.register(registration(1)).unwrap();
        assert!(
            futures::poll!(watch.next()).is_pending(),
            "the second has said nothing yet"
        );
        registry.heartbeat("worker-1", second, serving()).unwrap();
        assert_eq!(told(&mut watch).await.0, 2);
        // From then on every change is told at once.
        registry.deregister("worker-1", second);
        assert_eq!(told(&mut watch).await.0, 1);
    }

    #[tokio::test]
    async fn workers_that_do_not_come_are_waited_for_as_long_as_a_lease() {
        let lease = Duration::from_millis(300);
        let registry = Registry::new(vec![0, 1], lease, 0);
        let mut watch = Box::pin(settled(registry.watch(), lease));
        let first = registry.register(registration(0)).unwrap();
        registry.heartbeat("worker-0", first, serving()).unwrap();
        let (n_workers, waited) = told(&mut watch).await;
        assert!(
            n_workers == 1 && waited > lease / 2,
            "{n_workers} after {waited:?}"
        );
    }

    #[tokio::test]
    async fn a_manager_that_heard_nobody_does_not_take_all_for_gone() {
        let lease = Duration::from_secs(1);
        let registry = Arc::new(Registry::new(vec![0], lease, 0));
        let sweeper = registry.clone();
        tokio::spawn(async move { sweeper.sweep(CancellationToken::new()).await });
        let serves = || {
            let generation = registry.register(registration(0)).unwrap();
            registry.heartbeat("worker-0", generation, serving()).unwrap();
            generation
        };
        let mut watch = Box::pin(settled(registry.watch(), lease));
        serves();
        assert_eq!(told(&mut watch).await.0, 1);
        // Cut off: its lease ends, and a gateway that comes back finds nobody listed.
        registry
            .watch()
            .wait_for(|topology| topology.workers.is_empty())
            .await
            .unwrap();
        let mut back = Box::pin(settled(registry.watch(), lease));
        assert!(futures::poll!(watch.next()).is_pending());
        assert!(futures::poll!(back.next()).is_pending());
        serves();
        assert_eq!(told(&mut back).await.0, 1);
        assert_eq!(told(&mut watch).await.0, 1);
        // A worker that does not come back is gone: twice a lease behind its last word.
        let (n_workers, waited) = told(&mut back).await;
        assert!(n_workers == 0 && waited > lease, "{n_workers} after {waited:?}");
        // One that leaves says so itself.
        let last = serves();
        assert_eq!(told(&mut back).await.0, 1);
        registry.deregister("worker-0", last);
        assert_eq!(told(&mut back).await.0, 0);
    }
}
