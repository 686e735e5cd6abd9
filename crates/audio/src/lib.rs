//! Sample formats and containers: what a listener is sent, and what a clip to clone is read from.
//!
//! Pure functions over bytes. Must not know: gRPC, models, devices.

mod clip;
mod pcm;
mod wav;

pub use clip::{Clip, ClipError, ClipLimits, MAX_AMPLITUDE, check_samples, read_raw_f32, read_wav};
pub use pcm::{s16_from_f32, s16le_from_f32};
pub use wav::{WAV_HEADER_BYTES, WavLength, wav_file, wav_header};
