//! Where the parts of a step lie in its index buffers: written on the host in this order, read on the device.

use laneway_device::op::SampleRow;
use laneway_device::{Buffer, View};

use super::probe::ProbeBuffers;
use crate::qwen3_tts::talker::{DecodeStep, PrefillStep, TailStep};

/// What the layout of a step's index buffers depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Requests, rows of padding included.
    pub(super) rows: usize,
    /// Rows of the Talker's stack, padding included: all prompts together, or one for each request.
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
        if shape.prefill {
            return rows * (2 + self.pages_per_sequence + self.groups) + tokens * (4 + self.groups);
        }
        let forced = rows * (2 * self.groups + self.seen_words + self.seen_words / self.groups);
        4 * rows + 3 * tokens + usize::from(shape.probed) * forced
    }

    /// Integers of the largest step.
    pub(super) fn most_ints(self, rows: usize, tokens: usize) -> usize {
        let of = |tokens, prefill| {
            self.ints(Shape {
                rows,
                tokens,
                prefill,
                probed: true,
            })
        };
        of(tokens, true).max(of(rows, false))
    }
}

/// Pinned memory that one stage's step is uploaded from.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) ints: Buffer,
    pub(super) params: Buffer,
    pub(super) speakers: Buffer,
}

/// Takes views of consecutive parts.
struct Cut<'a> {
    ints: &'a Buffer,
    at: usize,
}

impl Cut<'_> {
    fn take(&mut self, len: usize) -> View {
        self.at += len;
        self.ints.slice(self.at - len, len)
    }
}

/// Views of a prefill's parts on the device.
#[derive(Debug)]
pub(super) struct PrefillIndices {
    shape: Shape,
    code_rows: View,
    slots: View,
    pages: View,
    next_codes: View,
    text: View,
    sequences: View,
    positions: View,
    speaker_rows: View,
    codes: View,
}

impl PrefillIndices {
    pub(super) fn new(shape: Shape, ints: &Buffer, dims: Dims) -> Self {
        let Shape { rows, tokens, .. } = shape;
        let mut cut = Cut { ints, at: 0 };
        Self {
            shape,
            code_rows: cut.take(rows),
            slots: cut.take(rows),
            pages: cut.take(rows * dims.pages_per_sequence),
            next_codes: cut.take(rows * dims.groups),
            text: cut.take(tokens),
            sequences: cut.take(tokens),
            positions: cut.take(tokens),
            speaker_rows: cut.take(tokens),
            codes: cut.take(tokens * dims.groups),
        }
    }

    /// Operands of the step. `speakers`: the vectors of its prompts, if any may have one.
    pub(super) fn step(self, speakers: Option<View>) -> PrefillStep {
        PrefillStep {
            tokens: self.shape.tokens,
            text: self.text,
            codes: self.codes,
            speakers: speakers.map(|speakers| (speakers, self.speaker_rows)),
            sequences: self.sequences,
            positions: self.positions,
            rows: self.shape.rows,
            pages: self.pages,
            slots: self.slots,
            next_codes: self.next_codes,
            code_rows: self.code_rows,
        }
    }
}

/// Views of a decode step's parts on the device.
#[derive(Debug)]
pub(super) struct FrameIndices {
    shape: Shape,
    code_rows: View,
    ring_rows: View,
    pair_sequences: View,
    sequences: View,
    positions: View,
    text: View,
    forced: Option<[View; 4]>,
    talker_params: View,
    predictor_params: View,
}

impl FrameIndices {
    pub(super) fn new(shape: Shape, ints: &Buffer, params: &Buffer, dims: Dims) -> Self {
        let Shape { rows, tokens, .. } = shape;
        let Dims {
            groups, seen_words, ..
        } = dims;
        let mut cut = Cut { ints, at: 0 };
        let words = rows * SampleRow::WORDS;
        Self {
            shape,
            code_rows: cut.take(rows),
            ring_rows: cut.take(rows),
            pair_sequences: cut.take(2 * rows),
            sequences: cut.take(tokens),
            positions: cut.take(tokens),
            text: cut.take(tokens),
            forced: shape.probed.then(|| {
                [
                    groups * rows,
                    groups * rows,
                    seen_words * rows,
                    seen_words / groups * rows,
                ]
                .map(|len| cut.take(len))
            }),
            talker_params: params.slice(0, words),
            predictor_params: params.slice(words, words),
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

    /// Operands of the step. `text`: some row still has text.
    pub(super) fn step(self, text: bool, probe: Option<&ProbeBuffers>) -> DecodeStep {
        let rows = self.shape.rows;
        DecodeStep {
            sequences: self.sequences,
            positions: self.positions,
            text: text.then_some(self.text),
            tail: TailStep {
                rows,
                talker_params: self.talker_params,
                predictor_params: self.predictor_params,
                code_rows: self.code_rows,
                ring_rows: self.ring_rows,
                pair_sequences: self.pair_sequences,
                probe: probe
                    .zip(self.forced)
                    .map(|(probe, forced)| probe.tail(rows, forced)),
            },
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
            let ints = buffer(DType::I32, len);
            let last = if prefill {
                PrefillIndices::new(shape, &ints, dims).codes
            } else {
                let params = buffer(DType::U32, 6 * SampleRow::WORDS);
                let frame = FrameIndices::new(shape, &ints, &params, dims);
                frame.forced.map_or(frame.text, |[.., seen_index]| seen_index)
            };
            assert_eq!(last.start + last.len, len, "{shape:?}");
        }
    }

    #[test]
    fn the_first_pass_of_a_frame_pairs_hidden_states_and_codes() {
        let mut ints = Vec::new();
        FrameIndices::push_pairs(&mut ints, 3, 5);
        assert_eq!(ints, [0, 1, 2, -1, -1, 0, 1, 2, -1, -1]);
    }
}
