use laneway_device::{DType, Place};
use laneway_engine::node::{Grant, RequestId};
use laneway_plan::declaration::{ChunkPolicy, StreamEdgeDecl, WalkDecl, WalkKind};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::qwen3_tts::codec::CodecStateLayout;
use crate::qwen3_tts::test_support::{Golden, Machine, assert_close, tiny};

const CHUNK: WalkId = WalkId(0);
const PRIME: WalkId = WalkId(1);
const MAX_WINDOW: u32 = 6;
const SLOTS: u32 = 3;

fn declaration() -> ModelDeclaration {
    let walk = |name: &str, kind| WalkDecl {
        name: name.into(),
        nodes: vec![CODEC.into()],
        kind,
        combined_with: None,
        state_across_requests: false,
    };
    ModelDeclaration {
        model: "qwen3_tts".into(),
        nodes: Vec::new(),
        walks: vec![
            walk(CODEC_CHUNK, WalkKind::Stream),
            walk(CODEC_PRIME, WalkKind::Prime),
        ],
        stream_edges: vec![StreamEdgeDecl {
            name: "codes".into(),
            from: Vec::new(),
            to: CODEC_CHUNK.into(),
            item_words: 16,
            chunk: ChunkPolicy {
                first: 1,
                ramp: vec![2],
                steady: 4,
            },
            max_window: MAX_WINDOW,
            capacity: 8,
        }],
        request_edges: Vec::new(),
        resources: Vec::new(),
    }
}

fn context(machine: &Machine, slot_words: usize, max_rows: usize) -> NodeContext {
    NodeContext {
        device: machine.device.clone(),
        stream: machine.stream.clone(),
        resources: vec![BoundResource {
            key: CODEC_STATE.into(),
            pool: machine.alloc(
                CODEC_STATE,
                DType::F32,
                SLOTS as usize * slot_words,
                Place::Device,
            ),
            slots: SLOTS,
            slot_elements: slot_words,
            page_size: 0,
        }],
        rings: Vec::new(),
        max_rows,
        max_prefill_tokens: 0,
        max_seq_len: 0,
        capture_buckets: Vec::new(),
    }
}

fn slot_words(checkpoint: &Checkpoint) -> usize {
    CodecStateLayout::new(&checkpoint.configs.speech.decoder_config, MAX_WINDOW as usize).words
}

fn build(machine: &Machine, checkpoint: &Checkpoint) -> CodecNode {
    CodecNode::build(
        &declaration(),
        &checkpoint.configs.speech.decoder_config,
        &checkpoint.speech,
        context(machine, slot_words(checkpoint), 4),
    )
    .unwrap()
}

/// A request as the engine keeps it.
struct Request {
    payload: Payload,
    state: RowState,
    grants: Vec<Grant>,
}

impl Request {
    fn open(node: &mut CodecNode, slot: u32) -> Self {
        let payload: Payload = Arc::new(());
        Self {
            state: node.open(CHUNK, &payload).unwrap(),
            payload,
            grants: vec![Grant {
                resource: CODEC_STATE.into(),
                slots: vec![slot],
                cached: 0,
            }],
        }
    }

    fn row<'a>(&'a mut self, items: &'a [Item]) -> StepRow<'a> {
        StepRow {
            request: RequestId(1),
            payload: &self.payload,
            state: &mut self.state,
            grants: &self.grants,
            items,
            last: false,
            ring_row: None,
            results: &[],
        }
    }
}

fn items(codes: &[Arc<[i32]>]) -> Vec<Item> {
    codes
        .iter()
        .enumerate()
        .map(|(i, words)| Item {
            index: i as u32,
            words: words.clone(),
            ring_row: None,
        })
        .collect()
}

/// One step from plan to postprocess.
fn step(machine: &Machine, node: &mut CodecNode, walk: WalkId, rows: Vec<StepRow<'_>>) -> Vec<RowOutcome> {
    let (mut rows, mut touches) = (rows, Touches::none());
    node.plan(walk, Stage(0), &mut rows, &mut touches).unwrap();
    let n_rows = rows.len();
    machine.launch(&touches, |launcher| {
        node.forward(walk, Stage(0), n_rows, launcher)
    });
    node.commit(walk, &mut rows);
    machine.finish();
    let mut rows: Vec<_> = rows.into_iter().map(Some).collect();
    node.postprocess(walk, Stage(0), &mut rows)
}

