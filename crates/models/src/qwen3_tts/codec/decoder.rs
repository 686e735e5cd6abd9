//! The decoder as a sequence of device operations over one pass.

use laneway_device::op::{
    Activation, Attention, Conv, DepthwiseConv, Embed, Gemm, InputNorm, KvCache, LayerNorm, Pointwise,
    QkvRope, RopeTable, Snake, StateSlice, Windows,
};
use laneway_device::{Buffer, Device, Launcher, Result, View};

use super::state::{
    CodecStateLayout, DILATIONS, LayerState, PRE_CONV_TAPS, TAPS, TRANSPOSED_TAPS, exit_channels,
};
use super::weights::{Affine, BlockWeights, DecoderWeights, LayerWeights, UpsampleWeights};
use super::workspace::Workspace;
use crate::checkpoint::Weights;
use crate::checkpoint::config::CodecDecoderConfig;
use crate::qwen3_tts::load::{LoadError, Loader};

/// LayerNorm epsilon of the ConvNeXt layers.
const CONVNEXT_EPS: f32 = 1e-6;

/// The decoder with its weights and the workspace of one pass. It belongs to one stream: passes share the
/// workspace and are ordered only by that.
#[derive(Debug)]
pub struct CodecDecoder {
    config: CodecDecoderConfig,
    layout: CodecStateLayout,
    weights: DecoderWeights,
    work: Workspace,
    pass_frames: usize,
}

/// What one pass decodes; all views are i32 device memory filled before it.
#[derive(Debug, Clone)]
pub struct Pass {
    /// Frames in all windows together.
    pub frames: usize,
    /// `[count, 3]`: first frame within the pass, frames, state slot.
    pub windows: View,
    /// Windows.
    pub count: usize,
    /// State slot of each stream of the step `[streams, 1]`: the block table of the key/value ring.
    pub slots: View,
    /// Row of `slots` for each frame `[frames]`.
    pub streams: View,
    /// Absolute position of each frame in its stream `[frames]`.
    pub positions: View,
}

/// A pass being launched.
struct Run<'a> {
    launcher: &'a Launcher<'a>,
    pool: &'a View,
    slot_words: usize,
    scratch: View,
    pass: &'a Pass,
}

impl Run<'_> {
    fn windows(&self, rate: usize) -> Windows {
        Windows {
            windows: self.pass.windows.clone(),
            count: self.pass.count,
            rate,
        }
    }

    fn state(&self, offset: usize) -> StateSlice {
        StateSlice {
            pool: self.pool.clone(),
            slot_stride: self.slot_words,
            offset,
        }
    }

    /// `out = x · wᵀ + bias` over `rate` rows a frame.
    fn gemm(&self, rate: usize, x: &View, w: &Affine, activation: Activation, out: &View) -> Result<()> {
        self.launcher.run(Gemm {
            norm: None,
            gated: None,
            x: x.clone(),
            rows: self.pass.frames * rate,
            w: w.w.clone(),
            bias: Some(w.bias.clone()),
            activation,
            scale: None,
            accumulate: false,
            out: out.clone(),
            next: None,
        })
    }

    /// `out += scale · (x · wᵀ)`, one row a frame.
    fn add_scaled(&self, x: &View, w: &laneway_device::Matrix, scale: &View, out: &View) -> Result<()> {
        self.launcher.run(Gemm {
            norm: None,
            gated: None,
            x: x.clone(),
            rows: self.pass.frames,
            w: w.clone(),
            bias: None,
            activation: Activation::None,
            scale: Some(scale.clone()),
            accumulate: true,
            out: out.clone(),
            next: None,
        })
    }

    /// `out = norm(x) · wᵀ`, one row a frame.
    fn normed(&self, x: &View, norm: InputNorm, w: &laneway_device::Matrix, out: &View) -> Gemm {
        Gemm {
            x: x.clone(),
            norm: Some(norm),
            rows: self.pass.frames,
            w: w.clone(),
            bias: None,
            activation: Activation::None,
            scale: None,
            accumulate: false,
            gated: None,
            out: out.clone(),
            next: None,
        }
    }

    fn conv(&self, rate: usize, conv: ConvCall<'_>) -> Result<()> {
        self.launcher.run(Conv {
            x: conv.x.clone(),
            rows: self.pass.frames * rate,
            w: conv.w.w.clone(),
            bias: Some(conv.w.bias.clone()),
            c_in: conv.w.w.k / conv.taps,
            taps: conv.taps,
            dilation: conv.dilation,
            snake: conv.snake.cloned(),
            state: conv.state.map(|offset| self.state(offset)),
            windows: self.windows(rate),
            pointwise: conv.pointwise,
            scratch: Some(self.scratch.clone()),
            residual: conv.residual.cloned(),
            clamp: conv.clamp,
            out: conv.out.clone(),
        })
    }
}

