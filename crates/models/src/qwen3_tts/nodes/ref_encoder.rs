//! The RefEncoder node: a clone request's clip in, its [`Reference`] out. One clip a step.

use std::sync::Arc;

use laneway_device::op::Copy;
use laneway_device::{Buffer, BufferSpec, DType, Device, Launcher, Place, Touches};
use laneway_engine::node::{
    Node, NodeContext, Payload, PlanError, RowError, RowOutcome, RowState, Stage, StepRow, WalkId,
};
use laneway_models_decl::qwen3_tts::{MAX_REFERENCE_SECONDS, REF_ENCODER};

use crate::checkpoint::Checkpoint;
use crate::qwen3_tts::codec_encoder::CodecEncoder;
use crate::qwen3_tts::load::LoadError;
use crate::qwen3_tts::mel::{MelSpectrogram, mel_frames};
use crate::qwen3_tts::reference::{CODES_PER_FRAME, Reference, ReferenceClip};
use crate::qwen3_tts::speaker_encoder::SpeakerEncoder;

/// Shortest clip: below it there is too little voice, and the encoder's mirrored edges need 0.02 s anyway.
const MIN_SAMPLES: usize = ReferenceClip::SAMPLE_RATE_HZ as usize * 3 / 10;
/// Longest clip; it bounds the workspace.
const MAX_SAMPLES: usize = (ReferenceClip::SAMPLE_RATE_HZ * MAX_REFERENCE_SECONDS) as usize;
/// A clip whose root mean square is below -60 dB of full scale holds no voice.
const SILENT_RMS: f64 = 1e-3;

/// Stages of a node's plan: the chain has a step planned while one runs.
const STAGES: usize = 2;

/// Gives a payload's clip; the node does not know what else is in a payload.
pub type ClipOf = fn(&Payload) -> Option<&ReferenceClip>;

/// Why the node cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum RefEncoderError {
    /// Weights or workspace.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The checkpoint cannot clone.
    #[error(
        "node {REF_ENCODER}: config.json has no speaker_encoder_config; only Base checkpoints clone voices"
    )]
    NoSpeakerEncoder,
}

/// The node.
#[derive(Debug)]
pub struct RefEncoderNode {
    device: Arc<dyn Device>,
    clip_of: ClipOf,
    mel: MelSpectrogram,
    speaker: SpeakerEncoder,
    codec: CodecEncoder,
    mel_bands: usize,
    mel_input: Buffer,
    wav_input: Buffer,
    stages: [StageBuffers; STAGES],
}

/// Pinned staging of one clip in each direction, and what was planned.
#[derive(Debug)]
struct StageBuffers {
    mel: Buffer,
    wav: Buffer,
    speaker: Buffer,
    codes: Buffer,
    planned: Vec<Planned>,
}

#[derive(Debug, Clone, Copy)]
struct Planned {
    samples: usize,
    in_context: bool,
}

impl RefEncoderNode {
    /// Load both encoders.
    ///
    /// # Errors
    /// A checkpoint that cannot clone, a missing tensor, or no memory.
    pub fn build(
        checkpoint: &Checkpoint,
        context: &NodeContext,
        clip_of: ClipOf,
    ) -> Result<Self, RefEncoderError> {
        let config = checkpoint
            .configs
            .model
            .speaker_encoder_config
            .as_ref()
            .ok_or(RefEncoderError::NoSpeakerEncoder)?;
        let device = context.device.clone();
        let frames = mel_frames(MAX_SAMPLES);
        let speaker = SpeakerEncoder::load(&*device, config, &checkpoint.main, frames)?;
        let codec = CodecEncoder::load(
            &*device,
            &checkpoint.configs.speech,
            &checkpoint.speech,
            MAX_SAMPLES,
        )?;
        let buffer = |name: &str, dtype, len, place| {
            device
                .alloc(BufferSpec {
                    name: format!("ref_encoder_{name}"),
                    dtype,
                    len,
                    place,
                })
                .map_err(LoadError::from)
        };
        let mel_len = frames * config.mel_dim;
        let stage = || -> Result<StageBuffers, LoadError> {
            Ok(StageBuffers {
                mel: buffer("staged_mel", DType::F32, mel_len, Place::Pinned)?,
                wav: buffer("staged_wav", DType::F32, MAX_SAMPLES, Place::Pinned)?,
                speaker: buffer("staged_speaker", DType::F32, speaker.width(), Place::Pinned)?,
                codes: buffer(
                    "staged_codes",
                    DType::I32,
                    codec.frames(MAX_SAMPLES) * CODES_PER_FRAME,
                    Place::Pinned,
                )?,
                planned: Vec::new(),
            })
        };
        Ok(Self {
            clip_of,
            mel: MelSpectrogram::new(config.mel_dim),
            mel_bands: config.mel_dim,
            mel_input: buffer("mel", DType::F32, mel_len, Place::Device)?,
            wav_input: buffer("wav", DType::F32, MAX_SAMPLES, Place::Device)?,
            stages: [stage()?, stage()?],
            speaker,
            codec,
            device,
        })
    }

