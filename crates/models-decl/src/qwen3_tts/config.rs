//! The keys of a checkpoint's configuration files that sizes and facts depend on. Nothing is defaulted but
//! what the released files leave to the code: the reference's class defaults are not the released values. (Loading the model reads more keys than these.)

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::{DeclareError, ModelKind};

/// The three files together.
#[derive(Debug, Clone)]
pub struct Configs {
    /// `config.json`.
    pub model: ModelConfig,
    /// `generation_config.json`.
    pub generation: GenerationConfig,
    /// `speech_tokenizer/config.json`.
    pub speech: SpeechTokenizerConfig,
}

/// Names of the three files in a checkpoint directory.
pub const FILES: [&str; 3] = [
    "config.json",
    "generation_config.json",
    "speech_tokenizer/config.json",
];

impl Configs {
    /// Read a directory in the checkpoint layout. Weights and vocabulary need not be there.
    ///
    /// # Errors
    /// A file is missing, or a key is missing or of the wrong type.
    pub fn read(directory: &Path) -> Result<Self, DeclareError> {
        let [model, generation, speech] = FILES.map(|name| {
            let path = directory.join(name);
            let text = std::fs::read_to_string(&path).map_err(|error| DeclareError::Unreadable {
                path: path.clone(),
                problem: error.to_string(),
            })?;
            Ok((path, text))
        });
        Self::parse(&model?, &generation?, &speech?)
    }

    /// Parse the three files, each with the path that errors name.
    ///
    /// # Errors
    /// A key is missing, of the wrong type, or describes another model.
    pub fn parse(
        model: &(PathBuf, String),
        generation: &(PathBuf, String),
        speech: &(PathBuf, String),
    ) -> Result<Self, DeclareError> {
        let configs = Self {
            model: parse(model)?,
            generation: parse(generation)?,
            speech: parse(speech)?,
        };
        let invalid = |path: &Path, problem: String| {
            Err(DeclareError::Invalid {
                path: path.to_owned(),
                problem,
            })
        };
        if configs.model.model_type != super::MODEL {
            return invalid(
                &model.0,
                format!(
                    "model_type is `{}`, not `{}`",
                    configs.model.model_type,
                    super::MODEL
                ),
            );
        }
        if configs.model.tts_model_type == TtsModelType::Base
            && configs.model.speaker_encoder_config.is_none()
        {
            return invalid(&model.0, "a base model has no speaker_encoder_config".to_owned());
        }
        let scale = configs
            .model
            .speaker_encoder_config
            .as_ref()
            .map(|speaker| speaker.enc_res2net_scale);
        if scale == Some(0) || configs.speech.encoder_config.compress == 0 {
            return invalid(
                &model.0,
                "enc_res2net_scale and the codec encoder's compress must be 1 or more".to_owned(),
            );
        }
        let upsampled: u64 = configs
            .speech
            .decoder_config
            .upsampling()
            .map(u64::from)
            .product();
        if upsampled != u64::from(configs.speech.decode_upsample_rate) {
            let problem = format!(
                "decode_upsample_rate is {}, but the decoder's rates multiply to {upsampled}",
                configs.speech.decode_upsample_rate
            );
            return invalid(&speech.0, problem);
        }
        Ok(configs)
    }

    /// What the checkpoint is given beside the text.
    pub fn kind(&self) -> ModelKind {
        match self.model.tts_model_type {
            TtsModelType::CustomVoice => ModelKind::CustomVoice,
            TtsModelType::VoiceDesign => ModelKind::VoiceDesign,
            TtsModelType::Base => ModelKind::Base,
        }
    }
}

fn parse<T: DeserializeOwned>((path, text): &(PathBuf, String)) -> Result<T, DeclareError> {
    serde_json::from_str(text).map_err(|error| DeclareError::Invalid {
        path: path.clone(),
        problem: error.to_string(),
    })
}

/// `config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct ModelConfig {
    /// `qwen3_tts`.
    pub model_type: String,
    /// `0b6`, `1b7`, `nano`.
    pub tts_model_size: String,
    /// Kind of checkpoint.
    pub tts_model_type: TtsModelType,
    /// The Talker.
    pub talker_config: TalkerConfig,
    /// Base only.
    pub speaker_encoder_config: Option<SpeakerEncoderConfig>,
}

/// `tts_model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TtsModelType {
    /// Named voices.
    CustomVoice,
    /// Described voices.
    VoiceDesign,
    /// Cloned voices.
    Base,
}

/// A decoder stack.
#[derive(Debug, Clone, Deserialize)]
pub struct StackConfig {
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Width of the gated layer.
    pub intermediate_size: u32,
    /// Layers.
    pub num_hidden_layers: u32,
    /// Query heads.
    pub num_attention_heads: u32,
    /// Key and value heads.
    pub num_key_value_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Longest sequence.
    pub max_position_embeddings: u32,
    /// Entries of the vocabulary, or of a codebook.
    pub vocab_size: u32,
    /// Codebooks of a frame.
    pub num_code_groups: u32,
}

