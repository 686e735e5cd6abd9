//! One golden case: the request that it was made with, and the comparison of what came out.

use std::path::Path;

use super::golden::{GoldenFile, Manifest};
use super::{Difference, SCORE_TOLERANCE, TOLERANCE, VerifyError};
use crate::qwen3_tts::model::Qwen3Tts;
use crate::qwen3_tts::prompt::TextLayout;
use crate::qwen3_tts::reference::{CODES_PER_FRAME, ReferenceClip};
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
    clip: Option<ReferenceClip>,
}

impl Case {
    pub(super) fn open(dir: &Path, manifest: &Manifest, name: &str) -> Result<Self, VerifyError> {
        let in_context = name.starts_with("icl");
        let clip = if in_context || name == "xvec" {
            let front = GoldenFile::open(dir.join("audio_frontend.safetensors"))?;
            let which = if name == "icl_codes_longer" {
                "long"
            } else {
                "short"
            };
            Some(ReferenceClip {
                samples: front.floats(&format!("{which}/wav"))?.into(),
                sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
                in_context,
            })
        } else {
            None
        };
        Ok(Self {
            name: name.to_owned(),
            info: manifest.cases[name].clone(),
            golden: GoldenFile::open(dir.join(format!("{name}.safetensors")))?,
            clip,
        })
    }

    fn floats(&self, tensor: &str) -> Result<Vec<f32>, VerifyError> {
        self.golden.floats(&format!("{}/{tensor}", self.name))
    }

    fn codes(&self) -> Result<Vec<[i32; CODES_PER_FRAME]>, VerifyError> {
        Ok(self.golden.codes(&format!("{}/codes", self.name))?.to_vec())
    }

    /// Frames of the reference.
    pub(super) fn frames(&self) -> Result<usize, VerifyError> {
        Ok(self.codes()?.len())
    }

    /// Codes to force.
    pub(super) fn forced(&self) -> Result<Vec<[i32; CODES_PER_FRAME]>, VerifyError> {
        if self.name == SAMPLED {
            self.codes()
        } else {
            Ok(Vec::new())
        }
    }

    fn text(&self, key: &str) -> Option<String> {
        self.info[key].as_str().map(str::to_owned)
    }

    /// The request that the case was made with.
    pub(super) fn request(&self, model: &Qwen3Tts) -> Result<TtsRequest, VerifyError> {
        let custom_voice = self.name.starts_with("cv_");
        let frames = self.frames()? as u32;
        let mut input = SpeechInput {
            text: self.text("text").unwrap_or_default(),
            voice: custom_voice.then(|| self.text("speaker").unwrap_or(SPEAKER.into())),
            language: Some(self.text("language").unwrap_or(LANGUAGE.into())),
            instruct: self.text("instruct"),
            reference: self.clip.clone().map(|clip| CloneInput {
                clip,
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
        input.sampling.greedy = self.name != SAMPLED;
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

    /// Whether the codes are equal, and how much everything else differs.
    pub(super) fn compare(
        &self,
        record: &ProbeRecord,
        samples: &[f32],
    ) -> Result<(bool, Vec<Difference>), VerifyError> {
        let codes = self.codes()?;
        // A step that drew the end token has logits but no frame.
        let frames = codes.len();
        let ours = &record.codes[..frames.min(record.codes.len())];
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
        if self.name == SAMPLED {
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
        let wav = &wav[wav.len().saturating_sub(samples.len())..];
        compare("waveform", samples, wav, TOLERANCE);
        Ok((ours == codes, differences))
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
