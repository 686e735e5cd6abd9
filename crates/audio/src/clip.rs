//! Clips to clone, read with bounds: nothing is allocated for what a header merely claims.

use std::io::Cursor;

use hound::{SampleFormat, WavReader};

/// Largest magnitude of a sample, 12 dB over full scale: recordings in floats go over 1 by a little, while samples
/// that were never scaled to it would drive every sum behind them out of range.
pub const MAX_AMPLITUDE: f32 = 4.0;

/// A mono clip.
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    /// Within [`MAX_AMPLITUDE`]; channels are averaged.
    pub samples: Vec<f32>,
    /// Hz.
    pub sample_rate: u32,
}

/// What a clip may be.
#[derive(Debug, Clone, Copy)]
pub struct ClipLimits {
    /// Longest, in milliseconds.
    pub max_ms: u32,
}

/// Why a clip cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClipError {
    /// Not a WAV file that can be read.
    #[error("not a readable WAV file: {0}")]
    NotWav(String),
    /// A streamed header, which does not know its length.
    #[error("the WAV header is a streamed one without sizes; send a whole file")]
    Streamed,
    /// The header promises more than there is.
    #[error("the WAV header says {stated} samples and the file holds {present}; send a whole file")]
    Truncated {
        /// Samples by the header.
        stated: u64,
        /// Samples at most in the bytes.
        present: u64,
    },
    /// Too many channels.
    #[error("{0} channels; send mono or stereo")]
    Channels(u16),
    /// A rate that nobody records at.
    #[error("sample rate {0} Hz is not between 8000 and 192000")]
    SampleRate(u32),
    /// Nothing in it.
    #[error("the clip has no samples")]
    Empty,
    /// Longer than the limit.
    #[error("the clip is {ms} ms long; the limit is {max_ms} ms")]
    TooLong {
        /// Its length.
        ms: u64,
        /// The limit.
        max_ms: u32,
    },
    /// Raw bytes that are no samples.
    #[error("{0} bytes are not a whole number of 4-byte f32 samples")]
    NotSamples(usize),
    /// NaN or infinite.
    #[error("sample {0} is not a finite number")]
    NotFinite(usize),
    /// Over [`MAX_AMPLITUDE`].
    #[error("sample {index} is {value}, beyond {MAX_AMPLITUDE} times full scale; scale the clip to [-1, 1]")]
    TooLoud {
        /// The first one.
        index: usize,
        /// Its value.
        value: f32,
    },
}

/// Read a whole WAV file: 8 to 32 bit integers or 32 bit floats, mono or stereo.
///
/// # Errors
/// The bytes are no such file, or the clip breaks a limit.
pub fn read_wav(bytes: &[u8], limits: ClipLimits) -> Result<Clip, ClipError> {
    if bytes.get(4..8) == Some(&[0xff; 4]) {
        return Err(ClipError::Streamed);
    }
    let not_wav = |error: hound::Error| ClipError::NotWav(error.to_string());
    let mut reader = WavReader::new(Cursor::new(bytes)).map_err(not_wav)?;
    let spec = reader.spec();
    if !(1..=2).contains(&spec.channels) {
        return Err(ClipError::Channels(spec.channels));
    }
    let sample_bytes = u64::from(spec.bits_per_sample.div_ceil(8)).max(1);
    let stated = u64::from(reader.len());
    let present = bytes.len() as u64 / sample_bytes;
    if stated > present {
        return Err(ClipError::Truncated { stated, present });
    }
    check_length(u64::from(reader.duration()), spec.sample_rate, limits)?;

    let interleaved: Vec<f32> = match spec.sample_format {
        SampleFormat::Float => reader
            .samples::<f32>()
            .collect::<Result<_, _>>()
            .map_err(not_wav)?,
        SampleFormat::Int => {
            let full_scale = (1u64 << (spec.bits_per_sample - 1)) as f32;
            let scaled = |sample: Result<i32, hound::Error>| sample.map(|sample| sample as f32 / full_scale);
            reader
                .samples::<i32>()
                .map(scaled)
                .collect::<Result<_, _>>()
                .map_err(not_wav)?
        }
    };
    let samples = match spec.channels {
        1 => interleaved,
        _ => interleaved
            .as_chunks::<2>()
            .0
            .iter()
            .map(|[left, right]| (left + right) * 0.5)
            .collect(),
    };
    check_samples(&samples)?;
    Ok(Clip {
        samples,
        sample_rate: spec.sample_rate,
    })
}

/// Read raw little-endian f32 mono samples.
///
/// # Errors
/// The bytes are no samples, or the clip breaks a limit.
pub fn read_raw_f32(bytes: &[u8], sample_rate: u32, limits: ClipLimits) -> Result<Clip, ClipError> {
    let (samples, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(ClipError::NotSamples(bytes.len()));
    }
    check_length(samples.len() as u64, sample_rate, limits)?;
    let samples: Vec<f32> = samples.iter().map(|sample| f32::from_le_bytes(*sample)).collect();
    check_samples(&samples)?;
    Ok(Clip { samples, sample_rate })
}

fn check_length(n_samples: u64, sample_rate: u32, limits: ClipLimits) -> Result<(), ClipError> {
    if !(8_000..=192_000).contains(&sample_rate) {
        return Err(ClipError::SampleRate(sample_rate));
    }
    if n_samples == 0 {
        return Err(ClipError::Empty);
    }
    let ms = n_samples * 1000 / u64::from(sample_rate);
    if ms > u64::from(limits.max_ms) {
        return Err(ClipError::TooLong {
            ms,
            max_ms: limits.max_ms,
        });
    }
    Ok(())
}

