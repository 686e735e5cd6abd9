//! Opus in Ogg, packet by packet.

use opus_pure::{Application, MAX_PACKET_BYTES, OggOpusWriter, OpusEncoder, OpusHead};

use crate::EncodeError;

/// Rates that the codec works at, in Hz.
pub(crate) const RATES: [u32; 5] = [8_000, 12_000, 16_000, 24_000, 48_000];

/// Packets of a second: the codec's usual 20 ms.
const PACKETS_PER_SECOND: u32 = 50;

/// The container counts in this rate whatever the codec works at.
const GRANULE_RATE: u64 = 48_000;

/// Bits per second: transparent for one voice.
const BITS_PER_SECOND: i32 = 32_000;

/// Search effort, of 10: below real time by two orders of magnitude.
const COMPLEXITY: i32 = 7;

/// A mono Ogg Opus stream. Its head tells a player to drop the codec's delay, and its last page where the sound ends.
pub(crate) struct Opus {
    encoder: OpusEncoder,
    /// Gone once the stream has ended.
    writer: Option<OggOpusWriter<Vec<u8>>>,
    packet_samples: usize,
    sample_rate: u64,
    pre_skip: u64,
    waiting: Vec<f32>,
    n_in: u64,
    /// Samples of the container's rate in the packets so far.
    granule: u64,
    packet: Vec<u8>,
}

impl std::fmt::Debug for Opus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opus")
            .field("sample_rate", &self.sample_rate)
            .field("n_in", &self.n_in)
            .finish_non_exhaustive()
    }
}

fn fault(problem: impl std::fmt::Display) -> EncodeError {
    EncodeError::library("opus", problem)
}

impl Opus {
    pub(crate) fn new(sample_rate: u32) -> Result<Self, EncodeError> {
        let mut encoder = OpusEncoder::new(sample_rate as i32, 1, Application::Audio).map_err(fault)?;
        encoder.bitrate_bps = BITS_PER_SECOND;
        encoder.complexity = COMPLEXITY;
        encoder.signal_type = Some(opus_pure::Signal::Voice);
        let head = OpusHead::for_encoder(&encoder, sample_rate);
        let pre_skip = head.pre_skip.into();
        let mut writer = OggOpusWriter::new(Vec::new(), head).map_err(fault)?;
        // A page for each packet: a listener does not wait for one to fill.
        writer.set_page_target(1);
        Ok(Self {
            encoder,
            writer: Some(writer),
            packet_samples: (sample_rate / PACKETS_PER_SECOND) as usize,
            sample_rate: sample_rate.into(),
            pre_skip,
            waiting: Vec::new(),
            n_in: 0,
            granule: 0,
            packet: vec![0; MAX_PACKET_BYTES],
        })
    }

    pub(crate) fn push(&mut self, samples: &[f32], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.n_in += samples.len() as u64;
        self.waiting.extend_from_slice(samples);
        let n_whole = self.waiting.len() / self.packet_samples * self.packet_samples;
        let waiting = std::mem::take(&mut self.waiting);
        for block in waiting[..n_whole].chunks_exact(self.packet_samples) {
            self.packet(block, u64::MAX)?;
        }
        self.waiting.extend_from_slice(&waiting[n_whole..]);
        if let Some(written) = self.writer.as_mut().and_then(|writer| writer.get_mut()) {
            out.append(written);
        }
        Ok(())
    }

    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        // What was said last leaves the codec its delay later.
        let ends = if self.n_in == 0 {
            0
        } else {
            (self.n_in * GRANULE_RATE).div_ceil(self.sample_rate) + self.pre_skip
        };
        let mut block = std::mem::take(&mut self.waiting);
        while self.granule < ends {
            block.resize(self.packet_samples, 0.0);
            self.packet(&block, ends)?;
            block.clear();
        }
        if let Some(writer) = self.writer.take() {
            out.append(&mut writer.finish().map_err(fault)?);
        }
        Ok(())
    }

    /// One packet; the stream ends at `ends` even where the packet goes on.
    fn packet(&mut self, block: &[f32], ends: u64) -> Result<(), EncodeError> {
        let Some(writer) = &mut self.writer else {
            return Err(fault("the stream has ended"));
        };
        let n_bytes = self
            .encoder
            .encode(block, block.len(), &mut self.packet)
            .map_err(fault)?;
        let duration = (GRANULE_RATE / u64::from(PACKETS_PER_SECOND)).min(ends - self.granule);
        self.granule += duration;
        writer
            .write_packet_with_duration(&self.packet[..n_bytes], duration as u32)
            .map_err(fault)
    }
}
