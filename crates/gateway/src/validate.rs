//! From the request as sent to a request that can run. Every field has an effect or is refused by name, and all
//! violations are answered at once.

use std::fmt::Display;
use std::sync::Arc;

use laneway_audio::{AudioSpec, Clip, ClipLimits, Encoding, SPEED_RANGE, read_raw_f32, read_wav};
use laneway_proto::{ErrorCode, Failure, RequestId, Violation, samples_to_bytes, v1};

use crate::encode::{FORMATS, SAMPLE_RATES};
use crate::facts::ModelFacts;
use crate::sentences;

#[cfg(test)]
mod tests;

/// Longest ramp of a chunk policy.
const MAX_RAMP: usize = 64;

/// A request that can run.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) id: RequestId,
    pub(crate) model: Arc<ModelFacts>,
    pub(crate) audio: AudioSpec,
    /// What the worker is sent.
    pub(crate) wire: v1::WorkerSynthesizeRequest,
    /// The text where the model does not take it in one go, for one utterance each; empty otherwise.
    pub(crate) parts: Vec<String>,
}

/// What `text` of a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Text {
    /// All that is spoken.
    Whole,
    /// The first piece, and more comes.
    Piece,
}

/// Longest utterance of a text that is spoken in parts. A model drifts in a long one, so a part is no longer than it
/// needs to be for the melody of a paragraph.
const MAX_PART_CHARS: usize = 400;

/// Characters of one utterance where a text is spoken in parts.
pub(crate) fn part_chars(model: &ModelFacts) -> usize {
    model.max_text_chars.min(MAX_PART_CHARS)
}

/// Violations in the order of the fields. The first one decides the status code.
#[derive(Debug, Default)]
pub(crate) struct Violations(Vec<(ErrorCode, Violation)>);

impl Violations {
    pub(crate) fn add(&mut self, code: ErrorCode, field: &str, description: impl Into<String>) {
        self.0.push((
            code,
            Violation {
                field: field.to_string(),
                description: description.into(),
            },
        ));
    }

    pub(crate) fn into_result(self) -> Result<(), Failure> {
        let Some((code, _)) = self.0.first() else {
            return Ok(());
        };
        let code = *code;
        let violations: Vec<_> = self.0.into_iter().map(|(_, violation)| violation).collect();
        let lines: Vec<_> = violations
            .iter()
            .map(|each| format!("{}: {}", each.field, each.description))
            .collect();
        Err(Failure {
            code,
            message: lines.join("; "),
            violations,
            retry_after: None,
        })
    }
}

/// Check a request against the models that are served, and against the gateway's limit for texts.
///
/// # Errors
/// One failure with every violation; `NoWorker` when nothing is served at all.
pub(crate) fn check(
    request: v1::SynthesizeRequest,
    models: &[Arc<ModelFacts>],
    max_text_chars: usize,
) -> Result<Checked, Failure> {
    check_request(request, models, max_text_chars, Text::Whole)
}

/// The same for a request whose text comes in pieces, of which the first may be in it.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_start(
    request: v1::SynthesizeRequest,
    models: &[Arc<ModelFacts>],
    max_text_chars: usize,
) -> Result<Checked, Failure> {
    check_request(request, models, max_text_chars, Text::Piece)
}

/// Check a piece of text, of which `n_waiting` characters wait already.
///
/// # Errors
/// `InvalidText`, `TextTooLong`.
pub(crate) fn check_piece(piece: &str, n_waiting: usize, max_text_chars: usize) -> Result<(), Failure> {
    let mut violations = Violations::default();
    check_text("text", piece, &mut violations);
    let n_chars = n_waiting + piece.chars().count();
    if n_chars > max_text_chars {
        let problem = format!(
            "{n_chars} characters wait to be spoken, over the limit of {max_text_chars}; send no faster than it is spoken"
        );
        violations.add(ErrorCode::TextTooLong, "text", problem);
    }
    violations.into_result()
}

