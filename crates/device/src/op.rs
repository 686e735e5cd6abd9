//! The closed set of operations. A model is written once over these; every device implements all of them.
//!
//! Rules that every implementation keeps:
//! * **Batch invariance.** Each output element is reduced in one fixed order that depends on nothing but the
//!   element's own inputs: not on the number of rows, the place of the row, the width of a window or the
//!   packing of a prefill. `Gemm` and `Conv` reduce over k ascending (tap-major for `Conv`). Attention takes keys
//!   in position order from the oldest visible one. Norms, dot products over a head and softmax sums may use a
//!   fixed pattern of lanes that depends on nothing but the index inside the row.
//! * Activations are f32 row-major `[rows, width]`, contiguous unless a stride is named; index operands are
//!   i32. Weights may be bf16 (widened exactly) or f32; every accumulation is f32.
//! * Time runs along rows: a sequence of `[time, channels]`, several sequences packed one behind the other.
//! * An *indirect* operand is a pool reached through an index buffer. Its ranges are named by the step's
//!   [`crate::Touches`], everything else by the operation itself ([`Op::access`]).

mod access;
mod conv;
mod operands;
#[cfg(test)]
mod tests;
mod validate;

pub use access::{Access, Accesses, PoolAccess};
pub use conv::{Conv, Conv1d, DepthwiseConv, Padding, Pointwise, Snake, Windows};

use crate::{Matrix, View};

/// Elementwise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    /// x
    #[default]
    None,
    /// x * sigmoid(x)
    Silu,
    /// Exact GELU (erf).
    Gelu,
    /// max(x, 0)
    Relu,
    /// x < 0 ? exp(x) - 1 : x
    Elu,
    /// tanh(x)
    Tanh,
    /// max(x, 0), then tanh
    ReluTanh,
    /// 1 / (1 + exp(-x))
    Sigmoid,
}

/// `v = activation(norm(x) · wᵀ + bias) * scale; out = accumulate ? out + v : v`. x `[rows, k]`, w `[n, k]`,
/// bias and scale `[n]`, out `[rows, n]`; `[rows, n / 2]` when gated: then `v = silu(v[..n/2]) * v[n/2..]`, with
/// no bias, activation, scale or accumulation. Norm and gate are here because a device may fold them into the product.
#[derive(Debug, Clone)]
pub struct Gemm {
    /// Input `[rows, k]`; F32, or [`crate::Device::activation_dtype`].
    pub x: View,
    /// RMS norm of each input row first.
    pub norm: Option<InputNorm>,
    /// Rows.
    pub rows: usize,
    /// Weight.
    pub w: Matrix,
    /// Bias `[n]`.
    pub bias: Option<View>,
    /// Applied after the bias.
    pub activation: Activation,
    /// Per-output factor `[n]` (layer scale, ConvNeXt gamma).
    pub scale: Option<View>,
    /// Add to what `out` holds (residual).
    pub accumulate: bool,
    /// The first half of the outputs gates the second; a scratch of `[rows, n]`, of no use afterwards.
    pub gated: Option<View>,
    /// Output `[rows, n]`, or `[rows, n / 2]` when gated; F32, or the `activation_dtype` of the product behind.
    pub out: View,
    /// The norm in front of a product behind, whose `x` is all of this one's `out` (F32, not gated): the device may
    /// leave in its scratch what that product begins with. That one says so by [`InputNorm::prepared`].
    pub next: Option<InputNorm>,
}

/// The [`RmsNorm`] in front of a [`Gemm`].
#[derive(Debug, Clone)]
pub struct InputNorm {
    /// `[k]`
    pub weight: View,
    /// Added under the root.
    pub eps: f32,
    /// Scratch `[rows, k]`, of no use afterwards.
    pub scratch: View,
    /// Whether the product that made `x` had this very norm as its [`Gemm::next`]; neither `x` nor the scratch has been
    /// written since.
    pub prepared: bool,
}

/// `out = x / sqrt(mean(x²) + eps) * weight`, per row.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    /// Input `[rows, width]`.
    pub x: View,
    /// Rows.
    pub rows: usize,
    /// Width.
    pub width: usize,
    /// `[width]`
    pub weight: View,
    /// Added under the root.
    pub eps: f32,
    /// Output `[rows, width]`; may be `x`.
    pub out: View,
}

