use std::collections::BTreeMap;

use super::*;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/golden")
}

fn preset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models-decl/presets")
        .join(name)
}

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/nano")
}

fn listed(tsv: &str) -> BTreeMap<String, Vec<usize>> {
    std::fs::read_to_string(golden().join("tensors").join(tsv))
        .unwrap()
        .lines()
        .map(|line| {
            let mut columns = line.split('\t');
            let name = columns.next().unwrap().to_owned();
            (name, serde_json::from_str(columns.next().unwrap()).unwrap())
        })
        .collect()
}

#[test]
fn tensor_lists_of_the_true_sizes_equal_the_reference() {
    for (name, tsv, parameters) in [
        ("0.6b-custom_voice", "tensors_0.6b-cv.tsv", 905_788_672),
        ("0.6b-base", "tensors_0.6b-base.tsv", 914_643_008),
        ("1.7b-custom_voice", "tensors_1.7b-cv.tsv", 1_916_676_352),
        ("1.7b-base", "tensors_1.7b-base.tsv", 1_928_677_440),
    ] {
        let configs = Configs::read(&preset(name)).unwrap();
        let list = tensors::main(&configs.model);
        let count: usize = list.iter().map(|t| t.shape.iter().product::<usize>()).sum();
        assert_eq!(count, parameters, "{name}");
        let ours: BTreeMap<_, _> = list.into_iter().map(|t| (t.name, t.shape)).collect();
        assert_eq!(ours, listed(tsv), "{name}");
        let speech: BTreeMap<_, _> = tensors::speech(&configs.speech)
            .into_iter()
            .map(|t| (t.name, t.shape))
            .collect();
        assert_eq!(speech, listed("tensors_speech_tokenizer.tsv"), "{name}");
    }
}

#[test]
fn generated_weights_have_the_manifest_values() {
    let sets = [
        ("tiny", "tiny/model-custom_voice", "custom_voice"),
        ("tiny", "tiny/model-base", "base"),
        ("tiny/noproj", "tiny/noproj/model-custom_voice", "custom_voice"),
    ];
    for (set, dir, kind) in sets {
        let manifest: serde_json::Value =
            serde_json::from_slice(&std::fs::read(golden().join(set).join("manifest.json")).unwrap())
                .unwrap();
        let seed = manifest["seed"].as_u64().unwrap();
        let weights = &manifest["weights"][kind];
        let checkpoint =
            Checkpoint::open(&WeightsSource::Random { seed }, Some(&golden().join(dir))).unwrap();
        let count = |weights: &Weights, prefix: &str| {
            let tensors: Vec<_> = weights
                .names()
                .into_iter()
                .filter(|name| name.starts_with(prefix))
                .map(|name| weights.tensor(name).unwrap().shape.iter().product::<usize>())
                .collect();
            serde_json::json!([tensors.len(), tensors.iter().sum::<usize>()])
        };
        assert_eq!(count(&checkpoint.main, ""), weights["main"], "{dir}");
        assert_eq!(
            count(&checkpoint.speech, "decoder."),
            weights["codec.decoder"],
            "{dir}"
        );
        assert_eq!(
            count(&checkpoint.speech, "encoder."),
            weights["codec.encoder"],
            "{dir}"
        );
        let first = weights["first_values"].as_object().unwrap();
        assert!(first.len() >= 9);
        for (name, values) in first {
            let source = if name.starts_with("decoder.") {
                &checkpoint.speech
            } else {
                &checkpoint.main
            };
            let tensor = source.tensor(name).unwrap().to_f32();
            let expected: Vec<f64> = serde_json::from_value(values.clone()).unwrap();
            let first: Vec<f32> = expected[..4].iter().map(|v| *v as f32).collect();
            assert_eq!(tensor[..4], first, "{name}");
            let sum: f64 = tensor.iter().map(|v| f64::from(*v)).sum();
            assert!(
                (sum - expected[4]).abs() < 1e-6,
                "{name}: {sum} against {}",
                expected[4]
            );
        }
    }
}

#[test]
fn nano_loads_with_a_bf16_decoder_and_no_encoder() {
    let checkpoint = Checkpoint::open(&WeightsSource::Path(nano()), None).unwrap();
    assert_eq!(checkpoint.configs.model.tts_model_size, "nano");
    for tensor in tensors::main(&checkpoint.configs.model) {
        checkpoint.main.expect(&tensor.name, &tensor.shape).unwrap();
    }
    let mut unused = 0;
    for tensor in tensors::speech(&checkpoint.configs.speech) {
        if tensor.name.starts_with("encoder.") {
            assert!(!checkpoint.speech.contains(&tensor.name));
        } else {
            match checkpoint.speech.expect(&tensor.name, &tensor.shape) {
                Ok(found) => assert_eq!(found.dtype, laneway_device::DType::Bf16),
                // The quantizer's input projections belong to the encoder.
                Err(_) => unused += 1,
            }
        }
    }
    assert!(unused <= 2, "{unused} decoder tensors are missing");
}

