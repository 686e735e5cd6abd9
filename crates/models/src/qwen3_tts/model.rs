//! Qwen3-TTS as an engine sees it: what it declares, what its nodes are, what a request needs of them.

use std::path::PathBuf;
use std::sync::Arc;

use laneway_engine::node::{Amount, EdgeResult, Model, Need, Node, NodeContext, Payload, WalkId};
use laneway_models_decl::qwen3_tts::{CODEC, CODEC_PRIME, CODEC_STATE, REF_ENCODE, REF_ENCODER, presets};
use laneway_models_decl::{DeclareError, Sizing, declare, qwen3_tts};
use laneway_plan::declaration::ModelDeclaration;
use laneway_plan::deployment::{ModelConfig, Weights as WeightsKey};

use super::nodes::codec::CodecNode;
use super::nodes::ref_encoder::RefEncoderNode;
use super::nodes::talker::{SAMPLER, TALKER, TALKER_KV, TalkerNode};
use super::reference::{Reference, ReferenceClip};
use super::request::{RequestBuilder, TtsRequest};
use super::tokenizer::{Tokenizer, TokenizerError, WordSplit};
use crate::checkpoint::{Checkpoint, CheckpointError, Configs, WeightsSource};

pub use laneway_models_decl::TOKENIZER_DIR_VARIABLE;

/// Why a model cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Weights or configuration.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Vocabulary.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The configuration cannot be declared.
    #[error(transparent)]
    Declare(#[from] DeclareError),
    /// A preset has no vocabulary, and none was named.
    #[error(
        "preset `{preset}` has no vocabulary: run `make tools` in the checkout, which puts it into \
         .tools/qwen-tokenizer, or set {TOKENIZER_DIR_VARIABLE} to a directory with the released vocab.json and \
         merges.txt"
    )]
    NoVocabulary {
        /// The preset.
        preset: String,
    },
    /// The vocabulary has ids that the text embedding has not.
    #[error("the vocabulary needs {ids} text embeddings; config.json has text_vocab_size {embeddings}")]
    VocabularyTooLarge {
        /// One more than its largest id.
        ids: usize,
        /// `text_vocab_size`
        embeddings: usize,
    },
}

/// An opened model: checkpoint, tokenizer, declaration. Weights are read when a node is built.
#[derive(Debug)]
pub struct Qwen3Tts {
    checkpoint: Checkpoint,
    declaration: ModelDeclaration,
    requests: RequestBuilder,
}

impl From<&WeightsKey> for WeightsSource {
    fn from(key: &WeightsKey) -> Self {
        match key {
            WeightsKey::Path(dir) => Self::Path(dir.clone()),
            WeightsKey::HuggingFace { repo, revision } => Self::Hub {
                repo: repo.clone(),
                revision: revision.clone().unwrap_or_else(|| "main".into()),
            },
            WeightsKey::Random { seed } => Self::Random { seed: *seed },
        }
    }
}

impl Qwen3Tts {
    /// Open what a deployment's `weights` and `model_config` name.
    ///
    /// # Errors
    /// A file is missing or malformed, a key is missing or unsupported, or there is no vocabulary.
    pub fn open(
        weights: &WeightsKey,
        config: Option<&ModelConfig>,
        sizing: &Sizing,
    ) -> Result<Self, OpenError> {
        let source = WeightsSource::from(weights);
        let (checkpoint, tokenizer) = match (&source, config) {
            (WeightsSource::Random { seed }, Some(ModelConfig::Preset(name))) => {
                let unknown = || DeclareError::UnknownPreset {
                    model: qwen3_tts::MODEL.into(),
                    preset: name.clone(),
                    known: presets::names(),
                };
                let preset = presets::named(name).ok_or_else(unknown)?;
                let texts = preset.files.map(str::as_bytes);
                let configs = Configs::parse(&PathBuf::from(name), texts)?;
                let dir = laneway_models_decl::released_vocabulary()
                    .ok_or_else(|| OpenError::NoVocabulary { preset: name.clone() })?;
                let tokenizer = Tokenizer::released(&dir, WordSplit::Qwen2)?;
                (Checkpoint::random(*seed, configs, dir), tokenizer)
            }
            (WeightsSource::Random { .. }, Some(ModelConfig::Directory(dir))) => {
                let checkpoint = Checkpoint::open(&source, Some(dir))?;
                (checkpoint, Tokenizer::load(dir, WordSplit::Qwen2)?)
            }
            // A configuration beside weights that bring their own says what they are expected to be before
            // they are there; what is loaded is theirs.
            _ => {
                let checkpoint = Checkpoint::open(&source, None)?;
                let tokenizer = Tokenizer::load(&checkpoint.dir, WordSplit::Qwen2)?;
                (checkpoint, tokenizer)
            }
        };
        let declared_from = match (&source, config) {
            (WeightsSource::Random { .. }, Some(config)) => config.clone(),
            _ => ModelConfig::Directory(checkpoint.dir.clone()),
        };
        let declaration = declare(qwen3_tts::MODEL, &declared_from, sizing)?.declaration;
        Self::new(checkpoint, tokenizer, declaration)
    }