#[test]
fn a_primed_stream_continues_its_reference() {
    let machine = Machine::new();
    let mut node = build(&machine, &tiny("base"));
    machine.launch(&Touches::none(), |launcher| node.warm_up(launcher));
    machine.finish();
    let golden = Golden::open("tiny/icl_full");
    let codes = items(&golden.codes("icl_full/codes"));
    let all = golden.codes("icl_full/decode_codes");
    let reference = items(&all[..all.len() - codes.len()]);

    let mut request = Request::open(&mut node, 2);
    for window in reference.chunks(MAX_WINDOW as usize) {
        let outcomes = step(&machine, &mut node, PRIME, vec![request.row(window)]);
        assert!(outcomes[0].output.is_none() && outcomes[0].error.is_none());
    }
    let mut samples = Vec::new();
    for window in codes.chunks(4) {
        let mut outcomes = step(&machine, &mut node, CHUNK, vec![request.row(window)]);
        samples.extend_from_slice(&outcomes.remove(0).output.unwrap());
    }
    assert_close("icl_full", &samples, &golden.floats("icl_full/wav"), 1e-3);
}

#[test]
fn a_bad_code_takes_only_its_own_row_out() {
    let machine = Machine::new();
    let mut node = build(&machine, &tiny("base"));
    let (mut good, mut bad) = (Request::open(&mut node, 0), Request::open(&mut node, 1));
    let size = node.decoder.codebook_size() as i32;
    let good_items = items(&[vec![size - 1; 16].into()]);
    for code in [-1, size] {
        let mut codes = vec![0; 16];
        codes[9] = code;
        let bad_items = items(&[vec![0; 16].into(), codes.into()]);
        let mut rows = vec![good.row(&good_items), bad.row(&bad_items)];
        let refused = node.plan(CHUNK, Stage(0), &mut rows, &mut Touches::none());
        let Err(PlanError::Rows(refused)) = refused else {
            panic!("code {code} was planned: {refused:?}");
        };
        let [(1, error)] = &refused[..] else {
            panic!("{refused:?}");
        };
        assert_eq!(
            error.message,
            format!(
                "frame 1 has code {code} in codebook 9; codes are 0 to {}",
                size - 1
            )
        );
    }
    // The engine plans again without it.
    let outcomes = step(&machine, &mut node, CHUNK, vec![good.row(&good_items)]);
    assert_eq!(outcomes[0].output.as_ref().unwrap().len(), 1920);
}

#[test]
fn windows_and_frames_of_the_wrong_size_are_refused() {
    let machine = Machine::new();
    let mut node = build(&machine, &tiny("base"));
    let frame: Arc<[i32]> = vec![0; 16].into();
    let mut lost = items(std::slice::from_ref(&frame));
    lost[0].ring_row = Some(0);
    let cases = [
        (
            items(&vec![frame.clone(); 7]),
            "a codec window has 7 frames; it must have 1 to 6",
        ),
        (Vec::new(), "a codec window has 0 frames; it must have 1 to 6"),
        (items(&[vec![0; 15].into()]), "frame 0 has 15 codes; send 16"),
        (lost, "frame 0 lies in a ring, but this worker has none"),
    ];
    for (items, message) in cases {
        let mut request = Request::open(&mut node, 0);
        let mut rows = vec![request.row(&items)];
        let error = node
            .plan(CHUNK, Stage(0), &mut rows, &mut Touches::none())
            .unwrap_err();
        let PlanError::Rows(refused) = error else {
            panic!("{error}");
        };
        assert_eq!(refused[0].1.message, message);
    }
}

#[test]
fn a_row_that_went_away_gets_no_samples() {
    let machine = Machine::new();
    let mut node = build(&machine, &tiny("base"));
    let (mut gone, mut here) = (Request::open(&mut node, 0), Request::open(&mut node, 1));
    let window = items(&[vec![3; 16].into()]);
    let mut rows = vec![gone.row(&window), here.row(&window)];
    let mut touches = Touches::none();
    node.plan(CHUNK, Stage(1), &mut rows, &mut touches).unwrap();
    machine.launch(&touches, |launcher| node.forward(CHUNK, Stage(1), 2, launcher));
    node.commit(CHUNK, &mut rows);
    machine.finish();
    drop(rows);
    let outcomes = node.postprocess(CHUNK, Stage(1), &mut [None, Some(here.row(&window))]);
    assert!(outcomes[0].output.is_none());
    assert_eq!(outcomes[1].output.as_ref().unwrap().len(), 1920);
}

#[test]
fn a_slot_that_is_too_small_is_refused() {
    let (machine, checkpoint) = (Machine::new(), tiny("base"));
    let words = slot_words(&checkpoint);
    let error = CodecNode::build(
        &declaration(),
        &checkpoint.configs.speech.decoder_config,
        &checkpoint.speech,
        context(&machine, words - 1, 1),
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "node Codec: a slot of codec_state has {} words; windows of 6 frames need {words}",
            words - 1
        )
    );
}
