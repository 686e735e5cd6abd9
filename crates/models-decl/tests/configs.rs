//! Every shipped configuration loads and passes the validator on the machine that it is for.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use laneway_models_decl::{Validated, load_deployment};
use laneway_plan::deployment::Placement::{Auto, Chain, Lane};
use laneway_plan::deployment::{MpsMode, Placement};
use laneway_plan::violation::{Reason, Violation};
use laneway_plan::worker_plan::{Direction, EdgeKind, RemoteEdge};
use laneway_plan::{DeviceInventory, Sources, WorkerPlan, render};

/// (rank, placement) of Talker, Codec and, where there is one, RefEncoder.
type Homes = &'static [(u32, Placement)];

const SHIPPED: &[(&str, Homes)] = &[
    ("demo.yaml", &[(0, Chain), (0, Lane(1))]),
    ("split-demo.yaml", &[(0, Chain), (1, Chain)]),
    ("0.6b-chain.yaml", &[(0, Chain), (0, Chain)]),
    ("0.6b-lane.yaml", &[(0, Chain), (0, Lane(1))]),
    ("0.6b-auto.yaml", &[(0, Chain), (0, Auto(1))]),
    ("1.7b-chain.yaml", &[(0, Chain), (0, Chain)]),
    ("1.7b-lane.yaml", &[(0, Chain), (0, Lane(1))]),
    ("1.7b-auto.yaml", &[(0, Chain), (0, Auto(1))]),
    ("bench-0.6b-chain.yaml", &[(0, Chain), (0, Chain)]),
    ("bench-0.6b-lane.yaml", &[(0, Chain), (0, Lane(1))]),
    ("bench-0.6b-auto.yaml", &[(0, Chain), (0, Auto(1))]),
    ("bench-0.6b-split.yaml", &[(0, Chain), (1, Chain)]),
    ("bench-0.6b-split-mps.yaml", &[(0, Chain), (1, Chain)]),
    ("bench-0.6b-replicas-mps.yaml", &[(0, Chain), (0, Chain)]),
    ("bench-1.7b-chain.yaml", &[(0, Chain), (0, Chain)]),
    ("bench-1.7b-lane.yaml", &[(0, Chain), (0, Lane(1))]),
    ("bench-1.7b-auto.yaml", &[(0, Chain), (0, Auto(1))]),
    ("bench-1.7b-split.yaml", &[(0, Chain), (1, Chain)]),
    ("bench-1.7b-split-mps.yaml", &[(0, Chain), (1, Chain)]),
    ("bench-1.7b-replicas-mps.yaml", &[(0, Chain), (0, Chain)]),
    ("bench-1.7b-clone.yaml", &[(0, Chain), (0, Lane(1)), (0, Lane(2))]),
    ("voice-design.yaml", &[(0, Chain), (0, Auto(1))]),
    ("voice-clone.yaml", &[(0, Chain), (0, Lane(1)), (0, Lane(2))]),
    ("split.yaml", &[(0, Chain), (1, Chain)]),
    ("split-mps.yaml", &[(0, Chain), (1, Chain)]),
    ("replicas-mps.yaml", &[(0, Chain), (0, Chain)]),
];

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")
}

/// A 4 GB machine for the CPU configurations, one H200 for the others.
fn check(file: &str, flags: &[&str]) -> Result<Validated, Vec<Violation>> {
    let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
    let sources = Sources {
        environment: Vec::new(),
        ..Sources::read(&directory().join(file), flags)
    };
    let inventory = match file.contains("demo") {
        true => DeviceInventory::cpu(4_000_000_000),
        false => DeviceInventory::h200(1),
    };
    load_deployment(&sources, Some(&inventory))
}

fn accepted(file: &str, flags: &[&str]) -> Validated {
    check(file, flags).unwrap_or_else(|violations| panic!("{file}: {}", render(&violations)))
}

#[test]
fn every_shipped_configuration_is_accepted() {
    for (file, homes) in SHIPPED {
        let nodes = accepted(file, &[]).deployment.nodes;
        let found: Vec<_> = nodes.iter().map(|node| (node.ranks[0], node.placement)).collect();
        assert_eq!(found, *homes, "{file}");
    }
}

