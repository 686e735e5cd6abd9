mod refusals;

use crate::declaration::{ModelDeclaration, ResourceReport, WalkKind};
use crate::deployment::{MpsMode, Placement, Precision, Priority};
use crate::test_support::{TOY_YAML, node, resource, stream_edge, toy, walk};
use crate::violation::{Location, Reason, Violation};
use crate::{Deployment, DeviceInventory, Origin, Sources, load};

fn check(yaml: &str, change: impl FnOnce(&mut ModelDeclaration)) -> Result<Deployment, Vec<Violation>> {
    let mut declaration = toy();
    change(&mut declaration);
    load(&Sources::text("test.yaml", yaml)).check(Some(&declaration), Some(&DeviceInventory::h200(1)))
}

fn codec_state(declaration: &mut ModelDeclaration) -> &mut ResourceReport {
    &mut declaration.resources[2].report
}

#[test]
fn codes_are_their_names_in_capitals() {
    for reason in Reason::ALL {
        let name = format!("{reason:?}");
        let capitals: String = name
            .chars()
            .flat_map(|c| {
                if c.is_uppercase() {
                    vec!['_', c]
                } else {
                    vec![c.to_ascii_uppercase()]
                }
            })
            .collect();
        assert_eq!(capitals.trim_start_matches('_'), reason.code());
    }
}

