//! A whole deployment of real processes.

use std::net::SocketAddr;

use laneway_proto::v1;
use laneway_proto::v1::worker_client::WorkerClient;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::client::{self, Speaker};
use crate::deployment::{ConfigFile, Deployment};
use crate::process::Process;

/// One process for each role.
#[derive(Debug)]
pub struct System {
    /// The engine-manager.
    pub manager: Process,
    /// Workers by rank.
    pub workers: Vec<Process>,
    /// The gateway.
    pub gateway: Process,
    _config: ConfigFile,
}

/// What processes of a system are started with beside what they need.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extra<'a> {
    /// Arguments of the gateway.
    pub gateway: &'a [&'a str],
    /// Variables in the environment of all.
    pub variables: &'a [(&'a str, &'a str)],
}

impl System {
    /// Start every role on free ports.
    ///
    /// # Errors
    /// A process does not start.
    pub fn start(deployment: &Deployment) -> anyhow::Result<Self> {
        Self::start_with(deployment, Extra::default())
    }

    /// The same with more.
    ///
    /// # Errors
    /// A process does not start.
    pub fn start_with(deployment: &Deployment, extra: Extra<'_>) -> anyhow::Result<Self> {
        let config = deployment.write()?;
        let manager = Process::start_with(
            "laneway-engine-manager",
            &["--config", config.path(), "--listen", "127.0.0.1:0"],
            extra.variables,
        )?;
        let address = format!("http://{}", manager.address()?);
        let worker = |rank: u32| {
            let rank = rank.to_string();
            Process::start_with(
                "laneway-worker",
                &[
                    "--rank",
                    &rank,
                    "--listen",
                    "127.0.0.1:0",
                    "--engine-manager",
                    &address,
                ],
                extra.variables,
            )
        };
        let workers = (0..deployment.n_ranks()).map(worker).collect::<Result<_, _>>()?;
        let arguments = ["--listen", "127.0.0.1:0", "--engine-manager", &address];
        let arguments = [&arguments, extra.gateway].concat();
        let gateway = Process::start_with("laneway-gateway", &arguments, extra.variables)?;
        Ok(System {
            manager,
            workers,
            gateway,
            _config: config,
        })
    }

    /// Start every role and wait until the gateway serves.
    ///
    /// # Errors
    /// It never does.
    pub async fn serving(deployment: &Deployment) -> anyhow::Result<Self> {
        Self::serving_with(deployment, Extra::default()).await
    }

    /// The same with more.
    ///
    /// # Errors
    /// It never does.
    pub async fn serving_with(deployment: &Deployment, extra: Extra<'_>) -> anyhow::Result<Self> {
        let system = Self::start_with(deployment, extra)?;
        client::until(system.gateway.address()?, ServingStatus::Serving).await?;
        Ok(system)
    }

    /// A caller of its gateway.
    ///
    /// # Errors
    /// The gateway has ended.
    pub fn speaker(&self) -> anyhow::Result<Speaker> {
        Ok(Speaker::new(self.gateway.address()?))
    }

    /// Where a worker answers.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn worker_address(&self, rank: usize) -> anyhow::Result<SocketAddr> {
        self.workers[rank].address()
    }

    /// What a worker says of itself.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn worker_status(&self, rank: usize) -> anyhow::Result<v1::WorkerStatusResponse> {
        let mut worker = WorkerClient::new(client::channel(self.worker_address(rank)?));
        Ok(worker.status(v1::WorkerStatusRequest {}).await?.into_inner())
    }

    /// Wait until no worker runs a request or holds a slot or a page.
    ///
    /// # Errors
    /// One still does when the patience is over.
    pub async fn idle(&self) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + crate::PATIENCE;
        for rank in 0..self.workers.len() {
            loop {
                let status = self.worker_status(rank).await?;
                let load = status.load.unwrap_or_default();
                let held = status.resources.iter().any(|resource| resource.used > 0);
                if load.running == 0 && load.queued == 0 && !held {
                    break;
                }
                anyhow::ensure!(
                    tokio::time::Instant::now() < deadline,
                    "worker {rank} still holds: {status:?}"
                );
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        }
        Ok(())
    }
}
