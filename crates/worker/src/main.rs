//! `laneway-worker`: one rank of a deployment.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use laneway_telemetry::{LogFormat, TelemetryConfig};
use laneway_tls::InternalTls;
use laneway_tls::flags::InternalTlsArgs;
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
    /// Where the engine-manager answers, host:port, http://host:port, or https:// with certificates for it.
    #[arg(long, env = "LANEWAY_ENGINE_MANAGER", default_value = "127.0.0.1:7070")]
    engine_manager: String,
    #[command(flatten)]
    internal_tls: InternalTlsArgs,
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
    let arguments = Arguments::parse();
    let tls = match arguments.internal_tls.read() {
        Ok(tls) => tls,
        Err(violations) => {
            violations.iter().for_each(|violation| eprintln!("{violation}"));
            return ExitCode::from(2);
        }
    };
    match run(arguments, tls).await {
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

async fn run(arguments: Arguments, tls: Option<InternalTls>) -> anyhow::Result<()> {
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
        tls,
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
