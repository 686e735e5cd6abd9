//! The Talker node: prompts in, frames of codes out, one frame a step for every row.
//!
//! Owns the step's index buffers, their pinned staging and the pinned results. The chain has one step planned
//! while another runs, so everything that the host writes or reads exists twice; what only the device touches
//! exists once, because steps follow each other on one stream.

mod probe;
mod staging;

use std::collections::HashMap;
use std::sync::Arc;

use laneway_device::op::{Copy, SampleRow, Zero};
use laneway_device::{Buffer, BufferSpec, DType, Device, DeviceError, Graph, Launcher, Place, Touches};
use laneway_engine::node::{BoundResource, FinishReason};
use laneway_engine::node::{
    Grant, Node, NodeContext, Payload, PlanError, RowError, RowOutcome, RowState, Stage, StepRow, WalkId,
};
use laneway_plan::declaration::ModelDeclaration;

use crate::checkpoint::Weights;
use crate::checkpoint::config::ModelConfig;
use crate::qwen3_tts::load::LoadError;
use crate::qwen3_tts::prompt::CodecPart;
use crate::qwen3_tts::reference::Reference;
use crate::qwen3_tts::request::{SamplingParams, TtsRequest};
use crate::qwen3_tts::talker::{DecodeStep, PrefillStep, Talker, TalkerPools, TalkerWorkspace};
use probe::ProbeBuffers;
use staging::{Dims, Indices, Shape, Staging};

/// Name of the node.
pub const TALKER: &str = "Talker";
/// Walk that runs prompts.
pub const TALKER_PREFILL: &str = "talker_prefill";
/// Walk that makes one frame a step.
pub const TALKER_DECODE: &str = "talker_decode";
/// Resource: pages of keys and values.
pub const TALKER_KV: &str = "talker_kv";
/// Resource: seen tokens and the last frame.
pub const SAMPLER: &str = "sampler";

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
    has_ring: bool,
    /// Index buffers on the device.
    ints: Buffer,
    params: Buffer,
    speakers: Buffer,
    stages: [StageBuffers; STAGES],
    /// Decode steps by rows, and whether some row still has text.
    graphs: HashMap<(usize, bool), Graph>,
    capture_rows: Vec<usize>,
    /// Captures are made for exact row counts; otherwise every step is launched operation by operation.
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
    /// First row of each of the step's rows in the Talker's stack.
    first_tokens: Vec<usize>,
    probe: Option<ProbeBuffers>,
}

/// What a stage was planned for.
#[derive(Debug, Clone, Copy)]
struct Planned {
    shape: Shape,
    ints: usize,
    text: bool,
    speakers: bool,
}

/// A request's state on the host.
#[derive(Debug, Default)]
struct TalkerRow {
    /// Tokens drawn by steps that were launched.
    launched: u32,
    /// Tokens drawn by steps that landed.
    landed: u32,
}

fn internal(message: String) -> RowError {
    RowError {
        invalid_argument: false,
        field: None,
        message,
    }
}

