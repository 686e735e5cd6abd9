//! MP3, frame by frame.

use rusty_mp3::{Mp3Encoder, Mp3EncoderConfig};

use crate::EncodeError;

/// Rates of MPEG 1, 2 and 2.5 layer III, in Hz.
pub(crate) const RATES: [u32; 9] = [
    8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000,
];

/// The lowest rate of MPEG 1.
const FIRST_MPEG_1_RATE: u32 = 32_000;

/// A mono MP3 stream.
pub(crate) struct Mp3 {
    encoder: Mp3Encoder,
    sample_rate: u32,
    /// The library's first packet was dropped: a tag of totals, which a stream does not know.
    tag_dropped: bool,
}

impl std::fmt::Debug for Mp3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mp3")
            .field("sample_rate", &self.sample_rate)
            .finish_non_exhaustive()
    }
}

impl Mp3 {
    pub(crate) fn new(sample_rate: u32) -> Result<Self, EncodeError> {
        // At the rates of MPEG 1 a constant bit rate would be held back until the end, to even out its frames.
        let config = if sample_rate < FIRST_MPEG_1_RATE {
            Mp3EncoderConfig {
                bitrate_kbps: 64,
                vbr_quality: None,
            }
        } else {
            Mp3EncoderConfig {
                bitrate_kbps: 96,
                vbr_quality: Some(96.0),
            }
        };
        let mut encoder = Mp3Encoder::new(config);
        // A stream without a sample is still told its format.
        encoder
            .push_pcm_f32(&[], 1, sample_rate)
            .map_err(|error| EncodeError::library("mp3", format!("{error:?}")))?;
        Ok(Self {
            encoder,
            sample_rate,
            tag_dropped: false,
        })
    }

    pub(crate) fn push(&mut self, samples: &[f32], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.encoder
            .push_pcm_f32(samples, 1, self.sample_rate)
            .map_err(|error| EncodeError::library("mp3", format!("{error:?}")))?;
        self.take(out);
        Ok(())
    }

    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.encoder.finish();
        self.take(out);
        Ok(())
    }

    fn take(&mut self, out: &mut Vec<u8>) {
        // It ends when more samples are needed, or with the stream.
        while let Ok(packet) = self.encoder.next_packet() {
            if std::mem::replace(&mut self.tag_dropped, true) {
                out.extend_from_slice(&packet);
            }
        }
    }
}
