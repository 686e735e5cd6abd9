//! Operations over sequences of positions, and the choice of their next token.

use laneway_device::op;

use crate::launch::Launch;

pub(super) fn rope_table(op: &op::RopeTable, out: &mut Vec<Launch>) {
    unimplemented!("rope_table")
}

pub(super) fn qkv_rope(op: &op::QkvRope, out: &mut Vec<Launch>) {
    unimplemented!("qkv_rope")
}

pub(super) fn attention(op: &op::Attention, out: &mut Vec<Launch>) {
    unimplemented!("attention")
}

pub(super) fn decode_attention(op: &op::DecodeAttention, out: &mut Vec<Launch>) {
    unimplemented!("decode_attention")
}

pub(super) fn sample(op: &op::Sample, out: &mut Vec<Launch>) {
    unimplemented!("sample")
}
