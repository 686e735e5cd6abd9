//! The Talker node: prompts in, frames of codes out. A prefill fills the caches of its prompts; a decode step then
//! draws one frame for every row, the first from the last row of the prompt.
//!
//! Owns the step's index buffers, their pinned staging and the pinned results. The chain has one step planned
//! while another runs, so everything that the host writes or reads exists twice; what only the device touches
//! exists once, because steps follow each other on one stream.

mod buckets;
mod launch;
mod plan;
mod probe;
mod staging;

use std::collections::HashMap;
use std::sync::Arc;

use laneway_device::op::SampleRow;
use laneway_device::{Buffer, BufferSpec, DType, Device, Graph, Launcher, Place, Touches};
use laneway_engine::node::{BoundResource, FinishReason};
use laneway_engine::node::{
    Grant, Node, NodeContext, Payload, PlanError, RowError, RowOutcome, RowState, Stage, StepRow, WalkId,
};
use laneway_plan::declaration::ModelDeclaration;

use crate::checkpoint::Weights;
use crate::checkpoint::config::{ModelConfig, TtsModelType};
use crate::qwen3_tts::load::LoadError;
use crate::qwen3_tts::prompt::CodecPart;
use crate::qwen3_tts::request::TtsRequest;
use crate::qwen3_tts::talker::{Talker, TalkerPools, TalkerWorkspace};
use buckets::{PromptBucket, prompt_buckets};
use probe::ProbeBuffers;
use staging::{Dims, Shape, Staging};

pub use laneway_models_decl::qwen3_tts::{SAMPLER, TALKER, TALKER_DECODE, TALKER_KV, TALKER_PREFILL};

/// Steps in flight: the one that runs and the staged one.
const STAGES: usize = 2;

/// Why the node cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum TalkerNodeError {
    /// Weights or workspace.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The declaration lacks something, or the context does not fit the model.
    #[error("node {TALKER}: {0}")]
    Context(String),
}

/// The node.
#[derive(Debug)]
pub struct TalkerNode {
    device: Arc<dyn Device>,
    talker: Talker,
    workspace: TalkerWorkspace,
    prefill: WalkId,
    decode: WalkId,
    limits: Limits,
    dims: Dims,
    /// Index buffers on the device.
    ints: Buffer,
    params: Buffer,
    speakers: Buffer,
    stages: [StageBuffers; STAGES],
    /// Captures, by their stage too: a graph names its stage's pinned memory.
    graphs: HashMap<(Stage, Planned), Graph>,
    /// Row counts that captures of decode steps are made for, ascending; the last is the most rows of a step.
    buckets: Vec<usize>,
    /// What captures of prefills are made for.
    prompt_buckets: Vec<PromptBucket>,
    /// Prompts have speaker vectors.
    clones: bool,
    /// Steps have exactly their rows; otherwise padding fills them up to a bucket.
    exact_captures: bool,
}

#[derive(Debug, Clone, Copy)]
struct Limits {
    rows: usize,
    prefill_tokens: usize,
    seq_len: usize,
}

#[derive(Debug)]
struct StageBuffers {
    staging: Staging,
    codes: Buffer,
    planned: Option<Planned>,
    /// First row of each prompt of a prefill in the Talker's stack.
    first_tokens: Vec<usize>,
    probe: Option<ProbeBuffers>,
}

/// What a stage was planned for: all that a capture of it depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Planned {
    shape: Shape,
    /// Some row still has text.
    text: bool,
    /// Some prompt may have a speaker vector.
    speakers: bool,
}

/// A request's state on the host.
#[derive(Debug, Default)]
struct TalkerRow {
    /// Frames drawn by steps that were launched.
    launched: u32,
    /// Frames drawn by steps that landed.
    landed: u32,
}

fn internal(message: String) -> RowError {
    RowError {
        invalid_argument: false,
        field: None,
        message,
    }
}

fn request(payload: &Payload) -> &TtsRequest {
    payload
        .downcast_ref()
        .expect("requests to this model carry its own payload type")
}

/// Rows of a request's prompt that a prefill runs: the last one is the input of its first decode step.
fn prefill_tokens(request: &TtsRequest) -> usize {
    request.prompt.rows.len().saturating_sub(1)
}

fn row_state<'a>(row: &'a mut StepRow<'_>) -> &'a mut TalkerRow {
    row.state
        .downcast_mut()
        .expect("the engine hands a row the state that this node opened for it")
}

fn granted<'a>(grants: &'a [Grant], key: &str) -> Result<&'a [u32], RowError> {
    grants
        .iter()
        .find(|grant| grant.resource == key)
        .map(|grant| &grant.slots[..])
        .filter(|slots| !slots.is_empty())
        .ok_or_else(|| internal(format!("the request holds nothing of {key}")))
}

