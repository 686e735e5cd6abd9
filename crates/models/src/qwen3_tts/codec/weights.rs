//! The decoder's weights on the device.

use laneway_device::op::Snake;
use laneway_device::{Matrix, View};

use super::state::{DILATIONS, PRE_CONV_TAPS, TAPS, block_channels, exit_channels};
use crate::checkpoint::concat_rows;
use crate::checkpoint::config::CodecDecoderConfig;
use crate::qwen3_tts::load::{LoadError, Loader, transposed_as_conv};

/// A matrix and its bias.
#[derive(Debug)]
pub(super) struct Affine {
    pub(super) w: Matrix,
    pub(super) bias: View,
}

#[derive(Debug)]
pub(super) struct DecoderWeights {
    /// Entries of codebook 0, and of the others.
    pub(super) first: Vec<View>,
    pub(super) rest: Vec<View>,
    pub(super) first_proj: Matrix,
    pub(super) rest_proj: Matrix,
    pub(super) pre_conv: Affine,
    pub(super) inv_freq: View,
    pub(super) input_proj: Affine,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) norm: View,
    pub(super) output_proj: Affine,
    pub(super) upsample: Vec<UpsampleWeights>,
    pub(super) entry: Affine,
    pub(super) blocks: Vec<BlockWeights>,
    pub(super) exit_snake: Snake,
    pub(super) exit: Affine,
}

#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: View,
    pub(super) qkv: Matrix,
    pub(super) attention_out: Matrix,
    pub(super) attention_scale: View,
    pub(super) mlp_norm: View,
    pub(super) gate_up: Matrix,
    pub(super) down: Matrix,
    pub(super) mlp_scale: View,
}

/// Latent upsampling: a transposed convolution without overlap, then a ConvNeXt layer.
#[derive(Debug)]
pub(super) struct UpsampleWeights {
    pub(super) transposed: Affine,
    /// `[TAPS, latent_dim]`
    pub(super) depthwise: View,
    pub(super) depthwise_bias: View,
    pub(super) norm: View,
    pub(super) norm_bias: View,
    pub(super) widen: Affine,
    pub(super) narrow: Affine,
    pub(super) gamma: View,
}

#[derive(Debug)]
pub(super) struct BlockWeights {
    pub(super) snake: Snake,
    pub(super) transposed: Affine,
    pub(super) units: Vec<UnitWeights>,
}

#[derive(Debug)]
pub(super) struct UnitWeights {
    pub(super) snake1: Snake,
    pub(super) conv1: Affine,
    pub(super) snake2: Snake,
    pub(super) conv2: Affine,
}

impl DecoderWeights {
    pub(super) fn load(load: &Loader<'_>, c: &CodecDecoderConfig) -> Result<Self, LoadError> {
        let entry = c.codebook_dim / 2;
        let quantizer = load.under("quantizer.");
        let books = |part: &str, layers: usize| {
            (0..layers)
                .map(|layer| {
                    quantizer
                        .under(&format!("{part}.vq.layers.{layer}._codebook."))
                        .codebook("embedding_sum", c.codebook_size, entry)
                })
                .collect::<Result<Vec<_>, _>>()
        };
        let transformer = load.under("pre_transformer.");
        let stages = load.under("decoder.");
        let blocks = c.upsample_rates.len();
        Ok(Self {
            first: books("rvq_first", 1)?,
            rest: books("rvq_rest", c.num_quantizers - 1)?,
            first_proj: quantizer.matrix("rvq_first.output_proj.weight", &[c.codebook_dim, entry, 1])?,
            rest_proj: quantizer.matrix("rvq_rest.output_proj.weight", &[c.codebook_dim, entry, 1])?,
            pre_conv: conv(
                load,
                "pre_conv.conv",
                [c.latent_dim, c.codebook_dim, PRE_CONV_TAPS],
            )?,
            inv_freq: transformer.inv_freq(c.rope_theta, c.head_dim)?,
            input_proj: linear(&transformer, "input_proj", c.hidden_size, c.latent_dim)?,
            layers: (0..c.num_hidden_layers)
                .map(|i| LayerWeights::load(&transformer.under(&format!("layers.{i}.")), c))
                .collect::<Result<_, _>>()?,
            norm: transformer.floats("norm.weight", &[c.hidden_size])?,
            output_proj: linear(&transformer, "output_proj", c.latent_dim, c.hidden_size)?,
            upsample: c
                .upsampling_ratios
                .iter()
                .enumerate()
                .map(|(i, ratio)| UpsampleWeights::load(&load.under(&format!("upsample.{i}.")), c, *ratio))
                .collect::<Result<_, _>>()?,
            entry: conv(&stages, "0.conv", [c.decoder_dim, c.latent_dim, TAPS])?,
            blocks: (0..blocks)
                .map(|i| BlockWeights::load(&stages.under(&format!("{}.block.", i + 1)), c, i))
                .collect::<Result<_, _>>()?,
            exit_snake: snake(&stages, &format!("{}", blocks + 1), exit_channels(c))?,
            exit: conv(
                &stages,
                &format!("{}.conv", blocks + 2),
                [1, exit_channels(c), TAPS],
            )?,
        })
    }
}

