//! One model behind an engine of its own, and what a case comes to in it.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use laneway_device::{CpuConfig, Priority, open_cpu};
use laneway_engine::node::{Model as _, Payload};
use laneway_engine::{
    Engine, EngineConfig, EngineHandle, LaneConfig, Limits, NodeConfig, OutputEvent, ResourceConfig,
    Submission,
};
use laneway_models::qwen3_tts::Qwen3Tts;
use laneway_models::qwen3_tts::prompt::TextLayout;
use laneway_models::qwen3_tts::reference::{CODES_PER_FRAME, Reference, ReferenceClip};
use laneway_models::qwen3_tts::request::{
    CloneInput, Probe, ProbeRecord, SamplingInput, SpeechInput, TtsRequest,
};
use laneway_models_decl::{Sizing, qwen3_tts};
use laneway_plan::deployment::{DeviceKind, ModelConfig, Weights};

use super::case::Case;
use super::golden::{Manifest, Tensors};

/// Positions of a cache page.
const PAGE_SIZE: u32 = 16;

/// Longest sequence of a case, and some.
const MAX_SEQ_LEN: u32 = 512;

/// Speaker and language of cases whose manifest entry leaves them out.
const USUAL_SPEAKER: &str = "ryan";
const USUAL_LANGUAGE: &str = "english";

/// Differences of one case; `None` where there is nothing to compare.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) n_frames: usize,
    pub(super) codes_equal: Option<bool>,
    pub(super) first_wrong_frame: Option<usize>,
    pub(super) logits: Option<f32>,
    pub(super) predictor: Option<f32>,
    pub(super) waveform: Option<f32>,
    pub(super) speaker: Option<f32>,
}

impl Outcome {
    /// Codes are equal and every difference is inside the limit. A NaN is not.
    pub(super) fn passes(&self, tolerance: f32) -> bool {
        let differences = [self.logits, self.predictor, self.waveform, self.speaker];
        self.codes_equal != Some(false)
            && differences
                .iter()
                .flatten()
                .all(|difference| *difference <= tolerance)
    }
}

/// What one run gave.
struct Run {
    record: ProbeRecord,
    samples: Vec<f32>,
    reference: Option<Reference>,
}

/// A model behind an engine.
pub(super) struct Runner {
    // Before the model: its threads end first.
    _engine: Engine,
    handle: EngineHandle,
    model: Arc<Qwen3Tts>,
}

impl Runner {
    pub(super) fn start(weights: &Weights, config: Option<&ModelConfig>) -> anyhow::Result<Self> {
        let sizing = Sizing {
            device: DeviceKind::Cpu,
            page_size: PAGE_SIZE,
            max_prefill_tokens: MAX_SEQ_LEN,
        };
        let model = Arc::new(Qwen3Tts::open(weights, config, &sizing)?);
        let device = open_cpu(CpuConfig { memory_bytes: None })?;
        let (engine, handle) = Engine::start(engine_config(device, model.clone()))?;
        Ok(Runner {
            _engine: engine,
            handle,
            model,
        })
    }

    pub(super) fn verify(
        &self,
        case: &Case,
        directory: &Path,
        manifest: &Manifest,
    ) -> anyhow::Result<Outcome> {
        let golden = Tensors::of_case(directory, case.name)?;
        let codes = golden.frames::<CODES_PER_FRAME>("codes")?;
        let request = self.request(case, directory, manifest, codes.len())?;
        let mut outcome = Outcome {
            n_frames: codes.len(),
            ..Default::default()
        };
        if !case.sampled {
            let free = self.run(request.clone(), Vec::new())?;
            let made = frames_of(&free.record, &request);
            outcome.first_wrong_frame = (0..codes.len()).find(|&frame| made.get(frame) != codes.get(frame));
            outcome.codes_equal = Some(made == codes);
        }
        let forced = self.run(request, codes)?;
        let (logits, predictor) = match case.sampled {
            true => (
                ("scores", &forced.record.scores),
                ("cp_scores", &forced.record.predictor_scores),
            ),
            false => (
                ("logits", &forced.record.logits),
                ("cp_logits", &forced.record.predictor_logits),
            ),
        };
        outcome.logits = largest(golden.floats(logits.0)?, &logits.1.concat());
        outcome.predictor = largest(golden.floats(predictor.0)?, &predictor.1.concat());
        outcome.waveform = golden
            .floats("wav")?
            .map(|wanted| match wanted.len() == forced.samples.len() {
                true => largest(Some(wanted), &forced.samples).unwrap_or(f32::NAN),
                false => f32::NAN,
            });
        if let (Some(clip), Some(reference)) = (case.clip, &forced.reference) {
            let frontend = Tensors::open(directory, "audio_frontend", &format!("{clip}/"))?;
            outcome.speaker = largest(frontend.floats("spk_embedding")?, &reference.speaker);
            if let Some(made) = &reference.codes {
                let equal = made[..] == frontend.frames::<CODES_PER_FRAME>("codes")?[..];
                outcome.codes_equal = Some(outcome.codes_equal.unwrap_or(true) && equal);
            }
        }
        Ok(outcome)
    }