fn check_request(
    request: v1::SynthesizeRequest,
    models: &[Arc<ModelFacts>],
    max_text_chars: usize,
    text: Text,
) -> Result<Checked, Failure> {
    let mut violations = Violations::default();
    let id = match request.request_id.as_str() {
        "" => Some(random_request_id()),
        chosen => RequestId::new(chosen)
            .map_err(|error| violations.add(ErrorCode::InvalidArgument, "request_id", error.to_string()))
            .ok(),
    };
    check_text("text", &request.text, &mut violations);
    if text == Text::Whole && !sentences::is_speakable(&request.text) {
        let problem = "there is no letter and no digit to speak";
        violations.add(ErrorCode::InvalidText, "text", problem);
    }
    if models.is_empty() {
        violations.into_result()?;
        return Err(
            Failure::new(ErrorCode::NoWorker, "no worker serves at the moment")
                .retry_after(crate::routing::RETRY_AFTER),
        );
    }
    let Some(model) = check_model(&request.model, models, &mut violations) else {
        violations.into_result()?;
        return Err(Failure::internal());
    };
    check_length("text", &request.text, max_text_chars, &mut violations);
    let one_go = text == Text::Piece || request.text.chars().count() <= model.max_text_chars;
    let (voice, registered) = check_voice(&request.voice, &model, &mut violations);
    let language = check_language(&request.language, &model, &mut violations);
    check_instruct(&request.instruct, &model, &mut violations);
    if let Some(sampling) = &request.sampling {
        check_sampling(sampling, &mut violations);
    }
    if let Some(chunk) = &request.chunk {
        check_chunk(chunk, model.max_chunk_frames, &mut violations);
    }
    if let Some(max_frames) = request.max_frames
        && !(1..=model.max_frames).contains(&max_frames)
    {
        let problem = format!(
            "{max_frames} is not between 1 and the cap of {}",
            model.max_frames
        );
        violations.add(ErrorCode::InvalidArgument, "max_frames", problem);
    }
    if let Some(frames) = request
        .sampling
        .as_ref()
        .and_then(|sampling| sampling.exact_frames)
    {
        check_exact_frames(frames, request.max_frames, &model, &mut violations);
        if !one_go {
            let problem = format!(
                "it is for one utterance, and a text of more than {} characters is spoken in parts; leave it out",
                model.max_text_chars
            );
            violations.add(ErrorCode::UnsupportedField, "sampling.exact_frames", problem);
        }
    }
    let audio = check_audio(&request, &model, &mut violations);
    if v1::TextLayout::try_from(request.layout).is_err() {
        let problem = format!(
            "{} is not a layout; there are: 0, streamed (1), whole (2)",
            request.layout
        );
        violations.add(ErrorCode::InvalidArgument, "layout", problem);
    }
    let reference = check_reference(request.reference, registered, &model, &mut violations);

    violations.into_result()?;
    let (Some(id), Some(audio)) = (id, audio) else {
        return Err(Failure::internal());
    };
    let parts = if one_go {
        Vec::new()
    } else {
        sentences::parts(&request.text, part_chars(&model))
    };
    let wire = v1::WorkerSynthesizeRequest {
        request_id: id.to_string(),
        text: request.text,
        voice,
        language,
        instruct: request.instruct,
        seed: request.seed.unwrap_or_else(rand::random),
        sampling: request.sampling,
        chunk: request.chunk,
        max_frames: request.max_frames,
        layout: request.layout,
        reference,
        return_frames: false,
    };
    Ok(Checked {
        id,
        model,
        audio,
        wire,
        parts,
    })
}

/// The model that was asked for, for requests that only name one.
///
/// # Errors
/// `UnknownModel`, listing what is served.
pub(crate) fn find_model(name: &str, models: &[Arc<ModelFacts>]) -> Result<Arc<ModelFacts>, Failure> {
    let mut violations = Violations::default();
    match check_model(name, models, &mut violations) {
        Some(model) => Ok(model),
        None => violations.into_result().and(Err(Failure::internal())),
    }
}

