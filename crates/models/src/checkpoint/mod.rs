//! A checkpoint: its configuration files and its tensors, from a directory, the Hugging Face hub or a seed.
//!
//! Opening reads only headers and JSON; a tensor's bytes are read (or generated) when they are asked for, so
//! nothing is held twice while a node loads its weights.

pub mod config;
mod error;
mod hub;
pub(crate) mod parallel;
mod random;
mod safetensors_file;
pub mod tensors;
mod weights;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use laneway_device::DType;

pub use config::{Configs, GenerationConfig, ModelConfig, SpeechTokenizerConfig, TtsModelType};
pub use error::{CheckpointError, Result};
pub use hub::HUB_FILES;
pub use tensors::TensorShape;
pub use weights::{Tensor, Weights, concat_rows};

/// Where weights come from, as a deployment's `weights` key or a command line names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightsSource {
    /// A checkpoint directory.
    Path(PathBuf),
    /// A repository of the Hugging Face hub: `hf://org/name` or `hf://org/name@revision`.
    Hub {
        /// `org/name`
        repo: String,
        /// Branch, tag or commit; `main` when not given.
        revision: String,
    },
    /// Generated weights, for benchmarks and golden tests: `random:<seed>`. The configuration and the
    /// tokenizer come from a directory of their own.
    Random {
        /// Seed of the documented generator.
        seed: u64,
    },
}

impl FromStr for WeightsSource {
    type Err = CheckpointError;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |problem: &str| CheckpointError::Source {
            text: text.to_owned(),
            problem: problem.to_owned(),
        };
        if let Some(seed) = text.strip_prefix("random:") {
            let seed = seed
                .parse()
                .map_err(|_| bad("the seed after `random:` must be a whole number, e.g. `random:7`"))?;
            return Ok(Self::Random { seed });
        }
        if let Some(rest) = text.strip_prefix("hf://") {
            let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
            let parts: Vec<_> = repo.split('/').collect();
            if parts.len() != 2 || parts.iter().any(|part| part.is_empty()) || revision.is_empty() {
                return Err(bad(
                    "write `hf://organisation/name` or `hf://organisation/name@revision`",
                ));
            }
            return Ok(Self::Hub {
                repo: repo.to_owned(),
                revision: revision.to_owned(),
            });
        }
        if text.is_empty() || text.contains("://") {
            return Err(bad(
                "write a directory, `hf://organisation/name` or `random:<seed>`",
            ));
        }
        Ok(Self::Path(PathBuf::from(text)))
    }
}

/// An opened checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Directory of `config.json` and the tokenizer files.
    pub dir: PathBuf,
    /// The three configuration files.
    pub configs: Configs,
    /// Tensors of `model.safetensors`: Talker, code predictor, speaker encoder.
    pub main: Weights,
    /// Tensors of `speech_tokenizer/model.safetensors`: codec decoder and encoder.
    pub speech: Weights,
}

impl Checkpoint {
    /// Open a checkpoint. `config_dir` is needed for generated weights and refused otherwise.
    ///
    /// # Errors
    /// A file that is missing or malformed, a configuration key that is missing or unsupported.
    pub fn open(source: &WeightsSource, config_dir: Option<&Path>) -> Result<Self> {
        match (source, config_dir) {
            (WeightsSource::Path(dir), None) => Self::from_dir(dir),
            (WeightsSource::Hub { repo, revision }, None) => Self::from_dir(&hub::download(repo, revision)?),
            (WeightsSource::Random { seed }, Some(dir)) => {
                Ok(Self::random(*seed, Configs::read(dir)?, dir.to_owned()))
            }
            (WeightsSource::Random { seed }, None) => Err(CheckpointError::Source {
                text: format!("random:{seed}"),
                problem: "generated weights need a configuration directory (with config.json) beside them"
                    .into(),
            }),
            (_, Some(dir)) => Err(CheckpointError::Source {
                text: dir.display().to_string(),
                problem: "a configuration directory is only for `random:<seed>`; other sources bring theirs"
                    .into(),
            }),
        }
    }

    /// Generated weights for these configurations; `dir` holds the tokenizer files.
    pub fn random(seed: u64, configs: Configs, dir: PathBuf) -> Self {
        Self {
            main: Weights::random(seed, tensors::main(&configs.model), DType::Bf16),
            speech: Weights::random(seed, tensors::speech(&configs.speech), DType::F32),
            dir,
            configs,
        }
    }

    fn from_dir(dir: &Path) -> Result<Self> {
        let configs = Configs::read(dir)?;
        Ok(Self {
            main: Weights::open(dir)?,
            speech: Weights::open(&dir.join("speech_tokenizer"))?,
            dir: dir.to_owned(),
            configs,
        })
    }
}

#[cfg(test)]
mod tests;
