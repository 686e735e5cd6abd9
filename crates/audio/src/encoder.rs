//! From a model's samples to the bytes that a listener asked for: speed, then rate, then format.

use crate::flac::Flac;
use crate::mp3::Mp3;
use crate::opus::Opus;
use crate::pcm::append_s16le;
use crate::resample::Resampler;
use crate::stretch::Stretcher;
use crate::{WavLength, wav_header};

/// What a stream of samples is written as. All of them can be played while they arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Raw 16-bit little-endian samples.
    PcmS16le,
    /// Raw 32-bit little-endian floats.
    PcmF32le,
    /// 16-bit WAV with sizes of 0xFFFFFFFF: a stream does not know them.
    Wav,
    /// 16-bit FLAC whose header leaves length and checksum open.
    Flac,
    /// Opus in Ogg.
    OggOpus,
    /// MPEG layer III without a tag in front.
    Mp3,
}

impl Encoding {
    /// It takes arithmetic, and is better not done where others wait.
    pub fn is_compressed(self) -> bool {
        matches!(self, Encoding::Flac | Encoding::OggOpus | Encoding::Mp3)
    }

    /// Whether its format can carry this rate, in Hz.
    pub fn carries(self, sample_rate: u32) -> bool {
        match self {
            Encoding::PcmS16le | Encoding::PcmF32le | Encoding::Wav | Encoding::Flac => sample_rate > 0,
            Encoding::OggOpus => crate::opus::RATES.contains(&sample_rate),
            Encoding::Mp3 => crate::mp3::RATES.contains(&sample_rate),
        }
    }
}

/// Why samples could not be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The format does not carry that rate.
    #[error("{encoding:?} does not carry {sample_rate} Hz")]
    Rate {
        /// The format.
        encoding: Encoding,
        /// The rate in Hz.
        sample_rate: u32,
    },
    /// The speed is out of [`crate::SPEED_RANGE`].
    #[error("a speed of {0} is not served")]
    Speed(String),
    /// A library refused what it should take: a fault of ours.
    #[error("{library}: {problem}")]
    Library {
        /// Which part.
        library: &'static str,
        /// What it said.
        problem: String,
    },
}

impl EncodeError {
    pub(crate) fn library(library: &'static str, problem: impl std::fmt::Display) -> Self {
        Self::Library {
            library,
            problem: problem.to_string(),
        }
    }
}

/// What a listener asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AudioSpec {
    /// Format of the bytes.
    pub encoding: Encoding,
    /// Hz of what the bytes decode to.
    pub sample_rate: u32,
    /// How much faster than the model spoke it is played, at the same pitch. 1 changes nothing.
    pub speed: f32,
}

/// Encodes one stream of one channel. How the stream is cut into chunks changes no byte.
#[derive(Debug)]
pub struct AudioEncoder {
    stretcher: Option<Stretcher>,
    resampler: Option<Resampler>,
    writer: Writer,
    n_samples: u64,
}

#[derive(Debug)]
enum Writer {
    S16,
    F32,
    Wav { sample_rate: u32, begun: bool },
    // The codecs' states are large.
    Flac(Box<Flac>),
    Opus(Box<Opus>),
    Mp3(Box<Mp3>),
}

impl AudioEncoder {
    /// For samples of `input_rate` Hz.
    ///
    /// # Errors
    /// The format does not carry the rate, or the speed is out of range.
    pub fn new(spec: AudioSpec, input_rate: u32) -> Result<Self, EncodeError> {
        let AudioSpec {
            encoding,
            sample_rate,
            speed,
        } = spec;
        if !encoding.carries(sample_rate) {
            return Err(EncodeError::Rate {
                encoding,
                sample_rate,
            });
        }
        let writer = match encoding {
            Encoding::PcmS16le => Writer::S16,
            Encoding::PcmF32le => Writer::F32,
            Encoding::Wav => Writer::Wav {
                sample_rate,
                begun: false,
            },
            Encoding::Flac => Writer::Flac(Box::new(Flac::new(sample_rate)?)),
            Encoding::OggOpus => Writer::Opus(Box::new(Opus::new(sample_rate)?)),
            Encoding::Mp3 => Writer::Mp3(Box::new(Mp3::new(sample_rate)?)),
        };
        let stretcher = (speed != 1.0).then(|| Stretcher::new(speed, input_rate));
        let resampler = (sample_rate != input_rate).then(|| Resampler::new(input_rate, sample_rate));
        Ok(Self {
            stretcher: stretcher.transpose()?,
            resampler: resampler.transpose()?,
            writer,
            n_samples: 0,
        })
    }

