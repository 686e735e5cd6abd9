//! Configurations of the demo model for tests.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tempfile::TempDir;

/// Where the codec runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Beside the Talker, taking turns with it.
    Chain,
    /// Beside the Talker, on a lane of its own.
    Lane,
    /// Moved between the two by measurement.
    Auto,
    /// In a worker of its own.
    Split,
    /// On a lane, as [`Placement::Lane`], of a model that clones voices and whose weights come from a seed; its
    /// reference encoder is on another.
    Cloning,
}

/// A deployment of the demo model.
#[derive(Debug, Clone)]
pub struct Deployment {
    /// Where the codec runs.
    pub placement: Placement,
    /// Requests that run at once.
    pub max_rows: u32,
    /// Requests that wait.
    pub max_queue: u32,
    /// How long running streams may take in a drain.
    pub drain_timeout: &'static str,
}

impl Deployment {
    /// Eight at once, sixteen waiting.
    pub fn new(placement: Placement) -> Self {
        Deployment {
            placement,
            max_rows: 8,
            max_queue: 16,
            drain_timeout: "30s",
        }
    }

    /// Ranks of its workers.
    pub fn n_ranks(&self) -> u32 {
        if self.placement == Placement::Split { 2 } else { 1 }
    }

    /// Write its configuration into a directory that lives as long as the value.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self) -> anyhow::Result<ConfigFile> {
        let directory = tempfile::tempdir().context("make a directory")?;
        let path = directory.path().join("deployment.yaml");
        std::fs::write(&path, self.yaml()).context("write the configuration")?;
        Ok(ConfigFile {
            path,
            _directory: directory,
        })
    }

    fn yaml(&self) -> String {
        let lane = "ranks: [0]\n    lane: 1";
        let (codec, encoder) = match self.placement {
            Placement::Chain => ("ranks: [0]", ""),
            Placement::Lane => (lane, ""),
            Placement::Auto => ("ranks: [0]\n    lane: auto\n    lane_id: 1", ""),
            Placement::Split => ("ranks: [1]", ""),
            Placement::Cloning => (lane, "  - nodes: [RefEncoder]\n    ranks: [0]\n    lane: 2\n"),
        };
        let weights = match self.placement {
            Placement::Cloning => {
                let model = checkout().join("integration-tests/golden/tiny/model-base");
                format!("random:7\nmodel_config: {}", model.display())
            }
            _ => demo_model().display().to_string(),
        };
        let Deployment {
            max_rows,
            max_queue,
            drain_timeout,
            ..
        } = self;
        let pages = 128 * max_rows;
        format!(
            "model: qwen3_tts
weights: {weights}
device: cpu
max_seq_len: 2048
node_groups:
  - nodes: [Talker]
    ranks: [0]
    walks: [talker_prefill, talker_decode]
  - nodes: [Codec]
    {codec}
{encoder}resources:
  talker_kv: {{ pages: {pages}, page_size: 16 }}
  codec_state: {{ slots: {max_rows} }}
limits:
  max_rows: {max_rows}
  max_prefill_tokens: 1024
  max_queue: {max_queue}
  max_frames: 1024
services:
  drain_timeout: {drain_timeout}
"
        )
    }
}

/// A configuration on disk.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    _directory: TempDir,
}

impl ConfigFile {
    /// Its path as an argument.
    pub fn path(&self) -> &str {
        self.path
            .to_str()
            .expect("temporary directories have plain names")
    }
}

/// The top of the checkout.
pub fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this crate is inside the checkout")
        .to_owned()
}

/// The demo model's checkpoint.
pub fn demo_model() -> PathBuf {
    checkout().join("crates/models/demo/nano")
}
