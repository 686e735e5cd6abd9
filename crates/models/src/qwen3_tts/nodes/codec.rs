//! The Codec node: frames in, samples out, on whichever stream the plan puts it.
//!
//! Two walks share a stream's state: `codec_prime` runs the reference frames of an in-context clone through it
//! without output, `codec_chunk` decodes the windows of the `codes` edge.

use std::sync::Arc;

use laneway_device::{Launcher, Touches};
use laneway_engine::node::{
    BoundResource, EdgeRing, Item, Node, NodeContext, Payload, PlanError, RowError, RowOutcome, RowState,
    Stage, StepRow, WalkId,
};
use laneway_models_decl::qwen3_tts::{CODEC, CODEC_CHUNK, CODEC_PRIME, CODEC_STATE, codec_pass_frames};
use laneway_plan::declaration::ModelDeclaration;
use laneway_plan::deployment::DeviceKind;

use crate::checkpoint::Weights;
use crate::checkpoint::config::CodecDecoderConfig;
use crate::qwen3_tts::codec::{CodecDecoder, CodecStep, StreamWindow};
use crate::qwen3_tts::load::LoadError;

/// Why the node cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum CodecNodeError {
    /// Weights or workspace.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The declaration lacks something, or the context does not fit the model.
    #[error("node {CODEC}: {0}")]
    Context(String),
}

/// The node.
#[derive(Debug)]
pub struct CodecNode {
    decoder: CodecDecoder,
    step: CodecStep,
    state: BoundResource,
    ring: Option<EdgeRing>,
    chunk: WalkId,
    prime: Option<WalkId>,
    max_rows: usize,
    max_window: usize,
}

/// A stream's state on the host.
#[derive(Debug, Default)]
struct StreamState {
    /// Frames that went through the slot.
    position: usize,
}

impl CodecNode {
    /// Load the node.
    ///
    /// # Errors
    /// A missing tensor, no memory, or a context that does not fit the declaration.
    pub fn build(
        declaration: &ModelDeclaration,
        config: &CodecDecoderConfig,
        weights: &Weights,
        context: NodeContext,
    ) -> Result<Self, CodecNodeError> {
        let bad = |problem: String| CodecNodeError::Context(problem);
        let walk = |name: &str| {
            declaration
                .walks
                .iter()
                .position(|walk| walk.name == name)
                .map(WalkId)
        };
        let chunk = walk(CODEC_CHUNK).ok_or_else(|| bad(format!("no walk {CODEC_CHUNK} is declared")))?;
        let edge = declaration
            .stream_edges
            .iter()
            .find(|edge| edge.to == CODEC_CHUNK)
            .ok_or_else(|| bad(format!("no stream edge leads to {CODEC_CHUNK}")))?;
        let max_window = edge.max_window as usize;
        let kind = if context.device.facts().sms == 0 {
            DeviceKind::Cpu
        } else {
            DeviceKind::Cuda
        };
        let pass_frames = codec_pass_frames(kind) as usize;
        let decoder = CodecDecoder::load(&*context.device, config, weights, max_window, pass_frames)?;
        let state = context
            .resources
            .into_iter()
            .find(|resource| resource.key == CODEC_STATE)
            .ok_or_else(|| bad(format!("resource {CODEC_STATE} is not bound")))?;
        if state.slot_elements < decoder.layout().words {
            return Err(bad(format!(
                "a slot of {CODEC_STATE} has {} words; windows of {max_window} frames need {}",
                state.slot_elements,
                decoder.layout().words
            )));
        }
        let ring = context
            .rings
            .into_iter()
            .find(|(name, _)| *name == edge.name)
            .map(|(_, ring)| ring);
        let step = CodecStep::new(context.device, &decoder, context.max_rows, max_window)
            .map_err(LoadError::from)?;
        Ok(Self {
            decoder,
            step,
            state,
            ring,
            chunk,
            prime: walk(CODEC_PRIME),
            max_rows: context.max_rows,
            max_window,
        })
    }

    fn check_window(&self, items: &[Item]) -> Result<(), RowError> {
        if items.is_empty() || items.len() > self.max_window {
            return Err(internal(format!(
                "a codec window has {} frames; it must have 1 to {}",
                items.len(),
                self.max_window
            )));
        }
        for item in items {
            self.check_frame(&item.words, item.index)?;
            if item.ring_row.is_some() && self.ring.is_none() {
                return Err(internal(format!(
                    "frame {} lies in a ring, but this worker has none",
                    item.index
                )));
            }
        }
        Ok(())
    }

