//! Filling a step's index buffers: what the rows' prompts, states and grants say, in the order of `staging`.

use std::iter::repeat_n;

use laneway_device::Touches;
use laneway_device::op::SampleRow;
use laneway_engine::node::{RowError, Stage, StepRow};

use super::buckets::{PromptBucket, bucket_of};
use super::probe::ProbeBuffers;
use super::staging::{Dims, FrameIndices, Shape};
use super::{Planned, SAMPLER, TALKER_KV, TalkerNode, granted, internal, request, row_state};
use crate::qwen3_tts::prompt::{CodecPart, PromptRow};
use crate::qwen3_tts::reference::{CODES_PER_FRAME, Reference};
use crate::qwen3_tts::request::{SamplingParams, TtsRequest};

/// Rows that cannot run, by index.
pub(super) type Refused = Vec<(usize, RowError)>;

/// One row of a step, looked up and checked.
#[derive(Debug)]
pub(super) struct PlanRow<'a> {
    request: &'a TtsRequest,
    /// Frames drawn so far: the number of the frame that a decode step draws.
    frame: u32,
    /// Sampler slot, which is also the row of the block table.
    slot: u32,
    pages: &'a [u32],
    reference: Option<&'a Reference>,
    ring_row: Option<u32>,
}

impl<'a> PlanRow<'a> {
    /// The last row of the prompt, and those in front of it.
    fn prompt(&self) -> (&'a PromptRow, &'a [PromptRow]) {
        let rows = self.request.prompt.rows.split_last();
        rows.expect("a node opens no request without a prompt")
    }

    /// Rows of the prompt that a prefill runs.
    fn prefilled(&self) -> &'a [PromptRow] {
        self.prompt().1
    }

    /// Place of a decode step's input: the last row of the prompt, then the frames behind it.
    fn decode_position(&self) -> i32 {
        (self.prefilled().len() + self.frame as usize) as i32
    }

    /// Text token of a decode step, while there is text.
    fn text(&self, padding: u32) -> Option<u32> {
        let token = match self.frame.checked_sub(1) {
            None => Some(self.prompt().0.text),
            Some(step) => self.request.prompt.trailing.get(step as usize).copied(),
        };
        token.filter(|token| *token != padding)
    }

    /// Append the codes that are added to a prompt row's text.
    fn push_codes(&self, ints: &mut Vec<i32>, row: &PromptRow, groups: usize) {
        let start = ints.len();
        ints.resize(start + groups, -1);
        match row.codec {
            CodecPart::None | CodecPart::Speaker => {}
            CodecPart::Id(id) => ints[start] = id as i32,
            CodecPart::Frame(frame) => {
                let codes = self
                    .reference
                    .and_then(|reference| reference.codes.as_deref())
                    .expect("a prompt with frames was checked to have their codes");
                ints[start..].copy_from_slice(&codes[frame as usize]);
            }
        }
    }

    /// Codes to force in this step.
    fn forced_frame(&self) -> Option<&'a [i32; CODES_PER_FRAME]> {
        self.forced().and_then(<[_]>::last)
    }

    /// Codes to force in this step, behind those of the frames before it.
    fn forced(&self) -> Option<&'a [[i32; CODES_PER_FRAME]]> {
        self.request.probe.as_ref()?.forced.get(..=self.frame as usize)
    }

    fn sample_row(&self, params: &SamplingParams) -> SampleRow {
        SampleRow {
            temperature: params.temperature,
            top_p: params.top_p,
            repetition_penalty: params.repetition_penalty,
            top_k: params.top_k as i32,
            seed_lo: self.request.seed as u32,
            seed_hi: (self.request.seed >> 32) as u32,
            frame: self.frame,
            eos: -1,
            ban_eos: 0,
            slot: self.slot as i32,
            reserved: [0; 2],
        }
    }
}

/// A step's index buffers on the host.
#[derive(Debug)]
pub(super) struct Filled {
    ints: Vec<i32>,
    params: Vec<SampleRow>,
    speakers: Vec<f32>,
    /// First row of each of the step's rows in the Talker's stack.
    first_tokens: Vec<usize>,
    planned: Planned,
}

impl Filled {
    pub(super) fn shape(&self) -> Shape {
        self.planned.shape
    }

    pub(super) fn planned(&self) -> Planned {
        self.planned
    }
}

/// A step that warm-up runs.
#[derive(Debug, Clone, Copy)]
pub(super) enum WarmUp {
    /// Padding alone.
    Prefill(PromptBucket),
    /// A decode step.
    Frame {
        /// Rows still have text.
        text: bool,
        /// 1: a row of slot 0 and page 0; 0: padding alone.
        live: usize,
        /// Rows, padding included.
        rows: usize,
    },
}

