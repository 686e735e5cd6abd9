use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::raw::RawLane;
use crate::test_support::{TOY_YAML, toy};
use crate::{DeviceInventory, render};

/// The example of the system's description, key for key.
const EXAMPLE: &str = "\
model: qwen3_tts            # registry name
weights: hf://Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice   # or a path, or random:<seed> for benchmarks
device: cuda                # or cpu
max_seq_len: 8192
node_groups:
  - nodes: [Talker]
    ranks: [0]
    walks: [talker_prefill, talker_decode]
  - nodes: [Codec]
    ranks: [0]
    lane: 1                 # or auto (then lane_id: 1)
    priority: low
    sms: 32                 # optional SM partition
    # auto: { sms: [0, 16, 32, 64] }   # what auto may choose among; 0 is no partition
resources:
  talker_kv:   { pages: 8192, page_size: 16 }
  codec_state: { slots: 256 }
rank_devices: {0: 0}
mps: { mode: required, ranks: { 0: {active_thread_percentage: 100} } }
";

fn environment(variables: &[(&str, &str)]) -> Vec<(String, String)> {
    variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

fn raw(sources: &Sources) -> RawDeployment {
    let loaded = load(sources);
    assert!(loaded.violations.is_empty(), "{}", render(&loaded.violations));
    loaded.raw.unwrap()
}

#[test]
fn every_key_of_the_example_is_understood() {
    let raw = raw(&Sources::text("example.yaml", EXAMPLE));
    let groups = raw.node_groups.unwrap();
    assert_eq!(
        groups[0].walks.as_deref(),
        Some(&["talker_prefill".to_owned(), "talker_decode".to_owned()][..])
    );
    assert_eq!(
        (groups[1].lane, groups[1].sms.map(u32::from)),
        (Some(RawLane::Id(1)), Some(32))
    );
    assert_eq!(raw.resources["talker_kv"].pages.map(u32::from), Some(8192));
    assert_eq!(raw.rank_devices[&0], 0);
}

#[test]
fn later_layers_win_and_defaults_fill_the_rest() {
    let sources = Sources {
        environment: environment(&[
            ("LANEWAY__LIMITS__MAX_ROWS", "32"),
            ("LANEWAY__LIMITS__MAX_QUEUE", "1"),
            ("LANEWAY__NODE_GROUPS__1__LANE", "auto"),
            ("LANEWAY__NODE_GROUPS__1__AUTO", "{ sms: [0, 16] }"),
            ("LANEWAY__RANK_DEVICES__0", "3"),
            ("LANEWAY__SERVICES__GATEWAY__LISTEN", "[::1]:9000"),
            ("LANEWAY_SANITIZE", "1"),
            ("OTHER", "x"),
        ]),
        flags: vec![
            "limits.max_queue=2".to_owned(),
            "node_groups[1].lane_id=1".to_owned(),
            "node_groups.0.ranks=[0]".to_owned(),
        ],
        ..Sources::text(
            "test.yaml",
            format!("{TOY_YAML}limits: {{ max_rows: 16, max_frames: 100 }}\n"),
        )
    };
    let raw = raw(&sources);
    assert_eq!(
        (
            raw.limits.max_rows.get(),
            raw.limits.max_queue,
            raw.limits.max_frames.get()
        ),
        (32, 2, 100)
    );
    assert_eq!(raw.limits.max_text_chars.get(), defaults::MAX_TEXT_CHARS);
    let groups = raw.node_groups.unwrap();
    assert_eq!(
        (groups[1].lane, groups[1].lane_id.map(u32::from)),
        (Some(RawLane::Auto), Some(1))
    );
    assert_eq!(groups[1].auto.as_ref().unwrap().sms, [0, 16]);
    assert_eq!(groups[0].ranks, Some(vec![0]));
    assert_eq!(raw.rank_devices[&0], 3);
    assert_eq!(raw.services.gateway.listen.0, "[::1]:9000");
}

/// A wrong value and where it is said to come from.
fn check_location(sources: Sources, code: Reason, location: &str, remedy: &str) {
    let violations = load(&sources).violations;
    let found = violations.iter().find(|violation| violation.reason == code);
    let found = found.unwrap_or_else(|| panic!("no {code}: {}", render(&violations)));
    assert_eq!(found.location.to_string(), location);
    assert!(found.remedy.contains(remedy), "{}", found.remedy);
}

#[test]
fn a_violation_names_the_layer_that_it_came_from() {
    let toy = || Sources::text("dir/test.yaml", TOY_YAML);
    let with_environment = |name: &str, value: &str| Sources {
        environment: environment(&[(name, value)]),
        ..toy()
    };
    let with_flag = |flag: &str| Sources {
        flags: vec![flag.to_owned()],
        ..toy()
    };
    let text = |yaml: &str| Sources::text("dir/test.yaml", yaml);
    use Reason::*;
    for (sources, code, location, remedy) in [
        (
            text("modle: toy\n"),
            UnknownKey,
            "dir/test.yaml:1:1",
            "write `model`",
        ),
        (
            text("\nnode_groups:\n  - nodes: [A]\n  - nodse: [B]\n"),
            UnknownKey,
            "dir/test.yaml:4:5",
            "write `nodes`",
        ),
        (
            text("limits: {max_rows: 4, max_row: 4}\n"),
            UnknownKey,
            "dir/test.yaml:1:23",
            "write `max_rows`",
        ),
        (
            text("services:\n  worker:\n    advertised: x\n"),
            UnknownKey,
            "dir/test.yaml:3:5",
            "write `advertise`",
        ),
        (
            text("model: [a\n"),
            YamlSyntax,
            "dir/test.yaml:2:1",
            "mend the syntax",
        ),
        (
            with_environment("LANEWAY__LIMITS__MAX_ROW", "3"),
            UnknownKey,
            "environment LANEWAY__LIMITS__MAX_ROW",
            "`max_rows`",
        ),
        (
            with_environment("LANEWAY__DEVICE", "tpu"),
            InvalidValue,
            "environment LANEWAY__DEVICE",
            "`cpu`, `cuda`",
        ),
        (
            with_environment("LANEWAY__LIMITS", "{max_rows: -1}"),
            InvalidValue,
            "environment LANEWAY__LIMITS",
            "",
        ),
        (
            with_environment("LANEWAY__", "3"),
            OverrideMalformed,
            "environment LANEWAY__",
            "LANEWAY__SECTION__KEY",
        ),
        (
            with_environment("LANEWAY__NODE_GROUPS__999999999__LANE", "1"),
            OverrideMalformed,
            "environment LANEWAY__NODE_GROUPS__999999999__LANE",
            "",
        ),
        (with_flag("a.b=1"), UnknownKey, "flag --set a.b", "the keys are"),
        (
            with_environment("LANEWAY__A__B__C", "1"),
            UnknownKey,
            "environment LANEWAY__A__B__C",
            "the keys are",
        ),
        (
            with_flag("limits.max_rows=many"),
            InvalidValue,
            "flag --set limits.max_rows",
            "",
        ),
        (
            with_flag("node_groups.1.side_stream=true"),
            SideStreamRemoved,
            "flag --set node_groups.1.side_stream",
            "`lane: 1`",
        ),
        (
            with_flag("max_seq_len"),
            OverrideMalformed,
            "flag --set max_seq_len",
            "section.key=value",
        ),
        (
            with_flag("node_groups.5.lane=1"),
            OverrideMalformed,
            "flag --set node_groups.5.lane",
            "count from 0",
        ),
        (
            with_flag("a b=1"),
            OverrideMalformed,
            "flag --set a b",
            "section.key=value",
        ),
    ] {
        check_location(sources, code, location, remedy);
    }
}

#[test]
fn a_default_that_is_at_fault_is_called_one() {
    let yaml = TOY_YAML.replace("max_seq_len: 256\n", "resources: { kv: { pages: 4 } }\n");
    let flagless =
        load(&Sources::text("test.yaml", yaml)).check(Some(&toy()), Some(&DeviceInventory::h200(1)));
    assert_eq!(flagless.unwrap_err()[0].location.to_string(), "test.yaml:5:20");
    let no_file = load(&Sources::default()).check(None, None).unwrap_err();
    assert!(
        no_file
            .iter()
            .all(|violation| violation.location == Location::Default)
    );
}

#[test]
fn an_override_moves_the_place_of_what_it_replaces() {
    let sources = Sources {
        environment: environment(&[(
            "LANEWAY__NODE_GROUPS",
            "[{ nodes: [Talker], lane: 3, color: red }]",
        )]),
        ..Sources::text("test.yaml", TOY_YAML)
    };
    let violations = load(&sources).check(Some(&toy()), None).unwrap_err();
    let of_groups = violations
        .iter()
        .filter(|violation| violation.key.starts_with("node_groups"));
    assert!(of_groups.clone().count() > 2);
    for violation in of_groups {
        assert_eq!(
            violation.location,
            Location::Environment("LANEWAY__NODE_GROUPS".to_owned()),
            "{}",
            violation.key
        );
    }
}

#[test]
fn a_value_that_does_not_fit_is_not_reported_as_missing_too() {
    let yaml = TOY_YAML
        .replace("model: toy", "model: [toy]")
        .replace("weights: random:7", "weights: 7");
    let violations = load(&Sources::text("test.yaml", yaml))
        .check(None, None)
        .unwrap_err();
    assert!(
        violations
            .iter()
            .all(|violation| violation.reason == Reason::InvalidValue),
        "{}",
        render(&violations)
    );
    assert_eq!(violations.len(), 2);
}

#[test]
fn messages_are_in_words() {
    let message = |yaml: &str| {
        load(&Sources::text("test.yaml", yaml))
            .violations
            .remove(0)
            .message
    };
    for (yaml, expected) in [
        (
            "max_seq_len: many",
            "`many` is not a whole number from 1 to 4294967295",
        ),
        (
            "max_seq_len: -1",
            "`-1` is not a whole number from 1 to 4294967295",
        ),
        (
            "max_seq_len: 1.5",
            "`1.5` is not a whole number from 1 to 4294967295",
        ),
        ("limits: [1]", "a list is not a mapping"),
        ("node_groups: [[Talker]]", "a list is not a mapping"),
        ("node_groups: {}", "a mapping is not a list"),
        ("device: TPU", "`TPU` is not one of its values"),
        (
            "node_groups: [{ memory: 4XB }]",
            "`4XB` is not a size in bytes, such as 4GiB or 500MB",
        ),
        (
            "services: { drain_timeout: 30 }",
            "`30` is not a length of time with its unit, such as 500ms or 30s",
        ),
        (
            "services: { gateway: { listen: 8080 } }",
            "`8080` is not an address, such as 127.0.0.1:8080",
        ),
        (
            "weights: ftp://x",
            "`ftp://x` is neither a path nor hf://organisation/name nor random:<seed>",
        ),
        (
            "weights: hf://x",
            "`hf://x` is not of the form hf://organisation/name or hf://organisation/name@revision",
        ),
        (
            "rank_devices: { first: 0 }",
            "the key `first` is not a rank: a whole number from 0",
        ),
        ("mps: { ranks: {} }", "`mode` is missing"),
        ("- model", "a configuration is a mapping"),
    ] {
        assert_eq!(message(yaml), expected, "{yaml}");
    }
}

#[test]
fn paths_in_the_file_start_from_its_directory() {
    let file = |yaml: &str| Sources::text("deployments/test.yaml", yaml);
    let loaded = load(&file("weights: ../checkpoints/a\nmodel_config: ./sizes\n"));
    assert_eq!(
        loaded.weights(),
        Some(Weights::Path(PathBuf::from("deployments/../checkpoints/a")))
    );
    assert_eq!(
        loaded.model_config(),
        Some(ModelConfig::Directory(PathBuf::from("deployments/./sizes")))
    );

    let loaded = load(&Sources {
        flags: vec!["weights=checkpoints/a".to_owned()],
        ..file("weights: /b\nmodel_config: 0.6b\n")
    });
    assert_eq!(
        loaded.weights(),
        Some(Weights::Path(PathBuf::from("checkpoints/a")))
    );
    assert_eq!(
        loaded.model_config(),
        Some(ModelConfig::Preset("0.6b".to_owned()))
    );

    let loaded = load(&file("weights: /checkpoints/a\n"));
    assert_eq!(
        loaded.weights(),
        Some(Weights::Path(PathBuf::from("/checkpoints/a")))
    );
}

#[test]
fn a_file_that_is_not_there_is_the_only_violation() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("absent.yaml");
    let violations = load(&Sources::read(&path, Vec::new()))
        .check(None, None)
        .unwrap_err();
    assert_eq!(violations.len(), 1);
    assert_eq!(violations[0].reason, Reason::FileUnreadable);

    let large = directory.path().join("large.yaml");
    std::fs::write(&large, vec![b'#'; (MAX_FILE_BYTES + 1) as usize]).unwrap();
    let violations = load(&Sources::read(&large, Vec::new()))
        .check(None, None)
        .unwrap_err();
    assert_eq!(violations[0].reason, Reason::FileUnreadable);
}

