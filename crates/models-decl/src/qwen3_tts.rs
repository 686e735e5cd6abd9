//! Qwen3-TTS at 12.5 frames a second.

pub mod config;
mod parameters;
pub mod presets;
mod state;
#[cfg(test)]
mod tests;

use laneway_plan::declaration::{
    ChunkPolicy, Element, ModelDeclaration, NodeDecl, RequestEdgeDecl, ResourceDecl, ResourceReport,
    StreamEdgeDecl, WalkDecl, WalkKind,
};
use laneway_plan::deployment::{DeviceKind, ModelConfig, Precision};

use crate::{DeclareError, Declared, ModelFacts, ModelKind, Sizing, Voice};
use config::Configs;
pub use parameters::Parameters;
pub use state::{codec_ring, codec_state_words, sampler_words};

/// Registry name.
pub const MODEL: &str = "qwen3_tts";

/// Node: the language model with its code predictor.
pub const TALKER: &str = "Talker";
/// Node: the streaming codec decoder.
pub const CODEC: &str = "Codec";
/// Node of Base checkpoints: speaker encoder and codec encoder.
pub const REF_ENCODER: &str = "RefEncoder";

/// Walk: all of the prompt but its last row, into the cache.
pub const TALKER_PREFILL: &str = "talker_prefill";
/// Walk: one frame a step, the first from the last row of the prompt.
pub const TALKER_DECODE: &str = "talker_decode";
/// Walk: a window of frames to samples.
pub const CODEC_CHUNK: &str = "codec_chunk";
/// Walk: the reference frames of an in-context clone through the codec's state, with no output.
pub const CODEC_PRIME: &str = "codec_prime";
/// Walk: reference speech to a speaker vector and codes.
pub const REF_ENCODE: &str = "ref_encode";

/// Stream edge: frames.
pub const CODES: &str = "codes";
/// Request edge: the encoded reference.
pub const REFERENCE: &str = "reference";

/// Resource: the Talker's paged cache.
pub const TALKER_KV: &str = "talker_kv";
/// Resource: seen tokens and last codes of each row.
pub const SAMPLER: &str = "sampler";
/// Resource: a stream's convolution inputs and ring of keys and values.
pub const CODEC_STATE: &str = "codec_state";

/// Widest window of frames. It is part of every codec slot (the ring holds a whole window beside what its
/// first frame sees), so wider costs memory; 32 frames are 2.6 s, where a step's fixed cost no longer shows.
pub const MAX_WINDOW: u32 = 32;

/// Frames held for a request before its Talker parks: two of the widest windows, so that one can fill while
/// the other is decoded.
pub const CODES_CAPACITY: u32 = 2 * MAX_WINDOW;

/// Frames of one pass of the codec: it bounds the workspace, and a step with more takes several passes.
pub fn codec_pass_frames(device: DeviceKind) -> u32 {
    match device {
        DeviceKind::Cpu => MAX_WINDOW,
        DeviceKind::Cuda => 256,
    }
}

/// Rows of the shortest prompt in front of its last one, which a decode step takes.
pub const SHORTEST_PREFILL: u32 = 7;

/// Longest reference speech; it bounds the RefEncoder's workspace.
pub const MAX_REFERENCE_SECONDS: u32 = 30;

/// One frame at once, because nothing shortens the time to first audio more and a frame's 80 ms cover many
/// steps; then 2 and 4, so that the listener's lead grows before windows do; then 8 (640 ms), where a window
/// costs about as much as 8 rows of one frame but is one row of one step.
pub fn chunk_policy() -> ChunkPolicy {
    ChunkPolicy {
        first: 1,
        ramp: vec![2, 4],
        steady: 8,
    }
}

