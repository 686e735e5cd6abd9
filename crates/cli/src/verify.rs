//! `laneway verify`: golden tensors of the reference against this build, through the engine.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use laneway_device::{CpuConfig, open_cpu};
use laneway_models::qwen3_tts::verify::{CaseReport, VerifyOptions, verify};
use laneway_plan::deployment::DeviceKind;

/// Flags of `verify`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The golden directory.
    directory: PathBuf,
    /// The device to run on.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Directory of `model-*` checkpoints, in place of weights generated from the manifest's seed.
    #[arg(long)]
    weights: Option<PathBuf>,
    /// Only this case; may be repeated.
    #[arg(long = "case")]
    cases: Vec<String>,
}

/// Devices that this build can run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    Cpu,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (device, device_kind) = match arguments.device {
        Device::Cpu => (
            open_cpu(CpuConfig { memory_bytes: None }).context("open the CPU device")?,
            DeviceKind::Cpu,
        ),
    };
    let options = VerifyOptions {
        golden: arguments.directory.clone(),
        weights: arguments.weights.clone(),
        cases: arguments.cases.clone(),
        device,
        device_kind,
    };
    println!(
        "{:<26} {:>6} {:>8} {:>10} {:>10} {:>10} {:>8}",
        "case", "frames", "codes", "logits", "predictor", "waveform", "seconds"
    );
    let reports =
        verify(&options, &mut print).with_context(|| format!("verify {}", arguments.directory.display()))?;
    anyhow::ensure!(
        !reports.is_empty(),
        "{} has no case that this build knows",
        arguments.directory.display()
    );
    let passed = reports.iter().filter(|report| report.passed()).count();
    println!("{passed} of {} cases pass", reports.len());
    Ok(if passed == reports.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn print(report: &CaseReport) {
    let codes = match report.first_wrong_frame {
        // A sampled case's codes are forced: its scores are what is compared.
        _ if report.difference("scores").is_some() => "forced".to_owned(),
        None => "equal".to_owned(),
        Some(frame) => format!("≠ at {frame}"),
    };
    let difference = |what| {
        report
            .difference(what)
            .map_or("-".to_owned(), |d| format!("{:.2e}", d.largest))
    };
    println!(
        "{:<26} {:>6} {:>8} {:>10} {:>10} {:>10} {:>8.1} {}",
        report.case,
        report.frames,
        codes,
        difference("logits"),
        difference("predictor logits"),
        difference("waveform"),
        report.took.as_secs_f64(),
        if report.passed() { "pass" } else { "FAIL" },
    );
    for failed in report.differences.iter().filter(|d| d.largest > d.tolerance) {
        println!(
            "  {}: off by {:.2e}, limit {:.0e}",
            failed.what, failed.largest, failed.tolerance
        );
    }
    if !report.reference_codes_equal {
        println!("  the codes of the reference clip differ");
    }
}
