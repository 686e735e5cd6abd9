//! `laneway health`: whether a service serves, as an exit code.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use laneway_tls::flags::ClientTlsArgs;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::client::{BadFlags, endpoint};

/// Flags of `health`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The service's address, host:port, http://host:port or https://host:port; host:port is https when any flag of
    /// TLS is given.
    #[arg(default_value = "127.0.0.1:8080")]
    address: String,
    /// Service name; empty for the server as a whole.
    #[arg(long, default_value = "")]
    service: String,
    /// Seconds to wait for the answer.
    #[arg(long, default_value_t = 2)]
    timeout_s: u64,
    #[command(flatten)]
    tls: ClientTlsArgs,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let dial = arguments.tls.dial(&arguments.address).map_err(BadFlags)?;
    let check = async {
        let endpoint = endpoint(&arguments.address, &dial)?;
        let channel = dial.connect(endpoint).await.context("connect")?;
        let request = HealthCheckRequest {
            service: arguments.service,
        };
        let answer = HealthClient::new(channel).check(request).await;
        let response =
            answer.map_err(|status| anyhow::anyhow!("ask for its health: {}", dial.why(&status)))?;
        anyhow::Ok(response.into_inner().status())
    };
    let bound = Duration::from_secs(arguments.timeout_s);
    let status = tokio::time::timeout(bound, check)
        .await
        .unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {bound:?}")))
        .with_context(|| format!("check {}", arguments.address))?;
    println!("{}", status.as_str_name());
    Ok(match status {
        ServingStatus::Serving => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
