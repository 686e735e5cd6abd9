//! Qwen3-TTS behind a running engine.

mod clone;
mod references;
#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Context as _;
use futures::stream;
use laneway_engine::node::{FinishReason, Payload, RowError};
use laneway_engine::{
    Engine, EngineConfig, EngineHandle, EngineStats, Health, OutputEvent, PushError, RequestStream,
    Submission, SubmitError,
};
use laneway_models::qwen3_tts::Qwen3Tts;
use laneway_models::qwen3_tts::prompt::TextLayout as PromptLayout;
use laneway_models::qwen3_tts::reference::{CODES_PER_FRAME, ReferenceClip as Clip};
use laneway_models::qwen3_tts::request::{CloneInput, SamplingInput, SpeechInput, TtsRequest};
use laneway_models_decl::{ModelFacts, ModelKind, Sizing, declare, qwen3_tts};
use laneway_plan::WorkerPlan;
use laneway_plan::deployment::{ModelConfig, Weights};
use laneway_plan::worker_plan::EdgeKind;
use laneway_proto::v1;
use tokio::sync::watch;

use clone::Waiting;
use references::References;

use crate::backend::{Backend, DecodeStart, FrameShape, Running, Sampling, Strength, TextLayout, Utterance};

/// Longest instruction in Unicode scalar values.
const MAX_INSTRUCT_CHARS: u32 = 1000;

/// Longest reference clip.
const MAX_REFERENCE_MS: u32 = 30_000;

/// A model, loaded and warm.
#[derive(Debug)]
pub struct EngineBackend {
    /// Ends the engine's threads when dropped.
    _engine: Engine,
    handle: EngineHandle,
    model: Arc<Qwen3Tts>,
    plan: WorkerPlan,
    facts: ModelFacts,
    shape: FrameShape,
    /// Clips that were encoded.
    references: References,
    /// Requests that wait for a clip.
    waiting: Waiting,
}

impl EngineBackend {
    /// Open the plan's device and model, and start its engine. Blocks until every node is warm.
    ///
    /// # Errors
    /// The plan asks for what this build cannot do, or whatever keeps device, model or engine from starting.
    pub fn start(plan: &WorkerPlan) -> anyhow::Result<Self> {
        let reference_leaves = plan
            .remote_edges
            .iter()
            .find(|edge| edge.kind == EdgeKind::Request);
        if let Some(edge) = reference_leaves {
            anyhow::bail!(
                "request edge {} leads to rank {}: this build delivers a reference inside one worker only; \
                 put the nodes at its ends on the same rank",
                edge.edge,
                edge.peer_rank
            );
        }
        let device = crate::device::open(plan.device, plan.device_index, plan.precision)
            .with_context(|| format!("start rank {}", plan.rank))?;
        let page_size = plan
            .resources
            .iter()
            .find(|pool| pool.key == qwen3_tts::TALKER_KV)
            .map(|pool| pool.page_size);
        let sizing = Sizing {
            device: plan.device,
            precision: plan.precision,
            // A worker without the Talker has no pages.
            page_size: page_size.unwrap_or(1),
            max_prefill_tokens: plan.max_prefill_tokens,
        };
        let model = Qwen3Tts::open(&plan.weights, plan.model_config.as_ref(), &sizing)
            .with_context(|| format!("open the weights {}", plan.weights))?;
        Self::with_model(plan, device, Arc::new(model), &sizing)
    }

    fn with_model(
        plan: &WorkerPlan,
        device: Arc<dyn laneway_device::Device>,
        model: Arc<Qwen3Tts>,
        sizing: &Sizing,
    ) -> anyhow::Result<Self> {
        let config_source = match (&plan.weights, &plan.model_config) {
            (Weights::Random { .. }, Some(config)) => config.clone(),
            _ => ModelConfig::Directory(model.checkpoint().dir.clone()),
        };
        let facts = declare(&plan.model, &config_source, sizing)
            .context("read the model's facts")?
            .facts;
        let decoder = &model.checkpoint().configs.speech.decoder_config;
        let shape = FrameShape {
            words: CODES_PER_FRAME as u32,
            codebook_size: decoder.codebook_size as u32,
        };
        let mut config = EngineConfig::from_plan(plan, device, model.clone());
        config.playback_hz = facts.sample_rate_hz;
        let (engine, handle) = Engine::start(config).context("start the engine")?;
        Ok(EngineBackend {
            _engine: engine,
            handle,
            model,
            plan: plan.clone(),
            facts,
            shape,
            references: References::default(),
            waiting: Waiting::default(),
        })
    }

