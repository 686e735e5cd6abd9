//! Row-wise operations: norms, gates, embeddings, gathers, columns.

use laneway_device::op;

use crate::launch::Launch;

pub(super) fn rms_norm(op: &op::RmsNorm, out: &mut Vec<Launch>) {
    unimplemented!("rms_norm")
}

pub(super) fn layer_norm(op: &op::LayerNorm, out: &mut Vec<Launch>) {
    unimplemented!("layer_norm")
}

pub(super) fn silu_mul(op: &op::SiluMul, out: &mut Vec<Launch>) {
    unimplemented!("silu_mul")
}

pub(super) fn embed(op: &op::Embed, out: &mut Vec<Launch>) {
    unimplemented!("embed")
}

pub(super) fn gather(op: &op::GatherRows, out: &mut Vec<Launch>) {
    unimplemented!("gather")
}

pub(super) fn scatter(op: &op::ScatterRows, out: &mut Vec<Launch>) {
    unimplemented!("scatter")
}

pub(super) fn copy_columns(op: &op::CopyColumns, out: &mut Vec<Launch>) {
    unimplemented!("copy_columns")
}

pub(super) fn tile_row(op: &op::TileRow, out: &mut Vec<Launch>) {
    unimplemented!("tile_row")
}
