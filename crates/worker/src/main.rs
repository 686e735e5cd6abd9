//! `laneway-worker`: one rank of a deployment.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use laneway_telemetry::{LogFormat, TelemetryConfig};
use laneway_worker::device::local_devices;
use laneway_worker::engine_backend::EngineBackend;
use laneway_worker::{RegisterError, WorkerConfig, WorkerServer};
use tokio_util::sync::CancellationToken;

/// Serve one rank of a deployment, with the plan that the engine-manager hands out.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The part of the deployment to serve.
    #[arg(long, env = "LANEWAY_RANK", default_value_t = 0)]
    rank: u32,
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, env = "LANEWAY_LISTEN", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Host that others dial, when it is not the one listened on.
    #[arg(long, env = "LANEWAY_ADVERTISE")]
    advertise: Option<String>,
    /// Where the engine-manager answers.
    #[arg(long, env = "LANEWAY_ENGINE_MANAGER", default_value = "http://127.0.0.1:7070")]
    engine_manager: String,
    /// Seconds to wait for a plan.
    #[arg(long, default_value_t = 120)]
    register_patience_s: u64,
    /// text or json.
    #[arg(long, env = "LANEWAY_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
    /// Log filter directives.
    #[arg(long, env = "LANEWAY_LOG")]
    log: Option<String>,
    /// Where spans go, http://host:4317.
    #[arg(long, env = "LANEWAY_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
    /// Address to serve Prometheus metrics on.
    #[arg(long, env = "LANEWAY_METRICS_LISTEN")]
    metrics_listen: Option<SocketAddr>,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("laneway-worker: {error:#}");
            let Some(RegisterError::Refused { violations, .. }) = error.downcast_ref() else {
                return ExitCode::FAILURE;
            };
            for violation in violations {
                eprintln!("  {}: {}", violation.field, violation.description);
            }
            ExitCode::from(2)
        }
    }
}

async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let _telemetry = laneway_telemetry::init(TelemetryConfig {
        service: "laneway-worker",
        filter: arguments.log,
        format: arguments.log_format,
        otlp_endpoint: arguments.otlp_endpoint,
    })?;
    if let Some(address) = arguments.metrics_listen {
        let address = laneway_telemetry::serve_metrics(address).await?;
        tracing::info!(%address, "metrics bound");
    }
    let server = WorkerServer::bind(WorkerConfig {
        rank: arguments.rank,
        listen: arguments.listen,
        advertise: arguments.advertise,
        engine_manager: arguments.engine_manager,
        devices: local_devices()?,
        register_patience: Duration::from_secs(arguments.register_patience_s),
        socket_directory: None,
    })
    .await?;
    tracing::info!(address = %server.local_addr(), rank = arguments.rank, "listening");
    let shutdown = CancellationToken::new();
    laneway_telemetry::drain_on_signal(shutdown.clone())?;
    server
        .run(
            Box::new(|plan| Ok(Arc::new(EngineBackend::start(plan)?))),
            shutdown,
        )
        .await
}
