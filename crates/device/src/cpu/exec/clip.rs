//! Operations over time rows: streamed convolutions, and the one-shot ones of the reference encoders.

use super::{input, optional, residual, weights};
use crate::cpu::kernels::conv::{Conv, DepthwiseConv, Snake, Window, conv, depthwise_conv};
use crate::cpu::kernels::operands::Operands;
use crate::cpu::kernels::reference::{ChannelScale, Conv1d, NearestCode, TimeSoftmax, TimeStats, conv1d};
use crate::cpu::kernels::scratch::{Scratch, with_scratch};
use crate::cpu::kernels::simd::{self, Level};
use crate::op;

/// Read the step's windows into `scratch`; those of no frames are left out.
pub(super) fn read_windows(
    o: &mut Operands,
    op: &op::Windows,
    rows: usize,
    state: Option<&op::StateSlice>,
    state_len: usize,
    scratch: &mut Scratch,
) -> Result<(), String> {
    let windows: &[i32] = o.read(&op.windows, op.count * 3)?;
    scratch.windows.clear();
    for (i, window) in windows.as_chunks::<3>().0.iter().enumerate() {
        let [first, frames, slot] = *window;
        if frames == 0 {
            continue;
        }
        let bad = || format!("window {i} (first {first}, frames {frames}, slot {slot}) leaves its operands");
        let row = |frames: i32| usize::try_from(frames).map(|f| f * op.rate).map_err(|_| bad());
        let (first_row, count) = (row(first)?, row(frames)?);
        let state = match state {
            Some(state) => {
                let slot = usize::try_from(slot).map_err(|_| bad())?;
                let start = slot * state.slot_stride + state.offset;
                if start + state_len > state.pool.len {
                    return Err(bad());
                }
                start
            }
            None => 0,
        };
        if first_row + count > rows {
            return Err(bad());
        }
        scratch.windows.push(Window {
            first: first_row,
            rows: count,
            state,
        });
    }
    Ok(())
}

pub(super) fn causal_conv(op: &op::Conv) -> Result<(), String> {
    if op.pointwise.is_some() {
        let (first, second) = op.parts();
        causal_conv(&first)?;
        return second.as_ref().map_or(Ok(()), causal_conv);
    }
    let (c_in, c_out, rows) = (op.c_in, op.w.n, op.rows);
    if op.w.k != op.taps * c_in || (op.taps > 1) != op.state.is_some() {
        return Err(format!(
            "weight [{c_out}, {}] against {} taps of {c_in} channels, state {:?}",
            op.w.k, op.taps, op.state
        ));
    }
    let past = (op.taps - 1) * op.dilation * c_in;
    let mut o = Operands::default();
    let packed = op.w.packed.view();
    with_scratch(|scratch| {
        read_windows(&mut o, &op.windows, rows, op.state.as_ref(), past, scratch)?;
        let snake = match &op.snake {
            Some(snake) => Some(Snake {
                alpha: o.read(&snake.alpha, c_in)?,
                inv_beta: o.read(&snake.inv_beta, c_in)?,
            }),
            None => None,
        };
        let conv_op = Conv {
            out: o.write(&op.out, rows * c_out)?,
            x: o.read(&op.x, rows * c_in)?,
            w: weights(&mut o, &op.w, &packed)?,
            bias: optional(&mut o, op.bias.as_ref(), c_out)?,
            c_in,
            c_out,
            taps: op.taps,
            dilation: op.dilation,
            snake,
            state: match &op.state {
                Some(state) => o.write(&state.pool, state.pool.len)?,
                None => &mut [],
            },
            residual: residual(&mut o, op.residual.as_ref(), &op.out, rows * c_out)?,
            clamp: op.clamp,
        };
        conv(Level::best(), conv_op, scratch);
        Ok(())
    })
}

