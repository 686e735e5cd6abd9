//! Qwen3-TTS-12Hz over the device's operations.

pub mod reference;
