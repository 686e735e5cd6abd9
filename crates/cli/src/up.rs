//! `laneway up`: a whole deployment, or one role of it in this process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, ValueEnum};
use laneway_engine_manager::{EngineManager, mps};
use laneway_gateway::config::{AccessArgs, VoicesArgs};
use laneway_gateway::{Config, DiscoveryConfig, LinkConfig, Shutdown, Voices};
use laneway_tls::Dial;
use laneway_tls::flags::InternalTlsArgs;
use laneway_worker::device::local_devices;
use laneway_worker::engine_backend::EngineBackend;
use laneway_worker::{WorkerConfig, WorkerServer};
use tokio_util::sync::CancellationToken;

use crate::client::BadFlags;
use crate::config::ConfigArguments;
use crate::parent;
use crate::system::{System, SystemConfig};

/// What this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    /// Every role of the deployment.
    All,
    EngineManager,
    Worker,
    Gateway,
}

/// Flags of `up`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// What this process is.
    #[arg(long, value_enum, default_value_t = Role::All)]
    role: Role,
    /// The rank that a worker serves.
    #[arg(long, default_value_t = 0)]
    rank: u32,
    /// Address of the role (of the gateway, for all); the deployment's own without one. Port 0 takes a free one.
    /// With all, engine-manager and workers take free ports of the loopback address.
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Host that a worker registers, when it is not the one listened on.
    #[arg(long)]
    advertise: Option<String>,
    /// Where worker and gateway find the engine-manager, host:port or a whole URI; the deployment's own address
    /// without one.
    #[arg(long)]
    engine_manager: Option<String>,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    voices: VoicesArgs,
    #[command(flatten)]
    internal_tls: InternalTlsArgs,
    /// Serve Prometheus metrics on this address (`laneway top` reads them); port 0 takes a free one.
    #[arg(long, env = "LANEWAY_METRICS_LISTEN")]
    metrics_listen: Option<SocketAddr>,
    /// Seconds that a worker waits for its plan.
    #[arg(long, default_value_t = 120)]
    register_patience_s: u64,
    /// Directory of a worker's Unix socket and of those of the workers that it exchanges frames with.
    #[arg(long, hide = true)]
    socket_directory: Option<PathBuf>,
    /// Drain when standard input ends, as it does with the process that holds its other end.
    #[arg(long, hide = true)]
    end_with_parent: bool,
}

