//! `laneway bench`: closed and open loops through the gateway, as JSON.
//!
//! In a closed loop c callers send the project's sentences one behind the other; in an open one requests come at a
//! rate, whether or not those before them have ended. What a run reports began or came inside its window; the
//! load before it (the warm-up) is left out. Every request follows from its sentence alone, so a sentence that
//! is said again must give the same bytes, whatever else runs.

pub(crate) mod arguments;
pub(crate) mod caller;
pub(crate) mod clips;
pub(crate) mod machine;
mod roofline;
pub(crate) mod sentences;
mod steps;
pub(crate) mod summary;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use laneway_proto::v1;
use laneway_proto::v1::models_client::ModelsClient;
use serde::Serialize;

use crate::client::{self, Channel, Connection};
use arguments::LoadArguments;
use caller::{Callers, Load, WarmUp};
use roofline::Size;
use sentences::Workload;
use steps::Steps;
use summary::{Arrivals, Determinism, Run, Yardstick};

/// Callers that share a connection: one connection's frames pass through one task at each end.
pub(crate) const CALLERS_PER_CONNECTION: usize = 32;

/// Connections of an open loop, whose callers nobody can count beforehand.
const OPEN_LOOP_CONNECTIONS: usize = 4;

/// Flags of `bench`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Closed loop: callers at once; several values are measured one behind the other. 1 when no --rps is given
    /// either.
    #[arg(long, value_delimiter = ',')]
    concurrency: Vec<usize>,
    /// Open loop: requests a second; several values are measured one behind the other.
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true)]
    rps: Vec<f64>,
    /// Seconds of each measured window.
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Seconds of load before each window, at least.
    #[arg(long, default_value_t = 3.0)]
    warm_up_s: f64,
    /// Requests of each caller of a closed loop that end before its window opens.
    #[arg(long, default_value_t = 1)]
    warm_up_waves: usize,
    #[command(flatten)]
    load: LoadArguments,
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    #[serde(flatten)]
    source: machine::Source,
    command: Vec<String>,
    debug_build: bool,
    machine: machine::Machine,
    model: String,
    voice: String,
    seed: u64,
    workload: Workload,
    /// Different voices that were cloned.
    clips: Option<usize>,
    warm_up_s: f64,
    warm_up_waves: usize,
    runs: Vec<Run>,
    determinism: Determinism,
}

