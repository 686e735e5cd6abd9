//! From operations to kernel launches: pure functions, one module for each family of kernels.
//!
//! A function here looks at an operation's shapes and the types of its buffers, picks kernels, and packs
//! their arguments. It calls nothing of CUDA. What the operands must satisfy was checked by `Op::validate`.

mod clip;
mod codec;
pub(crate) mod gemm;
pub(crate) mod kept;
mod rows;
mod sequence;
#[cfg(test)]
mod testing;

use laneway_device::{Op, View};

use crate::launch::Launch;

/// Device address of the view's first element.
pub(crate) fn address(view: &View) -> u64 {
    let base = crate::memory::base(&view.buffer);
    base + (view.start * view.buffer.dtype().size()) as u64
}

/// What lowering may count on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    /// Streaming multiprocessors of the stream that will run it.
    pub(crate) sms: u32,
    /// Compute capability, e.g. 90.
    pub(crate) arch: u32,
}

impl Target {
    /// Shared memory of a multiprocessor that blocks can use, and of one block, in bytes. The driver keeps 1 KiB a
    /// block.
    pub(crate) fn shared_memory(self) -> (usize, usize) {
        match self.arch {
            80 | 87 => (164 << 10, 163 << 10),
            90..120 => (228 << 10, 227 << 10),
            _ => (100 << 10, 99 << 10),
        }
    }
}

/// The launches of one operation, in order, appended to `out`. `Copy` and `Zero` are not lowered: the
/// stream hands them to the driver's own copies and fills.
pub(crate) fn lower(op: &Op, target: Target, out: &mut Vec<Launch>) {
    match op {
        Op::Gemm(op) => gemm::gemm(op, target, out),
        Op::RmsNorm(op) => rows::rms_norm(op, out),
        Op::LayerNorm(op) => rows::layer_norm(op, out),
        Op::SiluMul(op) => rows::silu_mul(op, out),
        Op::Embed(op) => rows::embed(op, out),
        Op::RopeTable(op) => sequence::rope_table(op, out),
        Op::QkvRope(op) => sequence::qkv_rope(op, out),
        Op::Attention(op) => sequence::attention(op, target, out),
        Op::DecodeAttention(op) => sequence::decode_attention(op, target, out),
        Op::Sample(op) => sequence::sample(op, out),
        Op::GatherRows(op) => rows::gather(op, out),
        Op::ScatterRows(op) => rows::scatter(op, out),
        Op::Conv(op) => codec::conv(op, target, out),
        Op::DepthwiseConv(op) => codec::depthwise(op, out),
        Op::Conv1d(op) => clip::conv1d(op, out),
        Op::CopyColumns(op) => rows::copy_columns(op, out),
        Op::TimeStats(op) => clip::time_stats(op, out),
        Op::TimeSoftmax(op) => clip::time_softmax(op, out),
        Op::ChannelScale(op) => clip::channel_scale(op, out),
        Op::TileRow(op) => rows::tile_row(op, out),
        Op::NearestCode(op) => clip::nearest_code(op, out),
        Op::Copy(_) | Op::Zero(_) => {}
    }
}