impl TalkerNode {
    /// Load the node.
    ///
    /// # Errors
    /// A missing tensor, no memory, or a context that does not fit the declaration.
    pub fn build(
        declaration: &ModelDeclaration,
        config: &ModelConfig,
        weights: &Weights,
        context: NodeContext,
    ) -> Result<Self, TalkerNodeError> {
        let bad = TalkerNodeError::Context;
        let walk = |name: &str| {
            let found = declaration.walks.iter().position(|walk| walk.name == name);
            found
                .map(WalkId)
                .ok_or_else(|| bad(format!("no walk {name} is declared")))
        };
        let resource = |key: &str| -> Result<&BoundResource, TalkerNodeError> {
            let found = context.resources.iter().find(|resource| resource.key == key);
            found.ok_or_else(|| bad(format!("resource {key} is not bound")))
        };
        let (device, stream) = (&context.device, &*context.stream);
        let talker = Talker::load(&**device, stream, config, weights)?;
        let (kv, sampler) = (resource(TALKER_KV)?, resource(SAMPLER)?);
        let groups = config.groups();
        let page_elements = talker.page_elements(kv.page_size as usize);
        if kv.page_size == 0 || kv.slot_elements != page_elements {
            return Err(bad(format!(
                "a page of {TALKER_KV} has {} elements for {} positions; the model needs {page_elements}",
                kv.slot_elements, kv.page_size
            )));
        }
        let sampler_words = Talker::sampler_words(config);
        if sampler.slot_elements != sampler_words {
            return Err(bad(format!(
                "a slot of {SAMPLER} has {} words; the model needs {sampler_words}",
                sampler.slot_elements
            )));
        }
        let edge = declaration
            .stream_edges
            .iter()
            .find(|edge| edge.from.iter().any(|from| from == TALKER_DECODE))
            .ok_or_else(|| bad(format!("no stream edge leads from {TALKER_DECODE}")))?;
        let ring = context.rings.iter().find(|(name, _)| *name == edge.name);
        if edge.item_words as usize != groups {
            return Err(bad(format!(
                "an item of edge {} has {} words; a frame has {groups} codes",
                edge.name, edge.item_words
            )));
        }
        let limits = Limits {
            rows: context.max_rows.min(sampler.slots as usize),
            prefill_tokens: context.max_prefill_tokens,
            seq_len: context.max_seq_len,
        };
        let smaller = context.capture_buckets.iter().filter(|rows| **rows < limits.rows);
        let buckets = smaller.copied().chain([limits.rows]).collect();
        let pools = TalkerPools {
            kv: kv.pool.view(),
            page_size: kv.page_size as usize,
            sampler: sampler.pool.view(),
            sampler_words,
            slots: sampler.slots as usize,
            ring: ring.map(|(_, ring)| ring.buffer.view()),
            max_rows: limits.rows,
            max_prefill_tokens: limits.prefill_tokens,
            max_seq_len: limits.seq_len,
        };
        let workspace = TalkerWorkspace::new(device, stream, &talker, pools).map_err(LoadError::from)?;
        let dims = Dims {
            groups,
            pages_per_sequence: workspace.pages_per_sequence(),
            seen_words: sampler_words - groups,
        };
        let ints = dims.most_ints(limits.rows, limits.prefill_tokens);
        let (params, speakers) = (
            2 * limits.rows * SampleRow::WORDS,
            limits.rows * config.talker_config.stack.hidden_size,
        );
        let buffer = |name: &str, dtype, len, place| {
            let spec = BufferSpec {
                name: format!("talker.{name}"),
                dtype,
                len,
                place,
            };
            device.alloc(spec).map_err(LoadError::from)
        };
        let stage = || -> Result<StageBuffers, LoadError> {
            Ok(StageBuffers {
                staging: Staging {
                    ints: buffer("staged_ints", DType::I32, ints, Place::Pinned)?,
                    params: buffer("staged_params", DType::U32, params, Place::Pinned)?,
                    speakers: buffer("staged_speakers", DType::F32, speakers, Place::Pinned)?,
                },
                codes: buffer("landed_codes", DType::I32, limits.rows * groups, Place::Pinned)?,
                planned: None,
                first_tokens: Vec::new(),
                probe: None,
            })
        };
        Ok(Self {
            prefill: walk(TALKER_PREFILL)?,
            decode: walk(TALKER_DECODE)?,
            limits,
            dims,
            ints: buffer("ints", DType::I32, ints, Place::Device)?,
            params: buffer("params", DType::U32, params, Place::Device)?,
            speakers: buffer("speakers", DType::F32, speakers, Place::Device)?,
            stages: [stage()?, stage()?],
            graphs: HashMap::new(),
            exact_captures: device.facts().exact_buckets,
            buckets,
            prompt_buckets: prompt_buckets(limits.rows, limits.prefill_tokens),
            clones: config.tts_model_type == TtsModelType::Base,
            device: context.device,
            talker,
            workspace,
        })
    }

