//! From what a caller asks for to the payload that the nodes run: every field has an effect or is refused by
//! name.

use std::sync::Arc;

use laneway_engine::node::RowError;
use parking_lot::Mutex;

use super::prompt::{Prompt, PromptParts, ReferenceText, SpeakerPart, TextLayout, frame_budget, lay_out};
use super::reference::{CODES_PER_FRAME, ReferenceClip};
use super::tokenizer::Tokenizer;
use crate::checkpoint::config::{Configs, Dialect, TtsModelType};

/// Language that lets the model choose.
pub const AUTO_LANGUAGE: &str = "auto";
/// Samples of a codec frame at the model's rate.
const SAMPLES_PER_FRAME: usize = 1920;
/// Tokens before the end token may come.
const MIN_TOKENS: u32 = 2;

/// What a caller asks for, still in its own words.
#[derive(Debug, Clone, Default)]
pub struct SpeechInput {
    /// What to say.
    pub text: String,
    /// Speaker of a CustomVoice model.
    pub voice: Option<String>,
    /// Language name, or `auto`.
    pub language: Option<String>,
    /// How to speak; for VoiceDesign, who speaks.
    pub instruct: Option<String>,
    /// Voice to clone, for a Base model.
    pub reference: Option<CloneInput>,
    /// Where the text goes; `None`: the model type's usual layout.
    pub layout: Option<TextLayout>,
    /// Changes to how codes are drawn.
    pub sampling: SamplingInput,
    /// Seed of the random numbers: the same seed gives the same audio.
    pub seed: u64,
    /// Frames at most; `None`: a budget from the text's length.
    pub max_frames: Option<u32>,
    /// The end token may not come before this many frames: for benchmarks with forced lengths.
    pub min_frames: Option<u32>,
}

/// A voice to clone.
#[derive(Debug, Clone)]
pub struct CloneInput {
    /// The clip.
    pub clip: ReferenceClip,
    /// What it says: needed by an in-context clone, meaningless otherwise.
    pub text: Option<String>,
}

/// Changes to the checkpoint's own sampling parameters.
#[derive(Debug, Clone, Copy, Default)]
pub struct SamplingInput {
    /// Take the likeliest code instead of drawing one.
    pub greedy: bool,
    /// Both for first codes and for the others; above 0.
    pub temperature: Option<f32>,
    /// Both for first codes and for the others; in (0, 1].
    pub top_p: Option<f32>,
    /// Both for first codes and for the others; 0: off.
    pub top_k: Option<u32>,
    /// Of first codes; at least 1.
    pub repetition_penalty: Option<f32>,
}

/// How one kind of code is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// 0: the likeliest.
    pub temperature: f32,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub top_k: u32,
    /// 1: off.
    pub repetition_penalty: f32,
}

/// The payload of one request: what Talker, Codec and RefEncoder run.
#[derive(Debug, Clone)]
pub struct TtsRequest {
    /// The prompt.
    pub prompt: Prompt,
    /// Voice to clone.
    pub reference: Option<ReferenceClip>,
    /// First codes.
    pub talker: SamplingParams,
    /// The other codes.
    pub predictor: SamplingParams,
    /// Key of the random numbers.
    pub seed: u64,
    /// Frames at most; at least 1.
    pub max_frames: u32,
    /// Tokens before the end token may come.
    pub min_tokens: u32,
    /// End token.
    pub eos: u32,
    /// Verification: force codes and record what the model computed.
    pub probe: Option<Arc<Probe>>,
}

/// Verification of a running model: steps with a probed row also copy out what they computed.
#[derive(Debug, Default)]
pub struct Probe {
    /// Codes of the frames to force, instead of those drawn; drawn behind its end.
    pub forced: Vec<[i32; CODES_PER_FRAME]>,
    /// What was seen.
    pub record: Mutex<ProbeRecord>,
}

