//! `laneway voices`: what may be asked for.

use std::process::ExitCode;

use clap::Args;
use laneway_proto::v1;

use crate::client::{self, GatewayArguments};
use crate::stdout::outln;

/// Flags of `voices`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    gateway: GatewayArguments,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let connection = arguments.gateway.connect().await?;
    let listed = connection
        .speech()
        .list_voices(v1::ListVoicesRequest::default())
        .await;
    let models = listed
        .map_err(|status| client::explain(&status))?
        .into_inner()
        .models;
    for model in &models {
        outln!("{}", model.model)?;
        for voice in &model.voices {
            match voice.dialect.as_str() {
                "" => outln!("  voice     {}", voice.name)?,
                dialect => outln!("  voice     {} ({dialect})", voice.name)?,
            }
        }
        outln!("  languages auto, {}", model.languages.join(", "))?;
    }
    connection.end().await?;
    Ok(ExitCode::SUCCESS)
}
