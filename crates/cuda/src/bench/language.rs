//! The operations of a Talker step and of a frame of the code predictor, with the sizes of the released models.

use laneway_device::op::{
    Activation, Attention, DecodeAttention, Embed, GatherRows, Gemm, InputNorm, QkvRope, RmsNorm, RopeTable,
    Sample, ScatterRows, StateSlice,
};
use laneway_device::{DType, Matrix, Result, View};

use super::Stage;
use super::operands::{CacheShape, Operands};

const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const EPS: f32 = 1e-6;
const GROUPS: usize = 16;
const CODES: usize = 2048;
const TALKER_VOCAB: usize = 3072;

/// Widths of one decoder stack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Widths {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) layers: usize,
}

pub(crate) const PREDICTOR: Widths = Widths {
    hidden: 1024,
    intermediate: 3072,
    layers: 5,
};

pub(crate) const TALKER_SMALL: Widths = Widths {
    layers: 28,
    ..PREDICTOR
};

pub(crate) const TALKER_LARGE: Widths = Widths {
    hidden: 2048,
    intermediate: 6144,
    layers: 28,
};

struct Layer {
    input_norm: View,
    post_norm: View,
    q_norm: View,
    k_norm: View,
    qkv: Matrix,
    o: Matrix,
    gate_up: Matrix,
    down: Matrix,
}

/// Weights and workspace of a stack for passes of `rows` rows.
struct Stack<'a> {
    o: &'a Operands,
    layers: Vec<Layer>,
    caches: Vec<laneway_device::op::KvCache>,
    x: View,
    normed: View,
    qkv: View,
    q: View,
    attended: View,
    gate_up: View,
    activated: View,
}

/// What changes from pass to pass.
struct Pass {
    rows: usize,
    cos_sin: View,
    sequences: View,
    positions: View,
    decode: bool,
}

impl<'a> Stack<'a> {
    fn new(o: &'a Operands, widths: Widths, rows: usize, cache: CacheShape) -> Result<Self> {
        let (hidden, inter) = (widths.hidden, widths.intermediate);
        let layer = |_| {
            Ok(Layer {
                input_norm: o.ones(hidden)?,
                post_norm: o.ones(hidden)?,
                q_norm: o.ones(DIM)?,
                k_norm: o.ones(DIM)?,
                qkv: o.matrix((HEADS + 2 * KV_HEADS) * DIM, hidden)?,
                o: o.matrix(hidden, HEADS * DIM)?,
                gate_up: o.matrix(2 * inter, hidden)?,
                down: o.matrix(hidden, inter)?,
            })
        };
        let layers: Vec<Layer> = (0..widths.layers).map(layer).collect::<Result<_>>()?;
        Ok(Self {
            o,
            activated: o.out_for(&layers[0].down, rows * inter)?,
            attended: o.out_for(&layers[0].o, rows * HEADS * DIM)?,
            layers,
            caches: (0..widths.layers)
                .map(|_| o.cache(cache))
                .collect::<Result<_>>()?,
            x: o.floats(rows * hidden)?,
            normed: o.out(rows * hidden)?,
            qkv: o.out(rows * (HEADS + 2 * KV_HEADS) * DIM)?,
            q: o.out(rows * HEADS * DIM)?,
            gate_up: o.out(rows * 2 * inter)?,
        })
    }

    fn product(&self, x: &View, w: &Matrix, rows: usize, out: &View) -> Gemm {
        Gemm {
            x: x.clone(),
            norm: None,
            rows,
            w: w.clone(),
            bias: None,
            activation: Activation::None,
            scale: None,
            accumulate: false,
            gated: None,
            out: out.clone(),
            next: None,
        }
    }

    fn norm(&self, weight: &View, prepared: bool) -> Option<InputNorm> {
        Some(InputNorm {
            weight: weight.clone(),
            eps: EPS,
            scratch: self.normed.clone(),
            prepared,
        })
    }

