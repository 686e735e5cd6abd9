//! `laneway soak`: minutes of load with cancels in the middle of streams and, if asked for, workers that are killed;
//! and a verdict.
//!
//! Callers send the project's sentences one behind the other. Every request follows from its sentence alone, so that
//! one that is said again must give the same bytes; when cancels come, and to which caller, follows from the seed.
//! The verdict has every reason; without one the exit code is 0.

mod callers;
mod ledger;
mod memory;
mod verdict;

use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use laneway_models_decl::qwen3_tts::REF_ENCODE;
use laneway_plan::deployment::DeviceKind;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::bench::arguments::LoadArguments;
use crate::bench::machine::{Machine, Source};
use crate::bench::sentences::{self, Workload};
use crate::bench::{self, CALLERS_PER_CONNECTION};
use crate::client::Connection;
use callers::Shared;
use ledger::{Ledger, Outage};
use memory::Memory;
use verdict::{Clones, RECOVERY_DEADLINE, Verdict, problems};

/// Pause between looks at processes.
const TICK: Duration = Duration::from_millis(250);

/// Readings of memory in a run, at most; they are never closer than [`TICK`].
const READINGS: f64 = 240.0;

/// Shortest and longest pause between readings, seconds.
const READING_PAUSE_S: (f64, f64) = (0.5, 5.0);

/// How long the last streams may take, and then the workers to give everything back.
const LAST_STREAMS: Duration = Duration::from_secs(180);
const IDLE_DEADLINE: Duration = Duration::from_secs(30);

/// Flags of `soak`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Minutes of load.
    #[arg(long, default_value_t = 20.0, conflicts_with = "seconds")]
    minutes: f64,
    /// The same in seconds.
    #[arg(long)]
    seconds: Option<f64>,
    /// Callers at once.
    #[arg(long, default_value_t = 32)]
    concurrency: usize,
    /// Streams that their callers leave in the middle, a minute.
    #[arg(long, default_value_t = 140.0)]
    cancels_per_minute: f64,
    /// Kill the worker that runs this node so many times, evenly spread: codec=2. May be repeated. The deployment is
    /// started here and gives the node a worker of its own.
    #[arg(long, value_name = "NODE=TIMES")]
    kill: Vec<Kill>,
    /// Different sentences, the first of the project's list; all of them without it. Fewer are repeated more often.
    #[arg(long)]
    sentences: Option<usize>,
    /// Deadline of each request.
    #[arg(long, default_value_t = 120.0)]
    deadline_s: f64,
    /// How much more memory each process and device may have in the last quarter than in the first, besides 5%.
    #[arg(long, default_value_t = 64.0)]
    memory_growth_mib: f64,
    /// Do not ask for the memory of GPUs (`nvidia-smi`); otherwise a verdict on a GPU needs it.
    #[arg(long)]
    without_device_memory: bool,
    #[command(flatten)]
    load: LoadArguments,
}

/// A node, and how often its worker is killed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kill {
    node: String,
    times: u32,
}