    /// A landed prefill made nothing that the host sees, unless its row `i` is probed.
    fn land_prompt(&self, stage: Stage, i: usize, row: &StepRow<'_>) -> laneway_device::Result<RowOutcome> {
        let request = request(row.payload);
        let buffers = &self.stages[stage.0];
        if let (Some(probe), Some(landed)) = (&request.probe, &buffers.probe) {
            let first = buffers.first_tokens[i];
            let tokens = first..first + prefill_tokens(request);
            landed.record_prefill(&*self.device, tokens, &mut probe.record.lock())?;
        }
        Ok(RowOutcome::default())
    }

    /// What a landed decode step did for its row `i`, which drew `frame`.
    fn land_frame(
        &self,
        stage: Stage,
        i: usize,
        row: &mut StepRow<'_>,
        frame: &[i32],
    ) -> laneway_device::Result<RowOutcome> {
        let request = request(row.payload);
        let buffers = &self.stages[stage.0];
        let state = row_state(row);
        if let (Some(probe), Some(landed), Some(planned)) = (&request.probe, &buffers.probe, buffers.planned)
        {
            let place = probe::Place {
                row: i,
                rows: planned.shape.rows,
                ends_prompt: state.landed == 0,
            };
            landed.record_frame(&*self.device, place, frame, &mut probe.record.lock())?;
        }
        state.landed += 1;
        let mut outcome = RowOutcome::default();
        if frame[0] == request.eos as i32 {
            outcome.finish = Some(FinishReason::Stop);
        } else {
            outcome.items.push(frame.into());
            if state.landed >= request.max_frames {
                outcome.finish = Some(FinishReason::Length);
            }
        }
        Ok(outcome)
    }
}

impl Node for TalkerNode {
    fn name(&self) -> &str {
        TALKER
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.limits.rows
    }

    fn open(&mut self, _walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        let request = request(payload);
        let (prompt, limits) = (request.prompt.rows.len(), &self.limits);
        let too_long = |message: String| RowError {
            invalid_argument: true,
            field: Some("text".into()),
            message,
        };
        // A decode step takes its input as codes, and a prefill runs at least a row.
        let last = request.prompt.rows.last();
        if prompt < 2 || last.is_none_or(|row| row.codec == CodecPart::Speaker) {
            return Err(internal(format!(
                "a prompt of {prompt} rows that ends with {last:?} cannot be run"
            )));
        }
        if prompt > limits.prefill_tokens {
            return Err(too_long(format!(
                "the prompt has {prompt} rows; this worker takes {}: send less text, or the text streamed",
                limits.prefill_tokens
            )));
        }
        let positions = prompt + request.max_frames as usize;
        if positions > limits.seq_len {
            return Err(too_long(format!(
                "{prompt} prompt rows and {} frames exceed the {} positions of a sequence: send less text or \
                 a smaller max_frames",
                request.max_frames, limits.seq_len
            )));
        }
        Ok(Box::new(TalkerRow::default()))
    }

    fn fits(&self, walk: WalkId, chosen: &[Payload], next: &Payload) -> bool {
        let tokens = |payload| prefill_tokens(request(payload));
        walk != self.prefill
            || chosen.iter().map(tokens).sum::<usize>() + tokens(next) <= self.limits.prefill_tokens
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        let prefill = walk == self.prefill;
        debug_assert!(prefill || walk == self.decode);
        let rows = self.resolve(rows, prefill).map_err(PlanError::Rows)?;
        let filled = match prefill {
            true => self.fill_prefill(&rows),
            false => self.fill_decode(&rows),
        };
        self.touch(&rows, filled.shape(), touches);
        Ok(self.stage(stage, filled)?)
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        _n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        self.launch(stage, launcher)
    }

    fn commit(&mut self, walk: WalkId, rows: &mut [StepRow<'_>]) {
        if walk == self.decode {
            for row in rows {
                row_state(row).launched += 1;
            }
        }
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let groups = self.dims.groups;
        let frames = if walk == self.decode { rows.len() } else { 0 };
        let landed = &self.stages[stage.0].codes;
        let mut codes = vec![0i32; frames * groups];
        let read = match frames {
            0 => Ok(()),
            _ => self.device.host_read(
                &landed.slice(0, codes.len()),
                bytemuck::cast_slice_mut(&mut codes),
            ),
        };
        let land = |(i, row): (usize, &mut Option<StepRow<'_>>)| {
            let Some(row) = row else {
                return RowOutcome::default();
            };
            let landed = read.clone().and_then(|()| match frames {
                0 => self.land_prompt(stage, i, row),
                _ => self.land_frame(stage, i, row, &codes[i * groups..][..groups]),
            });
            landed.unwrap_or_else(|error| RowOutcome {
                error: Some(internal(format!("read a landed step: {error}"))),
                ..RowOutcome::default()
            })
        };
        rows.iter_mut().enumerate().map(land).collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.run_warm_up(launcher)
    }
}

#[cfg(test)]
mod tests;
