//! `config.json`, `generation_config.json` and `speech_tokenizer/config.json`.
//!
//! Every key that the model needs must be there: the class defaults of the reference are not the released
//! values, so nothing is defaulted here except the speaker encoder's layer sizes, which the released files
//! leave to the code. Keys that nothing depends on are not read.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{CheckpointError, Result};

/// The three files together.
#[derive(Debug, Clone)]
pub struct Configs {
    /// `config.json`
    pub model: ModelConfig,
    /// `generation_config.json`
    pub generation: GenerationConfig,
    /// `speech_tokenizer/config.json`
    pub speech: SpeechTokenizerConfig,
}

impl Configs {
    /// Read and check the three files of a checkpoint directory.
    ///
    /// # Errors
    /// Names the file and the key.
    pub fn read(dir: &Path) -> Result<Self> {
        let [model, generation, speech] = CONFIG_FILES.map(|name| read_file(&dir.join(name)));
        Self::parse(dir, [&model?, &generation?, &speech?])
    }

    /// Check the texts of the three files, in the order of the fields; errors name them under `dir`.
    ///
    /// # Errors
    /// Names the file and the key.
    pub fn parse(dir: &Path, texts: [&[u8]; 3]) -> Result<Self> {
        let [model_path, generation_path, speech_path] = CONFIG_FILES.map(|name| dir.join(name));
        let model: ModelConfig = parse_json(&model_path, texts[0])?;
        model
            .check()
            .map_err(|(key, problem)| at(&model_path, key, problem))?;
        let speech: SpeechTokenizerConfig = parse_json(&speech_path, texts[2])?;
        speech
            .check(&model)
            .map_err(|(key, problem)| at(&speech_path, key, problem))?;
        Ok(Self {
            model,
            generation: parse_json(&generation_path, texts[1])?,
            speech,
        })
    }
}

const CONFIG_FILES: [&str; 3] = [
    "config.json",
    "generation_config.json",
    "speech_tokenizer/config.json",
];

fn at(path: &Path, key: &str, problem: String) -> CheckpointError {
    CheckpointError::Config {
        path: path.to_owned(),
        key: key.to_owned(),
        problem,
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| CheckpointError::Io {
        path: path.to_owned(),
        source,
    })
}

/// Read one JSON file; a missing key is an error that names it.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    parse_json(path, &read_file(path)?)
}

fn parse_json<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T> {
    let mut json = serde_json::Deserializer::from_slice(text);
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let key = error.path().to_string();
        at(path, &key, error.into_inner().to_string())
    })
}

type Check = std::result::Result<(), (&'static str, String)>;

fn require(ok: bool, key: &'static str, problem: impl FnOnce() -> String) -> Check {
    if ok { Ok(()) } else { Err((key, problem())) }
}

/// What the checkpoint was trained to be given beside the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TtsModelType {
    /// Named speakers, optionally an instruction.
    CustomVoice,
    /// An instruction describes the voice.
    VoiceDesign,
    /// A reference clip is cloned.
    Base,
}

/// `config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct ModelConfig {
    /// `qwen3_tts`
    pub model_type: String,
    /// `0b6`, `1b7`, `nano`.
    pub tts_model_size: String,
    /// Kind of conditioning.
    pub tts_model_type: TtsModelType,
    /// `<|im_start|>`
    pub im_start_token_id: u32,
    /// `<|im_end|>`
    pub im_end_token_id: u32,
    /// `<tts_pad>`
    pub tts_pad_token_id: u32,
    /// `<tts_text_bos>`
    pub tts_bos_token_id: u32,
    /// `<tts_text_eod>`
    pub tts_eos_token_id: u32,
    /// The Talker.
    pub talker_config: TalkerConfig,
    /// Base only.
    pub speaker_encoder_config: Option<SpeakerEncoderConfig>,
}

/// Shape of one Qwen3-style decoder stack.
#[derive(Debug, Clone, Deserialize)]
pub struct StackConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated feed-forward layer.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head; heads times this is not the hidden size in general.
    pub head_dim: usize,
    /// RMSNorm epsilon.
    pub rms_norm_eps: f32,
    /// RoPE base.
    pub rope_theta: f64,
    /// Must be false.
    pub attention_bias: bool,
    /// Must be `silu`.
    pub hidden_act: String,
    /// Must be false.
    pub use_sliding_window: bool,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Entries of the codec vocabulary (Talker) or of a codebook (predictor).
    pub vocab_size: usize,
    /// Codebooks of a frame.
    pub num_code_groups: usize,
}

