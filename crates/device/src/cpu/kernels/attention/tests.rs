use super::*;
use crate::cpu::kernels::simd::Level;
use crate::cpu::kernels::testing::{Random, bits, error};

/// A model's attention with the sequences that are run through it.
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    page_size: usize,
    blocks_per_sequence: usize,
    window: Option<usize>,
    ring: bool,
    norm: bool,
}

const CASES: [Case; 4] = [
    Case {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        page_size: 8,
        blocks_per_sequence: 5,
        window: None,
        ring: false,
        norm: true,
    },
    Case {
        heads: 4,
        kv_heads: 4,
        head_dim: 40,
        page_size: 16,
        blocks_per_sequence: 1,
        window: Some(11),
        ring: true,
        norm: false,
    },
    Case {
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        page_size: 64,
        blocks_per_sequence: 1,
        window: None,
        ring: false,
        norm: false,
    },
    Case {
        heads: 3,
        kv_heads: 1,
        head_dim: 96,
        page_size: 5,
        blocks_per_sequence: 9,
        window: Some(7),
        ring: false,
        norm: true,
    },
];

const SEQUENCES: usize = 3;
const LENGTH: usize = 37;
const EPS: f32 = 1e-6;

struct Model<'a> {
    case: &'a Case,
    /// `[sequences, length, qkv]`
    qkv: Vec<f32>,
    inv_freq: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    table: Vec<i32>,
    level: Level,
}

impl<'a> Model<'a> {
    fn new(case: &'a Case, level: Level) -> Self {
        let mut random = Random::new(case.head_dim as u64);
        let blocks = SEQUENCES * case.blocks_per_sequence;
        Self {
            qkv: random.vec(SEQUENCES * LENGTH * case.qkv_width()),
            inv_freq: (0..case.head_dim / 2)
                .map(|i| 1e4f32.powf(-(2.0 * i as f32) / case.head_dim as f32))
                .collect(),
            q_norm: random.vec(case.head_dim),
            k_norm: random.vec(case.head_dim),
            // Blocks in an order of no meaning, with one unused in front.
            table: (0..blocks).map(|b| ((b * 7) % blocks + 1) as i32).collect(),
            case,
            level,
        }
    }

    fn layout(&self) -> Layout<'_> {
        let case = self.case;
        let keys = case.page_size * case.kv_heads * case.head_dim;
        Layout {
            page_stride: 2 * keys + 6,
            k_offset: 2,
            v_offset: keys + 4,
            page_size: case.page_size,
            kv_heads: case.kv_heads,
            head_dim: case.head_dim,
            table: &self.table,
            blocks_per_sequence: case.blocks_per_sequence,
            ring: case.ring,
            pool_len: self.pool_len(),
        }
    }

    fn pool_len(&self) -> usize {
        let keys = self.case.page_size * self.case.kv_heads * self.case.head_dim;
        (self.table.len() + 1) * (2 * keys + 6)
    }

    /// Run steps of packed rows `(sequence, position)`; the outputs in the same order.
    fn run(&self, steps: &[Vec<(i32, i32)>]) -> Vec<((i32, i32), Vec<f32>)> {
        let case = self.case;
        let mut pool = vec![f32::NAN; self.pool_len()];
        let (mut scores, mut spans) = (Vec::new(), Vec::new());
        let mut outputs = Vec::new();
        for step in steps {
            let (sequences, positions): (Vec<i32>, Vec<i32>) = step.iter().copied().unzip();
            let mut cos_sin = vec![f32::NAN; step.len() * case.head_dim];
            rope_table(&positions, &self.inv_freq, &mut cos_sin);
            let mut qkv = Vec::new();
            for &(sequence, position) in step {
                qkv.extend_from_slice(self.row(sequence.max(0) as usize, position.max(0) as usize));
            }
            let width = case.heads * case.head_dim;
            let mut q = vec![f32::NAN; step.len() * width];
            self.level
                .run(QkvRope {
                    qkv: &qkv,
                    heads: case.heads,
                    q_norm: case.norm.then_some(&self.q_norm),
                    k_norm: case.norm.then_some(&self.k_norm),
                    eps: EPS,
                    cos_sin: &cos_sin,
                    sequences: &sequences,
                    positions: &positions,
                    layout: self.layout(),
                    pool: &mut pool,
                    q_out: &mut q,
                })
                .unwrap();
            let mut out = vec![f32::NAN; step.len() * width];
            self.level
                .run(Attention {
                    q: &q,
                    heads: case.heads,
                    sequences: &sequences,
                    positions: &positions,
                    layout: self.layout(),
                    pool: &pool,
                    window: case.window,
                    out: &mut out,
                    scores: &mut scores,
                    spans: &mut spans,
                })
                .unwrap();
            let rows = out.chunks_exact(width).map(<[f32]>::to_vec);
            outputs.extend(step.iter().copied().zip(rows));
        }
        outputs.sort_by_key(|(place, _)| *place);
        outputs
    }

    fn row(&self, sequence: usize, position: usize) -> &[f32] {
        let width = self.case.qkv_width();
        &self.qkv[(sequence * LENGTH + position) * width..][..width]
    }

    /// Head `head` (of q, then k, then v) of a row in f64, normed and rotated where q or k.
    fn head(&self, sequence: usize, position: usize, head: usize) -> Vec<f64> {
        let (case, dim) = (self.case, self.case.head_dim);
        let raw = &self.row(sequence, position)[head * dim..][..dim];
        let mut x: Vec<f64> = raw.iter().map(|x| f64::from(*x)).collect();
        if head >= case.heads + case.kv_heads {
            return x;
        }
        if case.norm {
            let weight = if head < case.heads {
                &self.q_norm
            } else {
                &self.k_norm
            };
            let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
            for (x, w) in x.iter_mut().zip(weight) {
                *x *= f64::from(*w) / (mean + f64::from(EPS)).sqrt();
            }
        }
        let half = dim / 2;
        for i in 0..half {
            let angle = f64::from(position as f32 * self.inv_freq[i]);
            let (a, b) = (x[i], x[half + i]);
            x[i] = a * angle.cos() - b * angle.sin();
            x[half + i] = b * angle.cos() + a * angle.sin();
        }
        x
    }

    fn want(&self, sequence: usize, position: usize) -> Vec<f64> {
        let case = self.case;
        let first = case.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let mut want = Vec::new();
        for h in 0..case.heads {
            let q = self.head(sequence, position, h);
            let kv = h / (case.heads / case.kv_heads);
            let mut sum = 0.0;
            let mut out = vec![0.0; case.head_dim];
            for j in first..=position {
                let k = self.head(sequence, j, case.heads + kv);
                let v = self.head(sequence, j, case.heads + case.kv_heads + kv);
                let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                let p = (dot / (case.head_dim as f64).sqrt()).exp();
                sum += p;
                for (out, v) in out.iter_mut().zip(&v) {
                    *out += p * v;
                }
            }
            want.extend(out.iter().map(|x| x / sum));
        }
        want
    }
}

