//! A whole deployment that this process starts: engine-manager and gateway inside it, and its workers.
//!
//! One worker runs inside this process too; several are processes of their own ([`crate::processes`]). Everything but
//! the gateway takes free ports of the loopback address. [`System::start`] starts it, [`System::end`] drains it in
//! order: the gateway first, so that nothing new comes, then the workers, then the engine-manager.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use laneway_engine_manager::EngineManager;
use laneway_gateway::config::Access;
use laneway_gateway::{Config, DiscoveryConfig, LinkConfig, Shutdown, Voices};
use laneway_plan::Deployment;
use laneway_tls::flags::InternalTlsArgs;
use laneway_tls::{Dial, InternalTls};
use laneway_worker::device::local_devices;
use laneway_worker::engine_backend::EngineBackend;
use laneway_worker::{WorkerConfig, WorkerServer};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::client;
use crate::config::ConfigArguments;
use crate::processes::{self, Manager, WorkerProcesses};
use crate::up::role_listens;

/// How long a worker may wait for its plan: the engine-manager is in this process.
const REGISTER_PATIENCE: Duration = Duration::from_secs(10);

type Role = JoinHandle<anyhow::Result<()>>;

/// What a system is started with.
#[derive(Debug, Clone, Default)]
pub(crate) struct SystemConfig {
    /// The deployment.
    pub(crate) config: ConfigArguments,
    /// Where the gateway listens; its own address of the deployment without one.
    pub(crate) gateway_listen: Option<SocketAddr>,
    /// Where this process serves metrics. Workers that are processes serve theirs on the ports behind it.
    pub(crate) metrics: Option<SocketAddr>,
    /// Who may call the gateway, and how.
    pub(crate) access: Access,
    /// Registered voices; the gateway keeps none without it.
    pub(crate) voices: Option<Voices>,
    /// What the roles encrypt what is between them with, and the flags that say so to workers that are processes.
    pub(crate) internal_tls: (Option<InternalTls>, InternalTlsArgs),
}

/// A running deployment.
#[derive(Debug)]
pub(crate) struct System {
    /// Where the public API answers.
    pub(crate) gateway: SocketAddr,
    /// What runs.
    pub(crate) deployment: Deployment,
    scheme: &'static str,
    readiness: watch::Receiver<bool>,
    gateway_shutdown: Shutdown,
    manager_shutdown: CancellationToken,
    gateway_role: Role,
    manager_role: Role,
    workers: Workers,
}

#[derive(Debug)]
enum Workers {
    Inside {
        addresses: Vec<SocketAddr>,
        shutdown: CancellationToken,
        roles: Vec<Role>,
    },
    Processes(Box<WorkerProcesses>),
}

impl System {
    /// Bind every address and start every role. Nothing serves yet: [`System::serving`] says when.
    ///
    /// # Errors
    /// The configuration is refused, an address cannot be bound, or a process cannot be started.
    pub(crate) async fn start(config: SystemConfig) -> anyhow::Result<Self> {
        let arguments = config.config.resolved()?;
        let served = arguments.clone().load()?;
        let deployment = served.deployment().clone();
        let free: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let (tls, tls_flags) = config.internal_tls;
        let dial = Dial::from(tls.as_ref().map(|tls| tls.client.clone()));
        let manager = EngineManager::bind(served, free, tls.clone()).await?;
        let engine_manager = format!("{}://{}", dial.scheme(), manager.local_addr());
        let uri = engine_manager
            .parse()
            .context("write the engine-manager's address as a URI")?;
        let gateway_listen = match config.gateway_listen {
            Some(address) => address,
            None => {
                let configured = &deployment.services.gateway_listen;
                configured
                    .parse()
                    .with_context(|| format!("read the address to listen on, {configured}"))?
            }
        };
        let gateway_config = Config {
            drain_bound: deployment.services.drain_timeout,
            voices: config.voices,
            link: LinkConfig {
                internal_tls: tls.clone(),
                ..LinkConfig::default()
            },
            ..Config::new(gateway_listen, DiscoveryConfig::EngineManager(uri)).with(config.access)
        };
        let scheme = gateway_config.tls.as_ref().map_or("http", |_| "https");
        let gateway = gateway_config
            .build()
            .await
            .context(role_listens("gateway", "gateway"))?;
        let (address, readiness) = (gateway.address(), gateway.readiness());
        let inside = match processes::are_wanted(&deployment) {
            true => None,
            false => Some(bind_workers(&deployment, &engine_manager, tls.as_ref()).await?),
        };

        let (gateway_shutdown, manager_shutdown) = (Shutdown::default(), CancellationToken::new());
        let manager_role = tokio::spawn(manager.run(manager_shutdown.clone()));
        let workers = match inside {
            Some(servers) => Workers::inside(servers),
            // Behind the engine-manager, which they register with at once.
            None => {
                let manager = Manager {
                    address: engine_manager,
                    dial,
                    tls_flags: tls_flags.flags(),
                };
                let started =
                    WorkerProcesses::start(&arguments, &deployment, manager, config.metrics).await?;
                Workers::Processes(Box::new(started))
            }
        };
        let gateway_role = tokio::spawn({
            let shutdown = gateway_shutdown.clone();
            async move { Ok(gateway.serve(shutdown).await?) }
        });
        Ok(System {
            gateway: address,
            deployment,
            scheme,
            readiness,
            gateway_shutdown,
            manager_shutdown,
            gateway_role,
            manager_role,
            workers,
        })
    }

