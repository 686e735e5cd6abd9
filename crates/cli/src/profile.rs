//! `laneway profile`: where the time of a model's steps goes.
//!
//! The model runs with forced lengths until every request is done. Then the graphs of its steps are taken apart at
//! the operations that end a stage, and each part is captured and timed alone on the stream it ran on, over the
//! memory that the last step left. What an operation must at least move and compute gives the roofline.

mod beside;
mod recorder;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beside::Beside;
use clap::Args;
use laneway_cuda::bench::{cost_of, time_operations};
use laneway_device::{Device, Op};
use laneway_engine::{EngineHandle, OutputEvent, Submission};
use laneway_models::qwen3_tts::Qwen3Tts;
use laneway_models::qwen3_tts::request::SpeechInput;
use recorder::{Recorder, Replayed};

use crate::alone::{Alone, Chosen};

/// About as long as the mean sentence of a conversation.
const TEXT: &str = "The evening train was late again, so we walked home along the quiet river.";

/// Flags of `profile`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    chosen: Chosen,
    /// Requests at once; several values are profiled one behind the other.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64])]
    rows: Vec<usize>,
    /// Frames of each request.
    #[arg(long, default_value_t = 100)]
    frames: u32,
    /// Milliseconds of each stage's measurement.
    #[arg(long, default_value_t = 200)]
    budget_ms: u64,
    /// In place of the stages: replays of a frame's graph before, while and after a codec works beside it on this many
    /// multiprocessors (0: all of them); several values are measured one behind the other.
    #[arg(long, value_delimiter = ',')]
    beside: Vec<u32>,
    /// Where the report of `--beside` goes, as JSON.
    #[arg(long, requires = "beside")]
    json: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (device, model) = arguments.chosen.open()?;
    let mut all = Vec::new();
    for &rows in &arguments.rows {
        if arguments.beside.is_empty() {
            profile(arguments, &device, &model, rows).with_context(|| format!("profile {rows} rows"))?;
            continue;
        }
        println!("{rows} rows on {}:\n{}", device.facts().name, Beside::HEAD);
        for &sms in &arguments.beside {
            let beside = beside::measure(arguments, &device, &model, rows, sms)
                .with_context(|| format!("replay {rows} rows beside a codec on {sms} SMs"))?;
            println!("{}", beside.row());
            all.push(beside);
        }
    }
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&all).context("write the report")?;
        std::fs::write(path, json + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn profile(
    arguments: &Arguments,
    device: &Arc<dyn Device>,
    model: &Arc<Qwen3Tts>,
    rows: usize,
) -> anyhow::Result<()> {
    let recorder = Arc::new(Recorder::new(device.clone()));
    let began = Instant::now();
    let alone = Alone {
        rows,
        frames: arguments.frames,
        codec_lane: None,
        buckets: vec![rows],
    };
    let (engine, handle) = alone.start(recorder.clone(), model)?;
    println!(
        "{rows} rows on {}: started in {:.1} s",
        device.facts().name,
        began.elapsed().as_secs_f64()
    );
    recorder.clear();
    let began = Instant::now();
    let prompt = speak(&handle, model, rows, arguments.frames)?;
    let seconds = began.elapsed().as_secs_f64();
    let stats = handle.stats();
    for walk in stats.walks.iter().filter(|walk| walk.steps > 0) {
        println!(
            "  {:<16} {:>6} steps {:>6.1} rows {:>8.3} ms a step from launch to landing, {:>6.1} us of the host's",
            walk.walk,
            walk.steps,
            walk.rows as f64 / walk.steps as f64,
            walk.step_time.as_secs_f64() * 1e3 / walk.steps as f64,
            walk.host_time.as_secs_f64() * 1e6 / walk.steps as f64,
        );
    }
    println!(
        "  {:.1} audio-s/s, host time of the chain {:.1} us a step",
        rows as f64 * f64::from(arguments.frames) * 0.08 / seconds,
        stats.chain_host_time().as_secs_f64() * 1e6
            / stats
                .walks
                .iter()
                .filter(|w| w.lane == 0)
                .map(|w| w.steps)
                .sum::<u64>()
                .max(1) as f64,
    );
    drop(engine);
    let context = prompt + arguments.frames as usize;
    let budget = Duration::from_millis(arguments.budget_ms);
    println!("  stage        ops    ms  floor ratio   (context {context})");
    for (name, replayed, ops) in stages(&recorder.replayed()) {
        let (seconds, _) = time_operations(ops, &*replayed.stream, budget)
            .with_context(|| format!("time the stage {name}"))?;
        let cost = cost_of(ops, if name == "talker" { context } else { 16 });
        let floor_s = cost.floor_s();
        let ratio = match floor_s > 0.0 {
            true => format!("{:.2}", seconds / floor_s),
            false => "-".to_owned(),
        };
        println!(
            "  {name:<10} {:>5} {:>6.3} {:>6.3} {ratio:>5}",
            ops.len(),
            seconds * 1e3,
            floor_s * 1e3,
        );
    }
    Ok(())
}

/// Speak `rows` times `frames` frames; hands out the rows of a prompt.
fn speak(handle: &EngineHandle, model: &Qwen3Tts, rows: usize, frames: u32) -> anyhow::Result<usize> {
    let voice = model.requests().voices().next().map(str::to_owned);
    let mut prompt = 0;
    let mut listeners = Vec::new();
    for row in 0..rows {
        let input = SpeechInput {
            text: TEXT.to_owned(),
            voice: voice.clone(),
            seed: row as u64,
            max_frames: Some(frames),
            min_frames: Some(frames),
            ..SpeechInput::default()
        };
        let request = model
            .requests()
            .build(&input)
            .map_err(|error| anyhow::anyhow!("build a request: {}", error.message))?;
        prompt = request.prompt.rows.len();
        let mut stream = handle
            .submit(Submission {
                id: format!("profile-{row}"),
                payload: Arc::new(request),
                chunk: None,
                deadline: None,
                results: Vec::new(),
            })
            .context("submit a request")?;
        listeners.push(std::thread::spawn(move || {
            while let Some(event) = stream.blocking_recv() {
                if let OutputEvent::Failed(failure) = event {
                    anyhow::bail!("a request failed: {failure:?}");
                }
            }
            Ok(())
        }));
    }
    for listener in listeners {
        match listener.join() {
            Ok(result) => result?,
            Err(_) => anyhow::bail!("a listener panicked"),
        }
    }
    Ok(prompt)
}

/// The parts of the graphs that ran most: of a frame's (it samples), of a codec pass (it convolves) and of a
/// prefill (it only fills the cache).
fn stages(replayed: &[Replayed]) -> Vec<(&'static str, &Replayed, &[Op])> {
    let has = |replayed: &&Replayed, name: &str| replayed.graph.ops.iter().any(|op| op.name() == name);
    let mut parts: Vec<(&'static str, &Replayed, &[Op])> = Vec::new();
    if let Some(frame) = replayed.iter().find(|replayed| has(replayed, "Sample")) {
        let ops = &frame.graph.ops[..];
        let sampled = |op: &Op| matches!(op, Op::Sample(_));
        let first = ops.iter().position(sampled).map_or(0, |first| first + 1);
        let last = ops.iter().rposition(sampled).map_or(first, |last| last + 1);
        parts.push(("talker", frame, &ops[..first]));
        parts.push(("predictor", frame, &ops[first..last]));
        parts.push(("rest", frame, &ops[last..]));
        parts.push(("frame", frame, ops));
    }
    if let Some(pass) = replayed.iter().find(|replayed| has(replayed, "Conv")) {
        parts.push(("codec", pass, &pass.graph.ops[..]));
    }
    let frames_and_passes = ["Sample", "Conv"];
    let other = |replayed: &&Replayed| !frames_and_passes.iter().any(|name| has(replayed, name));
    let prefill = replayed
        .iter()
        .filter(|replayed| has(replayed, "QkvRope"))
        .find(other);
    if let Some(prefill) = prefill {
        parts.push(("prefill", prefill, &prefill.graph.ops[..]));
    }
    parts.retain(|(.., ops)| !ops.is_empty());
    parts
}
