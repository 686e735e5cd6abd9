//! The service over its real gRPC, around a scripted backend and engine-manager.

pub(crate) mod fake;
mod single;
mod split;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use laneway_plan::{DeviceInventory, WorkerPlan};
use laneway_proto::v1::worker_client::WorkerClient;
use laneway_proto::{ErrorCode, Failure, v1};
use laneway_tls::Dial;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::{Load, WorkerConfig, WorkerServer};
use fake::{FakeBackend, FakeManager};

/// Long enough for a loaded machine, short enough to fail.
const PATIENCE: Duration = Duration::from_secs(20);

/// A worker under test and its clients.
struct Harness {
    address: SocketAddr,
    backend: Arc<FakeBackend>,
    worker: WorkerClient<Channel>,
    health: HealthClient<Channel>,
    shutdown: CancellationToken,
    run: JoinHandle<anyhow::Result<()>>,
}

impl Harness {
    /// A worker with this plan that loads `backend` at once.
    async fn start(manager: &FakeManager, plan: WorkerPlan, backend: Arc<FakeBackend>) -> Self {
        let loaded = backend.clone();
        Self::start_with(manager, plan, backend, Box::new(move |_| Ok(loaded))).await
    }

    async fn start_with(
        manager: &FakeManager,
        plan: WorkerPlan,
        backend: Arc<FakeBackend>,
        load: Load,
    ) -> Self {
        let rank = plan.rank;
        manager.plan(plan);
        let config = WorkerConfig {
            rank,
            listen: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            engine_manager: manager.address(),
            devices: DeviceInventory::cpu(1 << 30),
            register_patience: PATIENCE,
            socket_directory: manager.sockets(),
            tls: None,
        };
        let server = WorkerServer::bind(config).await.unwrap();
        let address = server.local_addr();
        let channel = crate::peer::channel(&format!("http://{address}"), &Dial::default()).unwrap();
        let shutdown = CancellationToken::new();
        let run = tokio::spawn(server.run(load, shutdown.clone()));
        let (worker, health) = (WorkerClient::new(channel.clone()), HealthClient::new(channel));
        Harness {
            address,
            backend,
            worker,
            health,
            shutdown,
            run,
        }
    }

    /// Wait until health says so.
    async fn until(&mut self, wanted: ServingStatus) {
        let request = HealthCheckRequest {
            service: "laneway.v1.Worker".into(),
        };
        let watched = async {
            loop {
                // The server may not listen yet, or not know the service.
                let Ok(response) = self.health.watch(request.clone()).await else {
                    tokio::task::yield_now().await;
                    continue;
                };
                let mut updates = response.into_inner();
                while let Ok(Some(HealthCheckResponse { status })) = updates.message().await {
                    if status == wanted as i32 {
                        return;
                    }
                }
            }
        };
        tokio::time::timeout(PATIENCE, watched)
            .await
            .expect("health never said so");
    }

    async fn serving(mut self) -> Self {
        self.until(ServingStatus::Serving).await;
        self
    }

    async fn synthesize(
        &self,
        id: &str,
    ) -> Result<tonic::Streaming<v1::WorkerSynthesizeResponse>, tonic::Status> {
        Ok(self.worker.clone().synthesize(request(id)).await?.into_inner())
    }

    async fn end(self) {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.run)
            .await
            .expect("the worker did not end")
            .unwrap()
            .unwrap();
    }
}

fn request(id: &str) -> v1::WorkerSynthesizeRequest {
    v1::WorkerSynthesizeRequest {
        request_id: id.into(),
        text: "Hello.".into(),
        ..Default::default()
    }
}

type Event = v1::worker_synthesize_response::Event;

async fn next(stream: &mut tonic::Streaming<v1::WorkerSynthesizeResponse>) -> Event {
    let message = tokio::time::timeout(PATIENCE, stream.message())
        .await
        .expect("no message came");
    message.unwrap().expect("the stream ended").event.unwrap()
}

/// The failure that ends a stream, with whatever came before it left out.
async fn failure_of<T>(stream: &mut tonic::Streaming<T>) -> Failure {
    loop {
        match tokio::time::timeout(PATIENCE, stream.message())
            .await
            .expect("no message came")
        {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without a failure"),
            Err(status) => return failure(status),
        }
    }
}

#[track_caller]
fn failure(status: tonic::Status) -> Failure {
    Failure::from_status(&status).unwrap_or_else(|| panic!("not a failure of ours: {status}"))
}

#[track_caller]
fn code<T>(answer: Result<T, tonic::Status>) -> ErrorCode {
    failure(answer.err().expect("it was taken")).code
}
