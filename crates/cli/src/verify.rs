//! `laneway verify`: golden tensors of the reference against this build, through the engine.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use laneway_models::qwen3_tts::verify::{CaseReport, CodesReport, Measure, VerifyOptions, verify};
use laneway_plan::deployment::{DeviceKind, Precision};
use laneway_worker::device;

/// Flags of `verify`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The golden directory.
    directory: PathBuf,
    /// The device to run on: cpu, cuda, or cuda:<index>.
    #[arg(long, default_value = "cpu", value_parser = parse_device)]
    device: (DeviceKind, u32),
    /// What matrices are kept and multiplied in: bf16 or f32; the device's own without one.
    #[arg(long, value_parser = parse_precision)]
    precision: Option<Precision>,
    /// Directory of `model-*` checkpoints, in place of weights generated from the manifest's seed.
    #[arg(long)]
    weights: Option<PathBuf>,
    /// Only this case; may be repeated.
    #[arg(long = "case")]
    cases: Vec<String>,
}

fn parse_device(text: &str) -> Result<(DeviceKind, u32), String> {
    match text.split_once(':') {
        None if text == "cpu" => Ok((DeviceKind::Cpu, 0)),
        None if text == "cuda" => Ok((DeviceKind::Cuda, 0)),
        Some(("cuda", index)) if index.parse::<u32>().is_ok() => {
            Ok((DeviceKind::Cuda, index.parse().unwrap_or_default()))
        }
        _ => Err("write cpu, cuda, or cuda:<index>".to_owned()),
    }
}

fn parse_precision(text: &str) -> Result<Precision, String> {
    [Precision::Bf16, Precision::F32]
        .into_iter()
        .find(|precision| precision.name() == text)
        .ok_or_else(|| "write bf16 or f32".to_owned())
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (device_kind, index) = arguments.device;
    let precision = arguments.precision.unwrap_or(device_kind.default_precision());
    let device = device::open(device_kind, index, precision)?;
    let options = VerifyOptions {
        golden: arguments.directory.clone(),
        weights: arguments.weights.clone(),
        cases: arguments.cases.clone(),
        device,
        device_kind,
        precision,
    };
    let verify_context = || format!("verify {}", arguments.directory.display());
    options.check().with_context(verify_context)?;
    println!(
        "{} on {}, {}: {}",
        arguments.directory.display(),
        options.device.facts().name,
        precision.name(),
        what_is_compared(precision)
    );
    println!(
        "{:<26} {:>6} {:>8} {:>10} {:>10} {:>10} {:>8}",
        "case", "frames", "codes", "logits", "predictor", "waveform", "seconds"
    );
    let reports = verify(&options, &mut print).with_context(verify_context)?;
    anyhow::ensure!(
        !reports.is_empty(),
        "{} has no case that this build knows",
        arguments.directory.display()
    );
    print_limits(&reports);
    let passed = reports.iter().filter(|report| report.passed()).count();
    println!("{passed} of {} cases pass", reports.len());
    Ok(if passed == reports.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn what_is_compared(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "codes of a free run, and the largest difference of any value",
        Precision::Bf16 => {
            "along the reference's codes, the root mean square error of logits and the relative error of the \
             waveform (the share of equal codes of a free run is shown and decides nothing)"
        }
    }
}

fn print(report: &CaseReport) {
    let codes = match report.codes {
        CodesReport::Equal => "equal".to_owned(),
        CodesReport::WrongFrom(frame) => format!("≠ at {frame}"),
        CodesReport::Forced => "forced".to_owned(),
        CodesReport::Agreement(share) => format!("{:.0}%", share * 100.0),
    };
    let difference = |what| {
        report
            .difference(what)
            .map_or("-".to_owned(), |d| format!("{:.2e}", d.value))
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
    for failed in report.differences.iter().filter(|d| !d.passed()) {
        let measure = match failed.measure {
            Measure::Largest => "largest difference",
            Measure::Rms => "root mean square error",
            Measure::Relative => "relative error",
        };
        println!(
            "  {}: {measure} {:.2e}, limit {:.2e}",
            failed.what, failed.value, failed.tolerance
        );
    }
    if !report.reference_codes_equal {
        println!("  the codes of the reference clip differ");
    }
}

/// What passes, under the columns of the cases that it holds for.
fn print_limits(reports: &[CaseReport]) {
    let Some(report) = reports.first() else { return };
    let limit = |what| {
        report
            .difference(what)
            .map_or("-".to_owned(), |d| format!("{:.2e}", d.tolerance))
    };
    println!(
        "{:<26} {:>6} {:>8} {:>10} {:>10} {:>10}",
        "limit",
        "",
        "",
        limit("logits"),
        limit("predictor logits"),
        limit("waveform"),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_and_a_precision_are_named_or_refused() {
        assert_eq!(parse_device("cpu"), Ok((DeviceKind::Cpu, 0)));
        assert_eq!(parse_device("cuda"), Ok((DeviceKind::Cuda, 0)));
        assert_eq!(parse_device("cuda:3"), Ok((DeviceKind::Cuda, 3)));
        for wrong in ["gpu", "cpu:1", "cuda:", "cuda:-1", "cuda:one", ""] {
            assert!(
                parse_device(wrong).unwrap_err().contains("cuda:<index>"),
                "{wrong}"
            );
        }
        assert_eq!(parse_precision("bf16"), Ok(Precision::Bf16));
        assert_eq!(parse_precision("f32"), Ok(Precision::F32));
        assert!(parse_precision("fp16").unwrap_err().contains("bf16 or f32"));
    }
}
