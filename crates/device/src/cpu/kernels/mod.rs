//! The arithmetic of the CPU device: one file for each family of operations.
//!
//! Kernels take safe slices (`crate::cpu::exec` makes them out of views) and are written once over
//! [`simd::Simd`], which is compiled for each level of the instruction set.

pub(crate) mod attention;
pub(crate) mod conv;
pub(crate) mod embed;
pub(crate) mod gemm;
mod math;
pub(crate) mod norm;
pub(crate) mod operands;
pub(crate) mod pack;
pub(crate) mod reference;
pub(crate) mod rows;
pub(crate) mod sample;
pub(crate) mod scratch;
pub(crate) mod simd;
#[cfg(test)]
mod testing;