/// The operands of a convolution that differ between the layers.
struct ConvCall<'a> {
    x: &'a View,
    w: &'a Affine,
    taps: usize,
    dilation: usize,
    snake: Option<&'a Snake>,
    state: Option<usize>,
    pointwise: Option<Pointwise>,
    residual: Option<&'a View>,
    clamp: bool,
    out: &'a View,
}

impl<'a> ConvCall<'a> {
    fn new(x: &'a View, w: &'a Affine, taps: usize, out: &'a View) -> Self {
        Self {
            x,
            w,
            taps,
            dilation: 1,
            snake: None,
            state: None,
            pointwise: None,
            residual: None,
            clamp: false,
            out,
        }
    }
}

impl CodecDecoder {
    /// Load the decoder (tensors `decoder.*` of the speech tokenizer).
    ///
    /// `max_window` is the widest window of one stream, `pass_frames` the most frames of one pass: it bounds
    /// the workspace, and a step with more frames takes several passes. A stream's window is never split, so
    /// it is at least `max_window`.
    ///
    /// # Errors
    /// A missing tensor, or no memory.
    pub fn load(
        device: &dyn Device,
        config: &CodecDecoderConfig,
        weights: &Weights,
        max_window: usize,
        pass_frames: usize,
    ) -> Result<Self, LoadError> {
        let pass_frames = pass_frames.max(max_window);
        let weights = DecoderWeights::load(&Loader::new(device, weights, "decoder."), config)?;
        // All products are of one type.
        let product = device.activation_dtype(&weights.output_proj.w);
        Ok(Self {
            layout: CodecStateLayout::new(config, max_window),
            work: Workspace::new(device, config, product, pass_frames)?,
            weights,
            config: config.clone(),
            pass_frames,
        })
    }

    /// Where a stream's state lies in its slot.
    pub fn layout(&self) -> &CodecStateLayout {
        &self.layout
    }

    /// Most frames of one pass.
    pub fn pass_frames(&self) -> usize {
        self.pass_frames
    }

    /// Codebooks of a frame.
    pub fn codebooks(&self) -> usize {
        self.config.num_quantizers
    }

    /// Entries of a codebook: codes are `0 .. codebook_size`.
    pub fn codebook_size(&self) -> usize {
        self.config.codebook_size
    }

    /// Samples of a frame.
    pub fn samples_per_frame(&self) -> usize {
        self.config
            .upsampling_ratios
            .iter()
            .chain(&self.config.upsample_rates)
            .product()
    }

    /// Where a pass leaves the samples of its first `frames` frames, until the next pass.
    pub fn samples(&self, frames: usize) -> View {
        self.work.samples.slice(0, frames * self.samples_per_frame())
    }

    /// Queue one pass: `codes` `[frames, codebooks]` in, samples `[frames * samples_per_frame]` out (see
    /// [`CodecDecoder::samples`]). The state of every window's slot in `pool`, slots being `slot_words` apart,
    /// advances by its frames; the step's touches name these slots. Frames of no window are padding: they reach
    /// no slot, and what their samples are is of no use.
    ///
    /// # Errors
    /// Whatever the stream refuses.
    pub fn run(
        &self,
        launcher: &Launcher<'_>,
        pool: &View,
        slot_words: usize,
        pass: &Pass,
        codes: &View,
    ) -> Result<()> {
        let run = Run {
            launcher,
            pool,
            slot_words,
            scratch: self.work.scratch.view(),
            pass,
        };
        self.dequantize(&run, codes)?;
        self.transform(&run)?;
        let (latent, spare, rate) = self.upsample_latent(&run)?;
        self.vocode(&run, latent, spare, rate)
    }

