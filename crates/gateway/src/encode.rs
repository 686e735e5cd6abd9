//! Samples as the caller asked for them.

use bytes::{BufMut, Bytes, BytesMut};
use laneway_audio::{WAV_HEADER_BYTES, WavLength, s16le_from_f32, wav_header};

/// A format that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    PcmS16le,
    PcmF32le,
    Wav,
}

/// Encodes one stream.
#[derive(Debug)]
pub(crate) struct Encoder {
    format: Format,
    sample_rate: u32,
    /// The container's header was sent.
    begun: bool,
}

impl Encoder {
    pub(crate) fn new(format: Format, sample_rate: u32) -> Self {
        Self {
            format,
            sample_rate,
            begun: false,
        }
    }

    /// The next chunk. `payload` is `samples` as they came: f32 goes through uncopied.
    pub(crate) fn chunk(&mut self, samples: &[f32], payload: Bytes) -> Bytes {
        match self.format {
            Format::PcmF32le => payload,
            Format::PcmS16le => s16le_from_f32(samples).into(),
            Format::Wav => {
                let mut bytes = BytesMut::with_capacity(WAV_HEADER_BYTES + samples.len() * 2);
                bytes.put(self.header());
                bytes.put_slice(&s16le_from_f32(samples));
                bytes.freeze()
            }
        }
    }

    /// What a stream without any audio still has to carry to be a file: the header of a WAV.
    pub(crate) fn header(&mut self) -> Bytes {
        let wanted = self.format == Format::Wav && !std::mem::replace(&mut self.begun, true);
        if wanted {
            Bytes::copy_from_slice(&wav_header(self.sample_rate, 1, WavLength::Streamed))
        } else {
            Bytes::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use laneway_proto::samples_to_bytes;

    fn encoded(format: Format) -> Vec<Bytes> {
        let mut encoder = Encoder::new(format, 24_000);
        [[0.0, 1.0], [-1.0, 0.5]]
            .iter()
            .map(|samples| encoder.chunk(samples, samples_to_bytes(samples)))
            .collect()
    }

    #[test]
    fn bytes_are_in_the_format_asked_for() {
        assert_eq!(encoded(Format::PcmS16le)[0][..], [0, 0, 0xff, 0x7f]);
        assert_eq!(encoded(Format::PcmF32le)[1], samples_to_bytes(&[-1.0, 0.5]));
        let wav = encoded(Format::Wav);
        assert_eq!(wav[0][..44], wav_header(24_000, 1, WavLength::Streamed));
        assert_eq!(wav[0][44..], encoded(Format::PcmS16le)[0][..]);
        assert_eq!(wav[1], encoded(Format::PcmS16le)[1], "the header is sent once");
    }

    #[test]
    fn only_a_wav_needs_a_header() {
        assert_eq!(Encoder::new(Format::Wav, 24_000).header().len(), WAV_HEADER_BYTES);
        assert!(Encoder::new(Format::PcmF32le, 24_000).header().is_empty());
    }
}
