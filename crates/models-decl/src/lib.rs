//! What each model declares, made from its configuration files alone: no weights, no device.
//!
//! Owns: the registry of models, their declarations (nodes, walks, edges, resources with their bytes), the
//! facts that a gateway answers questions from, and the configurations of the released checkpoints as
//! presets. The engine-manager validates a deployment with these before any worker has loaded a byte.
//!
//! Must not know: devices, weights, gRPC.

pub mod facts;
mod files;
pub mod load;
pub mod qwen3_tts;

use std::path::PathBuf;

use laneway_plan::declaration::ModelDeclaration;
use laneway_plan::deployment::{DeviceKind, ModelConfig, Precision};

pub use facts::{ModelFacts, ModelKind, Voice};
pub use files::{TOKENIZER_DIR_VARIABLE, released_vocabulary};
pub use load::{Validated, load_deployment, load_deployment_here};

/// Names of the models that there are.
pub const MODELS: &[&str] = &[qwen3_tts::MODEL];

/// What the bytes of a declaration depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizing {
    /// Decides how workspaces are cut, and with `precision` how wide keys and values are.
    pub device: DeviceKind,
    /// Decides how wide weights are.
    pub precision: Precision,
    /// Positions of a page of the Talker's cache.
    pub page_size: u32,
    /// Most packed tokens of a prefill step.
    pub max_prefill_tokens: u32,
}

/// A model's declaration and facts.
#[derive(Debug, Clone)]
pub struct Declared {
    /// For the validator and the engine.
    pub declaration: ModelDeclaration,
    /// For whoever answers callers.
    pub facts: ModelFacts,
}

/// Why there is no declaration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeclareError {
    /// No such model.
    #[error("there is no model `{model}`; there are {}", MODELS.join(", "))]
    UnknownModel {
        /// As asked for.
        model: String,
    },
    /// No such preset.
    #[error("model `{model}` has no preset `{preset}`")]
    UnknownPreset {
        /// Registry name.
        model: String,
        /// As asked for.
        preset: String,
        /// Those that there are.
        known: Vec<&'static str>,
    },
    /// A configuration file cannot be read.
    #[error("{path} cannot be read: {problem}", path = .path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A configuration file does not describe the model.
    #[error("{path}: {problem}", path = .path.display())]
    Invalid {
        /// Which; inside a preset, its name comes first.
        path: PathBuf,
        /// Why, with the key.
        problem: String,
    },
}

/// Declare a model from a checkpoint directory's configuration files, or from a preset.
///
/// # Errors
/// No such model or preset, or files that do not describe it.
pub fn declare(model: &str, config: &ModelConfig, sizing: &Sizing) -> Result<Declared, DeclareError> {
    match model {
        qwen3_tts::MODEL => qwen3_tts::declare(config, sizing),
        _ => Err(DeclareError::UnknownModel {
            model: model.to_owned(),
        }),
    }
}
