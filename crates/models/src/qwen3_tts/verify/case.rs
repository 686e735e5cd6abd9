//! One golden case: the request that it was made with, and the comparison of what came out.

use std::path::Path;
use std::sync::Arc;

use super::golden::{GoldenFile, Manifest};
use super::{Difference, Outcome, SCORE_TOLERANCE, TOLERANCE, VerifyError};
use crate::qwen3_tts::model::Qwen3Tts;
use crate::qwen3_tts::prompt::TextLayout;
use crate::qwen3_tts::reference::{CODES_PER_FRAME, Reference, ReferenceClip};
use crate::qwen3_tts::request::{CloneInput, ProbeRecord, SpeechInput, TtsRequest};

/// The only sampled case: only its processed scores can be compared, under the reference's own codes.
const SAMPLED: &str = "cv_sample";
/// Cases with the whole text in the prompt.
const WHOLE: [&str; 4] = ["cv_full_dialect_instruct", "vd_full", "icl_full", SAMPLED];
/// Speaker of the custom-voice cases whose manifest names none.
const SPEAKER: &str = "ryan";
/// Language of the cases whose manifest names none.
const LANGUAGE: &str = "english";

/// One case.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) name: String,
    info: serde_json::Value,
    golden: GoldenFile,
    clone: Option<CloneCase>,
}

/// A clone case's clip, and what the reference made of it.
#[derive(Debug)]
struct CloneCase {
    clip: ReferenceClip,
    speaker: Vec<f32>,
    codes: Arc<[[i32; CODES_PER_FRAME]]>,
}

impl Case {
    pub(super) fn open(dir: &Path, manifest: &Manifest, name: &str) -> Result<Self, VerifyError> {
        let in_context = name.starts_with("icl");
        let clone = if in_context || name == "xvec" {
            let front = GoldenFile::open(dir.join("audio_frontend.safetensors"))?;
            let which = if name == "icl_codes_longer" {
                "long"
            } else {
                "short"
            };
            Some(CloneCase {
                clip: ReferenceClip {
                    samples: front.floats(&format!("{which}/wav"))?.into(),
                    sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
                    in_context,
                },
                speaker: front.floats(&format!("{which}/spk_embedding"))?,
                codes: front.codes(&format!("{which}/codes"))?,
            })
        } else {
            None
        };
        Ok(Self {
            name: name.to_owned(),
            info: manifest.cases[name].clone(),
            golden: GoldenFile::open(dir.join(format!("{name}.safetensors")))?,
            clone,
        })
    }

    fn floats(&self, tensor: &str) -> Result<Vec<f32>, VerifyError> {
        self.golden.floats(&format!("{}/{tensor}", self.name))
    }

    /// The reference's codes.
    pub(super) fn codes(&self) -> Result<Vec<[i32; CODES_PER_FRAME]>, VerifyError> {
        Ok(self.golden.codes(&format!("{}/codes", self.name))?.to_vec())
    }

    /// Its codes were drawn by another random number generator: they are forced, and its scores compared.
    pub(super) fn sampled(&self) -> bool {
        self.name == SAMPLED
    }

    fn text(&self, key: &str) -> Option<String> {
        self.info[key].as_str().map(str::to_owned)
    }

    /// The request that the case was made with.
    pub(super) fn request(&self, model: &Qwen3Tts) -> Result<TtsRequest, VerifyError> {
        let custom_voice = self.name.starts_with("cv_");
        let frames = self.codes()?.len() as u32;
        let mut input = SpeechInput {
            text: self.text("text").unwrap_or_default(),
            voice: custom_voice.then(|| self.text("speaker").unwrap_or(SPEAKER.into())),
            language: Some(self.text("language").unwrap_or(LANGUAGE.into())),
            instruct: self.text("instruct"),
            reference: self.clone.as_ref().map(|clone| CloneInput {
                clip: clone.clip.clone(),
                text: self.text("ref_text"),
            }),
            layout: Some(if WHOLE.contains(&&*self.name) {
                TextLayout::Whole
            } else {
                TextLayout::Streamed
            }),
            max_frames: Some(frames),
            ..SpeechInput::default()
        };
        input.sampling.greedy = !self.sampled();
        let mut request = model
            .requests()
            .build(&input)
            .map_err(|error| VerifyError::Case {
                case: self.name.clone(),
                problem: error.to_string(),
            })?;
        if let Some(eos) = self.info["eos_token_id"].as_u64() {
            request.eos = eos as u32;
        }
        // Where the case ends by the end token, that takes a step of its own.
        if self.info["expect_frames"].as_u64().is_some() {
            request.max_frames += 1;
        }
        Ok(request)
    }

