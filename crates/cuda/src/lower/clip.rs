//! One-shot operations of the reference encoders.

use laneway_device::op;

use crate::launch::Launch;

pub(super) fn conv1d(op: &op::Conv1d, out: &mut Vec<Launch>) {
    unimplemented!("conv1d")
}

pub(super) fn time_stats(op: &op::TimeStats, out: &mut Vec<Launch>) {
    unimplemented!("time_stats")
}

pub(super) fn time_softmax(op: &op::TimeSoftmax, out: &mut Vec<Launch>) {
    unimplemented!("time_softmax")
}

pub(super) fn channel_scale(op: &op::ChannelScale, out: &mut Vec<Launch>) {
    unimplemented!("channel_scale")
}

pub(super) fn nearest_code(op: &op::NearestCode, out: &mut Vec<Launch>) {
    unimplemented!("nearest_code")
}
