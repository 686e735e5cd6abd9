//! `laneway verify`: golden tensors of the reference against this build, through the engine.
//!
//! A golden directory holds `manifest.json`, a safetensors file for each case and either checkpoints
//! (`model-<kind>/`, their weights regenerated from the manifest's seed when they hold none) or the name of a size
//! whose configuration is a preset. Each case runs twice: free, for its codes, and forced along the reference's codes,
//! for logits and waveform.

mod case;
mod golden;
mod runner;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use laneway_plan::deployment::{ModelConfig, Weights};

use case::{CASES, Case, Kind};
use golden::Manifest;
use runner::{Outcome, Runner};

/// Largest difference from the reference that passes, of logits and of samples in [-1, 1].
const TOLERANCE: f32 = 1e-3;

/// Flags of `verify`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The golden directory.
    directory: PathBuf,
    /// The device to run on.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
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
    let manifest = Manifest::read(&arguments.directory)?;
    for wanted in &arguments.cases {
        let known = CASES.iter().any(|case| case.name == wanted) && manifest.has(wanted);
        anyhow::ensure!(known, "{} has no case {wanted}", arguments.directory.display());
    }
    let chosen: Vec<&Case> = CASES
        .iter()
        .filter(|case| manifest.has(case.name))
        .filter(|case| arguments.cases.is_empty() || arguments.cases.iter().any(|name| name == case.name))
        .filter(|case| {
            arguments
                .directory
                .join(format!("{}.safetensors", case.name))
                .is_file()
        })
        .collect();
    anyhow::ensure!(
        !chosen.is_empty(),
        "{} has no case that this build knows",
        arguments.directory.display()
    );

    println!(
        "{:<26} {:>7} {:>7} {:>11} {:>11} {:>11} {:>9}",
        "case", "frames", "codes", "logits", "predictor", "waveform", "limit"
    );
    let mut failed = 0;
    for kind in [Kind::CustomVoice, Kind::VoiceDesign, Kind::Base] {
        let of_kind: Vec<&&Case> = chosen.iter().filter(|case| case.kind == kind).collect();
        if of_kind.is_empty() {
            continue;
        }
        let (weights, config) = source(&arguments.directory, kind, &manifest)?;
        let runner = Runner::start(&weights, config.as_ref()).with_context(|| {
            format!(
                "start the {} model of {}",
                kind.name(),
                arguments.directory.display()
            )
        })?;
        for case in of_kind {
            let outcome = runner
                .verify(case, &arguments.directory, &manifest)
                .with_context(|| format!("run case {}", case.name))?;
            failed += usize::from(!outcome.passes(TOLERANCE));
            print(case, &outcome);
        }
    }
    println!("{} of {} cases pass", chosen.len() - failed, chosen.len());
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Where the weights of a kind come from.
fn source(
    directory: &Path,
    kind: Kind,
    manifest: &Manifest,
) -> anyhow::Result<(Weights, Option<ModelConfig>)> {
    let checkpoint = directory.join(format!("model-{}", kind.name()));
    let seed = Weights::Random { seed: manifest.seed };
    if checkpoint.join("model.safetensors").is_file() {
        return Ok((Weights::Path(checkpoint), None));
    }
    if checkpoint.join("config.json").is_file() {
        return Ok((seed, Some(ModelConfig::Directory(checkpoint))));
    }
    let preset = format!("{}-{}", manifest.size, kind.name());
    Ok((seed, Some(ModelConfig::Preset(preset))))
}

fn print(case: &Case, outcome: &Outcome) {
    let difference = |value: Option<f32>| value.map_or("-".to_owned(), |value| format!("{value:.2e}"));
    let codes = match outcome.codes_equal {
        Some(true) => "equal".to_owned(),
        Some(false) => format!(
            "≠ at {}",
            outcome
                .first_wrong_frame
                .map_or("end".into(), |frame| frame.to_string())
        ),
        None => "-".to_owned(),
    };
    println!(
        "{:<26} {:>7} {:>7} {:>11} {:>11} {:>11} {:>9} {}",
        case.name,
        outcome.n_frames,
        codes,
        difference(outcome.logits),
        difference(outcome.predictor),
        difference(outcome.waveform),
        format!("{TOLERANCE:.0e}"),
        if outcome.passes(TOLERANCE) { "pass" } else { "FAIL" },
    );
    if let Some(speaker) = outcome.speaker {
        println!("  speaker vector of the reference clip: largest difference {speaker:.2e}");
    }
}
