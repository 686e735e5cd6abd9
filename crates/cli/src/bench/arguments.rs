//! What `bench` and `soak` are told alike: whom they speak with, and where the report goes.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use laneway_proto::v1;
use serde::Serialize;

use super::clips;
use crate::client::GatewayArguments;
use crate::say::VoiceArguments;
use crate::stdout::outln;

/// Flags of both.
#[derive(Debug, Args)]
pub(crate) struct LoadArguments {
    /// Wait for the model's end token even if its weights are generated, where it means nothing.
    #[arg(long)]
    free_lengths: bool,
    /// Voices to clone, for models that do: generated clips that requests take in turn, every second one in context.
    #[arg(long, default_value_t = 8)]
    clips: usize,
    /// Commit to report, for a tree that was copied without its history.
    #[arg(long, env = "LANEWAY_COMMIT")]
    pub(crate) commit: Option<String>,
    /// Write the JSON here too.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Do not print the JSON.
    #[arg(long, requires = "output")]
    quiet: bool,
    #[command(flatten)]
    pub(crate) voice: VoiceArguments,
    #[command(flatten)]
    pub(crate) gateway: GatewayArguments,
}

impl LoadArguments {
    /// Fail now if the report cannot be written: better found before minutes of load.
    pub(crate) fn check_output(&self) -> anyhow::Result<()> {
        let Some(path) = &self.output else {
            return Ok(());
        };
        let opened = std::fs::File::options().append(true).create(true).open(path);
        opened
            .map(drop)
            .with_context(|| format!("write {}", path.display()))
    }

    /// Print and write the report, as asked for.
    pub(crate) fn report(&self, report: &impl Serialize) -> anyhow::Result<()> {
        let json = serde_json::to_string_pretty(report).context("write the report")?;
        if !self.quiet {
            outln!("{json}")?;
        }
        match &self.output {
            Some(path) => {
                std::fs::write(path, json + "\n").with_context(|| format!("write {}", path.display()))
            }
            None => Ok(()),
        }
    }

    /// The voice that was asked for, or the model's first: which one speaks changes no cost, and the report says it.
    pub(crate) fn voice_of(&self, model: &v1::ModelFacts) -> String {
        let first = || model.voices.first().map(|voice| voice.name.clone());
        self.voice.voice.clone().or_else(first).unwrap_or_default()
    }

    /// What random numbers of the load come from.
    pub(crate) fn seed(&self) -> u64 {
        self.voice.seed.unwrap_or(0)
    }

    /// Whether streams are given their length, because the model's end token means nothing.
    pub(crate) fn forces_lengths(&self, model: &v1::ModelFacts) -> bool {
        model.takes_exact_frames && !self.free_lengths
    }

    /// Voices to clone, where the model does.
    pub(crate) fn clips_for(&self, model: &v1::ModelFacts) -> anyhow::Result<Vec<v1::ReferenceClip>> {
        if !model.takes_reference {
            return Ok(Vec::new());
        }
        anyhow::ensure!(
            self.clips > 0,
            "--clips is above 0: {} clones voices",
            model.model
        );
        Ok(clips::clips(self.clips, model.sample_rate))
    }
}