#[test]
fn yaml_scalars_have_the_types_of_the_core_schema() {
    for (text, expected) in [
        ("auto", Tree::Str("auto".to_owned())),
        ("32", Tree::Int(32)),
        ("-1", Tree::Int(-1)),
        ("0.5", Tree::Float(0.5)),
        ("'32'", Tree::Str("32".to_owned())),
        ("true", Tree::Bool(true)),
        ("~", Tree::Null),
        ("1.7b-base", Tree::Str("1.7b-base".to_owned())),
        ("inf", Tree::Str("inf".to_owned())),
        ("nan", Tree::Str("nan".to_owned())),
        ("1e", Tree::Str("1e".to_owned())),
        ("99999999999999999999", Tree::Float(1e20)),
        ("[0, 16]", Tree::List(vec![Tree::Int(0), Tree::Int(16)])),
        ("[::1]:80", Tree::Str("[::1]:80".to_owned())),
    ] {
        assert_eq!(yaml::parse_value(text), expected, "{text}");
    }
}

#[test]
fn deep_nesting_and_expanding_anchors_are_refused() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for yaml in [deep.as_str(), "a: &a [1]\nb: [*a, *a]\n", "{{}: 1}", "? [a]\n: 1"] {
        let violations = load(&Sources::text("test.yaml", yaml)).violations;
        assert_eq!(
            violations[0].reason,
            Reason::YamlUnsupported,
            "{yaml}: {}",
            render(&violations)
        );
    }
}

