//! A configuration file, its model and the validator in one call: what `laneway validate`, the
//! engine-manager, the gateway and the embedded server begin with.

use laneway_plan::deployment::{Deployment, ModelConfig, Weights};
use laneway_plan::load::Loaded;
use laneway_plan::violation::{Reason, Violation};
use laneway_plan::{DeviceInventory, Sources, load};

use crate::{DeclareError, Declared, MODELS, ModelFacts, Sizing, declare, files, qwen3_tts};
use laneway_plan::declaration::ModelDeclaration;

/// A deployment that passed every rule, with what its model declares.
#[derive(Debug, Clone)]
pub struct Validated {
    /// The deployment.
    pub deployment: Deployment,
    /// The model's declaration.
    pub declaration: ModelDeclaration,
    /// The model's facts.
    pub facts: ModelFacts,
}

/// Read, declare, check.
///
/// # Errors
/// Every violation, in the order of the file; print them with [`laneway_plan::render`] and exit with 2.
pub fn load_deployment(
    sources: &Sources,
    inventory: Option<&DeviceInventory>,
) -> Result<Validated, Vec<Violation>> {
    load_with(sources, inventory, |_| ())
}

/// As [`load_deployment`], and the files that the deployment names are looked for on this machine: only a worker
/// needs them, so that an engine-manager does not ask.
///
/// # Errors
/// Every violation, in the order of the file.
pub fn load_deployment_here(
    sources: &Sources,
    inventory: Option<&DeviceInventory>,
) -> Result<Validated, Vec<Violation>> {
    load_with(sources, inventory, check_files)
}

fn load_with(
    sources: &Sources,
    inventory: Option<&DeviceInventory>,
    check_more: impl FnOnce(&mut Loaded),
) -> Result<Validated, Vec<Violation>> {
    let mut loaded = load(sources);
    let declared = declare_loaded(&mut loaded);
    if declared.is_some() {
        check_more(&mut loaded);
    }
    let deployment = loaded.check(declared.as_ref().map(|declared| &declared.declaration), inventory)?;
    // Without a declaration `check` has violations to return.
    let Declared { declaration, facts } = declared.expect("a checked deployment has a declared model");
    Ok(Validated {
        deployment,
        declaration,
        facts,
    })
}

fn check_files(loaded: &mut Loaded) {
    match (loaded.weights(), loaded.model_config()) {
        (Some(Weights::Path(directory)), _) => {
            for problem in files::checkpoint_problems(&directory) {
                let remedy = "put the whole file there, or name another checkpoint directory";
                loaded.add(Violation::new(
                    Reason::CheckpointIncomplete,
                    "weights",
                    problem,
                    remedy,
                ));
            }
        }
        (Some(Weights::Random { .. }), Some(ModelConfig::Directory(directory))) => {
            if let Some(problem) = files::vocabulary_problem(&directory) {
                let remedy = "put a vocabulary beside the configuration files";
                loaded.add(Violation::new(
                    Reason::VocabularyMissing,
                    "model_config",
                    problem,
                    remedy,
                ));
            }
        }
        (Some(Weights::Random { .. }), Some(ModelConfig::Preset(preset))) => {
            let problem = match files::released_vocabulary() {
                None => {
                    Some("there is no .tools/qwen-tokenizer above this directory or the program".to_owned())
                }
                Some(directory) => files::vocabulary_problem(&directory),
            };
            if let Some(problem) = problem {
                let message = format!("preset `{preset}` needs the released vocabulary: {problem}");
                let remedy = format!(
                    "run `make tools` in the checkout, or set {} to a directory with vocab.json and merges.txt",
                    files::TOKENIZER_DIR_VARIABLE
                );
                loaded.add(Violation::new(
                    Reason::VocabularyMissing,
                    "model_config",
                    message,
                    remedy,
                ));
            }
        }
        _ => {}
    }
}

