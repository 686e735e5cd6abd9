//! 16-bit PCM WAV, whole or streamed.

use crate::s16le_from_f32;

/// Bytes of [`wav_header`].
pub const WAV_HEADER_BYTES: usize = 44;

/// Size of everything that follows a size field which a stream cannot know.
const UNKNOWN_SIZE: u32 = u32::MAX;

/// What the header says of its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WavLength {
    /// Bytes of sample data that follow.
    Whole(u32),
    /// Not known yet: both size fields are 0xFFFFFFFF.
    Streamed,
}

/// The header of 16-bit PCM.
pub fn wav_header(sample_rate: u32, channels: u16, length: WavLength) -> [u8; WAV_HEADER_BYTES] {
    let (riff_bytes, data_bytes) = match length {
        WavLength::Whole(data_bytes) => (data_bytes.saturating_add(36), data_bytes),
        WavLength::Streamed => (UNKNOWN_SIZE, UNKNOWN_SIZE),
    };
    let block_bytes = channels * 2;
    let mut header = [0; WAV_HEADER_BYTES];
    header[0..4].copy_from_slice(b"RIFF");
    header[4..8].copy_from_slice(&riff_bytes.to_le_bytes());
    header[8..16].copy_from_slice(b"WAVEfmt ");
    header[16..20].copy_from_slice(&16u32.to_le_bytes());
    header[20..22].copy_from_slice(&1u16.to_le_bytes());
    header[22..24].copy_from_slice(&channels.to_le_bytes());
    header[24..28].copy_from_slice(&sample_rate.to_le_bytes());
    header[28..32].copy_from_slice(&(sample_rate * u32::from(block_bytes)).to_le_bytes());
    header[32..34].copy_from_slice(&block_bytes.to_le_bytes());
    header[34..36].copy_from_slice(&16u16.to_le_bytes());
    header[36..40].copy_from_slice(b"data");
    header[40..44].copy_from_slice(&data_bytes.to_le_bytes());
    header
}

/// A whole mono file with exact sizes. `None` when it would pass WAV's limit of 4 GiB.
pub fn wav_file(samples: &[f32], sample_rate: u32) -> Option<Vec<u8>> {
    let data_bytes = u32::try_from(samples.len() * 2)
        .ok()
        .filter(|bytes| *bytes <= u32::MAX - 36)?;
    let mut file = wav_header(sample_rate, 1, WavLength::Whole(data_bytes)).to_vec();
    file.extend(s16le_from_f32(samples));
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    #[test]
    fn an_independent_reader_agrees_with_a_whole_file() {
        let samples: Vec<f32> = (0..1920).map(|i| (i as f32 * 0.05).sin() * 0.8).collect();
        let file = wav_file(&samples, 24_000).unwrap();
        assert_eq!(file.len(), WAV_HEADER_BYTES + samples.len() * 2);
        assert_eq!(
            u32::from_le_bytes(file[4..8].try_into().unwrap()) as usize,
            file.len() - 8
        );
        let mut reader = hound::WavReader::new(Cursor::new(file)).unwrap();
        let spec = reader.spec();
        assert_eq!(
            (spec.channels, spec.sample_rate, spec.bits_per_sample),
            (1, 24_000, 16)
        );
        assert_eq!(reader.duration(), 1920);
        let read: Vec<i16> = reader.samples().map(Result::unwrap).collect();
        let want: Vec<i16> = samples
            .iter()
            .map(|sample| crate::s16_from_f32(*sample))
            .collect();
        assert_eq!(read, want);
    }

    #[test]
    fn a_streamed_header_differs_in_its_sizes_only() {
        let streamed = wav_header(24_000, 1, WavLength::Streamed);
        let whole = wav_header(24_000, 1, WavLength::Whole(100));
        assert_eq!(streamed[4..8], [0xff; 4]);
        assert_eq!(streamed[40..44], [0xff; 4]);
        assert_eq!(whole[40..44], 100u32.to_le_bytes());
        assert_eq!(streamed[8..40], whole[8..40]);
    }

    #[test]
    fn no_samples_are_a_valid_file() {
        let file = wav_file(&[], 24_000).unwrap();
        assert_eq!(hound::WavReader::new(Cursor::new(file)).unwrap().duration(), 0);
    }
}
