use std::path::Path;

use laneway_plan::deployment::{DeviceKind, ModelConfig, Precision};

use super::*;

fn sizing(device: DeviceKind) -> Sizing {
    Sizing {
        device,
        precision: device.default_precision(),
        page_size: 16,
        max_prefill_tokens: 4096,
    }
}

fn preset(name: &str) -> Declared {
    declare(&ModelConfig::Preset(name.to_owned()), &sizing(DeviceKind::Cuda)).unwrap()
}

fn nano() -> ModelConfig {
    ModelConfig::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/nano"))
}

#[test]
fn parameters_are_those_of_the_released_checkpoints() {
    const CODEC_ENCODER: u64 = 56_234_304;
    let expected = [
        ("0.6b-custom_voice", 905_788_672, 0),
        ("0.6b-base", 905_788_672, 8_854_336 + CODEC_ENCODER),
        ("1.7b-custom_voice", 1_916_676_352, 0),
        ("1.7b-voice_design", 1_916_676_352, 0),
        ("1.7b-base", 1_916_676_352, 12_001_088 + CODEC_ENCODER),
    ];
    for (name, talker, ref_encoder) in expected {
        let parameters = Parameters::of(&presets::read(name).unwrap());
        assert_eq!(
            parameters,
            Parameters {
                talker,
                codec: 114_323_137,
                ref_encoder
            },
            "{name}"
        );
    }
}

#[test]
fn nanos_parameters_are_those_of_its_files() {
    let ModelConfig::Directory(directory) = nano() else {
        unreachable!()
    };
    let parameters = Parameters::of(&Configs::read(&directory).unwrap());
    for (file, expected) in [
        ("model.safetensors", parameters.talker),
        ("speech_tokenizer/model.safetensors", parameters.codec),
    ] {
        let bytes = std::fs::read(directory.join(file)).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let tensors = header
            .as_object()
            .unwrap()
            .iter()
            .filter(|(name, _)| *name != "__metadata__");
        let count = |tensor: &serde_json::Value| {
            tensor["shape"]
                .as_array()
                .unwrap()
                .iter()
                .map(|size| size.as_u64().unwrap())
                .product::<u64>()
        };
        assert_eq!(
            tensors.map(|(_, tensor)| count(tensor)).sum::<u64>(),
            expected,
            "{file}"
        );
    }
}

#[test]
fn a_token_of_the_talkers_cache_takes_112_kib_in_bf16_and_twice_that_in_f32() {
    let check = |preset: &str, sizing: Sizing, element, kib: u64| {
        let declared = declare(&ModelConfig::Preset(preset.to_owned()), &sizing).unwrap();
        let mut resources = declared.declaration.resources.iter();
        let kv = resources.find(|resource| resource.key == TALKER_KV).unwrap();
        assert_eq!(
            (kv.element, kv.page_size, kv.report.bytes_per_slot),
            (element, 16, 16 * kib * 1024),
            "{preset}"
        );
        for other in resources {
            assert_eq!(other.element, Element::F32, "{}", other.key);
        }
    };
    for preset in ["0.6b-custom_voice", "1.7b-custom_voice"] {
        let cuda = sizing(DeviceKind::Cuda);
        check(preset, cuda.clone(), Element::Bf16, 112);
        let precision = Precision::F32;
        check(preset, Sizing { precision, ..cuda }, Element::F32, 224);
        check(preset, sizing(DeviceKind::Cpu), Element::F32, 224);
    }
}

#[test]
fn a_codec_slot_holds_the_ring_and_every_convolutions_inputs() {
    let config = presets::read("1.7b-custom_voice").unwrap().speech.decoder_config;
    assert_eq!(codec_ring(&config, 32), 103);
    // Convolution state as in the model's table, with the last input column of each transposed convolution
    // (1536, 768, 384, 192) in place of the overlapping tails (9120).
    let convolutions = 141_472 - 9_120 + 1536 + 768 + 384 + 192;
    assert_eq!(codec_state_words(&config, 1), 8 * 2 * 72 * 1024 + convolutions);
    assert_eq!(codec_state_words(&config, 32), 8 * 2 * 103 * 1024 + convolutions);
}

#[test]
fn a_sampler_slot_is_whole_rows_of_a_frames_codes() {
    // Nano: 40 words of bits in 3 rows of 16, and the last frame.
    let ModelConfig::Directory(directory) = nano() else {
        unreachable!()
    };
    assert_eq!(sampler_words(&Configs::read(&directory).unwrap()), 4 * 16);
    assert_eq!(sampler_words(&presets::read("0.6b-base").unwrap()), 7 * 16);
}

#[test]
fn weights_take_four_bytes_in_f32_and_two_in_bf16() {
    let config = ModelConfig::Preset("0.6b-base".to_owned());
    let bytes = |device, precision| {
        let sizing = Sizing {
            precision,
            ..sizing(device)
        };
        let nodes = declare(&config, &sizing).unwrap().declaration.nodes;
        nodes.iter().map(|node| node.weight_bytes).collect::<Vec<_>>()
    };
    let bf16 = bytes(DeviceKind::Cuda, Precision::Bf16);
    assert_eq!(bf16[0], 1_811_577_344);
    let f32 = bf16.iter().map(|bytes| 2 * bytes).collect::<Vec<_>>();
    assert_eq!(bytes(DeviceKind::Cuda, Precision::F32), f32);
    assert_eq!(bytes(DeviceKind::Cpu, Precision::F32), f32);
}

