//! One golden case: the request that it was made with, and the comparison of what came out.

use std::path::Path;
use std::sync::Arc;

use super::compare::{
    BF16_RELATIVE_TOLERANCE, Criterion, Difference, LogitTolerance, Measure, SCORE_TOLERANCE, TOLERANCE,
};
use super::golden::{GoldenFile, Manifest};
use super::{Outcome, VerifyError};
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

    /// Share of the reference's codes that a free run drew too.
    pub(super) fn agreement(&self, record: &ProbeRecord, codes: &[[i32; CODES_PER_FRAME]]) -> f32 {
        let equal = |(got, want): (&[i32; CODES_PER_FRAME], &[i32; CODES_PER_FRAME])| {
            got.iter().zip(want).filter(|(got, want)| got == want).count()
        };
        let n_equal: usize = record.codes.iter().zip(codes).map(equal).sum();
        n_equal as f32 / (codes.len() * CODES_PER_FRAME).max(1) as f32
    }

    /// What the reference made of the clip, to stand in for what this build makes of it.
    pub(super) fn reference(&self) -> Option<Reference> {
        self.clone.as_ref().map(|clone| Reference {
            speaker: clone.speaker.clone().into(),
            codes: clone.clip.in_context.then(|| clone.codes.clone()),
        })
    }

    /// How much everything but the codes differs.
    pub(super) fn compare(
        &self,
        outcome: &Outcome,
        frames: usize,
        criterion: Criterion,
    ) -> Result<Vec<Difference>, VerifyError> {
        match criterion {
            Criterion::Exact => self.compare_exact(outcome, frames),
            Criterion::Rounded(tolerance) => self.compare_rounded(outcome, frames, tolerance),
        }
    }

    fn compare_exact(&self, outcome: &Outcome, frames: usize) -> Result<Vec<Difference>, VerifyError> {
        let record = &outcome.record;
        let mut differences = Vec::new();
        let mut compare = |what, got: &[f32], want: &[f32], tolerance| {
            differences.push(Difference::of(what, Measure::Largest, got, want, tolerance));
        };
        compare(
            "prompt",
            &record.prompt,
            &self.floats("prefill_embeds")?,
            TOLERANCE,
        );
        let inputs = steps(&record.inputs, usize::MAX);
        compare(
            "inputs",
            &inputs,
            &self.first("step_embeds", inputs.len())?,
            TOLERANCE,
        );
        let hidden = record
            .hidden
            .get(1..)
            .map_or_else(Vec::new, |rows| steps(rows, usize::MAX));
        compare(
            "hidden",
            &hidden,
            &self.first("step_hidden", hidden.len())?,
            TOLERANCE,
        );
        let (logits, predicted) = self.logits(record, frames)?;
        compare("logits", &logits.got, &logits.want, TOLERANCE);
        compare("predictor logits", &predicted.got, &predicted.want, TOLERANCE);
        if self.sampled() {
            for (what, rows, tensor) in [
                ("scores", &record.scores, "scores"),
                ("predictor scores", &record.predictor_scores, "cp_scores"),
            ] {
                let scores = steps(rows, frames);
                compare(what, &scores, &self.first(tensor, scores.len())?, SCORE_TOLERANCE);
            }
        }
        compare("waveform", &outcome.samples, &self.waveform(outcome)?, TOLERANCE);
        if let Some(clone) = &self.clone {
            compare("speaker vector", outcome.speaker(), &clone.speaker, TOLERANCE);
        }
        Ok(differences)
    }

    fn compare_rounded(
        &self,
        outcome: &Outcome,
        frames: usize,
        tolerance: LogitTolerance,
    ) -> Result<Vec<Difference>, VerifyError> {
        let (logits, predicted) = self.logits(&outcome.record, frames)?;
        let mut differences = vec![
            Difference::of("logits", Measure::Rms, &logits.got, &logits.want, tolerance.first),
            Difference::of(
                "predictor logits",
                Measure::Rms,
                &predicted.got,
                &predicted.want,
                tolerance.predictor,
            ),
        ];
        let mut relative = |what, got: &[f32], want: &[f32]| {
            let tolerance = BF16_RELATIVE_TOLERANCE;
            differences.push(Difference::of(what, Measure::Relative, got, want, tolerance));
        };
        relative("waveform", &outcome.samples, &self.waveform(outcome)?);
        if let Some(clone) = &self.clone {
            relative("speaker vector", outcome.speaker(), &clone.speaker);
        }
        Ok(differences)
    }

    /// Logits of the first code and of the others.
    fn logits(&self, record: &ProbeRecord, frames: usize) -> Result<(Pair, Pair), VerifyError> {
        let got = steps(&record.logits, usize::MAX);
        let want = self.first("logits", got.len())?;
        let predicted = Pair {
            got: steps(&record.predictor_logits, frames),
            want: self.floats("cp_logits")?,
        };
        Ok((Pair { got, want }, predicted))
    }

    /// The start of a tensor: the reference ran one step more than it made frames of.
    fn first(&self, tensor: &str, len: usize) -> Result<Vec<f32>, VerifyError> {
        let mut values = self.floats(tensor)?;
        values.truncate(len);
        Ok(values)
    }

    /// The reference's samples: in front of an in-context clone's own its waveform is cut at a rounded place.
    fn waveform(&self, outcome: &Outcome) -> Result<Vec<f32>, VerifyError> {
        let mut wav = self.floats("wav")?;
        wav.drain(..wav.len().saturating_sub(outcome.samples.len()));
        Ok(wav)
    }
}

/// What this build computed, and the reference.
struct Pair {
    got: Vec<f32>,
    want: Vec<f32>,
}

fn steps(rows: &[Vec<f32>], n: usize) -> Vec<f32> {
    rows.iter().take(n).flatten().copied().collect()
}