    fn dequantize(&self, run: &Run<'_>, codes: &View) -> Result<()> {
        let (w, rows) = (&self.weights, run.pass.frames);
        let parts = [(&w.first, &w.first_proj), (&w.rest, &w.rest_proj)];
        let mut first_id = 0;
        for (tables, proj) in parts {
            run.launcher.run(Embed {
                tables: tables.clone(),
                ids: codes.clone(),
                ids_stride: self.config.num_quantizers,
                first_id,
                rows,
                width: self.config.codebook_dim / 2,
                accumulate: false,
                out: self.work.entry.view(),
            })?;
            run.launcher.run(Gemm {
                norm: None,
                gated: None,
                x: self.work.entry.view(),
                rows,
                w: proj.clone(),
                bias: None,
                activation: Activation::None,
                scale: None,
                accumulate: first_id > 0,
                out: self.work.quantized.view(),
                next: None,
            })?;
            first_id += tables.len();
        }
        Ok(())
    }

    /// From the dequantized frames to the latent of each: `pre_conv` and the transformer.
    fn transform(&self, run: &Run<'_>) -> Result<()> {
        let (c, w, work) = (&self.config, &self.weights, &self.work);
        let (latent, hidden) = (work.latent.view(), work.hidden.view());
        run.conv(
            1,
            ConvCall {
                state: Some(self.layout.pre_conv),
                ..ConvCall::new(&work.quantized.view(), &w.pre_conv, PRE_CONV_TAPS, &latent)
            },
        )?;
        run.gemm(1, &latent, &w.input_proj, Activation::None, &hidden)?;
        run.launcher.run(RopeTable {
            positions: run.pass.positions.clone(),
            inv_freq: w.inv_freq.clone(),
            rows: run.pass.frames,
            head_dim: c.head_dim,
            out: work.cos_sin.view(),
        })?;
        for (layer, state) in w.layers.iter().zip(&self.layout.layers) {
            self.attention(run, layer, state)?;
            run.launcher.run(Gemm {
                gated: Some(work.gate_up.view()),
                ..run.normed(
                    &hidden,
                    self.norm(&layer.mlp_norm),
                    &layer.gate_up,
                    &work.inner.view(),
                )
            })?;
            run.add_scaled(&work.inner.view(), &layer.down, &layer.mlp_scale, &hidden)?;
        }
        run.launcher.run(Gemm {
            bias: Some(w.output_proj.bias.clone()),
            ..run.normed(&hidden, self.norm(&w.norm), &w.output_proj.w, &latent)
        })
    }

    /// The norm in front of a product of the transformer.
    fn norm(&self, weight: &View) -> InputNorm {
        InputNorm {
            weight: weight.clone(),
            eps: self.config.rms_norm_eps,
            scratch: self.work.normed.view(),
            prepared: false,
        }
    }

    fn attention(&self, run: &Run<'_>, layer: &LayerWeights, state: &LayerState) -> Result<()> {
        let (c, work, rows) = (&self.config, &self.work, run.pass.frames);
        let hidden = work.hidden.view();
        let cache = KvCache {
            pool: run.pool.clone(),
            page_stride: run.slot_words,
            k_offset: state.keys,
            v_offset: state.values,
            page_size: self.layout.ring,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            table: run.pass.slots.clone(),
            blocks_per_sequence: 1,
            ring: true,
        };
        let norm = self.norm(&layer.attention_norm);
        run.launcher
            .run(run.normed(&hidden, norm, &layer.qkv, &work.qkv.view()))?;
        run.launcher.run(QkvRope {
            qkv: work.qkv.view(),
            rows,
            heads: c.num_attention_heads,
            q_norm: None,
            k_norm: None,
            eps: c.rms_norm_eps,
            cos_sin: work.cos_sin.view(),
            sequences: run.pass.streams.clone(),
            positions: run.pass.positions.clone(),
            cache: cache.clone(),
            q_out: work.q.view(),
        })?;
        run.launcher.run(Attention {
            q: work.q.view(),
            rows,
            heads: c.num_attention_heads,
            sequences: run.pass.streams.clone(),
            positions: run.pass.positions.clone(),
            cache,
            window: Some(c.sliding_window),
            out: work.attended.view(),
        })?;
        run.add_scaled(
            &work.attended.view(),
            &layer.attention_out,
            &layer.attention_scale,
            &hidden,
        )
    }

