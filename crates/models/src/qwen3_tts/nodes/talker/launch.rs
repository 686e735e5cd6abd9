//! Queueing a planned step: a decode step is one graph, its uploads and the copy that lands included. A prefill
//! is launched operation by operation as far as its shape follows from its prompts; its end is a graph.
//!
//! A graph names the pinned memory of its stage, so a decode step has one for each stage.

use std::time::Duration;

use laneway_device::op::{Copy, SampleRow, Zero};
use laneway_device::{Buffer, DeviceError, Graph, Launcher, Result, Stream, Touches};
use laneway_engine::node::Stage;

use super::plan::WarmUp;
use super::staging::{Indices, Shape};
use super::{Planned, STAGES, StageBuffers, TALKER, TalkerNode};
use crate::qwen3_tts::talker::{DecodeStep, PrefillStep};

/// Warm-up waits this long for one step.
const WARM_UP_DEADLINE: Duration = Duration::from_secs(300);

/// What a graph was captured for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Capture {
    /// A decode step.
    Frame {
        stage: usize,
        rows: usize,
        /// Some row still has text.
        text: bool,
    },
    /// A prefill behind its stack.
    PrefillTail { rows: usize },
}

impl TalkerNode {
    /// Rows of a step of `live` rows, padding included.
    pub(super) fn padded_rows(&self, live: usize) -> usize {
        match self.exact_captures {
            true => live,
            // The last bucket is the most rows of a step.
            false => *self
                .buckets
                .iter()
                .find(|bucket| **bucket >= live)
                .unwrap_or(&live),
        }
    }

    /// Views of the device's index buffers for a step of this shape.
    fn indices(&self, shape: Shape) -> Indices {
        Indices::new(shape, &self.ints, &self.params, self.dims)
    }

    fn stage_buffers(&self, stage: Stage) -> &StageBuffers {
        &self.stages[stage.0]
    }

    fn hidden_width(&self) -> usize {
        self.talker.config().talker_config.stack.hidden_size
    }

    /// Copy the staged index buffers of a step to the device.
    fn upload(&self, launcher: &Launcher<'_>, stage: Stage, planned: Planned) -> Result<()> {
        let staging = &self.stage_buffers(stage).staging;
        let upload = |from: &Buffer, to: &Buffer, len: usize| {
            launcher.run(Copy {
                src: from.slice(0, len),
                dst: to.slice(0, len),
            })
        };
        let Planned { shape, speakers, .. } = planned;
        upload(&staging.ints, &self.ints, self.dims.ints(shape))?;
        upload(&staging.params, &self.params, 2 * shape.rows * SampleRow::WORDS)?;
        match speakers {
            0 => Ok(()),
            rows => upload(&staging.speakers, &self.speakers, rows * self.hidden_width()),
        }
    }

    /// Copy the drawn codes to where the host reads them.
    fn land(&self, launcher: &Launcher<'_>, stage: Stage, rows: usize) -> Result<()> {
        let landed = &self.stage_buffers(stage).codes;
        launcher.run(self.talker.copy_codes(&self.workspace, rows, landed))
    }

    /// Queue a planned step.
    pub(super) fn launch(&mut self, stage: Stage, launcher: &Launcher<'_>) -> Result<()> {
        let planned = self
            .stage_buffers(stage)
            .planned
            .ok_or_else(|| DeviceError::BadOperation {
                op: "forward",
                problem: format!("stage {} of node {TALKER} was not planned", stage.0),
            })?;
        match planned.shape.prefill {
            true => self.launch_prefill(stage, planned, launcher),
            false if planned.shape.probed => self.decode(launcher, stage, planned),
            false => {
                let graph = self.frame_graph(stage, planned, launcher.stream)?;
                launcher.stream.replay(&graph, launcher.touches)
            }
        }
    }

    fn launch_prefill(&mut self, stage: Stage, planned: Planned, launcher: &Launcher<'_>) -> Result<()> {
        let shape = planned.shape;
        self.upload(launcher, stage, planned)?;
        let (talker, w) = (&self.talker, &self.workspace);
        let step = self.prefill_step(planned);
        talker.embed_prefill(launcher, w, &step)?;
        if let Some(probe) = self.stage_buffers(stage).probe.as_ref().filter(|_| shape.probed) {
            launcher.run(probe.copy_inputs(&talker.embeddings(w, shape.tokens)))?;
        }
        talker.run_prefill(launcher, w, &step)?;
        if shape.probed {
            self.prefill_tail(launcher, shape, Some(stage))?;
            self.copy_results(launcher, stage, shape)?;
        } else {
            let graph = self.tail_graph(shape, launcher.stream)?;
            launcher.stream.replay(&graph, launcher.touches)?;
        }
        self.land(launcher, stage, shape.rows)
    }

    fn prefill_step(&self, planned: Planned) -> PrefillStep {
        let shape = planned.shape;
        let indices = self.indices(shape);
        let prefill = indices.prefill.as_ref().expect("a prefill's shape has its parts");
        PrefillStep {
            tokens: shape.tokens,
            text: indices.text.clone(),
            codes: prefill.codes.clone(),
            speaker_rows: (planned.speakers > 0).then(|| prefill.speaker_rows.clone()),
            speakers: self.speakers.slice(0, planned.speakers * self.hidden_width()),
            sequences: indices.sequences.clone(),
            positions: indices.positions.clone(),
            pages: prefill.pages.clone(),
            slots: prefill.slots.clone(),
            rows: shape.rows,
        }
    }

