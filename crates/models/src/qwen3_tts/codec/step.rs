//! One step of the decoder: which windows it decodes, where their codes come from, where their samples go.
//!
//! Owns the index buffers, the code buffer and the pinned staging of both directions. A step is planned on the
//! host, launched, and read back after it landed. It consists of passes; each uploads its index block, runs,
//! and has its samples copied out. Where captures are for buckets, padding fills a pass up to a number of frames
//! that there is a graph for: frames of no stream, and windows of no frames. Otherwise a pass has exactly the
//! shape of its windows and is launched operation by operation.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use laneway_device::op::{Copy, GatherRows, ScatterRows};
use laneway_device::{
    Buffer, BufferSpec, DType, Device, DeviceError, Graph, Launcher, Place, Result, Touches, View,
};
use laneway_engine::node::{BoundResource, EdgeRing, Item, Stage};
use laneway_engine::{SamplePool, Samples};

use super::decoder::{CodecDecoder, Pass};

/// Stages of a node's plan: the chain has a step planned while one runs.
const STAGES: usize = 2;

/// Window `i` of an index block is `(first frame of its pass, frames, slot)`.
const WINDOW_WORDS: usize = 3;

/// Buckets in an octave of frames: padding is less than a fourth of what is decoded.
const BUCKETS_PER_OCTAVE: usize = 4;

/// Windows of each row whose memory is kept for the next: one is written while listeners have a few.
const WINDOWS_HELD: usize = 3;

/// Warm-up waits this long for one pass.
const WARM_UP_DEADLINE: Duration = Duration::from_secs(300);

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

/// What the operations of a pass depend on beside the contents of the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PassShape {
    /// Windows, those of no frames included.
    windows: usize,
    /// Frames, padding included.
    frames: usize,
    /// Codes come from the edge's ring.
    ring: bool,
    /// Codes come from the host.
    host: bool,
}

/// One pass of a planned step.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PlannedPass {
    shape: PassShape,
    /// Its frames in the step, without padding.
    frames: Range<usize>,
}

/// Where the parts of a pass lie in its index block, in words; the windows come first.
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

/// Frames that captures are made for: every number to [`BUCKETS_PER_OCTAVE`], then so many an octave, and `most`.
fn buckets(most: usize) -> Vec<usize> {
    let spacing = |frames: usize| (frames.next_power_of_two() / 2 / BUCKETS_PER_OCTAVE).max(1);
    let next = |frames: &usize| Some(frames + spacing(frames + 1));
    std::iter::successors(Some(1), next)
        .take_while(|frames| *frames < most)
        .chain([most])
        .collect()
}

