//! The Talker: text and code embeddings, the language model's stack, the codec head, and behind them the code
//! predictor. A decode step ends with a frame of codes for each of its rows, drawn, stored for the rows' next
//! step and sent to the edge's ring without the host looking at it. A prefill fills the cache with all rows of a
//! prompt but the last, and leaves that one's codes where a decode step finds those of the frame before.

mod step;

use std::sync::Arc;
use std::time::Duration;

use laneway_device::op::{Activation, Copy, Embed, GatherRows, Gemm, Sample, ScatterRows, StateSlice};
use laneway_device::{
    Buffer, BufferSpec, DType, Device, Launcher, Matrix, Place, Result, Stream, Touches, View,
};

use super::decoder_stack::{DecoderStack, PagedCache, Rows, StackPass, StackWorkspace};
use super::load::{LoadError, Loader};
use super::predictor::{FrameStep, Predictor, PredictorWorkspace};
use crate::checkpoint::Weights;
use crate::checkpoint::config::ModelConfig;

pub(super) use step::{DecodeStep, PrefillStep, TailProbe, TailStep};

/// Codec ids above the codebook that only prompts use.
const CONTROL_IDS: usize = 1024;
/// Building waits this long for what it computes on the device.
const LOAD_DEADLINE: Duration = Duration::from_secs(300);

/// Weights of Talker and predictor.
#[derive(Debug)]
pub(super) struct Talker {
    config: ModelConfig,
    text_embedding: View,
    fc1: Matrix,
    fc1_bias: View,
    fc2: Matrix,
    fc2_bias: View,
    stack: DecoderStack,
    /// Embedding of each group's codes `[entries, hidden]`; the first is the whole codec vocabulary.
    frame_tables: Vec<View>,
    codec_head: Matrix,
    predictor: Predictor,
}

impl Talker {
    /// Load onto a device. `stream` computes what is folded at load.
    ///
    /// # Errors
    /// A tensor is missing or has another shape; no memory.
    pub(super) fn load(
        device: &dyn Device,
        stream: &dyn Stream,
        config: &ModelConfig,
        weights: &Weights,
    ) -> Result<Self, LoadError> {
        let loader = Loader::new(device, weights, "talker.");
        let talker = &config.talker_config;
        let (hidden, text) = (talker.stack.hidden_size, talker.text_hidden_size);
        let vocab = talker.stack.vocab_size;
        let codebook = talker.code_predictor_config.vocab_size;
        let mut frame_tables = vec![loader.table("model.codec_embedding.weight", &[vocab, hidden])?];
        for group in 0..config.groups() - 1 {
            let name = format!("code_predictor.model.codec_embedding.{group}.weight");
            frame_tables.push(loader.table(&name, &[codebook, hidden])?);
        }
        Ok(Self {
            text_embedding: loader.table("model.text_embedding.weight", &[talker.text_vocab_size, text])?,
            fc1: loader.matrix("text_projection.linear_fc1.weight", &[text, text])?,
            fc1_bias: loader.floats("text_projection.linear_fc1.bias", &[text])?,
            fc2: loader.matrix("text_projection.linear_fc2.weight", &[hidden, text])?,
            fc2_bias: loader.floats("text_projection.linear_fc2.bias", &[hidden])?,
            stack: DecoderStack::load(&loader.under("model."), &talker.stack)?,
            codec_head: loader.matrix("codec_head.weight", &[vocab, hidden])?,
            predictor: Predictor::load(&loader, stream, config, &frame_tables)?,
            frame_tables,
            config: config.clone(),
        })
    }

    fn hidden(&self) -> usize {
        self.stack.config.hidden_size
    }
}

/// Resources and sizes that a workspace is made for.
#[derive(Debug)]
pub(super) struct TalkerPools {
    /// Pages of the Talker's cache.
    pub(super) kv: View,
    pub(super) page_size: usize,
    /// Sampler slots: the seen set, then, in whole rows of a frame's codes, the last frame.
    pub(super) sampler: View,
    pub(super) sampler_words: usize,
    pub(super) slots: usize,
    /// Where frames go for the codec, if it is in this worker: `[any, groups]`.
    pub(super) ring: Option<View>,
    pub(super) max_rows: usize,
    pub(super) max_prefill_tokens: usize,
    pub(super) max_seq_len: usize,
}

