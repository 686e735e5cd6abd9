//! The speaker encoder (ECAPA-TDNN): a clip's mel spectrogram to the vector that stands for its voice.

use laneway_device::op::{Activation, ChannelScale, TileRow, TimeSoftmax, TimeStats};
use laneway_device::{Buffer, BufferSpec, DType, Device, Launcher, Place, Result, View};

use super::clip_ops::{ClipLayer, ClipOps, ConvExtras, ConvShape};
use super::load::{LoadError, Loader};
use crate::checkpoint::Weights;
use crate::checkpoint::config::SpeakerEncoderConfig;

/// The encoder with its weights and the workspace of one clip; clips on one stream follow each other.
#[derive(Debug)]
pub struct SpeakerEncoder {
    config: SpeakerEncoderConfig,
    first: ClipLayer,
    blocks: Vec<Block>,
    joined: ClipLayer,
    attention: ClipLayer,
    attention_out: ClipLayer,
    output: ClipLayer,
    work: Workspace,
    max_frames: usize,
}

/// A squeeze-excitation Res2Net block.
#[derive(Debug)]
struct Block {
    enter: ClipLayer,
    parts: Vec<ClipLayer>,
    leave: ClipLayer,
    squeeze: ClipLayer,
    excite: ClipLayer,
}

#[derive(Debug)]
pub(super) struct Workspace {
    /// Output of the first block, and later the input of the attention.
    first: Buffer,
    entered: Buffer,
    part_in: Buffer,
    part_out: Buffer,
    parts: Buffer,
    left: Buffer,
    mean: Buffer,
    squeezed: Buffer,
    excited: Buffer,
    /// Outputs of the blocks behind the first side by side: input of the layer that joins them.
    blocks: Buffer,
    block: Buffer,
    joined: Buffer,
    context: Buffer,
    attention: Buffer,
    scores: Buffer,
    pooled: Buffer,
    speaker: Buffer,
}

impl SpeakerEncoder {
    /// Load the encoder (tensors `speaker_encoder.*` of the main checkpoint) for clips of at most
    /// `max_frames` mel frames.
    ///
    /// # Errors
    /// A missing tensor, or no memory.
    pub fn load(
        device: &dyn Device,
        config: &SpeakerEncoderConfig,
        weights: &Weights,
        max_frames: usize,
    ) -> Result<Self, LoadError> {
        let load = Loader::new(device, weights, "speaker_encoder.");
        let c = config;
        let last = c.enc_channels.len() - 1;
        let joined = c.enc_channels[last];
        let conv = |name: &str, shape| ClipLayer::conv(&load, name, shape);
        let inner: usize = c.enc_channels[1..last].iter().sum();
        Ok(Self {
            first: conv(
                "blocks.0.conv",
                [c.enc_channels[0], c.mel_dim, c.enc_kernel_sizes[0]],
            )?,
            blocks: (1..last)
                .map(|block| Block::load(&load.under(&format!("blocks.{block}.")), c, block))
                .collect::<Result<_, _>>()?,
            joined: conv("mfa.conv", [joined, inner, c.enc_kernel_sizes[last]])?,
            attention: conv("asp.tdnn.conv", [c.enc_attention_channels, 3 * joined, 1])?,
            attention_out: conv("asp.conv", [joined, c.enc_attention_channels, 1])?,
            output: conv("fc", [c.enc_dim, 2 * joined, 1])?,
            work: Workspace::new(device, c, max_frames)?,
            config: c.clone(),
            max_frames,
        })
    }

    /// Width of a speaker vector.
    pub fn width(&self) -> usize {
        self.config.enc_dim
    }

