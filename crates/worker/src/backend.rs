//! What the services need of a loaded model: the seam between the wire and the engine.
//!
//! [`crate::engine_backend`] is the one that serves; the tests of this crate script another.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use futures::Stream;
use laneway_engine::{EngineStats, Health, OutputEvent, PushError, SubmitError};
use laneway_plan::declaration::ChunkPolicy;
use laneway_proto::v1;
use tokio::sync::watch;

/// What to speak, checked as far as the wire goes. Absent values take the model's own defaults.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Utterance {
    /// At least one letter or digit.
    pub text: String,
    /// A preset voice; empty where the model has none.
    pub voice: String,
    /// Empty: the model decides.
    pub language: String,
    /// How to speak it; empty for none.
    pub instruct: String,
    /// Keys every random draw.
    pub seed: u64,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Windows of this request, in place of the configured policy.
    pub chunk: Option<ChunkPolicy>,
    /// Frame budget, in place of the one from the text's length.
    pub max_frames: Option<u32>,
    /// Where the text goes.
    pub layout: Option<TextLayout>,
    /// A voice to clone.
    pub reference: Option<ReferenceClip>,
}

/// Sampling parameters of a request; an absent one is the model's own.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// 0 is off.
    pub top_k: Option<u32>,
    /// 1 is off.
    pub top_p: Option<f32>,
    /// 1 is off.
    pub repetition_penalty: Option<f32>,
    /// The same for the code predictor.
    pub predictor_temperature: Option<f32>,
    /// 0 is off.
    pub predictor_top_k: Option<u32>,
    /// 1 is off.
    pub predictor_top_p: Option<f32>,
    /// Frames to make, no more and no fewer; for generated weights only.
    pub exact_frames: Option<u32>,
}

/// Where the text goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextLayout {
    /// One token beside each frame.
    Streamed,
    /// Whole, in front of the frames.
    Whole,
}

/// A voice to clone.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceClip {
    /// Mono, at `sample_rate`.
    pub samples: Vec<f32>,
    /// Hz.
    pub sample_rate: u32,
    /// What is said in it; empty: only the speaker's vector is taken from it.
    pub text: String,
}

/// One stream of frames to decode.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DecodeStart {
    /// Windows of this request.
    pub chunk: Option<ChunkPolicy>,
    /// Reference frames, run through the codec's state first with no output.
    pub prime: Vec<Arc<[i32]>>,
    /// Most frames that will come.
    pub max_frames: u32,
}

/// Events of a request, ending with one terminal event. Dropping it kills the request.
pub type Events = Pin<Box<dyn Stream<Item = OutputEvent> + Send>>;

/// A request that the engine took.
pub struct Running {
    /// Frame budget that it runs under.
    pub max_frames: u32,
    /// Positions of its prompt; 0 where it has none.
    pub prompt_positions: u32,
    /// What it sends.
    pub events: Events,
}

impl Running {
    /// What its caller is told when its turn came.
    pub(crate) fn started(&self) -> v1::WorkerStarted {
        v1::WorkerStarted {
            max_frames: self.max_frames,
            prompt_positions: self.prompt_positions,
        }
    }
}

/// How strongly a request is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strength {
    /// What was made is flushed.
    Stop,
    /// Now.
    Kill,
}

/// Shape and range of the codes that a stream of frames may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameShape {
    /// Codes of a frame.
    pub words: u32,
    /// Codes are below this.
    pub codebook_size: u32,
}

/// A loaded model behind a running engine.
pub trait Backend: Send + Sync + 'static {
    /// What it can do, as gateways are told.
    fn facts(&self) -> v1::ModelFacts;

    /// Frames that [`Backend::push_frames`] takes.
    fn frame_shape(&self) -> FrameShape;

    /// Build the prompt and submit it. Blocks for as long as tokenising takes: not for async threads.
    ///
    /// # Errors
    /// What the engine refuses, with the field when the request is at fault.
    fn synthesize(
        &self,
        id: &str,
        utterance: Utterance,
        deadline: Option<Instant>,
    ) -> Result<Running, SubmitError>;

    /// Submit a stream whose frames come from another worker.
    ///
    /// # Errors
    /// What the engine refuses.
    fn decode(&self, id: &str, start: DecodeStart, deadline: Option<Instant>)
    -> Result<Running, SubmitError>;

    /// Hand over frames of a [`Backend::decode`] stream, in order.
    ///
    /// # Errors
    /// [`PushError::Full`] is backpressure: nothing was taken.
    fn push_frames(&self, id: &str, frames: &[Arc<[i32]>]) -> Result<(), PushError>;

    /// No more frames come.
    ///
    /// # Errors
    /// There is no such stream.
    fn end_frames(&self, id: &str) -> Result<(), PushError>;

    /// End a running request; false when none has that id.
    fn cancel(&self, id: &str, strength: Strength) -> bool;

    /// Numbers as of the engine's last turn.
    fn stats(&self) -> EngineStats;

    /// Whether it can serve, now and whenever that changes.
    fn health(&self) -> watch::Receiver<Health>;
}