    fn submit(
        &self,
        submission: Submission,
        max_frames: u32,
        prompt_positions: u32,
    ) -> Result<Running, SubmitError> {
        let events = self.handle.submit(submission)?;
        Ok(Running {
            max_frames,
            prompt_positions,
            events: Box::pin(stream::unfold(events, next)),
        })
    }

    /// Its weights come from a seed: nothing that it says means anything, its end token included.
    fn generated(&self) -> bool {
        matches!(self.plan.weights, Weights::Random { .. })
    }

    fn input(&self, utterance: Utterance) -> Result<SpeechInput, RowError> {
        let exact = utterance.sampling.exact_frames;
        let given = |text: String| Some(text).filter(|text| !text.is_empty());
        let reference = utterance.reference.map(|clip| {
            let text = given(clip.text);
            let in_context = text.is_some();
            let (samples, sample_rate_hz) = (clip.samples.into(), clip.sample_rate);
            CloneInput {
                clip: Clip {
                    samples,
                    sample_rate_hz,
                    in_context,
                },
                text,
            }
        });
        Ok(SpeechInput {
            text: utterance.text,
            voice: given(utterance.voice),
            language: given(utterance.language),
            instruct: given(utterance.instruct),
            reference,
            layout: utterance.layout.map(|layout| match layout {
                TextLayout::Streamed => PromptLayout::Streamed,
                TextLayout::Whole => PromptLayout::Whole,
            }),
            sampling: sampling_input(&utterance.sampling)?,
            seed: utterance.seed,
            max_frames: exact.or(utterance.max_frames),
            min_frames: exact,
        })
    }

    /// The checked request under this worker's own bounds.
    fn build(&self, utterance: Utterance) -> Result<TtsRequest, RowError> {
        let n_chars = utterance.text.chars().count();
        if n_chars > self.plan.max_text_chars as usize {
            let most = self.plan.max_text_chars;
            return Err(invalid(
                "text",
                format!("{n_chars} characters are more than the limit of {most}"),
            ));
        }
        let cap = self.plan.max_frames;
        if let Some(frames) = utterance.sampling.exact_frames {
            let problem = match utterance.max_frames {
                _ if !self.generated() => {
                    Some("trained weights end by their own end token; leave it out".to_owned())
                }
                Some(_) => Some("it says how many frames there are; leave max_frames out".to_owned()),
                None if frames > cap => Some(format!("{frames} frames are more than the limit of {cap}")),
                None => None,
            };
            if let Some(problem) = problem {
                return Err(invalid("sampling.exact_frames", problem));
            }
        }
        if let Some(frames) = utterance.max_frames
            && frames > cap
        {
            return Err(invalid(
                "max_frames",
                format!("{frames} frames are more than the limit of {cap}"),
            ));
        }
        let sampling = utterance.sampling;
        let mut request = self
            .model
            .requests()
            .build(&self.input(utterance)?)
            .map_err(under_wire_name)?;
        request.max_frames = request.max_frames.min(cap);
        let predictor = &mut request.predictor;
        predictor.temperature = sampling.predictor_temperature.unwrap_or(predictor.temperature);
        predictor.top_k = sampling.predictor_top_k.unwrap_or(predictor.top_k);
        predictor.top_p = sampling.predictor_top_p.unwrap_or(predictor.top_p);
        Ok(request)
    }
}

async fn next(mut events: RequestStream) -> Option<(OutputEvent, RequestStream)> {
    let event = events.recv().await?;
    Some((event, events))
}

fn invalid(field: &str, message: String) -> RowError {
    RowError {
        invalid_argument: true,
        field: Some(field.to_owned()),
        message,
    }
}

/// On the wire greedy is a temperature of 0.
fn sampling_input(sampling: &Sampling) -> Result<SamplingInput, RowError> {
    let greedy = sampling.temperature == Some(0.0);
    if greedy && (sampling.top_k.is_some() || sampling.top_p.is_some()) {
        let why = "0 takes the likeliest code, which top_k and top_p have no effect on: leave them out";
        return Err(invalid("sampling.temperature", why.into()));
    }
    Ok(SamplingInput {
        greedy,
        temperature: sampling.temperature.filter(|_| !greedy),
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        repetition_penalty: sampling.repetition_penalty,
    })
}

/// The model names its own fields; callers know those of the wire.
fn under_wire_name(mut error: RowError) -> RowError {
    if let Some(field) = &mut error.field
        && ["temperature", "top_p", "top_k", "repetition_penalty"].contains(&field.as_str())
    {
        field.insert_str(0, "sampling.");
    }
    error
}

