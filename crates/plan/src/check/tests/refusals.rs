//! One minimal configuration for each way to be refused.

use std::collections::BTreeSet;

use super::{check, codec_state};
use crate::declaration::{ModelDeclaration, ResourceReport, WalkKind};
use crate::test_support::{TOY_YAML, resource};
use crate::violation::{Location, Reason};

/// Reasons that only the caller that knows models can find.
const FOUND_BY_MODELS_DECL: &[Reason] = &[
    Reason::UnknownModel,
    Reason::ModelConfigRequired,
    Reason::ModelConfigUnused,
    Reason::ModelConfigInvalid,
    Reason::SequenceTooLong,
    Reason::CheckpointIncomplete,
    Reason::VocabularyMissing,
    Reason::PromptTooLong,
];

/// One refusal: how the toy's file and declaration differ, and what is reported.
pub(super) struct Case {
    pub(super) reason: Reason,
    /// Text of the toy's file, and what stands in its place.
    pub(super) edit: (&'static str, &'static str),
    pub(super) change: fn(&mut ModelDeclaration),
    line: usize,
    remedy: &'static str,
    /// Other reasons that this cannot avoid.
    beside: &'static [Reason],
}

impl Case {
    fn file(reason: Reason, edit: (&'static str, &'static str), line: usize, remedy: &'static str) -> Self {
        Self {
            reason,
            edit,
            change: |_| {},
            line,
            remedy,
            beside: &[],
        }
    }

    fn model(reason: Reason, change: fn(&mut ModelDeclaration), remedy: &'static str) -> Self {
        Self {
            reason,
            edit: ("", ""),
            change,
            line: 9,
            remedy,
            beside: &[],
        }
    }

    fn beside(mut self, reasons: &'static [Reason]) -> Self {
        self.beside = reasons;
        self
    }
}

const ON_THE_CHAIN: &str = "leave `lane` out";

/// Rows 1 to 14 of the table of what may live on a lane.
pub(super) fn lane_cases() -> Vec<Case> {
    use Reason::*;
    vec![
        Case::file(
            SideStreamRemoved,
            ("lane: 1", "side_stream: true"),
            9,
            "write `lane: 1`",
        )
        .beside(&[LaneIdSkips]),
        Case::model(
            LaneParallelNode,
            |toy| toy.nodes[1].parallel_ranks = 2,
            ON_THE_CHAIN,
        )
        .beside(&[NodeRanks]),
        Case::model(
            LaneWalkIsGraph,
            |toy| toy.walks[2].nodes.push("Talker".to_owned()),
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneWalkIsGraph,
            |toy| toy.walks[2].nodes.push("Codec".to_owned()),
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneWalkIsGraph,
            |toy| toy.walks[2].kind = WalkKind::Loop,
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneWalkCombined,
            |toy| toy.walks[2].combined_with = Some("decode".to_owned()),
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneWalkCombined,
            |toy| toy.walks[1].combined_with = Some("chunk".to_owned()),
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneChainPostprocessing,
            |toy| toy.nodes[1].stop_check = true,
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneChainPostprocessing,
            |toy| toy.nodes[1].output_spans = true,
            ON_THE_CHAIN,
        ),
        Case::file(
            LaneWithoutChain,
            ("    lane: 1", "    lane: 1\n    ranks: [1]"),
            9,
            "that worker's chain",
        )
        .beside(&[LaneIdSkips, DeviceMissing]),
        Case::model(LaneNeverScheduled, |toy| toy.stream_edges.clear(), ON_THE_CHAIN),
        Case::model(
            LaneResourceShared,
            |toy| toy.nodes[0].resources.push("codec_state".to_owned()),
            "put all nodes that share it on one lane",
        ),
        Case::model(
            LaneResourceShared,
            |toy| codec_state(toy).shared_with_ranks = vec![1],
            "put all nodes that share it on one lane",
        ),
        Case::model(
            LaneResourceDepends,
            |toy| codec_state(toy).depends_on = vec!["kv".to_owned()],
            "put both nodes on one lane",
        ),
        Case::model(
            LaneResourceDepends,
            |toy| {
                toy.resources[0].report.depends_on = vec!["between".to_owned()];
                let depends_on = vec!["codec_state".to_owned()];
                toy.resources.push(resource(
                    "between",
                    "table",
                    ResourceReport {
                        depends_on,
                        ..Default::default()
                    },
                ));
            },
            "put both nodes on one lane",
        ),
        Case::model(
            LanePrefixCache,
            |toy| codec_state(toy).prefix_cache = true,
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneEvictsOrMoved,
            |toy| codec_state(toy).evicts = true,
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneEvictsOrMoved,
            |toy| codec_state(toy).moved_outside_step = true,
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneStagesHostRows,
            |toy| codec_state(toy).stages_host_rows = true,
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneStagesHostRows,
            |toy| {
                codec_state(toy).depends_on = vec!["rows".to_owned()];
                let report = ResourceReport {
                    stages_host_rows: true,
                    ..Default::default()
                };
                toy.resources.push(resource("rows", "rows", report));
            },
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneSnapshotPool,
            |toy| codec_state(toy).snapshots_keyed_on = Some("kv".to_owned()),
            ON_THE_CHAIN,
        ),
        Case::model(
            LaneStateAcrossRequests,
            |toy| toy.walks[2].state_across_requests = true,
            ON_THE_CHAIN,
        ),
    ]
}