/// An id for a request whose caller chose none.
pub(crate) fn random_request_id() -> RequestId {
    RequestId::new(format!("{:032x}", rand::random::<u128>()))
        .expect("hexadecimal digits are allowed in an id")
}

fn list<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    let values: Vec<_> = values.into_iter().map(|value| value.to_string()).collect();
    if values.is_empty() {
        "none".to_string()
    } else {
        values.join(", ")
    }
}

/// Line breaks and tabs are spoken as pauses; nothing else that cannot be seen belongs into a text.
pub(crate) fn check_text(field: &str, text: &str, violations: &mut Violations) {
    let control = |c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t');
    if let Some((index, c)) = text.chars().enumerate().find(|(_, c)| control(*c)) {
        let problem = format!(
            "character {index} is the control character U+{:04X}; leave it out",
            u32::from(c)
        );
        violations.add(ErrorCode::InvalidText, field, problem);
    }
}

fn check_length(field: &str, text: &str, limit: usize, violations: &mut Violations) {
    let length = text.chars().count();
    if length > limit {
        let problem = format!("{length} characters are over the limit of {limit}; send it in parts");
        violations.add(ErrorCode::TextTooLong, field, problem);
    }
}

fn check_model(
    name: &str,
    models: &[Arc<ModelFacts>],
    violations: &mut Violations,
) -> Option<Arc<ModelFacts>> {
    let names = || list(models.iter().map(|model| &model.name));
    match (name, models) {
        ("", [only]) => Some(only.clone()),
        ("", _) => {
            let problem = format!("several models are served; name one of: {}", names());
            violations.add(ErrorCode::InvalidArgument, "model", problem);
            None
        }
        (name, _) => {
            let found = models.iter().find(|model| model.name == name).cloned();
            if found.is_none() {
                let problem = format!(
                    "no model \"{}\" is served; there are: {}",
                    shortened(name),
                    names()
                );
                violations.add(ErrorCode::UnknownModel, "model", problem);
            }
            found
        }
    }
}

/// The preset voice of that name, for the worker; or the clip of a registered one.
fn check_voice(
    name: &str,
    model: &ModelFacts,
    violations: &mut Violations,
) -> (String, Option<v1::ReferenceClip>) {
    if let Some(voice) = model.voices.iter().find(|voice| voice.is_called(name)) {
        return match &voice.registered {
            Some(registered) => (String::new(), Some((&registered.clip).into())),
            None => (voice.name.clone(), None),
        };
    }
    let has_presets = model.preset_voices().next().is_some();
    let names = || list(model.voices.iter().map(|voice| &voice.name));
    let (code, problem) = match name {
        "" if has_presets => (ErrorCode::InvalidArgument, format!("name one of: {}", names())),
        "" => return Default::default(),
        _ if !has_presets && !model.takes_reference => (
            ErrorCode::UnsupportedField,
            format!("the model \"{}\" has no preset voices; leave it out", model.name),
        ),
        name => (
            ErrorCode::UnknownVoice,
            format!("no voice \"{}\"; there are: {}", shortened(name), names()),
        ),
    };
    violations.add(code, "voice", problem);
    Default::default()
}

/// The model's own spelling, or empty for automatic.
fn check_language(name: &str, model: &ModelFacts, violations: &mut Violations) -> String {
    if name.is_empty() || name.eq_ignore_ascii_case("auto") {
        return String::new();
    }
    match model
        .languages
        .iter()
        .find(|language| language.eq_ignore_ascii_case(name))
    {
        Some(language) => language.clone(),
        None => {
            let languages = list(model.languages.iter().map(String::as_str).chain(["auto"]));
            let problem = format!("no language \"{}\"; there are: {languages}", shortened(name));
            violations.add(ErrorCode::UnknownLanguage, "language", problem);
            String::new()
        }
    }
}