    /// Samples, at the rate asked for, that went into the bytes so far or wait in the format's own blocks.
    pub fn n_samples(&self) -> u64 {
        self.n_samples
    }

    /// Whether samples become [`Encoding::PcmF32le`] just as they are.
    pub fn passes_through(&self) -> bool {
        self.stretcher.is_none() && self.resampler.is_none() && matches!(self.writer, Writer::F32)
    }

    /// Count samples that were passed on without [`AudioEncoder::push`], where it [`AudioEncoder::passes_through`].
    pub fn passed(&mut self, n_samples: usize) {
        self.n_samples += n_samples as u64;
    }

    /// Take in a chunk, and append what there is to send of it by now to `out`: nothing, while a block fills.
    ///
    /// # Errors
    /// A library failed, which is a fault of ours.
    pub fn push(&mut self, samples: &[f32], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let mut stretched = Vec::new();
        let samples = match &mut self.stretcher {
            Some(stretcher) => {
                stretcher.push(samples, &mut stretched);
                &stretched
            }
            None => samples,
        };
        let mut resampled = Vec::new();
        let samples = match &mut self.resampler {
            Some(resampler) => {
                resampler.push(samples, &mut resampled)?;
                &resampled
            }
            None => samples,
        };
        self.write(samples, out)
    }

    /// As [`AudioEncoder::push`], of samples that lie as little-endian bytes. Where only their format changes they are
    /// read there and written once.
    ///
    /// # Errors
    /// As [`AudioEncoder::push`].
    pub fn push_le(&mut self, samples: &[[u8; 4]], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let floats = samples.iter().map(|sample| f32::from_le_bytes(*sample));
        let is_s16 = matches!(self.writer, Writer::S16 | Writer::Wav { .. });
        if !is_s16 || self.stretcher.is_some() || self.resampler.is_some() {
            return self.push(&floats.collect::<Vec<_>>(), out);
        }
        self.n_samples += samples.len() as u64;
        self.begin_s16(samples.len(), out);
        append_s16le(floats, out);
        Ok(())
    }

    /// The stream ends: append the rest. Bytes without any sample are still a file of their format.
    ///
    /// # Errors
    /// As [`AudioEncoder::push`].
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let mut rest = Vec::new();
        if let Some(stretcher) = &mut self.stretcher {
            stretcher.finish(&mut rest);
        }
        if let Some(resampler) = &mut self.resampler {
            let mut resampled = Vec::new();
            resampler.push(&rest, &mut resampled)?;
            resampler.finish(&mut resampled)?;
            rest = resampled;
        }
        self.write(&rest, out)?;
        match &mut self.writer {
            Writer::S16 | Writer::F32 | Writer::Wav { .. } => Ok(()),
            Writer::Flac(flac) => flac.finish(out),
            Writer::Opus(opus) => opus.finish(out),
            Writer::Mp3(mp3) => mp3.finish(out),
        }
    }

    /// Make room for so many samples, and write what goes before the first of a stream.
    fn begin_s16(&mut self, n_samples: usize, out: &mut Vec<u8>) {
        let header = match &mut self.writer {
            Writer::Wav { sample_rate, begun } => {
                let is_first = !std::mem::replace(begun, true);
                is_first.then(|| wav_header(*sample_rate, 1, WavLength::Streamed))
            }
            _ => None,
        };
        out.reserve_exact(n_samples * 2 + header.map_or(0, |header| header.len()));
        out.extend(header.into_iter().flatten());
    }

    fn write(&mut self, samples: &[f32], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.n_samples += samples.len() as u64;
        match &mut self.writer {
            Writer::S16 | Writer::Wav { .. } => {
                self.begin_s16(samples.len(), out);
                append_s16le(samples.iter().copied(), out);
            }
            Writer::F32 => out.extend(samples.iter().flat_map(|sample| sample.to_le_bytes())),
            Writer::Flac(flac) => flac.push(samples, out)?,
            Writer::Opus(opus) => opus.push(samples, out)?,
            Writer::Mp3(mp3) => mp3.push(samples, out)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