/// What a probe saw; one entry a step.
#[derive(Debug, Default, Clone)]
pub struct ProbeRecord {
    /// Prefill embeddings `[rows, hidden]`.
    pub prompt: Vec<f32>,
    /// Input embedding of each decode step `[hidden]`.
    pub inputs: Vec<Vec<f32>>,
    /// Hidden state behind the final norm `[hidden]`.
    pub hidden: Vec<Vec<f32>>,
    /// Raw logits of the first code `[vocab]`.
    pub logits: Vec<Vec<f32>>,
    /// The same behind the processors; -inf: banned.
    pub scores: Vec<Vec<f32>>,
    /// Raw logits of the other codes `[groups - 1, codebook]`.
    pub predictor_logits: Vec<Vec<f32>>,
    /// The same behind the processors.
    pub predictor_scores: Vec<Vec<f32>>,
    /// Tokens drawn (or forced), the end token included.
    pub codes: Vec<[i32; CODES_PER_FRAME]>,
}

fn invalid(field: &str, message: impl Into<String>) -> RowError {
    RowError {
        invalid_argument: true,
        field: Some(field.to_owned()),
        message: message.into(),
    }
}

fn names<'a>(names: impl IntoIterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.into_iter().map(String::as_str).collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

/// Builds requests for one checkpoint.
#[derive(Debug)]
pub struct RequestBuilder {
    configs: Arc<Configs>,
    tokenizer: Arc<Tokenizer>,
}

impl RequestBuilder {
    /// For this checkpoint.
    pub fn new(configs: Arc<Configs>, tokenizer: Arc<Tokenizer>) -> Self {
        Self { configs, tokenizer }
    }

    /// Speakers that a request may name.
    pub fn voices(&self) -> impl Iterator<Item = &str> {
        self.configs.model.talker_config.spk_id.keys().map(String::as_str)
    }

    /// Languages that a request may name, beside `auto`: dialects belong to speakers.
    pub fn languages(&self) -> impl Iterator<Item = &str> {
        let languages = &self.configs.model.talker_config.codec_language_id;
        languages
            .keys()
            .filter(|name| !name.ends_with("_dialect"))
            .map(String::as_str)
    }

    /// Check and lay out a request.
    ///
    /// # Errors
    /// Names the field, what is wrong with it, and what exists instead.
    pub fn build(&self, input: &SpeechInput) -> Result<TtsRequest, RowError> {
        let text = input.text.trim();
        if !text.chars().any(char::is_alphanumeric) {
            return Err(invalid(
                "text",
                "there is nothing to say: send at least one letter or digit",
            ));
        }
        let model = &self.configs.model;
        let (speaker, dialect) = self.speaker(input)?;
        let language = self.language(input, dialect)?;
        let instruct = self.instruct(input)?;
        let reference_text = self.reference_text(input)?;
        let body = self.tokenizer.encode(text);
        let ids = self.tokenizer.template_ids();
        let layout = input.layout.unwrap_or(match model.tts_model_type {
            TtsModelType::Base => TextLayout::Streamed,
            TtsModelType::CustomVoice | TtsModelType::VoiceDesign => TextLayout::Whole,
        });
        let prompt = lay_out(
            model,
            &PromptParts {
                instruct: instruct.as_deref(),
                role: [ids.im_start, ids.assistant, ids.newline],
                language,
                speaker,
                text: &body,
                reference: reference_text
                    .as_ref()
                    .map(|(ids, frames)| ReferenceText { ids, frames: *frames }),
                layout,
            },
        );
        let max_frames = self.max_frames(input, text)?;
        let min_frames = input.min_frames.unwrap_or(0);
        if min_frames > max_frames {
            return Err(invalid(
                "min_frames",
                format!("{min_frames} is more than the {max_frames} frames allowed"),
            ));
        }
        let (talker, predictor) = self.sampling(&input.sampling)?;
        Ok(TtsRequest {
            prompt,
            reference: input.reference.as_ref().map(|reference| reference.clip.clone()),
            talker,
            predictor,
            seed: input.seed,
            max_frames,
            min_tokens: min_frames.max(MIN_TOKENS),
            eos: model.talker_config.codec_eos_token_id,
            probe: None,
        })
    }