fn declare_loaded(loaded: &mut Loaded) -> Option<Declared> {
    let model = loaded.model()?.to_owned();
    if !MODELS.contains(&model.as_str()) {
        let message = format!("there is no model `{model}`");
        let remedy = format!("write one of: {}", MODELS.join(", "));
        loaded.add(Violation::new(Reason::UnknownModel, "model", message, remedy));
        return None;
    }
    let config = config_of(loaded)?;
    let sizing = Sizing {
        device: loaded.device()?,
        precision: loaded.precision()?,
        page_size: loaded.page_size(qwen3_tts::TALKER_KV),
        max_prefill_tokens: loaded.max_prefill_tokens(),
    };
    match declare(&model, &config, &sizing) {
        Ok(declared) => {
            let tokens = loaded.max_prefill_tokens();
            if tokens < qwen3_tts::SHORTEST_PREFILL {
                let message = format!("no prompt fits into a prefill step of {tokens} tokens");
                let remedy = format!(
                    "write at least {}, and more for whole texts, instructions and clips",
                    qwen3_tts::SHORTEST_PREFILL
                );
                loaded.add(Violation::new(
                    Reason::PromptTooLong,
                    "limits.max_prefill_tokens",
                    message,
                    remedy,
                ));
            }
            let longest = declared.facts.max_positions;
            if loaded.max_seq_len() > longest {
                let message = format!(
                    "{} positions are more than the model was made for",
                    loaded.max_seq_len()
                );
                let remedy = format!("write at most {longest}");
                loaded.add(Violation::new(
                    Reason::SequenceTooLong,
                    "max_seq_len",
                    message,
                    remedy,
                ));
            }
            Some(declared)
        }
        Err(error) => {
            let key = if loaded.model_config().is_some() {
                "model_config"
            } else {
                "weights"
            };
            let remedy = match &error {
                DeclareError::UnknownPreset { known, .. } => {
                    format!(
                        "write one of {}; a directory is written with a `/`: `./{config}`",
                        known.join(", ")
                    )
                }
                DeclareError::Invalid { path, .. } => format!("mend {}", path.display()),
                _ => "name a directory with the configuration files of a checkpoint, or a preset".to_owned(),
            };
            loaded.add(Violation::new(
                Reason::ModelConfigInvalid,
                key,
                error.to_string(),
                remedy,
            ));
            None
        }
    }
}

/// Where the sizes come from: `model_config`, else the weights' own directory, else the preset of a
/// repository whose configuration is known before it is downloaded. Workers compare what they load with it.
fn config_of(loaded: &mut Loaded) -> Option<ModelConfig> {
    let weights = loaded.weights()?;
    let given = loaded.model_config();
    match (weights, given) {
        (Weights::Path(directory), None) => Some(ModelConfig::Directory(directory)),
        (Weights::Path(directory), Some(_)) => {
            let message = format!(
                "`model_config` has no effect: {} has its own config.json",
                directory.display()
            );
            loaded.add(Violation::new(
                Reason::ModelConfigUnused,
                "model_config",
                message,
                "take it out",
            ));
            Some(ModelConfig::Directory(directory))
        }
        (_, Some(config)) => Some(config),
        (Weights::HuggingFace { repo, .. }, None) => {
            let preset = qwen3_tts::presets::of_repository(&repo);
            if preset.is_none() {
                let message = format!("the sizes of {repo} are not known before it is downloaded");
                loaded.add(required(message));
            }
            preset.map(|preset| ModelConfig::Preset(preset.name.to_owned()))
        }
        (Weights::Random { .. }, None) => {
            loaded.add(required("random weights have no sizes of their own".to_owned()));
            None
        }
    }
}

fn required(message: String) -> Violation {
    let presets = qwen3_tts::presets::names().join(", ");
    let remedy = format!("add `model_config:` with a directory or a preset ({presets})");
    Violation::new(Reason::ModelConfigRequired, "weights", message, remedy)
}
