//! One step of the decoder: which windows it decodes, where their codes come from, where their samples go.
//!
//! Owns the index buffers, the code buffer and the pinned staging of both directions. A step is planned on the
//! host, launched, and read back after it landed. Its shape follows from its windows, so it is launched
//! operation by operation; a device that wants captures pads the rows to a bucket's width with windows of no
//! frames and keys a graph on [`StepShape`] around [`CodecStep::launch`].

use std::ops::Range;
use std::sync::Arc;

use laneway_device::op::{Copy, GatherRows, ScatterRows};
use laneway_device::{Buffer, BufferSpec, DType, Device, Launcher, Place, Result, Touches, View};
use laneway_engine::node::{BoundResource, EdgeRing, Item, Stage};

use super::decoder::{CodecDecoder, Pass};

/// Stages of a node's plan: the chain has a step planned while one runs.
const STAGES: usize = 2;

/// Window `i` of the index buffer is `(first frame of its pass, frames, slot)`.
const WINDOW_WORDS: usize = 3;

/// One stream's part of a step.
#[derive(Debug, Clone, Copy)]
pub struct StreamWindow<'a> {
    /// State slot.
    pub slot: u32,
    /// Position of the first item in the stream.
    pub position: usize,
    /// Frames, each by its codes and, where the edge's ring holds them, its row there.
    pub items: &'a [Item],
}

/// The shape of a step: what its operations depend on beside the contents of the buffers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Windows, and the first frame of each in the step.
    windows: Vec<Range<usize>>,
    /// Windows that each pass decodes.
    passes: Vec<Range<usize>>,
    /// Some codes come from the edge's ring.
    ring: bool,
    /// Some codes come from the host.
    host: bool,
}

impl StepShape {
    fn new(windows: &[StreamWindow<'_>], pass_frames: usize) -> Self {
        let mut shape = Self::default();
        let (mut frames, mut pass_start) = (0, 0);
        for (i, window) in windows.iter().enumerate() {
            let end = frames + window.items.len();
            shape.windows.push(frames..end);
            if end - pass_start > pass_frames || shape.passes.is_empty() {
                shape.passes.push(i..i);
                pass_start = frames;
            }
            if let Some(pass) = shape.passes.last_mut() {
                pass.end = i + 1;
            }
            frames = end;
            shape.ring |= window.items.iter().any(|item| item.ring_row.is_some());
            shape.host |= window.items.iter().any(|item| item.ring_row.is_none());
        }
        shape
    }

    /// Frames in all windows together.
    pub fn frames(&self) -> usize {
        self.windows.last().map_or(0, |window| window.end)
    }

    fn pass_frames(&self, pass: &Range<usize>) -> Range<usize> {
        self.windows[pass.start].start..self.windows[pass.end - 1].end
    }
}

/// Where the parts of a step lie in the index buffer, in words; the windows come first.
struct Parts {
    slots: usize,
    streams: usize,
    positions: usize,
    ring_rows: usize,
    host_rows: usize,
    host_codes: usize,
    end: usize,
}

impl Parts {
    fn new(windows: usize, frames: usize, codebooks: usize) -> Self {
        let slots = WINDOW_WORDS * windows;
        let streams = slots + windows;
        let [positions, ring_rows, host_rows, host_codes] = [1, 2, 3, 4].map(|i| streams + i * frames);
        Self {
            slots,
            streams,
            positions,
            ring_rows,
            host_rows,
            host_codes,
            end: host_codes + frames * codebooks,
        }
    }
}

/// Buffers of the steps of one codec node. A planned step may be replaced until it is launched, and again
/// after it landed.
#[derive(Debug)]
pub struct CodecStep {
    device: Arc<dyn Device>,
    codebooks: usize,
    samples_per_frame: usize,
    pass_frames: usize,
    indices: Buffer,
    codes: Buffer,
    stages: [StageBuffers; STAGES],
}

#[derive(Debug)]
struct StageBuffers {
    indices: Buffer,
    samples: Buffer,
    shape: StepShape,
}

impl CodecStep {
    /// Buffers for steps of at most `max_rows` windows of `max_window` frames.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        device: Arc<dyn Device>,
        decoder: &CodecDecoder,
        max_rows: usize,
        max_window: usize,
    ) -> Result<Self> {
        let frames = max_rows * max_window;
        let codebooks = decoder.codebooks();
        let buffer = |name: &str, dtype, len, place| {
            device.alloc(BufferSpec {
                name: format!("codec_{name}"),
                dtype,
                len,
                place,
            })
        };
        let words = Parts::new(max_rows, frames, codebooks).end;
        let samples = frames * decoder.samples_per_frame();
        let stage = || {
            Ok(StageBuffers {
                indices: buffer("staged_indices", DType::I32, words, Place::Pinned)?,
                samples: buffer("staged_samples", DType::F32, samples, Place::Pinned)?,
                shape: StepShape::default(),
            })
        };
        Ok(Self {
            codebooks,
            samples_per_frame: decoder.samples_per_frame(),
            pass_frames: decoder.pass_frames(),
            indices: buffer("indices", DType::I32, words, Place::Device)?,
            codes: buffer("codes", DType::I32, frames * codebooks, Place::Device)?,
            stages: [stage()?, stage()?],
            device,
        })
    }