    /// Queue the encoding of `mel` `[frames, mel_dim]`; hands out the vector `[width]`, valid until the next
    /// clip.
    ///
    /// # Errors
    /// Whatever the stream refuses.
    ///
    /// # Panics
    /// When the clip has more frames than the encoder was loaded for.
    pub fn encode(&self, launcher: &Launcher<'_>, mel: &View, frames: usize) -> Result<View> {
        assert!(
            frames <= self.max_frames,
            "a clip of {frames} frames; at most {}",
            self.max_frames
        );
        let (c, work, ops) = (&self.config, &self.work, ClipOps(launcher));
        let relu = || ConvExtras {
            activation: Activation::Relu,
            ..ConvExtras::default()
        };
        ops.conv(
            mel,
            frames,
            &self.first,
            ConvShape::same(c.enc_kernel_sizes[0], c.enc_dilations[0]),
            relu(),
            &work.first.view(),
        )?;
        let last = c.enc_channels.len() - 1;
        let inner: usize = c.enc_channels[1..last].iter().sum();
        let mut input = work.first.view();
        let mut column = 0;
        for (i, block) in self.blocks.iter().enumerate() {
            self.block(ops, block, i + 1, frames, &input)?;
            let width = c.enc_channels[i + 1];
            let blocks = work.blocks.view();
            ops.columns(
                (&work.block.view(), width, 0),
                None,
                (&blocks, inner, column),
                frames,
                width,
            )?;
            input = work.block.view();
            column += width;
        }
        ops.conv(
            &work.blocks.view(),
            frames,
            &self.joined,
            ConvShape::same(c.enc_kernel_sizes[last], c.enc_dilations[last]),
            relu(),
            &work.joined.view(),
        )?;
        self.pool(ops, frames)?;
        let speaker = work.speaker.view();
        ops.linear(&work.pooled.view(), 1, &self.output, Activation::None, &speaker)?;
        Ok(speaker)
    }

    /// Block `index` from `input` to `work.block`, which `input` may be.
    fn block(
        &self,
        ops: ClipOps<'_>,
        block: &Block,
        index: usize,
        frames: usize,
        input: &View,
    ) -> Result<()> {
        let (c, work) = (&self.config, &self.work);
        let width = c.enc_channels[index];
        let part = width / c.enc_res2net_scale;
        let (entered, parts) = (work.entered.view(), work.parts.view());
        ops.linear(input, frames, &block.enter, Activation::Relu, &entered)?;
        // Part 0 passes; every other part also sees what the one before it became.
        ops.columns((&entered, width, 0), None, (&parts, width, 0), frames, part)?;
        let (part_in, part_out) = (work.part_in.view(), work.part_out.view());
        for (i, conv) in block.parts.iter().enumerate() {
            let before = (i > 0).then(|| (part_out.clone(), part, 0));
            ops.columns(
                (&entered, width, (i + 1) * part),
                before,
                (&part_in, part, 0),
                frames,
                part,
            )?;
            ops.conv(
                &part_in,
                frames,
                conv,
                ConvShape::same(c.enc_kernel_sizes[index], c.enc_dilations[index]),
                ConvExtras {
                    activation: Activation::Relu,
                    ..ConvExtras::default()
                },
                &part_out,
            )?;
            ops.columns(
                (&part_out, part, 0),
                None,
                (&parts, width, (i + 1) * part),
                frames,
                part,
            )?;
        }
        let left = work.left.view();
        ops.linear(&parts, frames, &block.leave, Activation::Relu, &left)?;
        let (mean, squeezed, excited) = (work.mean.view(), work.squeezed.view(), work.excited.view());
        ops.0.run(TimeStats {
            x: left.slice(0, frames * width),
            rows: frames,
            channels: width,
            weights: None,
            mean: mean.slice(0, width),
            std: None,
        })?;
        ops.linear(&mean, 1, &block.squeeze, Activation::Relu, &squeezed)?;
        ops.linear(&squeezed, 1, &block.excite, Activation::Sigmoid, &excited)?;
        ops.0.run(ChannelScale {
            x: left.slice(0, frames * width),
            scale: excited.slice(0, width),
            add: Some(input.slice(0, frames * width)),
            rows: frames,
            channels: width,
            out: work.block.slice(0, frames * width),
        })
    }

