//! The codec encoder (Mimi): a clip of speech to the code frames that the Talker would have made for it.

use laneway_device::op::{
    Activation, Attention, KvCache, LayerNorm, NearestCode, Padding, QkvRope, RopeTable,
};
use laneway_device::{Buffer, BufferSpec, DType, Device, Launcher, Matrix, Place, Result, Touches, View};

use super::clip_ops::{ClipLayer, ClipOps, ConvExtras, ConvShape};
use super::load::{LoadError, Loader};
use crate::checkpoint::config::{CodecEncoderConfig, SpeechTokenizerConfig};
use crate::checkpoint::{Weights, concat_rows};

/// Kernel and stride of the last downsampling.
const DOWNSAMPLE_TAPS: usize = 4;
const DOWNSAMPLE_STRIDE: usize = 2;

/// The encoder with its weights and the workspace of one clip; clips on one stream follow each other.
#[derive(Debug)]
pub struct CodecEncoder {
    config: CodecEncoderConfig,
    codebooks: usize,
    samples_per_frame: usize,
    max_samples: usize,
    first: ClipLayer,
    stages: Vec<Stage>,
    last: ClipLayer,
    layers: Vec<Layer>,
    inv_freq: View,
    downsample: ClipLayer,
    /// Semantic codebook, then the acoustic ones, each list quantizing its own projection of the latent.
    quantizers: [Quantizer; 2],
    work: Workspace,
}

/// Residual units, then a convolution that halves the time axis several times over.
#[derive(Debug)]
struct Stage {
    units: Vec<[ClipLayer; 2]>,
    downsample: ClipLayer,
    stride: usize,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Norm,
    qkv: ClipLayer,
    attention_out: Matrix,
    attention_scale: View,
    mlp_norm: Norm,
    widen: ClipLayer,
    narrow: Matrix,
    mlp_scale: View,
}

#[derive(Debug)]
struct Norm {
    weight: View,
    bias: View,
}

#[derive(Debug)]
struct Quantizer {
    input: ClipLayer,
    books: Vec<View>,
}

#[derive(Debug)]
struct Workspace {
    /// Input and output of the convolutions in turn.
    wide: [Buffer; 2],
    hidden: Buffer,
    normed: Buffer,
    qkv: Buffer,
    q: Buffer,
    attended: Buffer,
    inner: Buffer,
    cos_sin: Buffer,
    latent: Buffer,
    residual: Buffer,
    codes: Buffer,
    /// Keys and values of the layer being run, one sequence.
    cache: Buffer,
    /// Block table, sequence of each row and positions: the same for every clip.
    table: Buffer,
    sequences: Buffer,
    positions: Buffer,
}

impl CodecEncoder {
    /// Load the encoder (tensors `encoder.*` of the speech tokenizer) for clips of at most `max_samples`.
    ///
    /// # Errors
    /// A missing tensor, or no memory.
    pub fn load(
        device: &dyn Device,
        config: &SpeechTokenizerConfig,
        weights: &Weights,
        max_samples: usize,
    ) -> Result<Self, LoadError> {
        let load = Loader::new(device, weights, "encoder.");
        let (c, codebooks) = (&config.encoder_config, config.encoder_valid_num_quantizers);
        let seanet = load.under("encoder.layers.");
        let transformer = load.under("encoder_transformer.");
        let mut width = c.num_filters;
        // Module numbers count the activations between the convolutions too.
        let mut module = 1;
        let mut stages = Vec::new();
        for stride in c.upsampling_ratios.iter().rev() {
            stages.push(Stage::load(&seanet, c, width, module, *stride)?);
            module += c.num_residual_layers + 2;
            width *= 2;
        }
        Ok(Self {
            first: ClipLayer::conv(&seanet, "0.conv", [c.num_filters, 1, c.kernel_size])?,
            stages,
            last: ClipLayer::conv(
                &seanet,
                &format!("{}.conv", module + 1),
                [c.hidden_size, width, c.last_kernel_size],
            )?,
            layers: (0..c.num_hidden_layers)
                .map(|i| Layer::load(&transformer.under(&format!("layers.{i}.")), c))
                .collect::<Result<_, _>>()?,
            inv_freq: transformer.inv_freq(c.rope_theta, c.head_dim)?,
            downsample: ClipLayer::conv_without_bias(
                &load,
                "downsample.conv",
                [c.hidden_size, c.hidden_size, DOWNSAMPLE_TAPS],
            )?,
            quantizers: [
                Quantizer::load(&load, "semantic", c, c.num_semantic_quantizers)?,
                Quantizer::load(&load, "acoustic", c, codebooks - c.num_semantic_quantizers)?,
            ],
            work: Workspace::new(device, config, max_samples)?,
            config: c.clone(),
            codebooks,
            samples_per_frame: config.encode_downsample_rate,
            max_samples,
        })
    }

