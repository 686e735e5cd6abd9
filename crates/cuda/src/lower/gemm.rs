//! Products with a weight matrix.

use laneway_device::op;

use crate::launch::Launch;
use super::Target;

pub(super) fn gemm(op: &op::Gemm, target: Target, out: &mut Vec<Launch>) {
    unimplemented!("gemm")
}