#[test]
fn all_violations_come_at_once_in_the_order_of_the_file() {
    let yaml = TOY_YAML
        .replace("max_seq_len: 256", "max_seq_lenn: 256")
        .replace("lane: 1", "lane: 1\n    sms: 12")
        .replace(
            "lane: 2",
            "lane: 4\n    side_stream: true\nlimits: { max_rows: none }",
        );
    let violations = check(&yaml, |toy| {
        codec_state(toy).prefix_cache = true;
        codec_state(toy).evicts = true;
    })
    .unwrap_err();
    let found: Vec<(usize, Reason)> = violations
        .iter()
        .map(|violation| match violation.location {
            Location::File { line, .. } => (line, violation.reason),
            _ => panic!("{violation:?}"),
        })
        .collect();
    let expected = [
        (5, Reason::UnknownKey),
        (9, Reason::LanePrefixCache),
        (9, Reason::LaneEvictsOrMoved),
        (10, Reason::SmPartition),
        (12, Reason::LaneIdSkips),
        (13, Reason::SideStreamRemoved),
        (14, Reason::InvalidValue),
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_new_kind_of_resource_that_reports_nothing_forbidden_is_accepted() {
    let deployment = check(TOY_YAML, |toy| {
        toy.nodes[1].resources.push("hologram".to_owned());
        let report = ResourceReport {
            bytes_per_slot: 64,
            fixed_bytes: 64,
            depends_on: vec!["codec_state".to_owned()],
            ..Default::default()
        };
        toy.resources
            .push(resource("hologram", "a kind nobody heard of", report));
    });
    assert_eq!(deployment.unwrap().resources.last().unwrap().key, "hologram");
}

#[test]
fn a_forbidden_report_is_refused_whatever_the_kind_is_called() {
    for kind in ["sampler", "state_pool", "a kind nobody heard of"] {
        let violations = check(TOY_YAML, |toy| {
            toy.resources[2].kind = kind.to_owned();
            toy.resources[2].report.stages_host_rows = true;
        });
        assert_eq!(violations.unwrap_err()[0].reason, Reason::LaneStagesHostRows);
        check(TOY_YAML, |toy| toy.resources[2].kind = kind.to_owned()).unwrap();
    }
}

#[test]
fn auto_must_pass_every_rule() {
    let auto = TOY_YAML.replace("lane: 1", "lane: auto\n    lane_id: 1");
    check(&auto, |_| {}).unwrap();
    for case in refusals::lane_cases()
        .into_iter()
        .filter(|case| case.edit == ("", ""))
    {
        let violations = check(&auto, case.change).unwrap_err();
        assert!(
            violations.iter().any(|violation| violation.reason == case.reason),
            "{}",
            case.reason
        );
    }
}

#[test]
fn nodes_on_one_lane_may_share_a_resource() {
    let yaml = TOY_YAML.replace("lane: 2", "lane: 1");
    check(&yaml, |toy| toy.nodes[2].resources.push("codec_state".to_owned())).unwrap();
}

#[test]
fn a_resource_that_two_lanes_reach_through_others_is_refused_for_both() {
    let violations = check(TOY_YAML, |toy| {
        let table = |depends_on: &str| ResourceReport {
            depends_on: vec![depends_on.to_owned()],
            ..Default::default()
        };
        codec_state(toy).depends_on = vec!["common".to_owned()];
        toy.resources.push(resource("frames", "table", table("common")));
        toy.resources
            .push(resource("common", "table", ResourceReport::default()));
        toy.nodes[2].resources.push("frames".to_owned());
    })
    .unwrap_err();
    let found: Vec<_> = violations
        .iter()
        .map(|v| (v.reason, v.node.as_deref(), v.resource.as_deref()))
        .collect();
    let expected = [
        (Reason::LaneResourceDepends, Some("Codec"), Some("codec_state")),
        (Reason::LaneResourceDepends, Some("Encoder"), Some("frames")),
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_ring_of_dependencies_ends() {
    let violations = check(TOY_YAML, |toy| {
        codec_state(toy).depends_on = vec!["codec_state".to_owned(), "other".to_owned()];
        let report = ResourceReport {
            depends_on: vec!["codec_state".to_owned()],
            prefix_cache: true,
            ..Default::default()
        };
        toy.resources.push(resource("other", "table", report));
    })
    .unwrap_err();
    assert_eq!(violations.len(), 1);
    assert!(
        violations[0].message.contains("`other` (through `codec_state`)"),
        "{}",
        violations[0].message
    );
}

#[test]
fn a_whole_configuration_becomes_a_deployment() {
    let yaml = "
model: toy
weights: hf://org/toy@v2
device: cuda
max_seq_len: 1024
node_groups:
  - nodes: [Talker]
    ranks: [0]
    walks: [prefill, decode]
    priority: high
  - nodes: [Codec]
    ranks: [0]
    lane: auto
    lane_id: 1
    auto: { sms: [0, 16, 32, 64] }
    memory: 4GiB
    max_rows: 16
  - nodes: [Encoder]
    ranks: [1]
rank_devices: { 0: 0, 1: 0 }
mps: { mode: unmanaged, ranks: { 0: { active_thread_percentage: 100 }, 1: { active_thread_percentage: 30 } } }
resources:
  kv: { pages: 8192, page_size: 32 }
limits: { max_rows: 24, max_queue: 0 }
chunks: { codes: { first: 2, steady: 16 } }
services:
  engine_manager: { listen: '0.0.0.0:7070', address: 'manager:7070' }
  worker: { listen: '[::]:0', advertise: worker-0 }
  drain_timeout: 2m
";
    let deployment =
        check(yaml, |_| {}).unwrap_or_else(|violations| panic!("{}", crate::render(&violations)));
    assert_eq!(deployment.weights.to_string(), "hf://org/toy@v2");
    let placements: Vec<_> = deployment
        .nodes
        .iter()
        .map(|node| (node.ranks[0], node.placement))
        .collect();
    assert_eq!(
        placements,
        [
            (0, Placement::Chain),
            (0, Placement::Auto(1)),
            (1, Placement::Chain)
        ]
    );
    let lanes: Vec<_> = deployment
        .lanes
        .iter()
        .map(|lane| (lane.rank, lane.id, lane.priority, lane.max_rows))
        .collect();
    let normal = Priority::Normal;
    assert_eq!(
        lanes,
        [(0, 0, Priority::High, 24), (0, 1, normal, 16), (1, 0, normal, 24)]
    );
    assert_eq!(deployment.lanes[1].auto_sms, [0, 16, 32, 64]);
    assert_eq!(deployment.lanes[1].memory_bytes, Some(4 << 30));
    assert_eq!(deployment.ranks[1].active_thread_percentage, Some(30));
    assert_eq!(deployment.mps, MpsMode::Unmanaged);
    let sizes: Vec<_> = deployment
        .resources
        .iter()
        .map(|size| (size.key.as_str(), size.slots, size.page_size))
        .collect();
    assert_eq!(
        sizes,
        [("kv", 8192, 32), ("sampler", 24, 0), ("codec_state", 24, 0)]
    );
    assert_eq!(deployment.capture_buckets, [1, 2, 4, 8, 12, 16, 24]);
    assert_eq!(
        (deployment.limits.max_queue, deployment.limits.max_frames),
        (0, 2048)
    );
    assert_eq!(deployment.chunks["codes"].steady, 16);
    assert_eq!(deployment.services.engine_manager_address, "manager:7070");
    assert_eq!(deployment.services.worker_advertise.as_deref(), Some("worker-0"));
    assert_eq!(deployment.services.drain_timeout.as_secs(), 120);
}

#[test]
fn the_files_own_devices_come_before_the_machines() {
    let yaml = format!(
        "{TOY_YAML}devices: [{{ name: 'cuda:0', memory: 24GB, sms: 128, partition_granularity: 4 }}]\n"
    );
    check(&yaml.replace("lane: 1", "lane: 1\n    sms: 12"), |_| {}).unwrap();
    let violations = check(&yaml.replace("lane: 1", "lane: 1\n    sms: 10"), |_| {}).unwrap_err();
    assert!(
        violations[0].remedy.contains("write 8 or 12"),
        "{}",
        violations[0].remedy
    );
}

#[test]
fn two_workers_on_one_gpu_may_time_slice_it_on_purpose() {
    let yaml = TOY_YAML.replace(
        "    lane: 2\n",
        "    ranks: [1]\nrank_devices: { 0: 0, 1: 0 }\nmps: { mode: disabled }\n",
    );
    assert_eq!(check(&yaml, |_| {}).unwrap().mps, MpsMode::Disabled);
    let cpu = yaml
        .replace("cuda", "cpu")
        .replace("mps: { mode: disabled }\n", "");
    let on_cpu = load(&Sources::text("test.yaml", cpu.clone()))
        .check(Some(&toy()), Some(&DeviceInventory::cpu(64 << 30)));
    on_cpu.unwrap();
    let unused = load(&Sources::text(
        "test.yaml",
        format!("{cpu}mps: {{ mode: required }}\n"),
    ));
    let violations = unused
        .check(Some(&toy()), Some(&DeviceInventory::cpu(64 << 30)))
        .unwrap_err();
    assert_eq!(violations[0].reason, Reason::MpsUnused);
}

#[test]
fn copies_of_a_deployment_have_ranks_and_shares_of_their_own() {
    let yaml = format!(
        "{TOY_YAML}replicas: 2
rank_devices: {{ 0: 0, 1: 0 }}
mps:
  mode: required
  ranks:
    0: {{ active_thread_percentage: 50 }}
    1: {{ active_thread_percentage: 60, pinned_device_memory: 50GiB }}
"
    );
    let deployment = check(&yaml, |_| {}).unwrap();
    let ranks: Vec<_> = deployment
        .ranks
        .iter()
        .map(|rank| {
            (
                rank.rank,
                rank.device,
                rank.active_thread_percentage,
                rank.pinned_device_memory_bytes,
            )
        })
        .collect();
    assert_eq!(ranks, [(0, 0, Some(50), None), (1, 0, Some(60), Some(50 << 30))]);
    assert_eq!((deployment.replicas, deployment.ranks_per_replica()), (2, 1));
    assert_eq!((deployment.layout_rank(0), deployment.layout_rank(1)), (0, 0));
    assert!(deployment.lanes.iter().all(|lane| lane.rank == 0));
    // A share of a rank that only the copies have is one of a rank that is there; one more is not.
    let beyond = yaml.replace("    1: {", "    2: {");
    let violations = check(&beyond, |_| {}).unwrap_err();
    assert_eq!(violations[0].reason, Reason::UnknownRank, "{violations:?}");
    // Both are weighed against the device: one copy is about 5.4 GB.
    let device = "devices: [{ name: 'cuda:0', memory: 6GB, sms: 132, partition_granularity: 8 }]\n";
    check(&format!("{TOY_YAML}{device}"), |_| {}).unwrap();
    let violations = check(
        &format!("{TOY_YAML}{device}replicas: 2\nrank_devices: {{ 1: 0 }}\nmps: {{ mode: required }}\n"),
        |_| {},
    )
    .unwrap_err();
    assert_eq!(
        violations[0].reason,
        Reason::DeviceMemoryExceeded,
        "{violations:?}"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_refused_with_what_to_write_instead() {
    let check = |more: &str, inventory: DeviceInventory, wanted: &[&str]| {
        let violations = load(&Sources::text("test.yaml", format!("{TOY_YAML}{more}")))
            .check(Some(&toy()), Some(&inventory))
            .unwrap_err();
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert_eq!(violations[0].reason, Reason::DeviceMissing);
        let remedy = &violations[0].remedy;
        for part in wanted {
            assert!(remedy.contains(part), "{part}: {remedy}");
        }
        if !more.is_empty() || inventory.origin == Origin::Assumed {
            for of_a_machine_that_was_asked in ["nvidia-smi", "this machine"] {
                assert!(!remedy.contains(of_a_machine_that_was_asked), "{remedy}");
            }
        }
    };
    let cpu = || DeviceInventory::cpu(64 << 30);
    check("", cpu(), &["`device: cpu`", "driver"]);
    check("", cpu().assumed(), &["`device: cpu`", "`--assume h200:1`"]);
    check("", DeviceInventory::default(), &["this machine has no devices"]);
    check("", DeviceInventory::h200(0).assumed(), &["--assume"]);
    let stated = "devices: [{ name: cpu, memory: 64GB }]\n";
    check(stated, cpu(), &["`device: cpu`", "`devices`"]);
}

#[test]
fn precision_is_the_devices_own_unless_the_file_says() {
    let precision = |yaml: &str| check(yaml, |_| {}).unwrap().precision;
    assert_eq!(precision(TOY_YAML), Precision::Bf16);
    assert_eq!(precision(&format!("{TOY_YAML}precision: f32\n")), Precision::F32);
    let cpu = TOY_YAML.replace("cuda", "cpu");
    let deployment = load(&Sources::text("test.yaml", cpu)).check(Some(&toy()), None);
    assert_eq!(deployment.unwrap().precision, Precision::F32);
}

#[test]
fn without_an_inventory_devices_are_left_to_the_worker() {
    let yaml = TOY_YAML.replace("lane: 1", "lane: 1\n    sms: 12") + "rank_devices: { 0: 9 }\n";
    load(&Sources::text("test.yaml", yaml))
        .check(Some(&toy()), None)
        .unwrap();
}

#[test]
fn capture_buckets_leave_few_rows_of_padding() {
    let buckets = |max_rows: &str| {
        let yaml = format!("{TOY_YAML}limits: {{ max_rows: {max_rows} }}\n");
        check(&yaml, |_| {}).unwrap().capture_buckets
    };
    assert_eq!(
        buckets("200"),
        [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 200]
    );
    assert_eq!(buckets("256").last_chunk(), Some(&[224, 256]));
    assert_eq!(buckets("1"), [1]);
}

#[test]
fn without_a_declaration_what_needs_none_is_still_checked() {
    let yaml = TOY_YAML.replace("lane: 1", "lane: auto") + "capture_buckets: [1]\nnonsense: 1\n";
    let violations = load(&Sources::text("test.yaml", yaml))
        .check(None, None)
        .unwrap_err();
    let found: Vec<Reason> = violations.iter().map(|violation| violation.reason).collect();
    assert_eq!(
        found,
        [Reason::LaneIdRequired, Reason::CaptureBuckets, Reason::UnknownKey]
    );
}

#[test]
fn a_second_stream_fed_node_needs_no_rule_of_its_own() {
    let yaml = format!("{TOY_YAML}  - nodes: [Tagger]\n    lane: 3\n");
    let deployment = check(&yaml, |toy| {
        toy.nodes.push(node("Tagger", &[]));
        toy.walks.push(walk("tag", "Tagger", WalkKind::Stream));
        toy.stream_edges.push(stream_edge(&["decode"], "tag"));
    });
    assert_eq!(deployment.unwrap().nodes[3].placement, Placement::Lane(3));
}