#[test]
fn a_gpu_admits_128_streams_and_more_that_wait() {
    let (gpu, _): (Vec<_>, Vec<_>) = SHIPPED.iter().partition(|(file, _)| !file.contains("demo"));
    for (file, _) in gpu {
        let Validated {
            deployment,
            declaration,
            ..
        } = accepted(file, &[]);
        assert!(deployment.limits.max_rows >= 128, "{file}");
        assert!(deployment.limits.max_queue >= 128, "{file}");
        for size in &deployment.resources {
            let positions = size.slots * size.page_size.max(1);
            let least = match size.page_size {
                0 => deployment.limits.max_rows,
                // A prompt of the longest sentence and its frames.
                _ => deployment.limits.max_rows * 512,
            };
            let declared = declaration.resources.iter().any(|decl| decl.key == size.key);
            assert!(declared && positions >= least, "{file}: {size:?}");
        }
    }
}

#[test]
fn every_file_is_in_the_list() {
    let files = std::fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let files = files.filter(|file| file.ends_with(".yaml"));
    let listed = SHIPPED.iter().map(|(file, _)| (*file).to_owned());
    assert_eq!(files.collect::<BTreeSet<_>>(), listed.collect());
}

/// The keys of each section are asked for with one that does not exist.
#[test]
fn the_readme_describes_every_key() {
    let readme = std::fs::read_to_string(directory().join("README.md")).unwrap();
    let sections = [
        "",
        "node_groups.0.",
        "node_groups.0.auto.",
        "mps.",
        "mps.ranks.0.",
        "resources.codec_state.",
        "limits.",
        "chunks.codes.",
        "services.",
        "services.engine_manager.",
        "services.gateway.",
        "services.worker.",
        "devices.0.",
    ];
    for section in sections {
        let violations = check("1.7b-auto.yaml", &[&format!("{section}no_such_key=1")]).unwrap_err();
        let unknown = violations
            .iter()
            .find(|violation| violation.reason == Reason::UnknownKey)
            .unwrap();
        let (_, keys) = unknown.remedy.split_once("the keys are ").unwrap();
        for key in keys.split(", ") {
            assert!(readme.contains(key), "{section} has a key {key}");
        }
    }
}

#[test]
fn the_gpu_configurations_also_run_on_random_weights() {
    for (file, preset) in [
        ("0.6b-lane.yaml", "0.6b-custom_voice"),
        ("voice-clone.yaml", "1.7b-base"),
        ("split-mps.yaml", "1.7b-custom_voice"),
    ] {
        let model_config = format!("model_config={preset}");
        let flags = ["weights=random:7", &model_config];
        assert_eq!(
            accepted(file, &flags).declaration,
            accepted(file, &[]).declaration
        );
    }
}

#[test]
fn the_split_sends_frames_from_worker_to_worker() {
    for file in ["split-demo.yaml", "split.yaml", "split-mps.yaml"] {
        let Validated {
            deployment,
            declaration,
            ..
        } = accepted(file, &[]);
        let edges = |rank| {
            WorkerPlan::for_rank(&deployment, &declaration, rank)
                .unwrap()
                .remote_edges
        };
        let edge = |direction, peer_rank| RemoteEdge {
            edge: "codes".to_owned(),
            kind: EdgeKind::Stream,
            direction,
            peer_rank,
        };
        assert_eq!(edges(0), [edge(Direction::To, 1)], "{file}");
        assert_eq!(edges(1), [edge(Direction::From, 0)], "{file}");
    }
    let split = accepted("split-mps.yaml", &[]).deployment;
    assert_eq!(
        (split.mps, split.ranks[1].active_thread_percentage),
        (MpsMode::Required, Some(30))
    );
}

#[test]
fn replicas_are_whole_workers_on_one_device() {
    for file in [
        "replicas-mps.yaml",
        "bench-0.6b-replicas-mps.yaml",
        "bench-1.7b-replicas-mps.yaml",
    ] {
        let Validated {
            deployment,
            declaration,
            ..
        } = accepted(file, &[]);
        let plan = |rank| WorkerPlan::for_rank(&deployment, &declaration, rank).unwrap();
        let (first, second) = (plan(0), plan(1));
        assert_eq!((deployment.replicas, deployment.ranks.len()), (2, 2), "{file}");
        assert_eq!((first.device_index, second.device_index), (0, 0), "{file}");
        assert_eq!(
            (first.remote_edges, second.remote_edges),
            (vec![], vec![]),
            "{file}"
        );
        assert_eq!(first.nodes, second.nodes, "{file}");
        assert_eq!(first.resources, second.resources, "{file}");
    }
}