    /// Frames of a clip.
    pub fn frames(&self, samples: usize) -> usize {
        samples.div_ceil(self.samples_per_frame)
    }

    /// Name the workspace that [`CodecEncoder::encode`] reaches through index buffers.
    pub fn touch(&self, touches: &mut Touches) {
        touches.write(self.work.cache.view());
    }

    /// Queue the encoding of `samples` 24 kHz samples; hands out codes `[frames, codebooks]` i32, valid until
    /// the next clip. The launcher's touches hold those of [`CodecEncoder::touch`].
    ///
    /// # Errors
    /// Whatever the stream refuses.
    ///
    /// # Panics
    /// When the clip has more samples than the encoder was loaded for.
    pub fn encode(&self, launcher: &Launcher<'_>, wav: &View, samples: usize) -> Result<View> {
        assert!(
            samples <= self.max_samples,
            "a clip of {samples} samples; at most {}",
            self.max_samples
        );
        let ops = ClipOps(launcher);
        let rows = self.convolve(ops, wav, samples)?;
        self.transform(ops, rows)?;
        let frames = ops.conv(
            &self.work.hidden.view(),
            rows,
            &self.downsample,
            ConvShape::causal(DOWNSAMPLE_TAPS, DOWNSAMPLE_STRIDE, 1, Padding::Replicate),
            ConvExtras::default(),
            &self.work.latent.view(),
        )?;
        self.quantize(ops, frames)
    }

    /// SEANet: from samples to `work.hidden`; hands out its rows.
    fn convolve(&self, ops: ClipOps<'_>, wav: &View, samples: usize) -> Result<usize> {
        let c = &self.config;
        let causal = |taps, stride, dilation| ConvShape::causal(taps, stride, dilation, Padding::Zero);
        let elu = |residual: Option<View>| ConvExtras {
            input_activation: Activation::Elu,
            residual,
            ..ConvExtras::default()
        };
        let [mut x, mut spare] = self.work.wide.each_ref().map(Buffer::view);
        let mut rows = ops.conv(
            wav,
            samples,
            &self.first,
            causal(c.kernel_size, 1, 1),
            ConvExtras::default(),
            &x,
        )?;
        for stage in &self.stages {
            for (j, [narrow, widen]) in stage.units.iter().enumerate() {
                let dilation = c.dilation_growth_rate.pow(j as u32);
                let shape = causal(c.residual_kernel_size, 1, dilation);
                ops.conv(&x, rows, narrow, shape, elu(None), &spare)?;
                let residual = x.slice(0, rows * widen.w.n);
                ops.conv(&spare, rows, widen, causal(1, 1, 1), elu(Some(residual)), &x)?;
            }
            let shape = causal(2 * stage.stride, stage.stride, 1);
            rows = ops.conv(&x, rows, &stage.downsample, shape, elu(None), &spare)?;
            std::mem::swap(&mut x, &mut spare);
        }
        let shape = causal(c.last_kernel_size, 1, 1);
        ops.conv(&x, rows, &self.last, shape, elu(None), &self.work.hidden.view())
    }