/// `out = (x - mean) / sqrt(var + eps) * weight + bias`, population variance, per row.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    /// Input `[rows, width]`.
    pub x: View,
    /// Rows.
    pub rows: usize,
    /// Width.
    pub width: usize,
    /// `[width]`
    pub weight: View,
    /// `[width]`
    pub bias: View,
    /// Added under the root.
    pub eps: f32,
    /// Output `[rows, width]`; may be `x`.
    pub out: View,
}

/// `out[r, i] = silu(x[r, i]) * x[r, width + i]`: the gate and up halves of one fused projection.
#[derive(Debug, Clone)]
pub struct SiluMul {
    /// Input `[rows, 2 * width]`.
    pub x: View,
    /// Rows.
    pub rows: usize,
    /// Width of the output.
    pub width: usize,
    /// Output `[rows, width]`.
    pub out: View,
}

/// `out[r] = (accumulate ? out[r] : 0) + Σ_g tables[g][ids[r, first_id + g]]`, g ascending; a negative id
/// adds nothing.
#[derive(Debug, Clone)]
pub struct Embed {
    /// Tables `[entries, width]`, f32 or bf16, one per group.
    pub tables: Vec<View>,
    /// Ids `[rows, ids_stride]`.
    pub ids: View,
    /// Ids in a row of `ids`.
    pub ids_stride: usize,
    /// Column of the first group's id.
    pub first_id: usize,
    /// Rows.
    pub rows: usize,
    /// Width.
    pub width: usize,
    /// Add to what `out` holds.
    pub accumulate: bool,
    /// Output `[rows, width]`.
    pub out: View,
}

/// `out[r] = [cos(p_r · f_0..), sin(p_r · f_0..)]` with `f = inv_freq`: once a step, used by all layers.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Positions `[rows]`.
    pub positions: View,
    /// `[head_dim / 2]`
    pub inv_freq: View,
    /// Rows.
    pub rows: usize,
    /// Head width.
    pub head_dim: usize,
    /// Output `[rows, head_dim]`: cosines in the first half, sines in the second.
    pub out: View,
}

/// A paged or ring key/value cache inside a pool (an *indirect* operand). Element `e` of position `p` of a
/// sequence lies at `block * page_stride + {k,v}_offset + (i % page_size) * kv_heads * head_dim + e`, where
/// `i = p`, or `p % (blocks_per_sequence * page_size)` when `ring`, and `block = table[seq, i / page_size]`.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// The whole pool, f32 on the CPU device.
    pub pool: View,
    /// Elements from one block (page or state slot) to the next.
    pub page_stride: usize,
    /// Element offset of this layer's keys inside a block.
    pub k_offset: usize,
    /// Element offset of this layer's values inside a block.
    pub v_offset: usize,
    /// Positions in a block.
    pub page_size: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Head width.
    pub head_dim: usize,
    /// Block numbers `[sequences, blocks_per_sequence]`.
    pub table: View,
    /// Columns of `table`.
    pub blocks_per_sequence: usize,
    /// Positions wrap round.
    pub ring: bool,
}

/// Split a fused `[q | k | v]` row, norm q and k per head (when weights are given), rotate both (half-split),
/// write k and v to the cache at the row's position, and hand out q. A row with a negative sequence or position
/// is padding: nothing is written to the cache and its q is zeros.
#[derive(Debug, Clone)]
pub struct QkvRope {
    /// Input `[rows, (heads + 2 * kv_heads) * head_dim]`.
    pub qkv: View,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// `[head_dim]`
    pub q_norm: Option<View>,
    /// `[head_dim]`
    pub k_norm: Option<View>,
    /// RMSNorm epsilon of both.
    pub eps: f32,
    /// From [`RopeTable`], `[rows, head_dim]`.
    pub cos_sin: View,
    /// Sequence (row of the block table) of each row `[rows]`.
    pub sequences: View,
    /// Position of each row `[rows]`.
    pub positions: View,
    /// Where k and v go.
    pub cache: KvCache,
    /// Output `[rows, heads * head_dim]`.
    pub q_out: View,
}

/// Causal attention over the cache: row r sees keys `max(0, p - window + 1) ..= p` of its sequence, scale
/// `head_dim^-0.5`, grouped queries. Prefill and decode alike. A padding row (see [`QkvRope`]) gives zeros.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Queries `[rows, heads * head_dim]`.
    pub q: View,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Sequence of each row `[rows]`.
    pub sequences: View,
    /// Position of each row `[rows]`.
    pub positions: View,
    /// Where k and v are.
    pub cache: KvCache,
    /// Keys visible, the row's own included. `None`: all.
    pub window: Option<usize>,
    /// Output `[rows, heads * head_dim]`.
    pub out: View,
}

