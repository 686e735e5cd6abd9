//! Causal convolutions with carried state.

use laneway_device::op;

use crate::launch::Launch;
use super::Target;

pub(super) fn conv(op: &op::Conv, target: Target, out: &mut Vec<Launch>) {
    unimplemented!("conv")
}

pub(super) fn depthwise(op: &op::DepthwiseConv, out: &mut Vec<Launch>) {
    unimplemented!("depthwise")
}