    fn pass(&self, pass: &Pass, stage: &mut Stage, positions: usize) {
        let rows = pass.rows;
        for (i, (layer, cache)) in self.layers.iter().zip(&self.caches).enumerate() {
            let qkv = QkvRope {
                qkv: self.qkv.clone(),
                rows,
                heads: HEADS,
                q_norm: Some(layer.q_norm.clone()),
                k_norm: Some(layer.k_norm.clone()),
                eps: EPS,
                cos_sin: pass.cos_sin.clone(),
                sequences: pass.sequences.clone(),
                positions: pass.positions.clone(),
                cache: cache.clone(),
                q_out: self.q.clone(),
            };
            stage.add(
                "qkv",
                Gemm {
                    norm: self.norm(&layer.input_norm, i > 0),
                    ..self.product(&self.x, &layer.qkv, rows, &self.qkv)
                },
            );
            if pass.decode {
                let op = DecodeAttention {
                    qkv,
                    window: None,
                    out: self.attended.clone(),
                };
                stage.add_attention("attention", op, positions);
            } else {
                let attention = Attention {
                    q: self.q.clone(),
                    rows,
                    heads: HEADS,
                    sequences: pass.sequences.clone(),
                    positions: pass.positions.clone(),
                    cache: cache.clone(),
                    window: None,
                    out: self.attended.clone(),
                };
                stage.add("qkv rope", qkv);
                stage.add_attention("attention of a pair", attention, positions);
            }
            stage.add(
                "o",
                Gemm {
                    accumulate: true,
                    next: self.norm(&layer.post_norm, false),
                    ..self.product(&self.attended, &layer.o, rows, &self.x)
                },
            );
            stage.add(
                "gate up",
                Gemm {
                    norm: self.norm(&layer.post_norm, true),
                    gated: Some(self.gate_up.clone()),
                    ..self.product(&self.x, &layer.gate_up, rows, &self.activated)
                },
            );
            stage.add(
                "down",
                Gemm {
                    accumulate: true,
                    next: self
                        .layers
                        .get(i + 1)
                        .and_then(|behind| self.norm(&behind.input_norm, false)),
                    ..self.product(&self.activated, &layer.down, rows, &self.x)
                },
            );
        }
    }

    fn rope(&self, stage: &mut Stage, positions: &View, rows: usize) -> Result<View> {
        let out = self.o.out(rows * DIM)?;
        stage.add(
            "rope table",
            RopeTable {
                positions: positions.clone(),
                inv_freq: self.o.floats(DIM / 2)?,
                rows,
                head_dim: DIM,
                out: out.clone(),
            },
        );
        Ok(out)
    }
}

fn sample(logits: &View, params: &View, codes: &View, rows: usize, vocab: usize, group: usize) -> Sample {
    Sample {
        logits: logits.clone(),
        rows,
        vocab,
        live: CODES,
        extra_live: if vocab > CODES { 2150 } else { -1 },
        params: params.clone(),
        group: group as u32,
        seen: None,
        tokens: codes.clone(),
        token_stride: GROUPS,
        token_offset: group,
        scores: None,
    }
}

/// One decode step up to the first code, at `context` positions.
pub(crate) fn talker(o: &Operands, widths: Widths, rows: usize, context: usize) -> Result<Stage> {
    let hidden = widths.hidden;
    let cache = CacheShape {
        sequences: rows,
        positions: context,
        page_size: 32,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        ring: false,
    };
    let stack = Stack::new(o, widths, rows, cache)?;
    let mut stage = Stage::new("talker");
    let index: Vec<i32> = (0..rows as i32).collect();
    let sequences = o.ints(&index)?;
    let positions = o.ints(&vec![context as i32 - 1; rows])?;
    let codes = o.ints(&vec![7; rows * GROUPS])?;
    let slots = o.words(rows * (TALKER_VOCAB / 32 + GROUPS))?;
    let previous = o.ints(&vec![7; rows * GROUPS])?;
    let sampler_row = |r: usize| (r * (TALKER_VOCAB / 32 / GROUPS + 1) + TALKER_VOCAB / 32 / GROUPS) as i32;
    let code_rows = o.ints(&(0..rows).map(sampler_row).collect::<Vec<_>>())?;
    stage.add(
        "gather codes",
        GatherRows {
            src: o.ints(&vec![7; rows * (TALKER_VOCAB / 32 + GROUPS)])?,
            indirect: true,
            index: code_rows.clone(),
            rows,
            width: GROUPS,
            out: previous.clone(),
        },
    );
    stage.add(
        "padding",
        Embed {
            tables: vec![o.floats(hidden)?],
            ids: o.ints(&vec![0; rows])?,
            ids_stride: 1,
            first_id: 0,
            rows,
            width: hidden,
            accumulate: false,
            out: stack.x.clone(),
        },
    );
    let mut tables = vec![o.table(TALKER_VOCAB, hidden)?];
    for _ in 1..GROUPS {
        tables.push(o.table(CODES, hidden)?);
    }
    stage.add(
        "embed frame",
        Embed {
            tables,
            ids: previous,
            ids_stride: GROUPS,
            first_id: 0,
            rows,
            width: hidden,
            accumulate: true,
            out: stack.x.clone(),
        },
    );
    let pass = Pass {
        rows,
        cos_sin: stack.rope(&mut stage, &positions, rows)?,
        sequences,
        positions,
        decode: true,
    };
    stack.pass(&pass, &mut stage, context);
    let last = o.out(rows * hidden)?;
    stage.add(
        "final norm",
        RmsNorm {
            x: stack.x.clone(),
            rows,
            width: hidden,
            weight: o.ones(hidden)?,
            eps: EPS,
            out: last.clone(),
        },
    );
    let logits = o.out(rows * TALKER_VOCAB)?;
    let head = o.matrix(TALKER_VOCAB, hidden)?;
    stage.add("head", stack.product(&last, &head, rows, &logits));
    let params = o.sampling(rows, true)?;
    let mut sampled = sample(&logits, &params, &codes, rows, TALKER_VOCAB, 0);
    sampled.seen = Some(StateSlice {
        pool: slots,
        slot_stride: TALKER_VOCAB / 32 + GROUPS,
        offset: 0,
    });
    stage.add("sample", sampled);
    Ok(stage)
}