    /// The transformer over `work.hidden`, in place. The reference's attention sees the whole past whatever
    /// its configured window says.
    fn transform(&self, ops: ClipOps<'_>, rows: usize) -> Result<()> {
        let (c, work) = (&self.config, &self.work);
        let kv = c.num_key_value_heads * c.head_dim;
        let q = c.num_attention_heads * c.head_dim;
        let positions = work.positions.slice(0, rows);
        let sequences = work.sequences.slice(0, rows);
        let cos_sin = work.cos_sin.slice(0, rows * c.head_dim);
        let capacity = work.cache.len() / 2;
        let cache = KvCache {
            pool: work.cache.view(),
            page_stride: work.cache.len(),
            k_offset: 0,
            v_offset: capacity,
            page_size: capacity / kv,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            table: work.table.view(),
            blocks_per_sequence: 1,
            ring: false,
        };
        ops.0.run(RopeTable {
            positions: positions.clone(),
            inv_freq: self.inv_freq.clone(),
            rows,
            head_dim: c.head_dim,
            out: cos_sin.clone(),
        })?;
        let (hidden, normed) = (work.hidden.view(), work.normed.view());
        for layer in &self.layers {
            self.norm(ops, rows, &layer.attention_norm)?;
            ops.linear(&normed, rows, &layer.qkv, Activation::None, &work.qkv.view())?;
            ops.0.run(QkvRope {
                qkv: work.qkv.slice(0, rows * (q + 2 * kv)),
                rows,
                heads: c.num_attention_heads,
                q_norm: None,
                k_norm: None,
                eps: 0.0,
                cos_sin: cos_sin.clone(),
                sequences: sequences.clone(),
                positions: positions.clone(),
                cache: cache.clone(),
                q_out: work.q.slice(0, rows * q),
            })?;
            ops.0.run(Attention {
                q: work.q.slice(0, rows * q),
                rows,
                heads: c.num_attention_heads,
                sequences: sequences.clone(),
                positions: positions.clone(),
                cache: cache.clone(),
                window: None,
                out: work.attended.slice(0, rows * q),
            })?;
            let attended = work.attended.view();
            ops.add_scaled(
                &attended,
                rows,
                &layer.attention_out,
                &layer.attention_scale,
                &hidden,
            )?;
            self.norm(ops, rows, &layer.mlp_norm)?;
            ops.linear(&normed, rows, &layer.widen, Activation::Gelu, &work.inner.view())?;
            ops.add_scaled(&work.inner.view(), rows, &layer.narrow, &layer.mlp_scale, &hidden)?;
        }
        Ok(())
    }

    fn norm(&self, ops: ClipOps<'_>, rows: usize, norm: &Norm) -> Result<()> {
        let width = self.config.hidden_size;
        ops.0.run(LayerNorm {
            x: self.work.hidden.slice(0, rows * width),
            rows,
            width,
            weight: norm.weight.clone(),
            bias: norm.bias.clone(),
            eps: self.config.norm_eps,
            out: self.work.normed.slice(0, rows * width),
        })
    }

    fn quantize(&self, ops: ClipOps<'_>, frames: usize) -> Result<View> {
        let (c, work) = (&self.config, &self.work);
        let codes = work.codes.slice(0, frames * self.codebooks);
        let residual = work.residual.slice(0, frames * c.codebook_dim);
        let mut code_offset = 0;
        for quantizer in &self.quantizers {
            let latent = work.latent.view();
            ops.linear(&latent, frames, &quantizer.input, Activation::None, &residual)?;
            for book in &quantizer.books {
                ops.0.run(NearestCode {
                    x: residual.clone(),
                    rows: frames,
                    width: c.codebook_dim,
                    book: book.clone(),
                    entries: c.codebook_size,
                    codes: codes.clone(),
                    code_stride: self.codebooks,
                    code_offset,
                })?;
                code_offset += 1;
            }
        }
        Ok(codes)
    }
}

impl Stage {
    fn load(
        load: &Loader<'_>,
        c: &CodecEncoderConfig,
        width: usize,
        module: usize,
        stride: usize,
    ) -> Result<Self, LoadError> {
        let inner = width / c.compress;
        let units = (0..c.num_residual_layers)
            .map(|unit| {
                let load = load.under(&format!("{}.block.", module + unit));
                Ok([
                    ClipLayer::conv(&load, "1.conv", [inner, width, c.residual_kernel_size])?,
                    ClipLayer::conv(&load, "3.conv", [width, inner, 1])?,
                ])
            })
            .collect::<Result<_, LoadError>>()?;
        let name = format!("{}.conv", module + c.num_residual_layers + 1);
        Ok(Self {
            units,
            downsample: ClipLayer::conv(load, &name, [2 * width, width, 2 * stride])?,
            stride,
        })
    }
}