impl LayerWeights {
    fn load(load: &Loader<'_>, c: &CodecDecoderConfig) -> Result<Self, LoadError> {
        let (hidden, inner) = (c.hidden_size, c.intermediate_size);
        let q = c.num_attention_heads * c.head_dim;
        let kv = c.num_key_value_heads * c.head_dim;
        let stack = |name: &str, parts: &[(&str, usize)]| {
            let parts = parts
                .iter()
                .map(|(part, rows)| load.tensor(&format!("{part}.weight"), &[*rows, hidden]))
                .collect::<Result<Vec<_>, _>>()?;
            load.pack(&concat_rows(&format!("{}{name}", load.prefix), &parts))
        };
        Ok(Self {
            attention_norm: load.floats("input_layernorm.weight", &[hidden])?,
            qkv: stack(
                "self_attn.qkv_proj",
                &[
                    ("self_attn.q_proj", q),
                    ("self_attn.k_proj", kv),
                    ("self_attn.v_proj", kv),
                ],
            )?,
            attention_out: load.matrix("self_attn.o_proj.weight", &[hidden, q])?,
            attention_scale: load.floats("self_attn_layer_scale.scale", &[hidden])?,
            mlp_norm: load.floats("post_attention_layernorm.weight", &[hidden])?,
            gate_up: stack(
                "mlp.gate_up_proj",
                &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)],
            )?,
            down: load.matrix("mlp.down_proj.weight", &[hidden, inner])?,
            mlp_scale: load.floats("mlp_layer_scale.scale", &[hidden])?,
        })
    }
}

impl UpsampleWeights {
    fn load(load: &Loader<'_>, c: &CodecDecoderConfig, ratio: usize) -> Result<Self, LoadError> {
        let width = c.latent_dim;
        let taps = load.tensor("1.dwconv.conv.weight", &[width, 1, TAPS])?;
        let values = taps.to_f32();
        let by_tap: Vec<f32> = (0..TAPS * width)
            .map(|i| values[i % width * TAPS + i / width])
            .collect();
        Ok(Self {
            transposed: transposed(load, "0.conv", [width, width, ratio], ratio)?,
            depthwise: load.upload(&taps.name, &by_tap)?,
            depthwise_bias: load.floats("1.dwconv.conv.bias", &[width])?,
            norm: load.floats("1.norm.weight", &[width])?,
            norm_bias: load.floats("1.norm.bias", &[width])?,
            widen: linear(load, "1.pwconv1", CONVNEXT_FACTOR * width, width)?,
            narrow: linear(load, "1.pwconv2", width, CONVNEXT_FACTOR * width)?,
            gamma: load.floats("1.gamma", &[width])?,
        })
    }
}

/// Inner width of a ConvNeXt layer over its outer width.
pub(super) const CONVNEXT_FACTOR: usize = 4;

impl BlockWeights {
    fn load(load: &Loader<'_>, c: &CodecDecoderConfig, block: usize) -> Result<Self, LoadError> {
        let (width, rate) = (block_channels(c, block), c.upsample_rates[block]);
        let units = (2..2 + DILATIONS.len())
            .map(|unit| {
                let load = load.under(&format!("{unit}."));
                Ok(UnitWeights {
                    snake1: snake(&load, "act1", width)?,
                    conv1: conv(&load, "conv1.conv", [width, width, TAPS])?,
                    snake2: snake(&load, "act2", width)?,
                    conv2: conv(&load, "conv2.conv", [width, width, 1])?,
                })
            })
            .collect::<Result<_, LoadError>>()?;
        Ok(Self {
            snake: snake(load, "0", 2 * width)?,
            transposed: transposed(load, "1.conv", [2 * width, width, 2 * rate], rate)?,
            units,
        })
    }
}

fn linear(load: &Loader<'_>, name: &str, n: usize, k: usize) -> Result<Affine, LoadError> {
    Ok(Affine {
        w: load.matrix(&format!("{name}.weight"), &[n, k])?,
        bias: load.floats(&format!("{name}.bias"), &[n])?,
    })
}

fn conv(load: &Loader<'_>, name: &str, shape: [usize; 3]) -> Result<Affine, LoadError> {
    Ok(Affine {
        w: load.conv(name, shape)?,
        bias: load.floats(&format!("{name}.bias"), &shape[..1])?,
    })
}

/// `shape` is `[c_in, c_out, kernel]`; the bias is repeated for each of the `stride` outputs of an input.
fn transposed(load: &Loader<'_>, name: &str, shape: [usize; 3], stride: usize) -> Result<Affine, LoadError> {
    let w = load.tensor(&format!("{name}.weight"), &shape)?;
    let bias = load.tensor(&format!("{name}.bias"), &shape[1..2])?;
    Ok(Affine {
        w: load.pack(&transposed_as_conv(&w, stride))?,
        bias: load.upload(&bias.name, &bias.to_f32().repeat(stride))?,
    })
}

/// SnakeBeta with both exponentials taken: `e^alpha` and `1 / (e^beta + 1e-9)`.
fn snake(load: &Loader<'_>, name: &str, channels: usize) -> Result<Snake, LoadError> {
    let alpha = load.tensor(&format!("{name}.alpha"), &[channels])?;
    let beta = load.tensor(&format!("{name}.beta"), &[channels])?;
    let exp: Vec<f32> = alpha.to_f32().iter().map(|a| a.exp()).collect();
    let inverse: Vec<f32> = beta.to_f32().iter().map(|b| 1.0 / (b.exp() + 1e-9)).collect();
    Ok(Snake {
        alpha: load.upload(&alpha.name, &exp)?,
        inv_beta: load.upload(&beta.name, &inverse)?,
    })
}
