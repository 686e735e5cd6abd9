//! Processors and sampling.

use std::sync::Arc;

use laneway_device::DType;
use laneway_device::op::{Sample, SampleRow, StateSlice};

use super::{Case, PARTS, Work, small};
use crate::check::Context;
use crate::check::data::{Data, Measure};
use crate::check::experiment::Experiment;
use crate::check::random::Random;

/// Which processors the rows of a case use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Greedy,
    /// Temperature alone.
    Plain,
    TopK,
    TopP,
    /// All of them, other ones in every row.
    Mixed,
    /// Scores of few different values: ties at the k-th, at the p-th and at the top.
    Ties,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    kind: Kind,
    vocab: usize,
    live: usize,
    extra_live: i32,
    group: u32,
    seen: bool,
    scores: bool,
    stride: usize,
    rows: usize,
}

pub(super) fn cases(context: &Context, out: &mut Vec<Case>) {
    use Kind::{Greedy, Mixed, Plain, Ties, TopK, TopP};
    for kind in [Greedy, Plain, TopK, TopP, Mixed, Ties] {
        let tiny = Shape {
            kind,
            vocab: 45,
            live: 40,
            extra_live: 42,
            group: 0,
            seen: true,
            scores: true,
            stride: 3,
            rows: 34,
        };
        let predictor = Shape {
            vocab: 2048,
            live: 2048,
            extra_live: -1,
            group: 5,
            seen: false,
            stride: 16,
            rows: 70,
            ..tiny
        };
        let talker = Shape {
            vocab: 3072,
            live: 2048,
            extra_live: 2150,
            group: 0,
            stride: 16,
            rows: 70,
            ..tiny
        };
        let mut shapes = vec![tiny];
        if !small(context) {
            let silent = |shape| Shape {
                scores: false,
                ..shape
            };
            shapes.extend([predictor, talker, silent(predictor), silent(talker)]);
        }
        for shape in shapes {
            let name = format!(
                "{kind:?} v{}{}{} r{}",
                shape.vocab,
                if shape.seen { " seen" } else { "" },
                if shape.scores { " scores" } else { "" },
                shape.rows
            )
            .to_lowercase();
            out.push(Case::new("Sample", name, "f32", move |random| {
                Work::Rows(sample(shape, random), PARTS.to_vec())
            }));
        }
    }
}

fn row(shape: &Shape, r: usize, random: &mut Random) -> SampleRow {
    let mut row = SampleRow {
        temperature: 0.0,
        top_p: 1.0,
        repetition_penalty: if shape.seen {
            1.05 + 0.01 * (r % 30) as f32
        } else {
            1.0
        },
        top_k: 0,
        seed_lo: random.word() as u32,
        seed_hi: random.word() as u32,
        frame: random.below(3000) as u32,
        eos: -1,
        ban_eos: 0,
        slot: if shape.seen && !r.is_multiple_of(11) {
            r as i32
        } else {
            -1
        },
        reserved: [0; 2],
    };
    let kind = match shape.kind {
        Kind::Mixed | Kind::Ties => [Kind::Greedy, Kind::Plain, Kind::TopK, Kind::TopP, Kind::Mixed][r % 5],
        kind => kind,
    };
    if kind == Kind::Greedy {
        return row;
    }
    row.temperature = [0.9, 0.5, 1.0, 1.7, 0.1][r % 5];
    if matches!(kind, Kind::TopK | Kind::Mixed) {
        row.top_k = [50, 1, 2, 20, 1000, shape.vocab as i32, i32::MAX][r % 7];
    }
    if matches!(kind, Kind::TopP | Kind::Mixed) {
        row.top_p = [0.9, 0.5, 0.99, 0.05, 0.0][r % 5];
    }
    if shape.kind == Kind::Mixed || shape.kind == Kind::Ties {
        // An end token past the live range in some rows, banned in some of these.
        row.eos = if r.is_multiple_of(3) {
            shape.vocab as i32 - 1
        } else {
            shape.live as i32 / 2
        };
        row.ban_eos = u32::from(r % 4 == 1);
    }
    row
}

