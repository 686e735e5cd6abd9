//! Nodes, walks, steps, resources, lanes and the scheduler: pure logic over the `Device` trait.
//!
//! Owns: the life of a request inside a worker and of every step (declare → admit → plan → forward → commit →
//! postprocess), the chain with its staged plan, the lanes with a launch thread each.
//!
//! Must not know: CUDA, any particular model, gRPC, files.

pub mod node;
