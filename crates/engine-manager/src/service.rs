//! `laneway.v1.EngineManager` over the registry and the deployment.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use laneway_proto::v1::engine_manager_server::EngineManager;
use laneway_proto::{ErrorCode, Failure, Violation, WorkerId, plan, v1};
use tokio_stream::wrappers::WatchStream;
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
        // A watch channel holds one value, so a slow watcher skips versions and never holds any back.
        let versions =
            WatchStream::new(self.registry.watch()).map(move |topology| Ok(service.topology(&topology)));
        let until = self.draining.clone().cancelled_owned();
        Ok(Response::new(Box::pin(versions.take_until(until))))
    }
}