/// `talker_config`.
#[derive(Debug, Clone, Deserialize)]
pub struct TalkerConfig {
    /// The stack.
    #[serde(flatten)]
    pub stack: StackConfig,
    /// Width of the text embedding.
    pub text_hidden_size: u32,
    /// Entries of the text embedding.
    pub text_vocab_size: u32,
    /// Language name to codec row.
    pub codec_language_id: BTreeMap<String, u32>,
    /// Voice name to codec row.
    pub spk_id: BTreeMap<String, u32>,
    /// Voice name to its dialect.
    pub spk_is_dialect: BTreeMap<String, Dialect>,
    /// The code predictor.
    pub code_predictor_config: StackConfig,
}

/// `false`, or the name of a dialect.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Dialect {
    /// `false`.
    None(bool),
    /// A name in `codec_language_id`.
    Named(String),
}

impl Dialect {
    /// The name, if there is one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Dialect::None(_) => None,
            Dialect::Named(name) => Some(name),
        }
    }
}

/// `speaker_encoder_config`. The released files hold only `enc_dim`; the other sizes are the reference's
/// constants there.
#[derive(Debug, Clone, Deserialize)]
pub struct SpeakerEncoderConfig {
    /// Width of the speaker vector.
    pub enc_dim: u32,
    /// Mel bands.
    #[serde(default = "released_mel_dim")]
    pub mel_dim: u32,
    /// Channels of the first layer, of each block, and of the layer that joins the blocks.
    #[serde(default = "released_enc_channels")]
    pub enc_channels: [u32; 5],
    /// Taps of the same layers.
    #[serde(default = "released_enc_kernel_sizes")]
    pub enc_kernel_sizes: [u32; 5],
    /// Channels of the attentive pooling.
    #[serde(default = "released_enc_attention_channels")]
    pub enc_attention_channels: u32,
    /// Parts that a block splits its channels into.
    #[serde(default = "released_enc_res2net_scale")]
    pub enc_res2net_scale: u32,
    /// Channels of squeeze-and-excite.
    #[serde(default = "released_enc_se_channels")]
    pub enc_se_channels: u32,
}

fn released_mel_dim() -> u32 {
    128
}
fn released_enc_channels() -> [u32; 5] {
    [512, 512, 512, 512, 1536]
}
fn released_enc_kernel_sizes() -> [u32; 5] {
    [5, 3, 3, 3, 1]
}
fn released_enc_attention_channels() -> u32 {
    128
}
fn released_enc_res2net_scale() -> u32 {
    8
}
fn released_enc_se_channels() -> u32 {
    128
}

/// `generation_config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct GenerationConfig {
    /// Frames at most.
    pub max_new_tokens: u32,
}

/// `speech_tokenizer/config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct SpeechTokenizerConfig {
    /// The reference encoder.
    pub encoder_config: CodecEncoderConfig,
    /// The streaming decoder.
    pub decoder_config: CodecDecoderConfig,
    /// Hz out.
    pub output_sample_rate: u32,
    /// Samples of a frame.
    pub decode_upsample_rate: u32,
}

/// `decoder_config`.
#[derive(Debug, Clone, Deserialize)]
pub struct CodecDecoderConfig {
    /// Width between the transformer and the upsampling.
    pub latent_dim: u32,
    /// Width of a dequantized frame; a codebook's rows are half as wide.
    pub codebook_dim: u32,
    /// Entries of a codebook.
    pub codebook_size: u32,
    /// Channels that the upsampling blocks start from.
    pub decoder_dim: u32,
    /// Width of the transformer.
    pub hidden_size: u32,
    /// Width of its gated layer.
    pub intermediate_size: u32,
    /// Query heads.
    pub num_attention_heads: u32,
    /// Key and value heads.
    pub num_key_value_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Layers.
    pub num_hidden_layers: u32,
    /// Frames that a frame sees, itself included.
    pub sliding_window: u32,
    /// Codebooks.
    pub num_quantizers: u32,
    /// Rates of the upsampling blocks.
    pub upsample_rates: Vec<u32>,
    /// Rates of the latent upsampling in front of them.
    pub upsampling_ratios: Vec<u32>,
}

impl CodecDecoderConfig {
    /// Every rate between a frame and its samples.
    pub fn upsampling(&self) -> impl Iterator<Item = u32> {
        self.upsampling_ratios.iter().chain(&self.upsample_rates).copied()
    }
}

/// `encoder_config`.
#[derive(Debug, Clone, Deserialize)]
pub struct CodecEncoderConfig {
    /// Channels of the first convolution.
    pub num_filters: u32,
    /// Width of the transformer.
    pub hidden_size: u32,
    /// Layers.
    pub num_hidden_layers: u32,
    /// Query heads.
    pub num_attention_heads: u32,
    /// Key and value heads.
    pub num_key_value_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Width of the feed-forward layer.
    pub intermediate_size: u32,
    /// Codebooks in the file.
    pub num_quantizers: u32,
    /// Codebooks of the semantic quantizer.
    pub num_semantic_quantizers: u32,
    /// Width of a codebook's rows.
    pub codebook_dim: u32,
    /// Entries of a codebook.
    pub codebook_size: u32,
    /// Strides, from the last to the first.
    pub upsampling_ratios: Vec<u32>,
    /// Taps of the first convolution.
    pub kernel_size: u32,
    /// Taps of the last.
    pub last_kernel_size: u32,
    /// Taps of a residual unit's first.
    pub residual_kernel_size: u32,
    /// A residual unit's inner channels are fewer by this factor.
    pub compress: u32,
}