fn sample(shape: Shape, random: &mut Random) -> Experiment {
    let Shape { rows, vocab, .. } = shape;
    let mut e = Experiment::new(rows);
    let logits: Vec<f32> = match shape.kind {
        Kind::Ties => (0..rows * vocab).map(|_| random.below(9) as f32 - 4.0).collect(),
        // Wide enough that a few tokens matter.
        _ => random
            .floats(rows * vocab, 3.0)
            .iter()
            .map(|x| x * x * x / 3.0)
            .collect(),
    };
    let records: Vec<SampleRow> = (0..rows).map(|r| row(&shape, r, random)).collect();
    let words = vocab.div_ceil(32);
    let slot_stride = words + 5;
    let mut bits: Vec<u32> = (0..rows * slot_stride)
        .map(|_| random.word() as u32 & random.word() as u32)
        .collect();
    // Bits past the vocabulary are nobody's.
    for slot in bits.chunks_exact_mut(slot_stride) {
        if !vocab.is_multiple_of(32) {
            slot[2 + words - 1] &= (1 << (vocab % 32)) - 1;
        }
    }
    let raw = logits.clone();
    let logits = e.input_rows("logits", vocab, Data::floats(&logits));
    let params = e.input_rows(
        "params",
        SampleRow::WORDS,
        Data::words(bytemuck::cast_slice(&records)),
    );
    let margin = {
        let (records, bits, group) = (records.clone(), bits.clone(), shape.group);
        move |r: usize, want: i32, got: i32| {
            let record = records[r];
            let score = |id: i32| {
                let Ok(id) = usize::try_from(id) else {
                    return f64::NEG_INFINITY;
                };
                let Some(z) = raw.get(r * vocab + id).filter(|_| id < vocab) else {
                    return f64::NEG_INFINITY;
                };
                let mut z = *z;
                if let Ok(slot) = usize::try_from(record.slot)
                    && bits[slot * slot_stride + 2 + id / 32] >> (id % 32) & 1 == 1
                {
                    let penalty = record.repetition_penalty;
                    z = if z < 0.0 { z * penalty } else { z / penalty };
                }
                if record.temperature == 0.0 {
                    return f64::from(z);
                }
                let seed = [record.seed_lo, record.seed_hi];
                f64::from(z / record.temperature) + gumbel(seed, record.frame, group, id as u32)
            };
            score(want) - score(got)
        }
    };
    let tokens = Measure::Tokens {
        stride: shape.stride,
        margin: Arc::new(margin),
    };
    let seen = shape
        .seen
        .then(|| e.pool("seen", Data::words(&bits), Measure::Exact));
    let tokens = e.output_rows("tokens", DType::I32, shape.stride, tokens);
    let scores = shape
        .scores
        .then(|| e.output_rows("scores", DType::F32, vocab, Measure::Relative(1e-6)));
    e.ops(move |p, rows| {
        vec![
            Sample {
                logits: p.view(logits),
                rows,
                vocab,
                live: shape.live,
                extra_live: shape.extra_live,
                params: p.view(params),
                group: shape.group,
                seen: seen.map(|seen| StateSlice {
                    pool: p.view(seen),
                    slot_stride,
                    offset: 2,
                }),
                tokens: p.view(tokens),
                token_stride: shape.stride,
                token_offset: shape.stride / 2,
                scores: p.optional(scores),
            }
            .into(),
        ]
    })
}

/// As the operation's documentation has it; written again here, because it judges implementations of it.
fn gumbel(seed: [u32; 2], frame: u32, group: u32, id: u32) -> f64 {
    let (mut c, mut key) = ([id, frame, group, 0], seed);
    for _ in 0..10 {
        let a = 0xD251_1F53u64 * u64::from(c[0]);
        let b = 0xCD9E_8D57u64 * u64::from(c[2]);
        c = [
            (b >> 32) as u32 ^ c[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ c[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    let u = (f64::from(c[0]) + 0.5) * 2f64.powi(-32);
    -(-u.ln()).ln()
}