/// [`QkvRope`], then [`Attention`] over what it wrote, for rows of which no two belong to the same sequence: a
/// device may do both in one pass.
#[derive(Debug, Clone)]
pub struct DecodeAttention {
    /// Projections, rotation, cache; `q_out` is a scratch, of no use afterwards.
    pub qkv: QkvRope,
    /// Keys visible, the row's own included. `None`: all.
    pub window: Option<usize>,
    /// Output `[rows, heads * head_dim]`.
    pub out: View,
}

/// One request's sampling parameters for one step; an array of these lies in a `U32` buffer,
/// [`SampleRow::WORDS`] words each.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct SampleRow {
    /// 0: greedy (after the processors).
    pub temperature: f32,
    /// 1: off.
    pub top_p: f32,
    /// 1: off. Applied over the set of tokens in the row's seen set.
    pub repetition_penalty: f32,
    /// 0: off.
    pub top_k: i32,
    /// Low half of the request's seed.
    pub seed_lo: u32,
    /// High half of the request's seed.
    pub seed_hi: u32,
    /// Frame number: the random-number counter.
    pub frame: u32,
    /// End token, live whatever the range says; -1: none.
    pub eos: i32,
    /// 1: `eos` is banned in this step.
    pub ban_eos: u32,
    /// State slot of the seen set; -1: this row has none.
    pub slot: i32,
    /// 0.
    pub reserved: [u32; 2],
}

impl SampleRow {
    /// Words of one record.
    pub const WORDS: usize = 12;
}

/// Processors and sampling, wholly on the device. Order: repetition penalty over the seen set (z<0 ? z*p :
/// z/p), eos ban, ids outside `0..live` (but `extra_live` and the row's eos) banned, temperature, top-k (ties
/// with the k-th stay), top-p (smallest set of highest probabilities reaching it, at least one), then
/// arg max of `z + gumbel(seed, frame, group, id)` (greedy: of z, and no temperature, top-k or top-p before it,
/// which cannot change it); ties go to the lower id. Random numbers:
/// Philox4x32-10, key = seed, counter = (id, frame, group, 0), first word w, u = (w + 0.5) · 2^-32,
/// gumbel = -ln(-ln u) evaluated in f64.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Raw logits `[rows, vocab]`; not changed.
    pub logits: View,
    /// Rows.
    pub rows: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Ids below this are live.
    pub live: usize,
    /// One more live id (the configured end token); -1: none.
    pub extra_live: i32,
    /// `[rows]` of [`SampleRow`].
    pub params: View,
    /// Random-number group (codebook number).
    pub group: u32,
    /// Seen sets: bit sets of `vocab` bits in a pool (*indirect*, written: the token is added).
    pub seen: Option<StateSlice>,
    /// Token of row r goes to element `r * token_stride + token_offset`.
    pub tokens: View,
    /// See `tokens`.
    pub token_stride: usize,
    /// See `tokens`.
    pub token_offset: usize,
    /// Where the processed scores go (-inf: banned), `[rows, vocab]`; for verification only.
    pub scores: Option<View>,
}

/// `out[r] = src[index[r]]`; a negative index gives zeros. 4-byte elements.
#[derive(Debug, Clone)]
pub struct GatherRows {
    /// Source `[any, width]`.
    pub src: View,
    /// Source is a pool named by touches.
    pub indirect: bool,
    /// `[rows]`
    pub index: View,
    /// Rows.
    pub rows: usize,
    /// Width.
    pub width: usize,
    /// Output `[rows, width]`.
    pub out: View,
}

/// `dst[index[r]] = src[r]`; a negative index writes nothing. 4-byte elements. `dst` is a pool (*indirect*).
#[derive(Debug, Clone)]
pub struct ScatterRows {
    /// Source `[rows, width]`.
    pub src: View,
    /// `[rows]`
    pub index: View,
    /// Rows.
    pub rows: usize,
    /// Width.
    pub width: usize,
    /// Destination pool `[any, width]`.
    pub dst: View,
}

/// A part of every slot of a state pool (an *indirect* operand): slot s holds it at
/// `s * slot_stride + offset`.
#[derive(Debug, Clone)]
pub struct StateSlice {
    /// The whole pool.
    pub pool: View,
    /// Elements from one slot to the next.
    pub slot_stride: usize,
    /// Element offset inside a slot.
    pub offset: usize,
}