    /// First frame whose codes differ. A step that drew the end token made no frame.
    pub(super) fn first_wrong_frame(
        &self,
        record: &ProbeRecord,
        codes: &[[i32; CODES_PER_FRAME]],
    ) -> Option<usize> {
        let ends = self.info["expect_frames"].as_u64().is_some();
        let steps = codes.len() + usize::from(ends);
        let wrong = codes
            .iter()
            .enumerate()
            .find(|(frame, codes)| record.codes.get(*frame) != Some(codes));
        wrong
            .map(|(frame, _)| frame)
            .or_else(|| (record.codes.len() != steps).then_some(codes.len()))
    }

    /// Whether a clip's codes are those that the reference made of it.
    pub(super) fn reference_codes_equal(&self, reference: Option<&Reference>) -> Result<bool, VerifyError> {
        Ok(match &self.clone {
            Some(clone) if clone.clip.in_context => {
                reference.and_then(|reference| reference.codes.as_ref()) == Some(&clone.codes)
            }
            _ => true,
        })
    }

    /// How much everything but the codes differs.
    pub(super) fn compare(&self, outcome: &Outcome, frames: usize) -> Result<Vec<Difference>, VerifyError> {
        let record = &outcome.record;
        let mut differences = Vec::new();
        let mut compare = |what, got: &[f32], want: &[f32], tolerance| {
            differences.push(Difference {
                what,
                largest: largest(got, want),
                tolerance,
            });
        };
        let steps = |rows: &[Vec<f32>], n: usize| rows.iter().take(n).flatten().copied().collect::<Vec<_>>();
        // The reference ran one step more than it made frames of.
        let first = |tensor: &str, len: usize| -> Result<Vec<f32>, VerifyError> {
            let mut values = self.floats(tensor)?;
            values.truncate(len);
            Ok(values)
        };
        compare(
            "prompt",
            &record.prompt,
            &self.floats("prefill_embeds")?,
            TOLERANCE,
        );
        let inputs = steps(&record.inputs, usize::MAX);
        compare("inputs", &inputs, &first("step_embeds", inputs.len())?, TOLERANCE);
        let hidden = record
            .hidden
            .get(1..)
            .map_or_else(Vec::new, |rows| steps(rows, usize::MAX));
        compare("hidden", &hidden, &first("step_hidden", hidden.len())?, TOLERANCE);
        let logits = steps(&record.logits, usize::MAX);
        compare("logits", &logits, &first("logits", logits.len())?, TOLERANCE);
        let predicted = steps(&record.predictor_logits, frames);
        compare(
            "predictor logits",
            &predicted,
            &self.floats("cp_logits")?,
            TOLERANCE,
        );
        if self.sampled() {
            for (what, rows, tensor) in [
                ("scores", &record.scores, "scores"),
                ("predictor scores", &record.predictor_scores, "cp_scores"),
            ] {
                let scores = steps(rows, frames);
                compare(what, &scores, &first(tensor, scores.len())?, SCORE_TOLERANCE);
            }
        }
        // In front of an in-context clone's own samples the reference's waveform is cut at a rounded place.
        let wav = self.floats("wav")?;
        let wav = &wav[wav.len().saturating_sub(outcome.samples.len())..];
        compare("waveform", &outcome.samples, wav, TOLERANCE);
        if let Some(clone) = &self.clone {
            let speaker = outcome
                .reference
                .as_ref()
                .map_or(&[][..], |reference| &reference.speaker);
            compare("speaker vector", speaker, &clone.speaker, TOLERANCE);
        }
        Ok(differences)
    }
}

/// Largest absolute difference; banned scores (-inf) must be banned in both.
fn largest(got: &[f32], want: &[f32]) -> f32 {
    if got.len() != want.len() {
        return f32::INFINITY;
    }
    got.iter()
        .zip(want)
        .map(|(got, want)| match got == want {
            true => 0.0,
            // A value that is not a number is the largest difference there is.
            false => Some((got - want).abs())
                .filter(|d| !d.is_nan())
                .unwrap_or(f32::INFINITY),
        })
        .fold(0.0, f32::max)
}