fn check_instruct(instruct: &str, model: &ModelFacts, violations: &mut Violations) {
    if instruct.is_empty() {
        if model.needs_instruct {
            let problem = format!(
                "the model \"{}\" takes its voice from it; describe one",
                model.name
            );
            violations.add(ErrorCode::InvalidArgument, "instruct", problem);
        }
        return;
    }
    if !model.takes_instruct {
        let problem = format!("the model \"{}\" does not take it; leave it out", model.name);
        violations.add(ErrorCode::UnsupportedField, "instruct", problem);
        return;
    }
    check_text("instruct", instruct, violations);
    check_length("instruct", instruct, model.max_instruct_chars, violations);
}

fn check_sampling(sampling: &v1::SamplingParams, violations: &mut Violations) {
    let mut range = |field, value: Option<f32>, least: f32, above: bool, most: f32| {
        let Some(value) = value else { return };
        let enough = if above { value > least } else { value >= least };
        // A NaN compares as neither.
        if !(enough && value <= most) {
            let bracket = if above { '(' } else { '[' };
            let problem = format!("{value} is not in {bracket}{least}, {most}]");
            violations.add(ErrorCode::InvalidArgument, field, problem);
        }
    };
    range("sampling.temperature", sampling.temperature, 0.0, false, 5.0);
    range("sampling.top_p", sampling.top_p, 0.0, true, 1.0);
    range(
        "sampling.repetition_penalty",
        sampling.repetition_penalty,
        1.0,
        false,
        10.0,
    );
    range(
        "sampling.predictor_temperature",
        sampling.predictor_temperature,
        0.0,
        false,
        5.0,
    );
    range(
        "sampling.predictor_top_p",
        sampling.predictor_top_p,
        0.0,
        true,
        1.0,
    );
}

fn check_exact_frames(frames: u32, max_frames: Option<u32>, model: &ModelFacts, violations: &mut Violations) {
    let field = "sampling.exact_frames";
    if !model.takes_exact_frames {
        let problem = format!(
            "the model \"{}\" has trained weights and ends by itself; leave it out",
            model.name
        );
        violations.add(ErrorCode::UnsupportedField, field, problem);
    } else if !(1..=model.max_frames).contains(&frames) {
        let problem = format!("{frames} is not between 1 and the cap of {}", model.max_frames);
        violations.add(ErrorCode::InvalidArgument, field, problem);
    } else if max_frames.is_some() {
        let problem = "it says how many frames there are; leave max_frames out";
        violations.add(ErrorCode::InvalidArgument, field, problem);
    }
}

fn check_chunk(chunk: &v1::ChunkPolicy, widest: u32, violations: &mut Violations) {
    let named = [
        ("chunk.first", &[chunk.first][..]),
        ("chunk.ramp", &chunk.ramp),
        ("chunk.steady", &[chunk.steady]),
    ];
    for (field, windows) in named {
        if let Some(window) = windows.iter().find(|window| !(1..=widest).contains(*window)) {
            let problem = format!("a window of {window} frames is not between 1 and {widest}");
            violations.add(ErrorCode::InvalidArgument, field, problem);
        }
    }
    if chunk.ramp.len() > MAX_RAMP {
        let problem = format!("{} windows are more than {MAX_RAMP}", chunk.ramp.len());
        violations.add(ErrorCode::InvalidArgument, "chunk.ramp", problem);
    }
}

/// How the audio is sent: format, sample rate and speed.
fn check_audio(
    request: &v1::SynthesizeRequest,
    model: &ModelFacts,
    violations: &mut Violations,
) -> Option<AudioSpec> {
    let encoding = check_format(request.format, violations);
    let sample_rate = match request.sample_rate {
        0 => model.sample_rate,
        chosen => chosen,
    };
    let carried = |rate: u32| encoding.is_none_or(|encoding| encoding.carries(rate));
    let served = |rate: &u32| (SAMPLE_RATES.contains(rate) || *rate == model.sample_rate) && carried(*rate);
    if !served(&sample_rate) {
        let mut rates = SAMPLE_RATES.to_vec();
        rates.push(model.sample_rate);
        rates.retain(served);
        rates.sort_unstable();
        rates.dedup();
        let problem = format!("{sample_rate} Hz is not served; there are: {}", list(rates));
        violations.add(ErrorCode::UnsupportedSampleRate, "sample_rate", problem);
    }
    let speed = request.speed.unwrap_or(1.0);
    if !SPEED_RANGE.contains(&speed) {
        let problem = format!(
            "{speed} is not in [{}, {}]",
            SPEED_RANGE.start(),
            SPEED_RANGE.end()
        );
        violations.add(ErrorCode::InvalidArgument, "speed", problem);
    }
    Some(AudioSpec {
        encoding: encoding?,
        sample_rate,
        speed,
    })
}

