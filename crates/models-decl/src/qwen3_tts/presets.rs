//! Configurations of the released checkpoints. They describe true sizes for random weights, and for a
//! repository that is not downloaded yet.

use std::path::PathBuf;

use super::config::{Configs, FILES};
use crate::DeclareError;

/// One released checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// What `model_config` says.
    pub name: &'static str,
    /// Repository of the checkpoint.
    pub repository: &'static str,
    /// Its files, in the order of [`FILES`].
    pub files: [&'static str; 3],
}

macro_rules! preset {
    ($name:literal, $repository:literal) => {
        Preset {
            name: $name,
            repository: $repository,
            files: [
                include_str!(concat!("../../presets/", $name, "/config.json")),
                include_str!(concat!("../../presets/", $name, "/generation_config.json")),
                include_str!(concat!("../../presets/", $name, "/speech_tokenizer/config.json")),
            ],
        }
    };
}

/// Every preset.
pub const PRESETS: &[Preset] = &[
    preset!("0.6b-base", "Qwen/Qwen3-TTS-12Hz-0.6B-Base"),
    preset!("0.6b-custom_voice", "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"),
    preset!("1.7b-base", "Qwen/Qwen3-TTS-12Hz-1.7B-Base"),
    preset!("1.7b-custom_voice", "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"),
    preset!("1.7b-voice_design", "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign"),
];

/// Names of all presets.
pub fn names() -> Vec<&'static str> {
    PRESETS.iter().map(|preset| preset.name).collect()
}

/// The preset of that name.
pub fn named(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

/// The preset of a hub repository.
pub fn of_repository(repository: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.repository == repository)
}

/// Parse a preset.
///
/// # Errors
/// No such preset.
pub fn read(name: &str) -> Result<Configs, DeclareError> {
    let preset = named(name).ok_or_else(|| DeclareError::UnknownPreset {
        model: super::MODEL.to_owned(),
        preset: name.to_owned(),
        known: names(),
    })?;
    let file = |i: usize| (PathBuf::from(name).join(FILES[i]), preset.files[i].to_owned());
    Configs::parse(&file(0), &file(1), &file(2))
}
