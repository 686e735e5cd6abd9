//! A whole deployment inside this process, on free ports of the loopback address.
//!
//! [`System::start`] starts it, [`System::end`] drains it in order: the gateway first, so that nothing new comes,
//! then the workers, then the engine-manager.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use laneway_engine_manager::{EngineManager, Served};
use laneway_gateway::{Config, DiscoveryConfig, Shutdown};
use laneway_worker::device::local_devices;
use laneway_worker::engine_backend::EngineBackend;
use laneway_worker::{WorkerConfig, WorkerServer};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::up::role_listens;

/// How long a worker may wait for its plan: the engine-manager is in this process.
const REGISTER_PATIENCE: Duration = Duration::from_secs(10);

type Role = JoinHandle<anyhow::Result<()>>;

/// A running deployment.
#[derive(Debug)]
pub(crate) struct System {
    /// Where the public API answers.
    pub(crate) gateway: SocketAddr,
    /// Where the workers answer, by rank.
    pub(crate) workers: Vec<SocketAddr>,
    gateway_shutdown: Shutdown,
    workers_shutdown: CancellationToken,
    manager_shutdown: CancellationToken,
    gateway_role: Role,
    worker_roles: Vec<Role>,
    manager_role: Role,
}

impl System {
    /// Bind every address and start every role. Nothing serves yet: health says when.
    ///
    /// # Errors
    /// An address cannot be bound.
    pub(crate) async fn start(served: Served, gateway_listen: SocketAddr) -> anyhow::Result<Self> {
        let free: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let ranks: Vec<u32> = served.deployment().ranks.iter().map(|spec| spec.rank).collect();
        let drain_bound = served.deployment().services.drain_timeout;
        let devices = local_devices()?;
        let manager = EngineManager::bind(served, free).await?;
        let engine_manager = format!("http://{}", manager.local_addr());
        let uri = engine_manager
            .parse()
            .context("write the engine-manager's address as a URI")?;
        let mut config = Config::new(gateway_listen, DiscoveryConfig::EngineManager(uri));
        config.drain_bound = drain_bound;
        let gateway = config.build().await.context(role_listens("gateway", "gateway"))?;
        let mut servers = Vec::new();
        for rank in ranks {
            let config = WorkerConfig {
                rank,
                listen: free,
                advertise: None,
                engine_manager: engine_manager.clone(),
                devices: devices.clone(),
                register_patience: REGISTER_PATIENCE,
            };
            servers.push(WorkerServer::bind(config).await?);
        }

        let gateway_shutdown = Shutdown::default();
        let (workers_shutdown, manager_shutdown) = (CancellationToken::new(), CancellationToken::new());
        let address = gateway.address();
        let workers = servers.iter().map(WorkerServer::local_addr).collect();
        let manager_role = tokio::spawn(manager.run(manager_shutdown.clone()));
        let start = |server: WorkerServer| {
            let load: laneway_worker::Load = Box::new(|plan| Ok(Arc::new(EngineBackend::start(plan)?)));
            tokio::spawn(server.run(load, workers_shutdown.clone()))
        };
        let worker_roles = servers.into_iter().map(start).collect();
        let gateway_role = tokio::spawn({
            let shutdown = gateway_shutdown.clone();
            async move { Ok(gateway.serve(shutdown).await?) }
        });
        Ok(System {
            gateway: address,
            workers,
            gateway_shutdown,
            workers_shutdown,
            manager_shutdown,
            gateway_role,
            worker_roles,
            manager_role,
        })
    }

    /// Resolves when a role ends that was not told to, with why.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        let roles = self
            .worker_roles
            .iter_mut()
            .chain([&mut self.gateway_role, &mut self.manager_role]);
        let (ended, _, _) = futures::future::select_all(roles).await;
        match ended {
            Ok(Ok(())) => anyhow::anyhow!("a role ended by itself"),
            Ok(Err(error)) => error,
            Err(error) => error.into(),
        }
    }

    /// Drain role by role, and wait until each has ended.
    ///
    /// # Errors
    /// The first role that failed.
    pub(crate) async fn end(self) -> anyhow::Result<()> {
        self.gateway_shutdown.drain.cancel();
        let gateway = self.gateway_role.await?;
        self.workers_shutdown.cancel();
        let mut outcome = gateway;
        for worker in self.worker_roles {
            outcome = outcome.and(worker.await?);
        }
        self.manager_shutdown.cancel();
        outcome.and(self.manager_role.await?)
    }
}