pub(super) fn causal_depthwise_conv(op: &op::DepthwiseConv) -> Result<(), String> {
    let (channels, rows) = (op.channels, op.rows);
    let past = (op.taps - 1) * channels;
    let mut o = Operands::default();
    with_scratch(|scratch| {
        read_windows(&mut o, &op.windows, rows, Some(&op.state), past, scratch)?;
        let conv_op = DepthwiseConv {
            out: o.write(&op.out, rows * channels)?,
            x: o.read(&op.x, rows * channels)?,
            w: o.read(&op.w, op.taps * channels)?,
            bias: o.read(&op.bias, channels)?,
            channels,
            taps: op.taps,
            state: o.write(&op.state.pool, op.state.pool.len)?,
        };
        depthwise_conv(Level::best(), conv_op, scratch);
        Ok(())
    })
}

pub(super) fn one_shot_conv(op: &op::Conv1d) -> Result<(), String> {
    let (c_out, len) = (op.w.n, op.rows_out * op.w.n);
    if op.w.k != op.taps * op.c_in {
        return Err(format!(
            "weight [{c_out}, {}] against {} taps of {} channels",
            op.w.k, op.taps, op.c_in
        ));
    }
    let mut o = Operands::default();
    let packed = op.w.packed.view();
    let conv_op = Conv1d {
        out: o.write(&op.out, len)?,
        x: o.read(&op.x, op.rows_in * op.c_in)?,
        rows_in: op.rows_in,
        rows_out: op.rows_out,
        w: weights(&mut o, &op.w, &packed)?,
        bias: optional(&mut o, op.bias.as_ref(), c_out)?,
        c_in: op.c_in,
        c_out,
        taps: op.taps,
        stride: op.stride,
        dilation: op.dilation,
        pad_left: op.pad_left,
        padding: op.padding,
        input_activation: op.input_activation,
        activation: op.activation,
        residual: residual(&mut o, op.residual.as_ref(), &op.out, len)?,
    };
    with_scratch(|scratch| conv1d(Level::best(), conv_op, scratch))
}

pub(super) fn time_stats(op: &op::TimeStats) -> Result<(), String> {
    let (mut o, len) = (Operands::default(), op.rows * op.channels);
    simd::run(TimeStats {
        mean: o.write(&op.mean, op.channels)?,
        std: match &op.std {
            Some(std) => Some(o.write(std, op.channels)?),
            None => None,
        },
        x: o.read(&op.x, len)?,
        weights: optional(&mut o, op.weights.as_ref(), len)?,
    });
    Ok(())
}

pub(super) fn time_softmax(op: &op::TimeSoftmax) -> Result<(), String> {
    simd::run(TimeSoftmax {
        x: Operands::default().write(&op.x, op.rows * op.channels)?,
        channels: op.channels,
    });
    Ok(())
}

pub(super) fn channel_scale(op: &op::ChannelScale) -> Result<(), String> {
    let (mut o, len) = (Operands::default(), op.rows * op.channels);
    simd::run(ChannelScale {
        out: o.write(&op.out, len)?,
        x: input(&mut o, &op.x, &op.out, len)?,
        scale: o.read(&op.scale, op.channels)?,
        add: residual(&mut o, op.add.as_ref(), &op.out, len)?,
    });
    Ok(())
}

pub(super) fn nearest_code(op: &op::NearestCode) -> Result<(), String> {
    let mut o = Operands::default();
    let x: &mut [f32] = o.write(&op.x, op.rows * op.width)?;
    let book: &[f32] = o.read(&op.book, op.entries * op.width)?;
    let codes: &mut [i32] = o.write(&op.codes, op.codes.len)?;
    for (r, x) in x.chunks_exact_mut(op.width).enumerate() {
        let code = simd::run(NearestCode { x, book });
        *codes
            .get_mut(r * op.code_stride + op.code_offset)
            .ok_or_else(|| format!("row {r}: its code leaves {:?}", op.codes))? = code as i32;
    }
    Ok(())
}