    /// The speaker row, and the dialect that the speaker speaks.
    fn speaker(&self, input: &SpeechInput) -> Result<(SpeakerPart, Option<&str>), RowError> {
        let talker = &self.configs.model.talker_config;
        match (self.configs.model.tts_model_type, &input.voice) {
            (TtsModelType::CustomVoice, Some(voice)) => {
                let Some((name, id)) = talker
                    .spk_id
                    .iter()
                    .find(|(name, _)| name.eq_ignore_ascii_case(voice))
                else {
                    let known = names(talker.spk_id.keys());
                    return Err(invalid(
                        "voice",
                        format!("there is no voice `{voice}`; voices are: {known}"),
                    ));
                };
                let dialect = match talker.spk_is_dialect.get(name) {
                    Some(Dialect::Named(dialect)) => Some(dialect.as_str()),
                    _ => None,
                };
                Ok((SpeakerPart::Id(*id), dialect))
            }
            (TtsModelType::CustomVoice, None) => Err(invalid(
                "voice",
                format!("name one of the voices: {}", names(talker.spk_id.keys())),
            )),
            (TtsModelType::VoiceDesign, None) => Ok((SpeakerPart::None, None)),
            (TtsModelType::Base, None) => Ok((SpeakerPart::Vector, None)),
            (TtsModelType::VoiceDesign, Some(_)) => Err(invalid(
                "voice",
                "a voice design model has no voices: describe one in `instruct`",
            )),
            (TtsModelType::Base, Some(_)) => Err(invalid(
                "voice",
                "a base model has no voices: send a reference clip to clone",
            )),
        }
    }

    /// The language row. A dialect speaker speaks their dialect when the language is Chinese or left open.
    fn language(&self, input: &SpeechInput, dialect: Option<&str>) -> Result<Option<u32>, RowError> {
        let languages = &self.configs.model.talker_config.codec_language_id;
        let asked = input.language.as_deref().unwrap_or(AUTO_LANGUAGE).to_lowercase();
        if asked != AUTO_LANGUAGE && !self.languages().any(|name| name == asked) {
            let known: Vec<_> = self.languages().collect();
            return Err(invalid(
                "language",
                format!(
                    "there is no language `{asked}`; languages are: auto, {}",
                    known.join(", ")
                ),
            ));
        }
        let name = match dialect {
            Some(dialect) if asked == AUTO_LANGUAGE || asked == "chinese" => dialect,
            _ => &asked,
        };
        Ok(languages.get(name).copied())
    }

    fn instruct(&self, input: &SpeechInput) -> Result<Option<Vec<u32>>, RowError> {
        let model = &self.configs.model;
        let given = input
            .instruct
            .as_deref()
            .map(str::trim)
            .filter(|text| !text.is_empty());
        match (model.tts_model_type, given) {
            (TtsModelType::VoiceDesign, None) => {
                return Err(invalid(
                    "instruct",
                    "a voice design model needs a description of the voice",
                ));
            }
            (TtsModelType::Base, Some(_)) => {
                return Err(invalid(
                    "instruct",
                    "a base model takes no instructions: leave it out",
                ));
            }
            (TtsModelType::CustomVoice, Some(_)) if !model.knows_instructions() => {
                return Err(invalid(
                    "instruct",
                    "the 0.6B models were not trained with instructions: leave it out, or use a 1.7B model",
                ));
            }
            _ => {}
        }
        let ids = self.tokenizer.template_ids();
        Ok(given.map(|text| {
            let mut turn = vec![ids.im_start];
            turn.extend(self.tokenizer.encode(&format!("user\n{text}")));
            turn.extend([ids.im_end, ids.newline]);
            turn
        }))
    }