/// Activations, tables and constants of steps.
#[derive(Debug)]
pub(super) struct TalkerWorkspace {
    stack: StackWorkspace,
    predictor: PredictorWorkspace,
    /// `[tokens, text width]`
    text: Buffer,
    text_inner: Buffer,
    /// Residual stream `[tokens, hidden]`.
    x: Buffer,
    cos_sin: Buffer,
    hidden: Buffer,
    logits: Buffer,
    /// Codes of this step `[max_rows, groups]`.
    codes: Buffer,
    /// Codes of the last step `[max_rows, groups]`.
    previous: Buffer,
    /// Projected padding `[1, hidden]`.
    padding: Buffer,
    /// `max_rows` zeros: ids into `padding`.
    zeros: Buffer,
    cache: PagedCache,
    pools: TalkerPools,
}

impl TalkerWorkspace {
    /// Allocate for these pools and compute the constants.
    ///
    /// # Errors
    /// No memory, or the device failed.
    pub(super) fn new(
        device: &Arc<dyn Device>,
        stream: &dyn Stream,
        talker: &Talker,
        pools: TalkerPools,
    ) -> Result<Self> {
        let c = &talker.stack.config;
        let (rows, groups) = (pools.max_rows, c.num_code_groups);
        let tokens = pools.max_prefill_tokens.max(rows);
        let buffer = |name: &str, dtype, len| {
            device.alloc(BufferSpec {
                name: format!("talker.{name}"),
                dtype,
                len,
                place: Place::Device,
            })
        };
        let float = |name: &str, len| buffer(name, DType::F32, len);
        let pages_per_sequence = pools.max_seq_len.div_ceil(pools.page_size);
        let text_width = talker.config.talker_config.text_hidden_size;
        let pad = device.alloc_with(
            BufferSpec {
                name: "talker.pad_id".into(),
                dtype: DType::I32,
                len: 1,
                place: Place::Device,
            },
            bytemuck::bytes_of(&(talker.config.tts_pad_token_id as i32)),
        )?;
        let workspace = Self {
            stack: StackWorkspace::new(&**device, "talker", &talker.stack, tokens)?,
            predictor: PredictorWorkspace::new(device, stream, &talker.predictor, rows)?,
            text: float("text", tokens * text_width)?,
            text_inner: float("text_inner", tokens * text_width)?,
            x: float("x", tokens * c.hidden_size)?,
            cos_sin: float("cos_sin", tokens * c.head_dim)?,
            hidden: float("hidden", rows * c.hidden_size)?,
            logits: float("logits", rows * c.vocab_size)?,
            codes: buffer("codes", DType::I32, rows * groups)?,
            previous: buffer("previous", DType::I32, rows * groups)?,
            padding: float("padding", c.hidden_size)?,
            zeros: buffer("zeros", DType::I32, rows)?,
            cache: PagedCache {
                pool: pools.kv.clone(),
                page_elements: PagedCache::page_elements(c, pools.page_size),
                page_size: pools.page_size,
                table: buffer("pages", DType::I32, pools.slots * pages_per_sequence)?.view(),
                pages_per_sequence,
            },
            pools,
        };
        let touches = Touches::none();
        let launcher = Launcher {
            stream,
            touches: &touches,
        };
        talker.project_text(&launcher, &workspace, pad.view(), 1, workspace.padding.view())?;
        stream.record()?.synchronize(LOAD_DEADLINE)?;
        Ok(workspace)
    }

    /// Pages that a sequence's row of the block table has room for.
    pub(super) fn pages_per_sequence(&self) -> usize {
        self.cache.pages_per_sequence
    }

    /// Row of the sampler pool, in rows of `groups` words, that keeps a slot's last frame.
    pub(super) fn code_row(&self, slot: u32, groups: usize) -> i32 {
        self.seen_row(slot + 1, groups) - 1
    }

    /// First row of a slot's seen set, in rows of `groups` words.
    pub(super) fn seen_row(&self, slot: u32, groups: usize) -> i32 {
        (slot as usize * self.pools.sampler_words / groups) as i32
    }

    /// Codes of the step that ran last.
    pub(super) fn codes(&self, rows: usize, groups: usize) -> View {
        self.codes.slice(0, rows * groups)
    }

    /// Hidden states of the step that ran last.
    pub(super) fn hidden(&self) -> &Buffer {
        &self.hidden
    }

    /// Raw logits of the step that ran last.
    pub(super) fn logits(&self) -> &Buffer {
        &self.logits
    }

    /// Pools that every step reaches through index buffers. Cache and sampler belong to the Talker's stream
    /// alone, so they are named whole: no finer range could order anything.
    pub(super) fn touch(&self, touches: &mut Touches) {
        touches.write(self.pools.kv.clone());
        touches.write(self.pools.sampler.clone());
        self.predictor.touch(touches);
    }

    /// The edge's ring, if the codec is in this worker.
    pub(super) fn ring(&self) -> Option<&View> {
        self.pools.ring.as_ref()
    }

