//! Qwen3-TTS-12Hz over the device's operations: text and a voice in, code frames from the Talker, 24 kHz
//! samples from the codec.

pub mod reference;
