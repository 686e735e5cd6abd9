//! Operands of a step: views of index buffers on the device.
//!
//! Row counts include rows of padding, which have -1 for their sequence, position and places in pools.

use laneway_device::View;

use crate::qwen3_tts::predictor::FrameProbe;

/// Operands of the end of a step, one row a sequence.
#[derive(Debug)]
pub(in crate::qwen3_tts) struct TailStep {
    pub(in crate::qwen3_tts) rows: usize,
    /// `SampleRow`s of first codes.
    pub(in crate::qwen3_tts) talker_params: View,
    /// `SampleRow`s of the others.
    pub(in crate::qwen3_tts) predictor_params: View,
    /// Row of the sampler pool (in rows of `groups` words) that keeps the frame.
    pub(in crate::qwen3_tts) code_rows: View,
    /// Row of the edge's ring; -1: none.
    pub(in crate::qwen3_tts) ring_rows: View,
    /// See [`crate::qwen3_tts::predictor::FrameStep`].
    pub(in crate::qwen3_tts) pair_sequences: View,
    pub(in crate::qwen3_tts) probe: Option<TailProbe>,
}

/// Verification of a step's end, on the device.
#[derive(Debug)]
pub(in crate::qwen3_tts) struct TailProbe {
    /// Processed scores of the first code `[rows, vocab]`.
    pub(in crate::qwen3_tts) scores: View,
    pub(in crate::qwen3_tts) frame: FrameProbe,
}

/// Operands of a decode step.
#[derive(Debug)]
pub(in crate::qwen3_tts) struct DecodeStep {
    /// Slot, which is also the row of the block table `[rows]`.
    pub(in crate::qwen3_tts) sequences: View,
    pub(in crate::qwen3_tts) positions: View,
    /// Text token of each row, when some row still has text.
    pub(in crate::qwen3_tts) text: Option<View>,
    pub(in crate::qwen3_tts) tail: TailStep,
}

/// Operands of a prefill step: prompts without their last rows, packed one behind the other.
#[derive(Debug)]
pub(in crate::qwen3_tts) struct PrefillStep {
    /// Rows of the stack.
    pub(in crate::qwen3_tts) tokens: usize,
    /// `[tokens]`
    pub(in crate::qwen3_tts) text: View,
    /// `[tokens, groups]`, -1: nothing.
    pub(in crate::qwen3_tts) codes: View,
    /// Speaker vectors `[rows, hidden]`, and which of them to add to each token `[tokens]`.
    pub(in crate::qwen3_tts) speakers: Option<(View, View)>,
    pub(in crate::qwen3_tts) sequences: View,
    pub(in crate::qwen3_tts) positions: View,
    /// Prompts.
    pub(in crate::qwen3_tts) rows: usize,
    /// Pages of each prompt's sequence `[rows, pages_per_sequence]`.
    pub(in crate::qwen3_tts) pages: View,
    /// Slot of each prompt `[rows]`.
    pub(in crate::qwen3_tts) slots: View,
    /// Codes of each prompt's last row, with which its first decode step begins `[rows, groups]`.
    pub(in crate::qwen3_tts) next_codes: View,
    /// Row of the sampler pool that keeps them `[rows]`.
    pub(in crate::qwen3_tts) code_rows: View,
}