    /// A slot of the sampler pool.
    pub(super) fn sampler_slot(&self, slot: usize) -> View {
        let words = self.pools.sampler_words;
        self.pools.sampler.slice(slot * words, words)
    }

    /// The block table: a prefill writes its rows.
    pub(super) fn table(&self) -> View {
        self.cache.table.clone()
    }
}

impl Talker {
    /// Text tokens to Talker rows.
    fn project_text(
        &self,
        launcher: &Launcher<'_>,
        w: &TalkerWorkspace,
        ids: View,
        rows: usize,
        out: View,
    ) -> Result<()> {
        let gemm = |x: View, matrix: &Matrix, bias: &View, activation, out| Gemm {
            norm: None,
            gated: None,
            x,
            rows,
            w: matrix.clone(),
            bias: Some(bias.clone()),
            activation,
            scale: None,
            accumulate: false,
            out,
            next: None,
        };
        launcher.run(Embed {
            tables: vec![self.text_embedding.clone()],
            ids,
            ids_stride: 1,
            first_id: 0,
            rows,
            width: self.config.talker_config.text_hidden_size,
            accumulate: false,
            out: w.text.view(),
        })?;
        launcher.run(gemm(
            w.text.view(),
            &self.fc1,
            &self.fc1_bias,
            Activation::Silu,
            w.text_inner.view(),
        ))?;
        launcher.run(gemm(
            w.text_inner.view(),
            &self.fc2,
            &self.fc2_bias,
            Activation::None,
            out,
        ))
    }

    /// Add the embeddings of frames to `out`.
    fn add_frames(&self, launcher: &Launcher<'_>, codes: View, rows: usize, out: View) -> Result<()> {
        launcher.run(Embed {
            tables: self.frame_tables.clone(),
            ids: codes,
            ids_stride: self.config.groups(),
            first_id: 0,
            rows,
            width: self.hidden(),
            accumulate: true,
            out,
        })
    }

    /// Input embeddings of a prefill, into `w.x`.
    pub(super) fn embed_prefill(
        &self,
        launcher: &Launcher<'_>,
        w: &TalkerWorkspace,
        step: &PrefillStep,
    ) -> Result<()> {
        let (tokens, x) = (step.tokens, w.x.view());
        self.project_text(launcher, w, step.text.clone(), tokens, x.clone())?;
        self.add_frames(launcher, step.codes.clone(), tokens, x.clone())?;
        let Some((speakers, rows)) = &step.speakers else {
            return Ok(());
        };
        launcher.run(Embed {
            tables: vec![speakers.clone()],
            ids: rows.clone(),
            ids_stride: 1,
            first_id: 0,
            rows: tokens,
            width: self.hidden(),
            accumulate: true,
            out: x,
        })
    }

    /// Input embeddings of a decode step, into `w.x`: the last frame, or the codes of a prompt's last row, plus the
    /// next text token or padding.
    pub(super) fn embed_decode(
        &self,
        launcher: &Launcher<'_>,
        w: &TalkerWorkspace,
        step: &DecodeStep,
    ) -> Result<()> {
        let (rows, groups) = (step.tail.rows, self.config.groups());
        launcher.run(GatherRows {
            src: w.pools.sampler.clone(),
            indirect: true,
            index: step.tail.code_rows.clone(),
            rows,
            width: groups,
            out: w.previous.view(),
        })?;
        match &step.text {
            Some(text) => self.project_text(launcher, w, text.clone(), rows, w.x.view())?,
            None => launcher.run(Embed {
                tables: vec![w.padding.view()],
                ids: w.zeros.view(),
                ids_stride: 1,
                first_id: 0,
                rows,
                width: self.hidden(),
                accumulate: false,
                out: w.x.view(),
            })?,
        }
        self.add_frames(launcher, w.previous.view(), rows, w.x.view())
    }

    /// The input embeddings of a step, `[tokens, hidden]`.
    pub(super) fn embeddings(&self, w: &TalkerWorkspace, tokens: usize) -> View {
        w.x.slice(0, tokens * self.hidden())
    }

    /// A prefill behind its embeddings.
    pub(super) fn run_prefill(
        &self,
        launcher: &Launcher<'_>,
        w: &TalkerWorkspace,
        step: &PrefillStep,
    ) -> Result<()> {
        launcher.run(ScatterRows {
            src: step.pages.clone(),
            index: step.slots.clone(),
            rows: step.rows,
            width: w.cache.pages_per_sequence,
            dst: w.cache.table.clone(),
        })?;
        launcher.run(ScatterRows {
            src: step.next_codes.clone(),
            index: step.code_rows.clone(),
            rows: step.rows,
            width: self.config.groups(),
            dst: w.pools.sampler.clone(),
        })?;
        self.run_stack(
            launcher,
            w,
            step.tokens,
            &step.sequences,
            &step.positions,
            Rows::Prompts,
        )
    }

