//! From a request of Riva's to one of ours. Every field has an effect or is refused by name, and all that can be said
//! here is said at once; what the model has to say is said by `validate`, in Riva's names for the fields.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

use laneway_proto::riva::AudioEncoding;
use laneway_proto::riva::tts::{SynthesizeSpeechRequest, ZeroShotData};
use laneway_proto::{ErrorCode, Failure, samples_to_bytes, v1};

use super::languages;
use crate::facts::ModelFacts;
use crate::sentences;
use crate::validate::{Violations, shortened};

#[cfg(test)]
mod tests;

/// What Riva's clients send for `quality` when nobody chose one.
const CLIENTS_QUALITY: i32 = 20;

/// Keys of `custom_configuration` that have an effect.
const KEYS: [&str; 8] = [
    "instruct",
    "max_frames",
    "repetition_penalty",
    "seed",
    "speed",
    "temperature",
    "top_k",
    "top_p",
];

/// Our names of fields, and Riva's.
const FIELDS: [(&str, &str); 15] = [
    ("format", "encoding"),
    ("instruct", "custom_configuration.instruct"),
    ("language", "language_code"),
    ("max_frames", "custom_configuration.max_frames"),
    ("model", "voice_name"),
    ("reference", "zero_shot_data"),
    ("reference.audio", "zero_shot_data.audio_prompt"),
    ("reference.text", "zero_shot_data.transcript"),
    ("request_id", "id"),
    ("sample_rate", "sample_rate_hz"),
    (
        "sampling.repetition_penalty",
        "custom_configuration.repetition_penalty",
    ),
    ("sampling.temperature", "custom_configuration.temperature"),
    ("sampling.top_p", "custom_configuration.top_p"),
    ("speed", "custom_configuration.speed"),
    ("voice", "voice_name"),
];

/// The same failure, of Riva's fields.
pub(super) fn in_rivas_words(failure: Failure) -> Failure {
    FIELDS
        .iter()
        .fold(failure, |failure, (ours, theirs)| renamed(failure, ours, theirs))
}

/// The same failure, with one field called otherwise.
pub(super) fn renamed(mut failure: Failure, ours: &str, theirs: &str) -> Failure {
    if !failure.violations.iter().any(|violation| violation.field == ours) {
        return failure;
    }
    for violation in &mut failure.violations {
        if violation.field == ours {
            violation.field = theirs.to_owned();
        }
    }
    let lines: Vec<_> = failure
        .violations
        .iter()
        .map(|violation| format!("{}: {}", violation.field, violation.description))
        .collect();
    failure.message = lines.join("; ");
    failure
}

/// A text has something to speak, and is one.
fn check_text(text: &str, violations: &mut Violations) {
    if !sentences::is_speakable(text) {
        let problem = "there is no letter and no digit to speak";
        violations.add(ErrorCode::InvalidText, "text", problem);
    } else if text.trim_start().starts_with("<speak") {
        // Riva reads it; here it would be read out.
        let problem = "SSML is not read; send the words alone";
        violations.add(ErrorCode::InvalidText, "text", problem);
    }
}

/// The text of a further message of one call, which says nothing else.
///
/// # Errors
/// `InvalidArgument` by the name of the field that changed, `InvalidText`.
pub(super) fn next_text(
    request: SynthesizeSpeechRequest,
    settings: &SynthesizeSpeechRequest,
) -> Result<String, Failure> {
    let (now, then) = (&request, settings);
    let changed = [
        ("language_code", now.language_code != then.language_code),
        ("encoding", now.encoding != then.encoding),
        ("sample_rate_hz", now.sample_rate_hz != then.sample_rate_hz),
        ("voice_name", now.voice_name != then.voice_name),
        ("zero_shot_data", now.zero_shot_data != then.zero_shot_data),
        (
            "custom_dictionary",
            now.custom_dictionary != then.custom_dictionary,
        ),
        (
            "custom_configuration",
            now.custom_configuration != then.custom_configuration,
        ),
        (
            "enable_word_time_offsets",
            now.enable_word_time_offsets != then.enable_word_time_offsets,
        ),
        ("id", now.id != then.id),
    ];
    if let Some((field, _)) = changed.iter().find(|(_, changed)| *changed) {
        let problem = "only the text may change within one call; begin another";
        return Err(Failure::of_field(ErrorCode::InvalidArgument, *field, problem));
    }
    let mut violations = Violations::default();
    check_text(&request.text, &mut violations);
    violations.into_result()?;
    Ok(request.text)
}

