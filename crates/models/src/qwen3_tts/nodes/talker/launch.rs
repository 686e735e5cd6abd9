//! Queueing a planned step: uploads, the captured or single operations, and the copies that land.

use std::time::Duration;

use laneway_device::op::{Copy, SampleRow, Zero};
use laneway_device::{Buffer, DeviceError, Graph, Launcher, Touches};
use laneway_engine::node::Stage;

use super::staging::{Indices, Shape};
use super::{Planned, TALKER, TalkerNode};
use crate::qwen3_tts::talker::{DecodeStep, PrefillStep};

/// Warm-up waits this long for one step.
const WARM_UP_DEADLINE: Duration = Duration::from_secs(300);

impl TalkerNode {
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

    /// Queue a planned step.
    pub(super) fn launch(&mut self, stage: Stage, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
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
        let filled = self.fill_warm_up(prefill, text);
        self.stage(Stage(0), filled)?;
        let mut touches = Touches::none();
        self.workspace.touch(&mut touches);
        touches.write(self.workspace.table());
        if let Some(ring) = self.workspace.ring() {
            touches.write(ring.slice(0, self.dims.groups));
        }
        let launcher = Launcher {
            stream: launcher.stream,
            touches: &touches,
        };
        self.launch(Stage(0), &launcher)
    }

    /// Run every walk once and make the captures.
    pub(super) fn run_warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
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

    fn settle(&self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        launcher.stream.record()?.synchronize(WARM_UP_DEADLINE)
    }
}
