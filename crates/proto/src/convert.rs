//! Conversions between payload bytes and values, and labels of enums.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

use crate::v1;

/// Payload bytes that are not what their message says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Not a whole number of f32 samples.
    #[error("{0} bytes are not a whole number of 4-byte samples")]
    Samples(usize),
    /// Not a whole number of frames.
    #[error("{codes} codes are not a whole number of frames of {words_per_frame} words")]
    Frames {
        /// Codes in the message.
        codes: usize,
        /// Codes that a frame should have.
        words_per_frame: u32,
    },
}

/// Little-endian f32 samples.
pub fn samples_to_bytes(samples: &[f32]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(samples.len() * 4);
    for sample in samples {
        bytes.put_f32_le(*sample);
    }
    bytes.freeze()
}

/// Samples of little-endian f32 bytes.
///
/// # Errors
/// The length is not a multiple of 4.
pub fn samples_from_bytes(bytes: &[u8]) -> Result<Vec<f32>, PayloadError> {
    let (samples, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(PayloadError::Samples(bytes.len()));
    }
    Ok(samples.iter().map(|sample| f32::from_le_bytes(*sample)).collect())
}

/// A message of consecutive frames.
///
/// # Panics
/// The rows are not all `words_per_frame` long.
pub fn frames_from_rows(first_index: u32, words_per_frame: u32, rows: &[impl AsRef<[i32]>]) -> v1::Frames {
    let mut codes = Vec::with_capacity(rows.len() * words_per_frame as usize);
    for row in rows {
        let row = row.as_ref();
        assert_eq!(
            row.len(),
            words_per_frame as usize,
            "a frame has {words_per_frame} words"
        );
        codes.extend(row.iter().map(|code| code.cast_unsigned()));
    }
    v1::Frames {
        first_index,
        words_per_frame,
        codes,
    }
}

/// The frames of a message, each `words_per_frame` long, in order.
///
/// # Errors
/// The codes are not a whole number of frames, or the message has other frames than `words_per_frame` wide ones.
pub fn rows_from_frames(frames: &v1::Frames, words_per_frame: u32) -> Result<Vec<Vec<i32>>, PayloadError> {
    let width = words_per_frame as usize;
    if frames.words_per_frame != words_per_frame || width == 0 || !frames.codes.len().is_multiple_of(width) {
        return Err(PayloadError::Frames {
            codes: frames.codes.len(),
            words_per_frame,
        });
    }
    let row = |row: &[u32]| row.iter().map(|code| code.cast_signed()).collect();
    Ok(frames.codes.chunks_exact(width).map(row).collect())
}

impl v1::FinishReason {
    /// Label value in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "unspecified",
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Stopped => "stopped",
        }
    }
}

impl v1::WorkerState {
    /// Label value in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "unspecified",
            Self::Loading => "loading",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Failed => "failed",
        }
    }
}

impl v1::AudioFormat {
    /// Name in messages and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unspecified | Self::PcmS16le => "pcm_s16le",
            Self::PcmF32le => "pcm_f32le",
            Self::Wav => "wav",
            Self::Opus => "opus",
            Self::Flac => "flac",
            Self::Mp3 => "mp3",
        }
    }
}

/// Whole microseconds, as [`v1::Timings`] counts them.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_survive_the_wire() {
        let samples = [0.0, -0.0, 1.0, -1.0, f32::MIN_POSITIVE, 0.333_333_34];
        assert_eq!(samples_from_bytes(&samples_to_bytes(&samples)).unwrap(), samples);
        assert_eq!(samples_from_bytes(&[0; 7]), Err(PayloadError::Samples(7)));
    }

    #[test]
    fn frames_survive_the_wire() {
        let rows = vec![vec![1, 2, 2047], vec![0, 5, 6]];
        let message = frames_from_rows(9, 3, &rows);
        assert_eq!(message.first_index, 9);
        assert_eq!(rows_from_frames(&message, 3).unwrap(), rows);
        assert!(rows_from_frames(&message, 2).is_err());
        let ragged = v1::Frames {
            codes: vec![1, 2, 3, 4],
            ..message
        };
        assert_eq!(
            rows_from_frames(&ragged, 3),
            Err(PayloadError::Frames {
                codes: 4,
                words_per_frame: 3
            })
        );
    }

    #[test]
    fn durations_are_whole_microseconds() {
        assert_eq!(micros(Duration::from_nanos(1_999)), 1);
        assert_eq!(micros(Duration::MAX), u64::MAX);
    }
}
