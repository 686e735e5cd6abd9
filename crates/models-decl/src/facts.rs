//! What a gateway must know of a model to answer for it.

/// Facts of one checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// Registry name, `qwen3_tts`.
    pub model: String,
    /// Size as the checkpoint names it: `0b6`, `1b7`, `nano`.
    pub size: String,
    /// What it is given beside the text.
    pub kind: ModelKind,
    /// Named voices, in order; empty unless the kind has them.
    pub voices: Vec<Voice>,
    /// Languages that a caller may ask for, in order, without dialects and without `auto`.
    pub languages: Vec<String>,
    /// A caller may describe the delivery, or the voice.
    pub supports_instructions: bool,
    /// A caller may give reference speech.
    pub supports_cloning: bool,
    /// Samples a second.
    pub sample_rate_hz: u32,
    /// Samples of a frame: 80 ms of audio.
    pub samples_per_frame: u32,
    /// Longest sequence that it was made for, in positions.
    pub max_positions: u32,
    /// Frames after which the checkpoint's own generation stops.
    pub max_new_tokens: u32,
}

impl ModelFacts {
    /// Frames a second.
    pub fn frame_rate_hz(&self) -> f64 {
        f64::from(self.sample_rate_hz) / f64::from(self.samples_per_frame)
    }
}

/// What a checkpoint is given beside the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ModelKind {
    /// The name of a voice.
    CustomVoice,
    /// A description of a voice.
    VoiceDesign,
    /// Reference speech of a voice.
    Base,
}

/// A named voice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Voice {
    /// Its name.
    pub name: String,
    /// The dialect that it speaks when the language is `auto` or Chinese.
    pub dialect: Option<String>,
}