    fn request(
        &self,
        case: &Case,
        directory: &Path,
        manifest: &Manifest,
        n_frames: usize,
    ) -> anyhow::Result<TtsRequest> {
        let facts = manifest.facts(case.name)?;
        let reference = case.clip.map(|clip| {
            let frontend = Tensors::open(directory, "audio_frontend", &format!("{clip}/"))?;
            let samples = frontend.floats("wav")?.context("the clip is missing")?.into();
            let in_context = facts.ref_text.is_some();
            let clip = ReferenceClip {
                samples,
                sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
                in_context,
            };
            anyhow::Ok(CloneInput {
                clip,
                text: facts.ref_text.clone(),
            })
        });
        let named = case.name.starts_with("cv_");
        let input = SpeechInput {
            text: facts.text,
            voice: named.then(|| facts.speaker.unwrap_or_else(|| USUAL_SPEAKER.into())),
            language: Some(facts.language.unwrap_or_else(|| USUAL_LANGUAGE.into())),
            instruct: facts.instruct,
            reference: reference.transpose()?,
            layout: Some(if case.whole_text {
                TextLayout::Whole
            } else {
                TextLayout::Streamed
            }),
            sampling: SamplingInput {
                greedy: !case.sampled,
                ..Default::default()
            },
            seed: 0,
            max_frames: Some(n_frames as u32),
            min_frames: None,
        };
        let mut request = self.model.requests().build(&input)?;
        request.eos = facts.eos_token_id.unwrap_or(request.eos);
        Ok(request)
    }

    /// Run once, along `forced` as far as it goes.
    fn run(&self, mut request: TtsRequest, forced: Vec<[i32; CODES_PER_FRAME]>) -> anyhow::Result<Run> {
        let probe = Arc::new(Probe {
            forced,
            ..Default::default()
        });
        request.probe = Some(probe.clone());
        let payload: Payload = Arc::new(request);
        let submission = Submission {
            id: "verify".into(),
            payload,
            chunk: None,
            deadline: None,
            results: Vec::new(),
        };
        let mut events = self.handle.submit(submission)?;
        let (mut samples, mut reference) = (Vec::new(), None);
        while let Some(event) = events.blocking_recv() {
            match event {
                OutputEvent::Samples { samples: more, .. } => samples.extend(more),
                OutputEvent::Result { result, .. } => reference = result.downcast_ref::<Reference>().cloned(),
                OutputEvent::Failed(failure) => return Err(failure.into()),
                OutputEvent::Started { .. } | OutputEvent::Items { .. } | OutputEvent::Finished { .. } => {}
            }
        }
        let record = probe.record.lock().clone();
        Ok(Run {
            record,
            samples,
            reference,
        })
    }
}

/// Frames that a run made: its tokens up to the end token or the budget.
fn frames_of(record: &ProbeRecord, request: &TtsRequest) -> Vec<[i32; CODES_PER_FRAME]> {
    let ended = |codes: &&[i32; CODES_PER_FRAME]| codes[0] == request.eos as i32;
    let made = record.codes.iter().take_while(|codes| !ended(codes));
    made.take(request.max_frames as usize).copied().collect()
}

/// Largest difference over what both hold. Values that both ban are equal.
fn largest(wanted: Option<Vec<f32>>, got: &[f32]) -> Option<f32> {
    let wanted = wanted?;
    if got.is_empty() {
        return Some(f32::NAN);
    }
    let difference = |(wanted, got): (&f32, &f32)| if wanted == got { 0.0 } else { (wanted - got).abs() };
    // `f32::max` would pass over a NaN.
    let worse = |worst: f32, next: f32| {
        if next.is_nan() || next > worst {
            next
        } else {
            worst
        }
    };
    Some(wanted.iter().zip(got).map(difference).fold(0.0, worse))
}

/// The Talker on the chain, every other node on a lane of its own.
fn engine_config(device: Arc<dyn laneway_device::Device>, model: Arc<Qwen3Tts>) -> EngineConfig {
    let declaration = model.declaration();
    let lane = LaneConfig {
        priority: Priority::Normal,
        partition_sms: None,
        max_rows: 2,
    };
    let names = declaration.nodes.iter().map(|node| node.name.clone());
    let nodes: Vec<NodeConfig> = names
        .enumerate()
        .map(|(lane, node)| NodeConfig { node, lane })
        .collect();
    let pool = |resource: &laneway_plan::declaration::ResourceDecl| match resource.key.as_str() {
        qwen3_tts::TALKER_KV => ResourceConfig {
            key: resource.key.clone(),
            slots: MAX_SEQ_LEN / PAGE_SIZE,
            page_size: PAGE_SIZE,
        },
        _ => ResourceConfig {
            key: resource.key.clone(),
            slots: 2,
            page_size: 0,
        },
    };
    let resources = declaration.resources.iter().map(pool).collect();
    EngineConfig {
        device,
        lanes: vec![lane; nodes.len()],
        nodes,
        resources,
        chunks: Default::default(),
        max_prefill_tokens: MAX_SEQ_LEN as usize,
        max_seq_len: MAX_SEQ_LEN as usize,
        capture_buckets: vec![1, 2],
        playback_hz: 0,
        limits: Limits {
            max_running: 1,
            max_queue: 1,
            ..Default::default()
        },
        model,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_never_hides_a_nan_or_a_missing_value() {
        let inf = f32::NEG_INFINITY;
        assert_eq!(largest(Some(vec![1.0, inf]), &[1.5, inf]), Some(0.5));
        assert_eq!(largest(Some(vec![1.0, inf]), &[1.0, 2.0]), Some(f32::INFINITY));
        assert!(largest(Some(vec![1.0, 2.0]), &[f32::NAN, 5.0]).unwrap().is_nan());
        assert!(largest(Some(vec![1.0]), &[]).unwrap().is_nan());
        assert_eq!(largest(None, &[1.0]), None);

        let passes = |logits, codes_equal| {
            Outcome {
                logits,
                codes_equal,
                ..Default::default()
            }
            .passes(1e-3)
        };
        assert!(passes(Some(1e-4), Some(true)) && passes(None, None));
        assert!(
            !passes(Some(1e-2), Some(true)) && !passes(Some(f32::NAN), None) && !passes(None, Some(false))
        );
    }
}