/// Copies nano's JSON files, with one edit, beside links to its tensors.
fn edited(file: &str, edit: impl Fn(&mut serde_json::Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("speech_tokenizer")).unwrap();
    for name in [
        "config.json",
        "generation_config.json",
        "speech_tokenizer/config.json",
    ] {
        let mut json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(nano().join(name)).unwrap()).unwrap();
        if name == file {
            edit(&mut json);
        }
        std::fs::write(dir.path().join(name), json.to_string()).unwrap();
    }
    for name in ["model.safetensors", "speech_tokenizer/model.safetensors"] {
        std::os::unix::fs::symlink(nano().join(name), dir.path().join(name)).unwrap();
    }
    dir
}

fn failure(dir: &Path) -> String {
    Checkpoint::open(&WeightsSource::Path(dir.to_owned()), None)
        .unwrap_err()
        .to_string()
}

#[test]
fn a_missing_or_unsupported_key_is_an_error_naming_file_and_key() {
    let remove = |file: &str, path: &[&str]| {
        let dir = edited(file, |json| {
            let (last, parents) = path.split_last().unwrap();
            let parent = parents.iter().fold(json, |json, key| &mut json[*key]);
            parent.as_object_mut().unwrap().remove(*last).unwrap();
        });
        let message = failure(dir.path());
        for part in [file, path.last().unwrap()] {
            assert!(message.contains(part), "{message}");
        }
    };
    remove("config.json", &["tts_pad_token_id"]);
    remove("config.json", &["talker_config", "head_dim"]);
    remove(
        "config.json",
        &["talker_config", "code_predictor_config", "rope_theta"],
    );
    remove("generation_config.json", &["repetition_penalty"]);
    remove(
        "speech_tokenizer/config.json",
        &["decoder_config", "sliding_window"],
    );

    let dir = edited("config.json", |json| {
        json["talker_config"]["attention_bias"] = true.into()
    });
    assert!(failure(dir.path()).contains("attention_bias"));
    let dir = edited("config.json", |json| {
        json["talker_config"]["spk_id"]["ghost"] = 5000.into()
    });
    assert!(failure(dir.path()).contains("5000"));
}

#[test]
fn tensor_errors_name_tensor_file_and_both_shapes() {
    let weights = Weights::open(&nano()).unwrap();
    let message = weights
        .expect("talker.model.norm.weight", &[7])
        .unwrap_err()
        .to_string();
    for part in ["talker.model.norm.weight", "model.safetensors", "[7]", "[256]"] {
        assert!(message.contains(part), "{message}");
    }
    let message = weights.expect("nobody", &[7]).unwrap_err().to_string();
    assert!(
        message.contains("nobody") && message.contains("nano"),
        "{message}"
    );
}

#[test]
fn shards_and_a_truncated_file() {
    let whole = std::fs::read(nano().join("model.safetensors")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), &whole[..whole.len() - 10]).unwrap();
    assert!(
        Weights::open(dir.path())
            .unwrap_err()
            .to_string()
            .contains("cut short")
    );

    let weights = Weights::open(&nano()).unwrap();
    let names = ["talker.model.norm.weight", "talker.codec_head.weight"];
    let mut map = BTreeMap::new();
    for (i, name) in names.iter().enumerate() {
        let tensor = weights.tensor(name).unwrap();
        let view = safetensors::tensor::TensorView::new(
            safetensors::Dtype::BF16,
            tensor.shape.clone(),
            &tensor.data,
        )
        .unwrap();
        let shard = format!("model-{i}.safetensors");
        safetensors::serialize_to_file([(name, view)], None, &dir.path().join(&shard)).unwrap();
        map.insert(*name, shard);
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let sharded = Weights::open(dir.path()).unwrap();
    for name in names {
        assert_eq!(
            sharded.tensor(name).unwrap().data,
            weights.tensor(name).unwrap().data
        );
    }
}

#[test]
fn sources_parse_or_say_what_to_write() {
    let parse = |text: &str| text.parse::<WeightsSource>();
    assert_eq!(parse("random:7").unwrap(), WeightsSource::Random { seed: 7 });
    assert_eq!(
        parse("hf://Qwen/Qwen3-TTS@abc").unwrap(),
        WeightsSource::Hub {
            repo: "Qwen/Qwen3-TTS".into(),
            revision: "abc".into()
        }
    );
    assert_eq!(parse("some/dir").unwrap(), WeightsSource::Path("some/dir".into()));
    for bad in ["random:x", "hf://Qwen", "hf://Qwen/a/b", "s3://bucket/x", ""] {
        let message = parse(bad).unwrap_err().to_string();
        assert!(
            message.contains("write") || message.contains("must be"),
            "{message}"
        );
    }
    assert!(Checkpoint::open(&WeightsSource::Random { seed: 1 }, None).is_err());
    assert!(Checkpoint::open(&WeightsSource::Path(nano()), Some(&nano())).is_err());
}
