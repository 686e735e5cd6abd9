//! Verification: copies of what a probed step computed, from the device to a request's [`ProbeRecord`].

use std::ops::Range;

use laneway_device::op::Copy;
use laneway_device::{Buffer, BufferSpec, DType, Device, Place as Memory, Result, View};

use crate::checkpoint::config::ModelConfig;
use crate::qwen3_tts::predictor::{ForcedCodes, FrameProbe};
use crate::qwen3_tts::reference::CODES_PER_FRAME;
use crate::qwen3_tts::request::ProbeRecord;
use crate::qwen3_tts::talker::{TailProbe, TalkerWorkspace};

/// Buffers of one stage.
#[derive(Debug)]
pub(super) struct ProbeBuffers {
    hidden_width: usize,
    vocab: usize,
    codebook: usize,
    passes: usize,
    /// On the device.
    scores: Buffer,
    predictor_logits: Buffer,
    predictor_scores: Buffer,
    /// Pinned.
    inputs: Buffer,
    landed: Landed,
}

/// Pinned copies of a step's results.
#[derive(Debug)]
struct Landed {
    hidden: Buffer,
    logits: Buffer,
    scores: Buffer,
    predictor_logits: Buffer,
    predictor_scores: Buffer,
}

/// A row's place in its decode step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) row: usize,
    /// Rows of the step.
    pub(super) rows: usize,
    /// Its input is the last row of the prompt.
    pub(super) ends_prompt: bool,
}

impl ProbeBuffers {
    pub(super) fn new(device: &dyn Device, config: &ModelConfig, rows: usize, tokens: usize) -> Result<Self> {
        let buffer = |name: &str, len: usize, place| {
            device.alloc(BufferSpec {
                name: format!("talker.probe.{name}"),
                dtype: DType::F32,
                len,
                place,
            })
        };
        let stack = &config.talker_config.stack;
        let (hidden_width, vocab) = (stack.hidden_size, stack.vocab_size);
        let (codebook, passes) = (config.codebook_size(), config.groups() - 1);
        let predicted = passes * rows * codebook;
        Ok(Self {
            hidden_width,
            vocab,
            codebook,
            passes,
            scores: buffer("scores", rows * vocab, Memory::Device)?,
            predictor_logits: buffer("predictor_logits", predicted, Memory::Device)?,
            predictor_scores: buffer("predictor_scores", predicted, Memory::Device)?,
            inputs: buffer("landed_inputs", tokens.max(rows) * hidden_width, Memory::Pinned)?,
            landed: Landed {
                hidden: buffer("landed_hidden", rows * hidden_width, Memory::Pinned)?,
                logits: buffer("landed_logits", rows * vocab, Memory::Pinned)?,
                scores: buffer("landed_scores", rows * vocab, Memory::Pinned)?,
                predictor_logits: buffer("landed_predictor_logits", predicted, Memory::Pinned)?,
                predictor_scores: buffer("landed_predictor_scores", predicted, Memory::Pinned)?,
            },
        })
    }

    /// Operands of the step's end.
    pub(super) fn tail(&self, rows: usize, forced: [View; 4]) -> TailProbe {
        let [codes, index, seen, seen_index] = forced;
        let predicted = self.passes * rows * self.codebook;
        TailProbe {
            scores: self.scores.slice(0, rows * self.vocab),
            frame: FrameProbe {
                forced: ForcedCodes {
                    codes,
                    index,
                    seen,
                    seen_index,
                },
                logits: self.predictor_logits.slice(0, predicted),
                scores: self.predictor_scores.slice(0, predicted),
            },
        }
    }

    /// Copy of the input embeddings.
    pub(super) fn copy_inputs(&self, embeddings: &View) -> Copy {
        Copy {
            src: embeddings.clone(),
            dst: self.inputs.slice(0, embeddings.len),
        }
    }

    /// Copies of what the step computed.
    pub(super) fn copy_results(&self, workspace: &TalkerWorkspace, rows: usize) -> [Copy; 5] {
        let copy = |from: &Buffer, to: &Buffer, len: usize| Copy {
            src: from.slice(0, len),
            dst: to.slice(0, len),
        };
        let predicted = self.passes * rows * self.codebook;
        [
            copy(workspace.hidden(), &self.landed.hidden, rows * self.hidden_width),
            copy(workspace.logits(), &self.landed.logits, rows * self.vocab),
            copy(&self.scores, &self.landed.scores, rows * self.vocab),
            copy(&self.predictor_logits, &self.landed.predictor_logits, predicted),
            copy(&self.predictor_scores, &self.landed.predictor_scores, predicted),
        ]
    }

    /// Add a landed prefill's rows `tokens` of the Talker's stack to their request's record.
    pub(super) fn record_prefill(
        &self,
        device: &dyn Device,
        tokens: Range<usize>,
        record: &mut ProbeRecord,
    ) -> Result<()> {
        let width = self.hidden_width;
        record.prompt = read(device, &self.inputs, tokens.start * width, tokens.len() * width)?;
        Ok(())
    }

    /// Add a landed frame to its request's record.
    pub(super) fn record_frame(
        &self,
        device: &dyn Device,
        place: Place,
        codes: &[i32],
        record: &mut ProbeRecord,
    ) -> Result<()> {
        let read = |buffer: &Buffer, first: usize, len: usize| read(device, buffer, first, len);
        let row = |buffer: &Buffer, width: usize| read(buffer, place.row * width, width);
        let width = self.hidden_width;
        let inputs = row(&self.inputs, width)?;
        if place.ends_prompt {
            record.prompt.extend(inputs);
        } else {
            record.inputs.push(inputs);
        }
        record.hidden.push(row(&self.landed.hidden, width)?);
        record.logits.push(row(&self.landed.logits, self.vocab)?);
        record.scores.push(row(&self.landed.scores, self.vocab)?);
        // Pass by pass on the device, together here.
        let predicted = |buffer: &Buffer| -> Result<Vec<f32>> {
            let mut all = Vec::with_capacity(self.passes * self.codebook);
            for pass in 0..self.passes {
                let first = (pass * place.rows + place.row) * self.codebook;
                all.extend(read(buffer, first, self.codebook)?);
            }
            Ok(all)
        };
        record
            .predictor_logits
            .push(predicted(&self.landed.predictor_logits)?);
        record
            .predictor_scores
            .push(predicted(&self.landed.predictor_scores)?);
        let mut frame = [0; CODES_PER_FRAME];
        frame.copy_from_slice(codes);
        record.codes.push(frame);
        Ok(())
    }
}

fn read(device: &dyn Device, buffer: &Buffer, first: usize, len: usize) -> Result<Vec<f32>> {
    let mut values = vec![0f32; len];
    device.host_read(&buffer.slice(first, len), bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}
