use proptest::prelude::*;

use super::*;
use crate::checkpoint::Checkpoint;
use crate::qwen3_tts::test_device::{Counts, bucketed};
use crate::qwen3_tts::test_support::{Golden, Machine, assert_close, nano, tiny};

/// A decoder with its step buffers, a pool of slots and an edge ring, on a machine of its own.
struct Player {
    machine: Machine,
    decoder: CodecDecoder,
    step: CodecStep,
    pool: BoundResource,
    ring: EdgeRing,
}

const MAX_ROWS: usize = 4;
const SLOTS: usize = 6;
/// Room for every frame of every slot.
const RING_CAPACITY: usize = 40;

/// A frame's place in the ring, or none: it comes from the host.
type RingRow = Option<u32>;

impl Player {
    fn new(checkpoint: &Checkpoint, max_window: usize, pass_frames: usize) -> Self {
        Self::on(Machine::new(), checkpoint, max_window, pass_frames)
    }

    /// On a device that wants captures for buckets, warmed up.
    fn bucketed(checkpoint: &Checkpoint, max_window: usize, pass_frames: usize) -> (Self, Counts) {
        let (device, sanitizer, counts) = bucketed();
        let mut player = Self::on(
            Machine::on((device, sanitizer)),
            checkpoint,
            max_window,
            pass_frames,
        );
        let touches = Touches::none();
        let launcher = Launcher {
            stream: &*player.machine.stream,
            touches: &touches,
        };
        let ring = Some(&player.ring);
        player
            .step
            .warm_up(&launcher, &player.decoder, &player.pool, ring)
            .unwrap();
        (player, counts)
    }

    fn on(machine: Machine, checkpoint: &Checkpoint, max_window: usize, pass_frames: usize) -> Self {
        let config = &checkpoint.configs.speech.decoder_config;
        let decoder = CodecDecoder::load(
            &*machine.device,
            config,
            &checkpoint.speech,
            max_window,
            pass_frames,
        )
        .unwrap();
        let slot_words = decoder.layout().words;
        Self {
            step: CodecStep::new(machine.device.clone(), &decoder, MAX_ROWS, max_window).unwrap(),
            pool: BoundResource {
                key: "codec_state".into(),
                pool: machine.alloc("codec_state", DType::F32, SLOTS * slot_words, Place::Device),
                slots: SLOTS as u32,
                slot_elements: slot_words,
                page_size: 0,
            },
            ring: EdgeRing {
                buffer: machine.alloc("ring", DType::I32, SLOTS * RING_CAPACITY * 16, Place::Device),
                slots: SLOTS as u32,
                capacity: RING_CAPACITY as u32,
                item_words: 16,
            },
            decoder,
            machine,
        }
    }

    /// Put codes into the ring's row, as a Talker step does.
    fn put(&self, row: u32, codes: &[i32]) {
        let src = self.machine.upload(DType::I32, codes);
        let dst = self.ring.buffer.slice(row as usize * 16, 16);
        self.machine
            .launch(&Touches::none(), |launcher| launcher.run(Copy { src, dst }));
    }

