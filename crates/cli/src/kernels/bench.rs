//! `laneway kernels bench`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use laneway_cuda::bench::{BenchConfig, Cost, Model, StageTime, bench};
use laneway_cuda::{CudaConfig, open_cuda};
use laneway_device::{CpuConfig, DType, Device, open_cpu};
use serde_json::json;

/// Seconds of audio of a frame.
const FRAME_S: f64 = 0.08;

/// Flags of `kernels bench`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The device.
    #[arg(long, value_enum, default_value_t = On::Cuda)]
    device: On,
    /// Sizes of these models.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Talker::Large, Talker::Small])]
    models: Vec<Talker>,
    /// Requests in the batch.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32, 64, 128])]
    rows: Vec<usize>,
    /// Positions in the Talker's cache.
    #[arg(long, default_value_t = 200)]
    context: usize,
    /// Frames of the Codec's windows, of which a stream has one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    window: u16,
    /// Time every kind of operation alone too.
    #[arg(long)]
    detail: bool,
    /// Milliseconds of each stage's measurement.
    #[arg(long, default_value_t = 200)]
    budget_ms: u64,
    /// Element type of the language models' caches.
    #[arg(long, value_enum, default_value_t = Cache::Bf16)]
    cache: Cache,
    /// Write everything here, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    Cpu,
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Cache {
    Bf16,
    F32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Talker {
    #[value(name = "0.6b")]
    Small,
    #[value(name = "1.7b")]
    Large,
}

impl Talker {
    fn name(self) -> &'static str {
        match self {
            Talker::Small => "0.6b",
            Talker::Large => "1.7b",
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let device: Arc<dyn Device> = match arguments.device {
        On::Cpu => open_cpu(CpuConfig { memory_bytes: None }).context("open the CPU device")?,
        On::Cuda => open_cuda(CudaConfig::default()).context("open the CUDA device")?,
    };
    // The CPU device keeps caches in f32 alone.
    let cache = match (arguments.device, arguments.cache) {
        (On::Cuda, Cache::Bf16) => DType::Bf16,
        _ => DType::F32,
    };
    println!(
        "one frame on {}, context {}, caches {cache:?}; floor: 4.3 TB/s, 790 TFLOP/s",
        device.facts().name,
        arguments.context
    );
    println!("model rows  stage       ops     ms  floor  ratio |   GB/s TFLOP/s");
    let mut all = Vec::new();
    for model in &arguments.models {
        for &rows in &arguments.rows {
            let config = BenchConfig {
                device: device.clone(),
                model: match model {
                    Talker::Small => Model::Small,
                    Talker::Large => Model::Large,
                },
                rows,
                context: arguments.context,
                window: usize::from(arguments.window),
                detail: arguments.detail,
                budget: Duration::from_millis(arguments.budget_ms),
                cache_dtype: Some(cache),
            };
            let stages = bench(&config).with_context(|| format!("time {} rows of {}", rows, model.name()))?;
            print(*model, rows, &stages);
            all.push(json!({
                "model": model.name(),
                "rows": rows,
                "context": arguments.context,
                "window": arguments.window,
                "cache": format!("{cache:?}"),
                "stages": stages.iter().map(stage_json).collect::<Vec<_>>(),
            }));
        }
    }
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&all).context("write the report")?;
        std::fs::write(path, json + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(model: Talker, rows: usize, stages: &[StageTime]) {
    let line = |name: &str, operations: usize, seconds: f64, cost: Cost, floor_s: f64| {
        println!(
            "{} {rows:>4}  {name:<10} {operations:>4} {:>6.3} {:>6.3} {:>6.2} | {:>6.0} {:>7.1}",
            model.name(),
            seconds * 1e3,
            floor_s * 1e3,
            seconds / floor_s,
            cost.bytes / seconds / 1e9,
            cost.flops / seconds / 1e12,
        );
    };
    let (mut seconds, mut floor_s, mut operations, mut cost) = (0.0, 0.0, 0, Cost::default());
    for stage in stages {
        line(
            stage.name,
            stage.operations,
            stage.seconds,
            stage.cost,
            stage.cost.floor_s(),
        );
        seconds += stage.seconds;
        floor_s += stage.cost.floor_s();
        operations += stage.operations;
        cost = cost + stage.cost;
        for kind in &stage.kinds {
            let each_us = kind.seconds / kind.count as f64 * 1e6;
            println!(
                "  {:<20} {:<15} {:>4} x {each_us:>7.2} us = {:>6.3} floor {:>6.3} | {:>6.0} {:>7.1}",
                kind.label,
                kind.op,
                kind.count,
                kind.seconds * 1e3,
                kind.cost.floor_s() * 1e3,
                kind.cost.bytes / kind.seconds / 1e9,
                kind.cost.flops / kind.seconds / 1e12,
            );
        }
    }
    line("frame", operations, seconds, cost, floor_s);
    println!(
        "           -> {:.0} audio-s/s at most",
        rows as f64 * FRAME_S / seconds
    );
}

fn stage_json(stage: &StageTime) -> serde_json::Value {
    json!({
        "stage": stage.name,
        "operations": stage.operations,
        "ms": stage.seconds * 1e3,
        "best_ms": stage.best_seconds * 1e3,
        "floor_ms": stage.cost.floor_s() * 1e3,
        "bytes": stage.cost.bytes,
        "flops": stage.cost.flops,
        "kinds": stage.kinds.iter().map(|kind| json!({
            "label": kind.label,
            "op": kind.op,
            "count": kind.count,
            "us_each": kind.seconds / kind.count as f64 * 1e6,
            "floor_us_each": kind.cost.floor_s() / kind.count as f64 * 1e6,
            "bytes": kind.cost.bytes,
            "flops": kind.cost.flops,
        })).collect::<Vec<_>>(),
    })
}
