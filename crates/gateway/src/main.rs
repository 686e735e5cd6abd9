//! The gateway's binary: parse, check, build, serve, drain.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use laneway_gateway::config::GatewayArgs;
use laneway_gateway::{Config, Shutdown};
use laneway_telemetry::{LogFormat, TelemetryConfig};

/// Exit code of a configuration that cannot be used.
const EXIT_CONFIG: u8 = 2;

/// The public API of Laneway.
#[derive(Debug, Parser)]
#[command(name = "laneway-gateway", version)]
struct Flags {
    #[command(flatten)]
    gateway: GatewayArgs,
    /// Address of the Prometheus endpoint; none without it.
    #[arg(long, env = "LANEWAY_METRICS_LISTEN")]
    metrics_listen: Option<SocketAddr>,
    /// Log filter, `info,laneway_gateway=debug`.
    #[arg(long, env = "LANEWAY_LOG")]
    log: Option<String>,
    /// Log lines: text or json.
    #[arg(long, env = "LANEWAY_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
    /// OTLP gRPC endpoint for traces.
    #[arg(long, env = "LANEWAY_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let config = match Config::try_from(flags.gateway.clone()) {
        Ok(config) => config,
        Err(violations) => {
            for violation in violations {
                eprintln!("{violation}");
            }
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("gateway")
        .build();
    let outcome = runtime.context("start the runtime").and_then(|runtime| {
        let outcome = runtime.block_on(run(flags, config));
        // A name lookup that still runs must not hold up the exit.
        runtime.shutdown_background();
        outcome
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("laneway-gateway: {}", laneway_telemetry::causes(&error));
            ExitCode::FAILURE
        }
    }
}

async fn run(flags: Flags, config: Config) -> anyhow::Result<()> {
    let _telemetry = laneway_telemetry::init(TelemetryConfig {
        service: "laneway-gateway",
        filter: flags.log,
        format: flags.log_format,
        otlp_endpoint: flags.otlp_endpoint,
    })?;
    let shutdown = Shutdown::default();
    laneway_telemetry::drain_on_signal(shutdown.drain.clone())?;
    if let Some(address) = flags.metrics_listen {
        let address = laneway_telemetry::serve_metrics(address).await?;
        tracing::info!(%address, "metrics bound");
    }
    let gateway = config.build().await?;
    tracing::info!(address = %gateway.address(), "gateway bound");
    gateway.serve(shutdown).await?;
    tracing::info!("gateway drained");
    Ok(())
}