impl Arguments {
    fn arrivals(&self) -> anyhow::Result<Vec<Arrivals>> {
        let zero = self.concurrency.contains(&0) || self.rps.iter().any(|rate| rate.is_nan() || *rate <= 0.0);
        anyhow::ensure!(!zero, "--concurrency and --rps are above 0");
        let sane = |seconds: f64| (0.0..1e6).contains(&seconds);
        anyhow::ensure!(
            sane(self.warm_up_s) && sane(self.seconds) && self.seconds > 0.0,
            "--seconds is above 0, and --warm-up-s not below it"
        );
        let concurrency: &[usize] = match (&self.concurrency[..], &self.rps[..]) {
            ([], []) => &[1],
            (concurrency, _) => concurrency,
        };
        let closed = concurrency
            .iter()
            .map(|&concurrency| Arrivals::Closed { concurrency });
        let open = self
            .rps
            .iter()
            .map(|&requests_per_s| Arrivals::Open { requests_per_s });
        Ok(closed.chain(open).collect())
    }
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let arrivals = arguments.arrivals()?;
    arguments.load.check_output()?;
    let connection = arguments.load.gateway.clone().connect().await?;
    let report = match measure(&arguments, &arrivals, &connection).await {
        Ok(report) => report,
        Err(error) => {
            // Its workers, and a daemon that was started for them, are not left to the next run.
            connection.give_up().await;
            return Err(error);
        }
    };
    arguments.load.report(&report)?;
    connection.end().await?;
    let failed = report.runs.iter().any(|run| !run.failures.is_empty());
    Ok(match failed || report.determinism.differing > 0 {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

async fn measure(
    arguments: &Arguments,
    arrivals: &[Arrivals],
    connection: &Connection,
) -> anyhow::Result<Report> {
    let model = only_model(connection).await?;
    let asked = &arguments.load;
    let voice = asked.voice_of(&model);
    let seed = asked.seed();
    let forced = asked.forces_lengths(&model);
    let lines = sentences::lines(seed);
    let clips = asked.clips_for(&model)?;
    let workload = Workload::of(&lines, forced);
    let machine = machine::Machine::read();
    let yardstick = Yardstick {
        size: Size::of_model(&model.model),
        on_h200: machine.gpus.first().is_some_and(|name| name.contains("H200")),
        forced,
    };
    let mut determinism = Determinism::default();
    let mut runs = Vec::new();
    for (nth, &arrivals) in arrivals.iter().enumerate() {
        let load = Arc::new(Load {
            channels: channels(connection, arrivals).await?,
            voice_arguments: asked.voice.clone(),
            voice: voice.clone(),
            lines: lines.clone(),
            clips: clips.clone(),
            forced,
        });
        eprintln!("measuring {}", describe(arrivals));
        let order_seed = seed.wrapping_add(nth as u64);
        let (callers, concurrency, waves) = match arrivals {
            Arrivals::Closed { concurrency } => (
                Callers::closed_loop(load, concurrency, order_seed),
                concurrency,
                arguments.warm_up_waves,
            ),
            Arrivals::Open { requests_per_s } => (Callers::open_loop(load, requests_per_s, order_seed), 0, 0),
        };
        let warm_up = WarmUp {
            seconds: arguments.warm_up_s,
            waves,
        };
        callers.warm_up(warm_up, concurrency).await?;
        let before = connection.worker_statuses().await?;
        let from = Instant::now();
        tokio::time::sleep(Duration::from_secs_f64(arguments.seconds)).await;
        let to = Instant::now();
        let after = connection.worker_statuses().await?;
        let heard = callers.finish().await?;
        determinism.add(&heard);
        let steps = Steps::between(&before, &after);
        let run = Run::of(arrivals, (from, to), &heard, steps, yardstick);
        eprintln!(
            "{}: {:.1} audio-s/s, {} failures",
            describe(arrivals),
            run.audio_s_per_s,
            run.failures.values().sum::<usize>()
        );
        runs.push(run);
    }
    Ok(Report {
        version: env!("CARGO_PKG_VERSION"),
        source: machine::Source::read(asked.commit.clone()),
        command: std::env::args().collect(),
        debug_build: cfg!(debug_assertions),
        machine,
        model: model.model,
        voice,
        seed,
        workload,
        clips: (!clips.is_empty()).then_some(clips.len()),
        warm_up_s: arguments.warm_up_s,
        warm_up_waves: arguments.warm_up_waves,
        runs,
        determinism,
    })
}

fn describe(arrivals: Arrivals) -> String {
    match arrivals {
        Arrivals::Closed { concurrency } => format!("{concurrency} at once"),
        Arrivals::Open { requests_per_s } => format!("{requests_per_s} a second"),
    }
}

/// The one model that is served.
pub(crate) async fn only_model(connection: &Connection) -> anyhow::Result<v1::ModelFacts> {
    let listed = ModelsClient::new(connection.channel.clone())
        .list(v1::ListModelsRequest {})
        .await;
    let mut models = listed
        .map_err(|status| client::explain(&status))?
        .into_inner()
        .models;
    anyhow::ensure!(
        models.len() == 1,
        "{} models are served; measure one",
        models.len()
    );
    Ok(models.remove(0))
}

async fn channels(connection: &Connection, arrivals: Arrivals) -> anyhow::Result<Vec<Channel>> {
    let n_channels = match arrivals {
        Arrivals::Closed { concurrency } => concurrency.div_ceil(CALLERS_PER_CONNECTION),
        Arrivals::Open { .. } => OPEN_LOOP_CONNECTIONS,
    };
    connections(connection, n_channels).await
}

/// So many connections to the gateway.
pub(crate) async fn connections(connection: &Connection, n_channels: usize) -> anyhow::Result<Vec<Channel>> {
    let mut channels = vec![connection.channel.clone()];
    while channels.len() < n_channels {
        channels.push(connection.another_channel().await?);
    }
    Ok(channels)
}
