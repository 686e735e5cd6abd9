//! FLAC, frame by frame.

use flacenc::bitsink::ByteSink;
use flacenc::component::{BitRepr, Stream, StreamInfo};
use flacenc::error::{Verified, Verify as _};
use flacenc::source::{Fill as _, FrameBuf};

use crate::{EncodeError, s16_from_f32};

/// Samples of one frame: 27 ms at 24 kHz. The frames of the models that are served are multiples of it at every rate
/// that is served.
const BLOCK: usize = 640;

/// Fewest samples that the library makes a frame of.
const LEAST_BLOCK: usize = 32;

/// A 16-bit mono FLAC stream.
pub(crate) struct Flac {
    config: Verified<flacenc::config::Encoder>,
    info: StreamInfo,
    begun: bool,
    n_frames: usize,
    waiting: Vec<i32>,
}

impl std::fmt::Debug for Flac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flac")
            .field("n_frames", &self.n_frames)
            .finish_non_exhaustive()
    }
}

fn fault(problem: impl std::fmt::Debug) -> EncodeError {
    EncodeError::library("flac", format!("{problem:?}"))
}

impl Flac {
    pub(crate) fn new(sample_rate: u32) -> Result<Self, EncodeError> {
        let config = flacenc::config::Encoder::default()
            .into_verified()
            .map_err(|(_, error)| fault(error))?;
        let mut info = StreamInfo::new(sample_rate as usize, 1, 16).map_err(fault)?;
        info.set_block_sizes(BLOCK, BLOCK).map_err(fault)?;
        // Unknown, as are the number of samples and their checksum.
        info.set_frame_sizes(0, 0).map_err(fault)?;
        Ok(Self {
            config,
            info,
            begun: false,
            n_frames: 0,
            waiting: Vec::new(),
        })
    }

    pub(crate) fn push(&mut self, samples: &[f32], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        if !std::mem::replace(&mut self.begun, true) {
            write(&Stream::with_stream_info(self.info.clone()), out)?;
        }
        self.waiting
            .extend(samples.iter().map(|sample| i32::from(s16_from_f32(*sample))));
        let n_whole = self.waiting.len() / BLOCK * BLOCK;
        let waiting = std::mem::take(&mut self.waiting);
        for block in waiting[..n_whole].chunks_exact(BLOCK) {
            self.frame(block, out)?;
        }
        self.waiting.extend_from_slice(&waiting[n_whole..]);
        Ok(())
    }

    /// A last block that is too short for a frame ends in up to 31 samples of silence.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.push(&[], out)?;
        let mut block = std::mem::take(&mut self.waiting);
        if block.is_empty() {
            return Ok(());
        }
        block.resize(block.len().max(LEAST_BLOCK), 0);
        self.frame(&block, out)
    }

    fn frame(&mut self, block: &[i32], out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let mut buffer = FrameBuf::with_size(1, block.len()).map_err(fault)?;
        buffer.fill_interleaved(block).map_err(fault)?;
        let frame = flacenc::encode_fixed_size_frame(&self.config, &buffer, self.n_frames, &self.info)
            .map_err(fault)?;
        self.n_frames += 1;
        write(&frame, out)
    }
}

fn write(component: &impl BitRepr, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let mut sink = ByteSink::new();
    component
        .write(&mut sink)
        .map_err(|error| EncodeError::library("flac", error))?;
    out.extend_from_slice(sink.as_slice());
    Ok(())
}