/// Windows and frames of each pass, in the step. A stream's window is never split.
fn split(windows: &[StreamWindow<'_>], pass_frames: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let mut passes: Vec<(Range<usize>, Range<usize>)> = Vec::new();
    let mut start = 0;
    for (i, window) in windows.iter().enumerate() {
        let end = start + window.items.len();
        match passes.last_mut() {
            Some((windows, frames)) if end - frames.start <= pass_frames => {
                windows.end = i + 1;
                frames.end = end;
            }
            _ => passes.push((i..i + 1, start..end)),
        }
        start = end;
    }
    passes
}

/// Buffers of the steps of one codec node. A planned step may be replaced until it is launched, and again
/// after it landed.
#[derive(Debug)]
pub struct CodecStep {
    device: Arc<dyn Device>,
    codebooks: usize,
    samples_per_frame: usize,
    /// Most windows and frames of a pass.
    pass_windows: usize,
    pass_frames: usize,
    /// Index block and codes of the pass that runs.
    indices: Buffer,
    codes: Buffer,
    stages: [StageBuffers; STAGES],
    /// Memory of the samples that listeners have.
    handed_out: Arc<SamplePool>,
    /// Frames that passes are filled up to, ascending; `None`: passes have their own shape.
    buckets: Option<Vec<usize>>,
    /// Captures by the stream that they were made on, and by frames: a node may run on more than one.
    graphs: BTreeMap<(u64, usize), Graph>,
}

#[derive(Debug)]
struct StageBuffers {
    /// Index blocks, pass by pass.
    indices: Buffer,
    samples: Buffer,
    passes: Vec<PlannedPass>,
    /// Frames of each window of the step.
    windows: Vec<Range<usize>>,
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
        let pass_frames = decoder.pass_frames().min(frames);
        let pass_windows = max_rows.min(pass_frames);
        let words = Parts::new(pass_windows, pass_frames, codebooks).end;
        // Two passes one behind the other have more frames than fit one, or they were one.
        let passes = (2 * frames.div_ceil(pass_frames)).min(max_rows);
        let samples = frames * decoder.samples_per_frame();
        let stage = || {
            Ok(StageBuffers {
                indices: buffer("staged_indices", DType::I32, passes * words, Place::Pinned)?,
                samples: buffer("staged_samples", DType::F32, samples, Place::Pinned)?,
                passes: Vec::new(),
                windows: Vec::new(),
            })
        };
        Ok(Self {
            codebooks,
            samples_per_frame: decoder.samples_per_frame(),
            pass_windows,
            pass_frames,
            indices: buffer("indices", DType::I32, words, Place::Device)?,
            codes: buffer("codes", DType::I32, pass_frames * codebooks, Place::Device)?,
            stages: [stage()?, stage()?],
            handed_out: SamplePool::new(max_window * decoder.samples_per_frame(), WINDOWS_HELD * max_rows),
            buckets: (!device.facts().exact_buckets).then(|| buckets(pass_frames).into_iter().collect()),
            graphs: BTreeMap::new(),
            device,
        })
    }

    /// The shape of a pass over these windows.
    fn shape(&self, windows: &[StreamWindow<'_>], ring: bool) -> PassShape {
        let items = || windows.iter().flat_map(|window| window.items);
        let frames = items().count();
        match &self.buckets {
            None => PassShape {
                windows: windows.len(),
                frames,
                ring: ring && items().any(|item| item.ring_row.is_some()),
                host: items().any(|item| item.ring_row.is_none()),
            },
            Some(buckets) => {
                // The last bucket is the most frames of a pass.
                let bucket = buckets[buckets.partition_point(|&bucket| bucket < frames)..]
                    .first()
                    .map_or(frames, |bucket| *bucket);
                self.bucket_shape(bucket, ring)
            }
        }
    }

    /// Everything that a pass of at most so many frames may need.
    fn bucket_shape(&self, frames: usize, ring: bool) -> PassShape {
        PassShape {
            windows: frames.min(self.pass_windows),
            frames,
            ring,
            host: true,
        }
    }

    fn parts(&self, shape: PassShape) -> Parts {
        Parts::new(shape.windows, shape.frames, self.codebooks)
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
        let mut words = Vec::new();
        let mut passes = Vec::new();
        for (of_step, frames) in split(windows, self.pass_frames) {
            let windows = &windows[of_step];
            let shape = self.shape(windows, ring.is_some());
            self.fill(&mut words, shape, windows);
            passes.push(PlannedPass { shape, frames });
        }
        for window in windows {
            let slot = window.slot as usize * pool.slot_elements;
            touches.write(pool.pool.slice(slot, pool.slot_elements));
            let Some(ring) = ring else { continue };
            for row in window.items.iter().filter_map(|item| item.ring_row) {
                touches.read(ring.buffer.slice(row as usize * self.codebooks, self.codebooks));
            }
        }
        self.touch_operands(ring, touches);
        let mut start = 0;
        let frames = windows.iter().map(|window| {
            start += window.items.len();
            start - window.items.len()..start
        });
        let staged = &mut self.stages[stage.0];
        staged.windows = frames.collect();
        staged.passes = passes;
        let view = staged.indices.slice(0, words.len());
        self.device.host_write(&view, bytemuck::cast_slice(&words))
    }

    /// Pools that a pass names whether or not it reaches anything in them.
    fn touch_operands(&self, ring: Option<&EdgeRing>, touches: &mut Touches) {
        if let Some(ring) = ring {
            touches.read(ring.buffer.slice(0, 0));
            touches.write(self.codes.view());
        }
    }

    /// Append the index block of a pass.
    fn fill(&self, words: &mut Vec<i32>, shape: PassShape, windows: &[StreamWindow<'_>]) {
        let parts = self.parts(shape);
        let start = words.len();
        words.resize(start + parts.end, 0);
        let words = &mut words[start..];
        words[parts.streams..parts.host_codes].fill(-1);
        let mut frame = 0;
        for (i, window) in windows.iter().enumerate() {
            let slot = window.slot as i32;
            words[WINDOW_WORDS * i..][..WINDOW_WORDS].copy_from_slice(&[
                frame as i32,
                window.items.len() as i32,
                slot,
            ]);
            words[parts.slots + i] = slot;
            for (offset, item) in window.items.iter().enumerate() {
                words[parts.streams + frame] = i as i32;
                words[parts.positions + frame] = (window.position + offset) as i32;
                match item.ring_row {
                    Some(row) => words[parts.ring_rows + frame] = row as i32,
                    None => words[parts.host_rows + frame] = frame as i32,
                }
                words[parts.host_codes + frame * self.codebooks..][..self.codebooks]
                    .copy_from_slice(&item.words);
                frame += 1;
            }
        }
    }

    /// Queue the planned step; with `output` its samples are copied out. `ring` is the one it was planned with.
    ///
    /// # Errors
    /// Whatever the stream refuses; a pass that warm-up made no capture for.
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
        let mut start = 0;
        for pass in &staged.passes {
            let words = self.parts(pass.shape).end;
            launcher.run(Copy {
                src: staged.indices.slice(start, words),
                dst: self.indices.slice(0, words),
            })?;
            start += words;
            match &self.buckets {
                None => self.run_pass(launcher, pass.shape, decoder, pool, ring)?,
                Some(_) => {
                    let frames = pass.shape.frames;
                    let graph = self.graphs.get(&(launcher.stream.id(), frames));
                    let graph = graph.ok_or_else(|| DeviceError::BadOperation {
                        op: "forward",
                        problem: format!(
                            "no capture of {frames} codec frames on {:?}: run warm_up on it first",
                            launcher.stream
                        ),
                    })?;
                    launcher.stream.replay(graph, launcher.touches)?;
                }
            }
            if output {
                let samples = decoder.samples(pass.frames.len());
                launcher.run(Copy {
                    dst: staged
                        .samples
                        .slice(pass.frames.start * self.samples_per_frame, samples.len),
                    src: samples,
                })?;
            }
        }
        Ok(())
    }

    /// Make the captures for this stream, if this device wants any, and run each on padding alone: a graph's first
    /// launch takes longer than those behind it.
    ///
    /// # Errors
    /// Whatever the stream refuses.
    pub fn warm_up(
        &mut self,
        launcher: &Launcher<'_>,
        decoder: &CodecDecoder,
        pool: &BoundResource,
        ring: Option<&EdgeRing>,
    ) -> Result<()> {
        let Some(buckets) = self.buckets.clone() else {
            return Ok(());
        };
        let mut touches = Touches::none();
        touches.write(pool.pool.slice(0, 0));
        self.touch_operands(ring, &mut touches);
        for frames in buckets {
            let shape = self.bucket_shape(frames, ring.is_some());
            let graph = launcher.stream.capture(&mut |stream| {
                let touches = &Touches::none();
                self.run_pass(&Launcher { stream, touches }, shape, decoder, pool, ring)
            })?;
            let mut words = Vec::new();
            self.fill(&mut words, shape, &[]);
            let staged = self.stages[0].indices.slice(0, words.len());
            self.device.host_write(&staged, bytemuck::cast_slice(&words))?;
            launcher.run(Copy {
                src: staged,
                dst: self.indices.slice(0, words.len()),
            })?;
            launcher.stream.replay(&graph, &touches)?;
            // The next one is staged in the same place.
            launcher.stream.record()?.synchronize(WARM_UP_DEADLINE)?;
            self.graphs.insert((launcher.stream.id(), frames), graph);
        }
        Ok(())
    }

    /// The operations of one pass, whose index block has been uploaded.
    fn run_pass(
        &self,
        launcher: &Launcher<'_>,
        shape: PassShape,
        decoder: &CodecDecoder,
        pool: &BoundResource,
        ring: Option<&EdgeRing>,
    ) -> Result<()> {
        let parts = self.parts(shape);
        let codes = self.gather_codes(shape, &parts, launcher, ring)?;
        let pass = Pass {
            frames: shape.frames,
            windows: self.indices.slice(0, WINDOW_WORDS * shape.windows),
            count: shape.windows,
            slots: self.indices.slice(parts.slots, shape.windows),
            streams: self.indices.slice(parts.streams, shape.frames),
            positions: self.indices.slice(parts.positions, shape.frames),
        };
        decoder.run(launcher, &pool.pool.view(), pool.slot_elements, &pass, &codes)
    }

    /// A pass's codes `[frames, codebooks]`: straight from the index block when the host brings them all, else
    /// gathered from the ring with the host's rows scattered over the gaps.
    fn gather_codes(
        &self,
        shape: PassShape,
        parts: &Parts,
        launcher: &Launcher<'_>,
        ring: Option<&EdgeRing>,
    ) -> Result<View> {
        let (rows, width) = (shape.frames, self.codebooks);
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
    pub fn samples(&self, stage: Stage, row: usize) -> Result<Samples> {
        let staged = &self.stages[stage.0];
        let frames = &staged.windows[row];
        let view = staged.samples.slice(
            frames.start * self.samples_per_frame,
            frames.len() * self.samples_per_frame,
        );
        let mut samples = self.handed_out.take(view.len);
        self.device
            .host_read(&view, bytemuck::cast_slice_mut(samples.as_mut_slice()))?;
        Ok(samples)
    }
}

#[cfg(test)]
mod tests;