/// A request of ours that asks for the same.
///
/// # Errors
/// One failure with every violation that can be told without the checks of `validate`.
pub(super) fn converted(
    request: SynthesizeSpeechRequest,
    models: &[Arc<ModelFacts>],
) -> Result<v1::SynthesizeRequest, Failure> {
    let mut violations = Violations::default();
    check_text(&request.text, &mut violations);
    let format = format(request.encoding, "encoding", &mut violations);
    let sample_rate = u32::try_from(request.sample_rate_hz).unwrap_or_else(|_| {
        let problem = format!(
            "{} Hz is no rate; leave it out for the model's own",
            request.sample_rate_hz
        );
        violations.add(ErrorCode::UnsupportedSampleRate, "sample_rate_hz", problem);
        0
    });
    let (model, voice) = voice(
        &request.voice_name,
        &request.language_code,
        models,
        &mut violations,
    );
    let language = match model {
        Some(model) => language(&request.language_code, model, &mut violations),
        None => String::new(),
    };
    if !request.custom_dictionary.is_empty() {
        let problem = "models read letters, not phonemes; spell the word as it is spoken, and leave it out";
        violations.add(ErrorCode::UnsupportedField, "custom_dictionary", problem);
    }
    if request.enable_word_time_offsets {
        let problem = "models tell no times of words; leave it out";
        violations.add(ErrorCode::UnsupportedField, "enable_word_time_offsets", problem);
    }
    let reference = request
        .zero_shot_data
        .and_then(|data| reference(data, &mut violations));
    let mut settings = Settings {
        values: request.custom_configuration,
        violations: &mut violations,
    };
    let mut converted = v1::SynthesizeRequest {
        text: request.text,
        model: model.map(|model| model.name.clone()).unwrap_or_default(),
        voice,
        language,
        format: format.into(),
        sample_rate,
        request_id: request.id.map(|id| id.value).unwrap_or_default(),
        reference,
        instruct: settings.take("instruct").unwrap_or_default(),
        seed: settings.take("seed"),
        max_frames: settings.take("max_frames"),
        speed: settings.take("speed"),
        ..Default::default()
    };
    let sampling = v1::SamplingParams {
        temperature: settings.take("temperature"),
        top_k: settings.take("top_k"),
        top_p: settings.take("top_p"),
        repetition_penalty: settings.take("repetition_penalty"),
        ..Default::default()
    };
    settings.refuse_rest();
    converted.sampling = (sampling != v1::SamplingParams::default()).then_some(sampling);
    violations.into_result()?;
    Ok(converted)
}

/// What is sent for an encoding. `LINEAR_PCM` where it cannot be, which is then a violation.
fn format(encoding: i32, field: &str, violations: &mut Violations) -> v1::AudioFormat {
    match AudioEncoding::try_from(encoding) {
        Ok(AudioEncoding::EncodingUnspecified | AudioEncoding::LinearPcm) => v1::AudioFormat::PcmS16le,
        Ok(AudioEncoding::Oggopus) => v1::AudioFormat::Opus,
        Ok(AudioEncoding::Flac) => v1::AudioFormat::Flac,
        other => {
            let name = other.map_or_else(|_| encoding.to_string(), |known| known.as_str_name().to_owned());
            let problem = format!("{name} is not served; there are: LINEAR_PCM, OGGOPUS, FLAC");
            violations.add(ErrorCode::UnsupportedFormat, field, problem);
            v1::AudioFormat::PcmS16le
        }
    }
}

/// The model and its voice of a name. No model where none is served, or where the name is a violation.
fn voice<'a>(
    name: &str,
    language_code: &str,
    models: &'a [Arc<ModelFacts>],
    violations: &mut Violations,
) -> (Option<&'a ModelFacts>, String) {
    if name.is_empty() {
        // Riva's clients need not name one: it is then the first that speaks the language.
        let speaks = |model: &&Arc<ModelFacts>| {
            is_automatic(language_code) || languages::language(language_code, model).is_some()
        };
        let Some(model) = models.iter().find(speaks).or(models.first()) else {
            return (None, String::new());
        };
        let first = model.preset_voices().next().map(|voice| voice.name.clone());
        return (Some(model), first.unwrap_or_default());
    }
    let of_model = models.iter().find_map(|model| {
        let rest = name.strip_prefix(&model.name)?;
        let voice = rest.strip_prefix('.').or(rest.is_empty().then_some(""))?;
        // A model's name alone is enough where it has no voices; elsewhere it may be a voice's too.
        (model.preset_voices().next().is_none() || !voice.is_empty()).then_some((model, voice))
    });
    if let Some((model, voice)) = of_model {
        return (Some(model), voice.to_owned());
    }
    let has = |model: &&Arc<ModelFacts>| {
        let mut voices = model.voices.iter();
        voices.any(|voice| voice.is_called(name))
    };
    let having: Vec<_> = models.iter().filter(has).collect();
    match having[..] {
        [model] => (Some(model), name.to_owned()),
        [] if models.is_empty() => (None, String::new()),
        [] => {
            let all: Vec<_> = models.iter().flat_map(|model| full_names(model)).collect();
            let problem = format!("no voice \"{}\"; there are: {}", shortened(name), all.join(", "));
            violations.add(ErrorCode::UnknownVoice, "voice_name", problem);
            (None, String::new())
        }
        _ => {
            let all: Vec<_> = having
                .iter()
                .map(|model| format!("{}.{name}", model.name))
                .collect();
            let problem = format!("several models have that voice; write one of: {}", all.join(", "));
            violations.add(ErrorCode::InvalidArgument, "voice_name", problem);
            (None, String::new())
        }
    }
}