    /// Stage a step and name what it touches: the state slots, the ring rows, the code buffer. The caller
    /// checked the windows: none empty, none above the widest, codes and ring rows in range.
    ///
    /// # Errors
    /// The device refuses the write.
    pub fn plan(
        &mut self,
        stage: Stage,
        windows: &[StreamWindow<'_>],
        pool: &BoundResource,
        ring: Option<&EdgeRing>,
        touches: &mut Touches,
    ) -> Result<()> {
        let shape = StepShape::new(windows, self.pass_frames);
        let frames = shape.frames();
        let parts = Parts::new(windows.len(), frames, self.codebooks);
        let mut words = vec![0; parts.end];
        for pass in &shape.passes {
            let first_frame = shape.pass_frames(pass).start;
            for i in pass.clone() {
                let (window, range) = (&windows[i], &shape.windows[i]);
                let slot = window.slot as i32;
                words[WINDOW_WORDS * i..][..WINDOW_WORDS].copy_from_slice(&[
                    (range.start - first_frame) as i32,
                    range.len() as i32,
                    slot,
                ]);
                words[parts.slots + i] = slot;
                touches.write(
                    pool.pool
                        .slice(window.slot as usize * pool.slot_words, pool.slot_words),
                );
                for (offset, (item, frame)) in window.items.iter().zip(range.clone()).enumerate() {
                    words[parts.streams + frame] = i as i32;
                    words[parts.positions + frame] = (window.position + offset) as i32;
                    let (ring_row, host_row) = match item.ring_row {
                        Some(row) => (row as i32, -1),
                        None => (-1, frame as i32),
                    };
                    words[parts.ring_rows + frame] = ring_row;
                    words[parts.host_rows + frame] = host_row;
                    words[parts.host_codes + frame * self.codebooks..][..self.codebooks]
                        .copy_from_slice(&item.words);
                    if let (Some(ring), Some(row)) = (ring, item.ring_row) {
                        touches.read(ring.buffer.slice(row as usize * self.codebooks, self.codebooks));
                    }
                }
            }
        }
        if shape.ring && shape.host {
            touches.write(self.codes.slice(0, frames * self.codebooks));
        }
        let staged = &mut self.stages[stage.0];
        staged.shape = shape;
        let view = staged.indices.slice(0, parts.end);
        self.device.host_write(&view, bytemuck::cast_slice(&words))
    }

    /// Queue the planned step; with `output` its samples are copied out. `ring` is the one it was planned with.
    ///
    /// # Errors
    /// Whatever the stream refuses.
    pub fn launch(
        &self,
        stage: Stage,
        launcher: &Launcher<'_>,
        decoder: &CodecDecoder,
        pool: &BoundResource,
        ring: Option<&EdgeRing>,
        output: bool,
    ) -> Result<()> {
        let staged = &self.stages[stage.0];
        let shape = &staged.shape;
        let (rows, frames) = (shape.windows.len(), shape.frames());
        let parts = Parts::new(rows, frames, self.codebooks);
        launcher.run(Copy {
            src: staged.indices.slice(0, parts.end),
            dst: self.indices.slice(0, parts.end),
        })?;
        let codes = self.gather_codes(shape, &parts, launcher, ring)?;
        for pass in &shape.passes {
            let range = shape.pass_frames(pass);
            let pass = Pass {
                frames: range.len(),
                windows: self
                    .indices
                    .slice(WINDOW_WORDS * pass.start, WINDOW_WORDS * pass.len()),
                count: pass.len(),
                slots: self.indices.slice(parts.slots, rows),
                streams: self.indices.slice(parts.streams + range.start, range.len()),
                positions: self.indices.slice(parts.positions + range.start, range.len()),
            };
            let codes = codes.slice(range.start * self.codebooks, range.len() * self.codebooks);
            let samples = decoder.run(launcher, &pool.pool.view(), pool.slot_words, &pass, &codes)?;
            if output {
                launcher.run(Copy {
                    dst: staged
                        .samples
                        .slice(range.start * self.samples_per_frame, samples.len),
                    src: samples,
                })?;
            }
        }
        Ok(())
    }

    /// The step's codes `[frames, codebooks]`: straight from the staging copy when the host brings them all,
    /// else gathered from the ring with the host's rows scattered over the gaps.
    fn gather_codes(
        &self,
        shape: &StepShape,
        parts: &Parts,
        launcher: &Launcher<'_>,
        ring: Option<&EdgeRing>,
    ) -> Result<View> {
        let (rows, width) = (shape.frames(), self.codebooks);
        let host_codes = self.indices.slice(parts.host_codes, rows * width);
        let Some(ring) = ring.filter(|_| shape.ring) else {
            return Ok(host_codes);
        };
        let codes = self.codes.slice(0, rows * width);
        launcher.run(GatherRows {
            src: ring.buffer.view(),
            indirect: true,
            index: self.indices.slice(parts.ring_rows, rows),
            rows,
            width,
            out: codes.clone(),
        })?;
        if shape.host {
            launcher.run(ScatterRows {
                src: host_codes,
                index: self.indices.slice(parts.host_rows, rows),
                rows,
                width,
                dst: codes.clone(),
            })?;
        }
        Ok(codes)
    }

    /// Samples of window `row` of a step that landed.
    ///
    /// # Errors
    /// The sanitizer found that it has not landed.
    pub fn samples(&self, stage: Stage, row: usize) -> Result<Vec<f32>> {
        let staged = &self.stages[stage.0];
        let frames = &staged.shape.windows[row];
        let view = staged.samples.slice(
            frames.start * self.samples_per_frame,
            frames.len() * self.samples_per_frame,
        );
        let mut samples = vec![0.0; view.len];
        self.device
            .host_read(&view, bytemuck::cast_slice_mut(&mut samples))?;
        Ok(samples)
    }
}

#[cfg(test)]
mod tests;
