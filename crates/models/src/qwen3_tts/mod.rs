//! Qwen3-TTS-12Hz over the device's operations: text and a voice in, code frames from the Talker, 24 kHz
//! samples from the codec.

mod clip_ops;
pub mod codec;
pub mod codec_encoder;
mod decoder_stack;
mod load;
pub mod mel;
pub mod model;
pub mod nodes;
mod predictor;
pub mod prompt;
pub mod reference;
pub mod request;
pub mod speaker_encoder;
mod talker;
pub mod tokenizer;
pub mod verify;

#[cfg(test)]
mod test_device;
#[cfg(test)]
mod test_engine;
#[cfg(test)]
mod test_support;

pub use load::LoadError;
pub use model::{OpenError, Qwen3Tts};
