//! Nodes, walks, steps, resources, lanes and the scheduler: pure logic over the `Device` trait.
//!
//! Owns: the life of a request inside a worker and of every step (declare → admit → plan → forward → commit →
//! postprocess), the chain with its staged plan, the lanes with a launch thread each.
//!
//! Must not know: CUDA, any particular model, gRPC, files.

mod auto;
mod config;
mod control;
mod core;
mod edge;
mod engine;
mod event;
mod handle;
mod lane;
pub mod node;
mod output;
mod pace;
mod phase;
mod request;
mod resource;
mod samples;
mod scheduler;
mod stats;
mod step;
mod topology;

pub use config::{AutoConfig, AutoPolicy, EngineConfig, LaneConfig, Limits, NodeConfig, ResourceConfig};
pub use control::Canceller;
pub use engine::{Engine, StartError};
pub use handle::{EngineHandle, Health, PushError, Submission, SubmitError};
pub use output::{Failure, FailureKind, OutputEvent, RequestStats, RequestStream};
pub use phase::{Histogram, LanePhases, Phase};
pub use samples::{SamplePool, Samples};
pub use stats::{AutoStats, EngineStats, FlipCount, PoolStats, STEP_MS_BUCKETS, WalkStats};