fn check_format(format: i32, violations: &mut Violations) -> Option<Encoding> {
    let wanted = match v1::AudioFormat::try_from(format) {
        Ok(v1::AudioFormat::Unspecified) => Ok(v1::AudioFormat::PcmS16le),
        other => other,
    };
    let found = FORMATS.iter().find(|(each, _)| Ok(*each) == wanted);
    if found.is_none() {
        let names = list(FORMATS.iter().map(|(each, _)| each.name()));
        let problem = format!("{format} is not served; there are: {names}");
        violations.add(ErrorCode::UnsupportedFormat, "format", problem);
    }
    found.map(|(_, encoding)| *encoding)
}

fn check_reference(
    reference: Option<v1::ReferenceClip>,
    registered: Option<v1::ReferenceClip>,
    model: &ModelFacts,
    violations: &mut Violations,
) -> Option<v1::ReferenceClip> {
    let reference = match (reference, registered) {
        (None, Some(registered)) => return Some(registered),
        (None, None) if !model.takes_reference => return None,
        (None, None) => {
            let problem = format!(
                "the model \"{}\" clones a voice; send a clip of it, or name a registered one as `voice`",
                model.name
            );
            violations.add(ErrorCode::InvalidArgument, "reference", problem);
            return None;
        }
        (Some(_), Some(_)) => {
            let problem = "`voice` names a registered one, which has a clip; leave one of them out";
            violations.add(ErrorCode::InvalidArgument, "reference", problem);
            return None;
        }
        (Some(_), None) if !model.takes_reference => {
            let problem = format!("the model \"{}\" does not clone voices; leave it out", model.name);
            violations.add(ErrorCode::UnsupportedField, "reference", problem);
            return None;
        }
        (Some(reference), None) => reference,
    };
    let (clip, text) = read_reference(reference, "reference", model, violations)?;
    Some(v1::ReferenceClip {
        audio: samples_to_bytes(&clip.samples),
        sample_rate: clip.sample_rate,
        text,
    })
}

/// The clip in `field` and what is said in it, if it is one that the model takes.
pub(crate) fn read_reference(
    reference: v1::ReferenceClip,
    field: &str,
    model: &ModelFacts,
    violations: &mut Violations,
) -> Option<(Clip, String)> {
    let text_field = format!("{field}.text");
    check_text(&text_field, &reference.text, violations);
    check_length(&text_field, &reference.text, model.max_text_chars, violations);
    let limits = ClipLimits {
        max_ms: model.max_reference_ms,
    };
    let clip = match reference.sample_rate {
        0 => read_wav(&reference.audio, limits),
        rate => read_raw_f32(&reference.audio, rate, limits),
    };
    let audio_field = format!("{field}.audio");
    match clip {
        Ok(clip) if clip.sample_rate != model.sample_rate => {
            let problem = format!(
                "a clip of {} Hz is not resampled yet; send {} Hz",
                clip.sample_rate, model.sample_rate
            );
            violations.add(ErrorCode::UnsupportedSampleRate, &audio_field, problem);
            None
        }
        Ok(clip) => Some((clip, reference.text)),
        Err(error) => {
            violations.add(ErrorCode::InvalidArgument, &audio_field, error.to_string());
            None
        }
    }
}

/// A caller's own word as it may appear in an answer.
pub(crate) fn shortened(word: &str) -> String {
    word.chars()
        .take(64)
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}
