//! Bytes of state and workspace. The nodes own the layouts; these formulas are what they are tested against,
//! because the engine makes every pool of exactly the bytes that a resource reports.

use super::config::{CodecDecoderConfig, Configs, SpeakerEncoderConfig};
use super::parameters::CONVNEXT_FACTOR;

/// All pools but the Talker's cache are arrays of words.
pub(super) const WORD_BYTES: u64 = 4;

/// Parts of a codec slot start on a multiple of this many words, so that a device can move 16 bytes at once.
const ALIGN_WORDS: u64 = 4;

/// Frames in a codec slot's ring of keys and values: the window being decoded, and what its first frame sees
/// besides itself.
pub fn codec_ring(config: &CodecDecoderConfig, max_window: u32) -> u32 {
    config.sliding_window - 1 + max_window
}

/// 4-byte words of a codec slot: keys and values of each layer, and the last inputs of every convolution.
pub fn codec_state_words(config: &CodecDecoderConfig, max_window: u32) -> u64 {
    let part = |frames: u32, width: u32| (u64::from(frames) * u64::from(width)).next_multiple_of(ALIGN_WORDS);
    let kv = part(
        codec_ring(config, max_window),
        config.num_key_value_heads * config.head_dim,
    );
    let transformer = u64::from(config.num_hidden_layers) * 2 * kv;

    let pre_conv = part(2, config.codebook_dim);
    let depthwise = config.upsampling_ratios.len() as u64 * part(6, config.latent_dim);
    let entry = part(6, config.latent_dim);
    let mut channels = config.decoder_dim;
    let mut blocks = 0;
    for _ in &config.upsample_rates {
        let transposed = part(1, channels);
        channels /= 2;
        let units: u64 = [1, 3, 9]
            .map(|dilation| part(6 * dilation, channels))
            .iter()
            .sum();
        blocks += transposed + units;
    }
    transformer + pre_conv + depthwise + entry + blocks + part(6, channels)
}

/// 4-byte words of a row's sampler state: a bit for each token of the codec vocabulary that was generated, in
/// whole rows of a frame's codes, and the codes of the last frame behind them.
pub fn sampler_words(configs: &Configs) -> u64 {
    let stack = &configs.model.talker_config.stack;
    let seen = stack
        .vocab_size
        .div_ceil(32)
        .next_multiple_of(stack.num_code_groups);
    u64::from(seen + stack.num_code_groups)
}

/// Entries of one page of the Talker's cache: keys and values of every layer.
pub(super) fn talker_page_elements(configs: &Configs, page_size: u32) -> u64 {
    let stack = &configs.model.talker_config.stack;
    let of_position = 2 * u64::from(stack.num_key_value_heads) * u64::from(stack.head_dim);
    u64::from(stack.num_hidden_layers) * of_position * u64::from(page_size)
}

/// Workspace of one prefill step, in f32 for every packed token: both text projections, the residual stream
/// and the widest activations of a layer.
pub(super) fn talker_prefill_bytes(configs: &Configs, tokens: u32) -> u64 {
    let talker = &configs.model.talker_config;
    let stack = &talker.stack;
    let q = u64::from(stack.num_attention_heads) * u64::from(stack.head_dim);
    let kv = u64::from(stack.num_key_value_heads) * u64::from(stack.head_dim);
    let layer = 3 * u64::from(stack.hidden_size) + 3 * q + 2 * kv + 3 * u64::from(stack.intermediate_size);
    let words = 2 * u64::from(talker.text_hidden_size) + u64::from(stack.head_dim) + layer;
    u64::from(tokens) * words * WORD_BYTES
}

/// Workspace of one decode row: the predictor's cache of a frame, its activations, and the logits.
pub(super) fn talker_row_bytes(configs: &Configs) -> u64 {
    let talker = &configs.model.talker_config;
    let predictor = &talker.code_predictor_config;
    let kv = 2 * u64::from(predictor.num_key_value_heads) * u64::from(predictor.head_dim);
    let cache = u64::from(predictor.num_hidden_layers) * kv * u64::from(predictor.num_code_groups);
    let activations = 2 * u64::from(talker.stack.hidden_size) + 4 * u64::from(predictor.intermediate_size);
    let logits = u64::from(talker.stack.vocab_size) + u64::from(predictor.vocab_size);
    (cache + activations + logits) * WORD_BYTES
}

/// Rows that a residual unit carries, at most: six taps of dilation nine.
const MOST_PAST: u64 = 54;