/// The record of a row that is there to fill a bucket: nothing is drawn at random, nothing is remembered.
const PADDING: SampleRow = SampleRow {
    temperature: 0.0,
    top_p: 1.0,
    repetition_penalty: 1.0,
    top_k: 0,
    seed_lo: 0,
    seed_hi: 0,
    frame: 0,
    eos: -1,
    ban_eos: 0,
    slot: -1,
    reserved: [0; 2],
};

/// One value a row, then `padding` up to `rows` of them.
fn extend_padded(ints: &mut Vec<i32>, values: impl Iterator<Item = i32>, rows: usize, padding: i32) {
    let end = ints.len() + rows;
    ints.extend(values);
    ints.resize(end, padding);
}

impl TalkerNode {
    /// Look up and check the rows of a step.
    pub(super) fn resolve<'a>(
        &self,
        rows: &mut [StepRow<'a>],
        prefill: bool,
    ) -> Result<Vec<PlanRow<'a>>, Refused> {
        let mut resolved = Vec::with_capacity(rows.len());
        let mut refused = Vec::new();
        for (i, row) in rows.iter_mut().enumerate() {
            let frame = row_state(row).launched;
            match self.resolve_row(row, frame, prefill) {
                Ok(row) => resolved.push(row),
                Err(error) => refused.push((i, error)),
            }
        }
        if refused.is_empty() {
            Ok(resolved)
        } else {
            Err(refused)
        }
    }

    fn resolve_row<'a>(&self, row: &StepRow<'a>, frame: u32, prefill: bool) -> Result<PlanRow<'a>, RowError> {
        let pages = granted(row.grants, TALKER_KV)?;
        if pages.len() > self.dims.pages_per_sequence {
            return Err(internal(format!(
                "the request holds {} pages of {TALKER_KV}; a sequence has {}",
                pages.len(),
                self.dims.pages_per_sequence
            )));
        }
        Ok(PlanRow {
            request: request(row.payload),
            frame,
            slot: granted(row.grants, SAMPLER)?[0],
            pages,
            reference: if prefill { self.reference_of(row)? } else { None },
            ring_row: row.ring_row.filter(|_| self.workspace.ring().is_some()),
        })
    }

    /// The encoded reference that a prompt needs, checked against it.
    fn reference_of<'a>(&self, row: &StepRow<'a>) -> Result<Option<&'a Reference>, RowError> {
        let prompt = &request(row.payload).prompt;
        let speaker = prompt.rows.iter().any(|row| row.codec == CodecPart::Speaker);
        if !speaker && prompt.reference_frames == 0 {
            return Ok(None);
        }
        let reference: Option<&Reference> = row.results.iter().find_map(|result| result.downcast_ref());
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
        let mut codes = reference.codes.iter().flat_map(|codes| codes.iter().flatten());
        match codes.find(|code| !(0..codebook).contains(*code)) {
            Some(code) => Err(internal(format!(
                "the encoded reference has code {code}; codes are 0 to {}",
                codebook - 1
            ))),
            None => Ok(Some(reference)),
        }
    }

    /// Pools and ring rows that the step reaches.
    pub(super) fn touch(&self, rows: &[PlanRow<'_>], shape: Shape, touches: &mut Touches) {
        let groups = self.dims.groups;
        self.workspace.touch(touches);
        if let Some(ring) = self.workspace.ring() {
            for row in rows.iter().filter_map(|row| row.ring_row) {
                touches.write(ring.slice(row as usize * groups, groups));
            }
        }
        if shape.prefill {
            touches.write(self.workspace.table());
        }
        if shape.probed {
            touches.write(self.workspace.codes(self.limits.rows, groups));
        }
    }

    /// The index buffers of a decode step.
    pub(super) fn fill_decode(&self, rows: &[PlanRow<'_>]) -> Filled {
        let probed = rows.iter().any(|row| row.request.probe.is_some());
        let padded = self.step_rows(rows.len(), probed);
        let shape = Shape {
            rows: padded,
            tokens: padded,
            prefill: false,
            probed,
        };
        let mut ints = Vec::with_capacity(self.dims.ints(shape));
        let ring_row = |row: &PlanRow<'_>| row.ring_row.map_or(-1, |ring_row| ring_row as i32);
        extend_padded(&mut ints, rows.iter().map(|row| self.code_row(row)), padded, -1);
        extend_padded(&mut ints, rows.iter().map(ring_row), padded, -1);
        FrameIndices::push_pairs(&mut ints, rows.len(), padded);
        let pad = self.talker.config().tts_pad_token_id;
        let text = || rows.iter().map(|row| row.text(pad));
        extend_padded(&mut ints, rows.iter().map(|row| row.slot as i32), padded, -1);
        extend_padded(&mut ints, rows.iter().map(PlanRow::decode_position), padded, -1);
        extend_padded(
            &mut ints,
            text().map(|text| text.unwrap_or(pad) as i32),
            padded,
            pad as i32,
        );
        if shape.probed {
            self.fill_forced(&mut ints, rows);
        }
        let first_codes = rows.iter().map(|row| SampleRow {
            eos: row.request.eos as i32,
            ban_eos: u32::from(row.frame < row.request.min_tokens),
            ..row.sample_row(&row.request.talker)
        });
        let others = rows.iter().map(|row| row.sample_row(&row.request.predictor));
        let padding = || repeat_n(PADDING, padded - rows.len());
        Filled {
            params: first_codes
                .chain(padding())
                .chain(others)
                .chain(padding())
                .collect(),
            first_tokens: Vec::new(),
            planned: Planned {
                shape,
                text: text().any(|text| text.is_some()),
                speakers: false,
            },
            ints,
            speakers: Vec::new(),
        }
    }

    /// The index buffers of a prefill step.
    pub(super) fn fill_prefill(&self, rows: &[PlanRow<'_>]) -> Filled {
        let tokens = rows.iter().map(|row| row.prefilled().len()).sum();
        let probed = rows.iter().any(|row| row.request.probe.is_some());
        let shape = |rows, tokens| Shape {
            rows,
            tokens,
            prefill: true,
            probed,
        };
        let shape = if probed || self.exact_captures {
            shape(rows.len(), tokens)
        } else {
            let bucket = bucket_of(&self.prompt_buckets, rows.len(), tokens);
            shape(bucket.rows, bucket.tokens)
        };
        self.fill_prompts(rows, shape)
    }

    /// The same, padded up to `shape`.
    fn fill_prompts(&self, rows: &[PlanRow<'_>], shape: Shape) -> Filled {
        let Dims {
            groups,
            pages_per_sequence,
            ..
        } = self.dims;
        let mut ints = Vec::with_capacity(self.dims.ints(shape));
        let end = |ints: &Vec<i32>, len: usize| ints.len() + len;
        extend_padded(
            &mut ints,
            rows.iter().map(|row| self.code_row(row)),
            shape.rows,
            -1,
        );
        extend_padded(&mut ints, rows.iter().map(|row| row.slot as i32), shape.rows, -1);
        // Entries behind the last granted page are never looked up.
        for row in rows {
            let pages = row.pages.iter().map(|page| *page as i32);
            extend_padded(&mut ints, pages, pages_per_sequence, 0);
        }
        ints.extend(repeat_n(0, (shape.rows - rows.len()) * pages_per_sequence));
        let codes_end = end(&ints, shape.rows * groups);
        for row in rows {
            row.push_codes(&mut ints, row.prompt().0, groups);
        }
        ints.resize(codes_end, -1);
        let tokens = || rows.iter().flat_map(|row| row.prefilled());
        let each = |of: fn(usize, &PlanRow<'_>, usize) -> i32| {
            let rows = rows.iter().enumerate();
            rows.flat_map(move |(i, row)| (0..row.prefilled().len()).map(move |at| of(i, row, at)))
        };
        let pad = self.talker.config().tts_pad_token_id as i32;
        extend_padded(
            &mut ints,
            tokens().map(|token| token.text as i32),
            shape.tokens,
            pad,
        );
        extend_padded(&mut ints, each(|_, row, _| row.slot as i32), shape.tokens, -1);
        extend_padded(&mut ints, each(|_, _, at| at as i32), shape.tokens, -1);
        let speaker = |i: usize, row: &PlanRow<'_>, at: usize| match row.prefilled()[at].codec {
            CodecPart::Speaker => i as i32,
            _ => -1,
        };
        extend_padded(&mut ints, each(speaker), shape.tokens, -1);
        for row in rows {
            for token in row.prefilled() {
                row.push_codes(&mut ints, token, groups);
            }
        }
        ints.resize(self.dims.ints(shape), -1);
        let first_tokens = rows.iter().scan(0, |next, row| {
            let first = *next;
            *next += row.prefilled().len();
            Some(first)
        });
        let mut vectors = Vec::new();
        if self.clones {
            let width = self.talker.config().talker_config.stack.hidden_size;
            for (i, row) in rows.iter().enumerate() {
                vectors.extend(
                    row.reference
                        .iter()
                        .flat_map(|reference| reference.speaker.iter()),
                );
                vectors.resize((i + 1) * width, 0.0);
            }
        }
        Filled {
            params: Vec::new(),
            first_tokens: first_tokens.collect(),
            planned: Planned {
                shape,
                text: true,
                speakers: self.clones,
            },
            ints,
            speakers: vectors,
        }
    }

    /// Row of the sampler pool that keeps a row's codes.
    fn code_row(&self, row: &PlanRow<'_>) -> i32 {
        self.workspace.code_row(row.slot, self.dims.groups)
    }

    /// Rows of a step. A probed step has no padding: it is launched operation by operation anyway, and its
    /// records are laid out by its rows.
    fn step_rows(&self, live: usize, probed: bool) -> usize {
        if probed { live } else { self.padded_rows(live) }
    }

    /// Forced codes, group by group, with what they replace, and the seen sets that follow from them.
    fn fill_forced(&self, ints: &mut Vec<i32>, rows: &[PlanRow<'_>]) {
        let Dims {
            groups, seen_words, ..
        } = self.dims;
        for group in 0..groups {
            ints.extend(
                rows.iter()
                    .map(|row| row.forced_frame().map_or(0, |codes| codes[group])),
            );
        }
        for group in 0..groups {
            let elements = rows.iter().enumerate();
            ints.extend(
                elements.map(|(i, row)| row.forced_frame().map_or(-1, |_| (i * groups + group) as i32)),
            );
        }
        for row in rows {
            let mut seen = vec![0u32; seen_words];
            for codes in row.forced().unwrap_or_default() {
                let first = codes[0] as usize;
                seen[first / 32] |= 1 << (first % 32);
            }
            ints.extend_from_slice(bytemuck::cast_slice(&seen));
        }
        for row in rows {
            let first = self.workspace.seen_row(row.slot, groups);
            let chunks = first..first + (seen_words / groups) as i32;
            ints.extend(chunks.map(|chunk| row.forced_frame().map_or(-1, |_| chunk)));
        }
    }

    /// Write a step's index buffers to a stage's pinned memory.
    pub(super) fn stage(&mut self, stage: Stage, filled: Filled) -> laneway_device::Result<()> {
        let Filled {
            ints,
            params,
            speakers,
            first_tokens,
            planned,
        } = filled;
        debug_assert_eq!(ints.len(), self.dims.ints(planned.shape));
        let buffers = &mut self.stages[stage.0];
        if planned.shape.probed && buffers.probe.is_none() {
            let (rows, tokens) = (self.limits.rows, self.limits.prefill_tokens);
            buffers.probe = Some(ProbeBuffers::new(
                &*self.device,
                self.talker.config(),
                rows,
                tokens,
            )?);
        }
        let staging = &buffers.staging;
        let words: &[u32] = bytemuck::cast_slice(&params);
        let parts: [(_, usize, &[u8]); 3] = [
            (&staging.ints, ints.len(), bytemuck::cast_slice(&ints)),
            (&staging.params, words.len(), bytemuck::cast_slice(words)),
            (&staging.speakers, speakers.len(), bytemuck::cast_slice(&speakers)),
        ];
        for (buffer, len, bytes) in parts.into_iter().filter(|(_, len, _)| *len > 0) {
            self.device.host_write(&buffer.slice(0, len), bytes)?;
        }
        buffers.planned = Some(planned);
        buffers.first_tokens = first_tokens;
        Ok(())
    }

    /// A step with nothing in it that a request could be.
    pub(super) fn fill_warm_up(&self, step: WarmUp) -> Filled {
        let shape = |rows, tokens, prefill| Shape {
            rows,
            tokens,
            prefill,
            probed: false,
        };
        let (text, live, rows) = match step {
            WarmUp::Prefill(PromptBucket { rows, tokens }) => {
                return self.fill_prompts(&[], shape(rows, tokens, true));
            }
            WarmUp::Frame { text, live, rows } => (text, live, rows),
        };
        let shape = shape(rows, rows, false);
        let mut ints = Vec::with_capacity(self.dims.ints(shape));
        let code_rows = repeat_n(self.workspace.code_row(0, self.dims.groups), live);
        extend_padded(&mut ints, code_rows, rows, -1);
        extend_padded(&mut ints, std::iter::empty(), rows, -1);
        FrameIndices::push_pairs(&mut ints, live, rows);
        extend_padded(&mut ints, repeat_n(0, live), rows, -1);
        extend_padded(&mut ints, repeat_n(0, live), rows, -1);
        // Text tokens.
        ints.resize(self.dims.ints(shape), 0);
        let live_row = SampleRow {
            temperature: 1.0,
            slot: 0,
            ..PADDING
        };
        let params = || repeat_n(live_row, live).chain(repeat_n(PADDING, rows - live));
        Filled {
            params: params().chain(params()).collect(),
            speakers: Vec::new(),
            first_tokens: Vec::new(),
            planned: Planned {
                shape,
                text,
                speakers: false,
            },
            ints,
        }
    }
}