/// Whether samples can be computed with: finite, and within [`MAX_AMPLITUDE`].
///
/// # Errors
/// The first sample that cannot.
pub fn check_samples(samples: &[f32]) -> Result<(), ClipError> {
    // A NaN is in no range.
    let outside = |sample: &f32| !(-MAX_AMPLITUDE..=MAX_AMPLITUDE).contains(sample);
    match samples.iter().position(outside) {
        None => Ok(()),
        Some(index) if samples[index].is_finite() => Err(ClipError::TooLoud {
            index,
            value: samples[index],
        }),
        Some(index) => Err(ClipError::NotFinite(index)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{WavLength, wav_file, wav_header};
    use hound::{WavSpec, WavWriter};
    use proptest::prelude::*;

    const LIMITS: ClipLimits = ClipLimits { max_ms: 1000 };

    fn written<S: hound::Sample + Copy>(spec: WavSpec, samples: &[S]) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        let mut writer = WavWriter::new(&mut bytes, spec).unwrap();
        for sample in samples {
            writer.write_sample(*sample).unwrap();
        }
        writer.finalize().unwrap();
        bytes.into_inner()
    }

    fn spec(channels: u16, bits_per_sample: u16, sample_format: SampleFormat) -> WavSpec {
        WavSpec {
            channels,
            sample_rate: 24_000,
            bits_per_sample,
            sample_format,
        }
    }

    #[test]
    fn every_depth_is_scaled_to_one() {
        for bits in [8u16, 16, 24, 32] {
            let half = 1i32 << (bits - 2);
            let bytes = written(spec(1, bits, SampleFormat::Int), &[half, -half, 0]);
            let clip = read_wav(&bytes, LIMITS).unwrap();
            assert_eq!(clip.samples, [0.5, -0.5, 0.0], "{bits} bits");
            assert_eq!(clip.sample_rate, 24_000);
        }
        let bytes = written(spec(1, 32, SampleFormat::Float), &[0.25f32, -2.0]);
        assert_eq!(read_wav(&bytes, LIMITS).unwrap().samples, [0.25, -2.0]);
    }

    #[test]
    fn stereo_is_averaged() {
        let bytes = written(spec(2, 32, SampleFormat::Float), &[1.0f32, 0.0, -0.5, -0.25]);
        assert_eq!(read_wav(&bytes, LIMITS).unwrap().samples, [0.5, -0.375]);
    }

    #[test]
    fn what_breaks_a_limit_is_refused_with_it() {
        let long = wav_file(&vec![0.0; 24_001 * 2], 24_000).unwrap();
        assert_eq!(
            read_wav(&long, LIMITS),
            Err(ClipError::TooLong {
                ms: 2000,
                max_ms: 1000
            })
        );
        assert_eq!(
            read_wav(&wav_file(&[], 24_000).unwrap(), LIMITS),
            Err(ClipError::Empty)
        );
        let surround = written(spec(3, 16, SampleFormat::Int), &[0i16; 6]);
        assert_eq!(read_wav(&surround, LIMITS), Err(ClipError::Channels(3)));
        let nan = written(spec(1, 32, SampleFormat::Float), &[0.0f32, f32::NAN]);
        assert_eq!(read_wav(&nan, LIMITS), Err(ClipError::NotFinite(1)));
        let shorts = written(spec(1, 32, SampleFormat::Float), &[4.0f32, -32_768.0]);
        let loud = ClipError::TooLoud {
            index: 1,
            value: -32_768.0,
        };
        assert_eq!(read_wav(&shorts, LIMITS), Err(loud));
        let infinite = [0.0, 0.0, f32::NEG_INFINITY].map(f32::to_le_bytes).concat();
        assert_eq!(
            read_raw_f32(&infinite, 24_000, LIMITS),
            Err(ClipError::NotFinite(2))
        );
        assert_eq!(
            read_raw_f32(&[0; 5], 24_000, LIMITS),
            Err(ClipError::NotSamples(5))
        );
        assert_eq!(
            read_raw_f32(&[0; 8], 400, LIMITS),
            Err(ClipError::SampleRate(400))
        );
    }

    #[test]
    fn a_header_that_promises_more_than_there_is_is_refused() {
        let mut streamed = wav_header(24_000, 1, WavLength::Streamed).to_vec();
        streamed.extend([0; 96]);
        assert_eq!(read_wav(&streamed, LIMITS), Err(ClipError::Streamed));
        let mut short = wav_file(&[0.5; 100], 24_000).unwrap();
        short.truncate(144);
        let truncated = ClipError::Truncated {
            stated: 100,
            present: 72,
        };
        assert_eq!(read_wav(&short, LIMITS), Err(truncated));
    }

    proptest! {
        #[test]
        fn damaged_files_never_panic(flips in proptest::collection::vec((0usize..108, any::<u8>()), 0..8), cut in 0usize..108) {
            let mut bytes = wav_file(&[0.1; 32], 24_000).unwrap();
            for (index, value) in flips {
                bytes[index] = value;
            }
            bytes.truncate(cut);
            let _ = read_wav(&bytes, LIMITS);
        }

        #[test]
        fn raw_samples_are_read_back(samples in proptest::collection::vec(-1.0f32..1.0, 1..500)) {
            let bytes: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
            prop_assert_eq!(read_raw_f32(&bytes, 24_000, LIMITS).unwrap().samples, samples);
        }
    }
}
