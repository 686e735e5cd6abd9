//! The code predictor: from the Talker's hidden state and a frame's first code to its other codes.
//!
//! Fifteen passes of a small stack over a cache that starts anew with every frame; each pass draws one code on
//! the device, so the host never waits inside a frame.

use std::sync::Arc;
use std::time::Duration;

use laneway_device::op::{Activation, Copy, Embed, Gemm, Sample, ScatterRows};
use laneway_device::{
    Buffer, BufferSpec, DType, Device, Launcher, Matrix, Place, Result, Stream, Touches, View,
};

use super::decoder_stack::{DecoderStack, PagedCache, Rows, StackPass, StackWorkspace};
use super::load::{LoadError, Loader};
use crate::checkpoint::config::ModelConfig;

/// Rows of a codec table projected at once while loading.
const PROJECTION_ROWS: usize = 512;
/// Loading waits this long for a projected table.
const LOAD_DEADLINE: Duration = Duration::from_secs(300);

/// Weights of the predictor.
#[derive(Debug)]
pub(super) struct Predictor {
    pub(super) stack: DecoderStack,
    /// Talker width to predictor width.
    projection: Option<Projection>,
    /// Input of pass g: the codec embedding of group g in predictor width, `[entries, hidden]`.
    inputs: Vec<View>,
    /// Logits of group g + 1.
    heads: Vec<Matrix>,
    /// Entries of a codebook.
    pub(super) codebook_size: usize,
    talker_width: usize,
}

#[derive(Debug)]
struct Projection {
    weight: Matrix,
    bias: View,
}

impl Projection {
    fn apply(&self, x: View, rows: usize, out: View) -> Gemm {
        Gemm {
            norm: None,
            gated: None,
            x,
            rows,
            w: self.weight.clone(),
            bias: Some(self.bias.clone()),
            activation: Activation::None,
            scale: None,
            accumulate: false,
            out,
            next: None,
        }
    }
}

impl Predictor {
    /// Load, and project the codec embeddings to the predictor's width once: the projection of a code's
    /// embedding depends on nothing but the code.
    ///
    /// `tables`: the Talker's frame tables, `[entries, talker width]`, first group first.
    pub(super) fn load(
        loader: &Loader<'_>,
        stream: &dyn Stream,
        config: &ModelConfig,
        tables: &[View],
    ) -> Result<Self, LoadError> {
        let c = &config.talker_config.code_predictor_config;
        let talker_width = config.talker_config.stack.hidden_size;
        let loader = loader.under("code_predictor.");
        let projection = if config.has_predictor_projection() {
            Some(Projection {
                weight: loader.matrix("small_to_mtp_projection.weight", &[c.hidden_size, talker_width])?,
                bias: loader.floats("small_to_mtp_projection.bias", &[c.hidden_size])?,
            })
        } else {
            None
        };
        let passes = c.num_code_groups - 1;
        let inputs = match &projection {
            // The last group's embedding is never an input.
            Some(projection) => tables[..passes]
                .iter()
                .map(|table| {
                    project_table(
                        loader.device,
                        stream,
                        projection,
                        table,
                        talker_width,
                        c.hidden_size,
                    )
                })
                .collect::<Result<_, _>>()?,
            None => tables[..passes].to_vec(),
        };
        let heads = (0..passes)
            .map(|group| loader.matrix(&format!("lm_head.{group}.weight"), &[c.vocab_size, c.hidden_size]))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            stack: DecoderStack::load(&loader.under("model."), c)?,
            projection,
            inputs,
            heads,
            codebook_size: c.vocab_size,
            talker_width,
        })
    }
}

/// All rows of a table through the projection.
fn project_table(
    device: &dyn Device,
    stream: &dyn Stream,
    projection: &Projection,
    table: &View,
    talker_width: usize,
    width: usize,
) -> Result<View, LoadError> {
    let entries = table.len / talker_width;
    let rows = entries.min(PROJECTION_ROWS);
    let ids: Vec<i32> = (0..entries as i32).collect();
    let ids = device.alloc_with(
        spec("projection.ids", DType::I32, entries),
        bytemuck::cast_slice(&ids),
    )?;
    let wide = device.alloc(spec("projection.rows", DType::F32, rows * talker_width))?;
    let out = device.alloc(spec(
        &format!("{}.projected", table.buffer.name()),
        DType::F32,
        entries * width,
    ))?;
    let touches = Touches::none();
    let launcher = Launcher {
        stream,
        touches: &touches,
    };
    for first in (0..entries).step_by(rows) {
        let rows = rows.min(entries - first);
        launcher.run(Embed {
            tables: vec![table.clone()],
            ids: ids.slice(first, rows),
            ids_stride: 1,
            first_id: 0,
            rows,
            width: talker_width,
            accumulate: false,
            out: wide.view(),
        })?;
        launcher.run(projection.apply(wide.view(), rows, out.slice(first * width, rows * width)))?;
    }
    stream.record()?.synchronize(LOAD_DEADLINE)?;
    Ok(out.view())
}

