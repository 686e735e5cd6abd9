//! `laneway kernels check`.

use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use laneway_cuda::check::{CaseReport, CheckConfig, Products, Sizes, Summary, check, check_runtime};
use laneway_cuda::{CudaConfig, CudaDevice, Precision};
use laneway_device::{CpuConfig, CpuDevice, DType, Device, Op};
use serde_json::json;

/// Operations whose arithmetic depends on the device's precision.
const PRODUCTS: [&str; 3] = ["Gemm", "Conv", "Conv1d"];

/// Flags of `kernels check`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The device to check; the CPU device is the reference.
    #[arg(long, value_enum, default_value_t = Subject::Cuda)]
    device: Subject,
    /// What the device takes products of.
    #[arg(long, value_enum, default_value_t = Precisions::Both)]
    precision: Precisions,
    /// Only this operation, or cases whose line contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Print only cases that fail, and the summary.
    #[arg(long)]
    failed_only: bool,
    /// Write every case here, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Of all operands.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leave out the shapes of the released models.
    #[arg(long)]
    small: bool,
    /// Do not put poisoned memory round the buffers.
    #[arg(long)]
    no_guards: bool,
    /// Do not run a second time with the blocks in another order.
    #[arg(long)]
    no_shuffle: bool,
    /// Threads that compute the reference [default: one a processor, at most 12].
    #[arg(long)]
    threads: Option<usize>,
    /// Check each operation in a process of its own: one that takes the device with it does not end the check.
    #[arg(long, conflicts_with_all = ["filter", "json"])]
    isolate: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Subject {
    Cpu,
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Precisions {
    Bf16,
    F32,
    Both,
}

/// A device to check and what goes with it.
struct Opened {
    device: Arc<dyn Device>,
    shuffled: Option<Arc<dyn Device>>,
    guarded: Option<Arc<CudaDevice>>,
    caches: Vec<DType>,
    /// Compute capability; 0: none.
    arch: u32,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.isolate {
        return isolated();
    }
    let began = Instant::now();
    let products = match (arguments.device, arguments.precision) {
        (Subject::Cpu, _) => vec![Products::AsGiven],
        (Subject::Cuda, Precisions::Bf16) => vec![Products::Bf16],
        (Subject::Cuda, Precisions::F32) => vec![Products::F32],
        (Subject::Cuda, Precisions::Both) => vec![Products::Bf16, Products::F32],
    };
    let (mut total, mut all) = (Summary::default(), Vec::new());
    // An operation that is not there yet panics: it is reported as a failed case.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut failure = None;
    for products in products {
        match check_products(arguments, products, &mut all) {
            Ok(summary) => {
                total.cases += summary.cases;
                total.passed += summary.passed;
                total.lost = summary.lost;
            }
            Err(error) => failure = Some(error),
        }
        if total.lost.is_some() || failure.is_some() {
            break;
        }
    }
    std::panic::set_hook(hook);
    if let Some(error) = failure {
        return Err(error);
    }
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&all).context("write the report")?;
        std::fs::write(path, json + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    println!(
        "{} of {} cases pass, {:.1} s",
        total.passed,
        total.cases,
        began.elapsed().as_secs_f64()
    );
    if let Some(lost) = &total.lost {
        println!("the device answers no more, the other cases did not run: {lost}");
        println!("with --isolate every operation has a process of its own");
    }
    let passed = total.passed == total.cases && total.lost.is_none() && total.cases > 0;
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn check_products(
    arguments: &Arguments,
    products: Products,
    all: &mut Vec<serde_json::Value>,
) -> anyhow::Result<Summary> {
    let opened = open(arguments, products)?;
    let reference = CpuDevice::new(CpuConfig { memory_bytes: None }).context("open the CPU device")?;
    let reference: Arc<dyn Device> = Arc::new(reference);
    // In f32 only what differs from bf16 is worth the time.
    let filters: Vec<Option<String>> = match (&arguments.filter, products, arguments.precision) {
        (None, Products::F32, Precisions::Both) => PRODUCTS.iter().map(|op| Some((*op).to_owned())).collect(),
        (filter, ..) => vec![filter.clone()],
    };
    println!(
        "{} against the CPU device, products {products:?}, seed {}",
        opened.device.facts().name,
        arguments.seed
    );
    let mut total = Summary::default();
    if arguments.filter.is_none() {
        for report in check_runtime(&opened.device, opened.guarded.as_deref()) {
            total.cases += 1;
            total.passed += usize::from(report.outcome.is_ok());
            match report.outcome {
                Ok(()) if arguments.failed_only => {}
                Ok(()) => println!("{:<64} pass", report.name),
                Err(problem) => println!("{:<64} FAIL\n  {problem}", report.name),
            }
        }
    }
    for filter in filters {
        let guarded = opened.guarded.clone();
        let guards = guarded.map(|device| -> Box<dyn Fn() -> Result<(), String>> {
            Box::new(move || {
                let damage = device.check_guards().map_err(|error| error.to_string())?;
                match damage.first() {
                    None => Ok(()),
                    Some(first) => Err(format!("{first:?}, {} in all", damage.len())),
                }
            })
        });
        let config = CheckConfig {
            reference: reference.clone(),
            subject: opened.device.clone(),
            shuffled: opened.shuffled.clone(),
            arch: opened.arch,
            guards,
            products,
            caches: opened.caches.clone(),
            states: vec![DType::F32],
            filter,
            seed: arguments.seed,
            sizes: if arguments.small {
                Sizes::Small
            } else {
                Sizes::True
            },
            threads: arguments.threads.unwrap_or_else(processors),
        };
        let summary = check(&config, &mut |report| {
            if !arguments.failed_only || !report.passed() {
                print(report);
            }
            all.push(to_json(report, products));
        })
        .context("check the device")?;
        total.cases += summary.cases;
        total.passed += summary.passed;
        total.lost = summary.lost;
        if total.lost.is_some() {
            break;
        }
    }
    Ok(total)
}

fn open(arguments: &Arguments, products: Products) -> anyhow::Result<Opened> {
    if arguments.device == Subject::Cpu {
        let device = CpuDevice::new(CpuConfig { memory_bytes: None }).context("open the CPU device")?;
        return Ok(Opened {
            device: Arc::new(device),
            shuffled: None,
            guarded: None,
            caches: vec![DType::F32],
            arch: 0,
        });
    }
    let config = CudaConfig {
        precision: match products {
            Products::F32 => Precision::F32,
            Products::Bf16 | Products::AsGiven => Precision::Bf16,
        },
        guard: !arguments.no_guards,
        ..CudaConfig::default()
    };
    let device = Arc::new(CudaDevice::open(config.clone()).context("open the CUDA device")?);
    let shuffled = match arguments.no_shuffle {
        true => None,
        false => {
            let config = CudaConfig {
                shuffle_blocks: true,
                guard: false,
                ..config
            };
            let device = CudaDevice::open(config).context("open the CUDA device with shuffled blocks")?;
            Some(Arc::new(device) as Arc<dyn Device>)
        }
    };
    Ok(Opened {
        arch: device.arch(),
        guarded: (!arguments.no_guards).then(|| device.clone()),
        device,
        shuffled,
        caches: vec![DType::F32, DType::Bf16, DType::F16],
    })
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn print(report: &CaseReport) {
    println!("{}", report.line());
    for problem in &report.problems {
        println!("  {problem:.200}");
    }
}

fn to_json(report: &CaseReport, products: Products) -> serde_json::Value {
    json!({
        "op": report.op,
        "shape": report.shape,
        "dtype": report.dtype,
        "products": format!("{products:?}"),
        // JSON knows no other numbers.
        "error": report.error.is_finite().then_some(report.error),
        "bound": report.bound,
        "parts": report.parts,
        "ties": report.ties,
        "problems": report.problems,
        "passed": report.passed(),
        "took_ms": report.took.as_secs_f64() * 1e3,
    })
}

/// This program again for each operation, with the same flags.
fn isolated() -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("find this program")?;
    let flags: Vec<_> = std::env::args_os()
        .skip(1)
        .filter(|flag| flag != "--isolate")
        .collect();
    let mut failed = Vec::new();
    for name in Op::NAMES {
        let status = process::Command::new(&program)
            .args(&flags)
            .args(["--filter", name])
            .status()
            .with_context(|| format!("run {} for {name}", program.display()))?;
        if !status.success() {
            failed.push(*name);
        }
    }
    match failed.is_empty() {
        true => println!("every operation passes"),
        false => println!("failed: {}", failed.join(", ")),
    }
    Ok(if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