#[test]
fn only_a_base_checkpoint_has_a_reference_encoder() {
    let base = preset("1.7b-base").declaration;
    let reference = &base.request_edges[0];
    assert_eq!(
        (reference.from.as_str(), reference.to.as_slice()),
        (REF_ENCODE, &names(&[TALKER_PREFILL, CODEC_PRIME])[..])
    );
    assert!(base.nodes.iter().any(|node| node.name == REF_ENCODER));

    let named = preset("1.7b-custom_voice").declaration;
    assert_eq!(named.request_edges, []);
    assert_eq!(named.nodes.len(), 2);
    assert!(
        named
            .walks
            .iter()
            .all(|walk| walk.name != CODEC_PRIME && walk.name != REF_ENCODE)
    );
}

#[test]
fn declarations_refer_only_to_what_they_declare() {
    for preset in presets::names() {
        let declaration = self::preset(preset).declaration;
        let has_walk = |name: &String| declaration.walks.iter().any(|walk| walk.name == *name);
        let has_node = |name: &String| declaration.nodes.iter().any(|node| node.name == *name);
        let has_resource = |key: &String| declaration.resources.iter().any(|resource| resource.key == *key);
        assert!(
            declaration
                .walks
                .iter()
                .flat_map(|walk| &walk.nodes)
                .all(has_node)
        );
        assert!(
            declaration
                .nodes
                .iter()
                .flat_map(|node| &node.resources)
                .all(has_resource)
        );
        for edge in &declaration.stream_edges {
            assert!(edge.from.iter().chain([&edge.to]).all(has_walk));
            assert!(edge.chunk.widest() <= edge.max_window && edge.max_window <= edge.capacity);
        }
        assert!(
            declaration
                .request_edges
                .iter()
                .all(|edge| edge.to.iter().chain([&edge.from]).all(has_walk))
        );
    }
}

#[test]
fn facts_of_a_released_checkpoint() {
    let facts = preset("1.7b-custom_voice").facts;
    let dialect = |name: &str| {
        facts
            .voices
            .iter()
            .find(|voice| voice.name == name)
            .unwrap()
            .dialect
            .clone()
    };
    assert_eq!(facts.voices.len(), 9);
    assert_eq!(dialect("dylan").as_deref(), Some("beijing_dialect"));
    assert_eq!(dialect("ryan"), None);
    let languages = [
        "chinese",
        "english",
        "french",
        "german",
        "italian",
        "japanese",
        "korean",
        "portuguese",
        "russian",
        "spanish",
    ];
    assert_eq!(facts.languages, languages);
    assert_eq!(
        (facts.kind, facts.supports_instructions, facts.supports_cloning),
        (ModelKind::CustomVoice, true, false)
    );
    assert_eq!(
        (
            facts.sample_rate_hz,
            facts.samples_per_frame,
            facts.frame_rate_hz()
        ),
        (24_000, 1920, 12.5)
    );

    assert!(!preset("0.6b-custom_voice").facts.supports_instructions);
    assert!(preset("1.7b-voice_design").facts.supports_instructions);
    let base = preset("1.7b-base").facts;
    assert_eq!(
        (
            base.supports_cloning,
            base.supports_instructions,
            base.voices.len()
        ),
        (true, false, 0)
    );
}

#[test]
fn facts_of_the_demo_checkpoint() {
    let facts = declare(&nano(), &sizing(DeviceKind::Cpu)).unwrap().facts;
    assert_eq!(
        facts.voices,
        [Voice {
            name: "nano".to_owned(),
            dialect: None
        }]
    );
    assert_eq!(
        (facts.languages, facts.max_positions, facts.max_new_tokens),
        (names(&["english"]), 4096, 1024)
    );
}

#[test]
fn what_does_not_describe_the_model_is_refused_with_file_and_key() {
    let directory = tempfile::tempdir().unwrap();
    let error = declare(
        &ModelConfig::Directory(directory.path().to_owned()),
        &sizing(DeviceKind::Cpu),
    )
    .unwrap_err();
    assert!(
        error.to_string().contains("config.json cannot be read"),
        "{error}"
    );

    let preset = presets::named("0.6b-base").unwrap();
    let with = |from: &str, to: &str| {
        std::fs::create_dir_all(directory.path().join("speech_tokenizer")).unwrap();
        for (name, text) in config::FILES.iter().zip(preset.files) {
            let changed = text.replace(from, to);
            std::fs::write(directory.path().join(name), changed).unwrap();
        }
        let config = ModelConfig::Directory(directory.path().to_owned());
        declare(&config, &sizing(DeviceKind::Cpu))
            .unwrap_err()
            .to_string()
    };
    for (from, to, expected) in [
        (
            "\"num_hidden_layers\"",
            "\"layers\"",
            "missing field `num_hidden_layers`",
        ),
        (
            "\"model_type\": \"qwen3_tts\"",
            "\"model_type\": \"qwen2\"",
            "model_type is `qwen2`, not `qwen3_tts`",
        ),
        (
            "\"speaker_encoder_config\"",
            "\"other\"",
            "a base model has no speaker_encoder_config",
        ),
        (
            "\"decode_upsample_rate\": 1920",
            "\"decode_upsample_rate\": 960",
            "multiply to 1920",
        ),
    ] {
        let error = with(from, to);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn unknown_names_list_what_there_is() {
    let sizing = sizing(DeviceKind::Cpu);
    let error = declare(&ModelConfig::Preset("2b".to_owned()), &sizing).unwrap_err();
    assert!(matches!(error, DeclareError::UnknownPreset { known, .. } if known.len() == 5));
    let error = crate::declare("qwen4", &nano(), &sizing).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no model `qwen4`; there are qwen3_tts"
    );
}