/// Whatever is written, loading and checking come back.
fn must_return(sources: &Sources) {
    let _ = load(sources).check(Some(&toy()), Some(&DeviceInventory::h200(1)));
}

/// The example with pieces taken out, doubled or replaced.
fn mutated() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just(String::new()),
        "[-\\[\\]{}:#&*!|>'\"%@`,?~ \n\t]{1,4}",
        "[a-z_]{1,12}: ",
        Just("node_groups[99999999999]".to_owned()),
        Just("-9223372036854775808".to_owned()),
        Just("4294967296".to_owned()),
        any::<char>().prop_map(String::from),
    ];
    let edits = prop::collection::vec((any::<prop::sample::Index>(), 0_usize..6, piece), 1..6);
    (prop::sample::select(vec![EXAMPLE, TOY_YAML]), edits).prop_map(|(text, edits)| {
        let mut text: Vec<char> = text.chars().collect();
        for (at, length, piece) in edits {
            let start = at.index(text.len() + 1);
            let end = (start + length).min(text.len());
            text.splice(start..end, piece.chars());
        }
        text.into_iter().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn arbitrary_text_never_panics(text in "(?s).{0,80}") {
        must_return(&Sources::text("test.yaml", text));
    }

    #[test]
    fn a_damaged_configuration_never_panics(text in mutated()) {
        must_return(&Sources::text("test.yaml", text));
    }

    #[test]
    fn arbitrary_overrides_never_panic(
        name in "[A-Z0-9_.\\[\\]-]{0,24}",
        flag in "[a-z0-9_.=\\[\\]{}-]{0,24}",
        value in "(?s).{0,24}",
    ) {
        let known = ["LIMITS", "NODE_GROUPS__0", "MPS__RANKS", "RANK_DEVICES", "SERVICES__GATEWAY"];
        for known in known {
            must_return(&Sources {
                environment: vec![(format!("LANEWAY__{known}__{name}"), value.clone()), (format!("LANEWAY__{name}"), value.clone())],
                flags: vec![flag.clone(), format!("{flag}={value}"), format!("node_groups.0.{flag}")],
                ..Sources::text("test.yaml", TOY_YAML)
            });
        }
    }
}

#[test]
fn a_default_in_the_place_of_a_bad_value_is_not_blamed_too() {
    let mut loaded = load(&Sources::text("test.yaml", "max_seq_len: many\n"));
    loaded.add(Violation::new(
        Reason::SequenceTooLong,
        "max_seq_len",
        "8192 positions are too many",
        "write fewer",
    ));
    assert_eq!(loaded.violations.len(), 1, "{}", render(&loaded.violations));
}

#[test]
fn a_variable_that_sets_nothing_is_found_with_the_nearest_that_would() {
    let check = |name: &str, nearest: &str| {
        let stray = stray_variables(std::iter::once(name), &["LANEWAY_LOG", "LANEWAY_CONFIG"]);
        assert_eq!(stray, [(name, nearest.to_owned())]);
    };
    check("LANEWAY_LIMITS_MAX_ROWS", "LANEWAY__LIMITS__MAX_ROWS");
    check("LANEWAY_DEVICE", "LANEWAY__DEVICE");
    check("LANEWAY_CONFG", "LANEWAY_CONFIG");
    let names = ["LANEWAY_LOG", "LANEWAY__DEVICE", "PATH"];
    assert!(stray_variables(names.into_iter(), &["LANEWAY_LOG"]).is_empty());
}