fn spec(name: &str, dtype: DType, len: usize) -> BufferSpec {
    BufferSpec {
        name: name.to_owned(),
        dtype,
        len,
        place: Place::Device,
    }
}

/// Cache, activations and constants of frames of at most `max_rows` rows.
#[derive(Debug)]
pub(super) struct PredictorWorkspace {
    stack: StackWorkspace,
    /// `[2 * max_rows, hidden]`
    x: Buffer,
    /// `[max_rows, hidden]`
    normed: Buffer,
    /// `[max_rows, codebook]`
    logits: Buffer,
    /// Cosines and sines of every position, `[groups, max_rows, head_dim]`.
    cos_sin: Buffer,
    /// Positions, `[groups, max_rows]`.
    positions: Buffer,
    cache: PagedCache,
    max_rows: usize,
}

impl PredictorWorkspace {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        stream: &dyn Stream,
        predictor: &Predictor,
        max_rows: usize,
    ) -> Result<Self> {
        let c = &predictor.stack.config;
        let groups = c.num_code_groups;
        let float =
            |name: &str, len: usize| device.alloc(spec(&format!("predictor.{name}"), DType::F32, len));
        let ints = |name: &str, values: Vec<i32>| {
            device.alloc_with(
                spec(&format!("predictor.{name}"), DType::I32, values.len()),
                bytemuck::cast_slice(&values),
            )
        };
        // A row's cache is one page with a position for each input of a frame.
        let page_elements = PagedCache::page_elements(c, groups);
        let workspace = Self {
            stack: StackWorkspace::new(&**device, "predictor", &predictor.stack, 2 * max_rows)?,
            x: float("x", 2 * max_rows * c.hidden_size)?,
            normed: float("normed", max_rows * c.hidden_size)?,
            logits: float("logits", max_rows * c.vocab_size)?,
            cos_sin: float("cos_sin", groups * max_rows * c.head_dim)?,
            positions: ints(
                "positions",
                (0..groups * max_rows).map(|i| (i / max_rows) as i32).collect(),
            )?,
            cache: PagedCache {
                pool: device
                    .alloc(spec(
                        "predictor.cache",
                        predictor.stack.product_dtype(&**device),
                        max_rows * page_elements,
                    ))?
                    .view(),
                page_elements,
                page_size: groups,
                table: ints("table", (0..max_rows as i32).collect())?.view(),
                pages_per_sequence: 1,
            },
            max_rows,
        };
        let touches = Touches::none();
        let launcher = Launcher {
            stream,
            touches: &touches,
        };
        launcher.run(predictor.stack.rope_table(
            workspace.positions.view(),
            groups * max_rows,
            workspace.cos_sin.view(),
        ))?;
        Ok(workspace)
    }

    /// What a frame reaches through index buffers.
    pub(super) fn touch(&self, touches: &mut Touches) {
        touches.write(self.cache.pool.clone());
    }
}

/// One frame's operands.
#[derive(Debug)]
pub(super) struct FrameStep<'a> {
    pub(super) rows: usize,
    /// The Talker's hidden state `[rows, talker width]`.
    pub(super) hidden: View,
    /// Codes `[rows, groups]`: the first is there, the others are drawn.
    pub(super) codes: View,
    /// [`laneway_device::op::SampleRow`]s.
    pub(super) params: View,
    /// Rows of the two inputs of a first pass: `0..rows` twice, `[2 * rows]`; -1 in a row of padding.
    pub(super) sequences: View,
    pub(super) probe: Option<&'a FrameProbe>,
}

/// Verification of a frame, on the device.
#[derive(Debug)]
pub(super) struct FrameProbe {
    /// Codes to put in place of those drawn.
    pub(super) forced: ForcedCodes,
    /// Each group's raw logits `[groups - 1, rows, codebook]`.
    pub(super) logits: View,
    /// Each group's processed scores.
    pub(super) scores: View,
}