impl Case {
    fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Every row, in steps of `width` positions of one sequence after another (rings hold no more than their
/// window needs, so they are only run row by row or in small steps).
fn one_by_one(width: usize) -> Vec<Vec<(i32, i32)>> {
    let mut steps = Vec::new();
    for sequence in 0..SEQUENCES as i32 {
        for first in (0..LENGTH).step_by(width) {
            let end = LENGTH.min(first + width);
            steps.push((first..end).map(|p| (sequence, p as i32)).collect());
        }
    }
    steps
}

#[test]
fn matches_f64_however_the_rows_are_packed() {
    for (i, case) in CASES.iter().enumerate() {
        for level in Level::available() {
            let model = Model::new(case, level);
            let alone = model.run(&one_by_one(1));
            for ((sequence, position), out) in &alone {
                let want = model.want(*sequence as usize, *position as usize);
                let error = error(out, &want);
                assert!(
                    error < 3e-6,
                    "case {i} {level:?} {sequence}/{position}: {error:e}"
                );
            }
            let same = |name: &str, steps: &[Vec<(i32, i32)>]| {
                for ((place, a), (_, b)) in alone.iter().zip(model.run(steps)) {
                    assert_eq!(bits(a), bits(&b), "case {i} {level:?} {name} {place:?}");
                }
            };
            for width in [2, 3, 5] {
                same(&format!("in steps of {width}"), &one_by_one(width));
            }
            let decode: Vec<_> = (0..LENGTH as i32)
                .map(|p| (0..SEQUENCES as i32).rev().map(|s| (s, p)).collect())
                .collect();
            same("all sequences in one step", &decode);
            if !case.ring {
                same("as one prefill", &[one_by_one(1).concat()]);
            }
        }
    }
}

#[test]
fn padding_rows_write_nothing_and_give_zeros() {
    let model = Model::new(&CASES[0], Level::best());
    let outputs = model.run(&[vec![(0, 0), (-1, 0), (1, 0), (0, -1)]]);
    for (place, out) in outputs {
        let padding = place.0 < 0 || place.1 < 0;
        assert_eq!(out.iter().all(|x| *x == 0.0), padding, "{place:?}");
        assert!(out.iter().all(|x| x.is_finite()), "{place:?}");
    }
}

#[test]
fn places_outside_the_cache_are_errors() {
    let model = Model::new(&CASES[0], Level::best());
    let table = [1, -1, 99];
    let layout = Layout {
        table: &table,
        blocks_per_sequence: 3,
        ..model.layout()
    };
    let cases = [
        (0, 8, "block -1"),
        (0, 16, "block 99"),
        (0, 24, "past the 24"),
        (1, 0, "block table"),
    ];
    for (sequence, position, problem) in cases {
        let error = layout.span(sequence, position, position + 1).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
}