impl StackConfig {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads together.
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    fn check(&self) -> Check {
        require(!self.attention_bias, "attention_bias", || {
            "attention biases are not supported: must be false".into()
        })?;
        require(!self.use_sliding_window, "use_sliding_window", || {
            "sliding windows are not supported in the language model: must be false".into()
        })?;
        require(self.hidden_act == "silu", "hidden_act", || {
            format!("`{}` is not supported: must be `silu`", self.hidden_act)
        })?;
        require(self.num_code_groups >= 2, "num_code_groups", || {
            format!("{} is not supported: at least 2 are needed", self.num_code_groups)
        })?;
        require(
            self.num_key_value_heads > 0 && self.num_attention_heads.is_multiple_of(self.num_key_value_heads),
            "num_key_value_heads",
            || "must divide num_attention_heads".into(),
        )?;
        require(self.head_dim.is_multiple_of(2), "head_dim", || {
            "must be even".into()
        })
    }
}

/// `talker_config`.
#[derive(Debug, Clone, Deserialize)]
pub struct TalkerConfig {
    /// The decoder stack.
    #[serde(flatten)]
    pub stack: StackConfig,
    /// Width of the text embedding.
    pub text_hidden_size: usize,
    /// Entries of the text embedding.
    pub text_vocab_size: usize,
    /// Codec row under text that has no code.
    pub codec_pad_id: u32,
    /// First codec row of speech.
    pub codec_bos_id: u32,
    /// End of speech.
    pub codec_eos_token_id: u32,
    /// Opens a head with a language.
    pub codec_think_id: u32,
    /// Opens a head without one.
    pub codec_nothink_id: u32,
    /// Opens the language.
    pub codec_think_bos_id: u32,
    /// Closes the language.
    pub codec_think_eos_id: u32,
    /// Language name to codec row.
    pub codec_language_id: BTreeMap<String, u32>,
    /// Speaker name to codec row.
    pub spk_id: BTreeMap<String, u32>,
    /// Speaker name to the dialect that it speaks.
    pub spk_is_dialect: BTreeMap<String, Dialect>,
    /// The code predictor.
    pub code_predictor_config: StackConfig,
}

/// `false`, or the name of a dialect in `codec_language_id`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Dialect {
    /// `false`: none.
    No(bool),
    /// Language name.
    Named(String),
}

/// `speaker_encoder_config`. The released files hold only the first two keys.
#[derive(Debug, Clone, Deserialize)]
pub struct SpeakerEncoderConfig {
    /// Width of the speaker vector.
    pub enc_dim: usize,
    /// Hz.
    pub sample_rate: u32,
    /// Mel bands.
    #[serde(default = "mel_dim")]
    pub mel_dim: usize,
    /// Channels of the blocks, and of the layer that joins them.
    #[serde(default = "enc_channels")]
    pub enc_channels: Vec<usize>,
    /// Kernel sizes of the same.
    #[serde(default = "enc_kernel_sizes")]
    pub enc_kernel_sizes: Vec<usize>,
    /// Dilations of the same.
    #[serde(default = "enc_dilations")]
    pub enc_dilations: Vec<usize>,
    /// Channels of the attentive pooling.
    #[serde(default = "enc_attention_channels")]
    pub enc_attention_channels: usize,
    /// Splits of a Res2Net block.
    #[serde(default = "enc_res2net_scale")]
    pub enc_res2net_scale: usize,
    /// Channels of squeeze-and-excite.
    #[serde(default = "enc_se_channels")]
    pub enc_se_channels: usize,
}

fn mel_dim() -> usize {
    128
}
fn enc_channels() -> Vec<usize> {
    vec![512, 512, 512, 512, 1536]
}
fn enc_kernel_sizes() -> Vec<usize> {
    vec![5, 3, 3, 3, 1]
}
fn enc_dilations() -> Vec<usize> {
    vec![1, 2, 3, 4, 1]
}
fn enc_attention_channels() -> usize {
    128
}
fn enc_res2net_scale() -> usize {
    8
}
fn enc_se_channels() -> usize {
    128
}