    /// Wait until the gateway serves and every worker runs as the deployment says.
    ///
    /// # Errors
    /// A role ended, it took too long, or a worker runs beside the Multi-Process Service.
    pub(crate) async fn serving(&mut self) -> anyhow::Result<()> {
        let readiness = self.readiness.clone();
        tokio::select! {
            ready = client::until_serving(readiness) => ready?,
            error = self.failed() => return Err(error),
        }
        match &self.workers {
            Workers::Inside { .. } => Ok(()),
            Workers::Processes(processes) => processes.check_clients().await,
        }
    }

    /// Of the gateway's address.
    pub(crate) fn scheme(&self) -> &'static str {
        self.scheme
    }

    /// Where the workers answer, by rank.
    pub(crate) fn workers(&self) -> Vec<String> {
        match &self.workers {
            Workers::Inside { addresses, .. } => addresses.iter().map(ToString::to_string).collect(),
            Workers::Processes(processes) => processes.addresses(),
        }
    }

    /// The workers, where they are processes of their own.
    pub(crate) fn processes(&self) -> Option<&WorkerProcesses> {
        match &self.workers {
            Workers::Inside { .. } => None,
            Workers::Processes(processes) => Some(processes),
        }
    }

    /// Resolves when a role ends that was not told to, with why.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        let workers: Vec<&mut Role> = match &mut self.workers {
            Workers::Inside { roles, .. } => roles.iter_mut().collect(),
            Workers::Processes(processes) => processes.tasks().collect(),
        };
        let roles = workers
            .into_iter()
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
        let outcome = gateway.and(self.workers.end().await);
        self.manager_shutdown.cancel();
        outcome.and(self.manager_role.await?)
    }

    /// End what is left of a system that failed. What has gone wrong is known already.
    pub(crate) async fn give_up(self) {
        // Its callers get a status instead of a drain.
        self.gateway_shutdown.now.cancel();
        if let Err(error) = self.workers.end().await {
            tracing::debug!(%error, "a worker's end");
        }
        self.manager_shutdown.cancel();
    }
}

async fn bind_workers(
    deployment: &Deployment,
    engine_manager: &str,
    tls: Option<&InternalTls>,
) -> anyhow::Result<Vec<WorkerServer>> {
    let devices = local_devices()?;
    let mut servers = Vec::new();
    for spec in &deployment.ranks {
        let config = WorkerConfig {
            rank: spec.rank,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            engine_manager: engine_manager.to_owned(),
            devices: devices.clone(),
            register_patience: REGISTER_PATIENCE,
            socket_directory: None,
            tls: tls.cloned(),
        };
        servers.push(WorkerServer::bind(config).await?);
    }
    Ok(servers)
}

impl Workers {
    fn inside(servers: Vec<WorkerServer>) -> Self {
        let shutdown = CancellationToken::new();
        let start = |server: WorkerServer| {
            let load: laneway_worker::Load = Box::new(|plan| Ok(Arc::new(EngineBackend::start(plan)?)));
            tokio::spawn(server.run(load, shutdown.clone()))
        };
        Workers::Inside {
            addresses: servers.iter().map(WorkerServer::local_addr).collect(),
            roles: servers.into_iter().map(start).collect(),
            shutdown,
        }
    }

    async fn end(self) -> anyhow::Result<()> {
        match self {
            Workers::Processes(processes) => processes.end().await,
            Workers::Inside { shutdown, roles, .. } => {
                shutdown.cancel();
                let mut outcome = Ok(());
                for role in roles {
                    // What ended before was told when it did, and its handle must not be polled again.
                    if !role.is_finished() {
                        outcome = outcome.and(role.await?);
                    }
                }
                outcome
            }
        }
    }
}