    fn check_frame(&self, codes: &Arc<[i32]>, index: u32) -> Result<(), RowError> {
        let (books, size) = (self.decoder.codebooks(), self.decoder.codebook_size());
        if codes.len() != books {
            return Err(invalid_codes(format!(
                "frame {index} has {} codes; send {books}",
                codes.len()
            )));
        }
        match codes
            .iter()
            .position(|code| !usize::try_from(*code).is_ok_and(|code| code < size))
        {
            None => Ok(()),
            Some(book) => Err(invalid_codes(format!(
                "frame {index} has code {} in codebook {book}; codes are 0 to {}",
                codes[book],
                size - 1
            ))),
        }
    }
}

fn internal(message: String) -> RowError {
    RowError {
        invalid_argument: false,
        field: None,
        message,
    }
}

/// Codes come from the Talker or from another worker, so a bad one is not the caller's fault; a caller that
/// sends codes has them checked where they came in.
fn invalid_codes(message: String) -> RowError {
    RowError {
        field: Some("codes".into()),
        ..internal(message)
    }
}

fn stream_state<'a>(row: &'a mut StepRow<'_>) -> &'a mut StreamState {
    row.state
        .downcast_mut()
        .expect("the engine hands a row the state that this node opened for it")
}

impl Node for CodecNode {
    fn name(&self) -> &str {
        CODEC
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        self.max_rows
    }

    fn open(&mut self, walk: WalkId, _payload: &Payload) -> Result<RowState, RowError> {
        debug_assert!(walk == self.chunk || Some(walk) == self.prime);
        Ok(Box::new(StreamState::default()))
    }

    fn plan(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        let mut windows = Vec::with_capacity(rows.len());
        let mut refused = Vec::new();
        for (i, row) in rows.iter_mut().enumerate() {
            let position = stream_state(row).position;
            let slot = row
                .grants
                .iter()
                .find(|grant| grant.resource == CODEC_STATE)
                .and_then(|grant| grant.slots.first().copied());
            let checked = self.check_window(row.items).and_then(|()| {
                slot.ok_or_else(|| internal(format!("the request holds no slot of {CODEC_STATE}")))
            });
            match checked {
                Ok(slot) => windows.push(StreamWindow {
                    slot,
                    position,
                    items: row.items,
                }),
                Err(error) => refused.push((i, error)),
            }
        }
        if !refused.is_empty() {
            return Err(PlanError::Rows(refused));
        }
        Ok(self
            .step
            .plan(stage, &windows, &self.state, self.ring.as_ref(), touches)?)
    }

    fn forward(
        &mut self,
        walk: WalkId,
        stage: Stage,
        _n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        self.step.launch(
            stage,
            launcher,
            &self.decoder,
            &self.state,
            self.ring.as_ref(),
            walk == self.chunk,
        )
    }

    fn commit(&mut self, _walk: WalkId, rows: &mut [StepRow<'_>]) {
        for row in rows {
            let frames = row.items.len();
            stream_state(row).position += frames;
        }
    }

    fn postprocess(
        &mut self,
        walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        rows.iter()
            .enumerate()
            .map(|(i, row)| {
                if row.is_none() || walk != self.chunk {
                    return RowOutcome::default();
                }
                match self.step.samples(stage, i) {
                    Ok(samples) => RowOutcome {
                        output: Some(samples),
                        ..RowOutcome::default()
                    },
                    Err(error) => RowOutcome {
                        error: Some(internal(format!("read samples: {error}"))),
                        ..RowOutcome::default()
                    },
                }
            })
            .collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        let (decoder, ring) = (&self.decoder, self.ring.as_ref());
        self.step.warm_up(launcher, decoder, &self.state, ring)?;
        // One frame of code 0 through slot 0, which is then as if new again.
        let item = Item {
            index: 0,
            words: vec![0; self.decoder.codebooks()].into(),
            ring_row: None,
        };
        let window = StreamWindow {
            slot: 0,
            position: 0,
            items: &[item],
        };
        let mut touches = Touches::none();
        self.step
            .plan(Stage(0), &[window], &self.state, self.ring.as_ref(), &mut touches)?;
        let launcher = Launcher {
            stream: launcher.stream,
            touches: &touches,
        };
        self.step.launch(
            Stage(0),
            &launcher,
            &self.decoder,
            &self.state,
            self.ring.as_ref(),
            true,
        )?;
        launcher.run(laneway_device::op::Zero {
            dst: self.state.pool.slice(0, self.state.slot_elements),
        })
    }
}

#[cfg(test)]
mod tests;