/// Row 15: plain configuration errors.
fn plain_cases() -> Vec<Case> {
    use Reason::*;
    let end = "lane: 2\n";
    vec![
        Case::file(YamlSyntax, ("[Codec]", "[Codec"), 9, "mend the syntax"),
        Case::file(
            YamlUnsupported,
            ("[Codec]", "&anchor [Codec]"),
            8,
            "write the value out",
        ),
        Case::file(
            YamlUnsupported,
            ("random:7", "!seed 7"),
            2,
            "write the plain value",
        ),
        Case::file(
            YamlUnsupported,
            (end, "lane: 2\n---\nmodel: toy\n"),
            12,
            "one file for a deployment",
        ),
        Case::file(
            DuplicateKey,
            ("device: cuda", "device: cuda\ndevice: cpu"),
            5,
            "keep one of the two",
        ),
        Case::file(
            UnknownKey,
            ("max_seq_len", "max_seq_length"),
            5,
            "write `max_seq_len`",
        ),
        Case::file(
            UnknownKey,
            ("lane: 1", "lane: 1\n    priorty: low"),
            10,
            "write `priority`",
        ),
        Case::file(
            UnknownKey,
            (end, "lane: 2\nservices: { gateway: { lisen: 'x:1' } }\n"),
            12,
            "write `listen`",
        ),
        Case::file(InvalidValue, ("cuda", "gpu"), 4, "the values are `cpu`, `cuda`"),
        Case::file(InvalidValue, ("256", "0"), 5, "value of that form"),
        Case::file(InvalidValue, ("lane: 1", "lane: first"), 9, "value of that form").beside(&[LaneIdSkips]),
        Case::file(
            InvalidValue,
            ("random:7", "random:seven"),
            2,
            "value of that form",
        ),
        Case::file(
            AddressTaken,
            (
                end,
                "lane: 2\nservices: { gateway: { listen: '127.0.0.1:7070' } }\n",
            ),
            12,
            "another port",
        ),
        Case::file(
            InvalidValue,
            (end, "lane: 2\nservices: { stall_timeout: 0s }\n"),
            12,
            "write a time",
        ),
        Case::file(
            InvalidValue,
            (end, "lane: 2\nresources: { kv: { pages: 15 } }\n"),
            12,
            "`pages: 16` or more",
        ),
        Case::file(
            InvalidValue,
            ("lane: 1", "lane: 1\n    max_rows: 65"),
            10,
            "at most 64",
        ),
        Case::file(
            InvalidValue,
            (end, "lane: 2\ndevices: [{ name: gpu, memory: 1GB }]\n"),
            12,
            "`cuda:0`",
        )
        .beside(&[DeviceMissing]),
        Case::file(
            InvalidValue,
            (
                end,
                "lane: 2\nmps: { mode: required, ranks: { 0: { active_thread_percentage: 101 } } }\n",
            ),
            12,
            "from 1 to 100",
        ),
        Case::file(
            MissingKey,
            ("weights: random:7\n", ""),
            1,
            "hf://organisation/name",
        ),
        Case::file(
            PrecisionUnsupported,
            ("device: cuda", "device: cpu\nprecision: bf16"),
            5,
            "write `precision: f32`",
        )
        .beside(&[DeviceMissing]),
        Case::file(MissingKey, ("device: cuda\n", ""), 1, "`device: cpu`"),
        Case::file(MissingKey, ("[Encoder]", "[]"), 10, "take the group out").beside(&[NodeUnassigned]),
        Case::file(UnknownNode, ("[Codec]", "[Codec, Codeck]"), 8, "write `Codec`"),
        Case::file(
            NodeInTwoGroups,
            ("[Encoder]", "[Encoder, Codec]"),
            10,
            "keep it in one group",
        ),
        Case::file(
            NodeUnassigned,
            ("  - nodes: [Encoder]\n    lane: 2\n", ""),
            6,
            "`- nodes: [Encoder]`",
        ),
        Case::file(
            NodeRanks,
            ("[Talker]", "[Talker]\n    ranks: [0, 0]"),
            8,
            "`ranks: [0]`",
        ),
        Case::file(
            WalksDoNotMatch,
            ("[Talker]", "[Talker]\n    walks: [prefill]"),
            8,
            "`walks: [prefill, decode]`",
        ),
        Case::file(
            WalksDoNotMatch,
            ("[Talker]", "[Talker]\n    walks: [prefill, decode, x]"),
            8,
            "`walks: [prefill, decode]`",
        ),
        Case::file(LaneIdSkips, ("lane: 2", "lane: 3"), 11, "write `2`"),
        Case::file(LaneIdRequired, ("lane: 1", "lane: auto"), 9, "add `lane_id: 1`"),
        Case::file(
            LaneKeyUnused,
            ("lane: 1", "lane: 1\n    lane_id: 1"),
            10,
            "write `lane: auto`",
        ),
        Case::file(
            LaneKeyUnused,
            ("lane: 1", "lane: 1\n    auto: { sms: [8] }"),
            10,
            "write `lane: auto`",
        ),
        Case::file(
            LaneKeyUnused,
            ("[Talker]", "[Talker]\n    max_rows: 8"),
            8,
            "`limits.max_rows`",
        ),
        Case::file(
            LaneKeyUnused,
            (
                "lane: 1",
                "lane: auto\n    lane_id: 1\n    sms: 8\n    auto: { sms: [8] }",
            ),
            11,
            "keep one",
        ),
        Case::file(
            LaneSettingsConflict,
            (
                "lane: 1\n  - nodes: [Encoder]\n    lane: 2\n",
                "lane: 1\n    sms: 8\n  - nodes: [Encoder]\n    lane: 1\n    sms: 16\n",
            ),
            13,
            "give `sms` once",
        ),
        Case::file(
            SmPartition,
            ("lane: 1", "lane: 1\n    sms: 12"),
            10,
            "write 8 or 16",
        ),
        Case::file(SmPartition, ("lane: 1", "lane: 1\n    sms: 3"), 10, "write 8"),
        Case::file(
            SmPartition,
            ("lane: 1", "lane: 1\n    sms: 132"),
            10,
            "write 128, or take it out",
        ),
        Case::file(
            SmPartition,
            (
                "lane: 1",
                "lane: auto\n    lane_id: 1\n    auto: { sms: [0, 8, 20] }",
            ),
            11,
            "write 16 or 24",
        ),
        Case::file(
            SmPartition,
            (
                "lane: 1",
                "lane: auto\n    lane_id: 1\n    auto: { sms: [0, 16, 16] }",
            ),
            11,
            "name each once",
        ),
        Case::file(
            SmPartition,
            (
                "lane: 1",
                "lane: auto\n    lane_id: 1\n    auto: { sms: [40, 96] }",
            ),
            11,
            "fewer or smaller",
        ),
        Case::file(
            RankSkips,
            ("[Encoder]\n    lane: 2", "[Encoder]\n    ranks: [2]"),
            11,
            "write `1`",
        )
        .beside(&[DeviceMissing]),
        Case::file(
            UnknownRank,
            (end, "lane: 2\nrank_devices: { 0: 0, 1: 0 }\n"),
            12,
            "take it out",
        ),
        Case::file(
            DeviceMissing,
            (end, "lane: 2\nrank_devices: { 0: 1 }\n"),
            12,
            "cuda:0",
        ),
        Case::file(DeviceMissing, ("cuda", "cpu"), 7, "--assume cpu:<GiB>"),
        Case::file(
            MpsNotStated,
            (
                "[Encoder]\n    lane: 2\n",
                "[Encoder]\n    ranks: [1]\nrank_devices: { 1: 0 }\n",
            ),
            12,
            "`mps: { mode: required }`",
        ),
        Case::file(
            MpsUnused,
            (
                end,
                "lane: 2\nmps: { mode: disabled, ranks: { 0: { active_thread_percentage: 9 } } }\n",
            ),
            12,
            "mode: required",
        ),
        Case::file(
            MpsUnused,
            (
                end,
                "lane: 2\nmps: { mode: required, ranks: { 0: { active_thread_percentage: 60 } } }\n",
            ),
            12,
            "raise the shares",
        ),
        Case::file(
            DeviceMemoryExceeded,
            (
                end,
                "lane: 2\nmps: { mode: required, ranks: { 0: { active_thread_percentage: 100, pinned_device_memory: \
                 1MiB } } }\n",
            ),
            12,
            "pinned_device_memory: ",
        ),
        Case::file(InvalidValue, (end, "lane: 2\nreplicas: 65\n"), 12, "1 to 64"),
        Case::file(
            UnknownResource,
            (end, "lane: 2\nresources: { codec_sate: { slots: 4 } }\n"),
            12,
            "write `codec_state`",
        ),
        Case::file(
            ResourceUnits,
            (end, "lane: 2\nresources: { kv: { slots: 4 } }\n"),
            12,
            "write `pages`",
        ),
        Case::file(
            ResourceUnits,
            (end, "lane: 2\nresources: { codec_state: { pages: 4 } }\n"),
            12,
            "write `slots`",
        ),
        Case::file(
            LaneMemoryExceeded,
            ("lane: 1", "lane: 1\n    memory: 1GB"),
            10,
            "`memory: 1320064000`",
        ),
        Case::file(
            DeviceMemoryExceeded,
            (end, "lane: 2\nresources: { kv: { pages: 200000 } }\n"),
            12,
            "`kv: { pages: 136",
        ),
        Case::file(
            UnknownStreamEdge,
            (end, "lane: 2\nchunks: { code: { first: 1, steady: 8 } }\n"),
            12,
            "write `codes`",
        ),
        Case::file(
            ChunkPolicy,
            (end, "lane: 2\nchunks: { codes: { first: 1, steady: 33 } }\n"),
            12,
            "at most 32",
        ),
        Case::file(
            CaptureBuckets,
            (end, "lane: 2\ncapture_buckets: [1, 8, 32]\n"),
            12,
            "end the list with 64",
        ),
        Case::file(
            CaptureBuckets,
            (end, "lane: 2\ncapture_buckets: [8, 1, 64]\n"),
            12,
            "or leave it out",
        ),
        Case {
            change: |toy| toy.nodes[2].resources.push("kv".to_owned()),
            ..Case::file(
                ResourceAcrossWorkers,
                ("[Encoder]\n    lane: 2", "[Encoder]\n    ranks: [1]"),
                10,
                "the same `ranks`",
            )
        }
        .beside(&[DeviceMissing]),
    ]
}