/// The rules hold for the real model too: what each change of a shipped configuration is refused for.
#[test]
fn changes_that_no_lane_can_serve_are_refused() {
    use Reason::*;
    let talker_on_a_lane: &[Reason] = &[
        LaneWalkIsGraph,
        LaneChainPostprocessing,
        LaneWithoutChain,
        LaneNeverScheduled,
        LaneStagesHostRows,
    ];
    let cases: &[(&str, &[&str], &[Reason])] = &[
        ("demo.yaml", &["node_groups.0.lane=2"], talker_on_a_lane),
        (
            "1.7b-auto.yaml",
            &["node_groups.0.lane=auto", "node_groups.0.lane_id=2"],
            talker_on_a_lane,
        ),
        ("split-demo.yaml", &["node_groups.1.lane=1"], &[LaneWithoutChain]),
        ("1.7b-lane.yaml", &["node_groups.1.sms=30"], &[SmPartition]),
        (
            "1.7b-lane.yaml",
            &["resources.talker_kv.pages=80000"],
            &[DeviceMemoryExceeded],
        ),
        (
            "1.7b-lane.yaml",
            &["node_groups.1.memory=1GB"],
            &[LaneMemoryExceeded],
        ),
        ("1.7b-lane.yaml", &["max_seq_len=40000"], &[SequenceTooLong]),
        ("voice-clone.yaml", &["node_groups.2.lane=3"], &[LaneIdSkips]),
        (
            "1.7b-lane.yaml",
            &["weights=hf://Qwen/Qwen3-TTS-12Hz-1.7B-Base"],
            &[NodeUnassigned],
        ),
        ("demo.yaml", &["model=qwen4_tts"], &[UnknownModel]),
        ("demo.yaml", &["weights=random:7"], &[ModelConfigRequired]),
        (
            "1.7b-lane.yaml",
            &["weights=hf://someone/fine-tune"],
            &[ModelConfigRequired],
        ),
        ("1.7b-lane.yaml", &["model_config=1.7b"], &[ModelConfigInvalid]),
        ("demo.yaml", &["weights=nowhere/at/all"], &[ModelConfigInvalid]),
        ("demo.yaml", &["model_config=1.7b-base"], &[ModelConfigUnused]),
        ("demo.yaml", &["limits.max_prefill_tokens=6"], &[PromptTooLong]),
        (
            "demo.yaml",
            &["services.gateway.listen=127.0.0.1:7070"],
            &[AddressTaken],
        ),
    ];
    for (file, flags, expected) in cases {
        let violations = check(file, flags).expect_err(file);
        let found: BTreeSet<Reason> = violations.iter().map(|violation| violation.reason).collect();
        assert_eq!(
            found,
            expected.iter().copied().collect(),
            "{file} {flags:?}: {}",
            render(&violations)
        );
    }
}

/// A configuration file of the model that is broken is to be mended, and the demo's checkpoint is whole.
#[test]
fn the_files_of_a_checkpoint_are_looked_for() {
    let flags = |weights: &str| vec![format!("weights={weights}")];
    let here = |flags| {
        let sources = Sources {
            environment: Vec::new(),
            ..Sources::read(&directory().join("demo.yaml"), flags)
        };
        laneway_models_decl::load_deployment_here(&sources, None)
    };
    assert!(here(Vec::new()).is_ok());

    let nano = directory().join("../crates/models/demo/nano");
    let copy = tempfile::tempdir().unwrap();
    std::fs::create_dir(copy.path().join("speech_tokenizer")).unwrap();
    for name in laneway_models_decl::qwen3_tts::config::FILES {
        std::fs::copy(nano.join(name), copy.path().join(name)).unwrap();
    }
    let weights = copy.path().to_str().unwrap();
    let violations = here(flags(weights)).unwrap_err();
    assert!(
        violations.len() == 3
            && violations
                .iter()
                .all(|violation| violation.reason == Reason::CheckpointIncomplete),
        "{}",
        render(&violations)
    );

    std::fs::write(copy.path().join("config.json"), "{").unwrap();
    let violations = here(flags(weights)).unwrap_err();
    assert_eq!(violations[0].reason, Reason::ModelConfigInvalid);
    assert!(
        violations[0].remedy.starts_with("mend "),
        "{}",
        violations[0].remedy
    );
}