    /// Tokens of what the reference clip says, and the clip's frames, for an in-context clone.
    fn reference_text(&self, input: &SpeechInput) -> Result<Option<(Vec<u32>, u32)>, RowError> {
        let base = self.configs.model.tts_model_type == TtsModelType::Base;
        let Some(reference) = &input.reference else {
            return if base {
                Err(invalid(
                    "reference",
                    "a base model clones a voice: send a reference clip",
                ))
            } else {
                Ok(None)
            };
        };
        if !base {
            return Err(invalid(
                "reference",
                "only base models clone voices: leave the clip out",
            ));
        }
        let text = reference
            .text
            .as_deref()
            .map(str::trim)
            .filter(|text| !text.is_empty());
        match (reference.clip.in_context, text) {
            (false, None) => Ok(None),
            (false, Some(_)) => Err(invalid(
                "reference.text",
                "a clone from the speaker vector alone does not use it: leave it out or ask for an in-context clone",
            )),
            (true, None) => Err(invalid(
                "reference.text",
                "an in-context clone needs what the clip says",
            )),
            (true, Some(text)) => {
                let frames = reference.clip.samples.len().div_ceil(SAMPLES_PER_FRAME);
                Ok(Some((self.tokenizer.encode(text), frames as u32)))
            }
        }
    }

    fn max_frames(&self, input: &SpeechInput, text: &str) -> Result<u32, RowError> {
        let cap = self.configs.generation.max_new_tokens;
        match input.max_frames {
            None => Ok(frame_budget(text, cap).max(input.min_frames.unwrap_or(0).min(cap))),
            Some(frames) if (1..=cap).contains(&frames) => Ok(frames),
            Some(frames) => Err(invalid(
                "max_frames",
                format!("{frames} is outside 1 to {cap} frames of 80 ms"),
            )),
        }
    }

    fn sampling(&self, input: &SamplingInput) -> Result<(SamplingParams, SamplingParams), RowError> {
        let check = |field: &str, value: Option<f32>, ok: fn(f32) -> bool, range: &str| match value {
            Some(value) if !ok(value) => Err(invalid(field, format!("{value} is not {range}"))),
            _ => Ok(()),
        };
        check(
            "temperature",
            input.temperature,
            |v| v > 0.0 && v <= 10.0,
            "above 0 and at most 10",
        )?;
        check(
            "top_p",
            input.top_p,
            |v| v > 0.0 && v <= 1.0,
            "above 0 and at most 1",
        )?;
        check(
            "repetition_penalty",
            input.repetition_penalty,
            |v| (1.0..=10.0).contains(&v),
            "from 1 to 10",
        )?;
        if input.greedy && (input.temperature.is_some() || input.top_p.is_some() || input.top_k.is_some()) {
            return Err(invalid(
                "greedy",
                "the likeliest code needs no temperature, top_p or top_k: leave them out",
            ));
        }
        let g = &self.configs.generation;
        let params = |sample: bool, temperature: f32, top_p: f32, top_k: u32, repetition_penalty: f32| {
            SamplingParams {
                temperature: if sample && !input.greedy {
                    input.temperature.unwrap_or(temperature)
                } else {
                    0.0
                },
                top_p: input.top_p.unwrap_or(top_p),
                top_k: input.top_k.unwrap_or(top_k),
                repetition_penalty,
            }
        };
        let penalty = input.repetition_penalty.unwrap_or(g.repetition_penalty);
        Ok((
            params(g.do_sample, g.temperature, g.top_p, g.top_k, penalty),
            params(
                g.subtalker_dosample,
                g.subtalker_temperature,
                g.subtalker_top_p,
                g.subtalker_top_k,
                1.0,
            ),
        ))
    }
}

#[cfg(test)]
mod tests;
