use prost::Message as _;

use super::*;

fn plan() -> WorkerPlan {
    let lane = |id, priority, sms| LanePlan {
        id,
        priority,
        sms,
        auto_sms: vec![0, 16],
        memory_bytes: 1 << 33,
        max_rows: 64,
    };
    let node = |node: &str, placement| NodePlan {
        node: node.into(),
        placement,
    };
    let edge = |edge: &str, kind, direction| RemoteEdge {
        edge: edge.into(),
        kind,
        direction,
        peer_rank: 1,
    };
    WorkerPlan {
        rank: 3,
        model: "qwen3_tts".into(),
        weights: "hf://Qwen/Qwen3-TTS@main".parse().unwrap(),
        model_config: Some(ModelConfig::Preset("0.6b-base".into())),
        device: DeviceKind::Cuda,
        precision: Precision::F32,
        device_index: 1,
        active_thread_percentage: Some(30),
        pinned_device_memory_bytes: Some(20 << 30),
        max_seq_len: 8192,
        nodes: vec![
            node("Talker", Placement::Chain),
            node("Codec", Placement::Auto(1)),
            node("RefEncoder", Placement::Lane(2)),
        ],
        lanes: vec![
            lane(0, Priority::High, None),
            lane(1, Priority::Low, Some(32)),
            lane(2, Priority::Normal, None),
        ],
        resources: vec![ResourcePlan {
            key: "talker_kv".into(),
            lane: 0,
            slots: 9,
            page_size: 16,
            bytes: 77,
        }],
        walks: vec!["talker_prefill".into()],
        chunks: [(
            "codes".into(),
            ChunkPolicy {
                first: 1,
                ramp: vec![2, 4],
                steady: 8,
            },
        )]
        .into(),
        remote_edges: vec![
            edge("codes", EdgeKind::Stream, Direction::To),
            edge("reference", EdgeKind::Request, Direction::From),
        ],
        capture_buckets: vec![1, 2, 4],
        max_rows: 4,
        max_prefill_tokens: 512,
        max_queue: 17,
        max_frames: 4096,
        max_text_chars: 2000,
        stall_timeout: Duration::from_millis(10_001),
        drain_timeout: Duration::from_secs(30),
    }
}

#[test]
fn a_plan_survives_the_wire() {
    let bytes = v1::WorkerPlan::from(&plan()).encode_to_vec();
    let decoded = v1::WorkerPlan::decode(bytes.as_slice()).unwrap();
    assert_eq!(WorkerPlan::try_from(decoded).unwrap(), plan());
}

#[test]
fn a_value_from_another_build_is_refused_by_field() {
    let mut wire = v1::WorkerPlan::from(&plan());
    wire.lanes[1].priority = 99;
    assert_eq!(WorkerPlan::try_from(wire).unwrap_err().field, "lanes.priority");
    let mut wire = v1::WorkerPlan::from(&plan());
    wire.weights = "s3://nowhere".into();
    assert_eq!(WorkerPlan::try_from(wire).unwrap_err().field, "weights");
}

#[test]
fn an_inventory_survives_the_wire() {
    let there = DeviceInventory::h200(2);
    assert_eq!(inventory(there.devices.iter().map(Into::into).collect()), there);
}
