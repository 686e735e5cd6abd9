//! Qwen3-TTS-12Hz over the device's operations: text and a voice in, code frames from the Talker, 24 kHz
//! samples from the codec.

mod clip_ops;
pub mod codec;
pub mod codec_encoder;
mod load;
pub mod mel;
pub mod nodes;
pub mod prompt;
pub mod reference;
pub mod request;
pub mod speaker_encoder;
pub mod tokenizer;

pub use load::LoadError;