    /// Attentive statistics of `work.joined` into `work.pooled`: mean, then standard deviation.
    fn pool(&self, ops: ClipOps<'_>, frames: usize) -> Result<()> {
        let work = &self.work;
        let width = self.joined.w.n;
        let joined = work.joined.slice(0, frames * width);
        let pooled = work.pooled.view();
        let stats = |weights: Option<View>| TimeStats {
            x: joined.clone(),
            rows: frames,
            channels: width,
            weights,
            mean: pooled.slice(0, width),
            std: Some(pooled.slice(width, width)),
        };
        ops.0.run(stats(None))?;
        let context = work.context.slice(0, frames * 3 * width);
        ops.columns((&joined, width, 0), None, (&context, 3 * width, 0), frames, width)?;
        ops.0.run(TileRow {
            src: pooled.clone(),
            rows: frames,
            columns: 2 * width,
            dst: context.clone(),
            dst_stride: 3 * width,
            dst_first: width,
        })?;
        let (attention, scores) = (work.attention.view(), work.scores.slice(0, frames * width));
        ops.linear(
            &context,
            frames,
            &self.attention,
            Activation::ReluTanh,
            &attention,
        )?;
        ops.linear(&attention, frames, &self.attention_out, Activation::None, &scores)?;
        ops.0.run(TimeSoftmax {
            x: scores.clone(),
            rows: frames,
            channels: width,
        })?;
        ops.0.run(stats(Some(scores)))
    }
}

impl Block {
    fn load(load: &Loader<'_>, c: &SpeakerEncoderConfig, block: usize) -> Result<Self, LoadError> {
        let (input, width, se) = (
            c.enc_channels[block - 1],
            c.enc_channels[block],
            c.enc_se_channels,
        );
        let part = width / c.enc_res2net_scale;
        let conv = |name: &str, shape| ClipLayer::conv(load, name, shape);
        Ok(Self {
            enter: conv("tdnn1.conv", [width, input, 1])?,
            parts: (0..c.enc_res2net_scale - 1)
                .map(|i| {
                    conv(
                        &format!("res2net_block.blocks.{i}.conv"),
                        [part, part, c.enc_kernel_sizes[block]],
                    )
                })
                .collect::<Result<_, _>>()?,
            leave: conv("tdnn2.conv", [width, width, 1])?,
            squeeze: conv("se_block.conv1", [se, width, 1])?,
            excite: conv("se_block.conv2", [width, se, 1])?,
        })
    }
}

impl Workspace {
    pub(super) fn new(device: &dyn Device, c: &SpeakerEncoderConfig, frames: usize) -> Result<Self> {
        let buffer = |name: &str, len: usize| {
            device.alloc(BufferSpec {
                name: format!("speaker_encoder_{name}"),
                dtype: DType::F32,
                len,
                place: Place::Device,
            })
        };
        let last = c.enc_channels.len() - 1;
        let joined = c.enc_channels[last];
        let blocks = &c.enc_channels[1..last];
        let width = blocks.iter().copied().max().unwrap_or(0);
        let part = width / c.enc_res2net_scale;
        Ok(Self {
            first: buffer("first", frames * c.enc_channels[0])?,
            entered: buffer("entered", frames * width)?,
            part_in: buffer("part_in", frames * part)?,
            part_out: buffer("part_out", frames * part)?,
            parts: buffer("parts", frames * width)?,
            left: buffer("left", frames * width)?,
            mean: buffer("mean", width)?,
            squeezed: buffer("squeezed", c.enc_se_channels)?,
            excited: buffer("excited", width)?,
            blocks: buffer("blocks", frames * blocks.iter().sum::<usize>())?,
            block: buffer("block", frames * width)?,
            joined: buffer("joined", frames * joined)?,
            context: buffer("context", frames * 3 * joined)?,
            attention: buffer("attention", frames * c.enc_attention_channels)?,
            scores: buffer("scores", frames * joined)?,
            pooled: buffer("pooled", 2 * joined)?,
            speaker: buffer("speaker", c.enc_dim)?,
        })
    }
}

#[cfg(test)]
mod tests;