/// A role that serves other roles has no use for flags of the public API, and would be open where they seem to close it.
/// In the environment, which roles may share, they are no matter.
pub(crate) fn refuse_misplaced(flags: &ArgMatches) -> Result<(), clap::Error> {
    let role = match flags.get_one("role") {
        Some(Role::Worker) => "worker",
        Some(Role::EngineManager) => "engine-manager",
        _ => return Ok(()),
    };
    for (id, flag) in [
        ("tls-cert", "--tls-cert"),
        ("tls-key", "--tls-key"),
        ("tls-client-ca", "--tls-client-ca"),
        ("api_keys", "--api-keys"),
        ("cors_origins", "--cors-origin"),
        ("voices_dir", "--voices-dir"),
        ("max_voices", "--max-voices"),
        ("max_voices_mib", "--max-voices-mib"),
    ] {
        if flags.value_source(id) == Some(ValueSource::CommandLine) {
            let problem = format!(
                "{flag} is of the gateway and does nothing for --role {role}; give it to the gateway. Roles are encrypted \
                 among themselves by --internal-tls-cert, --internal-tls-key and --internal-tls-ca\n"
            );
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, problem));
        }
    }
    Ok(())
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    // Before anything starts, whatever the role: a wrong configuration starts nothing.
    let served = arguments.config.clone().load()?;
    let services = served.deployment().services.clone();
    let drain = CancellationToken::new();
    laneway_telemetry::drain_on_signal(drain.clone())?;
    if arguments.end_with_parent {
        let drain = drain.clone();
        tokio::spawn(async move {
            parent::ended().await;
            drain.cancel();
        });
    }
    if let Some(address) = arguments.metrics_listen {
        let address = laneway_telemetry::serve_metrics(address).await?;
        tracing::info!(metrics = %address, "metrics bound");
    }
    let listen = |configured: &str| match arguments.listen {
        Some(address) => Ok(address),
        None => configured
            .parse()
            .with_context(|| format!("read the address to listen on, {configured}")),
    };
    let tls = arguments.internal_tls.read().map_err(BadFlags)?;
    let given = arguments.engine_manager.as_ref();
    let engine_manager = Dial::from(tls.as_ref().map(|tls| tls.client.clone()))
        .uri(given.unwrap_or(&services.engine_manager_address))
        .context("find the engine-manager")?;
    match arguments.role {
        Role::All => {
            let system = System::start(SystemConfig {
                config: arguments.config,
                gateway_listen: arguments.listen,
                metrics: arguments.metrics_listen,
                access: arguments.access.read().map_err(BadFlags)?,
                voices: read_voices(arguments.voices)?,
                internal_tls: (tls, arguments.internal_tls),
            });
            return all(system.await?, drain).await;
        }
        Role::EngineManager => {
            let address = listen(&services.engine_manager_listen)?;
            mps::require(served.deployment().mps).await?;
            let manager = EngineManager::bind(served, address, tls)
                .await
                .context(role_listens("engine-manager", "engine_manager"))?;
            tracing::info!(address = %manager.local_addr(), "listening");
            manager.run(drain).await?;
        }
        Role::Gateway => {
            let address = listen(&services.gateway_listen)?;
            let discovery = DiscoveryConfig::EngineManager(engine_manager.clone());
            let access = arguments.access.read().map_err(BadFlags)?;
            let config = Config {
                drain_bound: services.drain_timeout,
                voices: read_voices(arguments.voices)?,
                link: LinkConfig {
                    internal_tls: tls,
                    ..LinkConfig::default()
                },
                ..Config::new(address, discovery).with(access)
            };
            let gateway = config.build().await.context(role_listens("gateway", "gateway"))?;
            tracing::info!(address = %gateway.address(), %engine_manager, "listening");
            gateway
                .serve(Shutdown {
                    drain,
                    ..Shutdown::default()
                })
                .await?;
        }
        Role::Worker => {
            let server = WorkerServer::bind(WorkerConfig {
                rank: arguments.rank,
                listen: listen(&services.worker_listen)?,
                advertise: arguments.advertise.or(services.worker_advertise),
                engine_manager: engine_manager.to_string(),
                tls,
                devices: local_devices()?,
                register_patience: Duration::from_secs(arguments.register_patience_s),
                socket_directory: arguments.socket_directory,
            })
            .await
            .context(role_listens("worker", "worker"))?;
            tracing::info!(address = %server.local_addr(), rank = arguments.rank, %engine_manager, "listening");
            let load: laneway_worker::Load = Box::new(|plan| Ok(Arc::new(EngineBackend::start(plan)?)));
            server.run(load, drain).await.with_context(|| {
                format!(
                    "serve rank {} under the engine-manager at {engine_manager}",
                    arguments.rank
                )
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn read_voices(arguments: VoicesArgs) -> Result<Option<Voices>, BadFlags> {
    arguments.read().map_err(|violation| BadFlags(vec![violation]))
}

async fn all(mut system: System, drain: CancellationToken) -> anyhow::Result<ExitCode> {
    tracing::info!(gateway = %system.gateway, "listening");
    let (scheme, address) = (system.scheme(), system.gateway);
    let runs = async {
        system.serving().await?;
        eprintln!("serving on {scheme}://{address} (gRPC and HTTP; the page at / speaks)");
        Err::<(), _>(system.failed().await)
    };
    let failed = tokio::select! {
        () = drain.cancelled() => None,
        outcome = runs => outcome.err(),
    };
    match failed {
        None => system.end().await?,
        Some(error) => {
            system.give_up().await;
            return Err(error);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Whose address it is, and where it is written, for an address that cannot be had.
pub(crate) fn role_listens(role: &str, section: &str) -> String {
    format!("start the {role} (its address: --listen, or `services.{section}.listen` of the deployment)")
}
