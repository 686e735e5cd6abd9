//! Kernels and lowering, held against each other without a GPU: the compiler alone is needed.

mod compiled;
mod compiling;
mod fake;
mod lowering;
