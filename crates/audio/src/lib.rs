//! Sample formats, rates and containers: what a listener is sent, and what a clip to clone is read from.
//!
//! Everything that a listener is sent goes through an [`AudioEncoder`], which takes a stream chunk by chunk. Pure
//! functions and state machines over samples and bytes. Must not know: gRPC, models, devices.

mod clip;
mod encoder;
mod flac;
mod mp3;
mod opus;
mod pcm;
mod resample;
mod stretch;
#[cfg(test)]
mod testing;
mod wav;

pub use clip::{Clip, ClipError, ClipLimits, MAX_AMPLITUDE, check_samples, read_raw_f32, read_wav};
pub use encoder::{AudioEncoder, AudioSpec, EncodeError, Encoding};
pub use pcm::{s16_from_f32, s16le_from_f32};
pub use resample::Resampler;
pub use stretch::{SPEED_RANGE, Stretcher};
pub use wav::{WAV_HEADER_BYTES, WavLength, wav_file, wav_header};
