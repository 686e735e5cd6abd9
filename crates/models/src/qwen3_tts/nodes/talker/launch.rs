//! Queueing a planned step: it is one graph, its uploads and the copy that lands included. Where steps have exact
//! shapes a prefill is launched operation by operation: prompts have too many shapes to keep a graph for each.

use std::time::Duration;

use laneway_device::op::{Copy, SampleRow, Zero};
use laneway_device::{Buffer, DeviceError, Graph, Launcher, Result, Stream, Touches};
use laneway_engine::node::Stage;

use super::buckets::PromptBucket;
use super::plan::WarmUp;
use super::probe::ProbeBuffers;
use super::staging::{FrameIndices, PrefillIndices, Shape};
use super::{Planned, STAGES, StageBuffers, TALKER, TalkerNode};

/// Warm-up waits this long for one step.
const WARM_UP_DEADLINE: Duration = Duration::from_secs(300);

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
        let shape = planned.shape;
        upload(&staging.ints, &self.ints, self.dims.ints(shape))?;
        if !shape.prefill {
            upload(&staging.params, &self.params, 2 * shape.rows * SampleRow::WORDS)?;
        }
        if planned.speakers {
            upload(
                &staging.speakers,
                &self.speakers,
                shape.rows * self.hidden_width(),
            )?;
        }
        Ok(())
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
        let shape = planned.shape;
        if shape.probed || shape.prefill && self.exact_captures {
            return self.run(launcher, stage, planned);
        }
        let graph = self.graph(stage, planned, launcher.stream)?;
        launcher.stream.replay(&graph, launcher.touches)
    }

    /// A whole step, operation by operation.
    fn run(&self, launcher: &Launcher<'_>, stage: Stage, planned: Planned) -> Result<()> {
        match planned.shape.prefill {
            true => self.prefill(launcher, stage, planned),
            false => self.decode(launcher, stage, planned),
        }
    }

    /// What records a step, if it is probed.
    fn probe(&self, stage: Stage, shape: Shape) -> Option<&ProbeBuffers> {
        self.stage_buffers(stage).probe.as_ref().filter(|_| shape.probed)
    }

    /// A whole prefill.
    fn prefill(&self, launcher: &Launcher<'_>, stage: Stage, planned: Planned) -> Result<()> {
        let (shape, talker, w) = (planned.shape, &self.talker, &self.workspace);
        let speakers = || self.speakers.slice(0, shape.rows * self.hidden_width());
        let step = PrefillIndices::new(shape, &self.ints, self.dims).step(planned.speakers.then(speakers));
        self.upload(launcher, stage, planned)?;
        talker.embed_prefill(launcher, w, &step)?;
        if let Some(probe) = self.probe(stage, shape) {
            launcher.run(probe.copy_inputs(&talker.embeddings(w, shape.tokens)))?;
        }
        talker.run_prefill(launcher, w, &step)
    }

    /// A whole decode step.
    fn decode(&self, launcher: &Launcher<'_>, stage: Stage, planned: Planned) -> Result<()> {
        let (shape, talker, w) = (planned.shape, &self.talker, &self.workspace);
        let probe = self.probe(stage, shape);
        let indices = FrameIndices::new(shape, &self.ints, &self.params, self.dims);
        let step = indices.step(planned.text, probe);
        self.upload(launcher, stage, planned)?;
        talker.embed_decode(launcher, w, &step)?;
        if let Some(probe) = probe {
            launcher.run(probe.copy_inputs(&talker.embeddings(w, shape.tokens)))?;
        }
        talker.run_decode(launcher, w, &step)?;
        if let Some(probe) = probe {
            for copy in probe.copy_results(w, shape.rows) {
                launcher.run(copy)?;
            }
        }
        self.land(launcher, stage, shape.rows)
    }

    /// The capture of a step. Where buckets are exact, a row count that warm-up did not foresee is captured when
    /// it first comes: that costs the CPU device no more than building its operations. Otherwise warm-up has
    /// made all that there are.
    fn graph(&mut self, stage: Stage, planned: Planned, stream: &dyn Stream) -> Result<Graph> {
        if let Some(graph) = self.graphs.get(&(stage, planned)) {
            return Ok(graph.clone());
        }
        let graph = stream.capture(&mut |stream| {
            let touches = Touches::none();
            let touches = &touches;
            self.run(&Launcher { stream, touches }, stage, planned)
        })?;
        self.graphs.insert((stage, planned), graph.clone());
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
        if self.exact_captures {
            let bucket = PromptBucket { rows: 1, tokens: 1 };
            self.warm_up_step(Stage(0), WarmUp::Prefill(bucket), launcher)?;
        } else {
            for (bucket, stage) in self
                .prompt_buckets
                .clone()
                .into_iter()
                .flat_map(|bucket| (0..STAGES).map(move |stage| (bucket, Stage(stage))))
            {
                self.warm_up_step(stage, WarmUp::Prefill(bucket), launcher)?;
            }
        }
        for text in [true, false] {
            let (live, rows) = (1, self.padded_rows(1));
            self.warm_up_step(Stage(0), WarmUp::Frame { text, live, rows }, launcher)?;
        }
        for rows in self.buckets.clone() {
            for (stage, text) in (0..STAGES).flat_map(|stage| [(Stage(stage), true), (Stage(stage), false)]) {
                let step = WarmUp::Frame { text, live: 0, rows };
                if self.exact_captures {
                    let planned = self.fill_warm_up(step).planned();
                    self.graph(stage, planned, launcher.stream)?;
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