fn full_names(model: &ModelFacts) -> Vec<String> {
    let full = |voice: &crate::facts::Voice| format!("{}.{}", model.name, voice.name);
    let alone = model.preset_voices().next().is_none().then(|| model.name.clone());
    alone.into_iter().chain(model.voices.iter().map(full)).collect()
}

fn is_automatic(language_code: &str) -> bool {
    language_code.is_empty() || language_code.eq_ignore_ascii_case("auto")
}

fn language(code: &str, model: &ModelFacts, violations: &mut Violations) -> String {
    if is_automatic(code) {
        return String::new();
    }
    languages::language(code, model).unwrap_or_else(|| {
        let codes = languages::codes(model).join(", ");
        let problem = format!("no language \"{}\"; there are: {codes}, auto", shortened(code));
        violations.add(ErrorCode::UnknownLanguage, "language_code", problem);
        String::new()
    })
}

fn reference(data: ZeroShotData, violations: &mut Violations) -> Option<v1::ReferenceClip> {
    if data.quality != 0 && data.quality != CLIENTS_QUALITY {
        let problem = format!("there are no levels to choose from; leave it out, or at {CLIENTS_QUALITY}");
        violations.add(ErrorCode::UnsupportedField, "zero_shot_data.quality", problem);
    }
    let linear = [AudioEncoding::EncodingUnspecified, AudioEncoding::LinearPcm];
    if !AudioEncoding::try_from(data.encoding).is_ok_and(|encoding| linear.contains(&encoding)) {
        let problem = "a prompt is a WAV file or raw LINEAR_PCM";
        violations.add(ErrorCode::UnsupportedFormat, "zero_shot_data.encoding", problem);
        return None;
    }
    let rate = u32::try_from(data.sample_rate_hz).unwrap_or_default();
    let is_wav = data.audio_prompt.starts_with(b"RIFF");
    let stated = data
        .audio_prompt
        .get(24..28)
        .and_then(|bytes| bytes.try_into().ok());
    let problem = match (is_wav, rate, stated.map(u32::from_le_bytes)) {
        (true, rate, Some(stated)) if rate != 0 && rate != stated => {
            format!("{rate} Hz, and the WAV file says {stated} Hz; leave it out")
        }
        (false, 0, _) => "raw samples need their rate; or send a WAV file".to_owned(),
        (false, ..) if !data.audio_prompt.len().is_multiple_of(2) => {
            let problem = "half a sample is left over; LINEAR_PCM has 16 bits";
            violations.add(ErrorCode::InvalidArgument, "zero_shot_data.audio_prompt", problem);
            return None;
        }
        (is_wav, ..) => {
            let audio = if is_wav {
                data.audio_prompt
            } else {
                let samples = data.audio_prompt.chunks_exact(2);
                let samples =
                    samples.map(|pair| f32::from(i16::from_le_bytes([pair[0], pair[1]])) / 32_768.0);
                samples_to_bytes(&samples.collect::<Vec<_>>())
            };
            return Some(v1::ReferenceClip {
                audio,
                sample_rate: if is_wav { 0 } else { rate },
                text: data.transcript,
            });
        }
    };
    violations.add(
        ErrorCode::UnsupportedSampleRate,
        "zero_shot_data.sample_rate_hz",
        problem,
    );
    None
}

/// `custom_configuration`, taken key by key.
struct Settings<'a> {
    values: BTreeMap<String, String>,
    violations: &'a mut Violations,
}

impl Settings<'_> {
    fn take<T: FromStr>(&mut self, key: &str) -> Option<T> {
        let value = self.values.remove(key)?;
        let parsed = value.trim().parse().ok();
        if parsed.is_none() {
            let problem = format!("\"{}\" cannot be read as a value of it", shortened(&value));
            let field = format!("custom_configuration.{key}");
            self.violations.add(ErrorCode::InvalidArgument, &field, problem);
        }
        parsed
    }

    fn refuse_rest(self) {
        for key in self.values.keys() {
            let problem = format!("no key \"{}\"; there are: {}", shortened(key), KEYS.join(", "));
            self.violations
                .add(ErrorCode::UnsupportedField, "custom_configuration", problem);
        }
    }
}