    fn stage(&mut self, stage: Stage, clip: &ReferenceClip) -> laneway_device::Result<()> {
        let staged = &mut self.stages[stage.0];
        let mel = self.mel.compute(&clip.samples);
        self.device
            .host_write(&staged.mel.slice(0, mel.len()), bytemuck::cast_slice(&mel))?;
        if clip.in_context {
            self.device.host_write(
                &staged.wav.slice(0, clip.samples.len()),
                bytemuck::cast_slice(&clip.samples),
            )?;
        }
        staged.planned.push(Planned {
            samples: clip.samples.len(),
            in_context: clip.in_context,
        });
        Ok(())
    }

    fn encode(&self, stage: Stage, planned: Planned, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        let staged = &self.stages[stage.0];
        let frames = mel_frames(planned.samples);
        let mel = self.mel_input.slice(0, frames * self.mel_bands);
        launcher.run(Copy {
            src: staged.mel.slice(0, mel.len),
            dst: mel.clone(),
        })?;
        let speaker = self.speaker.encode(launcher, &mel, frames)?;
        launcher.run(Copy {
            src: speaker,
            dst: staged.speaker.view(),
        })?;
        if !planned.in_context {
            return Ok(());
        }
        let wav = self.wav_input.slice(0, planned.samples);
        launcher.run(Copy {
            src: staged.wav.slice(0, wav.len),
            dst: wav.clone(),
        })?;
        let codes = self.codec.encode(launcher, &wav, planned.samples)?;
        launcher.run(Copy {
            dst: staged.codes.slice(0, codes.len),
            src: codes,
        })
    }

    fn result(&self, stage: Stage, planned: Planned) -> laneway_device::Result<Reference> {
        let staged = &self.stages[stage.0];
        let mut speaker = vec![0.0f32; staged.speaker.len()];
        self.device
            .host_read(&staged.speaker.view(), bytemuck::cast_slice_mut(&mut speaker))?;
        let codes = if planned.in_context {
            let mut codes = vec![[0i32; CODES_PER_FRAME]; self.codec.frames(planned.samples)];
            self.device.host_read(
                &staged.codes.slice(0, codes.len() * CODES_PER_FRAME),
                bytemuck::cast_slice_mut(&mut codes),
            )?;
            Some(codes.into())
        } else {
            None
        };
        Ok(Reference {
            speaker: speaker.into(),
            codes,
        })
    }
}