    /// The latent at its final rate; hands out the buffer that holds it, the spare one and the rate.
    fn upsample_latent(&self, run: &Run<'_>) -> Result<(View, View, usize)> {
        let [mut out, mut spare] = self.work.wide.each_ref().map(Buffer::view);
        let mut x = self.work.latent.view();
        let mut rate = 1;
        let stages = self.weights.upsample.iter().zip(&self.layout.depthwise);
        for ((stage, state), ratio) in stages.zip(&self.config.upsampling_ratios) {
            run.gemm(rate, &x, &stage.transposed, Activation::None, &out)?;
            rate *= ratio;
            self.convnext(run, stage, *state, rate, &out, &spare)?;
            x = out.clone();
            std::mem::swap(&mut out, &mut spare);
        }
        Ok((x, out, rate))
    }

    /// `x += gamma · narrow(gelu(widen(norm(depthwise(x)))))`
    fn convnext(
        &self,
        run: &Run<'_>,
        w: &UpsampleWeights,
        state: usize,
        rate: usize,
        x: &View,
        spare: &View,
    ) -> Result<()> {
        let (rows, width) = (run.pass.frames * rate, self.config.latent_dim);
        run.launcher.run(DepthwiseConv {
            x: x.clone(),
            rows,
            w: w.depthwise.clone(),
            bias: w.depthwise_bias.clone(),
            channels: width,
            taps: TAPS,
            state: run.state(state),
            windows: run.windows(rate),
            out: spare.clone(),
        })?;
        run.launcher.run(LayerNorm {
            x: spare.clone(),
            rows,
            width,
            weight: w.norm.clone(),
            bias: w.norm_bias.clone(),
            eps: CONVNEXT_EPS,
            out: spare.clone(),
        })?;
        let inner = self.work.convnext.view();
        run.gemm(rate, spare, &w.widen, Activation::Gelu, &inner)?;
        run.launcher.run(Gemm {
            norm: None,
            gated: None,
            x: inner,
            rows,
            w: w.narrow.w.clone(),
            bias: Some(w.narrow.bias.clone()),
            activation: Activation::None,
            scale: Some(w.gamma.clone()),
            accumulate: true,
            out: x.clone(),
            next: None,
        })
    }

    fn vocode(&self, run: &Run<'_>, mut x: View, mut spare: View, mut rate: usize) -> Result<()> {
        let w = &self.weights;
        run.conv(
            rate,
            ConvCall {
                state: Some(self.layout.entry),
                ..ConvCall::new(&x, &w.entry, TAPS, &spare)
            },
        )?;
        std::mem::swap(&mut x, &mut spare);
        for (block, up) in (0..w.blocks.len()).zip(&self.config.upsample_rates) {
            (x, spare) = self.block(run, block, rate, x, spare)?;
            rate *= up;
        }
        debug_assert_eq!(w.exit.w.k, TAPS * exit_channels(&self.config));
        run.conv(
            rate,
            ConvCall {
                snake: Some(&w.exit_snake),
                state: Some(self.layout.exit),
                clamp: true,
                ..ConvCall::new(&x, &w.exit, TAPS, &self.work.samples.view())
            },
        )
    }

    /// One upsampling block; hands out the buffer that holds its result, and the other one.
    fn block(
        &self,
        run: &Run<'_>,
        block: usize,
        rate: usize,
        mut x: View,
        mut spare: View,
    ) -> Result<(View, View)> {
        let w: &BlockWeights = &self.weights.blocks[block];
        let state = &self.layout.blocks[block];
        run.conv(
            rate,
            ConvCall {
                snake: Some(&w.snake),
                state: Some(state.transposed),
                ..ConvCall::new(&x, &w.transposed, TRANSPOSED_TAPS, &spare)
            },
        )?;
        std::mem::swap(&mut x, &mut spare);
        let rate = rate * self.config.upsample_rates[block];
        for ((unit, dilation), state) in w.units.iter().zip(DILATIONS).zip(state.units) {
            run.conv(
                rate,
                ConvCall {
                    dilation,
                    snake: Some(&unit.snake1),
                    state: Some(state),
                    pointwise: Some(Pointwise {
                        snake: unit.snake2.clone(),
                        w: unit.conv2.w.clone(),
                        bias: Some(unit.conv2.bias.clone()),
                    }),
                    residual: Some(&x),
                    ..ConvCall::new(&x, &unit.conv1, TAPS, &spare)
                },
            )?;
            std::mem::swap(&mut x, &mut spare);
        }
        Ok((x, spare))
    }
}

#[cfg(test)]
mod tests;