impl ModelConfig {
    /// Codes of a frame.
    pub fn groups(&self) -> usize {
        self.talker_config.stack.num_code_groups
    }

    /// Entries of a codebook.
    pub fn codebook_size(&self) -> usize {
        self.talker_config.code_predictor_config.vocab_size
    }

    /// The checkpoint projects Talker rows to the predictor's width.
    pub fn has_predictor_projection(&self) -> bool {
        self.talker_config.stack.hidden_size != self.talker_config.code_predictor_config.hidden_size
    }

    /// The checkpoint was trained with instructions: all but the 0.6B size and the demo model.
    pub fn knows_instructions(&self) -> bool {
        !matches!(self.tts_model_size.as_str(), "0b6" | "nano")
    }

    fn check(&self) -> Check {
        let talker = &self.talker_config;
        let predictor = &talker.code_predictor_config;
        require(self.model_type == "qwen3_tts", "model_type", || {
            format!("`{}` is not supported: must be `qwen3_tts`", self.model_type)
        })?;
        talker.stack.check()?;
        predictor.check()?;
        require(
            talker.stack.num_code_groups == predictor.num_code_groups,
            "talker_config.code_predictor_config.num_code_groups",
            || "must equal talker_config.num_code_groups".into(),
        )?;
        let vocab = talker.stack.vocab_size;
        require(vocab > predictor.vocab_size, "talker_config.vocab_size", || {
            "must be larger than code_predictor_config.vocab_size".into()
        })?;
        for (key, id) in [
            ("talker_config.codec_pad_id", talker.codec_pad_id),
            ("talker_config.codec_bos_id", talker.codec_bos_id),
            ("talker_config.codec_eos_token_id", talker.codec_eos_token_id),
            ("talker_config.codec_think_id", talker.codec_think_id),
            ("talker_config.codec_nothink_id", talker.codec_nothink_id),
            ("talker_config.codec_think_bos_id", talker.codec_think_bos_id),
            ("talker_config.codec_think_eos_id", talker.codec_think_eos_id),
        ]
        .into_iter()
        .chain(
            talker
                .codec_language_id
                .values()
                .map(|id| ("talker_config.codec_language_id", *id)),
        )
        .chain(talker.spk_id.values().map(|id| ("talker_config.spk_id", *id)))
        {
            require((id as usize) < vocab, key, || {
                format!("id {id} is outside the codec vocabulary of {vocab}")
            })?;
        }
        for (speaker, dialect) in &talker.spk_is_dialect {
            match dialect {
                Dialect::No(false) => {}
                Dialect::Named(name) if talker.codec_language_id.contains_key(name) => {}
                other => {
                    return Err((
                        "talker_config.spk_is_dialect",
                        format!(
                            "speaker {speaker}: {other:?} is neither false nor a key of codec_language_id"
                        ),
                    ));
                }
            }
        }
        for (key, id) in [
            ("im_start_token_id", self.im_start_token_id),
            ("im_end_token_id", self.im_end_token_id),
            ("tts_pad_token_id", self.tts_pad_token_id),
            ("tts_bos_token_id", self.tts_bos_token_id),
            ("tts_eos_token_id", self.tts_eos_token_id),
        ] {
            require((id as usize) < talker.text_vocab_size, key, || {
                format!(
                    "id {id} is outside the text vocabulary of {}",
                    talker.text_vocab_size
                )
            })?;
        }
        require(
            self.tts_model_type != TtsModelType::Base || self.speaker_encoder_config.is_some(),
            "speaker_encoder_config",
            || "missing, and a base model needs it".into(),
        )
    }
}

/// `generation_config.json`.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct GenerationConfig {
    /// Sample the first code of a frame, or take the likeliest.
    pub do_sample: bool,
    /// Over the set of first codes so far.
    pub repetition_penalty: f32,
    /// Of the first code.
    pub temperature: f32,
    /// Of the first code.
    pub top_p: f32,
    /// Of the first code.
    pub top_k: u32,
    /// Sample the other codes.
    pub subtalker_dosample: bool,
    /// Of the other codes.
    pub subtalker_temperature: f32,
    /// Of the other codes.
    pub subtalker_top_p: f32,
    /// Of the other codes.
    pub subtalker_top_k: u32,
    /// Frames at most.
    pub max_new_tokens: u32,
}

