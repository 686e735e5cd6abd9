//! The models that Laneway serves, written once over `laneway_device`'s operations.
//!
//! Must not know: the wire, the services, CUDA.

pub mod qwen3_tts;
