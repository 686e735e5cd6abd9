//! A toy model for tests: a Talker that loops, a Codec that a stream edge feeds, an Encoder that a request
//! edge starts. As declared, Codec and Encoder may each live on a lane.

use crate::declaration::{
    ChunkPolicy, Element, ModelDeclaration, NodeDecl, RequestEdgeDecl, ResourceDecl, ResourceReport,
    StreamEdgeDecl, WalkDecl, WalkKind,
};

/// `test.yaml` of the toy model, which passes every rule on one H200.
pub(crate) const TOY_YAML: &str = "\
model: toy
weights: random:7
model_config: tiny
device: cuda
max_seq_len: 256
node_groups:
  - nodes: [Talker]
  - nodes: [Codec]
    lane: 1
  - nodes: [Encoder]
    lane: 2
";

pub(crate) fn node(name: &str, resources: &[&str]) -> NodeDecl {
    NodeDecl {
        name: name.to_owned(),
        parallel_ranks: 1,
        stop_check: false,
        output_spans: false,
        resources: resources.iter().map(|&key| key.to_owned()).collect(),
        weight_bytes: 1_000_000_000,
        workspace_bytes: 0,
        workspace_bytes_per_row: 1000,
    }
}

pub(crate) fn walk(name: &str, node: &str, kind: WalkKind) -> WalkDecl {
    WalkDecl {
        name: name.to_owned(),
        nodes: vec![node.to_owned()],
        kind,
        combined_with: None,
        state_across_requests: false,
    }
}

pub(crate) fn resource(key: &str, kind: &str, report: ResourceReport) -> ResourceDecl {
    ResourceDecl {
        key: key.to_owned(),
        kind: kind.to_owned(),
        page_size: 0,
        zero_on_release: true,
        element: Element::F32,
        report,
    }
}

pub(crate) fn stream_edge(from: &[&str], to: &str) -> StreamEdgeDecl {
    StreamEdgeDecl {
        name: "codes".to_owned(),
        from: from.iter().map(|&walk| walk.to_owned()).collect(),
        to: to.to_owned(),
        item_words: 16,
        chunk: ChunkPolicy {
            first: 1,
            ramp: vec![2, 4],
            steady: 8,
        },
        max_window: 32,
        capacity: 64,
    }
}

pub(crate) fn toy() -> ModelDeclaration {
    let bytes = |bytes_per_slot| ResourceReport {
        bytes_per_slot,
        ..ResourceReport::default()
    };
    let mut talker = node("Talker", &["kv", "sampler"]);
    talker.stop_check = true;
    let mut kv = resource("kv", "paged_kv", bytes(1_000_000));
    kv.page_size = 16;
    let mut sampler = resource("sampler", "sampler", bytes(400));
    sampler.report.stages_host_rows = true;
    ModelDeclaration {
        model: "toy".to_owned(),
        nodes: vec![talker, node("Codec", &["codec_state"]), node("Encoder", &[])],
        walks: vec![
            walk("prefill", "Talker", WalkKind::Entry),
            walk("decode", "Talker", WalkKind::Loop),
            walk("chunk", "Codec", WalkKind::Stream),
            walk("encode", "Encoder", WalkKind::Once),
        ],
        stream_edges: vec![stream_edge(&["prefill", "decode"], "chunk")],
        request_edges: vec![RequestEdgeDecl {
            name: "reference".to_owned(),
            from: "encode".to_owned(),
            to: vec!["prefill".to_owned()],
        }],
        resources: vec![
            kv,
            sampler,
            resource("codec_state", "state_pool", bytes(5_000_000)),
        ],
    }
}