    /// Samples of each window of one step.
    fn decode(&mut self, windows: &[StreamWindow<'_>]) -> Vec<Vec<f32>> {
        let mut touches = Touches::none();
        let (stage, ring) = (Stage(0), Some(&self.ring));
        self.step
            .plan(stage, windows, &self.pool, ring, &mut touches)
            .unwrap();
        self.machine.launch(&touches, |launcher| {
            self.step
                .launch(stage, launcher, &self.decoder, &self.pool, ring, true)
        });
        self.machine.finish();
        (0..windows.len())
            .map(|row| self.step.samples(stage, row).unwrap().to_vec())
            .collect()
    }

    /// A whole stream in windows of `width` frames, alone.
    fn play(&mut self, slot: u32, codes: &[Arc<[i32]>], width: usize) -> Vec<f32> {
        self.reset(slot);
        let items = items(codes, |_| None);
        let mut samples = Vec::new();
        for (i, items) in items.chunks(width).enumerate() {
            let window = StreamWindow {
                slot,
                position: i * width,
                items,
            };
            samples.extend(self.decode(&[window]).remove(0));
        }
        samples
    }

    /// What the engine does when it hands a slot back.
    fn reset(&self, slot: u32) {
        let words = self.pool.slot_elements;
        let dst = self.pool.pool.slice(slot as usize * words, words);
        self.machine.launch(&Touches::none(), |launcher| {
            launcher.run(laneway_device::op::Zero { dst })
        });
    }
}

fn items(codes: &[Arc<[i32]>], ring_row: impl Fn(usize) -> RingRow) -> Vec<Item> {
    codes
        .iter()
        .enumerate()
        .map(|(i, words)| Item {
            index: i as u32,
            words: words.clone(),
            ring_row: ring_row(i),
        })
        .collect()
}

#[test]
fn any_window_width_gives_the_reference_waveform() {
    let golden = Golden::open("tiny/codec");
    let codes = golden.codes("codes");
    let mut player = Player::new(&tiny("base"), 25, 25);
    for width in [1, 2, 3, 5, 25] {
        let got = player.play(0, &codes, width);
        assert_close(&format!("windows of {width}"), &got, &golden.floats("wav"), 1e-4);
    }
}

#[test]
fn a_stream_far_longer_than_the_ring_gives_the_reference_waveform() {
    let golden = Golden::open("tiny/codec");
    let want = golden.floats("long_wav_tail");
    let mut player = Player::new(&tiny("base"), 25, 25);
    for width in [1, 25] {
        let got = player.play(2, &golden.codes("long_codes"), width);
        let tail = &got[got.len() - want.len()..];
        assert_close(&format!("windows of {width}"), tail, &want, 1e-4);
    }
}

#[test]
fn every_golden_case_gives_the_reference_waveform() {
    let mut player = Player::new(&tiny("base"), 8, 16);
    let cases = [
        "cv_stream_en",
        "cv_full_dialect_instruct",
        "cv_eos",
        "cv_min_new",
        "cv_sample",
        "vd_full",
        "vd_stream",
        "xvec",
        "icl_text_longer",
        "icl_codes_longer",
        "icl_full",
    ];
    for case in cases {
        let golden = Golden::open(&format!("tiny/{case}"));
        let want = golden.floats(&format!("{case}/wav"));
        let codes = golden.codes(&format!("{case}/codes"));
        // An in-context clone is decoded behind its reference, whose samples nobody hears.
        let primed = format!("{case}/decode_codes");
        let all = if golden.contains(&primed) {
            golden.codes(&primed)
        } else {
            codes.clone()
        };
        let got = player.play(1, &all, 8);
        let skipped = (all.len() - codes.len()) * player.decoder.samples_per_frame();
        assert_close(case, &got[skipped..], &want, 1e-3);
    }
}

/// One step of a schedule: which streams take part, in which order, with which width, from where.
#[derive(Debug, Clone)]
struct Turn {
    rows: Vec<(usize, usize, bool)>,
}

const STREAMS: usize = 4;
const STREAM_FRAMES: usize = 14;
const MAX_WINDOW: usize = 5;

fn schedule() -> impl Strategy<Value = Vec<Turn>> {
    let rows = proptest::sample::subsequence((0..STREAMS).collect::<Vec<_>>(), 1..=STREAMS).prop_shuffle();
    let turn = (
        rows,
        proptest::collection::vec((1..=MAX_WINDOW, any::<bool>()), STREAMS),
    )
        .prop_map(|(rows, details)| Turn {
            rows: rows
                .into_iter()
                .map(|stream| (stream, details[stream].0, details[stream].1))
                .collect(),
        });
    proptest::collection::vec(turn, 6..20)
}

/// Codes of a stream: a plain function of its number, within the smallest codebook.
fn stream_codes(stream: usize, entries: usize) -> Vec<Arc<[i32]>> {
    (0..STREAM_FRAMES)
        .map(|frame| {
            (0..16)
                .map(|book| ((stream * 7919 + frame * 104_729 + book * 1_299_709) % entries) as i32)
                .collect()
        })
        .collect()
}

/// Run a schedule over several streams at once and compare every stream's bits with `alone`.
fn check_schedule(player: &mut Player, streams: &[Vec<Arc<[i32]>>], alone: &[Vec<f32>], turns: &[Turn]) {
    let slot = |stream: usize| (SLOTS - 1 - stream) as u32;
    let mut done = [0; STREAMS];
    let mut heard = vec![Vec::new(); STREAMS];
    for stream in 0..STREAMS {
        player.reset(slot(stream));
    }
    // What the schedule leaves over runs at the end, all streams at full width.
    let rest = Turn {
        rows: (0..STREAMS).map(|stream| (stream, MAX_WINDOW, true)).collect(),
    };
    let rest_turns = std::iter::repeat_n(&rest, STREAM_FRAMES.div_ceil(MAX_WINDOW));
    for turn in turns.iter().chain(rest_turns) {
        let windows: Vec<(usize, usize, Vec<Item>)> = turn
            .rows
            .iter()
            .filter_map(|(stream, width, in_ring)| {
                let start = done[*stream];
                let end = STREAM_FRAMES.min(start + width);
                let ring_row = |i: usize| {
                    in_ring.then_some((*stream * RING_CAPACITY + (start + i) % RING_CAPACITY) as u32)
                };
                let items = items(&streams[*stream][start..end], ring_row);
                (start < end).then_some((*stream, start, items))
            })
            .collect();
        for item in windows.iter().flat_map(|(_, _, items)| items) {
            if let Some(row) = item.ring_row {
                player.put(row, &item.words);
            }
        }
        if windows.is_empty() {
            continue;
        }
        let step: Vec<_> = windows
            .iter()
            .map(|(stream, position, items)| StreamWindow {
                slot: slot(*stream),
                position: *position,
                items,
            })
            .collect();
        for ((stream, _, items), samples) in windows.iter().zip(player.decode(&step)) {
            done[*stream] += items.len();
            heard[*stream].extend(samples);
        }
    }
    for stream in 0..STREAMS {
        assert_eq!(done[stream], STREAM_FRAMES);
        let same = heard[stream]
            .iter()
            .zip(&alone[stream])
            .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(
            same && heard[stream].len() == alone[stream].len(),
            "stream {stream} depends on the schedule {turns:?}"
        );
    }
}

#[test]
fn no_schedule_changes_a_bit() {
    let streams: Vec<_> = (0..STREAMS).map(|stream| stream_codes(stream, 128)).collect();
    // Small passes, so that most steps take several.
    let mut player = Player::new(&tiny("base"), MAX_WINDOW, 7);
    let alone: Vec<_> = streams.iter().map(|codes| player.play(0, codes, 1)).collect();
    let player = std::cell::RefCell::new(player);
    let config = ProptestConfig {
        cases: 16,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(turns in schedule())| {
        check_schedule(&mut player.borrow_mut(), &streams, &alone, &turns);
    });
}

#[test]
fn no_schedule_changes_a_bit_of_the_demo_checkpoint() {
    let streams: Vec<_> = (0..STREAMS).map(|stream| stream_codes(stream, 256)).collect();
    let mut player = Player::new(&nano(), MAX_WINDOW, 8);
    let alone: Vec<_> = streams.iter().map(|codes| player.play(0, codes, 1)).collect();
    let turn = |rows: &[(usize, usize, bool)]| Turn { rows: rows.to_vec() };
    let turns = [
        turn(&[(0, 1, true), (2, 5, false)]),
        turn(&[(3, 2, true), (1, 3, true), (0, 4, false)]),
        turn(&[(2, 1, true)]),
    ];
    check_schedule(&mut player, &streams, &alone, &turns);
}

#[test]
fn passes_hold_whole_windows() {
    let frame: Arc<[i32]> = vec![0; 16].into();
    let widths = [3, 3, 2, 5, 1];
    let streams: Vec<Vec<Item>> = widths
        .iter()
        .map(|width| items(&vec![frame.clone(); *width], |_| None))
        .collect();
    let windows: Vec<_> = streams
        .iter()
        .map(|items| StreamWindow {
            slot: 0,
            position: 0,
            items,
        })
        .collect();
    assert_eq!(split(&windows, 6), [(0..2, 0..6), (2..3, 6..8), (3..5, 8..14)]);
}

#[test]
fn buckets_lie_a_fourth_apart_and_end_with_the_most() {
    assert_eq!(
        buckets(48),
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48]
    );
    assert_eq!(buckets(1), [1]);
    assert_eq!(buckets(9), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let all = buckets(256);
    assert!(all.is_sorted_by(|a, b| a < b && b - a <= 1.max(a / 4)));
    assert_eq!(*all.last().unwrap(), 256);
}

#[test]
fn padding_to_a_bucket_changes_no_bit() {
    let streams: Vec<_> = (0..STREAMS).map(|stream| stream_codes(stream, 128)).collect();
    // Passes of at most 13 frames, so that some steps take several.
    let mut exact = Player::new(&tiny("base"), MAX_WINDOW, 13);
    let alone: Vec<_> = streams.iter().map(|codes| exact.play(0, codes, 1)).collect();
    let (mut player, counts) = Player::bucketed(&tiny("base"), MAX_WINDOW, 13);
    let captures = counts.of("test").captures;
    assert_eq!(captures, buckets(13).len());
    for (stream, codes) in streams.iter().enumerate() {
        assert_eq!(
            player.play(1, codes, 3),
            alone[stream],
            "stream {stream} by itself"
        );
    }
    let player = std::cell::RefCell::new(player);
    let config = ProptestConfig {
        cases: 8,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(turns in schedule())| {
        check_schedule(&mut player.borrow_mut(), &streams, &alone, &turns);
    });
    assert_eq!(
        counts.of("test").captures,
        captures,
        "every shape was captured in warm-up"
    );
}

/// How many launches a pass takes is what the host pays for it; how many operations are in its graph is what the
/// device pays for each step, however few frames it decodes.
#[test]
fn a_pass_is_one_graph_and_two_copies() {
    let (mut player, counts) = Player::bucketed(&tiny("base"), MAX_WINDOW, 32);
    let codes = stream_codes(0, 128);
    let streams: Vec<Vec<Item>> = [1, 5, 3]
        .iter()
        .map(|width| items(&codes[..*width], |_| None))
        .collect();
    let windows: Vec<_> = (0..)
        .zip(&streams)
        .map(|(slot, items)| StreamWindow {
            slot,
            position: 0,
            items,
        })
        .collect();
    let before = counts.of("test");
    player.decode(&windows);
    let after = counts.of("test");
    assert_eq!(after.launches_of_nodes() - before.launches_of_nodes(), 2);
    assert_eq!(after.replays - before.replays, 1);

    let config = &tiny("base").configs.speech.decoder_config;
    let layers = config.num_hidden_layers;
    let (latent, blocks) = (config.upsampling_ratios.len(), config.upsample_rates.len());
    let expected = [
        ("Attention", layers),
        // pre_conv, the first and the last; of each block the transposed one and three units.
        ("Conv", 3 + 4 * blocks),
        ("DepthwiseConv", latent),
        ("Embed", 2),
        ("GatherRows", 1),
        // Both quantizers, both projections; qkv, out, gate and up, down of a layer; three of a ConvNeXt stage.
        ("Gemm", 4 + 4 * layers + 3 * latent),
        ("LayerNorm", latent),
        ("QkvRope", layers),
        ("RopeTable", 1),
        ("ScatterRows", 1),
    ];
    assert_eq!(after.last_graph, expected.into());
}
