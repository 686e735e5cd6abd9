//! Parameter counts from the shapes of a checkpoint's tensors.
//!
//! Every tensor of a node counts, also the few that a loader leaves out (unused input projections of the
//! decoder's quantizers, cluster usage counts), so bytes made from these are the checkpoint's, an upper bound.

use super::config::{CodecDecoderConfig, CodecEncoderConfig, Configs, SpeakerEncoderConfig, StackConfig};

/// Parameters of each node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameters {
    /// Talker with its code predictor.
    pub talker: u64,
    /// Codec decoder.
    pub codec: u64,
    /// Speaker encoder and codec encoder; 0 unless the checkpoint clones.
    pub ref_encoder: u64,
}

impl Parameters {
    /// Count them.
    pub fn of(configs: &Configs) -> Self {
        let speaker = configs.model.speaker_encoder_config.as_ref();
        Self {
            talker: talker(configs),
            codec: decoder(&configs.speech.decoder_config),
            ref_encoder: speaker.map_or(0, |speaker| {
                speaker_encoder(speaker) + encoder(&configs.speech.encoder_config)
            }),
        }
    }
}

fn product(sizes: &[u32]) -> u64 {
    sizes.iter().copied().map(u64::from).product()
}

/// A linear layer or convolution with its bias.
fn biased(out: u32, into: u32, taps: u32) -> u64 {
    product(&[out, into, taps]) + u64::from(out)
}

/// Query, key, value and output projections without biases.
fn attention(hidden: u32, heads: u32, kv_heads: u32, head_dim: u32) -> u64 {
    2 * product(&[hidden, heads, head_dim]) + 2 * product(&[hidden, kv_heads, head_dim])
}

/// Layers and final norm of a decoder stack.
fn stack(c: &StackConfig) -> u64 {
    let layer = attention(
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
    ) + 3 * product(&[c.hidden_size, c.intermediate_size])
        + 2 * u64::from(c.head_dim)
        + 2 * u64::from(c.hidden_size);
    u64::from(c.num_hidden_layers) * layer + u64::from(c.hidden_size)
}

fn talker(configs: &Configs) -> u64 {
    let talker = &configs.model.talker_config;
    let (c, predictor) = (&talker.stack, &talker.code_predictor_config);
    let (hidden, text) = (c.hidden_size, talker.text_hidden_size);
    let text_side =
        product(&[talker.text_vocab_size, text]) + biased(text, text, 1) + biased(hidden, text, 1);
    let codec_side = 2 * product(&[c.vocab_size, hidden]);

    let groups = predictor.num_code_groups.saturating_sub(1);
    let embeddings = product(&[groups, predictor.vocab_size, hidden]);
    let heads = product(&[groups, predictor.vocab_size, predictor.hidden_size]);
    let projection = match hidden == predictor.hidden_size {
        true => 0,
        false => biased(predictor.hidden_size, hidden, 1),
    };
    stack(c) + text_side + codec_side + stack(predictor) + embeddings + heads + projection
}

fn decoder(c: &CodecDecoderConfig) -> u64 {
    let (latent, hidden, half) = (c.latent_dim, c.hidden_size, c.codebook_dim / 2);
    // Two groups of books (the first, the rest), each with an input and an output projection.
    let books =
        product(&[c.num_quantizers, c.codebook_size, half]) + product(&[c.num_quantizers, c.codebook_size]);
    let quantizer = books + 4 * product(&[c.codebook_dim, half]);

    let layer = attention(hidden, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        + 3 * product(&[hidden, c.intermediate_size])
        + 4 * u64::from(hidden);
    let transformer = u64::from(c.num_hidden_layers) * layer
        + u64::from(hidden)
        + biased(hidden, latent, 1)
        + biased(latent, hidden, 1);

    let upsampling = c.upsampling_ratios.iter().map(|&rate| {
        let depthwise = product(&[latent, TAPS]) + u64::from(latent);
        let norm_and_gamma = 3 * u64::from(latent);
        let inner = CONVNEXT_FACTOR * latent;
        biased(latent, latent, rate)
            + depthwise
            + norm_and_gamma
            + biased(inner, latent, 1)
            + biased(latent, inner, 1)
    });

    let mut channels = c.decoder_dim;
    let mut blocks = biased(channels, latent, TAPS);
    for &rate in &c.upsample_rates {
        let out = channels / 2;
        let unit = biased(out, out, TAPS) + biased(out, out, 1) + 4 * u64::from(out);
        blocks += 2 * u64::from(channels) + product(&[channels, out, 2 * rate]) + u64::from(out) + 3 * unit;
        channels = out;
    }
    let exit = 2 * u64::from(channels) + biased(1, channels, TAPS);
    quantizer + biased(latent, c.codebook_dim, 3) + transformer + upsampling.sum::<u64>() + blocks + exit
}

/// Taps of the decoder's causal convolutions.
const TAPS: u32 = 7;
/// Inner width of a ConvNeXt block over its width.
pub(super) const CONVNEXT_FACTOR: u32 = 4;

fn encoder(c: &CodecEncoderConfig) -> u64 {
    let mut channels = c.num_filters;
    let mut seanet = biased(channels, 1, c.kernel_size);
    for &stride in c.upsampling_ratios.iter().rev() {
        let inner = channels / c.compress;
        seanet += biased(inner, channels, c.residual_kernel_size) + biased(channels, inner, 1);
        seanet += biased(2 * channels, channels, 2 * stride);
        channels *= 2;
    }
    let hidden = c.hidden_size;
    seanet += biased(hidden, channels, c.last_kernel_size);

    let layer = attention(hidden, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        + 2 * product(&[hidden, c.intermediate_size])
        + 6 * u64::from(hidden);
    let transformer = u64::from(c.num_hidden_layers) * layer;
    let downsample = product(&[hidden, hidden, 2 * 2]);

    // A book has its sums, its usage counts and a flag.
    let book = product(&[c.codebook_size, c.codebook_dim]) + u64::from(c.codebook_size) + 1;
    let projections = 4 * product(&[hidden, c.codebook_dim]);
    seanet + transformer + downsample + u64::from(c.num_quantizers) * book + projections
}

/// ECAPA-TDNN.
fn speaker_encoder(c: &SpeakerEncoderConfig) -> u64 {
    let [first, blocks @ .., joined] = c.enc_channels;
    let [first_taps, taps @ .., joined_taps] = c.enc_kernel_sizes;
    let mut into = first;
    let mut total = biased(first, c.mel_dim, first_taps);
    for (out, taps) in blocks.into_iter().zip(taps) {
        let part = out / c.enc_res2net_scale;
        total += biased(out, into, 1) + biased(out, out, 1);
        total += u64::from(c.enc_res2net_scale - 1) * biased(part, part, taps);
        total += biased(c.enc_se_channels, out, 1) + biased(out, c.enc_se_channels, 1);
        into = out;
    }
    let pooling =
        biased(c.enc_attention_channels, 3 * joined, 1) + biased(joined, c.enc_attention_channels, 1);
    total + biased(joined, blocks.iter().sum(), joined_taps) + pooling + biased(c.enc_dim, 2 * joined, 1)
}