/// Codes to put in place of those drawn, group by group.
#[derive(Debug)]
pub(super) struct ForcedCodes {
    /// `[groups, rows]`
    pub(super) codes: View,
    /// Element of the step's codes that each replaces; -1: keep the drawn one.
    pub(super) index: View,
    /// Seen sets that follow from the forced codes, in rows of `groups` words.
    pub(super) seen: View,
    /// Row of the sampler pool that each replaces; -1: keep what is there.
    pub(super) seen_index: View,
}

impl ForcedCodes {
    /// Replace one group's codes.
    pub(super) fn apply(&self, group: usize, rows: usize, codes: &View) -> ScatterRows {
        ScatterRows {
            src: self.codes.slice(group * rows, rows),
            index: self.index.slice(group * rows, rows),
            rows,
            width: 1,
            dst: codes.clone(),
        }
    }
}

impl Predictor {
    /// Draw the codes of one frame.
    pub(super) fn run(
        &self,
        launcher: &Launcher<'_>,
        w: &PredictorWorkspace,
        step: &FrameStep<'_>,
    ) -> Result<()> {
        let c = &self.stack.config;
        let (rows, width, groups) = (step.rows, c.hidden_size, c.num_code_groups);
        let input = |group: usize, out: View| Embed {
            tables: vec![self.inputs[group].clone()],
            ids: step.codes.clone(),
            ids_stride: groups,
            first_id: group,
            rows,
            width,
            accumulate: false,
            out,
        };
        let hidden_row = w.x.slice(0, rows * width);
        match &self.projection {
            Some(projection) => launcher.run(projection.apply(step.hidden.clone(), rows, hidden_row))?,
            None => launcher.run(Copy {
                src: step.hidden.slice(0, rows * self.talker_width),
                dst: hidden_row,
            })?,
        }
        launcher.run(input(0, w.x.slice(rows * width, rows * width)))?;
        // Where the tables pass from position 0 to position 1.
        let pairs = w.max_rows - rows;
        let first = StackPass {
            x: w.x.view(),
            rows: 2 * rows,
            cos_sin: w.cos_sin.slice(pairs * c.head_dim, 2 * rows * c.head_dim),
            sequences: step.sequences.clone(),
            positions: w.positions.slice(pairs, 2 * rows),
            kind: Rows::Several,
            cache: &w.cache,
            // The second half of the rows is drawn from.
            next: None,
        };
        self.stack.run(launcher, &w.stack, &first)?;
        self.draw(launcher, w, step, 0, w.x.slice(rows * width, rows * width))?;
        for pass in 1..groups - 1 {
            launcher.run(input(pass, w.x.slice(0, rows * width)))?;
            let position = pass + 1;
            let next = StackPass {
                x: w.x.view(),
                rows,
                cos_sin: w
                    .cos_sin
                    .slice(position * w.max_rows * c.head_dim, rows * c.head_dim),
                sequences: step.sequences.slice(0, rows),
                positions: w.positions.slice(position * w.max_rows, rows),
                kind: Rows::OneEach,
                cache: &w.cache,
                next: Some(self.stack.final_input_norm(w.normed.view(), false)),
            };
            self.stack.run(launcher, &w.stack, &next)?;
            self.draw(launcher, w, step, pass, w.x.slice(0, rows * width))?;
        }
        Ok(())
    }

    /// Draw group `pass + 1` from the rows `x`.
    fn draw(
        &self,
        launcher: &Launcher<'_>,
        w: &PredictorWorkspace,
        step: &FrameStep<'_>,
        pass: usize,
        x: View,
    ) -> Result<()> {
        let (rows, groups, vocab) = (step.rows, self.stack.config.num_code_groups, self.codebook_size);
        launcher.run(Gemm {
            norm: Some(self.stack.final_input_norm(w.normed.view(), pass > 0)),
            gated: None,
            x,
            rows,
            w: self.heads[pass].clone(),
            bias: None,
            activation: Activation::None,
            scale: None,
            accumulate: false,
            out: w.logits.view(),
            next: None,
        })?;
        let probed = |all: &View| all.slice(pass * rows * vocab, rows * vocab);
        launcher.run(Sample {
            logits: w.logits.view(),
            rows,
            vocab,
            live: vocab,
            extra_live: -1,
            params: step.params.clone(),
            group: pass as u32 + 1,
            seen: None,
            tokens: step.codes.clone(),
            token_stride: groups,
            token_offset: pass + 1,
            scores: step.probe.map(|probe| probed(&probe.scores)),
        })?;
        let Some(probe) = step.probe else {
            return Ok(());
        };
        launcher.run(Copy {
            src: w.logits.slice(0, rows * vocab),
            dst: probed(&probe.logits),
        })?;
        launcher.run(probe.forced.apply(pass + 1, rows, &step.codes))
    }
}