fn request<'a>(payload: &'a Payload) -> &'a TtsRequest {
    payload
        .downcast_ref()
        .expect("requests to this model carry its own payload type")
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
        let page_words = talker.page_words(kv.page_size as usize);
        if kv.page_size == 0 || kv.slot_words != page_words {
            return Err(bad(format!(
                "a page of {TALKER_KV} has {} words for {} positions; the model needs {page_words}",
                kv.slot_words, kv.page_size
            )));
        }
        let sampler_words = Talker::sampler_words(config);
        if sampler.slot_words != sampler_words {
            return Err(bad(format!(
                "a slot of {SAMPLER} has {} words; the model needs {sampler_words}",
                sampler.slot_words
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
            has_ring: ring.is_some(),
            ints: buffer("ints", DType::I32, ints, Place::Device)?,
            params: buffer("params", DType::U32, params, Place::Device)?,
            speakers: buffer("speakers", DType::F32, speakers, Place::Device)?,
            stages: [stage()?, stage()?],
            graphs: HashMap::new(),
            exact_captures: device.facts().exact_buckets,
            capture_rows: context.capture_buckets,
            device: context.device,
            talker,
            workspace,
        })
    }

    fn groups(&self) -> usize {
        self.dims.groups
    }

    /// Pool rows of the step, and what an item's row in the ring needs.
    fn touch(&self, rows: &[StepRow<'_>], touches: &mut Touches) {
        self.workspace.touch(touches);
        if let Some(ring) = self.workspace.ring() {
            let groups = self.groups();
            for row in rows.iter().filter_map(|row| row.ring_row) {
                touches.write(ring.slice(row as usize * groups, groups));
            }
        }
    }

    /// The parts of the index buffers that every walk has.
    fn fill_tail(&self, ints: &mut Vec<i32>, rows: &[StepRow<'_>]) -> Result<(), Vec<(usize, RowError)>> {
        let groups = self.groups();
        let mut refused = Vec::new();
        for (i, row) in rows.iter().enumerate() {
            match granted(row.grants, SAMPLER) {
                Ok(slots) => ints.push(self.workspace.code_row(slots[0], groups)),
                Err(error) => refused.push((i, error)),
            }
        }
        if !refused.is_empty() {
            return Err(refused);
        }
        ints.extend(rows.iter().map(|row| match row.ring_row {
            Some(ring_row) if self.has_ring => ring_row as i32,
            _ => -1,
        }));
        Indices::push_pairs(ints, rows.len());
        Ok(())
    }

    /// Forced codes, group by group, with what they replace, and the seen sets that follow from them.
    fn fill_forced(&self, ints: &mut Vec<i32>, rows: &mut [StepRow<'_>]) {
        let Dims {
            groups, seen_words, ..
        } = self.dims;
        let forced: Vec<_> = rows
            .iter_mut()
            .map(|row| {
                let frame = row_state(row).launched as usize;
                let probe = request(row.payload).probe.as_ref();
                probe.and_then(|probe| probe.forced.get(..=frame))
            })
            .collect();
        let frames: Vec<_> = forced.iter().map(|frames| frames.and_then(<[_]>::last)).collect();
        for group in 0..groups {
            ints.extend(frames.iter().map(|codes| codes.map_or(0, |codes| codes[group])));
        }
        for group in 0..groups {
            let element = |row: usize| (row * groups + group) as i32;
            ints.extend((0..rows.len()).map(|row| frames[row].map_or(-1, |_| element(row))));
        }
        for frames in &forced {
            let mut seen = vec![0u32; seen_words];
            for first in frames
                .into_iter()
                .flat_map(|frames| frames.iter())
                .map(|codes| codes[0])
            {
                seen[first as usize / 32] |= 1 << (first % 32);
            }
            ints.extend_from_slice(bytemuck::cast_slice(&seen));
        }
        for (row, frames) in rows.iter().zip(&forced) {
            let first =
                granted(row.grants, SAMPLER).map_or(0, |slots| self.workspace.seen_row(slots[0], groups));
            let chunks = 0..(seen_words / groups) as i32;
            ints.extend(chunks.map(|chunk| frames.map_or(-1, |_| first + chunk)));
        }
    }

    fn sample_rows(rows: &mut [StepRow<'_>]) -> Vec<SampleRow> {
        let of = |params: &SamplingParams, request: &TtsRequest, frame: u32| SampleRow {
            temperature: params.temperature,
            top_p: params.top_p,
            repetition_penalty: params.repetition_penalty,
            top_k: params.top_k as i32,
            seed_lo: request.seed as u32,
            seed_hi: (request.seed >> 32) as u32,
            frame,
            eos: -1,
            ban_eos: 0,
            slot: 0,
            reserved: [0; 2],
        };
        let talker: Vec<_> = rows
            .iter_mut()
            .map(|row| {
                let frame = row_state(row).launched;
                let request = request(row.payload);
                SampleRow {
                    eos: request.eos as i32,
                    ban_eos: u32::from(frame < request.min_tokens),
                    slot: granted(row.grants, SAMPLER).map_or(-1, |slots| slots[0] as i32),
                    ..of(&request.talker, request, frame)
                }
            })
            .collect();
        let predictor = rows.iter_mut().map(|row| {
            let frame = row_state(row).launched;
            let request = request(row.payload);
            of(&request.predictor, request, frame)
        });
        let predictor: Vec<_> = predictor.collect();
        [talker, predictor].concat()
    }

    fn plan_decode(
        &mut self,
        rows: &mut [StepRow<'_>],
    ) -> Result<(Vec<i32>, Planned), Vec<(usize, RowError)>> {
        let n = rows.len();
        let probed = rows.iter().any(|row| request(row.payload).probe.is_some());
        let shape = Shape {
            rows: n,
            tokens: n,
            prefill: false,
            probed,
        };
        let mut ints = Vec::with_capacity(self.dims.ints(shape));
        self.fill_tail(&mut ints, rows)?;
        let slots = rows
            .iter()
            .map(|row| granted(row.grants, SAMPLER).map_or(-1, |slots| slots[0] as i32));
        ints.extend(slots);
        let pad = self.talker.config().tts_pad_token_id;
        let mut text = false;
        let mut tokens = Vec::with_capacity(n);
        for row in rows.iter_mut() {
            let step = row_state(row).launched as usize - 1;
            let prompt = &request(row.payload).prompt;
            ints.push((prompt.rows.len() + step) as i32);
            let token = prompt.trailing.get(step);
            text |= token.is_some();
            tokens.push(*token.unwrap_or(&pad) as i32);
        }
        ints.extend(tokens);
        if probed {
            self.fill_forced(&mut ints, rows);
        }
        let planned = Planned {
            shape,
            ints: ints.len(),
            text,
            speakers: false,
        };
        Ok((ints, planned))
    }

    fn plan_prefill(
        &mut self,
        rows: &mut [StepRow<'_>],
        speakers: &mut Vec<f32>,
    ) -> Result<(Vec<i32>, Planned), Vec<(usize, RowError)>> {
        let (n, groups) = (rows.len(), self.groups());
        let pages_per_sequence = self.workspace.pages_per_sequence();
        let tokens = rows
            .iter()
            .map(|row| request(row.payload).prompt.rows.len())
            .sum();
        let probed = rows.iter().any(|row| request(row.payload).probe.is_some());
        let shape = Shape {
            rows: n,
            tokens,
            prefill: true,
            probed,
        };
        let mut refused = Vec::new();
        let mut references = Vec::with_capacity(n);
        for (i, row) in rows.iter().enumerate() {
            let checked = self.reference_of(row).and_then(|reference| {
                let pages = granted(row.grants, TALKER_KV)?;
                if pages.len() > pages_per_sequence {
                    return Err(internal(format!(
                        "the request holds {} pages of {TALKER_KV}; a sequence has {pages_per_sequence}",
                        pages.len()
                    )));
                }
                Ok(reference)
            });
            match checked {
                Ok(reference) => references.push(reference),
                Err(error) => refused.push((i, error)),
            }
        }
        if !refused.is_empty() {
            return Err(refused);
        }
        let mut ints = Vec::with_capacity(self.dims.ints(shape));
        self.fill_tail(&mut ints, rows)?;
        let mut end = 0;
        for row in rows.iter() {
            end += request(row.payload).prompt.rows.len() as i32;
            ints.push(end - 1);
        }
        let slots: Vec<i32> = rows
            .iter()
            .map(|row| granted(row.grants, SAMPLER).map_or(-1, |slots| slots[0] as i32))
            .collect();
        ints.extend(&slots);
        for row in rows.iter() {
            let pages = granted(row.grants, TALKER_KV).unwrap_or_default();
            ints.extend(pages.iter().map(|page| *page as i32));
            // Rows behind the last granted page are never looked up.
            ints.extend(std::iter::repeat_n(0, pages_per_sequence - pages.len()));
        }
        let prompts = || {
            rows.iter()
                .map(|row| &request(row.payload).prompt.rows)
                .enumerate()
        };
        ints.extend(prompts().flat_map(|(_, prompt)| prompt.iter().map(|row| row.text as i32)));
        ints.extend(prompts().flat_map(|(i, prompt)| std::iter::repeat_n(slots[i], prompt.len())));
        ints.extend(prompts().flat_map(|(_, prompt)| 0..prompt.len() as i32));
        let mut with_speaker = false;
        for (i, prompt) in prompts() {
            ints.extend(prompt.iter().map(|row| match row.codec {
                CodecPart::Speaker => {
                    with_speaker = true;
                    i as i32
                }
                _ => -1,
            }));
        }
        for (i, prompt) in prompts() {
            for row in prompt {
                let start = ints.len();
                ints.resize(start + groups, -1);
                match row.codec {
                    CodecPart::None | CodecPart::Speaker => {}
                    CodecPart::Id(id) => ints[start] = id as i32,
                    CodecPart::Frame(frame) => {
                        let codes = references[i].and_then(|reference| reference.codes.as_ref());
                        let codes = codes.expect("a prompt with frames was checked to have their codes");
                        ints[start..].copy_from_slice(&codes[frame as usize]);
                    }
                }
            }
        }
        if probed {
            self.fill_forced(&mut ints, rows);
        }
        if with_speaker {
            let width = self.talker.config().talker_config.stack.hidden_size;
            for reference in &references {
                match reference {
                    Some(reference) => speakers.extend_from_slice(&reference.speaker),
                    None => speakers.resize(speakers.len() + width, 0.0),
                }
            }
        }
        let planned = Planned {
            shape,
            ints: ints.len(),
            text: true,
            speakers: with_speaker,
        };
        Ok((ints, planned))
    }

    /// The encoded reference that a prompt needs, checked against it.
    fn reference_of<'a>(&self, row: &StepRow<'a>) -> Result<Option<&'a Reference>, RowError> {
        let prompt = &request(row.payload).prompt;
        let speaker = prompt.rows.iter().any(|row| row.codec == CodecPart::Speaker);
        let reference: Option<&Reference> = row.results.iter().find_map(|result| result.downcast_ref());
        if !speaker && prompt.reference_frames == 0 {
            return Ok(None);
        }
        let reference = reference.ok_or_else(|| internal("the encoded reference is missing".into()))?;
        let width = self.talker.config().talker_config.stack.hidden_size;
        let frames = reference.codes.as_ref().map_or(0, |codes| codes.len());
        if reference.speaker.len() != width || frames < prompt.reference_frames as usize {
            return Err(internal(format!(
                "the encoded reference has a vector of {} and {frames} frames; the prompt needs {width} and {}",
                reference.speaker.len(),
                prompt.reference_frames
            )));
        }
        let codebook = self.talker.config().codebook_size() as i32;
        let codes = reference.codes.iter().flat_map(|codes| codes.iter().flatten());
        match codes.into_iter().find(|code| !(0..codebook).contains(*code)) {
            Some(code) => Err(internal(format!(
                "the encoded reference has code {code}; codes are 0 to {}",
                codebook - 1
            ))),
            None => Ok(Some(reference)),
        }
    }

    fn stage_rows(
        &mut self,
        stage: Stage,
        ints: &[i32],
        params: &[SampleRow],
        speakers: &[f32],
        planned: Planned,
    ) -> laneway_device::Result<()> {
        if planned.shape.probed && self.stages[stage.0].probe.is_none() {
            let buffers = ProbeBuffers::new(
                &*self.device,
                self.talker.config(),
                self.limits.rows,
                self.limits.prefill_tokens,
            )?;
            self.stages[stage.0].probe = Some(buffers);
        }
        let buffers = &mut self.stages[stage.0];
        let staging = &buffers.staging;
        let params: &[u32] = bytemuck::cast_slice(params);
        self.device
            .host_write(&staging.ints.slice(0, ints.len()), bytemuck::cast_slice(ints))?;
        self.device.host_write(
            &staging.params.slice(0, params.len()),
            bytemuck::cast_slice(params),
        )?;
        if !speakers.is_empty() {
            self.device.host_write(
                &staging.speakers.slice(0, speakers.len()),
                bytemuck::cast_slice(speakers),
            )?;
        }
        buffers.planned = Some(planned);
        Ok(())
    }

    /// Views of the device's index buffers for a step of this shape.
    fn indices(&self, shape: Shape) -> Indices {
        Indices::new(shape, &self.ints, &self.params, self.dims)
    }

    fn decode_step(&self, planned: Planned, stage: Option<Stage>) -> DecodeStep {
        let indices = self.indices(planned.shape);
        DecodeStep {
            sequences: indices.sequences.clone(),
            positions: indices.positions.clone(),
            text: planned.text.then(|| indices.text.clone()),
            tail: indices.tail(stage.and_then(|stage| self.stages[stage.0].probe.as_ref())),
        }
    }

    fn prefill_step(&self, planned: Planned, stage: Stage) -> PrefillStep {
        let shape = planned.shape;
        let indices = self.indices(shape);
        let probe = self.stages[stage.0].probe.as_ref().filter(|_| shape.probed);
        let prefill = indices.prefill.as_ref().expect("a prefill's shape has its parts");
        let width = self.talker.config().talker_config.stack.hidden_size;
        PrefillStep {
            tokens: shape.tokens,
            text: indices.text.clone(),
            codes: prefill.codes.clone(),
            speaker_rows: planned.speakers.then(|| prefill.speaker_rows.clone()),
            speakers: self.speakers.slice(0, shape.rows * width),
            sequences: indices.sequences.clone(),
            positions: indices.positions.clone(),
            last: prefill.last.clone(),
            pages: prefill.pages.clone(),
            slots: prefill.slots.clone(),
            tail: indices.tail(probe),
        }
    }

    fn launch(&mut self, stage: Stage, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        let buffers = &self.stages[stage.0];
        let planned = buffers.planned.ok_or_else(|| DeviceError::BadOperation {
            op: "forward",
            problem: format!("stage {} of node {TALKER} was not planned", stage.0),
        })?;
        let Planned {
            shape,
            ints,
            speakers,
            ..
        } = planned;
        let staging = &buffers.staging;
        let upload = |from: &Buffer, to: &Buffer, len: usize| {
            launcher.run(Copy {
                src: from.slice(0, len),
                dst: to.slice(0, len),
            })
        };
        upload(&staging.ints, &self.ints, ints)?;
        upload(&staging.params, &self.params, 2 * shape.rows * SampleRow::WORDS)?;
        if speakers {
            let width = self.talker.config().talker_config.stack.hidden_size;
            upload(&staging.speakers, &self.speakers, shape.rows * width)?;
        }
        let (talker, w) = (&self.talker, &self.workspace);
        let probe = buffers.probe.as_ref().filter(|_| shape.probed);
        if shape.prefill {
            let step = self.prefill_step(planned, stage);
            talker.embed_prefill(launcher, w, &step)?;
            if let Some(probe) = probe {
                launcher.run(probe.copy_inputs(&talker.embeddings(w, shape.tokens)))?;
            }
            talker.run_prefill(launcher, w, &step)?;
        } else if let Some(probe) = probe {
            let step = self.decode_step(planned, Some(stage));
            talker.embed_decode(launcher, w, &step)?;
            launcher.run(probe.copy_inputs(&talker.embeddings(w, shape.tokens)))?;
            talker.run_decode(launcher, w, &step)?;
        } else if self.exact_captures {
            let graph = self.graph(planned, launcher)?;
            launcher.stream.replay(&graph, launcher.touches)?;
        } else {
            let step = self.decode_step(planned, None);
            talker.embed_decode(launcher, w, &step)?;
            talker.run_decode(launcher, w, &step)?;
        }
        let buffers = &self.stages[stage.0];
        if let Some(probe) = buffers.probe.as_ref().filter(|_| shape.probed) {
            for copy in probe.copy_results(&self.workspace, shape.rows) {
                launcher.run(copy)?;
            }
        }
        launcher.run(
            self.talker
                .copy_codes(&self.workspace, shape.rows, &buffers.codes),
        )
    }

    /// The capture of a decode step of this shape. Recording one costs the CPU device no more than building
    /// its operations, so a row count that warm-up did not foresee is captured when it first comes.
    fn graph(&mut self, planned: Planned, launcher: &Launcher<'_>) -> laneway_device::Result<Graph> {
        let key = (planned.shape.rows, planned.text);
        if let Some(graph) = self.graphs.get(&key) {
            return Ok(graph.clone());
        }
        let step = self.decode_step(planned, None);
        let (talker, workspace) = (&self.talker, &self.workspace);
        let graph = launcher.stream.capture(&mut |stream| {
            let touches = Touches::none();
            let launcher = Launcher {
                stream,
                touches: &touches,
            };
            talker.embed_decode(&launcher, workspace, &step)?;
            talker.run_decode(&launcher, workspace, &step)
        })?;
        self.graphs.insert(key, graph.clone());
        Ok(graph)
    }

    /// One row of slot 0 and page 0, with nothing in it that a request could be: prefill or decode.
    fn warm_up_step(
        &mut self,
        prefill: bool,
        text: bool,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        let groups = self.groups();
        let shape = Shape {
            rows: 1,
            tokens: 1,
            prefill,
            probed: false,
        };
        let mut ints = vec![self.workspace.code_row(0, groups), -1];
        Indices::push_pairs(&mut ints, 1);
        ints.resize(self.dims.ints(shape), 0);
        let row = SampleRow {
            temperature: 1.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            top_k: 0,
            seed_lo: 0,
            seed_hi: 0,
            frame: 0,
            eos: -1,
            ban_eos: 0,
            slot: 0,
            reserved: [0; 2],
        };
        let planned = Planned {
            shape,
            ints: ints.len(),
            text,
            speakers: false,
        };
        self.stage_rows(Stage(0), &ints, &[row; 2], &[], planned)?;
        let mut touches = Touches::none();
        self.workspace.touch(&mut touches);
        touches.write(self.workspace.table());
        if let Some(ring) = self.workspace.ring() {
            touches.write(ring.slice(0, groups));
        }
        let launcher = Launcher {
            stream: launcher.stream,
            touches: &touches,
        };
        self.launch(Stage(0), &launcher)
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
        let rows = |payload| request(payload).prompt.rows.len();
        walk != self.prefill
            || chosen.iter().map(rows).sum::<usize>() + rows(next) <= self.limits.prefill_tokens
    }

    fn plan(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        let mut speakers = Vec::new();
        let planned = if walk == self.prefill {
            self.plan_prefill(rows, &mut speakers)
        } else {
            debug_assert!(walk == self.decode);
            self.plan_decode(rows)
        };
        let (ints, planned) = planned.map_err(PlanError::Rows)?;
        let params = Self::sample_rows(rows);
        let first_tokens = &mut self.stages[stage.0].first_tokens;
        first_tokens.clear();
        let mut next = 0;
        for row in rows.iter() {
            first_tokens.push(next);
            next += match planned.shape.prefill {
                true => request(row.payload).prompt.rows.len(),
                false => 1,
            };
        }
        self.stage_rows(stage, &ints, &params, &speakers, planned)?;
        self.touch(rows, touches);
        if planned.shape.prefill {
            touches.write(self.workspace.table());
        }
        if planned.shape.probed {
            touches.write(self.workspace.codes(self.limits.rows, self.groups()));
        }
        Ok(())
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

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        for row in rows {
            row_state(row).launched += 1;
        }
    }

    fn postprocess(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let groups = self.groups();
        let buffers = &self.stages[stage.0];
        let mut codes = vec![0i32; rows.len() * groups];
        let read = self.device.host_read(
            &buffers.codes.slice(0, codes.len()),
            bytemuck::cast_slice_mut(&mut codes),
        );
        let probed = buffers
            .probe
            .as_ref()
            .zip(buffers.planned)
            .filter(|(_, planned)| planned.shape.probed);
        let mut outcomes = Vec::with_capacity(rows.len());
        for (i, row) in rows.iter_mut().enumerate() {
            let Some(row) = row else {
                outcomes.push(RowOutcome::default());
                continue;
            };
            if let Err(error) = &read {
                outcomes.push(RowOutcome {
                    error: Some(internal(format!("read codes: {error}"))),
                    ..RowOutcome::default()
                });
                continue;
            }
            let frame = &codes[i * groups..(i + 1) * groups];
            let request = request(row.payload);
            if let Some((probe_buffers, planned)) = &probed {
                let tokens = if planned.shape.prefill {
                    request.prompt.rows.len()
                } else {
                    1
                };
                if let Some(probe) = &request.probe {
                    let result = probe_buffers.record(
                        &*self.device,
                        probe::Place {
                            row: i,
                            rows: planned.shape.rows,
                            first_token: buffers.first_tokens[i],
                            tokens,
                            prefill: planned.shape.prefill,
                        },
                        frame,
                        &mut probe.record.lock(),
                    );
                    if let Err(error) = result {
                        outcomes.push(RowOutcome {
                            error: Some(internal(format!("read a probe: {error}"))),
                            ..RowOutcome::default()
                        });
                        continue;
                    }
                }
            }
            let state = row_state(row);
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
            outcomes.push(outcome);
        }
        outcomes
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        self.warm_up_step(true, true, launcher)?;
        // What follows writes the staging buffers again.
        self.settle(launcher)?;
        for text in [true, false] {
            self.warm_up_step(false, text, launcher)?;
            self.settle(launcher)?;
        }
        if self.exact_captures {
            for rows in self.capture_rows.clone() {
                for text in [true, false] {
                    let shape = Shape {
                        rows: rows.min(self.limits.rows),
                        tokens: rows.min(self.limits.rows),
                        prefill: false,
                        probed: false,
                    };
                    let planned = Planned {
                        shape,
                        ints: 0,
                        text,
                        speakers: false,
                    };
                    self.graph(planned, launcher)?;
                }
            }
        }
        let sampler = self.workspace.sampler_slot(0);
        let mut touches = Touches::none();
        touches.write(sampler.clone());
        Launcher {
            stream: launcher.stream,
            touches: &touches,
        }
        .run(Zero { dst: sampler })
    }
}

impl TalkerNode {
    fn settle(&self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        launcher.stream.record()?.synchronize(WARM_UP_DEADLINE)
    }
}

/// Warm-up waits this long for one step.
const WARM_UP_DEADLINE: std::time::Duration = std::time::Duration::from_secs(300);

#[cfg(test)]
mod tests;
