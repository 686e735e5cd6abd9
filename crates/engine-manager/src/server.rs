//! The engine-manager's life: bind, serve, drain.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use laneway_proto::v1::engine_manager_server::EngineManagerServer;
use laneway_proto::{CALLER_PATIENCE, CALLER_PING, v1};
use laneway_telemetry::metric;
use laneway_tls::{Incoming, InternalTls};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic_health::ServingStatus;

use crate::deployment::Served;
use crate::registry::{Registry, Topology, WorkerState};
use crate::service::ManagerService;

/// How long a worker may stay silent.
const LEASE: Duration = Duration::from_secs(5);

/// How long open connections may take to close.
const CLOSE_DEADLINE: Duration = Duration::from_millis(500);

/// An engine-manager with its address, not serving yet.
#[derive(Debug)]
pub struct EngineManager {
    served: Arc<Served>,
    listener: TcpListener,
    local_addr: SocketAddr,
    tls: Option<InternalTls>,
}

impl EngineManager {
    /// Bind the address; port 0 takes a free one. With `tls` only roles with a certificate may call.
    ///
    /// # Errors
    /// It cannot be bound.
    pub async fn bind(served: Served, listen: SocketAddr, tls: Option<InternalTls>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("bind {listen}"))?;
        let local_addr = listener.local_addr().context("read the bound address")?;
        Ok(EngineManager {
            served: Arc::new(served),
            listener,
            local_addr,
            tls,
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Serve until the token is cancelled. Workers and gateways go on without it for as long as nothing changes.
    ///
    /// # Errors
    /// The server failed.
    pub async fn run(self, shutdown: CancellationToken) -> anyhow::Result<()> {
        // Generations of one life never meet those of the next: they start at its time in microseconds.
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("read the clock")?;
        let registry = Registry::new(self.served.ranks(), LEASE, since_epoch.as_micros() as u64);
        let registry = Arc::new(registry);
        let draining = shutdown.child_token();
        let sweeper = registry.clone();
        let sweep = async { sweeper.sweep(draining.clone()).await };
        let count = draining.run_until_cancelled(count_workers(registry.watch()));
        let service = ManagerService {
            served: self.served,
            registry,
            draining: draining.clone(),
        };

        let _certificates = self.tls.as_ref().map(InternalTls::watch);
        let (reporter, health) = tonic_health::server::health_reporter();
        for service in ["", "laneway.v1.EngineManager"] {
            reporter.set_service_status(service, ServingStatus::Serving).await;
        }
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .with_service_name("laneway.v1.EngineManager")
                .register_encoded_file_descriptor_set(laneway_proto::FILE_DESCRIPTOR_SET)
        };
        let server = Server::builder()
            .http2_keepalive_interval(Some(CALLER_PING))
            .http2_keepalive_timeout(Some(CALLER_PATIENCE))
            .add_service(health)
            .add_service(reflection().build_v1().context("build reflection")?)
            .add_service(reflection().build_v1alpha().context("build reflection")?)
            .add_service(EngineManagerServer::new(service))
            .serve_with_incoming_shutdown(
                Incoming::new(self.listener, self.tls.map(|tls| tls.server)).stream(),
                draining.clone().cancelled_owned(),
            );
        let bounded = async {
            draining.cancelled().await;
            for service in ["", "laneway.v1.EngineManager"] {
                reporter
                    .set_service_status(service, ServingStatus::NotServing)
                    .await;
            }
            tokio::time::sleep(CLOSE_DEADLINE).await;
        };
        tokio::select! {
            served = server => served.context("serve gRPC")?,
            // Health watchers hold their streams open for ever; after the bound they are cut.
            ((), _, ()) = async { tokio::join!(sweep, count, bounded) } => {}
        }
        tracing::info!("the engine-manager has ended");
        Ok(())
    }
}

/// Keep the gauge of workers by state, for as long as anything changes.
async fn count_workers(mut topology: watch::Receiver<Topology>) {
    loop {
        for state in WorkerState::ALL {
            let workers = topology
                .borrow_and_update()
                .workers
                .values()
                .filter(|w| w.report.state == state)
                .count();
            metrics::gauge!(metric::MANAGER_WORKERS, "state" => v1::WorkerState::from(state).label())
                .set(workers as f64);
        }
        if topology.changed().await.is_err() {
            return;
        }
    }
}