/// `speech_tokenizer/config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct SpeechTokenizerConfig {
    /// `qwen3_tts_tokenizer_12hz`
    pub model_type: String,
    /// The reference encoder (Mimi).
    pub encoder_config: CodecEncoderConfig,
    /// The streaming decoder.
    pub decoder_config: CodecDecoderConfig,
    /// Codebooks that the encoder's result keeps.
    pub encoder_valid_num_quantizers: usize,
    /// Hz in.
    pub input_sample_rate: u32,
    /// Hz out.
    pub output_sample_rate: u32,
    /// Samples of a frame.
    pub decode_upsample_rate: usize,
    /// Samples of a frame.
    pub encode_downsample_rate: usize,
}

/// `decoder_config`.
#[derive(Debug, Clone, Deserialize)]
pub struct CodecDecoderConfig {
    /// Width between the stages.
    pub latent_dim: usize,
    /// Width of a dequantised frame.
    pub codebook_dim: usize,
    /// Entries of a codebook.
    pub codebook_size: usize,
    /// Channels of the first convolution of the upsampler.
    pub decoder_dim: usize,
    /// Width of the transformer.
    pub hidden_size: usize,
    /// Width of its gated feed-forward layer.
    pub intermediate_size: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Transformer layers.
    pub num_hidden_layers: usize,
    /// Keys that a query sees, its own included.
    pub sliding_window: usize,
    /// RMSNorm epsilon.
    pub rms_norm_eps: f32,
    /// RoPE base.
    pub rope_theta: f64,
    /// Codebooks.
    pub num_quantizers: usize,
    /// Rates of the upsampling blocks.
    pub upsample_rates: Vec<usize>,
    /// Rates of the latent upsampling.
    pub upsampling_ratios: Vec<usize>,
}

/// `encoder_config`.
#[derive(Debug, Clone, Deserialize)]
pub struct CodecEncoderConfig {
    /// Channels of the first convolution.
    pub num_filters: usize,
    /// Kernel of the first convolution.
    pub kernel_size: usize,
    /// Kernel of the residual units.
    pub residual_kernel_size: usize,
    /// Kernel of the last convolution.
    pub last_kernel_size: usize,
    /// Residual units a stage.
    pub num_residual_layers: usize,
    /// Dilation of a residual unit over that of the one before it.
    pub dilation_growth_rate: usize,
    /// Channel reduction of a residual unit.
    pub compress: usize,
    /// Strides, last stage first.
    pub upsampling_ratios: Vec<usize>,
    /// Transformer width.
    pub hidden_size: usize,
    /// Transformer layers.
    pub num_hidden_layers: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// LayerNorm epsilon.
    pub norm_eps: f32,
    /// RoPE base.
    pub rope_theta: f64,
    /// Codebooks in the checkpoint.
    pub num_quantizers: usize,
    /// Of them semantic.
    pub num_semantic_quantizers: usize,
    /// Entries of a codebook.
    pub codebook_size: usize,
    /// Width of an entry.
    pub codebook_dim: usize,
}

impl SpeechTokenizerConfig {
    fn check(&self, model: &ModelConfig) -> Check {
        let decoder = &self.decoder_config;
        require(
            self.model_type == "qwen3_tts_tokenizer_12hz",
            "model_type",
            || {
                format!(
                    "`{}` is not supported: must be `qwen3_tts_tokenizer_12hz`",
                    self.model_type
                )
            },
        )?;
        require(
            decoder.num_quantizers == model.groups(),
            "decoder_config.num_quantizers",
            || format!("must equal num_code_groups of ../config.json, {}", model.groups()),
        )?;
        require(
            decoder.codebook_size == model.codebook_size(),
            "decoder_config.codebook_size",
            || {
                format!(
                    "must equal code_predictor_config.vocab_size of ../config.json, {}",
                    model.codebook_size()
                )
            },
        )?;
        let rate: usize = decoder
            .upsample_rates
            .iter()
            .chain(&decoder.upsampling_ratios)
            .product();
        require(rate == self.decode_upsample_rate, "decode_upsample_rate", || {
            format!("must be the product of decoder_config's rates, {rate}")
        })?;
        require(
            self.encoder_config.num_semantic_quantizers == 1,
            "encoder_config.num_semantic_quantizers",
            || "must be 1".into(),
        )
    }
}