    /// From its parts.
    ///
    /// # Errors
    /// The vocabulary does not fit the text embedding.
    pub fn new(
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        declaration: ModelDeclaration,
    ) -> Result<Self, OpenError> {
        let (ids, embeddings) = (
            tokenizer.id_bound(),
            checkpoint.configs.model.talker_config.text_vocab_size,
        );
        if ids > embeddings {
            return Err(OpenError::VocabularyTooLarge { ids, embeddings });
        }
        let configs = Arc::new(checkpoint.configs.clone());
        Ok(Self {
            checkpoint,
            declaration,
            requests: RequestBuilder::new(configs, Arc::new(tokenizer)),
        })
    }

    /// Builds this model's requests.
    pub fn requests(&self) -> &RequestBuilder {
        &self.requests
    }

    /// The opened checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }
}

fn request(payload: &Payload) -> Option<&TtsRequest> {
    payload.downcast_ref()
}

fn clip(payload: &Payload) -> Option<&ReferenceClip> {
    request(payload)?.reference.as_ref()
}

impl Model for Qwen3Tts {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn build_node(
        &self,
        name: &str,
        context: NodeContext,
    ) -> Result<Box<dyn Node>, Box<dyn std::error::Error + Send + Sync>> {
        let configs = &self.checkpoint.configs;
        Ok(match name {
            TALKER => Box::new(TalkerNode::build(
                &self.declaration,
                &configs.model,
                &self.checkpoint.main,
                context,
            )?),
            CODEC => Box::new(CodecNode::build(
                &self.declaration,
                &configs.speech.decoder_config,
                &self.checkpoint.speech,
                context,
            )?),
            REF_ENCODER => Box::new(RefEncoderNode::build(&self.checkpoint, &context, clip)?),
            _ => return Err(format!("model {} has no node {name}", self.declaration.model).into()),
        })
    }

    fn needs(&self, node: &str, payload: &Payload) -> Vec<Need> {
        let need = |resource: &str, amount| Need {
            resource: resource.to_owned(),
            amount,
            prefix: Vec::new(),
        };
        match (node, request(payload)) {
            (TALKER, Some(request)) => {
                // The last frame's step writes no position, so that of an overrun step is among these.
                let positions = request.prompt.rows.len() as u32 + request.max_frames;
                vec![
                    need(TALKER_KV, Amount::Positions(positions)),
                    need(SAMPLER, Amount::Slots(1)),
                ]
            }
            (CODEC, _) => vec![need(CODEC_STATE, Amount::Slots(1))],
            _ => Vec::new(),
        }
    }

    fn runs_once(&self, walk: WalkId, payload: &Payload) -> bool {
        self.declaration.walks[walk.0].name == REF_ENCODE && clip(payload).is_some()
    }

    fn prime_items(&self, walk: WalkId, payload: &Payload, results: &[EdgeResult]) -> Vec<Arc<[i32]>> {
        let in_context = clip(payload).is_some_and(|clip| clip.in_context);
        if self.declaration.walks[walk.0].name != CODEC_PRIME || !in_context {
            return Vec::new();
        }
        let reference: Option<&Reference> = results.iter().find_map(|result| result.downcast_ref());
        let codes = reference.and_then(|reference| reference.codes.as_ref());
        codes
            .into_iter()
            .flat_map(|codes| codes.iter())
            .map(|frame| frame[..].into())
            .collect()
    }
}

#[cfg(test)]
mod tests;