#[test]
fn every_refusal_names_its_line_and_what_to_write_instead() {
    for case in lane_cases().into_iter().chain(plain_cases()) {
        let (from, to) = case.edit;
        assert!(TOY_YAML.contains(from), "{from}");
        let what = format!("{} with {to:?}", case.reason);
        let violations = check(&TOY_YAML.replacen(from, to, 1), case.change).expect_err(&what);

        let found: BTreeSet<Reason> = violations.iter().map(|violation| violation.reason).collect();
        let expected: BTreeSet<Reason> = case.beside.iter().copied().chain([case.reason]).collect();
        assert_eq!(found, expected, "{what}: {}", crate::render(&violations));
        let violation = violations
            .iter()
            .find(|violation| violation.reason == case.reason)
            .unwrap();
        let Location::File { line, .. } = violation.location else {
            panic!("{what}: {}", violation.location)
        };
        assert_eq!(line, case.line, "{what}: {}", crate::render(&violations));
        assert!(
            violation.remedy.contains(case.remedy),
            "{what}: {}",
            violation.remedy
        );
    }
}

#[test]
fn every_reason_has_a_case() {
    let cases = lane_cases()
        .into_iter()
        .chain(plain_cases())
        .map(|case| case.reason);
    // A file that is not there and an override that names nothing have no line; `load` tests them.
    let elsewhere = [Reason::FileUnreadable, Reason::OverrideMalformed];
    let tested: BTreeSet<Reason> = cases
        .chain(elsewhere)
        .chain(FOUND_BY_MODELS_DECL.iter().copied())
        .collect();
    assert_eq!(tested, Reason::ALL.iter().copied().collect());
}