/// Workspace of one codec pass, in f32: two of the widest activations, the scratch of its convolutions, a ConvNeXt block's
/// inner one, and the transformer's.
pub(super) fn codec_workspace_bytes(config: &CodecDecoderConfig, pass_frames: u32) -> u64 {
    let latent_rate: u64 = config.upsampling_ratios.iter().copied().map(u64::from).product();
    let mut rate = latent_rate;
    let mut channels = config.decoder_dim;
    let mut widest = rate * u64::from(config.latent_dim.max(channels));
    // Where it needs most, a convolution of a window for each frame: its inputs in 16 bits behind those that are carried,
    // of a residual unit twice.
    let staged = |rate: u64, past: u64, channels: u32| ((rate + past) * u64::from(channels)).div_ceil(2);
    let mut scratch = staged(1, 2, config.codebook_dim).max(staged(rate, 6, config.latent_dim));
    for &up in &config.upsample_rates {
        scratch = scratch.max(staged(rate, 1, channels));
        rate *= u64::from(up);
        channels /= 2;
        widest = widest.max(rate * u64::from(channels));
        scratch = scratch.max(staged(rate, MOST_PAST, 2 * channels));
    }
    let q = u64::from(config.num_attention_heads * config.head_dim);
    let kv = u64::from(config.num_key_value_heads * config.head_dim);
    let transformer =
        3 * q + 2 * kv + 2 * u64::from(config.hidden_size) + 3 * u64::from(config.intermediate_size);
    let convnext = latent_rate * u64::from(CONVNEXT_FACTOR * config.latent_dim);
    let around = u64::from(2 * config.codebook_dim + config.latent_dim);
    u64::from(pass_frames) * (2 * widest + scratch + convnext + transformer + around + rate) * WORD_BYTES
}

/// Steps whose results are staged for the host at once.
const STAGES: u64 = 2;

/// Staging of one codec row: the samples of its widest window.
pub(super) fn codec_staging_row_bytes(configs: &Configs, max_window: u32) -> u64 {
    STAGES * u64::from(max_window) * u64::from(configs.speech.decode_upsample_rate) * WORD_BYTES
}

/// Samples from one mel frame to the next.
const MEL_HOP: u64 = 256;

/// Workspace of one clip of reference speech, in f32: the clip, two convolution buffers at the first layer's
/// rate, where the codec encoder is widest, of which one holds a residual unit's fewer channels; its
/// transformer; the speaker encoder.
pub(super) fn ref_encoder_workspace_bytes(configs: &Configs, seconds: u32) -> u64 {
    let config = &configs.speech.encoder_config;
    let samples = u64::from(seconds) * u64::from(configs.speech.output_sample_rate);
    let filters = u64::from(config.num_filters);
    let convolutions = samples * (1 + filters + filters / u64::from(config.compress.min(2)));
    let rate: u64 = config.upsampling_ratios.iter().copied().map(u64::from).product();
    let q = u64::from(config.num_attention_heads * config.head_dim);
    let kv = u64::from(config.num_key_value_heads * config.head_dim);
    let latent = u64::from(config.hidden_size + config.codebook_dim + config.num_quantizers);
    let inner = u64::from(config.intermediate_size + config.head_dim);
    let transformer = 2 * u64::from(config.hidden_size) + 3 * q + 4 * kv + inner + latent;
    let speaker = configs
        .model
        .speaker_encoder_config
        .as_ref()
        .map_or(0, speaker_frame_words);
    let speaker = samples.div_ceil(MEL_HOP) * speaker;
    (convolutions + samples.div_ceil(rate) * transformer + speaker) * WORD_BYTES
}

/// Staging of one clip: its samples and its mel frames.
pub(super) fn ref_encoder_staging_bytes(configs: &Configs, seconds: u32) -> u64 {
    let samples = u64::from(seconds) * u64::from(configs.speech.output_sample_rate);
    let mel = configs
        .model
        .speaker_encoder_config
        .as_ref()
        .map_or(0, |speaker| u64::from(speaker.mel_dim));
    STAGES * (samples + samples.div_ceil(MEL_HOP) * mel) * WORD_BYTES
}

/// Words of the speaker encoder's workspace for each mel frame, with the frame itself.
fn speaker_frame_words(c: &SpeakerEncoderConfig) -> u64 {
    let [first, blocks @ .., joined] = c.enc_channels;
    let width = blocks.iter().copied().max().unwrap_or(0);
    let of_blocks = 4 * width + 2 * (width / c.enc_res2net_scale) + blocks.iter().sum::<u32>();
    u64::from(c.mel_dim + first + of_blocks + 5 * joined + c.enc_attention_channels)
}