pub(crate) fn declare(config: &ModelConfig, sizing: &Sizing) -> Result<Declared, DeclareError> {
    let configs = match config {
        ModelConfig::Directory(directory) => Configs::read(directory)?,
        ModelConfig::Preset(name) => presets::read(name)?,
    };
    Ok(Declared {
        declaration: declaration(&configs, sizing),
        facts: facts(&configs),
    })
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn declaration(configs: &Configs, sizing: &Sizing) -> ModelDeclaration {
    let clones = configs.kind() == ModelKind::Base;
    ModelDeclaration {
        model: MODEL.to_owned(),
        nodes: nodes(configs, sizing, clones),
        walks: walks(clones),
        stream_edges: vec![StreamEdgeDecl {
            name: CODES.to_owned(),
            from: names(&[TALKER_DECODE]),
            to: CODEC_CHUNK.to_owned(),
            item_words: configs.model.talker_config.stack.num_code_groups,
            chunk: chunk_policy(),
            max_window: MAX_WINDOW,
            capacity: CODES_CAPACITY,
        }],
        request_edges: match clones {
            false => Vec::new(),
            true => vec![RequestEdgeDecl {
                name: REFERENCE.to_owned(),
                from: REF_ENCODE.to_owned(),
                to: names(&[TALKER_PREFILL, CODEC_PRIME]),
            }],
        },
        resources: resources(configs, sizing),
    }
}

fn nodes(configs: &Configs, sizing: &Sizing, clones: bool) -> Vec<NodeDecl> {
    let parameters = Parameters::of(configs);
    let weight_bytes = sizing.precision.weight_bytes();
    let node = |name: &str, resources: &[&str], parameters: u64, workspace_bytes: u64| NodeDecl {
        name: name.to_owned(),
        parallel_ranks: 1,
        stop_check: false,
        output_spans: false,
        resources: names(resources),
        weight_bytes: parameters * weight_bytes,
        workspace_bytes,
        workspace_bytes_per_row: 0,
    };
    let talker = NodeDecl {
        stop_check: true,
        workspace_bytes_per_row: state::talker_row_bytes(configs),
        ..node(
            TALKER,
            &[TALKER_KV, SAMPLER],
            parameters.talker,
            state::talker_prefill_bytes(configs, sizing.max_prefill_tokens),
        )
    };
    // On the CPU, what is staged for the host lies in the device's memory too.
    let staged = |bytes: u64| {
        if sizing.device == DeviceKind::Cpu {
            bytes
        } else {
            0
        }
    };
    let pass_frames = codec_pass_frames(sizing.device);
    let codec_workspace = state::codec_workspace_bytes(&configs.speech.decoder_config, pass_frames);
    let codec = NodeDecl {
        workspace_bytes_per_row: staged(state::codec_staging_row_bytes(configs, MAX_WINDOW)),
        ..node(CODEC, &[CODEC_STATE], parameters.codec, codec_workspace)
    };
    let mut nodes = vec![talker, codec];
    if clones {
        let workspace = state::ref_encoder_workspace_bytes(configs, MAX_REFERENCE_SECONDS)
            + staged(state::ref_encoder_staging_bytes(configs, MAX_REFERENCE_SECONDS));
        nodes.push(node(REF_ENCODER, &[], parameters.ref_encoder, workspace));
    }
    nodes
}

fn walks(clones: bool) -> Vec<WalkDecl> {
    let walk = |name: &str, node: &str, kind| WalkDecl {
        name: name.to_owned(),
        nodes: names(&[node]),
        kind,
        combined_with: None,
        state_across_requests: false,
    };
    let mut walks = vec![
        walk(TALKER_PREFILL, TALKER, WalkKind::Entry),
        walk(TALKER_DECODE, TALKER, WalkKind::Loop),
        walk(CODEC_CHUNK, CODEC, WalkKind::Stream),
    ];
    if clones {
        walks.push(walk(CODEC_PRIME, CODEC, WalkKind::Prime));
        walks.push(walk(REF_ENCODE, REF_ENCODER, WalkKind::Once));
    }
    walks
}

fn resources(configs: &Configs, sizing: &Sizing) -> Vec<ResourceDecl> {
    let pool = |key: &str, kind: &str, words: u64| ResourceDecl {
        key: key.to_owned(),
        kind: kind.to_owned(),
        page_size: 0,
        zero_on_release: true,
        element: Element::F32,
        report: ResourceReport {
            bytes_per_slot: words * state::WORD_BYTES,
            ..ResourceReport::default()
        },
    };
    // Keys and values are of the type that products are taken in: attention reads them as it reads weights.
    // The CPU device has no caches but f32.
    let element = match (sizing.device, sizing.precision) {
        (DeviceKind::Cuda, Precision::Bf16) => Element::Bf16,
        _ => Element::F32,
    };
    let talker_kv = ResourceDecl {
        key: TALKER_KV.to_owned(),
        kind: "paged_kv".to_owned(),
        page_size: sizing.page_size,
        // Entries past a row's length are never read.
        zero_on_release: false,
        element,
        report: ResourceReport {
            bytes_per_slot: state::talker_page_elements(configs, sizing.page_size) * element.bytes(),
            ..ResourceReport::default()
        },
    };
    let mut sampler = pool(SAMPLER, "sampler", sampler_words(configs));
    sampler.report.stages_host_rows = true;
    vec![
        talker_kv,
        sampler,
        pool(
            CODEC_STATE,
            "state_pool",
            codec_state_words(&configs.speech.decoder_config, MAX_WINDOW),
        ),
    ]
}

fn facts(configs: &Configs) -> ModelFacts {
    let model = &configs.model;
    let talker = &model.talker_config;
    let kind = configs.kind();
    let voices = talker.spk_id.keys().map(|name| Voice {
        name: name.clone(),
        dialect: talker
            .spk_is_dialect
            .get(name)
            .and_then(|dialect| dialect.name())
            .map(str::to_owned),
    });
    let dialects: Vec<&str> = talker
        .spk_is_dialect
        .values()
        .filter_map(|dialect| dialect.name())
        .collect();
    // Dialects go by their voice; a released table also lists them with this ending.
    let is_dialect = |name: &str| dialects.contains(&name) || name.ends_with("_dialect");
    // The small released size and the demo model were trained without instructions.
    let instructed = !matches!(model.tts_model_size.as_str(), "0b6" | "nano");
    ModelFacts {
        model: MODEL.to_owned(),
        size: model.tts_model_size.clone(),
        kind,
        voices: if kind == ModelKind::CustomVoice {
            voices.collect()
        } else {
            Vec::new()
        },
        languages: talker
            .codec_language_id
            .keys()
            .filter(|name| !is_dialect(name))
            .cloned()
            .collect(),
        supports_instructions: instructed && kind != ModelKind::Base,
        supports_cloning: kind == ModelKind::Base,
        sample_rate_hz: configs.speech.output_sample_rate,
        samples_per_frame: configs.speech.decode_upsample_rate,
        max_positions: talker.stack.max_position_embeddings,
        max_new_tokens: configs.generation.max_new_tokens,
    }
}