    /// A whole decode step behind its embeddings.
    pub(super) fn run_decode(
        &self,
        launcher: &Launcher<'_>,
        w: &TalkerWorkspace,
        step: &DecodeStep,
    ) -> Result<()> {
        self.run_stack(
            launcher,
            w,
            step.tail.rows,
            &step.sequences,
            &step.positions,
            Rows::OneEach,
        )?;
        self.run_tail(launcher, w, &step.tail)
    }

    fn run_stack(
        &self,
        launcher: &Launcher<'_>,
        w: &TalkerWorkspace,
        rows: usize,
        sequences: &View,
        positions: &View,
        kind: Rows,
    ) -> Result<()> {
        launcher.run(self.stack.rope_table(positions.clone(), rows, w.cos_sin.view()))?;
        let pass = StackPass {
            x: w.x.view(),
            rows,
            cos_sin: w.cos_sin.view(),
            sequences: sequences.clone(),
            positions: positions.clone(),
            kind,
            cache: &w.cache,
            next: None,
        };
        self.stack.run(launcher, &w.stack, &pass)
    }

    /// From each sequence's row of the stack to its frame.
    fn run_tail(&self, launcher: &Launcher<'_>, w: &TalkerWorkspace, tail: &TailStep) -> Result<()> {
        let (rows, groups) = (tail.rows, self.config.groups());
        let vocab = self.stack.config.vocab_size;
        launcher.run(self.stack.final_norm(w.x.view(), rows, w.hidden.view()))?;
        launcher.run(Gemm {
            norm: None,
            gated: None,
            x: w.hidden.view(),
            rows,
            w: self.codec_head.clone(),
            bias: None,
            activation: Activation::None,
            scale: None,
            accumulate: false,
            out: w.logits.view(),
            next: None,
        })?;
        launcher.run(Sample {
            logits: w.logits.view(),
            rows,
            vocab,
            live: vocab - CONTROL_IDS,
            extra_live: self.config.talker_config.codec_eos_token_id as i32,
            params: tail.talker_params.clone(),
            group: 0,
            seen: Some(StateSlice {
                pool: w.pools.sampler.clone(),
                slot_stride: w.pools.sampler_words,
                offset: 0,
            }),
            tokens: w.codes.view(),
            token_stride: groups,
            token_offset: 0,
            scores: tail.probe.as_ref().map(|probe| probe.scores.clone()),
        })?;
        if let Some(TailProbe { frame, .. }) = &tail.probe {
            launcher.run(frame.forced.apply(0, rows, &w.codes.view()))?;
            launcher.run(ScatterRows {
                src: frame.forced.seen.clone(),
                index: frame.forced.seen_index.clone(),
                rows: frame.forced.seen_index.len,
                width: groups,
                dst: w.pools.sampler.clone(),
            })?;
        }
        let frame = FrameStep {
            rows,
            hidden: w.hidden.view(),
            codes: w.codes.view(),
            params: tail.predictor_params.clone(),
            sequences: tail.pair_sequences.clone(),
            probe: tail.probe.as_ref().map(|probe| &probe.frame),
        };
        self.predictor.run(launcher, &w.predictor, &frame)?;
        let store = |index: &View, dst: &View| ScatterRows {
            src: w.codes.view(),
            index: index.clone(),
            rows,
            width: groups,
            dst: dst.clone(),
        };
        launcher.run(store(&tail.code_rows, &w.pools.sampler))?;
        match &w.pools.ring {
            Some(ring) => launcher.run(store(&tail.ring_rows, ring)),
            None => Ok(()),
        }
    }

    /// Elements of a page of the Talker's cache.
    pub(super) fn page_elements(&self, page_size: usize) -> usize {
        PagedCache::page_elements(&self.stack.config, page_size)
    }

    /// 4-byte words of a sampler slot: a bit for each codec token, in whole rows of a frame's codes so that
    /// the last frame behind it is such a row too.
    pub(super) fn sampler_words(config: &ModelConfig) -> usize {
        let groups = config.groups();
        config
            .talker_config
            .stack
            .vocab_size
            .div_ceil(32)
            .next_multiple_of(groups)
            + groups
    }

    /// Copy of the drawn codes to pinned memory.
    pub(super) fn copy_codes(&self, w: &TalkerWorkspace, rows: usize, out: &Buffer) -> Copy {
        let len = rows * self.config.groups();
        Copy {
            src: w.codes.slice(0, len),
            dst: out.slice(0, len),
        }
    }

    pub(super) fn config(&self) -> &ModelConfig {
        &self.config
    }
}
