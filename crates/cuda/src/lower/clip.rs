//! One-shot operations of the reference encoders: once a request, so simple kernels.

use laneway_device::{DType, op};

use crate::launch::{Args, Launch};

/// Rows and outputs of a block of `conv1d_*`.
const CONV_TILE: usize = 64;
/// Channels of a block that reduces over time, and its threads.
const TIME_CHANNELS: usize = 32;
const TIME_THREADS: u32 = 1024;
/// Rows of a block of `nearest_code`.
const NEAREST_ROWS: usize = 4;

pub(super) fn conv1d(op: &op::Conv1d, out: &mut Vec<Launch>) {
    if op.rows_out == 0 || op.w.n == 0 {
        return;
    }
    out.push(Launch {
        kernel: match op.w.packed.dtype() {
            DType::Bf16 => "conv1d_bf16",
            DType::F16 => "conv1d_f16",
            _ => "conv1d_f32",
        },
        grid: [
            op.rows_out.div_ceil(CONV_TILE) as u32,
            op.w.n.div_ceil(CONV_TILE) as u32,
            1,
        ],
        block: 256,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(&op.x)
            .view(&op.w.packed.view())
            .optional(op.bias.as_ref())
            .optional(op.residual.as_ref())
            .view(&op.out)
            .int(op.rows_in)
            .int(op.rows_out)
            .int(op.c_in)
            .int(op.w.n)
            .int(op.taps)
            .int(op.stride)
            .int(op.dilation)
            .int(op.pad_left)
            .int(op.padding as usize)
            .int(op.input_activation as usize)
            .int(op.activation as usize),
    });
}

pub(super) fn time_stats(op: &op::TimeStats, out: &mut Vec<Launch>) {
    if op.channels == 0 {
        return;
    }
    out.push(Launch {
        kernel: "time_stats",
        grid: [op.channels.div_ceil(TIME_CHANNELS) as u32, 1, 1],
        block: TIME_THREADS,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(&op.x)
            .optional(op.weights.as_ref())
            .view(&op.mean)
            .optional(op.std.as_ref())
            .int(op.rows)
            .int(op.channels),
    });
}

pub(super) fn time_softmax(op: &op::TimeSoftmax, out: &mut Vec<Launch>) {
    if op.channels == 0 {
        return;
    }
    out.push(Launch {
        kernel: "time_softmax",
        grid: [op.channels.div_ceil(TIME_CHANNELS) as u32, 1, 1],
        block: TIME_THREADS,
        shared: 0,
        cluster: 1,
        args: Args::new().view(&op.x).int(op.rows).int(op.channels),
    });
}

pub(super) fn channel_scale(op: &op::ChannelScale, out: &mut Vec<Launch>) {
    if op.rows * op.channels == 0 {
        return;
    }
    out.push(Launch {
        kernel: "channel_scale",
        grid: [(op.rows * op.channels).div_ceil(256) as u32, 1, 1],
        block: 256,
        shared: 0,
        cluster: 1,
        args: Args::new()
            .view(&op.x)
            .view(&op.scale)
            .optional(op.add.as_ref())
            .view(&op.out)
            .int(op.rows)
            .int(op.channels),
    });
}

pub(super) fn nearest_code(op: &op::NearestCode, out: &mut Vec<Launch>) {
    if op.rows == 0 {
        return;
    }
    out.push(Launch {
        kernel: "nearest_code",
        grid: [op.rows.div_ceil(NEAREST_ROWS) as u32, 1, 1],
        block: 256,
        shared: (NEAREST_ROWS * op.width * 4) as u32,
        cluster: 1,
        args: Args::new()
            .view(&op.x)
            .view(&op.book)
            .view(&op.codes)
            .int(op.rows)
            .int(op.width)
            .int(op.entries)
            .int(op.code_stride)
            .int(op.code_offset)
            .int(op.codes.len),
    });
}