/// Refuse a clip that the encoders cannot use.
///
/// # Errors
/// Names the field and what to send instead.
pub fn check_clip(clip: &ReferenceClip) -> Result<(), RowError> {
    let seconds = |samples: usize| samples as f64 / f64::from(ReferenceClip::SAMPLE_RATE_HZ);
    let refuse = |field: &str, message: String| {
        Err(RowError {
            invalid_argument: true,
            field: Some(field.into()),
            message,
        })
    };
    if clip.sample_rate_hz != ReferenceClip::SAMPLE_RATE_HZ {
        return refuse(
            "reference.sample_rate",
            format!(
                "the reference clip has {} Hz; send {} Hz",
                clip.sample_rate_hz,
                ReferenceClip::SAMPLE_RATE_HZ
            ),
        );
    }
    let len = clip.samples.len();
    if !(MIN_SAMPLES..=MAX_SAMPLES).contains(&len) {
        return refuse(
            "reference.audio",
            format!(
                "the reference clip has {len} samples; send {MIN_SAMPLES} to {MAX_SAMPLES}, {} to {} s of one voice",
                seconds(MIN_SAMPLES),
                seconds(MAX_SAMPLES)
            ),
        );
    }
    if let Some(at) = clip.samples.iter().position(|sample| !sample.is_finite()) {
        return refuse(
            "reference.audio",
            format!(
                "sample {at} of the reference clip is {}; send finite samples from -1 to 1",
                clip.samples[at]
            ),
        );
    }
    let energy: f64 = clip.samples.iter().map(|s| f64::from(*s) * f64::from(*s)).sum();
    if (energy / len as f64).sqrt() < SILENT_RMS {
        return refuse(
            "reference.audio",
            "the reference clip is silent; send a recording of the voice".into(),
        );
    }
    Ok(())
}

impl Node for RefEncoderNode {
    fn name(&self) -> &str {
        REF_ENCODER
    }

    fn max_rows(&self, _walk: WalkId) -> usize {
        1
    }

    fn open(&mut self, _walk: WalkId, payload: &Payload) -> Result<RowState, RowError> {
        let clip = (self.clip_of)(payload).ok_or_else(|| RowError {
            invalid_argument: true,
            field: Some("reference".into()),
            message: "the request has no reference clip; send one, or name a voice".into(),
        })?;
        check_clip(clip)?;
        Ok(Box::new(()))
    }

    fn plan(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        rows: &mut [StepRow<'_>],
        touches: &mut Touches,
    ) -> Result<(), PlanError> {
        self.codec.touch(touches);
        self.stages[stage.0].planned.clear();
        for row in rows {
            let clip = (self.clip_of)(row.payload).expect("open refuses a payload without a clip");
            self.stage(stage, clip)?;
        }
        Ok(())
    }

    fn forward(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        _n_rows: usize,
        launcher: &Launcher<'_>,
    ) -> laneway_device::Result<()> {
        for planned in &self.stages[stage.0].planned {
            self.encode(stage, *planned, launcher)?;
        }
        Ok(())
    }

    fn commit(&mut self, _walk: WalkId, _rows: &mut [StepRow<'_>]) {}

    fn postprocess(
        &mut self,
        _walk: WalkId,
        stage: Stage,
        rows: &mut [Option<StepRow<'_>>],
    ) -> Vec<RowOutcome> {
        let planned = &self.stages[stage.0].planned;
        rows.iter()
            .zip(planned)
            .map(|(row, planned)| {
                if row.is_none() {
                    return RowOutcome::default();
                }
                match self.result(stage, *planned) {
                    Ok(reference) => RowOutcome {
                        result: Some(Arc::new(reference)),
                        ..RowOutcome::default()
                    },
                    Err(error) => RowOutcome {
                        error: Some(RowError {
                            invalid_argument: false,
                            field: None,
                            message: format!("read the encoded reference: {error}"),
                        }),
                        ..RowOutcome::default()
                    },
                }
            })
            .collect()
    }

    fn warm_up(&mut self, launcher: &Launcher<'_>) -> laneway_device::Result<()> {
        let clip = ReferenceClip {
            samples: vec![0.0; MIN_SAMPLES].into(),
            sample_rate_hz: ReferenceClip::SAMPLE_RATE_HZ,
            in_context: true,
        };
        let stage = Stage(0);
        self.stages[stage.0].planned.clear();
        self.stage(stage, &clip)?;
        let mut touches = Touches::none();
        self.codec.touch(&mut touches);
        let launcher = Launcher {
            stream: launcher.stream,
            touches: &touches,
        };
        self.encode(stage, self.stages[stage.0].planned[0], &launcher)
    }
}

#[cfg(test)]
mod tests;
