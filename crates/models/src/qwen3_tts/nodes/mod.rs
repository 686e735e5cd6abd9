//! The nodes of Qwen3-TTS: each runs as one batched step.

pub mod codec;
pub mod ref_encoder;
pub mod talker;

#[cfg(test)]
mod bucket_tests;
#[cfg(test)]
mod host_time;