impl FromStr for Kill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('=').and_then(|(node, times)| {
            let times = times.parse().ok().filter(|times| *times > 0)?;
            let node = node.to_owned();
            (!node.is_empty()).then_some(Kill { node, times })
        });
        parsed.ok_or_else(|| format!("`{text}` is not of the form node=times, such as codec=2"))
    }
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    #[serde(flatten)]
    source: Source,
    command: Vec<String>,
    debug_build: bool,
    machine: Machine,
    model: String,
    voice: String,
    seed: u64,
    workload: Workload,
    concurrency: usize,
    planned_s: f64,
    /// Until the last stream had ended.
    took_s: f64,
    cancels_due: u64,
    cancels_per_minute: f64,
    audio_s_per_s: f64,
    #[serde(flatten)]
    ledger: Ledger,
    /// Starts of each rank's process; 1 without a death.
    worker_starts: Vec<u32>,
    memory: memory::Summary,
    /// For models that clone.
    clones: Option<Clones>,
    verdict: Verdict,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let seconds = arguments.seconds.unwrap_or(arguments.minutes * 60.0);
    let sane = |value: f64| value > 0.0 && value < 1e6;
    anyhow::ensure!(
        sane(seconds) && sane(arguments.deadline_s) && arguments.concurrency > 0,
        "--minutes (or --seconds), --deadline-s and --concurrency are above 0"
    );
    anyhow::ensure!(
        arguments.cancels_per_minute >= 0.0 && arguments.cancels_per_minute < 1e5,
        "--cancels-per-minute is not below 0"
    );
    arguments.load.check_output()?;
    let mut connection = arguments.load.gateway.clone().connect().await?;
    let mut report = match soak(&arguments, Duration::from_secs_f64(seconds), &mut connection).await {
        Ok(report) => report,
        Err(error) => {
            connection.give_up().await;
            return Err(error);
        }
    };
    if let Err(error) = connection.end().await {
        report.verdict.passed = false;
        report
            .verdict
            .reasons
            .push(format!("the system did not end as it should: {error:#}"));
    }
    arguments.load.report(&report)?;
    for reason in &report.verdict.reasons {
        eprintln!("failed: {reason}");
    }
    if report.verdict.passed {
        eprintln!("passed");
    }
    Ok(match report.verdict.passed {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

async fn soak(
    arguments: &Arguments,
    duration: Duration,
    connection: &mut Connection,
) -> anyhow::Result<Report> {
    let model = bench::only_model(connection).await?;
    let asked = &arguments.load;
    let voice = asked.voice_of(&model);
    let seed = asked.seed();
    let forced = asked.forces_lengths(&model);
    let mut lines = sentences::lines(seed);
    lines.truncate(arguments.sentences.unwrap_or(lines.len()).max(1));
    let clips = asked.clips_for(&model)?;
    let n_clips = clips.len().min(lines.len());
    let mut kills = schedule(&arguments.kill, duration, connection)?;
    let encoded_before = encoded(connection).await?;
    let n_connections = arguments.concurrency.div_ceil(CALLERS_PER_CONNECTION);
    let workload = Workload::of(&lines, forced);
    let shared = Arc::new(Shared {
        channels: bench::connections(connection, n_connections).await?,
        voice_arguments: asked.voice.clone(),
        voice: voice.clone(),
        order: sentences::order(lines.len(), seed),
        lines,
        clips,
        forced,
        deadline: Duration::from_secs_f64(arguments.deadline_s),
        next: Default::default(),
        stop: Default::default(),
        cancels: (0..arguments.concurrency).map(|_| Mutex::default()).collect(),
        cancels_due: Default::default(),
        ledger: Mutex::default(),
    });

    let began = Instant::now();
    let mut callers: JoinSet<()> = JoinSet::new();
    for caller in 0..arguments.concurrency {
        callers.spawn(callers::call(shared.clone(), caller));
    }
    let canceller = (arguments.cancels_per_minute > 0.0).then(|| {
        let cancel = callers::cancel(shared.clone(), arguments.cancels_per_minute, seed);
        AbortOnDropHandle::new(tokio::spawn(cancel))
    });
    let mut memory = Memory::new(arguments.memory_growth_mib);
    let on_gpu = connection
        .system()
        .is_some_and(|system| system.deployment.device == DeviceKind::Cuda);
    let read_devices = on_gpu && !arguments.without_device_memory;
    let (shortest, longest) = READING_PAUSE_S;
    let pause = (duration.as_secs_f64() / READINGS).clamp(shortest, longest);
    let (mut next_reading, mut next_minute) = (0.0, 60.0);
    let mut reasons = Vec::new();
    while began.elapsed() < duration {
        let failed = tokio::select! {
            () = tokio::time::sleep(TICK) => None,
            error = connection.failed() => Some(error),
        };
        if let Some(error) = failed {
            reasons.push(format!("the system ended: {error:#}"));
            break;
        }
        let at_s = began.elapsed().as_secs_f64();
        if at_s >= next_reading {
            memory.read_processes(at_s, &watched(connection));
            if read_devices {
                memory.read_devices(at_s).await;
            }
            next_reading = at_s + pause;
        }
        if kills.first().is_some_and(|(due, ..)| *due <= began.elapsed()) {
            let (_, node, rank) = kills.remove(0);
            kill(connection, &shared, node, rank, began).await?;
        }
        see_recoveries(connection, &shared);
        if at_s >= next_minute {
            progress(&shared, at_s);
            next_minute += 60.0;
        }
    }
    drop(canceller);
    shared.stop.store(true, Ordering::Relaxed);
    if tokio::time::timeout(LAST_STREAMS, async {
        while callers.join_next().await.is_some() {}
    })
    .await
    .is_err()
    {
        reasons.push(format!(
            "{} streams did not end within {LAST_STREAMS:?}",
            callers.len()
        ));
        callers.abort_all();
    }
    let took_s = began.elapsed().as_secs_f64();
    wait_for_recoveries(connection, &shared).await;
    let still_held = idle(connection).await;
    let encoded = encoded(connection).await.unwrap_or_default();
    let clones = (n_clips > 0).then(|| Clones {
        clips: n_clips,
        encoded: encoded
            .zip(encoded_before)
            .map(|(after, before)| after.saturating_sub(before)),
    });
    let ledger = std::mem::take(&mut *shared.ledger.lock());
    let memory = memory.summary();
    let starts = connection
        .system()
        .and_then(|system| system.processes())
        .map(|processes| processes.lives());
    let worker_starts: Vec<u32> = starts
        .unwrap_or_default()
        .iter()
        .map(|(_, life)| life.n_starts)
        .collect();
    let cancels_due = shared.cancels_due.load(Ordering::Relaxed);
    reasons.extend(still_held);
    reasons.extend(problems(&ledger, cancels_due, &memory, clones.as_ref()));
    let deaths: u32 = worker_starts.iter().map(|starts| starts.saturating_sub(1)).sum();
    if deaths as usize != ledger.kills.len() {
        reasons.push(format!(
            "workers died {deaths} times; {} of them by the soak",
            ledger.kills.len()
        ));
    }
    if read_devices && memory.devices.is_empty() {
        let why = memory
            .devices_unread
            .clone()
            .unwrap_or_else(|| "no reading".into());
        reasons.push(format!(
            "the memory of the GPU was not read ({why}); --without-device-memory does without"
        ));
    }
    Ok(Report {
        version: env!("CARGO_PKG_VERSION"),
        source: Source::read(asked.commit.clone()),
        command: std::env::args().collect(),
        debug_build: cfg!(debug_assertions),
        machine: Machine::read(),
        model: model.model,
        voice,
        seed,
        workload,
        concurrency: arguments.concurrency,
        planned_s: duration.as_secs_f64(),
        took_s,
        cancels_due,
        cancels_per_minute: ledger.cancelled as f64 / (took_s / 60.0),
        audio_s_per_s: ledger.audio_s / took_s,
        ledger,
        worker_starts,
        memory,
        clones,
        verdict: Verdict {
            passed: reasons.is_empty(),
            reasons,
        },
    })
}

/// (when, node, rank) of every kill, in order.
fn schedule(
    kills: &[Kill],
    duration: Duration,
    connection: &Connection,
) -> anyhow::Result<Vec<(Duration, String, u32)>> {
    let mut all = Vec::new();
    for kill in kills {
        let system = connection.system().filter(|system| system.processes().is_some());
        let system = system.context(
            "--kill needs a deployment that is started here and has several workers, such as a split one: processes of \
             their own",
        )?;
        let nodes = &system.deployment.nodes;
        let placed = nodes
            .iter()
            .find(|placed| placed.node.eq_ignore_ascii_case(&kill.node));
        let placed = placed.with_context(|| {
            let known: Vec<&str> = nodes.iter().map(|placed| placed.node.as_str()).collect();
            format!(
                "--kill {}: there is no such node; nodes are {}",
                kill.node,
                known.join(", ")
            )
        })?;
        let rank = *placed.ranks.first().context("a node has a rank")?;
        for nth in 0..kill.times {
            let share = (f64::from(nth) + 0.5) / f64::from(kill.times);
            all.push((duration.mul_f64(share), placed.node.clone(), rank));
        }
    }
    all.sort();
    Ok(all)
}

async fn kill(
    connection: &Connection,
    shared: &Shared,
    node: String,
    rank: u32,
    began: Instant,
) -> anyhow::Result<()> {
    let processes = connection.system().and_then(|system| system.processes());
    let processes = processes.context("kill a worker: there are no processes")?;
    let process = processes
        .lives()
        .iter()
        .find(|(each, _)| *each == rank)
        .and_then(|(_, life)| life.process);
    let process = process.with_context(|| format!("kill the worker of rank {rank}: it is not up"))?;
    // Noted first: what ends because of it may end at once.
    shared
        .ledger
        .lock()
        .kills
        .push(Outage::new(node, rank, process, began));
    eprintln!("killing the worker of rank {rank}, process {process}");
    processes.kill(rank).await
}

fn see_recoveries(connection: &Connection, shared: &Shared) {
    let Some(processes) = connection.system().and_then(|system| system.processes()) else {
        return;
    };
    for outage in &mut shared.ledger.lock().kills {
        if !outage.is_over() && processes.serves(outage.rank, outage.process) {
            outage.recovered(Instant::now());
        }
    }
}

/// A kill near the end may be recovered from behind it.
async fn wait_for_recoveries(connection: &Connection, shared: &Shared) {
    let open = || {
        let ledger = shared.ledger.lock();
        ledger
            .kills
            .iter()
            .any(|outage| !outage.is_over() && outage.killed.elapsed() < RECOVERY_DEADLINE)
    };
    while open() {
        tokio::time::sleep(TICK).await;
        see_recoveries(connection, shared);
    }
}

/// Processes whose memory is watched.
fn watched(connection: &Connection) -> Vec<(String, u32)> {
    let processes = connection.system().and_then(|system| system.processes());
    let own = match (connection.system(), processes) {
        (None, _) => "callers",
        (Some(_), None) => "callers, gateway, engine-manager and worker",
        (Some(_), Some(_)) => "callers, gateway and engine-manager",
    };
    let workers = processes.map(|processes| processes.lives()).unwrap_or_default();
    let workers = workers
        .into_iter()
        .filter_map(|(rank, life)| Some((format!("worker of rank {rank}"), life.process?)));
    [(own.to_owned(), std::process::id())]
        .into_iter()
        .chain(workers)
        .collect()
}

/// What workers still hold once nobody calls.
async fn idle(connection: &Connection) -> Option<String> {
    let until = Instant::now() + IDLE_DEADLINE;
    loop {
        let held = match connection.worker_statuses().await {
            Ok(statuses) => statuses.iter().find_map(|status| {
                let load = status.load.unwrap_or_default();
                let pool = status.resources.iter().find(|pool| pool.used > 0);
                (load.running + load.queued > 0 || pool.is_some()).then(|| {
                    let pool =
                        pool.map_or_else(String::new, |pool| format!(", {} of {}", pool.used, pool.key));
                    format!(
                        "worker {} still holds {} requests{pool} {IDLE_DEADLINE:?} behind the last stream",
                        status.worker_id,
                        load.running + load.queued
                    )
                })
            }),
            Err(error) => Some(format!(
                "a worker does not answer behind the last stream: {error:#}"
            )),
        };
        if held.is_none() || Instant::now() > until {
            return held;
        }
        tokio::time::sleep(TICK).await;
    }
}

/// Clips that the reference encoders have run so far; `None` for a system elsewhere.
async fn encoded(connection: &Connection) -> anyhow::Result<Option<u64>> {
    let statuses = connection.worker_statuses().await?;
    let walks = statuses
        .iter()
        .flat_map(|status| &status.lanes)
        .flat_map(|lane| &lane.walks);
    let rows = walks
        .filter(|walk| walk.walk == REF_ENCODE)
        .map(|walk| walk.rows)
        .sum();
    Ok((!statuses.is_empty()).then_some(rows))
}

fn progress(shared: &Shared, at_s: f64) {
    let ledger = shared.ledger.lock();
    eprintln!(
        "{:.0} min: {} completed, {} cancelled, {} failed, {:.0} s of audio",
        at_s / 60.0,
        ledger.completed,
        ledger.cancelled,
        ledger.n_failed(),
        ledger.audio_s
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_is_a_node_and_a_number() {
        let kill = |text: &str| text.parse::<Kill>();
        let codec = Kill {
            node: "codec".into(),
            times: 2,
        };
        assert_eq!(kill("codec=2"), Ok(codec));
        for wrong in ["codec", "codec=0", "=2", "codec=two"] {
            assert!(kill(wrong).unwrap_err().contains("node=times"), "{wrong}");
        }
    }
}