impl Layer {
    fn load(load: &Loader<'_>, c: &CodecEncoderConfig) -> Result<Self, LoadError> {
        let (hidden, inner) = (c.hidden_size, c.intermediate_size);
        let q = c.num_attention_heads * c.head_dim;
        let kv = c.num_key_value_heads * c.head_dim;
        let norm = |name: &str| {
            Ok::<_, LoadError>(Norm {
                weight: load.floats(&format!("{name}.weight"), &[hidden])?,
                bias: load.floats(&format!("{name}.bias"), &[hidden])?,
            })
        };
        let unbiased = |w| ClipLayer { w, bias: None };
        let qkv = [("q", q), ("k", kv), ("v", kv)]
            .into_iter()
            .map(|(part, rows)| load.tensor(&format!("self_attn.{part}_proj.weight"), &[rows, hidden]))
            .collect::<Result<Vec<_>, _>>()?;
        let qkv = concat_rows(&format!("{}self_attn.qkv_proj", load.prefix), &qkv);
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            qkv: unbiased(load.pack(&qkv)?),
            attention_out: load.matrix("self_attn.o_proj.weight", &[hidden, q])?,
            attention_scale: load.floats("self_attn_layer_scale.scale", &[hidden])?,
            mlp_norm: norm("post_attention_layernorm")?,
            widen: unbiased(load.matrix("mlp.fc1.weight", &[inner, hidden])?),
            narrow: load.matrix("mlp.fc2.weight", &[hidden, inner])?,
            mlp_scale: load.floats("mlp_layer_scale.scale", &[hidden])?,
        })
    }
}

impl Quantizer {
    fn load(load: &Loader<'_>, part: &str, c: &CodecEncoderConfig, books: usize) -> Result<Self, LoadError> {
        let load = load.under(&format!("quantizer.{part}_residual_vector_quantizer."));
        Ok(Self {
            input: ClipLayer::conv_without_bias(&load, "input_proj", [c.codebook_dim, c.hidden_size, 1])?,
            books: (0..books)
                .map(|layer| {
                    load.under(&format!("layers.{layer}.codebook.")).codebook(
                        "embed_sum",
                        c.codebook_size,
                        c.codebook_dim,
                    )
                })
                .collect::<Result<_, _>>()?,
        })
    }
}

impl Workspace {
    fn new(device: &dyn Device, config: &SpeechTokenizerConfig, samples: usize) -> Result<Self> {
        let c = &config.encoder_config;
        let spec = |name: &str, dtype, len| BufferSpec {
            name: format!("codec_encoder_{name}"),
            dtype,
            len,
            place: Place::Device,
        };
        let buffer = |name: &str, len| device.alloc(spec(name, DType::F32, len));
        let constants = |name: &str, values: Vec<i32>| {
            device.alloc_with(
                spec(name, DType::I32, values.len()),
                bytemuck::cast_slice(&values),
            )
        };
        // Convolutions go from the first buffer to the second and back; the widest is the first one's output.
        let (mut rows, mut width) = (samples, c.num_filters);
        let mut spare = 0;
        for stride in c.upsampling_ratios.iter().rev() {
            spare = spare.max(rows * width / c.compress);
            rows = rows.div_ceil(*stride);
            width *= 2;
            spare = spare.max(rows * width);
        }
        let frames = rows.div_ceil(DOWNSAMPLE_STRIDE);
        let q = c.num_attention_heads * c.head_dim;
        let kv = c.num_key_value_heads * c.head_dim;
        Ok(Self {
            wide: [
                buffer("wide_a", samples * c.num_filters)?,
                buffer("wide_b", spare)?,
            ],
            hidden: buffer("hidden", rows * c.hidden_size)?,
            normed: buffer("normed", rows * c.hidden_size)?,
            qkv: buffer("qkv", rows * (q + 2 * kv))?,
            q: buffer("q", rows * q)?,
            attended: buffer("attended", rows * q)?,
            inner: buffer("inner", rows * c.intermediate_size)?,
            cos_sin: buffer("cos_sin", rows * c.head_dim)?,
            latent: buffer("latent", frames * c.hidden_size)?,
            residual: buffer("residual", frames * c.codebook_dim)?,
            codes: device.alloc(spec(
                "codes",
                DType::I32,
                frames * config.encoder_valid_num_quantizers,
            ))?,
            cache: buffer("cache", 2 * rows * kv)?,
            table: constants("table", vec![0])?,
            sequences: constants("sequences", vec![0; rows])?,
            positions: constants("positions", (0..rows as i32).collect())?,
        })
    }
}

#[cfg(test)]
mod tests;
