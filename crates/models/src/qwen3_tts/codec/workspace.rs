//! The memory of one pass.

use laneway_device::{Buffer, BufferSpec, DType, Device, Place, Result};

use super::state::{DILATIONS, PRE_CONV_TAPS, TAPS, TRANSPOSED_TAPS, block_channels, exit_channels};
use super::weights::CONVNEXT_FACTOR;
use crate::checkpoint::config::CodecDecoderConfig;

/// Buffers of one pass. The two wide ones are input and output in turn from the latent upsampling on.
#[derive(Debug)]
pub(super) struct Workspace {
    pub(super) entry: Buffer,
    pub(super) quantized: Buffer,
    pub(super) latent: Buffer,
    pub(super) hidden: Buffer,
    pub(super) normed: Buffer,
    pub(super) cos_sin: Buffer,
    pub(super) qkv: Buffer,
    pub(super) q: Buffer,
    pub(super) attended: Buffer,
    pub(super) gate_up: Buffer,
    pub(super) inner: Buffer,
    pub(super) convnext: Buffer,
    pub(super) wide: [Buffer; 2],
    /// Of all convolutions.
    pub(super) scratch: Buffer,
    pub(super) samples: Buffer,
}

impl Workspace {
    /// `product` is the type of what only products read.
    pub(super) fn new(
        device: &dyn Device,
        c: &CodecDecoderConfig,
        product: DType,
        frames: usize,
    ) -> Result<Self> {
        let typed = |name: &str, width: usize, dtype| {
            device.alloc(BufferSpec {
                name: format!("codec_{name}"),
                dtype,
                len: frames * width,
                place: Place::Device,
            })
        };
        let buffer = |name: &str, width| typed(name, width, DType::F32);
        let q = c.num_attention_heads * c.head_dim;
        let kv = c.num_key_value_heads * c.head_dim;
        let latent_rate: usize = c.upsampling_ratios.iter().product();
        let mut rate = latent_rate;
        let mut wide = rate * c.latent_dim.max(c.decoder_dim);
        // As `Conv::scratch_len` has it, with a window for each frame.
        let staged = |rate: usize, taps: usize, dilation: usize, channels: usize| {
            ((rate + (taps - 1) * dilation) * channels).div_ceil(2)
        };
        let mut scratch =
            staged(1, PRE_CONV_TAPS, 1, c.codebook_dim).max(staged(rate, TAPS, 1, c.latent_dim));
        let mut channels = c.decoder_dim;
        for (block, up) in c.upsample_rates.iter().enumerate() {
            scratch = scratch.max(staged(rate, TRANSPOSED_TAPS, 1, channels));
            rate *= up;
            channels = block_channels(c, block);
            wide = wide.max(rate * channels);
            for dilation in DILATIONS {
                let unit = staged(rate, TAPS, dilation, 2 * channels);
                scratch = scratch.max(unit);
            }
        }
        scratch = scratch.max(staged(rate, TAPS, 1, exit_channels(c)));
        Ok(Self {
            entry: buffer("entry", c.codebook_dim / 2)?,
            quantized: buffer("quantized", c.codebook_dim)?,
            latent: buffer("latent", c.latent_dim)?,
            hidden: buffer("hidden", c.hidden_size)?,
            normed: buffer("normed", c.hidden_size)?,
            cos_sin: buffer("cos_sin", c.head_dim)?,
            qkv: buffer("qkv", q + 2 * kv)?,
            q: buffer("q", q)?,
            attended: typed("attended", q, product)?,
            gate_up: buffer("gate_up", 2 * c.intermediate_size)?,
            inner: typed("inner", c.intermediate_size, product)?,
            convnext: typed("convnext", latent_rate * CONVNEXT_FACTOR * c.latent_dim, product)?,
            wide: [buffer("wide_a", wide)?, buffer("wide_b", wide)?],
            scratch: buffer("scratch", scratch)?,
            samples: buffer("samples", rate)?,
        })
    }
}
