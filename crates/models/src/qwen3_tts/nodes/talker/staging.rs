//! Where the parts of a step lie in its index buffers: written on the host in this order, read on the device.

use laneway_device::op::SampleRow;
use laneway_device::{Buffer, View};

use super::probe::ProbeBuffers;
use crate::qwen3_tts::talker::TailStep;

/// What the layout of a step's index buffers depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Rows, those of padding included.
    pub(super) rows: usize,
    /// Rows of the Talker's stack: all prompts together, or one for each row.
    pub(super) tokens: usize,
    pub(super) prefill: bool,
    pub(super) probed: bool,
}

/// What the layouts of all steps of a node depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dims {
    pub(super) groups: usize,
    pub(super) pages_per_sequence: usize,
    /// Words of a seen set.
    pub(super) seen_words: usize,
}

impl Dims {
    /// Integers of a step.
    pub(super) fn ints(self, shape: Shape) -> usize {
        let Shape { rows, tokens, .. } = shape;
        let tail = 4 * rows;
        let body = 3 * tokens;
        let prompt = rows * (2 + self.pages_per_sequence) + tokens * (1 + self.groups);
        let forced = rows * (2 * self.groups + self.seen_words + self.seen_words / self.groups);
        tail + body + usize::from(shape.prefill) * prompt + usize::from(shape.probed) * forced
    }

    /// Integers of the largest step.
    pub(super) fn most_ints(self, rows: usize, tokens: usize) -> usize {
        self.ints(Shape {
            rows,
            tokens: tokens.max(rows),
            prefill: true,
            probed: true,
        })
    }
}

/// Pinned memory that one stage's step is uploaded from.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) ints: Buffer,
    pub(super) params: Buffer,
    pub(super) speakers: Buffer,
}

/// Views of a step's parts on the device.
#[derive(Debug)]
pub(super) struct Indices {
    shape: Shape,
    code_rows: View,
    ring_rows: View,
    pair_sequences: View,
    pub(super) prefill: Option<PrefillIndices>,
    pub(super) sequences: View,
    pub(super) positions: View,
    pub(super) text: View,
    forced: Option<[View; 4]>,
    talker_params: View,
    predictor_params: View,
}

/// Parts that only a prefill has.
#[derive(Debug)]
pub(super) struct PrefillIndices {
    pub(super) last: View,
    pub(super) slots: View,
    pub(super) pages: View,
    pub(super) speaker_rows: View,
    pub(super) codes: View,
}

impl Indices {
    pub(super) fn new(shape: Shape, ints: &Buffer, params: &Buffer, dims: Dims) -> Self {
        let Shape {
            rows,
            tokens,
            prefill,
            probed,
        } = shape;
        let Dims {
            groups,
            pages_per_sequence,
            seen_words,
        } = dims;
        let mut at = 0;
        let mut take = |len: usize| {
            at += len;
            ints.slice(at - len, len)
        };
        let (code_rows, ring_rows) = (take(rows), take(rows));
        let pair_sequences = take(2 * rows);
        let words = rows * SampleRow::WORDS;
        let params = (params.slice(0, words), params.slice(words, words));
        // A prefill has its sequences' parts first; both walks then have those of their tokens.
        let head = prefill.then(|| (take(rows), take(rows), take(rows * pages_per_sequence)));
        let (text, sequences, positions);
        let mut tokens_parts = None;
        if prefill {
            text = take(tokens);
            sequences = take(tokens);
            positions = take(tokens);
            tokens_parts = Some((take(tokens), take(tokens * groups)));
        } else {
            sequences = take(tokens);
            positions = take(tokens);
            text = take(tokens);
        }
        let prefill = head
            .zip(tokens_parts)
            .map(|((last, slots, pages), (speaker_rows, codes))| PrefillIndices {
                last,
                slots,
                pages,
                speaker_rows,
                codes,
            });
        Self {
            shape,
            code_rows,
            ring_rows,
            pair_sequences,
            prefill,
            sequences,
            positions,
            text,
            forced: probed.then(|| {
                [
                    groups * rows,
                    groups * rows,
                    seen_words * rows,
                    seen_words / groups * rows,
                ]
                .map(take)
            }),
            talker_params: params.0,
            predictor_params: params.1,
        }
    }

    /// Sequences of the predictor's first pass: every row's hidden state, then every row's code. Of `rows` rows
    /// the first `live` are no padding.
    pub(super) fn push_pairs(ints: &mut Vec<i32>, live: usize, rows: usize) {
        for _ in 0..2 {
            ints.extend(0..live as i32);
            ints.extend(std::iter::repeat_n(-1, rows - live));
        }
    }

    /// Operands of the step's end.
    pub(super) fn tail(&self, probe: Option<&ProbeBuffers>) -> TailStep {
        let forced = self.forced.clone();
        TailStep {
            rows: self.shape.rows,
            talker_params: self.talker_params.clone(),
            predictor_params: self.predictor_params.clone(),
            code_rows: self.code_rows.clone(),
            ring_rows: self.ring_rows.clone(),
            pair_sequences: self.pair_sequences.clone(),
            probe: probe
                .zip(forced)
                .map(|(probe, forced)| probe.tail(self.shape.rows, forced)),
        }
    }
}

#[cfg(test)]
mod tests {
    use laneway_device::{BufferSpec, DType, Place};

    use super::*;

    #[test]
    fn the_parts_of_every_shape_fill_its_integers_exactly() {
        let device = laneway_device::open_cpu(laneway_device::CpuConfig { memory_bytes: None }).unwrap();
        let dims = Dims {
            groups: 16,
            pages_per_sequence: 5,
            seen_words: 48,
        };
        let buffer = |dtype, len| {
            let name = "parts".into();
            let place = Place::Device;
            device
                .alloc(BufferSpec {
                    name,
                    dtype,
                    len,
                    place,
                })
                .unwrap()
        };
        for (prefill, probed) in [(false, false), (false, true), (true, false), (true, true)] {
            let shape = Shape {
                rows: 3,
                tokens: if prefill { 20 } else { 3 },
                prefill,
                probed,
            };
            let len = dims.ints(shape);
            assert!(len <= dims.most_ints(3, 20));
            let indices = Indices::new(
                shape,
                &buffer(DType::I32, len),
                &buffer(DType::U32, 6 * SampleRow::WORDS),
                dims,
            );
            let last = match (&indices.forced, &indices.prefill) {
                (Some(forced), _) => &forced[3],
                (None, Some(prefill)) => &prefill.codes,
                (None, None) => &indices.text,
            };
            assert_eq!(last.start + last.len, len, "{shape:?}");
        }
    }

    #[test]
    fn the_first_pass_of_a_frame_pairs_hidden_states_and_codes() {
        let mut ints = Vec::new();
        Indices::push_pairs(&mut ints, 3, 5);
        assert_eq!(ints, [0, 1, 2, -1, -1, 0, 1, 2, -1, -1]);
    }
}