/// `dst[r, dst_first + c] = src[r, src_first + c] (+ add[r, add_first + c])`: split, concatenate, add columns.
#[derive(Debug, Clone)]
pub struct CopyColumns {
    /// Source `[rows, src_stride]`.
    pub src: View,
    /// Its row length.
    pub src_stride: usize,
    /// Its first column.
    pub src_first: usize,
    /// Optional addend: view, row length, first column.
    pub add: Option<(View, usize, usize)>,
    /// Rows.
    pub rows: usize,
    /// Columns copied.
    pub columns: usize,
    /// Destination `[rows, dst_stride]`.
    pub dst: View,
    /// Its row length.
    pub dst_stride: usize,
    /// Its first column.
    pub dst_first: usize,
}

/// Mean and standard deviation over time per channel, weighted by `weights` (which sum to 1 over time) or
/// uniform; std = sqrt(max(Σ w (x-μ)², 1e-12)).
#[derive(Debug, Clone)]
pub struct TimeStats {
    /// Input `[rows, channels]`.
    pub x: View,
    /// Rows.
    pub rows: usize,
    /// Channels.
    pub channels: usize,
    /// `[rows, channels]`
    pub weights: Option<View>,
    /// Output `[channels]`.
    pub mean: View,
    /// Output `[channels]`.
    pub std: Option<View>,
}

/// Softmax over time per channel, in place: `[rows, channels]`.
#[derive(Debug, Clone)]
pub struct TimeSoftmax {
    /// In and out.
    pub x: View,
    /// Rows.
    pub rows: usize,
    /// Channels.
    pub channels: usize,
}

/// `out[r, c] = x[r, c] * scale[c] + add[r, c]` (squeeze-excite), or with `scale` broadcast alone.
#[derive(Debug, Clone)]
pub struct ChannelScale {
    /// Input `[rows, channels]`.
    pub x: View,
    /// `[channels]`
    pub scale: View,
    /// `[rows, channels]`
    pub add: Option<View>,
    /// Rows.
    pub rows: usize,
    /// Channels.
    pub channels: usize,
    /// Output `[rows, channels]`; may be `x`.
    pub out: View,
}

/// `dst[r] = src` for every row (tile a vector over time) .
#[derive(Debug, Clone)]
pub struct TileRow {
    /// Source `[columns]`.
    pub src: View,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Destination `[rows, dst_stride]`.
    pub dst: View,
    /// Its row length.
    pub dst_stride: usize,
    /// Its first column.
    pub dst_first: usize,
}

/// Nearest codebook entry (L2, lowest id on a tie) for every row; the entry is subtracted from x in place.
#[derive(Debug, Clone)]
pub struct NearestCode {
    /// Residual `[rows, width]`, in and out.
    pub x: View,
    /// Rows.
    pub rows: usize,
    /// Width.
    pub width: usize,
    /// Codebook `[entries, width]` f32.
    pub book: View,
    /// Entries.
    pub entries: usize,
    /// Code of row r goes to element `r * code_stride + code_offset`.
    pub codes: View,
    /// See `codes`.
    pub code_stride: usize,
    /// See `codes`.
    pub code_offset: usize,
}

/// Copy between device and pinned memory, or within the device. Same type and length.
#[derive(Debug, Clone)]
pub struct Copy {
    /// From.
    pub src: View,
    /// To.
    pub dst: View,
}

/// Zero a range (a released slot).
#[derive(Debug, Clone)]
pub struct Zero {
    /// What to zero.
    pub dst: View,
}

impl Gemm {
    /// Values in a row of the output.
    pub fn out_width(&self) -> usize {
        if self.gated.is_some() {
            self.w.n / 2
        } else {
            self.w.n
        }
    }
}

macro_rules! ops {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// One operation.
        #[derive(Debug, Clone)]
        #[allow(missing_docs)] // Each variant is documented by the type that it holds.
        pub enum Op { $($name($name)),* }
        $(impl From<$name> for Op { fn from(op: $name) -> Self { Op::$name(op) } })*
        impl Op {
            /// Names of all operations.
            pub const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Name in errors and reports.
            pub const fn name(&self) -> &'static str {
                match self { $(Op::$name(_) => stringify!($name)),* }
            }
        }
    };
}
ops!(
    Gemm,
    RmsNorm,
    LayerNorm,
    SiluMul,
    Embed,
    RopeTable,
    QkvRope,
    Attention,
    DecodeAttention,
    Sample,
    GatherRows,
    ScatterRows,
    Conv,
    DepthwiseConv,
    Conv1d,
    CopyColumns,
    TimeStats,
    TimeSoftmax,
    ChannelScale,
    TileRow,
    NearestCode,
    Copy,
    Zero,
);
