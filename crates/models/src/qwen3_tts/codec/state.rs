//! Where the carried state of one stream lies inside its slot of the `codec_state` pool.

use crate::checkpoint::config::CodecDecoderConfig;

/// Taps of the causal convolutions (`decoder.0`, the residual units, the depthwise layers, the last one).
pub(super) const TAPS: usize = 7;
/// Taps of `pre_conv`.
pub(super) const PRE_CONV_TAPS: usize = 3;
/// Taps of a block's transposed convolution written as a convolution over its inputs: kernel 2s, stride s.
pub(super) const TRANSPOSED_TAPS: usize = 2;
/// Dilations of a block's residual units.
pub(super) const DILATIONS: [usize; 3] = [1, 3, 9];

/// Every part starts on a multiple of this many words, so that a device can move 16 bytes at a time.
const ALIGN_WORDS: usize = 4;

/// Word offsets of one stream's state inside its slot. All parts are f32 and start as zeros, which is what the
/// causal padding in front of a stream is; keys and values are masked by position instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodecStateLayout {
    /// Positions in the ring of keys and values: a whole window beside everything that its first frame sees.
    pub ring: usize,
    /// Keys and values of each transformer layer, `[ring, kv_heads * head_dim]` each.
    pub layers: Vec<LayerState>,
    /// `pre_conv`: `[2, codebook_dim]`.
    pub pre_conv: usize,
    /// Depthwise convolution of each latent upsampling: `[6, latent_dim]`.
    pub depthwise: Vec<usize>,
    /// `decoder.0`: `[6, latent_dim]`.
    pub entry: usize,
    /// Upsampling blocks.
    pub blocks: Vec<BlockState>,
    /// Last convolution: `[6, channels]`.
    pub exit: usize,
    /// Words of a slot.
    pub words: usize,
}

/// Offsets of one transformer layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerState {
    /// Keys after rotation.
    pub keys: usize,
    /// Values.
    pub values: usize,
}

/// Offsets of one upsampling block with `c` channels out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockState {
    /// Last input column of the transposed convolution, `[1, 2c]`. (Keeping the overlapping tail of its output
    /// instead would make the order of additions depend on where windows begin.)
    pub transposed: usize,
    /// Inputs of each residual unit's first convolution, `[6 * dilation, c]`.
    pub units: [usize; DILATIONS.len()],
}

impl CodecStateLayout {
    /// The layout for windows of at most `max_window` frames.
    pub fn new(config: &CodecDecoderConfig, max_window: usize) -> Self {
        let mut words = 0;
        let mut take = |len: usize| {
            let start = words;
            words += len.next_multiple_of(ALIGN_WORDS);
            start
        };
        let ring = config.sliding_window - 1 + max_window;
        let kv = ring * config.num_key_value_heads * config.head_dim;
        let layers = (0..config.num_hidden_layers)
            .map(|_| LayerState {
                keys: take(kv),
                values: take(kv),
            })
            .collect();
        let pre_conv = take((PRE_CONV_TAPS - 1) * config.codebook_dim);
        let depthwise = config
            .upsampling_ratios
            .iter()
            .map(|_| take((TAPS - 1) * config.latent_dim))
            .collect();
        let entry = take((TAPS - 1) * config.latent_dim);
        let blocks = (0..config.upsample_rates.len())
            .map(|block| {
                let channels = block_channels(config, block);
                BlockState {
                    transposed: take((TRANSPOSED_TAPS - 1) * 2 * channels),
                    units: DILATIONS.map(|dilation| take((TAPS - 1) * dilation * channels)),
                }
            })
            .collect();
        let exit = take((TAPS - 1) * exit_channels(config));
        Self {
            ring,
            layers,
            pre_conv,
            depthwise,
            entry,
            blocks,
            exit,
            words,
        }
    }

    /// Bytes of a slot: what the resource reports as its `bytes_per_slot`.
    pub fn bytes_per_slot(&self) -> u64 {
        self.words as u64 * 4
    }
}

/// Channels that upsampling block `block` hands on.
pub(super) fn block_channels(config: &CodecDecoderConfig, block: usize) -> usize {
    config.decoder_dim >> (block + 1)
}

/// Channels of the last convolution's input.
pub(super) fn exit_channels(config: &CodecDecoderConfig) -> usize {
    config.decoder_dim >> config.upsample_rates.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn released() -> CodecDecoderConfig {
        CodecDecoderConfig {
            latent_dim: 1024,
            codebook_dim: 512,
            codebook_size: 2048,
            decoder_dim: 1536,
            hidden_size: 512,
            intermediate_size: 1024,
            num_attention_heads: 16,
            num_key_value_heads: 16,
            head_dim: 64,
            num_hidden_layers: 8,
            sliding_window: 72,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            num_quantizers: 16,
            upsample_rates: vec![8, 5, 4, 3],
            upsampling_ratios: vec![2, 2],
        }
    }

    #[test]
    fn a_released_slot_has_the_documented_size() {
        let layout = CodecStateLayout::new(&released(), 1);
        let kv = 8 * 2 * 72 * 1024;
        // Convolution inputs: pre_conv, two depthwise, decoder.0, four blocks' columns and units, the last one.
        let conv = 1_024 + 12_288 + 6_144 + (1536 + 768 + 384 + 192) + 112_320 + 576;
        assert_eq!(layout.words, kv + conv);
        assert_eq!(layout.bytes_per_slot(), 4 * (kv + conv) as u64);
    }

    #[test]
    fn a_wider_window_only_lengthens_the_ring() {
        let (narrow, wide) = (
            CodecStateLayout::new(&released(), 1),
            CodecStateLayout::new(&released(), 25),
        );
        assert_eq!(wide.ring, 71 + 25);
        assert_eq!(wide.words - narrow.words, 8 * 2 * 24 * 1024);
    }

    #[test]
    fn parts_do_not_overlap() {
        let mut config = released();
        // Odd sizes: the alignment must not let a part run into the next one.
        (config.decoder_dim, config.codebook_dim, config.latent_dim) = (48, 7, 9);
        let layout = CodecStateLayout::new(&config, 3);
        let kv = layout.ring * 1024;
        let mut parts = Vec::new();
        for layer in &layout.layers {
            parts.extend([(layer.keys, kv), (layer.values, kv)]);
        }
        parts.extend([(layout.pre_conv, 14), (layout.entry, 54), (layout.exit, 18)]);
        parts.extend(layout.depthwise.iter().map(|start| (*start, 54)));
        for (block, channels) in layout.blocks.iter().zip([24, 12, 6, 3]) {
            parts.push((block.transposed, 2 * channels));
            parts.extend(
                block
                    .units
                    .iter()
                    .zip(DILATIONS)
                    .map(|(s, d)| (*s, 6 * d * channels)),
            );
        }
        parts.sort_unstable();
        for pair in parts.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
        }
        let (start, len) = parts.last().unwrap();
        assert!(start + len <= layout.words);
        assert!(parts.iter().all(|(start, _)| start % ALIGN_WORDS == 0));
    }
}
