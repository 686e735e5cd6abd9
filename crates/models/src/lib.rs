//! The models that Laneway serves, written once over `laneway_device`'s operations.
//!
//! Owns: reading checkpoints ([`checkpoint`]) and each model's nodes. Must not know: the wire, the services, CUDA.

pub mod checkpoint;
pub mod qwen3_tts;
