//! The engine-manager is told of the worker, and how it is, until it leaves.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_proto::{ErrorCode, Failure, v1};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::service::Shared;
use crate::PATIENCE;

/// How long one call may take.
const CALL_DEADLINE: Duration = Duration::from_secs(2);

/// Between two attempts to register.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes that it says it has: enough for any deployment.
const MEMORY_BYTES: u64 = 1 << 40;

/// Who registers, and where.
pub(super) struct Registration {
    pub(super) manager: String,
    pub(super) rank: u32,
    pub(super) address: String,
    pub(super) shared: Arc<Shared>,
}

impl Registration {
    /// Register and report until `drained`, then leave.
    ///
    /// # Errors
    /// The engine-manager refuses it, or does not answer for too long.
    pub(super) async fn run(&self, drained: impl Future<Output = ()>) -> anyhow::Result<()> {
        let channel = Endpoint::from_shared(self.manager.clone())
            .with_context(|| format!("read --engine-manager {}", self.manager))?
            .timeout(CALL_DEADLINE)
            .connect_lazy();
        let mut client = EngineManagerClient::new(channel);
        let mut drained = std::pin::pin!(drained);
        let mut states = self.shared.states();
        loop {
            let registered = self.register(&mut client).await?;
            let pause = Duration::from_millis(u64::from(registered.heartbeat_interval_ms.max(1)));
            // Until it is forgotten, or leaves.
            loop {
                match self.beat(&mut client, registered.generation).await {
                    Err(status) if code(&status) == Some(ErrorCode::NotRegistered) => break,
                    Err(status) => eprintln!("a heartbeat was not heard: {status}"),
                    Ok(()) => {}
                }
                tokio::select! {
                    () = &mut drained => {
                        let _ = self.leave(&mut client, registered.generation).await;
                        return Ok(());
                    }
                    () = tokio::time::sleep(pause) => {}
                    // Gateways should hear of a drain at once.
                    Ok(()) = states.changed() => {}
                }
            }
        }
    }

    async fn register(
        &self,
        client: &mut EngineManagerClient<Channel>,
    ) -> anyhow::Result<v1::RegisterResponse> {
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            let request = v1::RegisterRequest {
                worker_id: self.shared.id.clone(),
                address: self.address.clone(),
                rank: self.rank,
                version: env!("CARGO_PKG_VERSION").into(),
                devices: vec![v1::DeviceSpec {
                    name: "cpu".into(),
                    memory_bytes: MEMORY_BYTES,
                    ..Default::default()
                }],
            };
            match client.register(request).await {
                Ok(response) => return Ok(response.into_inner()),
                Err(status) => {
                    let again = matches!(code(&status), None | Some(ErrorCode::RankTaken));
                    anyhow::ensure!(
                        again && tokio::time::Instant::now() < until,
                        "the engine-manager does not take rank {}: {status}",
                        self.rank
                    );
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn beat(&self, client: &mut EngineManagerClient<Channel>, generation: u64) -> Result<(), Status> {
        let report = v1::HeartbeatRequest {
            worker_id: self.shared.id.clone(),
            generation,
            state: self.shared.state().into(),
            load: Some(self.shared.load()),
            facts: Some(self.shared.facts()),
        };
        client.heartbeat(Request::new(report)).await.map(drop)
    }

    async fn leave(&self, client: &mut EngineManagerClient<Channel>, generation: u64) -> Result<(), Status> {
        let request = v1::DeregisterRequest {
            worker_id: self.shared.id.clone(),
            generation,
        };
        client.deregister(request).await.map(drop)
    }
}

fn code(status: &Status) -> Option<ErrorCode> {
    Failure::from_status(status).map(|failure| failure.code)
}