/// The name that requests ask for a model by: the last part of where its weights come from.
fn served_name(plan: &WorkerPlan) -> String {
    let last = |path: &str| {
        path.trim_end_matches('/')
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    match (&plan.weights, &plan.model_config) {
        (Weights::Path(path), _) => last(&path.to_string_lossy()),
        (Weights::HuggingFace { repo, .. }, _) => last(repo),
        (Weights::Random { .. }, Some(config)) => last(&config.to_string()),
        (Weights::Random { .. }, None) => plan.model.clone(),
    }
}

impl Backend for EngineBackend {
    fn facts(&self) -> v1::ModelFacts {
        let facts = &self.facts;
        let voice = |voice: &laneway_models_decl::Voice| v1::Voice {
            name: voice.name.clone(),
            language: String::new(),
            dialect: voice.dialect.clone().unwrap_or_default(),
            ..Default::default()
        };
        let max_window = |edge: &laneway_plan::declaration::StreamEdgeDecl| edge.max_window;
        let declaration = laneway_engine::node::Model::declaration(&*self.model);
        v1::ModelFacts {
            model: served_name(&self.plan),
            voices: facts.voices.iter().map(voice).collect(),
            languages: facts.languages.clone(),
            sample_rate: facts.sample_rate_hz,
            samples_per_frame: facts.samples_per_frame,
            limits: Some(v1::ModelLimits {
                max_text_chars: self.plan.max_text_chars,
                max_instruct_chars: MAX_INSTRUCT_CHARS,
                max_frames: self.plan.max_frames.min(facts.max_new_tokens),
                max_chunk_frames: declaration
                    .stream_edges
                    .iter()
                    .map(max_window)
                    .max()
                    .unwrap_or_default(),
                max_reference_ms: MAX_REFERENCE_MS,
                max_utterance_chars: self.plan.max_text_chars,
            }),
            takes_instruct: facts.supports_instructions,
            needs_instruct: facts.kind == ModelKind::VoiceDesign,
            takes_reference: facts.supports_cloning,
            default_chunk: self.plan.chunks.values().next().map(Into::into),
            takes_exact_frames: self.generated(),
        }
    }

    fn frame_shape(&self) -> FrameShape {
        self.shape
    }

    fn synthesize(
        &self,
        id: &str,
        utterance: Utterance,
        deadline: Option<Instant>,
    ) -> Result<Running, SubmitError> {
        let chunk = utterance.chunk.clone();
        let request = self.build(utterance)?;
        let (max_frames, positions) = (request.max_frames, request.prompt.rows.len() as u32);
        let clip = request.reference.clone();
        let payload: Payload = Arc::new(request);
        let submission = Submission {
            id: id.into(),
            payload,
            chunk,
            deadline,
            results: Vec::new(),
        };
        match clip {
            None => self.submit(submission, max_frames, positions),
            Some(clip) => Ok(Running {
                max_frames,
                prompt_positions: positions,
                events: self.clone_voice(submission, clip)?,
            }),
        }
    }

    fn decode(
        &self,
        id: &str,
        start: DecodeStart,
        deadline: Option<Instant>,
    ) -> Result<Running, SubmitError> {
        if !start.prime.is_empty() {
            let why = "this build primes a codec inside one worker only; leave it out";
            return Err(invalid("header.prime", why.into()).into());
        }
        let most = self.plan.max_frames;
        if start.max_frames > most {
            let why = format!("{} frames are more than the limit of {most}", start.max_frames);
            return Err(invalid("header.max_frames", why).into());
        }
        // The codec's nodes need nothing of a request but its frames.
        static NO_PAYLOAD: OnceLock<Payload> = OnceLock::new();
        let payload = NO_PAYLOAD.get_or_init(|| Arc::new(())).clone();
        let submission = Submission {
            id: id.into(),
            payload,
            chunk: start.chunk,
            deadline,
            results: Vec::new(),
        };
        self.submit(submission, start.max_frames, 0)
    }

    fn push_frames(&self, id: &str, frames: &[Arc<[i32]>]) -> Result<(), PushError> {
        self.handle.push_items(id, frames)
    }

    fn end_frames(&self, id: &str) -> Result<(), PushError> {
        // Why the frames end is the Talker worker's to say.
        self.handle.end_items(id, FinishReason::Stop)
    }

    fn cancel(&self, id: &str, strength: Strength) -> bool {
        let Some(canceller) = self.handle.canceller(id) else {
            return self.waiting.cancel(id, strength);
        };
        match strength {
            Strength::Stop => canceller.stop(),
            Strength::Kill => canceller.kill(),
        }
        true
    }

    fn stats(&self) -> EngineStats {
        self.handle.stats()
    }

    fn health(&self) -> watch::Receiver<Health> {
        self.handle.health()
    }
}