/// The 15 codes of a frame behind the first, `copies` times the weights so that passes do not find each
/// other's in the cache (1: as the model has it).
pub(crate) fn predictor(o: &Operands, talker_width: usize, rows: usize, copies: usize) -> Result<Stage> {
    let (widths, hidden) = (PREDICTOR, PREDICTOR.hidden);
    let cache = CacheShape {
        sequences: rows,
        positions: GROUPS,
        page_size: GROUPS,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        ring: false,
    };
    let stacks = (0..copies)
        .map(|_| Stack::new(o, widths, 2 * rows, cache))
        .collect::<Result<Vec<_>>>()?;
    let mut stage = Stage::new("predictor");
    let codes = o.ints(&vec![7; rows * GROUPS])?;
    let params = o.sampling(rows, false)?;
    let logits = o.out(rows * CODES)?;
    let first = &stacks[0];
    let talker_hidden = o.floats(rows * talker_width)?;
    if talker_width == hidden {
        let copy = laneway_device::op::Copy {
            src: talker_hidden,
            dst: first.x.slice(0, rows * hidden),
        };
        stage.add("copy", copy);
    } else {
        let projection = o.matrix(hidden, talker_width)?;
        let bias = Some(o.floats(hidden)?);
        stage.add(
            "projection",
            Gemm {
                bias,
                ..first.product(&talker_hidden, &projection, rows, &first.x)
            },
        );
    }
    let index: Vec<i32> = (0..rows as i32).collect();
    let twice = o.ints(&[index.clone(), index].concat())?;
    let pair_positions = o.ints(&[vec![0; rows], vec![1; rows]].concat())?;
    for group in 0..GROUPS - 1 {
        let stack = &stacks[group % copies];
        let at = if group == 0 { rows * hidden } else { 0 };
        let x = stack.x.slice(at, rows * hidden);
        let embed = Embed {
            tables: vec![o.table(CODES, hidden)?],
            ids: codes.clone(),
            ids_stride: GROUPS,
            first_id: group,
            rows,
            width: hidden,
            accumulate: false,
            out: x.clone(),
        };
        stage.add("embed", embed);
        let pass = match group {
            0 => Pass {
                rows: 2 * rows,
                cos_sin: stack.rope(&mut stage, &pair_positions, 2 * rows)?,
                sequences: twice.clone(),
                positions: pair_positions.clone(),
                decode: false,
            },
            _ => Pass {
                rows,
                cos_sin: o.floats(rows * DIM)?,
                sequences: twice.slice(0, rows),
                positions: o.ints(&vec![group as i32 + 1; rows])?,
                decode: true,
            },
        };
        stack.pass(&pass, &mut stage, group + 2);
        let head = o.matrix(CODES, hidden)?;
        let norm = stack.norm(&o.ones(hidden)?, false);
        stage.add(
            "head",
            Gemm {
                norm,
                ..stack.product(&x, &head, rows, &logits)
            },
        );
        stage.add("sample", sample(&logits, &params, &codes, rows, CODES, group + 1));
    }
    let rows_of: Vec<i32> = (0..rows as i32).collect();
    stage.add(
        "store codes",
        ScatterRows {
            src: codes,
            index: o.ints(&rows_of)?,
            rows,
            width: GROUPS,
            dst: o.ints(&vec![0; rows * GROUPS])?,
        },
    );
    Ok(stage)
}

/// Element type that the model's caches have on a device that takes both.
pub(crate) const CACHE_DTYPE: DType = DType::Bf16;
