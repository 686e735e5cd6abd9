//! `laneway-engine-manager`: reads one deployment and serves its plans and topology.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use laneway_engine_manager::{EngineManager, Served, mps};
use laneway_plan::Sources;
use laneway_telemetry::{LogFormat, TelemetryConfig};
use laneway_tls::InternalTls;
use laneway_tls::flags::InternalTlsArgs;
use tokio_util::sync::CancellationToken;

/// Exit code of a configuration that cannot be used.
const EXIT_CONFIG: u8 = 2;

/// Read a deployment, check it, and serve its plans and topology.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The deployment's configuration file.
    #[arg(long, env = "LANEWAY_CONFIG")]
    config: PathBuf,
    /// Override a key of the file: section.key=value. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, env = "LANEWAY_LISTEN", default_value = "127.0.0.1:7070")]
    listen: SocketAddr,
    /// The MPS daemon that the deployment needs runs where the workers are, and not here: each worker finds it itself.
    #[arg(long, env = "LANEWAY_MPS_ELSEWHERE")]
    mps_elsewhere: bool,
    #[command(flatten)]
    internal_tls: InternalTlsArgs,
    /// text or json.
    #[arg(long, env = "LANEWAY_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
    /// Log filter directives.
    #[arg(long, env = "LANEWAY_LOG")]
    log: Option<String>,
    /// Address to serve Prometheus metrics on.
    #[arg(long, env = "LANEWAY_METRICS_LISTEN")]
    metrics_listen: Option<SocketAddr>,
    /// Where spans go, http://host:4317.
    #[arg(long, env = "LANEWAY_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let served = match Served::load(Sources::read(&arguments.config, arguments.set.clone())) {
        Ok(served) => served,
        Err(violations) => {
            eprint!("{}", laneway_plan::render(&violations));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    let tls = match arguments.internal_tls.read() {
        Ok(tls) => tls,
        Err(violations) => {
            violations.iter().for_each(|violation| eprintln!("{violation}"));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    match run(arguments, served, tls).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("laneway-engine-manager: {}", laneway_telemetry::causes(&error));
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments, served: Served, tls: Option<InternalTls>) -> anyhow::Result<()> {
    let _telemetry = laneway_telemetry::init(TelemetryConfig {
        service: "laneway-engine-manager",
        filter: arguments.log,
        format: arguments.log_format,
        otlp_endpoint: arguments.otlp_endpoint,
    })?;
    if let Some(address) = arguments.metrics_listen {
        let address = laneway_telemetry::serve_metrics(address).await?;
        tracing::info!(%address, "metrics bound");
    }
    let shutdown = CancellationToken::new();
    laneway_telemetry::drain_on_signal(shutdown.clone())?;
    if !arguments.mps_elsewhere {
        mps::require(served.deployment().mps).await?;
    }
    let manager = EngineManager::bind(served, arguments.listen, tls).await?;
    tracing::info!(address = %manager.local_addr(), "listening");
    manager.run(shutdown).await
}