    /// The end of a prefill; `probed` names the stage whose probe records it.
    fn prefill_tail(&self, launcher: &Launcher<'_>, shape: Shape, probed: Option<Stage>) -> Result<()> {
        let indices = self.indices(shape);
        let prefill = indices.prefill.as_ref().expect("a prefill's shape has its parts");
        let probe = probed.and_then(|stage| self.stage_buffers(stage).probe.as_ref());
        let tail = indices.tail(probe);
        self.talker
            .run_prefill_tail(launcher, &self.workspace, prefill.last.clone(), &tail)
    }

    /// A whole decode step.
    fn decode(&self, launcher: &Launcher<'_>, stage: Stage, planned: Planned) -> Result<()> {
        let shape = planned.shape;
        let (talker, w) = (&self.talker, &self.workspace);
        let probe = self.stage_buffers(stage).probe.as_ref().filter(|_| shape.probed);
        let indices = self.indices(shape);
        let step = DecodeStep {
            sequences: indices.sequences.clone(),
            positions: indices.positions.clone(),
            text: planned.text.then(|| indices.text.clone()),
            tail: indices.tail(probe),
        };
        self.upload(launcher, stage, planned)?;
        talker.embed_decode(launcher, w, &step)?;
        if let Some(probe) = probe {
            launcher.run(probe.copy_inputs(&talker.embeddings(w, shape.tokens)))?;
        }
        talker.run_decode(launcher, w, &step)?;
        if probe.is_some() {
            self.copy_results(launcher, stage, shape)?;
        }
        self.land(launcher, stage, shape.rows)
    }

    /// Copy what a probed step computed to where the host reads it.
    fn copy_results(&self, launcher: &Launcher<'_>, stage: Stage, shape: Shape) -> Result<()> {
        if let Some(probe) = &self.stage_buffers(stage).probe {
            for copy in probe.copy_results(&self.workspace, shape.rows) {
                launcher.run(copy)?;
            }
        }
        Ok(())
    }

    /// The capture of a decode step of this shape.
    pub(super) fn frame_graph(
        &mut self,
        stage: Stage,
        planned: Planned,
        stream: &dyn Stream,
    ) -> Result<Graph> {
        let key = Capture::Frame {
            stage: stage.0,
            rows: planned.shape.rows,
            text: planned.text,
        };
        self.graph(key, stream, &|node, launcher| {
            node.decode(launcher, stage, planned)
        })
    }

    fn tail_graph(&mut self, shape: Shape, stream: &dyn Stream) -> Result<Graph> {
        let key = Capture::PrefillTail { rows: shape.rows };
        self.graph(key, stream, &|node, launcher| {
            node.prefill_tail(launcher, shape, None)
        })
    }

    /// The graph for `key`. Where buckets are exact, a row count that warm-up did not foresee is captured when
    /// it first comes: that costs the CPU device no more than building its operations. Otherwise warm-up has
    /// made all that there are.
    fn graph(
        &mut self,
        key: Capture,
        stream: &dyn Stream,
        build: &dyn Fn(&Self, &Launcher<'_>) -> Result<()>,
    ) -> Result<Graph> {
        if let Some(graph) = self.graphs.get(&key) {
            return Ok(graph.clone());
        }
        let graph = stream.capture(&mut |stream| {
            let touches = Touches::none();
            let touches = &touches;
            build(self, &Launcher { stream, touches })
        })?;
        self.graphs.insert(key, graph.clone());
        Ok(graph)
    }

    /// Run a step that no request could be in.
    fn warm_up_step(&mut self, stage: Stage, step: WarmUp, launcher: &Launcher<'_>) -> Result<()> {
        let filled = self.fill_warm_up(step);
        self.stage(stage, filled)?;
        let mut touches = Touches::none();
        self.workspace.touch(&mut touches);
        touches.write(self.workspace.table());
        if let Some(ring) = self.workspace.ring() {
            // Warm-up writes no row of it.
            touches.write(ring.slice(0, 0));
        }
        let launcher = Launcher {
            stream: launcher.stream,
            touches: &touches,
        };
        self.launch(stage, &launcher)?;
        // What follows writes the staging buffers again.
        launcher.stream.record()?.synchronize(WARM_UP_DEADLINE)
    }

    /// Run every walk once and make the captures. A device with buckets runs each of them, on padding alone,
    /// because a graph's first launch takes longer than those behind it.
    pub(super) fn run_warm_up(&mut self, launcher: &Launcher<'_>) -> Result<()> {
        for (prefill, text) in [(true, true), (false, true), (false, false)] {
            let step = WarmUp {
                prefill,
                text,
                live: 1,
                rows: self.padded_rows(1),
            };
            self.warm_up_step(Stage(0), step, launcher)?;
        }
        for rows in self.buckets.clone() {
            if !self.exact_captures {
                let step = WarmUp {
                    prefill: true,
                    text: true,
                    live: 0,
                    rows,
                };
                self.warm_up_step(Stage(0), step, launcher)?;
            }
            for (stage, text) in (0..STAGES).flat_map(|stage| [(Stage(stage), true), (Stage(stage), false)]) {
                let step = WarmUp {
                    prefill: false,
                    text,
                    live: 0,
                    rows,
                };
                if self.exact_captures {
                    let planned = self.fill_warm_up(step).planned();
                    self.frame_graph(stage, planned, launcher.stream)?;
                } else {
                    self.warm_up_step(stage, step, launcher)?;
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
